"""The same metric of one run is the same number wherever it is shown, and that of the raw lines."""

import functools
import json

import pytest
from cached_runs import REHEARSED

from verl_profiler.__main__ import main
from verl_profiler.analysis.engine import token_rates
from verl_profiler.analysis.requests import request_times
from verl_profiler.analysis.steps import step_durations
from verl_profiler.reading.reader import load
from verl_profiler.views.sections import document


@pytest.fixture
def run():
    """The run's directory."""
    return REHEARSED


@functools.cache
def truth_of(run):
    """Return the metrics of each finished step, from tables that test_raw_lines.py holds to the lines."""
    with load(run) as opened:
        steps, rates = step_durations(opened.tables), token_rates(opened.tables)
        requests = request_times(opened.tables)
    found = by_step(steps, step="step_s", gen="gen_s")
    for rows, columns in ((rates, RATES), (requests, ("requests", *TOKENS))):
        for step, metrics in by_step(rows, **{name: name for name in columns}).items():
            found.get(step, {}).update(metrics)
    return {step: metrics for step, metrics in found.items() if metrics["step"] is not None}


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
