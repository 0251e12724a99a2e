"""What a driver adds to `ray.init`: environment variables, and the hook that brings in the plugin.

Ray runs this worker process set-up hook in every process of a job.  Those with verl 0.9 load plugins
themselves; those without verl, and all of older versions, need the hook.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import wrapt

from verl_profiler.events.json_values import is_object, mapping_or_empty
from verl_profiler.recording.complaints import announce

_KEY = "worker_process_setup_hook"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class Additions:
    """What is added to each `ray.init` of a process."""

    def __init__(self) -> None:
        self._variables: list[Callable[[], Mapping[str, str]]] = []
        self._started: list[Callable[[Any, bool], None]] = []

    def extend(
        self,
        *,
        variables: Callable[[], Mapping[str, str]] | None = None,
        started: Callable[[Any, bool], None] | None = None,
    ) -> None:
        """Make `ray.init` of this process set the hook, now or when Ray is imported.

        Args:
            variables: Called at `ray.init`; returns what the environment of the workers gets unless the user
                sets it.
            started: Called after it with Ray, and whether it went through Ray Client.  Must not raise.
        """
        if variables is not None:
            self._variables.append(variables)
        if started is not None and started not in self._started:
            self._started.append(started)
        if "ray" in sys.modules:
            self._wrap(sys.modules["ray"])
        else:
            wrapt.register_post_import_hook(self._wrap, "ray")

    def _wrap(self, ray: Any) -> None:
        original = ray.init
        if getattr(original, "__verl_profiler__", False):
            return

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            # Ray Client exports no callables.
            address = kwargs.get("address") or (args[0] if args else "")
            through_client = str(address).startswith("ray://")
            try:
                self._pass_on(kwargs)
                if not through_client:
                    set_up_workers(kwargs)
            except Exception as error:  # noqa: BLE001  the run starts in any case
                announce(f"WARNING processes without verl are not recorded: {error!r}")
            result = original(*args, **kwargs)
            for started in self._started:
                started(ray, through_client)
            return result

        init.__verl_profiler__ = True  # type: ignore[attr-defined]
        ray.init = init

    def _pass_on(self, kwargs: dict[str, Any]) -> None:
        """Add our variables to the environment of the workers; the user's values stay."""
        passed_on = {name: value for given in self._variables for name, value in given().items()}
        runtime_env = _runtime_env(kwargs)
        if passed_on and runtime_env is not None:
            there: dict[str, str] = runtime_env.get("env_vars") or {}
            kwargs["runtime_env"] = {**runtime_env, "env_vars": {**passed_on, **there}}


extend = Additions().extend


def set_up_workers(kwargs: dict[str, Any]) -> None:
    """Put the hook into the arguments of a `ray.init`; a hook of the user's runs first.

    Args:
        kwargs: The arguments that have names; changed in place.
    """
    runtime_env = _runtime_env(kwargs)
    if runtime_env is None:
        return
    users = runtime_env.get(_KEY)
    ours = getattr(users, "__verl_profiler__", False)
    if not ours and not _job_has_hook(os.environ.get(_JOB)):
        kwargs["runtime_env"] = {**runtime_env, _KEY: make_hook(users)}


def _runtime_env(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the runtime environment, or None for a `RuntimeEnv` object or what Ray will refuse."""
    given = kwargs.get("runtime_env")
    return {} if given is None else given if is_object(given) else None


def job_environment(config: str | None = None) -> Mapping[str, Any]:
    """Return the runtime environment that the Ray job was submitted with; empty outside of `ray job submit`.

    Args:
        config: The job's config; None for that of this process.
    """
    try:
        job = json.loads(os.environ.get(_JOB, "{}") if config is None else config)
        return mapping_or_empty(job["runtime_env"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


@functools.lru_cache(1)
def _job_has_hook(config: str | None) -> bool:
    """Whether `ray job submit` set a hook already; Ray refuses a second one."""
    if job_environment(config).get(_KEY):
        announce(
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
