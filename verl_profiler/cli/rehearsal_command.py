"""Build the trainer command that `verl-profiler rehearse` runs or prints."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_profiler.rehearsal.environment import environment
from verl_profiler.render.visible import escaped

__all__ = ["ENGINES", "TRAINERS", "Command", "build"]

# verl's `trainer.v1.trainer_mode`.
TRAINERS = ("sync", "colocate_async", "separate_async")

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
    arguments = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"+rehearsal={option}",
    ]
    if profiler != "none":
        arguments += [f"+profiler={profiler}", f"profiler.output_dir={_quoted(output)}"]
    arguments += [
        f"hydra.run.dir={_quoted(output / 'hydra')}",
        f"trainer.total_training_steps={steps}",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.rollout.agent.num_workers={workers}",
        *([f"trainer.v1.trainer_mode={trainer}"] if trainer != "sync" else []),
        *overrides,
    ]
    return Command(tuple(arguments), environment(engine, current))


def _quoted(path: Path) -> str:
    """Quote a path as a value of a Hydra override, whose grammar reserves `=`, `,` and others."""
    text = str(path)
    if re.fullmatch(r"[\w/.+-]+", text):
        return text
    # A backslash is literal in Hydra's grammar, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"
