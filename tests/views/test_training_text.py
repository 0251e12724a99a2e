"""Devices, prices and tokens as text, against sums by hand."""

import pytest
from cached_runs import REHEARSED

from verl_profiler.cli import main
from verl_profiler.reading.reader import load
from verl_profiler.views.sections import document
from verl_profiler.views.training_text import (
    device_line,
    device_text,
    efficiency_text,
    money,
    price_sentence,
    price_sentences,
)


def use(phase, covered_s, idle_s, *, step=1, device=0, energy_j=None):
    """A row of `device_use`."""
    return {
        "run": "r",
        "step": step,
        "phase": phase,
        "host": "one",
        "device": device,
        "covered_s": covered_s,
        "idle_s": idle_s,
        "energy_j": energy_j,
    }


def efficiency(step, duration_s, tokens, *, mfu=None):
    """A row of `phase_efficiency` of an update."""
    return {
        "run": "r",
        "step": step,
        "phase": "update_actor",
        "duration_s": duration_s,
        "tokens": tokens,
        "sequences": 10,
        "mfu": mfu,
        "s_per_1k_tokens": duration_s / tokens * 1000,
    }


@pytest.mark.parametrize(
    ("device_s", "price", "expected"),
    [
        (3600, 2.5, "2.50"),
        (36_000_000, 2.5, "25,000.00"),
        (36, 2.5, "0.025"),
        (0.001, 2.5, "<0.0001"),
        (0, 2.5, "0.00"),
    ],
)
def test_money_has_the_digits_that_count(device_s, price, expected):
    """Per GPU-hour."""
    assert expected == money(device_s, price)


def test_idle_devices_in_a_line():
    """10 of 40 s of two devices; what is small is left out."""
    rows = [use("gen", 10, 6, device=device) for device in (0, 1)]
    rows += [use("update_actor", 10, 1, device=device) for device in (0, 1)]
    rows += [use("adv", 0.1, 0.1), use("init", 900, 900, step=0)]

    assert (
        "2 devices sampled: idle 35 % of the time (gen 85 %, update_actor 14 % of that)"
        == device_line(rows)
    )
    assert "" == device_line([])
    assert "" == device_line([use("gen", 10, None)])


def test_devices_by_phase_with_their_price():
    """Two steps; 1,800 s idle of 7,200 s, so a quarter of an hour per step."""
    rows = [use("gen", 3600, 900, step=step, energy_j=360_000) for step in (1, 2)]
    rows.append(use("init", 900, 900, step=0))

    lines = device_text(rows, 4.0).splitlines()

    assert "1 device, all together, per step" in lines[0]
    assert ["gen", "60 min 0 s", "75 %", "15 min 0 s", "100 W", "360,000 J", "1.00"] == [
        word.strip() for word in lines[2].split("  ") if word.strip()
    ]
    assert "cost" not in device_text(rows)
    assert "" == device_text([])


def test_the_price_of_a_step():
    """Two steps of one device-hour each, three quarters useful."""
    ledger = [
        {"run": "r", "step": step, "account": account, "device_s": device_s}
        for step in (1, 2)
        for account, device_s in (("training", 1800), ("generating", 900), ("rollout_idle", 900))
    ]

    assert (
        "at 2 per GPU-hour: 2.00 per step, of which 0.50 neither training nor consumed generation"
        == price_sentence(ledger, [], 2.0)
    )
    assert price_sentence(
        ledger,
        [use("gen", 9, 450, step=step) for step in (1, 2)] + [use("init", 9, 9, step=0)],
        2.0,
    ).endswith(", and 0.25 idle by the devices' drivers")
    found = {"bubble_ledger": ledger, "device_use": []}
    assert ["At 2 per GPU-hour: 2.00"] == [text[:23] for text in price_sentences(found, 2.0)]
    assert [] == price_sentences(found, None)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(10, 1000)] * 6, None),
        ([(10, 1000)] * 2 + [(11, 1100)] * 2 + [(13, 1300)] * 2, "more tokens, not a slower phase"),
        ([(10, 1000)] * 2 + [(11, 1000)] * 2 + [(13, 1000)] * 2, "a slower phase"),
        ([(10, 1000)] * 3 + [(20, 1300)] * 3, "a slower phase, and more tokens"),
        ([(10, 1000), (20, 2000)], None),
    ],
)
def test_a_phase_that_grows_is_explained(steps, expected):
    """By its tokens; not of few steps."""
    rows = [efficiency(number, *each) for number, each in enumerate(steps, 1)]

    sentences = [line for line in efficiency_text(rows).splitlines() if "grew" in line]

    assert (expected is not None) == bool(sentences)
    if expected is not None:
        assert f"the steps: {expected} (" in sentences[0]


def test_mfu_is_shown_where_verl_has_it():
    """Weighted by time: 1 s at 20 %, 3 s at 40 %."""
    assert "35 %" in efficiency_text([efficiency(1, 1, 10, mfu=0.2), efficiency(2, 3, 10, mfu=0.4)])
    assert efficiency_text([efficiency(1, 1, 10)]).splitlines()[2].endswith("-")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "cheap"])
def test_what_is_no_price_is_refused(text, capsys):
    """With what to give instead."""
    with pytest.raises(SystemExit):
        main(["why", "run", "--gpu-hour-price", text])

    assert "is no price: give a positive number, as 2.5" in capsys.readouterr().err


def test_a_real_run_with_a_price(capsys):
    """A device-second costs 1: each account and the step; in the summary and the report a line more."""
    assert 0 == main(["why", str(REHEARSED), "--gpu-hour-price", "3600"])
    text = capsys.readouterr().out
    assert "at 3600 per GPU-hour: 45." in text
    assert "device time" in text
    assert 0 == main(["summary", str(REHEARSED), "--gpu-hour-price", "2.5"])
    assert "at 2.5 per GPU-hour: 0.03" in capsys.readouterr().out

    with load(REHEARSED) as run:
        sentences = document(run, price=2.5)["sentences"]
    assert sentences[-1].startswith("At 2.5 per GPU-hour: 0.03")
