"""Copy what other nodes wrote on their own disks to this one, over Ray.

A file that is still being written waits for the next poll, and one that is here already is not sent
again.  All nodes are polled at once, so one that does not answer does not delay the others.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_profiler.capture.files import being_written
from verl_profiler.events.files import open_regular, reason_of
from verl_profiler.events.redaction import problem_of
from verl_profiler.nodes.actor import NodeActor, as_connected

__all__ = ["Nodes"]

_CHUNK = 64 << 20
# How long one call of `fetch` waits for nodes that have not answered yet.
_FETCH_S = 5.0
# A node that is sending files is abandoned after the deadline only when it was silent for so long.
_SILENCE_S = 10.0
_POLL_S = 0.2
# The limit of one call; whoever waits gives up earlier.
_PATIENCE_S = 600.0

Folders = Mapping[Path, Mapping[str, int]]


class Nodes:
    """The other nodes of the cluster that this process is connected to."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._gone: dict[str, str] = {}
        self._problem = ""

    def fetch(self, folders: Folders, left_s: float) -> bool:
        """Copy the files of every node that answered the last time into the same folders here.

        Args:
            folders: Folder → names and sizes of the files that are not needed.
            left_s: How long the caller can wait.  After that, nodes that are silent are abandoned,
                and those that are sending files are not.

        Returns:
            Whether a node may still answer.
        """
        import ray

        if left_s <= 0:
            return False
        self._problem = ""
        if not ray.is_initialized():
            self._problem = (
                "Ray has been shut down; files on other nodes' own disks were not copied"
            )
            return False
        here, nodes = _cluster(ray)
        self._gone = {
            node["NodeID"]: node["NodeManagerHostname"] for node in nodes if not node["Alive"]
        }
        for node in nodes:
            key = node["NodeID"]
            known = self._nodes.get(key)
            if node["Alive"] and key != here and (known is None or known.ended):
                self._nodes[key] = _Node(ray, key, node["NodeManagerHostname"], folders)
        last = left_s <= _FETCH_S
        deadline = time.monotonic() + min(left_s, _FETCH_S)
        while waiting := [node for node in self._nodes.values() if not node.answered]:
            if time.monotonic() >= deadline and not (last and any(n.is_sending for n in waiting)):
                break
            waiting[0].wait(_POLL_S)
        if last:
            for node in waiting:
                node.give_up()
        return bool(waiting) and not last

    def problems(self) -> list[str]:
        """Return which nodes could not send their files, as sentences."""
        found = [self._problem] if self._problem else []
        found += [
            f"{host} has left the cluster; files on its own disk were not copied"
            for host in self._gone.values()
        ]
        return found + [
            f"{node.host} did not send its reports: {node.problem}"
            for node in self._nodes.values()
            if node.problem
        ]


def _cluster(ray: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the id of this node, and all nodes."""
    here = as_connected(ray.get_runtime_context)().get_node_id()
    # `ray.nodes` never connects again.
    return here, ray.nodes()


class _Node:
    """One node, and the thread that waits for it, since any call of Ray may take any time."""

    def __init__(self, ray: Any, node: str, host: str, folders: Folders) -> None:
        self.host = host
        self.problem = ""
        self._ray = ray
        self._node = node
        self._folders = folders
        self._ended = threading.Event()
        self._given_up = threading.Event()
        self._started_s = time.monotonic()
        self._received_s: float | None = None
        self._actor: NodeActor | None = None
        threading.Thread(
            target=self._run, name=f"verl-profiler copies from {host}", daemon=True
        ).start()

    @property
    def ended(self) -> bool:
        """Whether it has sent everything, or failed."""
        return self._ended.is_set()

    @property
    def answered(self) -> bool:
        """Whether nothing more is expected of it."""
        return self._ended.is_set() or self._given_up.is_set()

    @property
    def is_sending(self) -> bool:
        """Whether a piece of a file arrived within the last seconds."""
        return self._received_s is not None and time.monotonic() - self._received_s < _SILENCE_S

    def wait(self, seconds: float) -> None:
        """Wait until it has answered, at most so long."""
        self._ended.wait(seconds)

    def give_up(self) -> None:
        """Stop waiting for it, and discard what it still sends."""
        self._given_up.set()
        self.problem = f"no answer within {time.monotonic() - self._started_s:.0f} s"
        if self._actor is not None:
            self._actor.end()

    def _run(self) -> None:
        try:
            self._actor = NodeActor(self._ray, self._node)
            for folder, have in self._folders.items():
                self._fetch(folder, have)
        except Exception as error:  # noqa: BLE001  one node; the others still send theirs
            if not self._given_up.is_set():
                self.problem = problem_of(error)
        finally:
            if self._actor is not None:
                self._actor.end()
            self._ended.set()

    def _fetch(self, folder: Path, have: Mapping[str, int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".here-", dir=folder) as mark:
            _write_files(folder, self._pieces(str(folder), os.path.basename(mark.name), dict(have)))

    def _pieces(self, *arguments: Any) -> Iterator[tuple[str, bytes, bool]]:
        """Yield what `_read_files` yields there, until `give_up`."""
        if self._actor is None:
            return
        self._actor.call("iterate", _read_files, *arguments, timeout_s=_PATIENCE_S)
        while piece := self._actor.call("next", timeout_s=_PATIENCE_S):
            self._received_s = time.monotonic()
            if self._given_up.is_set():
                return
            yield piece


def _write_files(folder: Path, pieces: Iterable[tuple[str, bytes, bool]]) -> None:
    """Write what `_read_files` yields; a file gets its name only when it is whole."""
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
    """Yield name, piece and whether it is the last one, of the files that the other side lacks.

    Args:
        folder: Where they are.
        mark: A file of the other side; if it is there, both share one disk.
        have: Names and sizes of what the other side has.

    Raises:
        OSError: Files cannot be read or are not regular files; raised after all others.
    """
    if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, mark)):
        return
    unfinished = being_written(Path(folder))
    failed: dict[str, OSError] = {}
    for path in sorted(
        os.path.join(at, name) for at, _, names in os.walk(folder) for name in names
    ):
        name = os.path.relpath(path, folder)
        if name in unfinished or name.endswith(".part"):
            continue
        try:
            yield from _pieces_of(path, name, have.get(name))
        except OSError as error:
            failed[name] = error
    if failed:
        name, error = next(iter(failed.items()))
        more = f"; {len(failed) - 1} more" if len(failed) > 1 else ""
        raise OSError(f"{name} {reason_of(error)}{more}")


def _pieces_of(path: str, name: str, had: int | None) -> Iterator[tuple[str, bytes, bool]]:
    """Yield a file in pieces, up to its present size, unless the other side `had` that size."""
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        if left == had:
            return
        chunk = file.read(min(left, _CHUNK))
        left -= len(chunk)
        while following := file.read(min(left, _CHUNK)):
            left -= len(following)
            yield name, chunk, False
            chunk = following
        yield name, chunk, True
