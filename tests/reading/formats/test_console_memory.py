"""verl's memory lines in console logs: every form of them, and the steps that they belong to."""

import gzip
import json
import re

import pytest
from picked import picked

from verl_profiler.cli import main
from verl_profiler.reading.formats.console_memory import read_logs, readings

GIB = 1 << 30


def line(at, used, *, prefix="(WorkerDict pid=9) DEBUG:2026-08-01 10:00:00,100:"):
    """A line as verl 0.9 writes it."""
    return (
        f"{prefix}{at}, memory allocated (GB): 1.00, memory reserved (GB): 2.50, "
        f"device memory used/total (GB): {used:.2f}/80.00\n"
    )


def step(number):
    """A line of metrics, which ends a step."""
    return f"(TaskRunner pid=1) step:{number} - timing_s/step:3.0 - perf/time_per_step:3.0\n"


@pytest.fixture
def log(tmp_path):
    """A function that writes a log of these lines."""

    def write(*lines, name="verl_demo.log"):
        path = tmp_path / name
        text = "".join(lines).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return path

    return write


@pytest.mark.parametrize(
    "prefix",
    [
        "(WorkerDict pid=9) DEBUG:2026-08-01 10:00:00,100:",
        "\x1b[36m(WorkerDict pid=9)\x1b[0m DEBUG:2026-08-01 10:00:00,100:",
        "[36m(WorkerDict pid=9, ip=10.0.0.2)[0m ",
        "(WorkerDict pid=9) ",
    ],
)
def test_a_line_is_read_with_every_prefix(log, prefix):
    """Colors, lost colors, nodes, with the logger's own head and without."""
    (row,) = readings(log(line("After resume kv_cache", 66, prefix=prefix), step(3)), [])

    assert ("After resume kv_cache", "WorkerDict_9", "WorkerDict", 3) == picked(
        row, "at name role step"
    )
    assert (GIB, 2.5 * GIB, 66 * GIB, 80 * GIB) == tuple(
        row[f"{what}_bytes"] for what in ("allocated", "reserved", "used", "total")
    )


def test_the_older_form_has_no_device(log):
    """verl before 0.3 printed torch's own counters only."""
    text = "Before update_policy, memory allocated (GB): 1.00, memory reserved (GB): 2.00\n"
    (row,) = readings(log(text), [])

    assert (None, None, 2 * GIB, None) == picked(row, "used_bytes total_bytes reserved_bytes step")


def test_lines_belong_to_the_step_whose_metrics_follow(log):
    """Those after the last metrics to a step that did not end; their order is kept."""
    rows = readings(
        log(line("a", 1), step(0), line("b", 2), line("c", 3), step(1), line("d", 4)), []
    )

    assert [("a", 0), ("b", 1), ("c", 1), ("d", 2)] == [(row["at"], row["step"]) for row in rows]
    times = [row["end_us"] for row in rows]
    assert times == sorted(set(times))


def test_lines_that_ray_left_out_are_said(log):
    """Numbers alone do not make lines different to Ray."""
    problems = []
    text = line("a", 1).rstrip() + " [repeated 7x across cluster]\n"
    readings(log(text), problems)

    assert "left out 6 memory lines" in problems[0]
    assert "RAY_DEDUP_LOGS=0" in problems[0]


def test_several_logs_are_several_runs(log, tmp_path, capsys):
    """Also compressed ones; one without memory lines is named."""
    tables, problems = read_logs(
        [log(line("a", 1)), log(line("a", 2), name="b.log.gz"), log("no\n", name="c.log")]
    )

    assert ["b.log.gz", "verl_demo.log"] == [
        row["run"] for row in tables.rows("SELECT run FROM memory ORDER BY run")
    ]
    assert 1 == main(["memory", str(log(step(1)))])
    assert "VERL_LOGGING_LEVEL=DEBUG" in capsys.readouterr().err
    # They have no steps in common.
    assert 2 == main(["memory", str(log(line("a", 1))), str(tmp_path)])
    assert "(runs-and-logs)" in capsys.readouterr().err
    assert "c.log has no memory line" in problems[0]
    assert "VERL_LOGGING_LEVEL=DEBUG" in problems[0]


def test_a_log_tells_whether_the_saver_works(log, capsys):
    """From the checkpoints around the resumes, in text and in JSON."""
    working = [line("Before resume weights", 10), line("After resume weights", 25), step(1)]
    path = log(*working)
    defeated = log(
        line("Before resume weights", 25), line("After resume weights", 25), name="d.log"
    )

    assert 0 == main(["memory", str(path)])
    shown = capsys.readouterr().out
    assert 0 == main(["memory", str(defeated), "--json"])
    content = json.loads(capsys.readouterr().out)

    assert "!" not in shown
    assert re.search(r"moved +15\.0 GiB +10\.0 GiB +25\.0 GiB", shown)
    assert ["nothing-freed"] == [row["slug"] for row in content["findings"]]
