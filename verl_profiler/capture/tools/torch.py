"""The torch profiler: runs inside the process and writes one Chrome trace per capture.

verl's workers and SGLang's schedulers profile themselves with verl's own settings; their traces have no
journal, so they are identified by their names.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.capture.tools import Tool
from verl_profiler.events.files import is_regular, read_bounded

if TYPE_CHECKING:
    from verl_profiler.capture.plan import RoleCapture
    from verl_profiler.capture.record import CaptureRecord

_SMALL_TRACE_BYTES = 4096
# What verl 0.9 calls the traces of its torch profiler (utils/profiler/torch_profile.py).
_VERL_TRACE = re.compile(
    r"(?P<label>.*?)_step(?P<step>\d{1,9})_rank(?P<rank>\d{1,9})\S*_pid(?P<pid>\d{1,9})_"
)
# With profile_discrete verl lets SGLang's schedulers trace themselves; sglang 0.5.12 names the traces
# after the moment at which they began.
_ENGINE_TRACE = re.compile(
    r"agent_loop_rollout_replica_(?P<replica>\d{1,9})/(?P<begin>\d{1,10}\.\d+)-TP-(?P<rank>\d{1,9}).*"
)


class _Torch(Tool):
    name = "torch"
    title = "the torch profiler"
    suffix = ".json.gz"

    def configure(self, native: Any, directory: Path) -> None:
        native.save_path = str(directory)

    def start(self, capture: RoleCapture) -> Any:  # noqa: ARG002
        import torch

        try:
            # Ray runs `__ray_call__` in one thread and the actor's methods in others.
            from torch._C import _profiler

            config = _profiler._ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
            profiler = torch.profiler.profile(experimental_config=config(profile_all_threads=True))
        except (ImportError, AttributeError, TypeError):
            profiler = torch.profiler.profile()
        profiler.start()
        return profiler

    def stop(self, handle: Any, path: Path) -> None:
        handle.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle.export_chrome_trace(str(path))

    def unclaimed_reports(
        self, raw: Path, captures: list[CaptureRecord]
    ) -> Iterator[tuple[Path, CaptureRecord]]:
        from verl_profiler.capture.record import CaptureRecord

        # The names end in the time of the trace.
        traces = filter(is_regular, raw.glob(f"*{self.suffix}"))
        for file in sorted(traces, key=lambda file: file.name.rsplit("_", 1)[-1]):
            match = _VERL_TRACE.match(file.name)
            if match is not None:
                label = match["label"]
                role = label.split("_")[0]
                yield (
                    file,
                    CaptureRecord.without_journal(
                        role if role in ("actor", "critic", "ref") else "actor",
                        self.name,
                        rank=int(match["rank"]),
                        pid=int(match["pid"]),
                        step=int(match["step"]),
                        task=label,
                    ),
                )
        for file in sorted(filter(is_regular, raw.glob(f"*/*{self.suffix}"))):
            match = _ENGINE_TRACE.fullmatch(str(file.relative_to(raw)))
            if match is not None:
                begin_ns = int(float(match["begin"]) * 1e9)
                yield (
                    file,
                    CaptureRecord.without_journal(
                        "engine",
                        self.name,
                        rank=int(match["replica"]),
                        step=_step_at(begin_ns, captures),
                        task=f"scheduler TP-{match['rank']}",
                        begin_ns=begin_ns,
                    ),
                )

    def is_empty(self, report: Path) -> str:
        """A Chrome trace without operations has only its frame, some hundred bytes."""
        try:
            content = gzip.decompress(read_bounded(report, _SMALL_TRACE_BYTES))
        except (OSError, EOFError, zlib.error):
            return ""
        if b'"cpu_op"' in content:
            return ""
        return "empty: this process ran no operation of torch in the step"


def _step_at(time_ns: int, captures: list[CaptureRecord]) -> int | None:
    """Return the step whose capture was open at a time of day."""
    for capture in captures:
        if capture.begin_ns and capture.begin_ns <= time_ns <= (capture.end_ns or time_ns):
            return capture.step
    return None


TOOL = _Torch()
