"""The JSON output of each command, and its JSON Schema."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from analyses import ANALYSES

__all__ = ["FORMATS", "schema", "table_docs"]

# The `format` of commands whose output has changed.
_VERSIONS = {"diff": 2, "memory": 2, "plot": 2, "summary": 2, "why": 2}

_RUNS = ("strings", "Labels of the runs.")
_PROBLEMS = ("strings", "Data-quality warnings.")
_NOTES = (
    "strings",
    "Facts about the runs that limit which analyses apply, such as asynchronous training.",
)
_HEADLINE = (
    "rows",
    (
        "By run: steps (finished), left_out (those left out of means as warm-up), step_mean_s, step_least_s "
        "and step_most_s, useful_share (training and consumed generation without `few_requests`, as a share of "
        "device time; null without it)."
    ),
)
_FINDINGS = ("rows", "Findings, largest gain first: docs/findings.md.")
_TABLES = ("tables", "Rows by table, at most 10,000 of each: see Tables below.")
_ENDED = ("strings", "What ended the trainings, by their logs; empty if these do not show it.")
_LEFT_OUT = ("object", "By table, how many rows were left out; `{}` if none.")

# By command (the part before ":"): type and description of each key.  Keys that end in ? may be absent.
FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "summary": {
        "runs": _RUNS,
        "events": ("integer", "Events read."),
        "recorded": ("strings", "Names of the recorded events, at most 10,000."),
        "headline": _HEADLINE,
        "findings": _FINDINGS,
        "tables": _TABLES,
        "left_out": _LEFT_OUT,
        "notes": _NOTES,
        "problems": _PROBLEMS,
    },
    "summary LOG": {
        "runs": _RUNS,
        "headline": _HEADLINE,
        "findings": _FINDINGS,
        "tables": ("tables", "Rows by table, each with its run: logged_steps, log_phases."),
        "notes": _NOTES,
        "ended": _ENDED,
        "problems": _PROBLEMS,
    },
    "why": {
        "runs": _RUNS,
        "headline": _HEADLINE,
        "findings": _FINDINGS,
        "tables": _TABLES,
        "left_out": _LEFT_OUT,
        "notes": _NOTES,
        "problems": _PROBLEMS,
    },
    "runs": {
        "runs": (
            "rows",
            (
                "One row per run: run, launched, devices, model, batch, versions (texts, empty where not "
                "recorded), steps, step_mean_s, useful_share (as in headline of summary), finding, gain and "
                "recoverable_s of the first finding, and problem, why there are no figures."
            ),
        ),
    },
    "requests": {
        "runs": _RUNS,
        "finished": ("integer", "Finished requests of the selection."),
        "unfinished": ("integer", "Unfinished requests of the selection."),
        "requests": ("rows", "The slowest requests, slowest first: table `request_breakdown`."),
    },
    "requests --request": {
        "request": ("object", "The request: a row of `request_breakdown`."),
        "timeline": ("rows", "Its events: table `request_timeline`."),
    },
    "plot": {
        "runs": _RUNS,
        "steps": ("range or null", "First and last step; null for all."),
        "worker": ("integer or null", "The agent-loop worker's rank; null for all."),
        "validate": ("boolean", "Whether validation is shown instead of training."),
        "plots": ("object", "By plot, its data tables: rows by table."),
        "notes": _NOTES,
        "problems": _PROBLEMS,
    },
    "diff": {
        "runs": (
            "rows",
            (
                "The two sides, A first: name, launches, steps, warm_up (steps left out), stalled (steps of more "
                "than three times the median length), asynchronous, bound (what bounds an asynchronous run)."
            ),
        ),
        "workload": ("strings", "Metrics of the work itself that changed, such as `requests`."),
        "configuration": ("rows", "Settings that differ."),
        "only_in_one": (
            "rows",
            "Metrics that only one side has, with count and seconds per step; at most 10,000.",
        ),
        "only_in_one_left_out": ("integer", "How many more."),
        "left_out": (
            "integer",
            "Metrics that are not compared, because a side has too few values.",
        ),
        "one_run": ("boolean", "Whether both sides are steps of one run."),
        "drift": ("object", "Growth of a drifting step and of its phase per step; `{}` if none."),
        "between_steps_s": ("number or null", "By how much the time between steps is longer in B."),
        "equal_tokens": (
            "object",
            "The change of the step at equal tokens; `{}` where these do not explain it.",
        ),
        "metrics": ("rows", "Each metric with its difference, interval and p: docs/diff.md."),
        "conditions": ("rows", "The conditions of --fail-if and whether they hold."),
    },
    "diff --verify": {
        "finding": ("string", "The finding's name."),
        "culprit_text": ("string or null", "The culprit before the change."),
        "verdict": ("string", "`kept`, `not kept` or `undecided`."),
        "reason": ("string", "Why."),
        "predicted_s": ("number or null", "Predicted gain, seconds per step."),
        "low_s": ("number or null", "Lower end of its interval."),
        "high_s": ("number or null", "Upper end of its interval."),
        "measured_s": ("number", "Measured gain, seconds per step."),
        "measured_low_s": ("number or null", "Lower end of its interval."),
        "measured_high_s": ("number or null", "Upper end of its interval."),
        "miss_s": ("number or null", "Measured minus predicted."),
        "remaining_s": (
            "number or null",
            "Remaining gain after the change; null if the finding no longer triggers.",
        ),
        "before_s": ("number", "Mean step before."),
        "after_s": ("number", "Mean step after."),
        "steps_before": ("integer", "Steps compared before."),
        "steps_after": ("integer", "Steps compared after."),
        "work_changes": ("object", "Changes of the work per step by metric, as shares."),
    },
    "timing": {
        "runs": (
            "rows",
            "One per training in the logs: label, log, launches_begin, findings, metrics, and its tables.",
        ),
        "ended": _ENDED,
        "problems": _PROBLEMS,
    },
    "stuck": {
        "state": (
            "string",
            "`stuck`, `failed`, `silent`, `running`, `ended` or `killed`: docs/stuck.md.",
        ),
        "summary": ("string", "One sentence."),
        "at": ("string or null", "The run's last sign of life, ISO-8601."),
        "chain": (
            "rows",
            "Who waits for whom, the trainer first: process, what, open_s, at, step, depth.",
        ),
        "culprit": (
            "string or null",
            "What the chain ends in; null unless the run is stuck, failed or silent.",
        ),
        "confidence": ("string or null", "`high`, `medium` or `low`; null without a culprit."),
        "evidence": ("strings", "The functions that the culprit is in, the innermost last."),
        "silent": ("strings", "Processes without a sign of life."),
        "unknown": ("strings", "What could not be determined."),
        "facts": (
            "strings",
            "What else was found: of ranks and engines.",
        ),
        "details": ("strings", "The evidence of each process, as `-v` prints it."),
        "problems": _PROBLEMS,
    },
    "tq": {"runs": _RUNS, "tables": _TABLES, "left_out": _LEFT_OUT, "problems": _PROBLEMS},
    "memory": {
        "runs": _RUNS,
        "findings": ("rows", "Effects of the memory saver: docs/memory-saver.md."),
        "tables": _TABLES,
        "left_out": _LEFT_OUT,
        "problems": _PROBLEMS,
    },
}

_TYPES: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "string or null": {"type": ["string", "null"]},
    "integer": {"type": "integer"},
    "integer or null": {"type": ["integer", "null"]},
    "number": {"type": "number"},
    "number or null": {"type": ["number", "null"]},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "strings": {"type": "array", "items": {"type": "string"}},
    "rows": {"type": "array", "items": {"type": "object"}},
    "tables": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "object"}},
    },
    "range or null": {
        "type": ["array", "null"],
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
    },
}


def schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's output.

    Args:
        command: A key of `FORMATS`.

    Raises:
        KeyError: There is no such command.
    """
    keys = FORMATS[command]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"verl-profiler {command} --json",
        "type": "object",
        "required": ["format", *(name for name in keys if not name.endswith("?"))],
        "properties": {
            "format": {"const": _VERSIONS.get(command.split(" ", maxsplit=1)[0], 1)},
            **{
                name.rstrip("?"): {**_TYPES[kind], "description": text}
                for name, (kind, text) in keys.items()
            },
        },
        "additionalProperties": False,
    }


def table_docs() -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return what each table holds, one row of it, and its columns with a sentence for each."""
    from verl_profiler.analysis import overview
    from verl_profiler.analysis.requests import request_timeline
    from verl_profiler.views.columns import column_texts

    functions: list[Callable[..., Any]] = [
        *ANALYSES.values(),
        overview.phase_totals,
        request_timeline,
    ]
    return {
        function.__name__: (_described(function), column_texts()[function.__name__])
        for function in functions
    }


def _described(function: Callable[..., Any]) -> str:
    """Return the summary and the rows of an analysis, from its docstring."""
    text = inspect.getdoc(function) or ""
    summary, _, _ = text.partition("\n\n")
    returns = re.search(r"Returns:\n(?: +Table `\w+`: )?(.*?)(?:\n\S|\Z)", text, re.DOTALL)
    rows = " ".join(returns[1].split()) if returns else ""
    return f"{' '.join(summary.split())} {rows[:1].upper()}{rows[1:]}".rstrip()
