"""The timers of a console log as text: statistics of each timer, and facts about the steps."""

from __future__ import annotations

from verl_profiler.analysis.console_timers import logged_phases, logged_steps, metric_summary
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.render.visible import visible

__all__ = ["run_facts", "summary_block"]

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
