"""Build the trainer command that `verl-profiler rehearse` runs or prints."""

from __future__ import annotations

import importlib.resources
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_profiler.launch.command_line import CommandLine
from verl_profiler.rehearsal.environment import environment
from verl_profiler.render.visible import escaped

_MAIN = "verl.trainer.main_ppo"
_TO_URL = re.compile(r"""\+*profiler\.output_dir=["']?[a-z][a-z0-9+.-]+://""")
# Trainers with main modules of their own, and overrides for a small run.
_OTHERS = {
    # Of verl 0.8 only.
    "main_ppo_sync": ("verl.trainer.main_ppo_sync", ()),
    "one_step_off": (
        "verl.experimental.one_step_off_policy.main_ppo",
        (
            # verl 0.9.1 looks for `ppo_trainer` in a folder of the working directory.
            "hydra.searchpath=[pkg://verl.trainer.config]",
            "rollout.n_gpus_per_node=1",
        ),
    ),
    "fully_async": (
        "verl.experimental.fully_async_policy.fully_async_main",
        (
            "rollout.n_gpus_per_node=1",
            # As many as the steps need.
            "rollout.total_rollout_steps=null",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "async_training.trigger_parameter_sync_step=2",
            "async_training.staleness_threshold=0.5",
        ),
    ),
}
# The others are verl's `trainer.v1.trainer_mode`.
TRAINERS = ("sync", "colocate_async", "separate_async", *_OTHERS)

# The override that leaves out the algorithm, tools and agent loop of a rehearsal without a command.
NO_EXAMPLE = "~rehearsal/example@_global_"

# Engines with models of their own.
_APART = r"(reward\.)?reward_model|distillation"
# Overrides, and what of them is not rehearsed.
_NOT_REHEARSED = (
    (
        rf"\+*({_APART})\.enabled?=true",
        "the reward model and the teachers of a distillation, which are engines with models of their own",
    ),
    (
        r"\+*(model_engine|.+\.strategy)=(?!dp$|fsdp2?$).+",
        "the trainer's engine, which needs GPUs; FSDP2 trains instead",
    ),
    (r"\+*data\.(image|video)_key=.+", "images and videos; the generated model reads text"),
)
# Sizes, machines and places of a real training, besides what the rehearsal group sets.
_SIZES = re.compile(
    r"trainer\.(nnodes|n_gpus_per_node|total_training_steps|total_epochs|logger|default_\w+_dir|resume_\w+"
    r"|save_freq|device|val_before_train)"
    r"|data\.(gen_batch_size|val_batch_size|truncation)"
    r"|model_engine|(.+\.)?(fsdp|fsdp_config|megatron|veomni|torchtitan|automodel)\..+"
    # An optimizer's own, of the engine that is replaced.
    r"|.+\.optim\.(?!(lr|betas|weight_decay|lr_warmup_steps|lr_warmup_steps_ratio)$).+"
    r"|(.+\.)?\w*(micro_batch_size|max_token_len|mini_batch_size|parallel_size|use_dynamic_bsz)\w*"
    r"|(actor_rollout_ref|critic)\.model\.(?!(lora_rank|lora_alpha|target_modules|exclude_modules)$).+"
    r"|(.+\.)?strategy"
    r"|actor_rollout_ref\.rollout\.(prompt_length|response_length|max_\w+|engine_kwargs\..+|mode|nnodes"
    r"|n_gpus_per_node|free_cache_engine|enable_\w+|checkpoint_engine\..+)"
    r"|rollout\.(nnodes|n_gpus_per_node|total_rollout_steps)"
    rf"|({_APART})\..+"
    r"|ray_kwargs\..+|(.+\.)?profiler(\..+)?|rehearsal(\..+)?|global_profiler\..+|hydra\.run\.dir"
)
# Kept where the user's file is on this machine.
_FILES = re.compile(r".*(_files|_path|\.path|_dir)")
_TOOLS = re.compile(r"actor_rollout_ref\.rollout\.multi_turn\.(function_tool|tool_config)_path")
_KEY = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[^=@]+)(@[^=]*)?(=(?P<value>.*))?", re.DOTALL)

# Engine → the option of the `rehearsal` group, and its description.
ENGINES = {
    "sglang": ("cpu", "the real SGLang on its CPU path"),
    "vllm": ("vllm", "the real vLLM, built for CPUs"),
    "standin": ("standin", "a small stand-in for the engine"),
}


