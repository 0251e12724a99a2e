"""The entry point in every process of a run: importing it activates the probes.

verl 0.9 imports it through the entry-point group `verl.plugins`.  With older verl the driver imports it
from Hydra's search-path plugin, and other processes, also those without verl, from Ray's worker process
setup hook.  Without `VERL_PROFILER_SETTINGS` or a TransferQueue switch (`TQ_…`) in the environment
it does nothing.  It imports neither verl nor Ray, and it never raises: verl logs plugin failures
at DEBUG level, and Ray kills a worker whose hook fails, so failures are printed here and training
continues.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from verl_profiler.environ import NVTX_LIBRARY, SETTINGS, TRANSFER_QUEUE_SWITCHES

if TYPE_CHECKING:
    from verl_profiler.instrumentation.probe import Probe

__all__ = ["activate"]


def activate(role: str | None = None) -> bool:
    """Start recording in this process if the environment requests it.

    Args:
        role: Role of this process, unless it can be inferred; the driver passes `driver`.

    Returns:
        Whether this process records now.
    """
    text = os.environ.get(SETTINGS)
    try:
        if not text:
            if role is None and _transfers_are_traced():
                _place_probes(())
            return False
        from verl_profiler.recording import recorder
        from verl_profiler.recording.identity import Identity, identify
        from verl_profiler.recording.worker_config import WorkerConfig

        config = WorkerConfig.decode(text)
        if recorder.active() is not None:
            return True
        plan = _plan(config)
        if plan is not None:
            from verl_profiler.capture.plan import restore_umask

            restore_umask(plan.umask)
        if role is not None:
            identity = Identity(role, None)
            recorder.start(config, lambda: identity, _describe)
            # A main module that imports actor classes takes them to all processes (verl.experimental).
            _place_probes(config.events.active_families(), in_driver=True)
        else:
            recorder.start(config, identify, _describe)
            families = config.events.active_families()
            _place_probes(families)
            if plan is not None:
                from verl_profiler.capture.probes import install

                install(plan)
            _open_ranges()
    except Exception:  # noqa: BLE001  see the module docstring
        _complain("this process records nothing; training is not affected. (plugin-failed)")
        return False
    return True


def _plan(config: Any) -> Any:
    """Return the capture plan; runs without captures import nothing for it."""
    if config.capture_plan is None:
        return None
    from verl_profiler.capture.plan import decoded_plan

    return decoded_plan(config.capture_plan)


def _open_ranges() -> None:
    """Open NVTX ranges if a tool records them."""
    if os.environ.get(NVTX_LIBRARY):
        from verl_profiler.instrumentation import nvtx_ranges

        nvtx_ranges.switch_on()


def _transfers_are_traced() -> bool:
    return any(os.environ.get(name, "0") not in ("", "0") for name in TRANSFER_QUEUE_SWITCHES)


def _with_tracing(probes: Sequence[Probe], families: Collection[str]) -> Sequence[Probe]:
    """Return the probes, with those of TransferQueue tracing if the environment requests it."""
    if not _transfers_are_traced():
        return probes
    try:
        from verl_profiler import transfer_queue

        return transfer_queue.activate(probes, records="transfer_queue" in families)
    except Exception:  # noqa: BLE001  see the module docstring
        _complain(
            "TransferQueue is not traced in this process; training is not affected. (plugin-failed)"
        )
        return probes


def _complain(text: str) -> None:
    """Print a warning and the current exception; stderr may be closed."""
    with contextlib.suppress(Exception):
        print(
            f"[verl-profiler] WARNING {text}\n{traceback.format_exc().rstrip()}",
            file=sys.stderr,
            flush=True,
        )


def _place_probes(families: Collection[str], *, in_driver: bool = False) -> None:
    """Place the probes of these families, and those of tracing even if nothing is recorded.

    Those of tracing are left out in the driver, which places its own.
    """
    from verl_profiler.instrumentation import placing
    from verl_profiler.probes import select

    probes = select(families) if families else []
    if in_driver:
        placing.install(probes, only_exported_of="all")
        placing.place_in_main(probes)
        return
    # A driver of verl before 0.9 has imported verl by now.
    exported = "none" if families else "loaded"
    placing.install(_with_tracing(probes, families), only_exported_of=exported)
    if families:
        from verl_profiler.recording import device_sampler, open_state

        open_state.begin()
        device_sampler.begin()
    if "rollout" in families:
        from verl_profiler.recording import recorder
        from verl_profiler.recording.requests import finish_open_requests

        recorder.before_stop(finish_open_requests)


def _describe() -> dict[str, Any]:
    """Return versions and probe status for the process header."""
    from verl_profiler.instrumentation.status import status

    return {
        "versions": _versions(),
        "probes": {
            "installed": dict(status.installed),
            "missed": dict(status.missed),
            "hits": dict(status.hits),
            "errors": dict(status.errors),
        },
    }


def _versions() -> dict[str, str]:
    """Return the versions of imported packages, without disk access."""
    versions: dict[str, str] = {}
    for name in ("verl_profiler", "verl", "ray", "torch", "sglang", "vllm", "transfer_queue"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None) if module is not None else None
        if isinstance(version, str):
            versions[name] = version
    return versions


activate()
