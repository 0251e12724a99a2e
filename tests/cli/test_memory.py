"""`verl-profiler memory` on runs: what is known is said, what is not known too."""

import json
from pathlib import Path

from verl_profiler.cli import main
from verl_profiler.views.memory_text import memory_text, size_change

DATA = Path(__file__).parent.parent / "data"
REHEARSED = str(DATA / "rehearsal_run.tar.gz")


def test_a_run_without_readings_still_tells_the_time_in_sleep_and_wake(capsys):
    """It was recorded before memory was read around releases."""
    status = main(["memory", REHEARSED, "--no-cache"])
    out = capsys.readouterr().out

    assert 0 == status
    assert out.startswith("  The memory freed by releases is unknown")
    assert "kv_cache, weights" in out
    assert "time in sleep and wake" in out
    assert "not measured" in out


def test_json_has_what_the_text_is_made_of(capsys):
    """Tables by name, findings with slugs, problems."""
    main(["memory", REHEARSED, "--json", "--no-cache"])
    content = json.loads(capsys.readouterr().out)

    assert {"format", "runs", "findings", "tables", "left_out", "problems"} == set(content)
    assert {"memory_timeline", "sleep_times", "release_effects"} == set(content["tables"])
    assert ["not-measured"] == [row["slug"] for row in content["findings"]]


def test_steps_narrow_it(capsys):
    """A step that is not there is named with those that are."""
    main(["memory", REHEARSED, "--step", "2", "--json", "--no-cache"])
    content = json.loads(capsys.readouterr().out)

    assert [2] == [row["step"] for row in content["tables"]["sleep_times"]]
    assert 2 == main(["memory", REHEARSED, "--step", "77", "--no-cache"])
    assert "step 77 is not in this run" in capsys.readouterr().err


def test_of_many_steps_the_fullest_reading_of_each_phase_is_shown():
    """A table of a thousand steps helps nobody; --json has them all."""
    row = {
        "run": "r",
        "phase": "gen",
        "place": 1,
        "role": "actor",
        "readings": 1,
        "total_bytes": 100,
        "lowest_used_bytes": 1,
        "reserved_bytes": None,
        "fullest": "actor_0",
        "at": None,
        "rss_bytes": 5,
        "host_used_bytes": 9,
    }
    rows = [
        {**row, "step": step, "used_bytes": step, "used_share": step / 100} for step in range(1, 41)
    ]
    tables = {"release_effects": [], "sleep_times": [], "memory_timeline": rows}
    text = memory_text({"runs": ["r"], "findings": [], "tables": tables, "problems": []})

    assert "of 40 steps together" in text
    assert ["40"] == [line.split()[0] for line in text.splitlines() if "gen" in line]


def test_changes_have_a_sign():
    """So that a release is not taken for a resume."""
    assert ["+1.5 GiB", "-20.0 MiB", "+0 B", "-"] == [
        size_change(value) for value in (3 << 29, -20 << 20, 0, None)
    ]
