"""The same metric of one run is the same number wherever it is shown, and that of the raw lines."""

import json
from datetime import datetime

import pytest
from cached_runs import REHEARSED, SMALL

from verl_profiler.__main__ import main
from verl_profiler.analysis.engine import token_rates
from verl_profiler.analysis.steps import step_durations
from verl_profiler.reading.reader import load
from verl_profiler.views.sections import document


@pytest.fixture(scope="module", params=["rehearsal_run", "small_run"])
def run(request):
    """The run's directory."""
    return {"rehearsal_run": REHEARSED, "small_run": SMALL}[request.param]


def micros(moment):
    """Return a line's timestamp as microseconds, without floating-point loss."""
    at = datetime.fromisoformat(moment)
    return int(at.timestamp()) * 10**6 + at.microsecond


def lines_of(run):
    """Return every line: step, process, the line, begin and end in microseconds."""
    found = []
    for path in sorted(run.glob("step_*/*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            end = micros(line["timestamp"])
            begin = end - round((line.get("duration_sec") or 0) * 1e6)
            found.append((line.get("step"), path.stem, line, begin, end))
    return found


def truth_of(run):
    """Return the metrics of each finished step, by a few lines over the raw events."""
    lines = lines_of(run)
    truth = {}
    for step, name, line, begin, end in lines:
        if name == "trainer_0" and line["event"] == "step":
            truth[step] = {"step": (end - begin) / 1e6}
    for step, metrics in truth.items():
        own = [each for each in lines if each[0] == step]
        metrics["gen"] = (
            sum(end - begin for _, name, line, begin, end in own
                if name == "trainer_0" and line["event"] == "gen") / 1e6
        )  # fmt: skip
        trained = [
            each for each in own
            if each[1].startswith("worker_") and not (each[2].get("extra") or {}).get("validate")
        ]  # fmt: skip
        requests = [line for _, _, line, _, _ in trained if line["event"] == "request"]
        calls = [each for each in trained if each[2]["event"] == "engine_call"]
        generated = sum(line["extra"]["response_tokens"] for _, _, line, _, _ in calls)
        whole = sum(line["extra"]["response_tokens"] for line in requests)
        at, busy = 0, 0
        for begin, end in sorted((begin, end) for *_, begin, end in calls):
            busy += max(end - max(begin, at), 0)
            at = max(at, end)
        metrics |= {
            "requests": len(requests),
            "generated_tokens": generated,
            "tool_tokens": whole - generated,
            "generated_tokens_per_s": generated / metrics["step"],
            "engine_tokens_per_s": generated / (busy / 1e6),
        }
    return truth


def same(shown, truth, names, digits=None):
    """Compare to the microsecond and millionth, or to so many digits."""

    def cut(rows):
        return {
            step: {
                name: float(f"{row[name]:.{digits}g}") if digits else round(row[name], 6)
                for name in names
            }
            for step, row in rows.items()
            if step in truth
        }

    assert cut(truth) == cut(shown)


def printed(capsys, *arguments):
    assert 0 == main([*map(str, arguments)])
    return json.loads(capsys.readouterr().out)


def by_step(rows, **columns):
    """Return {step: {metric: value}} of the rows of training."""
    return {
        row["step"]: {name: row[column] for name, column in columns.items()}
        for row in rows
        if not row.get("validate")
    }


TOKENS = ("generated_tokens", "tool_tokens")
RATES = ("generated_tokens_per_s", "engine_tokens_per_s")


def test_summary(run, capsys):
    """`summary --json`."""
    tables = printed(capsys, "summary", run, "--json")["tables"]
    truth = truth_of(run)

    steps = by_step(
        tables["step_times"], step="duration_s", gen="gen_s", requests="requests",
        generated_tokens_per_s=RATES[0],
    )  # fmt: skip
    same(steps, truth, ("step", "gen", "requests", RATES[0]))
    same(by_step(tables["request_times"], **{name: name for name in TOKENS}), truth, TOKENS)
    engines = by_step(tables["engine_times"], engine_tokens_per_s=RATES[1])
    same(engines, truth, RATES[1:])


def test_why(run, capsys):
    """`why --json`: the path covers the step, and the replays start from its length."""
    tables = printed(capsys, "why", run, "--json")["tables"]
    truth = truth_of(run)
    paths = {step: {"step": 0.0} for step in truth}
    for row in tables["critical_path"]:
        paths[row["step"]]["step"] += row["duration_s"]

    same(paths, truth, ("step",))
    same(by_step(tables["step_replays"], step="duration_s"), truth, ("step",))


def test_report(run):
    """The document of the page."""
    with load(run) as opened:
        frame = document(opened)["steps"]
    columns = dict(zip(frame["columns"], range(len(frame["columns"])), strict=True))
    rows = [{name: row[place] for name, place in columns.items()} for row in frame["rows"]]
    shown = by_step(
        rows, step="duration_s", gen="gen_s", requests="requests",
        **{name: name for name in (*TOKENS, *RATES)},
    )  # fmt: skip

    # The page keeps six digits.
    same(shown, truth_of(run), ("step", "gen", "requests", *TOKENS, *RATES), digits=6)


def test_diff(run, capsys):
    """`diff --json` of each step against the first; one step has no other statistics."""
    truth = truth_of(run)
    names = ("step", "gen", "requests", *TOKENS, RATES[0])
    shown = {}
    for step in truth:
        content = printed(
            capsys, "diff", f"{run}@1:1", f"{run}@{step}:{step}", "--json", "--all"
        )  # fmt: skip
        found = {row["metric"].removesuffix(".mean"): row["b"] for row in content["metrics"]}
        shown[step] = {name: found[name] for name in names}

    same(shown, truth, names)


def test_plots(run):
    """The tables that the plots draw."""
    truth = truth_of(run)
    with load(run) as opened:
        rates, lengths = token_rates(opened.tables), step_durations(opened.tables)

    shown = by_step(rates, generated_tokens="generated_tokens", **{name: name for name in RATES})
    same(shown, truth, ("generated_tokens", *RATES))
    same(by_step(lengths, step="step_s", gen="gen_s"), truth, ("step", "gen"))


@pytest.mark.parametrize("run", ["rehearsal_run"], indirect=True)
def test_timing(run, capsys, tmp_path):
    """verl's own numbers stay verl's: `timing` repeats what verl logged for each step."""
    logged = {
        step: line["extra"]["metrics"]
        for step, _, line, _, _ in lines_of(run)
        if line["event"] == "metrics" and "timing_s/step" in line["extra"]["metrics"]
    }
    assert logged
    log = tmp_path / "console.log"
    text = "".join(
        f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in metrics.items()) + "\n"
        for step, metrics in logged.items()
    )
    log.write_text(text)
    (shown,) = printed(capsys, "timing", log, "--json")["runs"]

    for row in shown["logged_steps"]:
        metrics = logged.pop(row["step"])
        assert metrics["timing_s/step"] == row["step_s"]
        assert metrics["perf/throughput"] == row["tokens_per_s_per_gpu"]
        assert metrics["perf/total_num_tokens"] == row["total_tokens"]
    assert {} == logged
