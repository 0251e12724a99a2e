"""The export command: one timeline, with the traces of other profilers in it."""

import gzip
import json
import re
import shutil
from pathlib import Path

import nsys_database
import pytest
from cached_runs import SMALL
from commands import command
from views.perfetto_reading import read_trace

from verl_profiler.cli import export, main
from verl_profiler.errors import ReadingError

DATA = Path(__file__).parent.parent / "data"
# Exported by torch 2.13's profiler on a CPU.
TORCH = DATA / "torch_trace.json.gz"


run = command(export, "perfetto")


@pytest.fixture
def folder(tmp_path):
    """A run that may be written to."""
    return shutil.copytree(SMALL, tmp_path / "run", ignore=shutil.ignore_patterns(".cache"))


def test_the_timeline_lies_beside_the_run_and_is_packed_when_its_name_says_so(
    folder, tmp_path, capsys
):
    """Unless it is told where."""
    assert 0 == run(folder)
    assert f"Wrote {folder / 'timeline.pftrace'}\n" in capsys.readouterr().out
    assert 0 == run(folder, "-o", tmp_path / "packed.pftrace.gz")
    plain = read_trace(folder / "timeline.pftrace")
    assert plain.spans == read_trace(tmp_path / "packed.pftrace.gz").spans


def test_steps_narrow_the_timeline(tmp_path):
    """Nothing of another step is written."""
    run(SMALL, "-o", tmp_path / "one.pftrace", "--step", 2)

    steps = [
        span for span in read_trace(tmp_path / "one.pftrace").spans if span.name[:5] == "step "
    ]
    assert ["step 2"] == [span.name for span in steps]
    with pytest.raises(ReadingError, match="step 9 is not in this run"):
        run(SMALL, "-o", tmp_path / "none.pftrace", "--step", "9")
    assert not (tmp_path / "none.pftrace").exists()


def test_a_torch_trace_is_merged_at_its_time_of_day(tmp_path):
    """Every span of it."""
    run(SMALL, "-o", tmp_path / "run.pftrace", "--merge", TORCH)

    content = json.loads(gzip.decompress(TORCH.read_bytes()))
    base = content["baseTimeNanoseconds"]
    reading = read_trace(tmp_path / "run.pftrace")
    merged = [span for span in reading.spans if "torch" in reading.path(span.track)[0]]
    expected = sorted(
        (event["name"], base + round(event["ts"] * 1000))
        for event in content["traceEvents"]
        if event["ph"] == "X"
    )
    for (name, begin_ns), span in zip(
        expected, sorted(merged, key=lambda span: (span.name, span.begin_ns)), strict=True
    ):
        assert name == span.name
        # The file gives times as floating point numbers.
        assert abs(begin_ns - span.begin_ns) <= 1000
    assert [] == reading.faults


def test_a_trace_in_the_run_lies_beside_its_process(folder):
    """Found below `nsight`, recognized by host and pid."""
    header = json.loads((folder / "processes" / "actor_0.json").read_text())
    content = json.loads(gzip.decompress(TORCH.read_bytes()))
    content["host_name"] = header["host"]
    for event in content["traceEvents"]:
        if isinstance(event.get("pid"), int):
            event["pid"] = header["pid"]
    (folder / "nsight").mkdir()
    (folder / "nsight" / "actor.pt.trace.json").write_text(json.dumps(content))
    run(folder)

    reading = read_trace(folder / "timeline.pftrace")
    paths = {reading.path(span.track) for span in reading.spans if span.name == "aten::mm"}
    assert {("actor_0", "torch: actor.pt.trace.json")} == {path[2:4] for path in paths}


def test_a_trace_of_another_year_is_merged_with_a_warning(tmp_path, capsys):
    """730 days before the run; one of its own time has none."""
    content = json.loads(gzip.decompress(TORCH.read_bytes()))
    run(SMALL, "-o", tmp_path / "own.pftrace", "--merge", TORCH)
    assert "WARNING" not in capsys.readouterr().err
    content["baseTimeNanoseconds"] -= 730 * 86_400 * 10**9
    old = tmp_path / "old.pt.trace.json"
    old.write_text(json.dumps(content))
    run(SMALL, "-o", tmp_path / "old.pftrace", "--merge", old)
    printed = capsys.readouterr().err
    assert re.search(r"WARNING: .*old.* lies 7(29|30) days from the run's events", printed)


@pytest.mark.parametrize(
    "command", ["summary", "report", "why", "timing", "requests", "memory", "tq", "stuck", "diff A", "export otlp"]
)  # fmt: skip
def test_a_trace_given_as_a_run_or_log_is_named_as_such(command, tmp_path, capsys):
    """With the command that takes it."""
    torch, nsys = tmp_path / "rank-0.1.pt.trace.json.gz", tmp_path / "worker.sqlite"
    torch.write_bytes(TORCH.read_bytes())
    nsys_database.write(nsys, ranges=[(1, 2, "push", "gen", nsys_database.TID)])
    for trace, name in ((torch, "a trace of torch.profiler"), (nsys, "nsys export")):
        words = [str(trace) if word == "A" else word for word in command.split()]
        assert 2 == main([*words, str(trace)])
        printed = capsys.readouterr().err
        assert f"{name}, not a run or a log" in printed
        assert f"export perfetto RUN --merge {trace}" in printed


def test_an_nsys_export_is_merged(tmp_path):
    """NVTX ranges, kernels and copies; the tables are those of `nsys export --type sqlite`."""
    path = tmp_path / "worker.sqlite"
    base = 1_795_228_400_000_000_000
    nsys_database.write(
        path,
        ranges=[(10, 90, "push", "update_actor", 8), (50, 95, "start", "overlapping", 8)],
        kernels=[(15, 20, 30, "gemm", 8)],
        copies=[(40, 45)],
        epoch_ns=base,
    )
    run(SMALL, "-o", tmp_path / "run.pftrace", "--merge", path)

    reading = read_trace(tmp_path / "run.pftrace")
    spans = {
        (reading.path(span.track)[-1], span.name, span.begin_ns - base, span.end_ns - base)
        for span in reading.spans
        if "nsys" in reading.path(span.track)[0]
    }
    assert {
        ("NVTX of thread 8", "update_actor", 10, 90),
        ("NVTX of thread 8", "overlapping", 50, 95),
        ("GPU 0, stream 7", "gemm", 20, 30),
        ("GPU 0, stream 7", "memcpy", 40, 45),
    } == spans
    assert [] == reading.faults


def test_a_bad_trace_in_the_run_costs_only_itself(folder, capsys):
    """The timeline is written without it."""
    (folder / "nsight").mkdir()
    (folder / "nsight" / "bad.json").write_text("{")
    (folder / "nsight" / "captures.json").write_text('[{"another": "kind"}]')

    assert 0 == run(folder)
    assert 1 == capsys.readouterr().err.count("not merged: ")
    with pytest.raises(ReadingError, match=r"captures\.json") as raised:
        run(folder, "--force", "--merge", folder / "nsight" / "captures.json")
    assert "bad-trace" == raised.value.slug
