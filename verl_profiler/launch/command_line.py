"""The entry point and the Hydra overrides of a user's training command, also of a shell script's."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_profiler.errors import ConfigError

# Hydra's options that take a value → what that is.
_OPTIONS = {
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-path", "-cp"), "path"),
    **dict.fromkeys(("--config-dir", "-cd"), "dir"),
}
# Each Python of a script reads this first, by whatever path it is called: what trains is kept and not run.
_SITE = """import json, os, sys
words = sys.orig_argv[1:]
entry = next((w for b, w in zip(["", *words], words) if b == "-m" or w.endswith(".py") and "=" not in w), "")
trains = "main" in entry or "trainer" in entry or "fully_async" in entry
if trains:
    with open({kept!r}, "a") as file:
        file.write(json.dumps(words) + chr(10))
if trains or words and os.path.basename(words[0]) in {never}:
    os._exit(0)
"""
# They would change the machine, load models, or start what is in their arguments.
_NEVER = (
    *("uv", "ray", "torchrun", "accelerate", "pip", "pip3"),
    *("srun", "sbatch", "mpirun", "docker", "kubectl", "ssh"),
    *("hf", "huggingface-cli", "git", "wget", "curl"),
)
_SCRIPT_S = 60


class CommandLine(NamedTuple):
    """A training command.

    Args:
        entry: A module, or the path of a script in Python.
        config: Hydra's `name`, `path` and `dir`, as far as given.
        overrides: Hydra's, as given.
    """

    entry: str
    config: dict[str, str]
    overrides: list[str]


def is_command(words: Sequence[str]) -> bool:
    """Return whether words are a command rather than overrides."""
    return any(
        word == "-m" or (word.endswith((".py", ".sh")) and "=" not in word) for word in words
    )


def parse(words: Sequence[str]) -> CommandLine:
    """Take a command apart: `python -m MODULE …`, `python FILE.py …`, behind any launcher, or `bash SCRIPT`.

    Raises:
        ConfigError: It has no entry point, or a word that is no override.
    """
    rest = list(words)
    shell = [word for word in rest[:3] if word.endswith(".sh")]
    if shell:
        rest = _of_script(rest)
    if "-m" in rest[:-1]:
        rest = rest[rest.index("-m") + 1 :]
    else:
        scripts = [place for place, word in enumerate(rest) if word.endswith(".py")]
        if not scripts:
            raise ConfigError(
                f"`{' '.join(words[:4])}` names no module or script in Python.\nGive the training "
                "command: python -m verl.trainer.main_ppo OVERRIDE …",
                "config-value",
            )
        rest = rest[scripts[0] :]
    entry, *rest = rest
    config: dict[str, str] = {}
    overrides: list[str] = []
    while rest:
        word = rest.pop(0)
        option, given, value = word.partition("=")
        if option in _OPTIONS:
            config[_OPTIONS[option]] = value if given else (rest.pop(0) if rest else "")
        else:
            overrides.append(word)
    check_overrides(overrides, f"the arguments after `{entry}`")
    return CommandLine(entry, config, overrides)


def check_overrides(words: Iterable[str], what: str) -> None:
    """Check that words are Hydra overrides, by their form.

    Raises:
        ConfigError: One is not; `what` is to be given instead.
    """
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(
                f"{word!r} is not a Hydra override.\nGive {what}, for example "
                "trainer.profile_steps=[1,2].",
                "config-value",
            )


def _of_script(words: Sequence[str]) -> list[str]:
    """Run a shell script in which Python, Ray and pip are caught; return the command that trains.

    Raises:
        ConfigError: The script starts no training.
    """
    command = list(words) if words[0] in ("bash", "sh") else ["bash", *words]
    with tempfile.TemporaryDirectory(prefix="verl-profiler-") as folder:
        kept = Path(folder, "kept")
        Path(folder, "sitecustomize.py").write_text(_SITE.format(kept=str(kept), never=_NEVER))
        programs = dict.fromkeys(_NEVER, f"#!{sys.executable}\n")
        for name in ("python", "python3"):
            programs[name] = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        for name, text in programs.items():
            Path(folder, name).write_text(text)
            Path(folder, name).chmod(0o755)
        before = {"PATH": os.defpath, "PYTHONPATH": ""}
        found = {key: os.environ.get(key, usual) for key, usual in before.items()}
        first = {
            key: os.pathsep.join([folder, *filter(None, [each])]) for key, each in found.items()
        }
        try:
            # bash reads it before the script; a limit that cannot be raised here would end that.
            Path(folder, "bash").write_text("ulimit() { :; }\n")
            apart = {"BASH_ENV": str(Path(folder, "bash")), "HF_HUB_OFFLINE": "1"}
            last = _run(command, {**os.environ, **first, **apart})
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"`{' '.join(words)}` cannot be run: {error}.\nGive the Python command that it runs",
                "config-value",
            ) from None
        lines = kept.read_text().splitlines() if kept.exists() else []
    if not lines:
        raise ConfigError(
            f"`{' '.join(words)}` starts no training in Python{last and f'; it ended with: {last}'}.\n"
            "Set what it needs, or give the Python command that it runs",
            "config-value",
        )
    return json.loads(lines[0])


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a program without input; return its last line, and end all that it started if it takes long."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as printed,
        subprocess.Popen(  # noqa: S603  the user asks for it
            command, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            process.wait(_SCRIPT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        printed.seek(0)
        # `set -x` marks what it runs.
        lines = [line.strip() for line in printed if line.strip() and not line.startswith("+")]
        return lines[-1] if lines else ""
