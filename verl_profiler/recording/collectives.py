"""Where this rank is in its collectives: process groups, and PyTorch's flight recorder if it is enabled.

torch is only used if the process has imported it.  Of a process group of NCCL, only the counts are taken from
the recorder: the list of its collectives queries CUDA for each of them, which may block.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from verl_profiler.host.flight_recorder import last_collectives, load_trace

__all__ = ["collectives"]

# As of PyTorch 2.10 and before.
_BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT_FILE = "/tmp/nccl_trace_rank_"  # noqa: S108  PyTorch's own default
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


def collectives() -> dict[str, Any]:
    """Return this process's view of its collectives; empty if it has no process group.

    Returns:
        `rank`, `world_size`, `backend`; if the flight recorder is enabled, `groups` as
        `host.flight_recorder.last_collectives` gives them; and `dump`, the file that PyTorch writes on a timeout.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    rank, backend = int(distributed.get_rank()), str(distributed.get_backend())
    found: dict[str, Any] = {
        "rank": rank,
        "world_size": int(distributed.get_world_size()),
        "backend": backend,
    }
    if not any(_is_positive(os.environ.get(name)) for name in _BUFFERS):
        return found
    prefix = next((os.environ[name] for name in _FILES if os.environ.get(name)), _DEFAULT_FILE)
    found["dump"] = f"{prefix}{rank}"
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = next((each for name in _DUMPS if (each := getattr(module, name, None))), None)
    if dump is not None:
        with contextlib.suppress(Exception):
            trace = load_trace(
                dump(
                    includeCollectives="nccl" not in backend,
                    includeStackTraces=False,
                    onlyActive=False,
                )
            )
            found["groups"] = last_collectives(trace)
    return found


def _is_positive(text: str | None) -> bool:
    return text is not None and text.isdigit() and int(text) > 0
