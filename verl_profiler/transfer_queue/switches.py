"""What is switched on: `profiler.transfer_queue`, over it the environment of the command.

The environment is also what carries the switches to the other processes (see `variables`), so that
they work with `+profiler=…` and without it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_profiler.errors import ConfigError

# Names the run, so that trace ids of two runs differ.
RUN_VARIABLE = "TQ_TRACE_RUN"
LOG_LEVEL_VARIABLE = "VERL_LOGGING_LEVEL"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


class TracingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.transfer_queue`.

    Args:
        trace: `[TQ-TRACE]` lines and events of the traced functions and their stages.
        detail: `[TQ-DETAIL]` lines of the client's gets and puts.
    """

    trace: bool = False
    detail: bool = False

    def under(self, environment: Mapping[str, str]) -> Switches:
        """Return these settings with the values of the environment instead.

        Raises:
            ConfigError: For a variable whose value cannot be read.
        """
        changes: dict[str, Any] = {}
        for variable, (field, read, expected) in _VARIABLES.items():
            text = environment.get(variable)
            if text is None:
                continue
            try:
                changes[field] = read(text)
            except ValueError:
                raise ConfigError(
                    f"{variable}={text} in the environment: {expected}.", "config-value"
                ) from None
        return Switches(**{**msgspec.structs.asdict(self), **changes})


class Switches(TracingSettings, frozen=True):
    """What is switched on in a process.

    Args:
        sample_every: Print every N-th call of a function, and of the client outside of functions.
    """

    sample_every: int = 1

    @property
    def any(self) -> bool:
        """Whether anything is on."""
        return self.trace or self.detail


def _read_switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _read_every(text: str) -> int:
    every = int(text)
    if every < 1:
        raise ValueError(text)
    return every


# Variables that set one field each: how they are read, and what is expected.
_VARIABLES = {
    "TQ_TRACE_ENABLED": ("trace", _read_switch, "use 1 or 0"),
    "TQ_TRACE_DETAIL_ENABLED": ("detail", _read_switch, "use 1 or 0"),
    "TQ_TRACE_SAMPLE_EVERY": (
        "sample_every",
        _read_every,
        "use 1 for all calls, 10 for every tenth",
    ),
}


def variables(switches: Switches, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that carry the switches to the other processes.

    Args:
        switches: What is on.
        environment: The driver's; its log level goes along.
    """
    passed_on: dict[str, str] = {}
    for variable, (field, _, _) in _VARIABLES.items():
        value = getattr(switches, field)
        passed_on[variable] = str(int(value))
    passed_on[RUN_VARIABLE] = str(uuid.uuid4())
    if environment.get(LOG_LEVEL_VARIABLE):
        passed_on[LOG_LEVEL_VARIABLE] = environment[LOG_LEVEL_VARIABLE]
    return passed_on
