"""Critical path, replays and stragglers as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.analysis.explain.rules import UNEXPLAINED
from verl_profiler.analysis.selection import NOTHING, LeftOut, Rows, grouped, named, summed
from verl_profiler.render.text import without
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, seconds
from verl_profiler.views.cycle_text import cycle_replays_text, cycle_text
from verl_profiler.views.findings import brief_findings, finding_list
from verl_profiler.views.ledger_text import ledger_text
from verl_profiler.views.staleness_text import causes_text, staleness_text
from verl_profiler.views.text_tables import bar_table, table_text

# Categories with less than this share of the steps are combined into one line.
_SMALL = 0.002
# Segments of the path below this share of the step are left out.
_STRETCH = 0.005
_NAMES = 5
_STRAGGLERS = 14
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
        blocks += (_full if verbose else _brief)(own, left_out)
    top = finding_list(ranked, left_out) if verbose else brief_findings(ranked, left_out)
    more = "" if verbose else "-v has findings in full, all replays, device time and requests"
    return "\n\n".join(block for block in [top, *blocks, more] if block) + "\n"


def _full(own: Mapping[str, Rows], left_out: LeftOut) -> list[str]:
    blocks: list[str] = []
    if own["steady_path"]:
        blocks += [_path(own, left_out), _chain(own["critical_segments"])]
    blocks.append(ledger_text(own["bubble_ledger"], left_out))
    blocks.append(cycle_text(own["critical_cycle"]))
    blocks.append(cycle_replays_text(own["what_if"]))
    blocks += [staleness_text(own["staleness"]), causes_text(own["staleness_causes"])]
    return [*blocks, _stragglers(own["stragglers"]), _requests(own["straggler_requests"])]


def _brief(own: Mapping[str, Rows], left_out: LeftOut) -> list[str]:
    blocks: list[str] = []
    if own["steady_path"]:
        blocks.append(_path(own, left_out, _BRIEF["path"]))
    else:
        blocks.append(_first(ledger_text(own["bubble_ledger"], left_out), _BRIEF["ledger"]))
        blocks.append(_first(cycle_text(own["critical_cycle"]), _BRIEF["cycle"]))
    blocks.append(cycle_replays_text(own["what_if"], _BRIEF["what_if"], brief=True))
    return [*blocks, _stragglers(own["stragglers"], _BRIEF["stragglers"])]


def _first(block: str, count: int) -> str:
    """Return a block's title and so many lines; what is left out is counted."""
    title, *lines = block.split("\n")
    more = [f"  and {len(lines) - count} more lines"] if len(lines) > count + 1 else lines[count:]
    return "\n".join([title, *lines[:count], *more])


def _path(own: Mapping[str, Rows], left_out: LeftOut, count: int | None = None) -> str:
    """Return the mean of each category over the steps, with a bar for each; at most `count`, and the rest.

    What lies between steps follows in one line.
    """
    rows = own["steady_path"]
    steps = {row["step"] for row in rows}
    total = sum(row["duration_s"] for row in rows)
    categories, sums = grouped(rows, "category"), summed(rows, "duration_s", "category")
    order = sorted(sums, key=lambda category: category == UNEXPLAINED)
    large = [each for each in order if sums[each] >= _SMALL * total and each != UNEXPLAINED]
    shown = [*large[:count], *(each for each in order if each == UNEXPLAINED)]
    parts: list[tuple[str, float, str]] = []
    for category in shown:
        longest = max(categories[category], key=lambda row: row["longest_s"])
        most = f"longest {seconds(longest['longest_s'])} in {longest['longest_what']}"
        parts.append((category, sums[category] / len(steps), most))
    small = [category for category in order if category not in shown]
    if small:
        rest = sum(sums[category] for category in small)
        names = ", ".join(small[:_NAMES]) + ", …" * (len(small) > _NAMES)
        parts.append((f"{len(small)} more", rest / len(steps), names))
    which = f"step {min(steps)}" if len(steps) == 1 else f"{len(steps)} steps, mean"
    title = (
        f"critical path of {which}{without(named(left_out, rows))}: {seconds(total / len(steps))}, "
        "every second attributed to one cause"
    )
    return bar_table(title, parts, total / len(steps)) + _between(own["between_path"])


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


def _stragglers(rows: Rows, count: int = _STRAGGLERS) -> str:
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
