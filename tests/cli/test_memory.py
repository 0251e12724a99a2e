"""`verl-profiler memory` on runs: what is known is said, what is not known too."""

import json
import re

from cached_runs import REHEARSED as PATH

from verl_profiler.cli import main

REHEARSED = str(PATH)


def test_a_run_without_readings_still_tells_the_time_in_sleep_and_wake(capsys):
    """It was recorded before memory was read around releases."""
    status = main(["memory", REHEARSED])
    out = capsys.readouterr().out

    assert 0 == status
    assert out.startswith("  The memory freed by releases is unknown")
    assert "kv_cache, weights" in out
    assert "time in sleep and wake" in out
    assert re.search("memory_release .*unknown", out)


def test_steps_narrow_it(capsys):
    """A step that is not there is named with those that are."""
    main(["memory", REHEARSED, "--step", "2", "--json"])
    content = json.loads(capsys.readouterr().out)

    assert [2] == [row["step"] for row in content["tables"]["sleep_times"]]
    assert 2 == main(["memory", REHEARSED, "--step", "77"])
    assert "step 77 is not in this run" in capsys.readouterr().err
