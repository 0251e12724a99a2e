"""Bring what other nodes wrote on disks of their own to this one, over Ray.

A file that somebody still writes stays until the next time, and one that is here already does not
come again.  What a node gives is copied: its disk keeps it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_profiler.leftovers import being_written

__all__ = ["fetch_from_nodes"]

_CHUNK = 64 << 20
_PATIENCE_S = 120.0


def fetch_from_nodes(folders: Mapping[Path, Mapping[str, int]]) -> list[str]:
    """Bring files of the other nodes into the same folders here.

    Args:
        folders: Folder → names and sizes of the files that need not come.

    Returns:
        Which nodes could not give theirs, in plain words.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    problems = []
    for node in ray.nodes():
        host = node["NodeManagerHostname"]
        if not node["Alive"]:
            problems.append(f"{host} has left the cluster; what lies on its own disk stays there")
        elif node["NodeID"] != here:
            try:
                for folder, have in folders.items():
                    _fetch(ray, node["NodeID"], folder, have)
            except Exception as error:  # noqa: BLE001  one node; the others still give theirs
                said = f"{type(error).__name__}: {error}".strip().splitlines()
                problems.append(f"{host} does not give its reports: {said[0]} … {said[-1]}")
    return problems


def _fetch(ray: Any, node: str, folder: Path, have: Mapping[str, int]) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".here-", dir=folder) as mark:
        task = ray.remote(num_cpus=0, max_retries=0)(_read_files).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            num_returns="streaming",
            # Reports take gigabytes, and Ray's store holds what nobody has asked for yet.
            _generator_backpressure_num_objects=2,
        )
        pieces = task.remote(str(folder), os.path.basename(mark.name), dict(have))
        _write_files(folder, _answers(ray, pieces))


def _answers(ray: Any, pieces: Any) -> Iterator[tuple[str, bytes, bool]]:
    """Yield what a task yields, and do not wait for ever for a node that is silent."""
    while True:
        if not ray.wait([pieces], timeout=_PATIENCE_S)[0]:
            raise TimeoutError(f"no answer within {_PATIENCE_S:.0f} s")
        try:
            reference = next(pieces)
        except StopIteration:
            return
        yield ray.get(reference)


def _write_files(folder: Path, pieces: Iterable[tuple[str, bytes, bool]]) -> None:
    """Write what `_read_files` yields; a file has its name only when it is whole."""
    begun = ""
    for name, chunk, last in pieces:
        part = folder / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if name == begun else "wb") as file:
            file.write(chunk)
        begun = name
        if last:
            part.replace(folder / name)


def _read_files(folder: str, mark: str, have: dict[str, int]) -> Iterator[tuple[str, bytes, bool]]:
    """Yield name, piece and whether it is the last, of the files that the other side lacks.

    Args:
        folder: Where they are.
        mark: A file of the other side; where it is seen, both have one disk.
        have: Names and sizes of what the other side has.
    """
    if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, mark)):
        return
    unfinished = being_written(Path(folder))
    for path in sorted(
        os.path.join(at, name) for at, _, names in os.walk(folder) for name in names
    ):
        name = os.path.relpath(path, folder)
        if name in unfinished or name.endswith(".part"):
            continue
        if os.path.getsize(path) == have.get(name):
            continue
        with open(path, "rb") as file:
            chunk = file.read(_CHUNK)
            while following := file.read(_CHUNK):
                yield name, chunk, False
                chunk = following
            yield name, chunk, True
