"""Values of megabytes, or nested deeply, in a few events: every command ends with a bounded output, and the rest is read."""

import json
import shutil
from pathlib import Path

import pytest

from verl_profiler.cli import main

RUN = Path(__file__).parent / "data" / "small_run"
SIZES = (15_000_000, 7_900_000, 900_000)
# json gives up at about 1,000.
DEPTHS = (100, 101, 480, 900, 901, 5000, 5001)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The small run, with events that have a long or deep tool, request, field or name of their own."""
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
    with (run / "step_2" / "worker_0.jsonl").open("a") as stream:
        for depth in DEPTHS:
            for event, key in (("look_up", "own"), ("tool_call", "own"), ("look_up", "tool")):
                deep = (
                    "[" * depth + "]" * depth if depth % 2 else '{"a":' * depth + "1" + "}" * depth
                )
                line = json.dumps(
                    {**like, "step": 2, "event": event, "extra": {**like["extra"], key: 0}}
                )
                stream.write(line.replace(f'"{key}": 0', f'"{key}": {deep}') + "\n")
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
