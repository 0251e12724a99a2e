"""The colors of the reports: one per phase, in every plot and page.

Built on the palette of Okabe and Ito.  Within a family (the phases of a step, the parts of a
request) every two colors stay apart for people with protanopia, deuteranopia and tritanopia; a test
simulates that.  Plain values: importing this brings in no plotting library.
"""

from __future__ import annotations

import zlib

# Text, secondary text, grid lines, and what a figure points at.
INK = "#1F2328"
MUTED = "#59636E"
GRID = "#DDE1E6"
ACCENT = "#D55E00"

_REST = "#C4C4C4"

# The phases of a step, under verl's names; `unaccounted` is what no timer covers.
PHASE_COLORS: dict[str, str] = {
    "prepare_step": "#9966FF",
    "gen": "#0072B2",
    "reward": "#F0E442",
    "old_log_prob": "#56B4E9",
    "ref": "#CC79A7",
    "values": "#5E3267",
    "adv": "#E69F00",
    "update_critic": "#7A3B10",
    "update_actor": "#D55E00",
    "save_checkpoint": "#222222",
    "update_weights": "#009E73",
    "testing": "#241C85",
    "unaccounted": _REST,
}

# What a generate call consists of; `outside` is transport and what the engine does not account for.
ENGINE_COLORS: dict[str, str] = {
    "queue": "#CC79A7",
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "outside": "#D55E00",
}

# Parts of a request's generate calls.
CALL_PART_COLORS: dict[str, str] = {
    "outside": ENGINE_COLORS["outside"],
    "parked": "#2B0036",
    "queue": ENGINE_COLORS["queue"],
    "cold": "#F0E442",
    "prefill": ENGINE_COLORS["prefill"],
    "recomputed": "#7A3B10",
    "decode": ENGINE_COLORS["decode"],
    "undivided": _REST,
}

# The parts of a request; where the engine's parts are known they stand for `engine`.
PART_COLORS: dict[str, str] = {
    "prompt_build": "#241C85",
    "engine": "#0072B2",
    **ENGINE_COLORS,
    "tool": "#E69F00",
    "tool_parsing": "#7A3B10",
    "token_merge": "#5E3267",
    "postprocess": "#009E73",
    "reward": "#F0E442",
    "other": _REST,
}

# Owners of the critical path that are no parts of a request.
CATEGORY_COLORS: dict[str, str] = {
    "dispatch": "#999933",
    "server_acquire": "#882255",
    "transport": ENGINE_COLORS["outside"],
    "parked": CALL_PART_COLORS["parked"],
    "transfer": "#44AA99",
    "event_loop": "#DDCC77",
    "host_stall": "#6b3a3a",
    "polling": "#8B0000",
    "handover": "#8A8A8A",
    "sleep_replicas": "#5E7F9E",
    "engine_memory": "#3D6B8A",
    "unexplained": _REST,
}

# Accounts of the bubble ledger.
ACCOUNT_COLORS: dict[str, str] = {
    "training": "#D55E00",
    "driver": "#240048",
    "offload": "#B4FCFC",
    "rank_transfer": "#90B880",
    "handover": "#601030",
    "generating": "#0072B2",
    "few_requests": "#003CA0",
    "generating_unconsumed": "#56B4E9",
    "generating_aborted": "#CC79A7",
    "generating_dropped": "#5E3267",
    "waiting_for_samples": "#F0E442",
    "rollout_idle": "#E69F00",
    "staleness_limit": "#8B0000",
    "weight_sync": "#009E73",
    "mode_switch": "#9966FF",
    "dispatch": "#59636E",
    "overhead": "#905030",
    "unattributed": _REST,
}

# Other names of the same work, or of work inside it.
_SAME = {
    "agent_loop": "engine",
    "async_generate": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "engine_call": "engine",
    "engine_request": "engine",
    "compute_score": "reward",
    "generate": "gen",
    "generate_sequences": "engine",
    "infer_batch": "old_log_prob",
    "reward_score": "reward",
    "reshard": "update_weights",
    "rollout": "gen",
    "sample_wait": "gen",
    "server_acquire": "outside",
    "tool_call": "tool",
    "tool_calls": "tool",
    "tool_execution": "tool",
    "train_batch": "update_actor",
    "train_mini_batch": "update_actor",
    "unrecorded": "unaccounted",
    "update_critic_actor": "update_actor",
    "validation": "testing",
    "weight_transfer": "update_weights",
}

# For names of no known phase, such as timers of a user's own.
_SPARE = ("#8FA3BF", "#A8917D", "#7FA58A", "#B59BB0", "#9B9B7A", "#86A7A5")


def is_known(name: str) -> bool:
    """Tell whether a name has a color of its own."""
    return name in _SAME or name in PHASE_COLORS or name in PART_COLORS


def color(name: str) -> str:
    """Return the color of a phase, part or event; the same one in every process and run."""
    known = _SAME.get(name, name)
    for family in (PHASE_COLORS, PART_COLORS):
        if known in family:
            return family[known]
    return _SPARE[zlib.crc32(name.encode("utf-8", "replace")) % len(_SPARE)]


def category_color(name: str) -> str:
    """Return the color of a category of the critical path: the trainer's phases are pale.

    A phase and a part of a request may have the same color, and stand in one bar here.
    """
    if name in CATEGORY_COLORS:
        return CATEGORY_COLORS[name]
    if name in PART_COLORS and name != "reward":
        return PART_COLORS[name]
    pale = (round(int(color(name)[at : at + 2], 16) * 0.45 + 255 * 0.55) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02X}" for part in pale)
