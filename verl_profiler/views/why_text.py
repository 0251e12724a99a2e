"""Critical path, replays and stragglers as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.explain.changes import CHANGES, UNCHANGED
from verl_profiler.analysis.explain.critical_path import UNEXPLAINED
from verl_profiler.analysis.selection import NOTHING, LeftOut, Rows, named, steady
from verl_profiler.render.text import align, without
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.cycle_text import cycle_replays_text, cycle_text
from verl_profiler.views.findings import brief_findings, finding_list
from verl_profiler.views.ledger_text import ledger_text
from verl_profiler.views.staleness_text import causes_text, staleness_text
from verl_profiler.views.training_text import device_text, efficiency_text

__all__ = ["why"]

# Categories with less than this share of the steps are combined into one line.
_SMALL = 0.002
_BAR = 30
# Segments of the path below this share of the step are combined.
_STRETCH = 0.005
_NAMES = 5
# Maximum number of steps with a line each.
_STEPS = 20
_STRAGGLERS = 14
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
        found: The rows of `steady_path`, `between_path`, `critical_segments`, `bubble_ledger`, `critical_cycle`,
            `asynchronous_what_if`, `staleness`, `staleness_causes`, `what_if`, `step_replays`,
            `stragglers`, `straggler_requests`, `device_use` and `phase_efficiency`, by name; of an
            asynchronous run, only those of `bubble_ledger`, `critical_cycle`,
            `asynchronous_what_if`, `staleness`, `staleness_causes` and `stragglers`.
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
    more = (
        ""
        if verbose
        else "-v has findings in full, all replays with their errors, device time and requests"
    )
    return "\n\n".join(block for block in [top, *blocks, more] if block) + "\n"


def _full(own: Mapping[str, Rows], left_out: LeftOut) -> list[str]:
    blocks: list[str] = []
    if own["steady_path"]:
        blocks += [_path(own, left_out), _chain(own["critical_segments"])]
    blocks.append(ledger_text(own["bubble_ledger"], left_out))
    blocks.append(cycle_text(own["critical_cycle"]))
    use, by_tokens = (steady(own[name], left_out) for name in ("device_use", "phase_efficiency"))
    blocks += [device_text(use), efficiency_text(by_tokens)]
    blocks.append(cycle_replays_text(own["asynchronous_what_if"]))
    blocks += [staleness_text(own["staleness"]), causes_text(own["staleness_causes"])]
    if own["step_replays"]:
        blocks += [_replay_errors(own["step_replays"]), _replays(own)]
    return [*blocks, _stragglers(own["stragglers"]), _requests(own["straggler_requests"])]


def _brief(own: Mapping[str, Rows], left_out: LeftOut) -> list[str]:
    blocks: list[str] = []
    if own["steady_path"]:
        blocks.append(_path(own, left_out, _BRIEF["path"]))
    else:
        blocks.append(_first(ledger_text(own["bubble_ledger"], left_out), _BRIEF["ledger"]))
        blocks.append(_first(cycle_text(own["critical_cycle"]), _BRIEF["cycle"]))
    blocks.append(_first(cycle_replays_text(own["asynchronous_what_if"]), _BRIEF["what_if"] + 1))
    if own["step_replays"]:
        blocks.append(_replays(own, _BRIEF["what_if"]))
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
    categories: dict[str, Rows] = {}
    for row in rows:
        categories.setdefault(row["category"], []).append(row)
    sums = {
        category: sum(row["duration_s"] for row in group) for category, group in categories.items()
    }
    order = sorted(sums, key=lambda category: (category == UNEXPLAINED, -sums[category]))
    large = [each for each in order if sums[each] >= _SMALL * total and each != UNEXPLAINED]
    shown = [*large[:count], *(each for each in order if each == UNEXPLAINED)]
    lines: list[list[str]] = []
    for category in shown:
        longest = max(categories[category], key=lambda row: row["longest_s"])
        bar = "#" * round(_BAR * sums[category] / max(sums.values()))
        most = f"{seconds(longest['longest_s'])} in {longest['longest_what']}"
        per_step = sums[category] / len(steps)
        lines.append([category, seconds(per_step), share(sums[category] / total), bar, most])
    small = [category for category in order if category not in shown]
    if small:
        rest = sum(sums[category] for category in small)
        name = f"{len(small)} more"
        names = ", ".join(small[:_NAMES]) + ", …" * (len(small) > _NAMES)
        lines.append([name, seconds(rest / len(steps)), share(rest / total), "", names])
    which = f"step {min(steps)}" if len(steps) == 1 else f"{len(steps)} steps, mean"
    title = (
        f"critical path of {which}{without(named(left_out, rows))}: {seconds(total / len(steps))}, "
        "every second attributed to one cause"
    )
    header = ["", "time", "share", "", "longest segment"]
    return f"{title}\n{align([header, *lines], left=(0, 3, 4))}{_between(own['between_path'])}"


def _between(rows: Rows) -> str:
    gaps = len({row["step"] for row in rows})
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["category"]] = sums.get(row["category"], 0.0) + row["duration_s"]
    if not gaps:
        return ""
    order = sorted(sums, key=lambda category: -sums[category])
    texts = [f"{category} {seconds(sums[category] / gaps)}" for category in order[:_NAMES]]
    whole = seconds(sum(sums.values()) / gaps)
    return f"\n  and {whole} from the end of a step to the start of the next: {', '.join(texts)}"


def _chain(rows: Rows) -> str:
    """Return the path of one step in order, with short segments combined."""
    if len({row["step"] for row in rows}) != 1:
        return ""
    least = _STRETCH * sum(row["duration_s"] for row in rows)
    lines = [["at", "for", "", "", ""]]
    short: list[str] = []
    since = 0.0

    def flush(until: float) -> None:
        if short:
            names = ", ".join(list(dict.fromkeys(short))[:_NAMES])
            names += ", …" * (len(set(short)) > _NAMES)
            lines.append([seconds(since), seconds(until - since), "…", "", names])
            short.clear()

    for row in rows:
        if row["duration_s"] < least:
            if not short:
                since = row["begin_s"]
            short.append(row["category"])
            continue
        flush(row["begin_s"])
        turn = "" if row["turn"] is None else f", turn {row['turn']}"
        what = row["what"] or row["event"]
        where = f"{row['name']}{turn}" if what == row["name"] else f"{what} in {row['name']}{turn}"
        at, length = seconds(row["begin_s"]), seconds(row["duration_s"])
        lines.append([at, length, row["category"], row["phase"] or "", where])
    flush(rows[-1]["begin_s"] + rows[-1]["duration_s"])
    return f"in order\n{align(lines, left=(2, 3, 4))}"


def _replay_errors(rows: Rows) -> str:
    unchanged = [row for row in rows if row["what"] == UNCHANGED]
    lines = [
        [
            "step",
            "measured",
            "unchanged replay",
            "replay error",
            "token-model error",
            "engine speed",
        ]
    ]
    lines += [
        [
            str(row["step"]),
            seconds(row["duration_s"]),
            seconds(row["replayed_s"]),
            share(abs(row["residual_share"])),
            "-" if row["tokens_share"] is None else share(abs(row["tokens_share"])),
            f"from {row['engine']}",
        ]
        for row in unchanged[:_STEPS]
    ]
    note = f"\n  and {len(unchanged) - _STEPS} more steps" if len(unchanged) > _STEPS else ""
    return f"replay accuracy\n{align(lines, left=())}{note}"


def _replays(own: Mapping[str, Rows], count: int | None = None) -> str:
    """Return what each change would save; with `count`, those that save most."""
    rows = own["what_if"]
    lines = [["", "saved", "share", "90 % interval", "in these steps"]]
    every = rows
    rows = [row for row in rows if row["what"] != UNCHANGED]
    if count is not None:
        rows = sorted(rows, key=lambda row: -(row["expected_s"] or 0.0))[:count]
    for row in rows:
        if row["expected_s"] is None:
            lines.append([row["about"], "too few", "requests", "", ""])
            continue
        known = row["low_s"] is not None
        between = (
            f"{seconds(row['low_s'])} to {seconds(row['high_s'])}" if known else "too few steps"
        )
        expected, here = seconds(row["expected_s"]), seconds(row["saved_s"])
        lines.append([row["about"], expected, share(row["share"]), between, here])
    between = next((r["between_runs_s"] for r in every if r["between_runs_s"] is not None), None)
    noise = (
        ""
        if between is None
        else f"\n  two runs with the same settings differ by up to {seconds(between)} per step in nine of "
        "ten pairs;\n  with one run each, smaller gains cannot be distinguished from noise"
    )
    note = (
        "\n  load not observed: the interval ranges from no additional tokens per second (saturated "
        "replicas)\n  to no additional slowdown per call (with speeds from iterations: to the slowdown at "
        "the highest batch)"
    )
    categories = {row["category"] for row in own["steady_path"]}
    as_decoding = "engine" in categories and "decode" not in categories
    undivided = (
        "\n  time in the engines is replayed as decoding: queue and prefill times were not recorded"
        "\n  (profiler.events.engine_timing=true)"
    )
    beyond = {name for name, change in CHANGES.items() if change.beyond}
    shown = any(row["what"] in beyond for row in rows if row["saved_s"])
    steps = counted(every[0]["steps"], "step")
    return f"what if (mean per step, {steps} replayed; gains are not additive)\n{align(lines)}{note * shown}{undivided * as_decoding}{noise}"


def _stragglers(rows: Rows, count: int = _STRAGGLERS) -> str:
    if not rows:
        return ""
    lines = [["", "", "caused wait time per step", "share of kind", "last in"]]
    lines += [
        [
            row["kind"],
            row["who"],
            seconds(row["per_step_s"]),
            share(row["share"]),
            f"{row['last']} of {row['of_steps']} steps",
        ]
        for row in rows
        if row["share"] is not None and row["share"] >= 0.01
    ][:count]
    return f"stragglers (requests: by reason)\n{align(lines, left=(0, 1))}"


def _batch(row: Mapping[str, Any]) -> str:
    """Return a slow request's batch and the median request's, if there is one."""
    if row["because"] != "slow" or row["batch"] is None or row["typical_batch"] is None:
        return ""
    return f" (batch {row['batch']:.1f}, median request {row['typical_batch']:.1f})"


def _requests(rows: Rows) -> str:
    if not rows:
        return ""
    lines = [["request", "step", "worker", "caused wait time", "behind the median", "because"]]
    lines += [
        [
            (row["request_id"] or "(no id)")[:8],
            str(row["step"]),
            row["name"],
            seconds(row["caused_wait_s"]),
            seconds(row["behind_s"]),
            f"{row['because']} {seconds(row[row['because'] + '_s'])}{_batch(row)}",
        ]
        for row in rows
    ]
    return f"straggler requests\n{align(lines, left=(0, 2, 5))}"
