"""One quantile of one run is the same number in every command, and numpy's over the raw lines."""

import json

import numpy as np
import pytest
from chart_reading import data_in, words
from recorded import lines_in_order, unpacked

from verl_profiler.__main__ import main
from verl_profiler.analysis.compare.step_metrics import step_metrics
from verl_profiler.analysis.requests import request_percentiles
from verl_profiler.analysis.rollout import rollout_tail
from verl_profiler.analysis.steps import validation_times
from verl_profiler.reading.reader import load
from verl_profiler.units import seconds
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.sections import document
from verl_profiler.views.view import Choice

SHARES = {"p50": 0.5, "p80": 0.8, "p90": 0.9, "p95": 0.95, "p99": 0.99}
# So many values lie, one of them, beyond the quantile.
NEEDED = {"p50": 1, "p80": 5, "p90": 10, "p95": 20, "p99": 100}
MANY = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A recorded run, its first step with so many requests that each quantile has values beyond."""
    folder = unpacked(tmp_path_factory.mktemp("quantiles"))
    path, line = next(each for each in lines_in_order(folder) if is_request(each[1], 1))
    source = np.random.default_rng(7)
    made = json.loads(line)
    with (folder / path).open("a") as file:
        for number in range(MANY):
            length = round(float(source.lognormal(1.0, 0.7)), 6)
            extra = {**made["extra"], "request_id": f"made{number}", "sample": 1_000 + number}
            file.write(json.dumps({**made, "duration_sec": length, "extra": extra}) + "\n")
    return folder


def is_request(line, step):
    line = json.loads(line)
    return (
        line["event"] == "request"
        and line.get("step") == step
        and not (line.get("extra") or {}).get("validate")
    )


def lengths_of(run, step):
    """Return the lengths of a step's training requests, from the raw lines."""
    return [
        json.loads(line)["duration_sec"]
        for _, line in lines_in_order(run)
        if is_request(line, step)
    ]


def truth_of(run, step):
    lengths = lengths_of(run, step)
    return {
        name: np.quantile(lengths, part) if len(lengths) >= NEEDED[name] else None
        for name, part in SHARES.items()
    }


def agree(truth, shown, **limits):
    """Compare those quantiles that are shown; what is too few is None in both."""
    for name, value in shown.items():
        assert (truth[name] is None) == (value is None), name
        if value is not None:
            assert value == pytest.approx(truth[name], **(limits or {"abs": 2e-6})), name


def test_a_quantile_is_the_same_everywhere(run, capsys):
    """Of 120 and more requests all are there; of a step as recorded, those that have values beyond."""
    assert 0 == main(["summary", str(run), "--json"])
    summary = json.loads(capsys.readouterr().out)["tables"]["request_times"]
    with load(run) as opened:
        page = document(opened)["steps"]
        place = page["columns"].index("step")
        for step in (1, 2):
            truth = truth_of(run, step)
            assert (truth["p99"] is None) == (step == 2)
            (row,) = (row for row in summary if row["step"] == step and not row["validate"])
            agree(truth, {name: row[f"{name}_s"] for name in SHARES})
            (row,) = (
                row
                for row in step_metrics(opened, (step, step))
                if row["name"] == "request" and row["step"] == step
            )
            agree(truth, {name: row[name] for name in ("p50", "p90", "p95", "p99")})
            (line,) = (line for line in page["rows"] if line[place] == step)
            of = dict(zip(page["columns"], line, strict=True))
            agree(truth, {name: of[f"{name}_s"] for name in ("p50", "p95", "p99")}, rel=1e-5)
            marks = {
                f"p{row['percentile']:g}": row["duration_s"]
                for row in request_percentiles(opened, (step, step))
                if row["step"] == step
            }
            assert marks.pop("p99.9") is None
            agree(truth, marks)
            (row,) = rollout_tail(opened, (step, step))
            few = {f"p{level}" for level in (80, 95, 99) if row[f"tail{level}_s"] is None}
            assert few == {name for name in ("p80", "p95", "p99") if truth[name] is None}

    for step in (1, 2):
        truth = truth_of(run, step)
        assert 0 == main(["summary", str(run), "--steps", f"{step}:{step}"])
        text = capsys.readouterr().out
        for name in ("p50", "p95", "p99"):
            assert f"{name} {'too few' if truth[name] is None else seconds(truth[name])}" in text


def test_a_plot_draws_no_quantile_of_too_few(run):
    """Neither a mark, nor its text, nor a band of the rollout."""
    choice = Choice(run="r", steps=(2, 2))
    truth = {**truth_of(run, 2), "p99.9": None}
    shown = [name.upper() for name, value in truth.items() if value is not None]
    few = [name.upper() for name, value in truth.items() if value is None]
    with load(run) as opened:
        cdf, tail = (
            VIEWS[name].spec(VIEWS[name].analysis(opened, choice), choice)
            for name in ("request_duration_cdf", "rollout_tail")
        )

    assert "P99" in few
    assert shown == [row["text"].split()[0] for row in data_in(cdf, "text")][::-1]
    notes = words(cdf) + words(tail)
    assert f"requests are too few for {' and '.join(few)}." in notes
    assert "Too few requests in a rollout for the last 1 %." in notes
    assert {"0 to 80 %", "80 to 95 %", "the last 5 %"} == {
        row["part"] for row in data_in(tail, "part")
    }


def test_a_plot_has_the_same_in_its_numbers(run, capsys):
    """The data that a plot writes beside its picture."""
    arguments = ["plot", "request_duration_cdf", str(run), "--steps", "1:1"]
    assert 0 == main([*arguments, "--percentiles", "50,80,95,99", "--json"])
    sheets = json.loads(capsys.readouterr().out)["plots"]["request_duration_cdf"]
    rows = [row for row in sheets["request_percentiles"] if row["step"] == 1]

    truth = truth_of(run, 1)
    agree(truth, {f"p{row['percentile']:g}": row["duration_s"] for row in rows})


def test_validation_is_no_exception(run):
    """Few requests of a validation have no 95th percentile."""
    with load(run) as opened:
        rows = validation_times(opened)

    assert rows
    for row in rows:
        assert (row["p95_s"] is None) == (row["requests"] - row["unfinished"] < 20)
