"""A run in a few rows: its phases, its requests and the user's own spans over all selected steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.ledger import USEFUL, account_totals
from verl_profiler.analysis.explain.rules import UNEXPLAINED
from verl_profiler.analysis.requests import summed_requests
from verl_profiler.analysis.selection import (
    NOTHING,
    LeftOut,
    Rows,
    Steps,
    by_run,
    grouped,
    in_steps,
    steady,
    summed,
)
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables


def headline(
    step_times: Iterable[Mapping[str, Any]],
    ledger: Sequence[Mapping[str, Any]],
    left_out: LeftOut,
) -> Rows:
    """Return the headline figures of each run, over the steps that means cover.

    Args:
        step_times: Rows of `step_times`.
        ledger: Rows of `bubble_ledger`.
        left_out: The warm-up (`analysis.selection.left_out`).

    Returns:
        Per run with a finished step: run, steps (finished ones), left_out (those left out of means),
        step_mean_s, step_least_s and step_most_s, and useful_share (`ledger.USEFUL`, as a share of
        all device time; None without it).
    """
    finished = (row for row in step_times if row["finished"] and row["step"] > 0)
    found: Rows = []
    for run, rows in grouped(finished, "run").items():
        kept = steady(rows, left_out)
        lengths = [row["duration_s"] for row in kept]
        sums = account_totals(steady([row for row in ledger if row["run"] == run], left_out))
        total_s = sum(sums.values())
        counted = {row["step"] for row in kept}
        found.append(
            {
                "run": run,
                "steps": len(rows),
                "left_out": [row["step"] for row in rows if row["step"] not in counted],
                "step_mean_s": sum(lengths) / len(lengths),
                "step_least_s": min(lengths),
                "step_most_s": max(lengths),
                "useful_share": (
                    sum(sums.get(account, 0.0) for account in USEFUL) / total_s if total_s else None
                ),
            }
        )
    return found


def phase_totals(step_phases: Iterable[Mapping[str, Any]], *, left_out: LeftOut = NOTHING) -> Rows:
    """Sum the phases of finished steps.

    Args:
        step_phases: Rows of `step_phases`.
        left_out: Steps to leave out, such as the warm-up (`analysis.selection.left_out`).

    Returns:
        Table `phase_totals`: one row per run and phase, most time first and `unaccounted` last.
    """
    # Only those of finished steps have a share.
    finished = (row for row in step_phases if row["share"] is not None)
    kept = (row for row in finished if row["step"] not in left_out.get(row["run"], ()))
    totals: Rows = []
    for run, rows in grouped(kept, "run").items():
        steps = len({row["step"] for row in rows})
        whole_s = sum(row["duration_s"] for row in rows)
        for phase, own in grouped(rows, "phase").items():
            total_s = sum(row["duration_s"] for row in own)
            longest = max(own, key=lambda row: row["duration_s"])
            totals.append(
                {
                    "run": run,
                    "phase": phase,
                    "steps": steps,
                    "total_s": total_s,
                    "mean_s": total_s / steps,
                    "share": total_s / whole_s if whole_s else None,
                    "count": sum(row["count"] for row in own),
                    "max_s": longest["duration_s"],
                    "max_step": longest["step"],
                }
            )
    return sorted(
        totals,
        key=lambda row: (row["run"], row["phase"] == "unaccounted", -row["total_s"], row["phase"]),
    )


def request_totals(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the training requests of all selected steps together.

    Returns:
        Table `request_totals`: one row per run.  Durations are of finished requests.
    """
    return tables.rows(
        f"""
        SELECT run, requests, unfinished, failed, q[1] / 1e6 AS p50_s, q[4] / 1e6 AS p95_s,
            q[5] / 1e6 AS p99_s, max_us / 1e6 AS max_s, mean_turns, generated_tokens
        FROM ({summed_requests("run", f"NOT validate AND {in_steps(steps)}")}) ORDER BY run
        """
    )


