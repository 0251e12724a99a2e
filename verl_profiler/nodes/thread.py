"""Visit the nodes of a cluster during a run, from a thread of the driver."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from verl_profiler.nodes import clock
from verl_profiler.nodes.rounds import Nodes
from verl_profiler.recording.complaints import announce

# The first rounds follow each other closely; clocks, headers and open calls have this interval, if events
# do not travel more often.
_FIRST_S = (0.0, 2.0, 5.0, 10.0)
LIGHT_S = 30.0
_PATIENCE_S = 5.0

_thread: _Thread | None = None


class _Thread(threading.Thread):
    def __init__(self, ray: Any, run: Path, every_s: float | None) -> None:
        super().__init__(name="verl-profiler nodes", daemon=True)
        self.run_directory = run
        self.pid = os.getpid()
        self._ray = ray
        self._every_s = every_s
        self._ended = threading.Event()
        self.nodes = Nodes(ray, run, every_s=every_s, clocks=True, files=every_s is not None)

    def run(self) -> None:
        """Visit the nodes until the end; a failing head may come back."""
        waits = iter(_FIRST_S)
        last_s = time.monotonic()
        while not self._ended.wait(next(waits, min(LIGHT_S, self._every_s or LIGHT_S))):
            # Timers may be early by a little.
            light = time.monotonic() - last_s < 0.99 * (self._every_s or 0.0)
            if not light:
                last_s = time.monotonic()
            if not self._ray.is_initialized():
                return
            with contextlib.suppress(Exception):
                # A node that is slow goes on by itself.
                self.nodes.round(light=light, patience_s=_PATIENCE_S)

    def end(self) -> None:
        """Ship what is left; print what could not be shipped."""
        self._ended.set()
        self.join(timeout=2 * LIGHT_S)
        again = f"While the cluster is up, run: verl-profiler collect --ray {self.run_directory}"
        if not self._ray.is_initialized():
            if self.nodes.sent():
                announce(
                    "WARNING Ray has been shut down; event files of other nodes lack what was written "
                    f"since their last shipment. {again} (not-shipped)"
                )
            return
        for problem in self.nodes.finish():
            announce(f"WARNING {problem}. {again} (not-shipped)")
        for host, size_bytes in self.nodes.sent():
            announce(f"{size_bytes:,} bytes of events came from {host}")


def start(ray: Any, run: Path, every_s: float | None) -> None:
    """Start to compare clocks and to ship; returns at once.

    Args:
        ray: The module, connected.
        run: The run directory.
        every_s: The interval between two shipments of events; None to leave them where they are.
    """
    global _thread
    if _thread is None:
        # Called before Ray's own function, which was registered when Ray was imported.
        atexit.register(finish)
    clock.begin()
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
        announce(f"WARNING event files of other nodes were not shipped: {error!r} (not-shipped)")
