"""Console logs in the forms of verl's versions, with made-up numbers; run it to write the fixtures.

What is copied is the form: the names and their order are those of `compute_timing_metrics` and
`compute_throughout_metrics` in verl/trainer/ppo/metric_utils.py at each version's tag, the numbers
are written as `concat_dict_to_str` in verl/utils/logger/aggregate_logger.py writes them (`%.3f` up
to 0.4.1, `pprint.pformat` since 0.5.0, where numpy 2 adds `np.float64(...)`), and the prefixes are
those of Ray, as they look in logs that people attach to issues.
"""

from __future__ import annotations

import pprint
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "data/console_logs"


def rounded(value: float) -> str:
    """Write a number as verl does up to 0.4.1."""
    return f"{value:.3f}"


@dataclass(frozen=True)
class Form:
    """How one version writes its log.

    Args:
        prefix: What Ray puts before a line.
        number: Writes a number.
        timers: Seconds of the timers directly inside the step.
        children: Seconds of those inside gen.
        counts: What stands under timing_s/ and is no time.
        inside: Which of testing, save_checkpoint and the profiler's own are inside the step.
        gpus: By which verl divides the throughput.
        validation: The line of the validation before training.
        numpy: The names whose values are numpy's.
    """

    prefix: str
    number: Callable[[Any], str]
    timers: Mapping[str, float]
    inside: frozenset[str]
    gpus: int
    validation: Mapping[str, float]
    children: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    numpy: tuple[str, ...] = ()


_GRPO = {"gen": 22.4, "old_log_prob": 3.5, "ref": 3.4, "adv": 0.06, "update_actor": 14.2}
_PPO = {
    "gen": 7.1,
    "old_log_prob": 2.2,
    "values": 2.0,
    "adv": 0.2,
    "update_critic": 9.8,
    "update_actor": 10.1,
}
_AGENT_LOOP = {
    f"agent_loop/{what}/{how}": value
    for what, low in (("generate_sequences", 2.1), ("tool_calls", 0.3))
    for how, value in (("min", low), ("max", low * 8), ("mean", low * 3))
}

FORMS: dict[str, Form] = {
    "verl-0.3-ppo": Form(
        prefix="(main_task pid=887984) ",
        number=rounded,
        timers=_PPO,
        inside=frozenset(("testing", "save_checkpoint")),
        gpus=4,
        validation={"val/test_score/openai/gsm8k": 0.508},
    ),
    "verl-0.4-grpo": Form(
        # The escape bytes are lost, as in logs that went through a web page.
        prefix="[36m(TaskRunner pid=16292)[0m ",
        number=rounded,
        timers={**_GRPO, "reward": 1.1},
        children={"generate_sequences": 20.3, "reshard": 1.2},
        inside=frozenset(("testing", "save_checkpoint")),
        gpus=8,
        validation={"val-core/openai/gsm8k/acc/mean@1": 0.508},
    ),
    "verl-0.5-grpo": Form(
        prefix="\x1b[36m(TaskRunner pid=2107)\x1b[0m ",
        number=pprint.pformat,
        timers=_GRPO,
        children={
            "generate_sequences": 20.3,
            "reshard": 1.2,
            "generation_timing/max": 21.0,
            "generation_timing/min": 17.5,
        },
        counts={"generation_timing/topk_ratio": 1},
        inside=frozenset(("testing", "save_checkpoint")),
        gpus=16,
        validation={"val-core/openai/gsm8k/acc/mean@1": 0.508},
        numpy=("perf/mfu/actor",),
    ),
    "verl-0.6-agent-loop": Form(
        prefix="(TaskRunner pid=7743, ip=10.0.0.2) ",
        number=pprint.pformat,
        timers={"start_profile": 8e-05, **_GRPO, "stop_profile": 5e-05},
        children={**_AGENT_LOOP, "agent_loop/slowest/generate_sequences": 17.0},
        counts={
            "agent_loop/slowest/prompt_length": 104,
            "agent_loop/slowest/response_length": 4096,
        },
        inside=frozenset(),
        gpus=8,
        validation={"val-aux/num_turns/mean": 3.5},
        numpy=(*(f"timing_s/{name}" for name in _AGENT_LOOP), "perf/mfu/actor"),
    ),
    "verl-0.7-megatron": Form(
        # A file that a job scheduler wrote: no prefix.
        prefix="",
        number=pprint.pformat,
        timers={**_GRPO, "update_weights": 1.3},
        children={**_AGENT_LOOP, "agent_loop/slowest/tool_calls": 0.9},
        counts={"agent_loop/num_preempted/mean": 3, "agent_loop/slowest/num_preempted": 7},
        inside=frozenset(("save_checkpoint", "update_weights")),
        gpus=2,
        validation={"val-core/openai/gsm8k/acc/mean@1": 0.508},
        numpy=tuple(f"timing_s/{name}" for name in _AGENT_LOOP),
    ),
}
_OUTER = ("start_profile", "stop_profile")


