"""The torch profiler: runs inside the process and writes one Chrome trace per capture.

verl's workers profile themselves with verl's own settings; their traces have no journal, so they are
identified by their names.
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

__all__ = ["TOOL"]

_SMALL_TRACE_BYTES = 4096
# What verl 0.9 calls the traces of its torch profiler (utils/profiler/torch_profile.py).
_VERL_TRACE = re.compile(
    r"(?P<label>.*?)_step(?P<step>\d{1,9})_rank(?P<rank>\d{1,9})\S*_pid(?P<pid>\d{1,9})_"
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

    def unclaimed_reports(self, raw: Path) -> Iterator[tuple[Path, CaptureRecord]]:
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

    def is_empty(self, report: Path) -> str:
        """A Chrome trace without operations has only its frame, some hundred bytes."""
        try:
            content = gzip.decompress(read_bounded(report, _SMALL_TRACE_BYTES))
        except (OSError, EOFError, zlib.error):
            return ""
        if b'"cpu_op"' in content:
            return ""
        return "empty: this process ran no operation of torch in the step"


TOOL = _Torch()
