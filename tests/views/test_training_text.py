"""Devices and tokens as text, against sums by hand."""

from verl_profiler.views.training_text import (
    device_line,
    device_text,
    efficiency_text,
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


def test_devices_by_phase():
    """Two steps; 1,800 s idle of 7,200 s, so 15 minutes per step."""
    rows = [use("gen", 3600, 900, step=step, energy_j=360_000) for step in (1, 2)]
    rows.append(use("init", 900, 900, step=0))

    lines = device_text(rows).splitlines()

    assert "1 device, all together, per step" in lines[0]
    assert ["gen", "60 min 0 s", "75 %", "15 min 0 s", "100", "360,000"] == [
        word.strip() for word in lines[2].split("  ") if word.strip()
    ]
    assert "" == device_text([])


def test_mfu_is_shown_where_verl_has_it():
    """Weighted by time: 1 s at 20 %, 3 s at 40 %."""
    assert "35 %" in efficiency_text([efficiency(1, 1, 10, mfu=0.2), efficiency(2, 3, 10, mfu=0.4)])
    assert "MFU" not in efficiency_text([efficiency(1, 1, 10)])
