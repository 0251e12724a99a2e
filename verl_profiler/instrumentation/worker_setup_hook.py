"""Ray's worker process set-up hook, which brings the plugin into every process of a job.

verl 0.9 loads plugins itself; processes without verl, and all of older versions, need the hook.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from verl_profiler.events.json_values import is_object
from verl_profiler.recording import recorder

__all__ = ["add", "is_through_client", "make_hook"]

_KEY = "worker_process_setup_hook"


def add(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Put the hook into the arguments of a `ray.init`; a hook of the user's runs first.

    Args:
        args: The positional arguments.
        kwargs: The others; changed in place.
    """
    given = kwargs.get("runtime_env")
    if is_through_client(args, kwargs) or not (given is None or is_object(given)):
        return
    runtime_env: dict[str, Any] = {} if given is None else given
    users = runtime_env.get(_KEY)
    ours = getattr(users, "__verl_profiler__", False)
    if not ours and not _job_has_hook(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")):
        kwargs["runtime_env"] = {**runtime_env, _KEY: make_hook(users)}


def is_through_client(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of `ray.init` ask for Ray Client (ray://), which exports no callables."""
    return str(kwargs.get("address") or (args[0] if args else "")).startswith("ray://")


@functools.lru_cache(1)
def _job_has_hook(job_config: str) -> bool:
    """Whether `ray job submit` set a hook already; Ray refuses a second one."""
    try:
        hook = json.loads(job_config)["runtime_env"][_KEY]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    if hook:
        recorder.announce(
            f"WARNING the Ray job has a {_KEY} of its own, so processes that do "
            "not import verl (TransferQueue's) are not recorded. (job-hook)"
        )
        return True
    return False


def make_hook(users: str | Callable[[], Any] | None) -> Callable[[], None]:
    """Return the set-up hook: the user's own first, then ours.

    It travels by value.  Named by a string, a node without this package could not import it, and
    Ray would end each worker there as soon as it starts (ray 2.60 default_worker.py:314).
    """

    def verl_profiler_setup_hook() -> None:
        if isinstance(users, str):
            import importlib

            module, _, name = users.rpartition(".")
            getattr(importlib.import_module(module), name)()
        elif users is not None:
            users()
        try:
            import importlib

            importlib.import_module("verl_profiler.plugin")
        except Exception as error:  # noqa: BLE001
            import contextlib
            import sys

            # stderr may be closed.
            with contextlib.suppress(Exception):
                print(
                    "[verl-profiler] WARNING not installed on this node, nothing is recorded: "
                    f"{error!r}",
                    file=sys.stderr,
                    flush=True,
                )

    # cloudpickle ships functions of `__main__` by value.
    verl_profiler_setup_hook.__module__ = "__main__"
    verl_profiler_setup_hook.__verl_profiler__ = True  # type: ignore[attr-defined]
    return verl_profiler_setup_hook
