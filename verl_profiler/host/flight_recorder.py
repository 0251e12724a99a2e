"""Read dumps of PyTorch's flight recorder: where each process group of a rank is.

Nothing that is in a dump is run: dumps lie in a folder that others can write to.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

from verl_profiler.events.json_values import is_list, is_mapping

__all__ = ["last_collectives", "load_trace"]

_GROUPS = 32
_MOST_BYTES = 64 << 20


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; a dump has nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def load_trace(data: bytes) -> dict[str, Any]:
    """Read a dump of PyTorch's flight recorder without running anything that is in it.

    Raises:
        ValueError: It is not one.
    """
    if len(data) > _MOST_BYTES:
        raise ValueError("the dump is too large")
    try:
        trace = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"the dump cannot be read: {type(error).__name__}") from error
    if not is_mapping(trace):
        raise ValueError("the dump is no dict")
    return dict(trace)


def last_collectives(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return where each process group of a dump is.

    Args:
        trace: As `load_trace` returns it; the dump's versions 2.1 to 2.10.

    Returns:
        `group`: its name; `enqueued`, `started`, `completed`: number of the last collective that is;
        `collective`: name of the oldest one that has not ended, of the last one if all have, with
        `number`, `state` and `ended`; only where the dump lists collectives.
    """
    groups: dict[str, dict[str, Any]] = {}
    status = trace.get("pg_status")
    if is_mapping(status):
        for name, row in list(status.items())[:_GROUPS]:
            if not is_mapping(row):
                continue
            counts = {
                key: row.get(f"last_{key}_collective")
                for key in ("enqueued", "started", "completed")
            }
            groups[str(name)] = {
                "group": str(name),
                **{
                    key: value for key, value in counts.items() if type(value) is int and value >= 0
                },
            }
    entries = trace.get("entries")
    for row in entries if is_list(entries) else ():
        if not is_mapping(row):
            continue
        key = str(row.get("pg_id"))
        names = _listed(row.get("process_group"))
        if key not in groups:
            if len(groups) >= _GROUPS:
                continue
            groups[key] = {"group": key}
        group = groups[key]
        if names:
            group["group"] = str(names[-1] or names[0])[:100]
        ended = bool(row.get("retired")) or row.get("state") == "completed"
        # The oldest one that is open counts, else the last.
        if group.get("ended") is not False:
            group |= {
                "collective": str(row.get("profiling_name"))[:100],
                "number": row.get("collective_seq_id"),
                "state": str(row.get("state"))[:20],
                "ended": ended,
            }
    return list(groups.values())


def _listed(value: Any) -> list[Any]:
    return list(value) if type(value) in (list, tuple) else []
