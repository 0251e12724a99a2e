"""The entry point and the Hydra overrides of a user's training command, also of a shell script's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl_profiler.errors import ConfigError

__all__ = ["CommandLine", "is_command", "parse"]

# Hydra's options that take a value → what that is.
_OPTIONS = {
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-path", "-cp"), "path"),
    **dict.fromkeys(("--config-dir", "-cd"), "dir"),
}
# What a script is answered in their place; the first line that starts a training is kept.
_CATCH = """#!{python}
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
entry = next((w for b, w in zip(["", *words], words) if b == "-m" or w.endswith(".py") and "=" not in w), "")
if entry and ("main" in entry or "trainer" in entry or "fully_async" in entry):
    with open({caught!r}, "a") as file:
        file.write(json.dumps([name, *words]) + chr(10))
elif name.startswith("python"):
    os.execv({python!r}, [{python!r}, *words])
"""
# `ray` and `pip` would change the machine.
_CAUGHT = ("python", "python3", "uv", "ray", "torchrun", "accelerate", "pip", "pip3")
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
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            raise ConfigError(
                f"{word!r} is not a Hydra override.\nGive the arguments after `{entry}`, for example "
                "trainer.profile_steps=[1,2].",
                "config-value",
            )
    return CommandLine(entry, config, overrides)


def _of_script(words: Sequence[str]) -> list[str]:
    """Run a shell script in which Python, Ray and pip are caught; return the command that trains.

    Raises:
        ConfigError: The script starts no training.
    """
    command = list(words) if words[0] in ("bash", "sh") else ["bash", *words]
    with tempfile.TemporaryDirectory(prefix="verl-profiler-") as folder:
        caught = Path(folder, "caught")
        for name in _CAUGHT:
            program = Path(folder, name)
            program.write_text(_CATCH.format(python=sys.executable, caught=str(caught)))
            program.chmod(0o755)
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        try:
            subprocess.run(  # noqa: S603  the user asks for it
                command, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_SCRIPT_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"`{' '.join(words)}` cannot be run: {error}.\nGive the Python command that it runs",
                "config-value",
            ) from None
        lines = caught.read_text().splitlines() if caught.exists() else []
    if not lines:
        raise ConfigError(
            f"`{' '.join(words)}` starts no training in Python.\nGive the Python command that it runs",
            "config-value",
        )
    return json.loads(lines[0])
