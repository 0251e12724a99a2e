"""Start and stop the captures of this process, and write each of them down.

Under nsys a capture is what lies between two calls that nsys waits for: an NVTX range of ours, or
`cudaProfilerStart` and `Stop` where the role's options say so.  With the torch profiler it is a
profiler of torch's that we hold.  Tools number their files; the journal says which step, rank and
process the k-th one belongs to, also when the process died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.capture.plan import CAPTURE_RANGE, Plan, RoleCapture, carried_plan
from verl_profiler.environ import CAPTURES_OFF, NVTX_LIBRARY
from verl_profiler.events.vocabulary import NVTX_DOMAIN
from verl_profiler.recording import context, recorder

__all__ = ["Process", "current", "note_step", "note_task", "start", "stop"]


class Process:
    """The captures of one process.

    Args:
        plan: What is captured.
        role: This process's role.
        rank: Its rank, or None.
    """

    def __init__(self, plan: Plan, role: str, rank: int | None) -> None:
        self.plan = plan
        self.role = role
        self.rank = rank
        self.capture: RoleCapture | None = plan.of(role, rank)
        self.count = 0
        self.step: int | None = None
        self.task: str | None = None
        self._open: Any = None

    @property
    def is_open(self) -> bool:
        """Whether a capture runs now."""
        return self._open is not None

    def start(self) -> None:
        """Start a capture, unless one runs or this process is not captured."""
        if self.is_open or self.capture is None:
            return
        if self.plan.tool == "torch":
            self._open = _start_torch()
        elif self.capture.waits_for() == "nvtx":
            self._open = _start_range()
        elif self.capture.waits_for() == "cudaProfilerApi":
            # The probe of torch's function writes it down.
            _start_cuda()
            return
        if self._open is not None:
            self.opened(self._open)

    def stop(self) -> None:
        """End the capture that runs."""
        if not self.is_open:
            return
        open_, self._open = self._open, None
        self.closed()
        if self.plan.tool == "torch":
            _stop_torch(open_, self._torch_file())
        elif open_ == "cuda":
            sys.modules["torch"].cuda.profiler.stop()
        else:
            sys.modules["nvtx"].end_range(open_)

    def opened(self, what: Any = "cuda") -> None:
        """Write down that a capture began; verl's own start is one of CUDA's profiler."""
        self._open = what
        self.count += 1
        self._write({"begin_ns": time.time_ns()})

    def closed(self) -> None:
        """Write down that the capture ended."""
        self._open = None
        self._write({"end_ns": time.time_ns()})
        self.task = None

    def _torch_file(self) -> Path:
        name = f"{self.role}_{socket.gethostname()}_{os.getpid()}.{self.count}.json.gz"
        return Path(self.plan.directory) / name

    def _write(self, moment: dict[str, int]) -> None:
        """Append one line; a process killed in a capture leaves its begin."""
        step = self.step if self.step is not None else context.process.current_step()
        line = {
            "capture": self.count,
            **moment,
            "role": self.role,
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": step,
            "task": self.task,
            "tool": self.plan.tool,
            "silent": self.plan.tool == "nsys" and nvtx_is_silent(),
        }
        folder = Path(self.plan.journal)
        path = folder / f"{self.role}_{socket.gethostname()}_{os.getpid()}.jsonl"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(line) + b"\n")


_current: Process | None = None


def current() -> Process | None:
    """Return the captures of this process, or None where nothing is to be captured."""
    global _current
    active = recorder.active()
    plan = carried_plan(active.carried.capture_plan) if active is not None else None
    # One that runs is ended by whoever began it, also after recording has stopped.
    if _current is None or (active is not None and _current.plan is not plan):
        _current = None
        if plan is None or os.environ.get(CAPTURES_OFF):
            return None
        from verl_profiler.recording.identity import identify

        identity = active.identity or identify() if active is not None else None
        if identity is None:
            return None
        _current = Process(plan, identity.role, identity.rank)
    return _current


def start(_instance: Any = None, step: int | None = None) -> bool:
    """Start a capture in this process; also what the trainer calls in other actors.

    Returns:
        Whether one runs now.
    """
    process = current()
    if process is None:
        return False
    if step is not None:
        process.step = step
    process.start()
    return process.is_open


def stop(_instance: Any = None) -> None:
    """End the capture of this process."""
    process = current()
    if process is not None:
        process.stop()


def note_step(step: int | None) -> None:
    """Remember which step the next captures belong to."""
    process = current()
    if process is not None and isinstance(step, int):
        process.step = step


def note_task(task: str | None) -> None:
    """Remember which of verl's tasks the next capture is of; one of a step has no task."""
    process = current()
    if process is not None and process.plan.discrete:
        process.task = task


def nvtx_is_silent() -> bool:
    """Whether a tool is attached that this nvtx takes for none, so that no range is recorded.

    nvtx >= 0.2.12 asks the tool whether the domain is enabled; nsys 2022.4, and 2023.2 as users
    report, answer no.
    """
    nvtx = sys.modules.get("nvtx")
    get_domain = getattr(nvtx, "get_domain", None)
    if get_domain is None or not os.environ.get(NVTX_LIBRARY):
        return False
    return type(get_domain(NVTX_DOMAIN)).__name__ == "DummyDomain"


def _start_range() -> Any:
    import nvtx

    if nvtx_is_silent():
        recorder.say(
            f"WARNING nvtx {_version('nvtx')} and this nsys record no range together, so nsys will "
            "capture nothing here. Use a newer nsys, or pip install 'nvtx==0.2.11'. (nvtx-silent)"
        )
    return nvtx.start_range(message=CAPTURE_RANGE, domain=NVTX_DOMAIN)


def _start_cuda() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.profiler.start()


def _start_torch() -> Any:
    import torch

    try:
        # Ray runs what it is told in one thread and the actor's methods in others.
        from torch._C._profiler import _ExperimentalConfig

        profiler = torch.profiler.profile(
            experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )
    except (ImportError, TypeError):
        profiler = torch.profiler.profile()
    profiler.start()
    return profiler


def _stop_torch(profiler: Any, path: Path) -> None:
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)
