"""Values of megabytes in a few events: every command ends with a bounded output, and the rest is read."""

import json
import shutil
from pathlib import Path

import pytest

from verl_profiler.cli import main

RUN = Path(__file__).parent / "data" / "small_run"
SIZES = (15_000_000, 7_900_000, 900_000)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The small run, with events that have a long tool, request, field or name of their own."""
    run = tmp_path_factory.mktemp("long") / "run"
    shutil.copytree(RUN, run, ignore=shutil.ignore_patterns(".cache"))
    file = run / "step_1" / "worker_0.jsonl"
    like = next(
        line
        for line in map(json.loads, file.read_text().splitlines())
        if line["event"] == "tool_call"
    )
    with file.open("a") as stream:
        for size in SIZES:
            for key in ("tool", "request_id", "own"):
                event = {**like, "extra": {**like["extra"], key: "x" * size}}
                stream.write(json.dumps(event) + "\n")
            stream.write(json.dumps({**like, "event": "x" * size}) + "\n")
    return run


@pytest.mark.parametrize(
    "words",
    [
        "summary RUN --no-cache",
        "why RUN --no-cache",
        "requests RUN",
        "tq RUN",
        "memory RUN",
        "diff RUN RUN",
        "watch RUN --once",
        "report RUN --out OUT/report.html",
        "plot tool_latencies RUN --out OUT/plot.svg",
        "export perfetto RUN --out OUT/run.pftrace",
        "export perfetto RUN --chrome-json --out OUT/run.json",
        "export otlp RUN --out OUT/spans.jsonl",
    ],
)
def test_every_command_ends_with_a_bounded_output(run, tmp_path, capsys, words):
    """Under 100 kB are printed, whatever the names are; files are written."""
    places = {"RUN": str(run), "OUT": str(tmp_path)}
    status = main([places.get(word, word.replace("OUT", str(tmp_path))) for word in words.split()])
    printed = capsys.readouterr()

    assert status == 0, printed.err
    assert len(printed.out) + len(printed.err) < 100_000
    assert ("--out" in words) == any(tmp_path.iterdir())