def step_values(
    form: Form, step: int, *, test_every: int = 4, save_every: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Make up the metrics of a step, in verl's order."""
    draw = random.Random(f"{seed} {step}")
    scale = draw.uniform(0.9, 1.1)
    timers = {name: value * scale * draw.uniform(0.97, 1.03) for name, value in form.timers.items()}
    extra = {}
    if step % save_every == 0:
        extra["save_checkpoint"] = 5.0 * draw.uniform(0.9, 1.1)
    if step % test_every == 0:
        extra["testing"] = 12.0 * draw.uniform(0.9, 1.1)
    outside = {name for name in {**timers, **extra} if name in (*_OUTER, *extra)} - form.inside
    step_s = 0.003 + sum(
        value for name, value in {**timers, **extra}.items() if name not in outside
    )
    tokens, responses = 420_000 + 1_000 * step, 300_000 + 1_000 * step
    values: dict[str, Any] = {"actor/pg_loss": -0.002 * step, "perf/mfu/actor": 0.31}
    if "testing" in extra:
        values.update(form.validation)
    values["response_length/mean"] = 288.5
    children = {name: value * scale for name, value in form.children.items()}
    timed = {**children, **form.counts, **timers, "step": step_s, **extra}
    values |= {f"timing_s/{name}": value for name, value in timed.items()}
    for name in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        if name in timers:
            over = responses if name == "gen" else tokens
            values[f"timing_per_token_ms/{name}"] = timers[name] * 1000 / over
    values["perf/total_num_tokens"] = tokens
    values["perf/time_per_step"] = step_s
    values["perf/throughput"] = tokens / step_s / form.gpus
    for name in form.numpy:
        if name in values:
            values[name] = np.float64(values[name])
    return values


def line(form: Form, step: int, values: Mapping[str, Any]) -> str:
    """Write a step as verl does, without a line end."""
    numbers = (f"{name}:{form.number(value)}" for name, value in values.items())
    return form.prefix + " - ".join((f"step:{step}", *numbers))


def log(form: Form, steps: range, **choice: Any) -> str:
    """Write a log: what stands around, a validation when it begins at the first step, and steps."""
    lines = [
        f"{form.prefix}{{'actor_rollout_ref': {{'actor': {{'strategy': 'fsdp'}}}},",
        f"{form.prefix}Total training steps: {steps.stop - 1}",
        "(WorkerDict pid=5) loaded [repeated 7x across cluster]",
    ]
    if steps.start == 1:
        lines += [
            f'{form.prefix}("Initial validation metrics: {dict(form.validation)}")',
            line(form, 0, form.validation),
        ]
    for step in steps:
        lines += [
            f"{form.prefix}Training Progress:  {step}%|#         | {step}/{steps.stop - 1}",
            line(form, step, step_values(form, step, **choice)),
        ]
    lines.append(f'{form.prefix}("Final validation metrics: {dict(form.validation)}")')
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the fixtures."""
    FOLDER.mkdir(exist_ok=True)
    for name, form in FORMS.items():
        (FOLDER / f"{name}.log").write_text(log(form, range(1, 9)), encoding="utf-8")


if __name__ == "__main__":
    main()
