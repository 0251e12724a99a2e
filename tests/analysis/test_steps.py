"""How long steps took, what their time went to, the time between them, the trend, and validation."""

import json
import random
from datetime import datetime, timezone

import pytest
from picked import picked

from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.steps import (
    step_durations,
    step_phases,
    step_times,
)
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables


@pytest.fixture
def timer(span):
    return lambda event, begin, end, **more: span(event, begin, end, name="trainer_0", **more)


def test_equal_intervals_do_not_contain_each_other(timer, tables):
    """Two timers around the same code: the one that sorts first is the outer, never both."""
    events = [timer(event, 0, 4) for event in ("step", "gen", "inner")]

    shares = [row["share"] for row in step_phases(tables(events))]

    assert 1.0 == pytest.approx(sum(shares))


def test_a_step_without_an_end_has_no_duration_and_its_phases_no_share(timer, tables):
    """What was seen of it is said apart; there is no whole to take a share of."""
    gen, others = timer("gen", 0, 6), [timer("sample_wait", 1, 5), timer("update_actor", 6, 9)]
    (row,) = step_times(tables([gen, *others]))
    (phase,) = step_phases(tables([gen]))

    assert (False, None, 9.0, None) == picked(row, "finished duration_s seen_s unaccounted_s")
    assert ("gen", 6.0, None) == picked(phase, "phase duration_s share")


def test_stray_events_make_no_step(timer, span, tables):
    """An engine that counts one step ahead does not invent that step."""
    stray = span("engine_request", 11, 12, name="engine_0", step=2)
    events = [timer("step", 0, 10), timer("testing", 10, 12), stray]

    assert [1] == [row["step"] for row in step_times(tables(events))]


@pytest.mark.parametrize(("digits", "duration_digits"), [(6, 6), (3, 6), (3, 3)])
def test_phases_nest_whatever_their_times_are_rounded_to(tmp_path, digits, duration_digits):
    """A phase that begins or ends with its step, a hair outside of it once both are rounded."""
    chance, lines, truth = random.Random(digits * duration_digits), [], {}
    now = 1.8e9

    def write(event, begin, end, number):
        moment = datetime.fromtimestamp(round(end, digits), timezone.utc)
        stamp = moment.isoformat(timespec="microseconds" if digits == 6 else "milliseconds")
        length = round(end - begin, duration_digits)
        lines.append({"timestamp": stamp, "event": event, "duration_sec": length, "step": number})

    for number in range(1, 41):
        begin, lengths = now, [chance.uniform(0.0004, 12) for _ in range(3)]
        for event, length in zip(("gen", "ref", "update_actor"), lengths, strict=True):
            write(event, now, now + length, number)
            if event == "gen":
                write("sample_wait", now, now + length - chance.choice((0, 0.0002)), number)
            now += length
        write("step", begin, now, number)
        truth[number] = lengths
        now += 0.0003
    folder = tmp_path / "run/step_1"
    folder.mkdir(parents=True)
    (folder / "trainer_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    with load(tmp_path / "run", cache=False) as opened:
        rows = step_times(opened.tables)
        phases = opened.rows("SELECT step, phase, parent FROM phases")
        ledger = bubble_ledger(opened.tables)
    near = 10.0**-digits * 8
    assert {row["step"]: row["gen_s"] for row in rows} == pytest.approx(
        {number: lengths[0] for number, lengths in truth.items()}, abs=near
    )
    assert [row["unaccounted_s"] for row in rows] == pytest.approx([0] * 40, abs=near)
    idle = sum(row["device_s"] for row in ledger if row["account"] == "unattributed")
    assert idle == pytest.approx(0.0003 * 39, abs=near * 40)
    parents = {"step": None, "sample_wait": "gen"}
    wrong = [row for row in phases if row["parent"] != parents.get(row["phase"], "step")]
    assert [] == wrong


def test_phases_in_turn_do_not_nest(timer, tables):
    """Shorter than the rounding of times, beside longer ones that begin where they end."""
    events = [timer("step", 0, 0.02), timer("adv", 0, 0.0005)]
    events += [timer("ref", 0.0005, 0.01), timer("values", 0.01, 0.0105)]

    made = tables(events).rows("SELECT phase, parent FROM phases WHERE phase <> 'step'")

    assert {"adv": "step", "ref": "step", "values": "step"} == {
        row["phase"]: row["parent"] for row in made
    }


def test_without_the_trainer_the_gap_is_everything_else(span, tables):
    """Then only the rollout is known, by its requests."""
    events = [
        span("request", 0, 6, request_id="a", step=1),
        span("request", 10, 13, request_id="b", step=2),
    ]

    first, second = step_durations(tables(events))

    assert (False, 6.0, 4.0) == (first["finished"], first["gen_s"], first["outside_gen_s"])
    assert (None, None, None) == (first["step_s"], first["training_s"], first["between_s"])
    assert (3.0, None) == (second["gen_s"], second["outside_gen_s"])


def test_unusual_steps_are_marked(timer, tables):
    """One of twenty took twice as long; the usual spread is not unusual."""
    lengths = [8.5 + number % 3 / 10 for number in range(20)]
    lengths[11] = 18.5
    events = [
        timer("step", 20 * step, 20 * step + length, step=step)
        for step, length in enumerate(lengths, 1)
    ]

    rows = step_durations(tables(events))

    assert [12] == [row["step"] for row in rows if row["unusual"]]


@pytest.mark.parametrize(("probes", "requests"), [(("timer",), None), (("timer", "request"), 0)])
def test_requests_are_unknown_where_the_rollout_family_was_off(timer, probes, requests):
    """Not 0: no process had a probe of requests."""
    header = {"probes": {"installed": {name: ["m:f"] for name in probes}}}
    trainer = {"run": "r", "name": "trainer_0", "role": "trainer", "rank": 0, "header": header}
    tables = Tables.of({"events": [timer("step", 0, 10)], "processes": [trainer]})

    (row,) = step_times(tables)

    assert [requests] * 3 == [
        row[name] for name in ("requests", "unfinished_requests", "validation_requests")
    ]
