"""Bring the events of nodes with disks of their own to the driver's, from a thread of the driver."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from verl_profiler.recording.complaints import say
from verl_profiler.shipping.nodes import LIGHT_S, Shipments

__all__ = ["finish", "start"]

_PATIENCE_S = 5.0

_thread: _Thread | None = None


class _Thread(threading.Thread):
    def __init__(self, ray: Any, run: Path, every_s: float) -> None:
        super().__init__(name="verl-profiler shipping", daemon=True)
        self.run_directory = run
        self.pid = os.getpid()
        self._ray = ray
        self._every_s = every_s
        self._ended = threading.Event()
        self.shipments = Shipments(ray, run, every_s=every_s)

    def run(self) -> None:
        """Ship until the end; a failing head may come back."""
        wait_s = min(LIGHT_S, self._every_s)
        last_s = time.monotonic()
        while not self._ended.wait(wait_s):
            # Timers may be early by a little.
            light = time.monotonic() - last_s < 0.99 * self._every_s
            if not light:
                last_s = time.monotonic()
            if not self._ray.is_initialized():
                return
            with contextlib.suppress(Exception):
                # A node that is slow goes on by itself.
                self.shipments.round(light=light, patience_s=_PATIENCE_S)

    def end(self) -> None:
        """Ship what is left; print what could not be shipped."""
        self._ended.set()
        self.join(timeout=2 * LIGHT_S)
        again = f"While the cluster is up, run: verl-profiler collect --ray {self.run_directory}"
        if not self._ray.is_initialized():
            if self.shipments.sent():
                say(
                    "WARNING Ray has been shut down; event files of other nodes lack what was written "
                    f"since their last shipment. {again} (not-shipped)"
                )
            return
        for problem in self.shipments.finish():
            say(f"WARNING {problem}. {again} (not-shipped)")
        for host, size_bytes in self.shipments.sent():
            say(f"{size_bytes:,} bytes of events came from {host}")


def start(ray: Any, run: Path, every_s: float) -> None:
    """Start to ship; returns at once.

    Args:
        ray: The module, connected.
        run: The run directory.
        every_s: The interval between two shipments of events.
    """
    global _thread
    if _thread is None:
        # Called before Ray's own function, which was registered when Ray was imported.
        atexit.register(finish)
    _thread = _Thread(ray, run, every_s)
    _thread.start()


def finish() -> None:
    """Ship what is left, while Ray still runs; does nothing the second time.  Never raises."""
    global _thread
    thread, _thread = _thread, None
    try:
        if thread is not None and thread.pid == os.getpid():
            thread.end()
    except Exception as error:  # noqa: BLE001  the command keeps its own result
        say(f"WARNING event files of other nodes were not shipped: {error!r} (not-shipped)")
