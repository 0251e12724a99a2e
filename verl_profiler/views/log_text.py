"""What a log alone shows of a training, for a terminal: where a mean step goes, and what to change first."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from verl_profiler.analysis.console_timers import logged_phases, logged_steps, metric_summary
from verl_profiler.analysis.log_findings import left_out, log_facts, log_phases
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.render.text import without, wrapped
from verl_profiler.render.visible import visible
from verl_profiler.units import counted
from verl_profiler.views.findings import finding_list, short_findings
from verl_profiler.views.headline import phase_lines, steps_text

_RULE = "=" * 70
_PERF = ("perf/time_per_step", "perf/throughput", "tokens_per_s")
_SHOWN_PLACES = ("step", "outside", "overlapping")
_NOTES = {
    "perf/throughput": "(tokens/s per GPU)",
    "tokens_per_s": "(tokens/s of the job)",
    "timing_s/unaccounted": "(step time not covered by any timer)",
}
_PLACES = {
    "outside": "(outside the step)",
    "overlapping": "(inside another timer, or concurrent with it)",
}
_FIRST = 3


def log_overview(run: LoggedRun, findings: Rows, *, verbose: bool = False) -> str:
    """Return the headline, where a mean step goes, and the findings.

    Args:
        run: Of the log.
        findings: The rows of `log_findings`.
        verbose: All phases and findings, not only the first.
    """
    outside = {"step": "", "outside": " (outside the step)", "overlapping": " (beside the step)"}
    phases = [
        row
        | {"phase": row["phase"] + outside[row["place"]]}
        | {"max_s": row["longest_s"], "max_step": row["longest_step"]}
        for row in log_phases(run)
        if verbose or row["place"] != "overlapping"
    ]
    lines = phase_lines(phases, several=len(run.lines) > 1, whole=verbose)
    facts = log_facts(run)
    known = [visible(f"  {'; '.join(facts)}")] if facts else []
    changes = log_changes(run, findings, verbose=verbose)
    return "\n".join(
        [*wrapped(headline(run), 12), *map(visible, lines), *known, "", *changes]
    ).rstrip()


def log_changes(run: LoggedRun, findings: Rows, *, verbose: bool = False) -> list[str]:
    """Return the findings as lines: in full, or the first three in short."""
    steps = {run.label: left_out(run)}
    if verbose:
        return [finding_list(findings, steps)] if findings else []
    shown = short_findings(findings, _FIRST)
    of = f"; {len(shown)} of {len(findings)}, why has all" if len(shown) < len(findings) else ""
    means = f"gains per step{without(left_out(run))}, not additive"
    title = [f"What to change first ({means}){of}"] if shown else []
    return title + [line for lines in shown for line in lines]


def beyond(runs: Iterable[LoggedRun]) -> str:
    """Return what a log lacks, and what records it."""
    how = "To record them: the same command with +profiler=multiturn"
    if any(run.of_slime for run in runs):
        how = "verl-profiler records runs of verl, not of slime."
    return f"This is from the log alone, which has no requests, tools, engines or ranks. {how}"


def headline(run: LoggedRun) -> str:
    """Return the number of steps, their length, and what they cost, in a sentence."""
    rows = logged_steps(run)
    lengths = {row["step"]: row["step_s"] or row["accounted_s"] for row in rows}
    without_steps = left_out(run)
    kept = [row for row in rows if row["step"] not in without_steps]
    apart_s = fmean(lengths[row["step"]] + row["outside_s"] for row in kept)
    name = f"{run.label} (lines of slime)" if run.of_slime else run.label
    text = steps_text(name, lengths, without_steps, apart_s)
    gpus = {row["gpus"] for row in rows if row["gpus"] is not None}
    if len(gpus) == 1:
        (number,) = gpus
        text += f"; {counted(number, 'GPU')}, {number * apart_s / 3600:.3g} GPU-hours per step"
    return visible(text)


def summary_block(run: LoggedRun) -> str:
    """Return statistics of the step, its timers and the throughput, in seconds and tokens/s."""
    summary = {row["metric"]: row for row in metric_summary(run)}
    timers = [row for row in summary.values() if row["place"] in _SHOWN_PLACES]
    shown = [summary.get("timing_s/step"), *timers, summary.get("timing_s/unaccounted")]
    shown += [summary.get(name) for name in _PERF]
    lines = [_RULE, "TIMING SUMMARY STATISTICS", _RULE]
    for row in shown:
        if row is None:
            continue
        note = _NOTES.get(row["metric"]) or _PLACES.get(row["place"], "")
        lines += ["", visible(f"{row['metric']}: {note}").rstrip()]
        lines += [
            f"  {f'{name}:':<8}{row[name.lower()]:.4f}"
            for name in ("Mean", "Std", "Min", "Max", "Median")
        ]
    for step in left_out(run):
        lines += ["", f"These are of all steps; means in the figures are without step {step}."]
    return "\n".join(lines)


def run_facts(run: LoggedRun) -> list[str]:
    """Return the steps of a run, special steps, and the nesting of its timers."""
    steps = logged_steps(run)
    facts = [f"Steps {steps[0]['step']} to {steps[-1]['step']}: {len(steps)} in the log"]
    missing = steps[-1]["step"] - steps[0]["step"] + 1 - len(steps)
    facts[0] += f", {missing} missing" if missing else ""
    for key, text in (("validated", "with validation"), ("checkpoint", "with a checkpoint")):
        count = sum(row[key] for row in steps)
        facts[0] += f", {count} {text}" if count else ""
    reasons: dict[tuple[str, str], str] = {}
    for row in logged_phases(run):
        if row["reason"]:
            reasons.setdefault((row["phase"], row["place"]), row["reason"])
    places = {
        "step": "inside the step",
        "outside": "outside the step",
        "overlapping": "overlapping",
    }
    facts += [f"{phase}: {places[place]} ({reason})" for (phase, place), reason in reasons.items()]
    return facts
