"""TransferQueue tracing: lines, trace ids and stage times of the traced functions.

switches    which parts are on, from the settings and the environment
trace_ids   which data a call works on
calls       one running function or client operation: its lines, events and sums
probes      what is traced, in which module
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.instrumentation import ray_init
from verl_profiler.transfer_queue.switches import (
    LOG_LEVEL_VARIABLE,
    RUN_VARIABLE,
    Switches,
    variables,
)

if TYPE_CHECKING:
    from verl_profiler.instrumentation.probe import Probe

_QUIET_LEVELS = ("WARN", "WARNING", "ERROR", "CRITICAL", "FATAL")


def activate(probes: Sequence[Probe] = (), *, records: bool = False) -> Sequence[Probe]:
    """Trace in this process if its environment requests it; in a driver, also in what it starts.

    Args:
        probes: What is measured in this process.
        records: Whether events of the family `transfer_queue` are recorded in it.

    Returns:
        The probes to place: these, and where anything is on those of tracing.

    Raises:
        ConfigError: For a variable whose value cannot be used.
    """
    switches = Switches().under(os.environ)
    if not switches.any:
        return probes
    from verl_profiler.transfer_queue import calls
    from verl_profiler.transfer_queue.probes import with_tracing

    job = _ray_job()
    if job is None:
        _become_driver(switches)
    calls.start(switches, os.environ.get(RUN_VARIABLE) or f"job {job}", records=records)
    return with_tracing(probes)


def carry(switches: Switches, *, v1: bool | None = None) -> dict[str, str]:
    """Return what Ray must hand to every process, and say what was switched on.

    Ray refuses a variable that the job (`ray job submit`) names too, so those are left to the job.

    Args:
        switches: What is on.
        v1: `trainer.use_v1`, where the config is known and has it.
    """
    _announce(switches, v1)
    job = mapping_or_empty(ray_init.job_environment().get("env_vars"))
    passed_on = variables(switches, os.environ)
    return {name: value for name, value in passed_on.items() if name not in job}


def wrap_main() -> None:
    """Wrap what the command itself defines and Ray ships by value; `main()` must have begun."""
    from verl_profiler.instrumentation.placing import place_in_main
    from verl_profiler.transfer_queue.probes import PROBES

    place_in_main(PROBES)


@functools.lru_cache(1)
def _become_driver(switches: Switches) -> None:
    """Hand the switches on with `ray.init`; Ray gives a running cluster none of our environment."""
    passed_on = carry(switches)
    os.environ[RUN_VARIABLE] = passed_on.get(RUN_VARIABLE, "")

    def at_ray_init() -> Mapping[str, str]:
        wrap_main()
        return passed_on

    ray_init.extend(variables=at_ray_init)


def _ray_job() -> str | None:
    """Return the Ray job that this process belongs to, or None in a driver before `ray.init`."""
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    if worker is None or not getattr(worker, "connected", False):
        return None
    return str(worker.current_job_id.hex())


@functools.lru_cache(1)
def _announce(switches: Switches, v1: bool | None) -> None:
    from verl_profiler.recording.complaints import announce

    parts = {
        "TRACE lines": switches.trace,
        "DETAIL lines": switches.detail,
    }
    text = ", ".join(part for part, on in parts.items() if on)
    if switches.sample_every > 1:
        text += f"; lines of every {switches.sample_every}th call"
    announce(f"TransferQueue tracing: {text}")
    nothing = _nothing_to_trace(v1)
    if nothing:
        announce(
            f"WARNING TransferQueue tracing: {nothing}, so there is nothing to trace. Training is "
            "not affected. (tq-not-there)"
        )
        return
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").strip().upper()
    if level in _QUIET_LEVELS:
        announce(
            f"WARNING {LOG_LEVEL_VARIABLE}={level} hides the TRACE and DETAIL lines.\n"
            f"Unset it or set it to INFO. (tq-lines-hidden)"
        )


def _nothing_to_trace(v1: bool | None) -> str | None:
    """Say why this run moves nothing through TransferQueue, where that is known."""
    if importlib.util.find_spec("transfer_queue") is None:
        return "TransferQueue is not installed"
    if v1 is False:
        return "verl's V0 trainer (trainer.use_v1=false) does not use TransferQueue"
    verl = importlib.util.find_spec("verl")
    folders = (verl.submodule_search_locations if verl is not None else None) or ()
    if any(Path(folder, "utils", "transferqueue_utils.py").exists() for folder in folders):
        return None
    return "the installed verl does not use TransferQueue (0.6.x, 0.7.0, 0.8 and later do)"
