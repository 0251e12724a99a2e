"""Critical path, replays and stragglers as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.analysis.explain.rules import UNEXPLAINED
from verl_profiler.analysis.overview import path_means
from verl_profiler.analysis.selection import NOTHING, LeftOut, Rows, named, summed
from verl_profiler.analysis.staleness import staleness_of
from verl_profiler.analysis.staleness_causes import CAUSES, mean_causes
from verl_profiler.render.text import without
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, seconds
from verl_profiler.views.cycle_text import cycle_replays_text, cycle_text
from verl_profiler.views.findings import brief_findings, finding_list
from verl_profiler.views.ledger_text import ledger_text
from verl_profiler.views.text_tables import bar_table, table_text

# Categories with less than this share of the steps are combined into one line.
_SMALL = 0.002
# Segments of the path below this share of the step are left out.
_STRETCH = 0.005
_NAMES = 5
_STRAGGLERS, _ALL = 14, 40
# What causes less of the waiting for its kind is left out.
_LITTLE = 0.01
# The brief form fits on one screen: lines of each block without its titles.
_BRIEF = {"path": 6, "ledger": 8, "cycle": 6, "what_if": 7, "stragglers": 4}


def why(
    found: Mapping[str, Rows],
    ranked: Rows,
    left_out: LeftOut = NOTHING,
    *,
    verbose: bool = True,
) -> str:
    """Return the explanation of the step times.

    Args:
        found: What `explanations` returns.
        ranked: The rows of `findings`.
        left_out: The steps that means leave out.
        verbose: Everything, not only what fits on one screen.
    """
    blocks: list[str] = []
    runs = list(dict.fromkeys(row["run"] for row in found["bubble_ledger"]))
    for run in runs:
        own = {name: [row for row in rows if row["run"] == run] for name, rows in found.items()}
        if len(runs) > 1:
            blocks.append(visible(f"run {run}"))
        blocks += _blocks(own, left_out, verbose=verbose)
    top = finding_list(ranked, left_out) if verbose else brief_findings(ranked, left_out)
    more = "" if verbose else "-v has findings in full, all replays, device time and requests"
    return "\n\n".join(block for block in [top, *blocks, more] if block) + "\n"


def _blocks(own: Mapping[str, Rows], left_out: LeftOut, *, verbose: bool) -> list[str]:
    """Return what is known of a run; without `verbose`, the first lines of what its steps wait for."""
    most: Mapping[str, int] = {} if verbose else _BRIEF
    blocks: list[str] = []
    if own["steady_path"]:
        blocks.append(_path(own, left_out, most.get("path")))
        blocks += [_chain(own["critical_segments"])] * verbose
    if verbose or not own["steady_path"]:
        blocks.append(_first(ledger_text(own["bubble_ledger"], left_out), most.get("ledger")))
        blocks.append(_first(cycle_text(own["critical_cycle"]), most.get("cycle")))
    blocks.append(cycle_replays_text(own["what_if"], most.get("what_if", _ALL), brief=not verbose))
    if verbose:
        blocks += [_staleness(own["staleness"]), _causes(own["staleness_causes"])]
    blocks.append(_stragglers(own["stragglers"], most.get("stragglers", _STRAGGLERS)))
    return [*blocks, *([_requests(own["straggler_requests"])] * verbose)]


def _first(block: str, count: int | None) -> str:
    """Return a block's title and so many lines, or all; what is left out is counted."""
    if count is None:
        return block
    title, *lines = block.split("\n")
    more = [f"  and {len(lines) - count} more lines"] if len(lines) > count + 1 else lines[count:]
    return "\n".join([title, *lines[:count], *more])