def own_spans(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the spans of the user's own code, validation included.

    A span of the trainer counts where its name is neither one of the profiler's nor a phase of the step.

    Returns:
        Table `own_spans`: one row per run and event, most time first.
    """
    known = ", ".join(f"'{name}'" for name in EVENTS)
    counted = tables.row(
        "SELECT count(*) AS events FROM event_counts "
        f"WHERE family = 'user' OR (family = 'trainer' AND event NOT IN ({known}))"
    )
    if not counted["events"]:
        return []
    return tables.rows(
        f"""
        WITH own AS (
            SELECT * FROM event_fields
            WHERE duration_us IS NOT NULL AND {in_steps(steps)} AND family = 'user'
            UNION ALL
            SELECT e.* FROM event_fields AS e
            ANTI JOIN (SELECT * FROM phases WHERE parent = 'step') AS p
                ON p.run = e.run AND p.phase = e.event
            WHERE e.duration_us IS NOT NULL AND {in_steps(steps, "e.step")}
                AND e.family = 'trainer' AND e.event NOT IN ({known})
        )
        SELECT run, event, calls, failed, total_us / 1e6 AS total_s, q[1] / 1e6 AS p50_s,
            q[2] / 1e6 AS p95_s, max_us / 1e6 AS max_s, slowest_step, roles
        FROM (
            SELECT run, event, count(*) AS calls, count(*) FILTER (status IS NOT NULL) AS failed,
                sum(duration_us) AS total_us, {quantiles("duration_us", 0.5, 0.95)} AS q,
                max(duration_us) AS max_us, arg_max(step, (duration_us, -begin_us)) AS slowest_step,
                list_sort(list(DISTINCT role)) AS roles
            FROM own GROUP BY run, event
        ) ORDER BY run, total_us DESC, event
        """
    )


def mean_step(explained: Mapping[str, Rows], left_out: LeftOut) -> Rows:
    """Divide the mean time from the start of a step to the start of the next, without the warm-up.

    Args:
        explained: The rows of `steady_path`, `between_path` and `bubble_ledger`, by name.
        left_out: The steps that means leave out.

    Returns:
        Per run and part: run, part, mean_s, and account.  Parts are the causes on the critical path; of an
        asynchronous run the accounts of the trainer's devices.
    """
    found: Rows = []
    paths, gaps = by_run(explained["steady_path"]), by_run(explained["between_path"])
    for run, rows in paths.items():
        between = gaps.get(run, [])
        steps = {row["step"] for row in rows}
        # A gap is of the steps whose successor was recorded.
        followed = {row["step"] for row in between} | {step for step in steps if step + 1 in steps}
        means: dict[str, float] = {}
        for own, count in ((rows, len(steps)), (between, len(followed))):
            for row in own:
                name = row["category"]
                means[name] = means.get(name, 0.0) + row["duration_s"] / count
        found += [
            {"run": run, "part": name, "mean_s": mean_s, "account": False}
            for name, mean_s in means.items()
        ]
    of_trainer = (
        {**row, "each_s": row["device_s"] / row["devices"]}
        for row in explained["bubble_ledger"]
        if row["run"] not in paths and row["pool"] != "rollout"
    )
    for run, rows in by_run(of_trainer).items():
        kept = steady(rows, left_out)
        steps = len({row["step"] for row in kept})
        found += [
            {"run": run, "part": name, "mean_s": each_s / steps, "account": True}
            for name, each_s in summed(kept, "each_s", "account").items()
        ]
    return found


def path_means(path: Rows) -> Rows:
    """Return the mean of each category of a critical path over its steps, what is unattributed last.

    Returns:
        One row per category, the largest first: category, mean_s, share, and longest_s and longest_what of the
        longest segment.
    """
    steps = len({(row["run"], row["step"]) for row in path})
    categories, sums = grouped(path, "category"), summed(path, "duration_s", "category")
    whole_s = sum(sums.values())
    found: Rows = []
    for category in sorted(sums, key=lambda name: name == UNEXPLAINED):
        longest = max(categories[category], key=lambda row: row["longest_s"])
        found.append(
            {
                "category": category,
                "mean_s": sums[category] / steps,
                "share": sums[category] / whole_s if whole_s else 0.0,
                "longest_s": longest["longest_s"],
                "longest_what": longest["longest_what"],
            }
        )
    return found
