"""The names of the original multi-turn logger, three generations of them, and their present names.

The original counted turns from 1 in some events and from 0 in others, and gave the tools of turn k
the number k + 1; `turn_shift` puts that right.  Step-level names become phases of the rollout
worker that wrote them, below `gen`.  What has no counterpart today keeps its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_profiler.events.vocabulary import EVENTS, PHASES


@dataclass(frozen=True)
class Alias:
    """What an event of the original logger is called today.

    Args:
        event: Today's name.
        family: Its family; None for that of `event` in the vocabulary.
        turn_shift: Added to the recorded turn; turns count from 0.
    """

    event: str
    family: str | None = None
    turn_shift: int = 0


def _phase(event: str) -> Alias:
    return Alias(event, "trainer")


def _detail(event: str, turn_shift: int = 0) -> Alias:
    return Alias(event, "rollout", turn_shift)


ALIASES: dict[str, Alias] = {
    # The whole call of a rollout worker: first generation, then the later two.
    "total": _phase("gen"),
    "total_step_duration": _phase("gen"),
    **{
        f"{name}{suffix}": _phase(name)
        for name in (
            "preprocessing",
            "async_generate",
            "sorting",
            "broadcast",
            "data_extraction",
            "padding",
            "concatenation",
            "batch_construction",
            "cache_flush",
            "final_construction",
        )
        for suffix in ("", "_duration")
    },
    "barrier": _phase("barrier_wait"),
    "barrier_wait_duration": _phase("barrier_wait"),
    # One call of the engine: of a request, or in the single-turn path of the whole batch.
    "engine_async_generate": Alias("engine_call"),
    "reward_duration": _phase("reward"),
    "step_response_length_stats": Alias("metrics"),
    "request_start": Alias("request_start"),
    "async_rollout_request_complete": Alias("request"),
    "main_loop": Alias("agent_loop"),
    "pending_state_handling": _detail("pending_state"),
    "tool_creation_pending_state": _detail("tool_creation"),
    "interaction_start_pending_state": _detail("interaction_start"),
    "turn_start": _detail("turn_start"),
    "turn_end": Alias("turn"),
    "running_state": Alias("turn", turn_shift=-1),
    "turn_pre_process": _detail("turn_pre_process"),
    "turn_post_process": _detail("turn_post_process"),
    "turn_engine_call": Alias("engine_call"),
    "engine_call": Alias("engine_call", turn_shift=-1),
    "engine_generate_setup": _detail("engine_generate_setup"),
    "engine_async_generate_actual": _detail("engine_generate"),
    "turn_tool_parsing": Alias("tool_parsing"),
    "tool_parsing": Alias("tool_parsing", turn_shift=-1),
    "tool_execution": Alias("tool_execution", turn_shift=-1),
    "tool_response_processing": Alias("token_merge", turn_shift=-1),
    "tool_calling_state": _detail("tool_calling_state", -1),
    "interaction_response": _detail("interaction_response"),
    "interacting_state": _detail("interacting_state"),
    "reward_calculation": Alias("reward"),
    "finalization": Alias("postprocess"),
}

# Today's field → what the original called it.
FIELD_ALIASES: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("initial_prompt_length",),
    "response_tokens": ("response_length", "generated_tokens"),
    "sample": ("batch_data_id",),
}


def vocabulary() -> list[tuple[bool, str, str, str, int, bool]]:
    """Return one row per known name: original, recorded, event, family, turn_shift, phase.

    `phase` is true where the event is a phase of the step when the trainer records it.
    """
    rows = [
        (False, name, name, event.family, 0, name in PHASES or event.family == "trainer")
        for name, event in EVENTS.items()
    ]
    rows += [
        (
            True,
            recorded,
            alias.event,
            alias.family or EVENTS[alias.event].family,
            alias.turn_shift,
            alias.event in PHASES,
        )
        for recorded, alias in ALIASES.items()
    ]
    return rows
