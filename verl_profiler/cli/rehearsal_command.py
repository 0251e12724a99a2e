"""Build the command of a rehearsal: what `verl-profiler rehearse` runs, and prints when asked."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_profiler.rehearsal.environment import environment
from verl_profiler.render.visible import escaped

__all__ = ["ENGINES", "Command", "build"]

# Engine → the option of the `rehearsal` group, and what a person calls it.
ENGINES = {
    "sglang": ("cpu", "the real SGLang on its CPU path"),
    "vllm": ("vllm", "the real vLLM, built for CPUs"),
    "standin": ("standin", "a small stand-in for the engine"),
}


@dataclass(frozen=True)
class Command:
    """A command line, and the variables that are set for it beside those that exist."""

    arguments: tuple[str, ...]
    variables: dict[str, str]

    def shell(self) -> str:
        """Return the command as a shell takes it."""
        variables = [f"{name}={_shell_word(value)}" for name, value in self.variables.items()]
        lines = ["env", *variables, " ".join(map(_shell_word, self.arguments[:3]))]
        lines += map(_shell_word, self.arguments[3:])
        return " \\\n    ".join(lines)


def _shell_word(word: str) -> str:
    """Quote a word for a shell; one with control characters as bash writes it."""
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
) -> Command:
    """Return the command that rehearses.

    Args:
        engine: A key of `ENGINES`.
        profiler: An option of the `profiler` group, or "none".
        output: The run directory.
        steps: Training steps.
        ranks: Ranks of the trainer; as many engine replicas.
        workers: Agent-loop workers.
        overrides: Hydra overrides, which win over all of the above.
        current: The environment to start from.
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
        *overrides,
    ]
    return Command(tuple(arguments), environment(engine, current))


def _quoted(path: Path) -> str:
    """Return a path as a value of a Hydra override; its grammar gives `=`, `,` and more a meaning."""
    text = str(path)
    if re.fullmatch(r"[\w/.+-]+", text):
        return text
    # A backslash means itself there, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"
