"""The entry point and the Hydra overrides of a user's training command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from verl_profiler.errors import ConfigError

__all__ = ["CommandLine", "is_command", "parse"]

# Hydra's options that take a value → what that is.
_OPTIONS = {
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-path", "-cp"), "path"),
    **dict.fromkeys(("--config-dir", "-cd"), "dir"),
}


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
    """Take a command apart: `python -m MODULE …` or `python FILE.py …`, behind any launcher.

    Raises:
        ConfigError: It has no entry point, or a word that is no override.
    """
    rest = list(words)
    if "-m" in rest[:-1]:
        rest = rest[rest.index("-m") + 1 :]
    else:
        scripts = [place for place, word in enumerate(rest) if word.endswith(".py")]
        if not scripts:
            raise ConfigError(
                f"`{' '.join(words[:4])}` names no module or script in Python.\nGive the Python command, "
                "of a shell script the one that it runs: python -m verl.trainer.main_ppo OVERRIDE …",
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