@dataclass(frozen=True)
class Command:
    """A command line, and the environment variables to add for it."""

    arguments: tuple[str, ...]
    variables: dict[str, str]

    def shell(self) -> str:
        """Return the command in shell syntax."""
        variables = [f"{name}={_shell_quoted(value)}" for name, value in self.variables.items()]
        lines = ["env", *variables, " ".join(map(_shell_quoted, self.arguments[:3]))]
        lines += map(_shell_quoted, self.arguments[3:])
        return " \\\n    ".join(lines)


def _shell_quoted(word: str) -> str:
    """Quote an argument for a shell; control characters as `$'…'`."""
    if escaped(word) == word:
        return shlex.quote(word)
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{escaped(quoted)}'"


def build(
    *,
    engine: str,
    profiler: str,
    output: Path,
    steps: int,
    ranks: int,
    workers: int,
    overrides: Sequence[str],
    current: Mapping[str, str],
    trainer: str = "sync",
) -> Command:
    """Return the command of a rehearsal.

    Args:
        engine: A key of `ENGINES`.
        profiler: An option of the `profiler` group, or "none".
        output: The run directory.
        steps: Training steps.
        ranks: Ranks of the trainer; as many engine replicas.
        workers: Agent-loop workers.
        overrides: Hydra overrides, which take precedence over all of the above.
        current: The environment to start from.
        trainer: One of `TRAINERS`.
    """
    option, _ = ENGINES[engine]
    mode = [] if trainer == "sync" else [f"trainer.v1.trainer_mode={trainer}"]
    main, needed = _OTHERS.get(trainer, (_MAIN, mode))
    arguments = [sys.executable, "-m", main, f"+rehearsal={option}"]
    if profiler != "none":
        arguments += [f"+profiler={profiler}", f"profiler.output_dir={_quoted(output)}"]
        if any(_TO_URL.match(each) for each in overrides):
            # The run is written here, and uploaded.
            arguments.append(f"profiler.spool_dir={_quoted(output)}")
    arguments += [
        f"hydra.run.dir={_quoted(output / 'hydra')}",
        f"trainer.total_training_steps={steps}",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.rollout.agent.num_workers={workers}",
        *needed,
        *overrides,
    ]
    return Command(tuple(arguments), environment(engine, current))


def trainer_of(command: CommandLine) -> str | None:
    """Return the trainer that a command starts, one of `TRAINERS`; None if no rehearsal knows its module."""
    names = {main: name for name, (main, _) in _OTHERS.items()}
    return names.get(command.entry, "sync" if command.entry == _MAIN else None)


def without_sizes(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a training's overrides into those that a rehearsal keeps and those that it replaces.

    Replaced are sizes, model, engine, GPUs, paths that are not on this machine, and profiling; what is
    rehearsed is the rest: rewards, tools, agent loops, algorithm, sampling.
    """
    from omegaconf import OmegaConf

    from verl_profiler.launch.dry_run import leaves

    file = importlib.resources.files("verl_profiler.configs") / "rehearsal" / "cpu.yaml"
    toy = {key for key, _ in leaves(OmegaConf.create(file.read_text()))}
    kept: list[str] = []
    replaced: list[str] = []
    for override in overrides:
        found = _KEY.fullmatch(override)
        key, value = (found["key"], found["value"] or "") if found else (override, "")
        here = _is_here(value)
        lost = _FILES.fullmatch(key) is not None and not here and value not in ("null", "")
        own = key in toy and not (here and not key.startswith("actor_rollout_ref.model."))
        (replaced if own or lost or _SIZES.fullmatch(key) else kept).append(override)
        if lost and _TOOLS.fullmatch(key):
            # So that tools are called; the generated model learns what is there.
            kept.append(f"{key}=rehearsal")
    if any(override.startswith(("data.train_files=", "data.val_files=")) for override in kept):
        # Prompts of their own, in the generated model's tokens.
        kept += ["data.max_prompt_length=2048", "data.filter_overlong_prompts=true"]
    return kept, replaced


def _is_here(value: str) -> bool:
    """Whether a path, or each path of a list, exists on this machine."""
    paths = [each.strip(" '\"") for each in value.strip("[]").split(",")]
    return all(each and Path(each).expanduser().exists() for each in paths)


def not_rehearsed(overrides: Sequence[str]) -> list[str]:
    """Return which parts of a training are left out of its rehearsal, and why."""
    return [
        part
        for pattern, part in _NOT_REHEARSED
        if any(re.match(pattern, override, re.IGNORECASE) for override in overrides)
    ]


def _quoted(path: Path) -> str:
    """Quote a path as a value of a Hydra override, whose grammar reserves `=`, `,` and others."""
    text = str(path)
    if re.fullmatch(r"[\w/.+-]+", text):
        return text
    # A backslash is literal in Hydra's grammar, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"
