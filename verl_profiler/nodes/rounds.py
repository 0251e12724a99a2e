"""Visit the nodes of a cluster in rounds, over Ray: compare their clocks, and bring the files of a run.

These are its event files, or the reports and journals of captures.
On each node there is one small actor (actor.py).  A node whose run directory has the driver's `.disk` file
shares its disk and sends nothing.  From all others the driver requests pieces of 4 MiB, one at a time
per node and of at most four nodes at once, which is what Ray's object store holds of them.

The actors of all nodes start at once, and may take minutes where the run's own processes start.  A node
that fails is visited less and less often.

Evidence of a hang is requested by a folder in the run directory (docs/stuck.md), which is made on
the disks of these nodes, too.

`shipping.json` in the run directory has which nodes ship, and up to when they have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_profiler.events.redaction import problem_of
from verl_profiler.events.shipping import iso
from verl_profiler.nodes import clock
from verl_profiler.nodes.account import earlier, write_account
from verl_profiler.nodes.actor import NodeActor, as_connected
from verl_profiler.nodes.files import CHUNK_BYTES, Piece, disk_of, hangs_of
from verl_profiler.nodes.receiver import Names, Receiver
from verl_profiler.recording.clock import boot_id

__all__ = ["Nodes"]

_TIMEOUT_S = 30.0
# A process on a busy node starts slowly; ended and started again, it would come last in its queue.
_START_S = 300.0
_ROUND_S = 60.0
# A node that does not tell its time at once is busy or gone; the others wait for it.
_CLOCK_S = 5.0
_AT_ONCE = 4
# After the k-th failure in a row, a node is skipped for 2^k rounds, at most for this many.
_ROUNDS = 32
# How long the end waits for a node that sends nothing.
_SILENCE_S = 30.0


@dataclass
class _Node:
    """A node of the cluster, or the disk that it writes to.

    Args:
        node_id: Ray's.
        host: Its name.
        disk: The name of its disk; None while it has no run directory.
        state: `new`, `shared` (the driver's disk, or another node's), `shipping`, `left` or `unable`
            (this package is not installed there).
        shipped_s: When the last complete round began, on the driver's wall clock.
        seen_s: Its last answer.
        left_s: When it was found to have left the cluster.
        hangs: Of how many hangs evidence was requested there.
        boot: The boot id of its kernel, which has the clock; None before its actor has answered.
    """

    node_id: str
    host: str
    disk: str | None = None
    state: str = "new"
    boot: str | None = None
    actor: NodeActor | None = None
    opened: bool = False
    receiver: Receiver | None = None
    shipped_s: float | None = None
    seen_s: float | None = None
    left_s: float | None = None
    problem: str = ""
    hangs: int = 0
    failures: int = 0
    skips: int = 0
    busy: bool = field(default=False)
    complete: bool = field(default=False)

    @property
    def ships(self) -> bool:
        """Whether it has a disk of its own, with files of the run."""
        return self.receiver is not None

    def row(self) -> dict[str, Any]:
        """Return what `shipping.json` has of it."""
        return {
            "host": self.host,
            "disk": self.disk,
            "state": self.state,
            "shipped": iso(self.shipped_s),
            "seen": iso(self.seen_s),
            "left": iso(self.left_s),
            "problem": self.problem,
            "bytes": self.receiver.size_bytes if self.receiver is not None else 0,
            "processes": dict(self.receiver.processes) if self.receiver is not None else {},
        }


class Nodes:
    """All other nodes of the cluster that this process is connected to.

    Args:
        ray: The module.
        run: The run directory of this process.
        every_s: The interval between two shipments of events, for `shipping.json`.
        clocks: Compare the clocks.
        files: Bring files.
        captures: Folders below `run` with what capture tools write, which is brought in place of the event
            files.
        have: Names and sizes of files in them that are here under other names.
    """

    def __init__(
        self,
        ray: Any,
        run: Path,
        *,
        every_s: float | None = None,
        clocks: bool = False,
        files: bool = True,
        captures: Sequence[str] = (),
        have: Mapping[str, int] | None = None,
    ) -> None:
        self._ray = ray
        self._run = run
        # Where a driver began to ship, it was elsewhere than a copy that is completed.
        directory, self._earlier = earlier(run)
        self._directory = directory or str(run.absolute())
        self._every_s = every_s
        self._clocks = clocks
        self._with_files = files
        self._captures = tuple(captures)
        self._have = have or {}
        self._own_disk: str | None = None
        self._here = ""
        self._names = Names(run)
        self._nodes: dict[str, _Node] = {}
        self._slots = threading.Semaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._one_burst = threading.Lock()
        self._writing = threading.Lock()
        self._heard_s = 0.0
        self._closed = False
        for row in self._earlier.values():
            self._names.reserve(row["processes"].values())

    def round(self, *, light: bool = False, patience_s: float = _ROUND_S) -> bool:
        """Compare the clocks, and take from every node what its files have gained.

        Args:
            light: Only headers, open calls and evidence.
            patience_s: Stop waiting for nodes after this time without an answer of any; they continue,
                and are skipped while they do.

        Returns:
            Whether all nodes sent everything.

        Raises:
            Exception: Ray cannot list its nodes.
        """
        if not self._here:
            self._here = as_connected(self._ray.get_runtime_context)().get_node_id()
        nodes = {each["NodeID"]: each for each in as_connected(self._ray.nodes)()}
        alive = {node_id: about for node_id, about in nodes.items() if about["Alive"]}
        now = time.time()
        if self._with_files and self._own_disk is None and len(alive) > 1:
            # Without it, a node that shares the disk would ship to itself.
            self._own_disk = disk_of(self._run)
            if self._own_disk is None:
                raise FileNotFoundError(f"{self._run} is not there")
        # Reports are brought at the end, when a node may have left before it was ever visited.
        for node_id, about in (nodes if self._captures else alive).items():
            if node_id != self._here and node_id not in self._nodes:
                self._nodes[node_id] = _Node(node_id, about["NodeManagerHostname"])
        for node in self._nodes.values():
            if node.node_id not in alive and node.state != "left":
                self._left(node, now)
        started: list[_Node] = []
        for node in self._nodes.values():
            if node.state == "left" or node.busy or self._is_done(node):
                continue
            if node.skips:
                node.skips -= 1
                continue
            node.busy, node.complete = True, False
            started.append(node)
            threading.Thread(
                target=self._visit, args=(node, light), name="verl-profiler node", daemon=True
            ).start()
        self._await(started, patience_s)
        self.write()
        waiting = [node for node in self._nodes.values() if node.state in ("new", "shipping")]
        return all(node.complete or not (node.ships or node.busy) for node in waiting)

    def finish(self, patience_s: float = _SILENCE_S) -> list[str]:
        """Take all that is left, end the actors, and return problems of files as sentences.

        Args:
            patience_s: Give up on nodes once none has sent anything for so long.
        """
        if not self._with_files:
            self.close()
            return []
        self._await(list(self._nodes.values()), patience_s)
        for node in self._nodes.values():
            # Also those that failed lately.
            node.skips = 0
        problem = ""
        try:
            # A second time what was written meanwhile, as far as headers state it.
            for _ in range(2):
                self.round(patience_s=patience_s)
        except Exception as error:  # noqa: BLE001  Ray is gone, or the head does not answer
            problem = problem_of(error)
        self._closed = True
        for node in self._nodes.values():
            if node.ships and node.complete and node.state == "shipping":
                node.state = "ended"
            if node.busy and not node.problem:
                node.problem = f"no answer for {patience_s:.0f} s"
        self.write(ended=True)
        self.close()
        return [problem] if problem else self.problems()

    def close(self) -> None:
        """Take nothing more, and end the actors."""
        self._closed = True
        for node in self._nodes.values():
            self._end(node)

    def problems(self) -> list[str]:
        """Return which nodes could not send all, as sentences."""
        found: list[str] = []
        for node in self._nodes.values():
            if node.state == "left" and (node.ships or self._captures):
                found.append(
                    f"{node.host} has left the cluster; what it wrote since its last shipment"
                    f" ({iso(node.shipped_s) or 'none'}) is on its own disk"
                )
            elif node.problem and node.state != "shared":
                found.append(f"{node.host} did not send all of its files: {node.problem}")
        return found

    def sent(self) -> list[tuple[str, int]]:
        """Return host and bytes of the nodes that have disks of their own."""
        return [
            (node.host, node.receiver.size_bytes)
            for node in self._nodes.values()
            if node.receiver is not None
        ]

    def write(self, *, ended: bool = False) -> None:
        """Replace `shipping.json`, once a node has a disk of its own; it has nothing of captures."""
        if self._captures:
            return
        with self._writing:
            rows = dict(self._earlier)
            for node in list(self._nodes.values()):
                if node.ships and node.disk is not None:
                    rows[node.disk] = node.row()
            if not rows:
                return
            write_account(
                self._run,
                rows.values(),
                directory=self._directory,
                every_s=self._every_s,
                ended=ended,
            )

    def _await(self, nodes: list[_Node], patience_s: float) -> None:
        self._heard_s = time.monotonic()
        while any(node.busy for node in nodes):
            if time.monotonic() - self._heard_s > patience_s:
                break
            time.sleep(0.02)

    def _left(self, node: _Node, now_s: float) -> None:
        node.left_s, node.state = now_s, "left"
        # Another node that shares its disk ships from now on.
        for other in self._nodes.values():
            if other.state == "shared" and other.disk == node.disk:
                other.state, other.skips = "new", 0

    def _is_done(self, node: _Node) -> bool:
        """Whether nothing more is expected of a node: neither files, nor the time of another kernel."""
        no_files = not self._with_files or node.state in ("shared", "unable")
        return no_files and (not self._clocks or node.boot in ("", boot_id()))

    def _visit(self, node: _Node, light: bool) -> None:
        try:
            if self._closed:
                return
            if node.actor is None:
                node.actor = NodeActor(self._ray, node.node_id)
                node.boot = self._called(node, "who", timeout_s=_START_S)
            if self._clocks and node.boot not in ("", boot_id()):
                self._compare(node)
            # Where processes start slowly, others need not wait for that.
            if self._has_files(node):
                with self._slots:
                    self._take(node, light)
            node.problem, node.failures = "", 0
            if self._is_done(node):
                self._end(node)
        except Exception as error:  # noqa: BLE001  one node; the others still send theirs
            node.problem = problem_of(error)
            node.failures += 1
            node.skips = min(2 ** min(node.failures, 10), _ROUNDS) - 1
            self._end(node)
        finally:
            node.busy = False

    def _compare(self, node: _Node) -> None:
        """Take one burst; one at a time, since threads that run beside it widen its bounds."""
        with self._one_burst:
            if self._closed:
                return
            sample = clock.exchange(lambda: self._called(node, "read", timeout_s=_CLOCK_S))
            clock.keep(str(node.boot), node.host, sample)

    def _has_files(self, node: _Node) -> bool:
        """Find out which disk a node has; return whether files are to be brought from there."""
        if not self._with_files or node.state in ("shared", "unable"):
            return False
        if node.opened and node.state == "shipping":
            return True
        disk = self._called(node, "open", self._directory)
        if not disk:
            # A node without a run directory is retried, one without the package is not.
            if disk is False:
                node.state = "unable"
            return False
        with self._lock:
            others = [
                each.disk
                for each in self._nodes.values()
                if each is not node and each.state == "shipping"
            ]
            own = disk not in (self._own_disk, *others)
            node.state, node.disk = "shipping" if own else "shared", disk
        if not own:
            return False
        for other in self._nodes.values():
            if node.receiver is None and other.disk == node.disk and other.receiver is not None:
                # The one that shipped from this disk has left.
                node.receiver, other.receiver = other.receiver, None
        if node.receiver is None:
            earlier = self._earlier.get(str(node.disk), {})
            node.receiver = Receiver(
                self._run,
                self._names,
                earlier.get("processes"),
                claimed=self.write,
                captures=self._captures,
            )
        self._called(node, "begin", {**self._have, **node.receiver.have()}, self._captures)
        node.opened = True
        return True

    def _take(self, node: _Node, light: bool) -> None:
        begun_s = time.time()
        receiver = node.receiver
        if receiver is None:
            return
        hangs = hangs_of(self._run)
        if hangs > node.hangs:
            self._called(node, "request_evidence", hangs)
            node.hangs = hangs
        self._called(node, "scan", light)
        pieces: list[Piece]
        while pieces := self._called(node, "pieces", CHUNK_BYTES):
            for piece in pieces:
                if self._closed:
                    return
                receiver.accept(piece)
        node.complete = True
        if not light:
            node.shipped_s = begun_s

    def _called(
        self, node: _Node, method: str, *arguments: Any, timeout_s: float = _TIMEOUT_S
    ) -> Any:
        if node.actor is None:
            raise RuntimeError("the actor was ended")
        result = node.actor.call(method, *arguments, timeout_s=timeout_s)
        node.seen_s, self._heard_s = time.time(), time.monotonic()
        return result

    def _end(self, node: _Node) -> None:
        actor, node.actor, node.opened = node.actor, None, False
        if actor is not None:
            actor.end()