def _path(own: Mapping[str, Rows], left_out: LeftOut, count: int | None = None) -> str:
    """Return the mean of each category over the steps, with a bar for each; at most `count`, and the rest.

    What lies between steps follows in one line.
    """
    rows = own["steady_path"]
    means = path_means(rows)
    steps = {row["step"] for row in rows}
    whole_s = sum(row["mean_s"] for row in means)
    known = [row for row in means if row["category"] != UNEXPLAINED and row["share"] >= _SMALL]
    shown = known[:count] + [row for row in means if row["category"] == UNEXPLAINED]
    parts = [
        (
            row["category"],
            row["mean_s"],
            f"longest {seconds(row['longest_s'])} in {row['longest_what']}",
        )
        for row in shown
    ]
    small = [row for row in means if row not in shown]
    if small:
        names = ", ".join(row["category"] for row in small[:_NAMES]) + ", …" * (len(small) > _NAMES)
        parts.append((f"{len(small)} more", sum(row["mean_s"] for row in small), names))
    which = f"step {min(steps)}" if len(steps) == 1 else f"{len(steps)} steps, mean"
    title = (
        f"critical path of {which}{without(named(left_out, rows))}: {seconds(whole_s)}, "
        "every second attributed to one cause"
    )
    return bar_table(title, parts, whole_s) + _between(own["between_path"])


def _between(rows: Rows) -> str:
    gaps = len({row["step"] for row in rows})
    if not gaps:
        return ""
    sums = summed(rows, "duration_s", "category")
    texts = [f"{category} {seconds(sums[category] / gaps)}" for category in [*sums][:_NAMES]]
    whole = seconds(sum(sums.values()) / gaps)
    return f"\n  and {whole} from the end of a step to the start of the next: {', '.join(texts)}"


def _chain(rows: Rows) -> str:
    """Return the path of one step in order, without short segments."""
    if len({row["step"] for row in rows}) != 1:
        return ""
    whole = sum(row["duration_s"] for row in rows)
    long = [row for row in rows if row["duration_s"] >= _STRETCH * whole]
    left = seconds(whole - sum(row["duration_s"] for row in long))
    title = (
        f"in order ({counted(len(rows) - len(long), 'short segment')} left out, {left} together)"
    )
    columns = ("begin_s", "duration_s", "category", "phase", "event", "what", "name", "turn")
    return table_text(title, long, columns, "critical_segments", len(long))


def _stragglers(rows: Rows, count: int) -> str:
    kept = [row for row in rows if row["share"] is not None and row["share"] >= _LITTLE]
    columns = ("kind", "who", "per_step_s", "share", "last", "of_steps")
    return table_text("stragglers (requests: by reason)", kept, columns, "stragglers", count)


def _requests(rows: Rows) -> str:
    reasons = [
        {**row, "because": f"{row['because']} {seconds(row[row['because'] + '_s'])}"}
        for row in rows
    ]
    columns = (
        "request_id",
        "step",
        "name",
        "caused_wait_s",
        "behind_s",
        "because",
        "batch",
        "typical_batch",
    )
    return table_text("straggler requests", reasons, columns, "straggler_requests")


def _staleness(rows: Rows) -> str:
    """Return how stale a run's samples were, by lengths and by aborts; empty without any."""
    if not rows:
        return ""
    title = "weight versions behind the trainer when the samples were consumed (means)"
    columns = ("what", "samples", "behind", "waited", "spanned", "max_behind", "off_policy_share")
    groups = staleness_of(rows, "all")
    for part in ("length", "prompt_length"):
        groups += sorted(staleness_of(rows, part), key=lambda row: int(row["what"].split()[0]))
    groups += sorted(staleness_of(rows, "attempts"), key=lambda row: row["what"], reverse=True)
    return table_text(title, groups, columns, "staleness")


def _causes(rows: Rows) -> str:
    """Return what a run's samples were in until they were consumed; empty without any."""
    if not rows:
        return ""
    shown = [{**row, "about": CAUSES[row["cause"]]} for row in mean_causes(rows)]
    title = "what samples were in from dispatch to consumption, and while they went stale (means)"
    columns = ("cause", "age_s", "behind", "share", "stale_samples", "about")
    return table_text(title, shown, columns, "staleness_causes")
