"""Very many names and very large values: every command ends, its output is bounded, the rest is read."""

import json
import re
import shutil
from pathlib import Path

import pytest

from verl_profiler.cli import main, output

DATA = Path(__file__).parent / "data"
# More than a list of JSON holds here.
COUNT, JSON_ROWS = 1_500, 1_000


@pytest.fixture(autouse=True)
def _short_lists(monkeypatch):
    monkeypatch.setattr(output, "JSON_ROWS", JSON_ROWS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The small run with a name of its own for each event, call, request, key and process more."""
    run = tmp_path_factory.mktemp("large") / "run"
    shutil.copytree(DATA / "small_run", run, ignore=shutil.ignore_patterns(".cache"))
    path = run / "step_1" / "worker_0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    call = next(line for line in lines if line["event"] == "tool_call")
    own = next(line["extra"] for line in lines if line["event"] == "request")
    mine = [line for line in lines if line.get("extra", {}).get("request_id") == own["request_id"]]

    def more():
        for n in range(COUNT):
            failed = {"status": "error", "error": f"Error{n}"} if n % 3 == 0 else {}
            tool = {**call["extra"], "tool": f"tool_{n}", f"key_{n}": f"text {n}", **failed}
            yield {**call, "extra": tool}
            yield {**call, "event": f"own_{n}", "extra": {}}
            if n < COUNT // 10:
                for line in mine:
                    extra = {**line["extra"], "request_id": f"r{n}", "sample": 1000 + n}
                    yield {**line, "extra": extra}
        for size in (1_100_000, 900_000):
            for key in ("tool", "request_id", "own"):
                yield {**call, "extra": {**call["extra"], key: "x" * size}}
            yield {**call, "event": "x" * size}
        # json gives up at about 1,000.
        for depth in (100, 480, 900, 901, 5001):
            for key in ("own", "tool"):
                yield {**call, "extra": {**call["extra"], key: f"@{depth}"}}

    def nested(found):
        return "[" * int(found[1]) + "]" * int(found[1])

    with path.open("a") as stream:
        for line in more():
            stream.write(re.sub(r'"@(\d+)"', nested, json.dumps(line)) + "\n")
    header = json.loads((run / "processes" / "actor_0.json").read_text())
    event = json.loads((run / "step_1" / "actor_0.jsonl").read_text().splitlines()[0])
    for n in range(COUNT // 40):
        name = f"role{n}x_0"
        content = {**header, "name": name, "role": f"role{n}x", "host": f"host-{n}", "pid": n}
        (run / "processes" / f"{name}.json").write_text(json.dumps(content))
        (run / "step_1" / f"{name}.jsonl").write_text(json.dumps(event) + "\n")
    return run


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words",
    [
        "summary RUN",
        "why RUN",
        "requests RUN",
        "report RUN --out OUT/report.html",
        "plot tool_latencies RUN --out OUT/plot.svg",
        "export perfetto RUN --out OUT/run.pftrace",
    ],
)
def test_every_command_ends_with_a_bounded_output(run, tmp_path, capsys, words):
    """Each name was once looked for among all rows of all names."""
    places = {"RUN": str(run), "OUT": str(tmp_path)}
    status = main([places.get(word, word.replace("OUT", str(tmp_path))) for word in words.split()])
    printed = capsys.readouterr()

    assert status == 0, printed.err
    assert len(printed.out) + len(printed.err) < 100_000
    assert ("--out" in words) == any(tmp_path.iterdir())


@pytest.mark.timeout(120)
def test_lists_of_json_are_bounded_and_the_rest_is_counted(run, capsys):
    """It was 46 MB once."""
    assert main(["summary", str(run), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    lengths = {name: len(rows) for name, rows in content["tables"].items()}
    lengths["recorded"] = len(content["recorded"])

    for cut in ("recorded", "tool_latencies"):
        assert lengths[cut] == JSON_ROWS
        assert content["left_out"][cut] >= COUNT - JSON_ROWS
    assert max(lengths.values()) <= JSON_ROWS


@pytest.mark.timeout(120)
def test_diff_leaves_names_out_and_reports_how_many(run, capsys):
    """But for one that a condition asks for, whatever its share of the time."""
    assert main(["diff", str(run), str(run), "--fail-if", "own_7.count > 5"]) == 0
    printed = capsys.readouterr().out

    (left_out,) = [line for line in printed.splitlines() if "were not compared" in line]
    assert int(left_out.split()[0].replace(",", "")) > COUNT - 300
    assert len(printed) < 100_000
    assert "passed: own_7.count at most 5" in printed
