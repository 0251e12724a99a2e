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

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler.events.files import read_object
from verl_profiler.events.redaction import problem_of
from verl_profiler.events.shipping import FORMAT_VERSION, SHIPPING_FILE, iso
from verl_profiler.events.whole_files import replace_file
from verl_profiler.nodes import clock
from verl_profiler.nodes.actor import NodeActor, as_connected
from verl_profiler.nodes.files import CHUNK_BYTES, LIGHT, disk_of, hangs_of
from verl_profiler.nodes.receiver import Receiver
from verl_profiler.recording.clock import boot_id
from verl_profiler.recording.process_header import claim_name

_TIMEOUT_S = 30.0
_ROUND_S = 60.0
# A node that does not tell its time at once is busy or gone; the others wait for it.
_CLOCK_S = 5.0
_AT_ONCE = 4
# After the k-th failure in a row, a node is skipped for 2^k rounds, at most for this many.
_ROUNDS = 32
# How long the end waits for a node that sends nothing.
_SILENCE_S = 30.0
# Files get their time from a clock of the kernel that ticks less often.
_TICK_NS = 1_000_000_000


@dataclass
class _Node:
    """A node of the cluster, or the disk that it writes to.

    Args:
        node_id: Ray's.
        host: Its name.
        disk: The name of its disk; None while it has no run directory.
        state: `new`, `shared` (the driver's disk), `shipping`, `left` or `unable` (this package is not
            installed there).
        boot: The boot id of its kernel, which has the clock; None before its actor has answered.
        receiver: What takes the files of its disk, if that is not the driver's.
        shipped_s: When the last complete round began, on the driver's wall clock.
        seen_s: Its last answer.
        left_s: When it was found to have left the cluster.
        hangs: Of how many hangs evidence was requested there.
    """

    node_id: str
    host: str
    disk: str | None = None
    state: str = "new"
    boot: str | None = None
    actor: NodeActor | None = None
    receiver: Receiver | None = None
    shipped_s: float | None = None
    seen_s: float | None = None
    left_s: float | None = None
    problem: str = ""
    hangs: int = 0
    failures: int = 0
    skips: int = 0
    busy: bool = False
    complete: bool = False

    def row(self, receiver: Receiver) -> dict[str, Any]:
        """Return what `shipping.json` has of it."""
        return {
            "host": self.host,
            "disk": self.disk,
            "state": self.state,
            "shipped": iso(self.shipped_s),
            "seen": iso(self.seen_s),
            "left": iso(self.left_s),
            "problem": self.problem,
            "bytes": receiver.size_bytes,
            "processes": dict(receiver.processes),
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
        start_s: How long to wait for an actor to start, which is slow on a busy node; ended and started again,
            it would come last in the node's queue.
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
        start_s: float = 300.0,
    ) -> None:
        self._ray = ray
        self._run = run
        self._every_s = every_s
        self._clocks = clocks
        self._with_files = files
        self._captures = tuple(captures)
        self._have = have or {}
        self._start_s = start_s
        # Where a driver began to ship, it was elsewhere than a copy that is completed.
        self._directory = str(run.absolute())
        # Rows of `shipping.json` that an earlier process wrote, by disk.
        self._earlier: dict[str, dict[str, Any]] = {}
        self._own_disk: str | None = None
        self._here = ""
        # Names of processes of other nodes.
        self._names: set[str] = set()
        self._nodes: dict[str, _Node] = {}
        self._receivers: dict[str, Receiver] = {}
        self._slots = threading.Semaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._one_burst = threading.Lock()
        self._writing = threading.Lock()
        self._heard_s = 0.0
        # Files that have not changed lately are listed too.
        self._lists_all = False
        self._closed = False
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            self._continue(read_object(run / SHIPPING_FILE))

    def _continue(self, content: Mapping[str, Any]) -> None:
        self._directory = str(content["directory"])
        for row in content["nodes"]:
            processes = {str(name): str(here) for name, here in row["processes"].items()}
            self._earlier[str(row["disk"])] = {**row, "processes": processes}
            self._names.update(processes.values())

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
                node.left_s, node.state = time.time(), "left"
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
        return all(node.complete or not (node.receiver or node.busy) for node in waiting)

    def finish(self, patience_s: float = _SILENCE_S) -> list[str]:
        """Take all that is left, end the actors, and return problems of files as sentences.

        Args:
            patience_s: Give up on nodes once none has sent anything for so long.
        """
        if not self._with_files:
            self.close()
            return []
        self._await(list(self._nodes.values()), patience_s)
        self._lists_all = True
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
            if node.complete and node.state == "shipping":
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
            if node.state == "left" and (node.receiver or self._captures):
                found.append(
                    f"{node.host} has left the cluster; what it wrote since its last shipment"
                    f" ({iso(node.shipped_s) or 'none'}) is on its own disk"
                )
            elif node.problem and node.state != "shared":
                found.append(f"{node.host} did not send all of its files: {node.problem}")
        return found

    def sent(self) -> list[tuple[str, int]]:
        """Return host and bytes of the disks that are not the driver's."""
        return [(row["host"], row["bytes"]) for row in self._rows().values()]

    def _rows(self) -> dict[str, dict[str, Any]]:
        # Of nodes that share a disk, one that is still there.
        nodes = sorted(self._nodes.values(), key=lambda node: node.state != "left")
        return {str(node.disk): node.row(node.receiver) for node in nodes if node.receiver}

    def write(self, *, ended: bool = False) -> None:
        """Replace `shipping.json`, once a node has a disk of its own; it has nothing of captures."""
        if self._captures:
            return
        with self._writing:
            rows = {**self._earlier, **self._rows()}
            now = iso(time.time())
            content = {
                "format": FORMAT_VERSION,
                "directory": self._directory,
                "every_s": self._every_s,
                "updated": now,
                "ended": now if ended else None,
                "nodes": list(rows.values()),
            }
            # Where that fails, the old one stays.
            with contextlib.suppress(OSError):
                if rows:
                    text = json.dumps(content, indent=1) + "\n"
                    replace_file(self._run / SHIPPING_FILE, text.encode())

    def _claim(self, processes: dict[str, str], process: str) -> str:
        """Take the first free name for a process of another node, before its files come.

        Raises:
            OSError: The run directory cannot be written, or all names are taken.
        """
        with self._lock:
            # Processes of this node claim theirs in the same way.
            name = processes[process] = claim_name(self._run, process, self._names)
            self._names.add(name)
        self.write()
        return name

    def _await(self, nodes: list[_Node], patience_s: float) -> None:
        self._heard_s = time.monotonic()
        while any(node.busy for node in nodes):
            if time.monotonic() - self._heard_s > patience_s:
                break
            time.sleep(0.02)

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
                node.boot = self._called(node, "who", timeout_s=self._start_s)
            if self._clocks and node.boot not in ("", boot_id()):
                self._compare(node)
            # Where processes start slowly, others need not wait for that.
            receiver = self._receiver_of(node)
            if receiver is not None:
                with self._slots, receiver.lock:
                    self._take(node, receiver, light)
            node.problem, node.failures = "", 0
            if self._is_done(node):
                self._end(node)
        except Exception as error:  # noqa: BLE001  one node; the others still send theirs
            if self._closed:
                return
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

    def _receiver_of(self, node: _Node) -> Receiver | None:
        """Return what takes the files of a node, as soon as its disk is known; None if there are none to take."""
        if not self._with_files or node.state in ("shared", "unable"):
            return None
        if node.receiver is not None:
            return node.receiver
        disk = self._called(node, "files", "disk_of", self._directory)
        if not disk:
            # A node without a run directory is retried, one without the package is not.
            if disk is False:
                node.state = "unable"
            return None
        node.disk, node.state = disk, "shared" if disk == self._own_disk else "shipping"
        if node.state == "shipping":
            with self._lock:
                # Nodes that share a disk have one.
                if disk not in self._receivers:
                    processes = self._earlier.get(disk, {}).get("processes")
                    self._receivers[disk] = Receiver(
                        self._run, self._claim, processes, self._captures, self._have
                    )
                node.receiver = self._receivers[disk]
        return node.receiver

    def _take(self, node: _Node, receiver: Receiver, light: bool) -> None:
        begun_s = time.time()
        hangs = hangs_of(self._run)
        if hangs > node.hangs:
            self._called(node, "files", "request_evidence", self._directory, hangs)
            node.hangs = hangs
        folders = LIGHT if light else self._captures or ("",)
        # A tool may close a report long after it has written it.
        everything = light or self._lists_all or bool(self._captures)
        since_ns = 0 if everything else receiver.since_ns
        listed_ns, found = self._called(
            node, "files", "listing", self._directory, folders, bool(self._captures), since_ns
        )

        def read(wanted: list[tuple[str, int, int]]) -> Any:
            return self._called(node, "files", "read", self._directory, wanted, CHUNK_BYTES)

        receiver.take(found, read, complete=not light and not since_ns)
        node.complete = True
        if not light:
            node.shipped_s, receiver.since_ns = begun_s, listed_ns - _TICK_NS

    def _called(
        self, node: _Node, method: str, *arguments: Any, timeout_s: float = _TIMEOUT_S
    ) -> Any:
        if node.actor is None or self._closed:
            raise RuntimeError("the actor was ended")
        result = node.actor.call(method, *arguments, timeout_s=timeout_s)
        node.seen_s, self._heard_s = time.time(), time.monotonic()
        return result

    def _end(self, node: _Node) -> None:
        actor, node.actor = node.actor, None
        if actor is not None:
            actor.end()
