"""The host that `soak.py` watches: it records, and everything that can go wrong goes wrong.

    python benchmarks/soak_host.py FOLDER '{"minutes": 1, ...}'

Three kinds of producers record: threads by `record`, `span` and `log_manager`, an event loop with
requests of wrapped coroutines and generators, and forked children.  The main thread conducts: it
breaks the disk, steps the clock, cancels tasks, forks, and now and then lets everything come to
rest to read memory and count what is still alive.  What was offered is counted here, by the
producers themselves; FOLDER/result.json holds these counts, and nothing of the recorder's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import itertools
import json
import math
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import Counter
from pathlib import Path
from typing import ClassVar

from verl_profiler.recording.identity import Identity

FLUSH_S = 0.5
TICK = 50


class Clock:
    """The wall clock of this process, which can be set."""

    def __init__(self):
        self.offset_s = 0.0
        self.real_ns = time.time_ns
        time.time_ns = lambda: self.real_ns() + round(self.offset_s * 1e9)
        time.time = lambda: time.time_ns() / 1e9


class Disk:
    """What happens to writes below a folder.  `mode` None: nothing."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.mode = None
        self.rng = random.Random(1)
        self.hits = Counter()
        for name in ("write", "writev", "pwrite", "pwritev", "ftruncate"):
            setattr(os, name, self._broken(name, getattr(os, name)))

    def _broken(self, name, real):
        def call(fd, data, *rest):
            mode = self.mode
            if mode is None or not self._is_ours(fd):
                return real(fd, data, *rest)
            self.hits[mode] += 1
            if name == "ftruncate":
                if mode == "truncate_fails":
                    raise OSError(errno.EIO, "ftruncate fails")
                return real(fd, data, *rest)
            if mode == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if mode == "eio":
                raise OSError(errno.EIO, "Input/output error")
            if mode == "slow":
                time.sleep(self.rng.uniform(0.05, 0.8))
            elif mode in ("short", "truncate_fails") and name == "write":
                if self.rng.random() < 0.5:
                    return real(fd, bytes(data)[: max(1, len(data) // 3)])
                if mode == "truncate_fails" or self.rng.random() < 0.5:
                    raise OSError(errno.ENOSPC, "No space left on device")
            elif mode == "raises":
                raise self.rng.choice((RuntimeError, MemoryError, ValueError))("in the writer")
            elif mode == "kills":
                raise self.rng.choice((SystemExit, asyncio.CancelledError, GeneratorExit))("writer")
            return real(fd, data, *rest)

        return call

    def _is_ours(self, fd):
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(self.folder)
        except OSError:
            return False


# What users hand over by mistake


class FailingRepr:
    """Its `__repr__` raises."""

    def __init__(self, error):
        self.error = error

    def __repr__(self):
        raise self.error


class SlowRepr:
    """Its `__repr__` takes its time."""

    def __repr__(self):
        time.sleep(0.3)
        return "slow"


class FailingItem:
    """Looks like a scalar, and is none."""

    def item(self):
        raise asyncio.CancelledError


class FailingError(Exception):
    """An exception that cannot be printed."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __str__(self):
        raise RuntimeError("no str")


class FailingBase(BaseException):
    """Not an Exception, and cannot be printed."""

    __repr__ = FailingError.__repr__
    __str__ = FailingError.__str__


def open_files():
    """Return what the open descriptors of this process are of."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def deep(depth=100_000):
    """Return a list in a list in a list."""
    made = []
    for _ in range(depth):
        made = [made]
    return made


DEEP = deep()
CYCLE: dict = {}
CYCLE["self"] = CYCLE
CHANGING: dict = {}
BAD_VALUES = (
    lambda: math.nan, lambda: -math.inf, lambda: FailingRepr(RuntimeError("no")), lambda: FailingRepr(SystemExit(3)),
    lambda: FailingRepr(asyncio.CancelledError()), lambda: FailingRepr(KeyboardInterrupt()), lambda: DEEP,
    lambda: FailingRepr(RecursionError()), lambda: CYCLE, lambda: CHANGING, FailingItem, lambda: "\ud800lone",
    lambda: {1: 2, None: 3}, lambda: {(1, 2): 3}, lambda: {"\udfff": 1}, lambda: b"\xff\xfe", lambda: {1, 2},
    lambda: 10**400, lambda: "x" * 300_000, object, lambda: (i for i in ()), lambda: "\x1b[31m\u202e", lambda: 1 + 2j,
)  # fmt: skip
BAD_STEPS = (
    lambda: [1],
    dict,
    lambda: 1.5,
    lambda: "seven",
    lambda: -3,
    lambda: 2**70,
    object,
    lambda: True,
)
BAD_NAMES = (lambda: None, lambda: 7, lambda: b"soak_bad", object, lambda: "soak_bad\ud800")
BAD_DURATIONS = (
    lambda: "long",
    lambda: math.nan,
    lambda: 1e300,
    lambda: -5,
    object,
    lambda: 10**400,
)
BAD_EXTRAS = (lambda: [1, 2], lambda: "text", lambda: 7, object, lambda: [("a", 1)])
BAD_PATHS = (
    lambda: "\0",
    object,
    lambda: 7,
    lambda: "/proc/none/soak.jsonl",
    lambda: "a" * 5000,
    lambda: "/dev/null/x",
)


class Producer:
    """Something that offers events and counts them.

    Attributes:
        offered: How many, whatever became of them.
        bad: How many of those were not what they should be.
    """

    def __init__(self, soak, name):
        self.soak = soak
        self.name = name
        self.offered = 0
        self.bad = 0
        self.number = itertools.count()

    def next_id(self):
        """Return an id that no other event has."""
        return f"{os.getpid()}:{self.name}:{next(self.number)}"

    def good(self, rng):
        """Offer one proper event."""
        self.offered += 1
        extra = {"id": self.next_id()}
        way = rng.random()
        if way < 0.6:
            end = self.soak.now()
            self.soak.record("soak_record", end - 1000, end, extra, self.soak.step)
        elif way < 0.8:
            with self.soak.span("soak_span", **extra):
                pass
        elif way < 0.99:
            self.soak.log(None, "soak_log", 0.001, extra, step=self.soak.step)
        else:
            path = self.soak.run / "custom" / f"soak_{os.getpid()}.jsonl"
            self.soak.log(str(path), "soak_path", 0.001, extra)

    def wrong(self, rng):
        """Offer one improper event."""
        self.offered += 1
        self.bad += 1
        end = self.soak.now()
        way = rng.random()
        value = rng.choice(BAD_VALUES)
        if way < 0.5:
            extra = {"id": self.next_id(), "value": value()}
            if rng.random() < 0.5:
                self.soak.record("soak_bad", end, end, extra)
            else:
                self.soak.log(None, "soak_bad", 0.1, extra, more=value())
        elif way < 0.6:
            self.soak.record("soak_bad", end, end, None, rng.choice(BAD_STEPS)())
        elif way < 0.7:
            self.soak.record(rng.choice(BAD_NAMES)(), end, end, {"soak_bad": 1})
        elif way < 0.8:
            self.soak.log(None, "soak_bad", rng.choice(BAD_DURATIONS)())
        elif way < 0.88:
            self.soak.log(None, "soak_bad", 0.1, rng.choice(BAD_EXTRAS)())
        elif way < 0.94:
            self.soak.log(rng.choice(BAD_PATHS)(), "soak_bad")
        elif way < 0.97:
            self.soak.record("soak_bad", rng.choice(("a", 1.5, None, [], 2**80)), end)
        else:
            with self.soak.span("soak_bad", value=value(), id=self.next_id()):
                pass

    def run(self, seed, bad_share):
        """Offer events until the soak ends; the pace is the soak's."""
        rng = random.Random(seed)
        while not self.soak.ending:
            self.soak.gate.wait()
            begin = time.perf_counter()
            for _ in range(self.soak.batch):
                try:
                    if rng.random() < bad_share:
                        self.wrong(rng)
                    else:
                        self.good(rng)
                except BaseException as error:  # noqa: BLE001  nothing may be raised here
                    self.soak.violate(f"raised into the host: {type(error).__name__}", error)
            if self.soak.flat_out:
                continue
            spent = time.perf_counter() - begin
            self.soak.rest(max(0.0, self.soak.batch / self.soak.thread_rate - spent))


# Requests, as an agent loop runs them


class Payload:
    """What a request carries; none may outlive it."""

    def __init__(self):
        self.body = bytearray(2000)


class Engine:
    """A server as verl's: the first item of `generate` is taken, the generator dropped."""

    begun: ClassVar[Counter] = Counter()

    async def generate(self, payload, items):
        """Yield some items."""
        self.begun["soak_generate"] += 1
        for number in range(items):
            await asyncio.sleep(0)
            yield (payload, number)

    def parse(self, payload, items):
        """Yield some items, without a loop."""
        self.begun["soak_parse"] += 1
        for number in range(items):
            yield (payload, number)

    async def tool(self, payload, error):
        """Run a tool, which may fail."""
        self.begun["soak_tool"] += 1
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return payload

    def merge(self, payload, error=None):
        """Merge tokens, which may fail."""
        self.begun["soak_merge"] += 1
        if error is not None:
            raise error
        return payload

    def hooked(self, payload):
        """Return 42; the probe's hook fails."""
        self.begun["soak_hooked"] += 1
        return 42

    async def request(self, payload, rng):
        """Run one request."""
        self.begun["soak_request"] += 1
        self.merge(payload)
        for _ in range(2):
            items = self.generate(payload, 3)
            way = rng.random()
            if way < 0.7:
                await items.__anext__()
            elif way < 0.8:
                async for _item in items:
                    pass
            elif way < 0.9:
                await items.__anext__()
                await items.aclose()
            else:
                await items.__anext__()
                with contextlib.suppress(ValueError):
                    await items.athrow(ValueError("thrown in"))
            del items
            await self._tool(payload, rng)
        parsed = self.parse(payload, 2)
        next(parsed)
        if rng.random() < 0.5:
            list(parsed)
        del parsed
        if rng.random() < 0.01:
            self.hooked_call(payload)
        return self.merge(payload)

    def hooked_call(self, payload):
        """Call `hooked` and check that its probe's failure is not ours."""
        try:
            if self.hooked(payload) != 42:
                raise ValueError("another result")
        except BaseException as error:  # noqa: BLE001  that is what is looked for
            soak = _soak[0]
            soak.violate(f"a hook raised into the host: {type(error).__name__}", error)

    async def _tool(self, payload, rng):
        if rng.random() < 0.9:
            await self.tool(payload, None)
            return
        raised = rng.choice((
            ValueError("tool"), FailingError(), FailingBase(), asyncio.CancelledError(), asyncio.TimeoutError(),
            GeneratorExit(), SystemError("x"), OSError(28, "full"), KeyError("k"), StopAsyncIteration(),
        ))  # fmt: skip
        try:
            await self.tool(payload, raised)
        except BaseException as error:
            # A coroutine turns StopAsyncIteration into RuntimeError, wrapped or not.
            same = error is raised or error.__cause__ is raised
            if not same and not isinstance(error, asyncio.CancelledError):
                _soak[0].violate(f"another exception: {type(error).__name__}", error)
            if not same:
                raise
            error.__traceback__ = None


class PlainEngine(Engine):
    """The same without probes: the attributes are its own."""


_soak: list = []


def define_classes():
    """Put the classes into a module of their own, as probes want it; keep the plain ones aside."""
    module = types.ModuleType("soak_classes")
    for name in ("generate", "parse", "tool", "merge", "hooked", "request"):
        setattr(PlainEngine, name, Engine.__dict__[name])
    module.Engine = Engine
    sys.modules["soak_classes"] = module


def make_probes(producer):
    """Return probes on `Engine` with hooks as the real ones have them: identity, fields, state."""
    from verl_profiler.instrumentation.probe import Probe
    from verl_profiler.recording.context import Request, current_request

    soak = producer.soak

    def enter(call):
        call.extra = {"id": producer.next_id()}

    def leave(call, result):
        call.extra = {**(call.extra or {}), "kind": type(result).__name__}

    def enter_request(call):
        request = Request(soak.step)
        request.request_id = producer.next_id()
        request.turn = 0
        call.state = current_request.set(request)
        call.request = request
        call.extra = {"id": request.request_id}

    def leave_request(call, result):
        with contextlib.suppress(ValueError):
            current_request.reset(call.state)

    # SystemExit and the like pass: a signal's handler may have raised them while the hook ran.
    failures = (
        RuntimeError, FailingError, RecursionError, StopIteration, asyncio.CancelledError, AttributeError,
    )  # fmt: skip
    turn = itertools.count()

    def failing(call, *_):
        raise failures[next(turn) % len(failures)]

    def probe(name, **hooks):
        return Probe(f"soak_{name}", "rollout", (f"soak_classes:Engine.{name}",), **hooks)

    return [
        probe("request", enter=enter_request, leave=leave_request),
        probe("generate", enter=enter, leave=leave, item=lambda call, item: None),
        probe("parse", enter=enter, leave=leave, item=lambda call, item: None),
        probe("tool", enter=enter, leave=leave),
        probe("merge", enter=enter),
        probe("hooked", enter=failing, leave=failing),
    ]


def spread(times):
    """Return (p50, p99) of seconds, in microseconds."""
    if not times:
        return 0.0, 0.0
    times = sorted(times)
    return times[len(times) // 2] * 1e6, times[min(len(times) - 1, int(len(times) * 0.99))] * 1e6


class Loop:
    """An event loop in a thread, with requests of wrapped classes."""

    def __init__(self, soak):
        self.soak = soak
        self.producer = Producer(soak, "loop")
        self.done = 0
        self.idle = threading.Event()
        self.plain_s = []
        self.wrapped_s = []
        self.payloads = weakref.WeakSet()
        self.tasks = set()

    def run(self, seed):
        """Run requests until the soak ends."""
        asyncio.run(self.main(random.Random(seed)))

    async def main(self, rng):
        """Keep some requests in flight."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        begin, begun = loop.time(), 0
        while not self.soak.ending:
            if not self.soak.gate.is_set():
                while self.tasks:
                    await asyncio.sleep(0.01)
                # Dropped generators are closed by the loop, a little later.
                await asyncio.sleep(0.05)
                self.idle.set()
                while not self.soak.gate.is_set() and not self.soak.ending:
                    await asyncio.sleep(0.01)
                self.idle.clear()
                begin, begun = loop.time(), 0
                continue
            if len(self.tasks) < 64 and (loop.time() - begin) * self.soak.request_rate > begun:
                begun += 1
                self.start_one(rng)
                if begun % 32 == 0:
                    self.compare(rng)
                if begun % 16:
                    continue
            await asyncio.sleep(0)
            if len(self.tasks) >= 64 or (loop.time() - begin) * self.soak.request_rate <= begun:
                await asyncio.sleep(0.001)
        while self.tasks:
            await asyncio.sleep(0.01)
        self.idle.set()

    def start_one(self, rng):
        """Start one request, maybe with somebody who cancels it."""
        payload = Payload()
        self.payloads.add(payload)
        made = Engine().request(payload, rng)
        storm = self.soak.storm
        if storm and rng.random() < 0.3:
            made = asyncio.wait_for(made, rng.choice((0.0, 0.0005, 0.002)))
        task = asyncio.ensure_future(made)
        self.tasks.add(task)
        task.add_done_callback(self.end_one)
        if storm and rng.random() < 0.5:
            asyncio.get_running_loop().call_later(rng.choice((0, 0, 0.0005, 0.003)), task.cancel)

    def end_one(self, task):
        """Count a request that ended somehow."""
        self.tasks.discard(task)
        self.done += 1
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(
            error, (asyncio.CancelledError, asyncio.TimeoutError, TimeoutError)
        ):
            self.soak.violate(f"request failed: {type(error).__name__}", error)

    def compare(self, rng):
        """Time the same plain calls with and without probes, alternately."""
        payload = Payload()
        pair = [(PlainEngine.merge, self.plain_s), (Engine.merge, self.wrapped_s)]
        rng.shuffle(pair)
        plain, wrapped = PlainEngine(), Engine()
        for method, times in pair:
            engine = plain if method is PlainEngine.merge else wrapped
            before = Engine.begun["soak_merge"]
            begin = time.perf_counter()
            for _ in range(10):
                method(engine, payload)
                sum(range(2000))
            times.append(time.perf_counter() - begin)
            if engine is plain:
                Engine.begun["soak_merge"] = before


class Soak:
    """Everything of one host process.

    Args:
        folder: Its folder; the run directory is made in it.
        options: minutes, events, requests, seed, threads, filesystem_bytes.
    """

    def __init__(self, folder, options):
        self.folder = folder
        self.options = options
        self.run = folder / "disk" / "run"
        self.rng = random.Random(options["seed"])
        self.clock = Clock()
        self.disk = Disk(self.run)
        self.violations = Counter()
        self.texts = {}
        self.ending = False
        self.flat_out = False
        self.storm = False
        self.step = 1
        self.gate = threading.Event()
        self.gate.set()
        self.batch = 50
        self.faults = Counter()
        self.children = []
        self.rests = []
        seconds = options["minutes"] * 60
        self.request_rate = options["requests"] / seconds / 0.7
        self.thread_rate = max(
            200, (options["events"] - options["requests"] * 8) / seconds / options["threads"] / 0.7
        )
        self.wake = threading.Event()

    def violate(self, kind, error=None):
        """Note something that must not be."""
        self.violations[kind] += 1
        if error is not None and kind not in self.texts:
            import traceback

            with contextlib.suppress(BaseException):
                self.texts[kind] = "".join(traceback.format_tb(error.__traceback__))[-1500:]

    def rest(self, seconds):
        """Sleep, but not beyond the end."""
        self.wake.wait(seconds)

    def start(self):
        """Start the recorder and place the probes."""
        import verl_profiler
        from verl_profiler.instrumentation import placing
        from verl_profiler.instrumentation.status import status
        from verl_profiler.recording import event_loop_lag, recorder, run_directory
        from verl_profiler.recording.clock import now, take_anchor
        from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

        anchor = take_anchor()
        settings = EventSettings()
        # No stall is that long, so no event is recorded that is not counted here.
        event_loop_lag.LAG_THRESHOLD_S = 60
        made = run_directory.make(str(self.run), anchor, settings, {})
        if made != self.run:
            raise SystemExit(f"{made} is not {self.run}")
        worker_config = WorkerConfig(
            str(made),
            str(self.run),
            settings,
            anchor,
            flush_interval_s=FLUSH_S,
            max_pending=self.options["max_pending"],
        )
        self.recorder = recorder
        recorder.start(worker_config, lambda: Identity("soak", 0))
        self.now, self.record, self.span = now, recorder.record, verl_profiler.span
        self.log = verl_profiler.log_manager.log
        self.loop = Loop(self)
        define_classes()
        placing.install(make_probes(self.loop.producer))
        self.missed = dict(status.missed)

    def conduct(self):
        """Run everything, with faults, for the time that was asked for."""
        self.real_begin_ns = self.clock.real_ns()
        before = {
            "threads": {thread.name for thread in threading.enumerate()},
            "files": open_files(),
        }
        self.start()
        self.producers = [
            Producer(self, f"thread{number}") for number in range(self.options["threads"])
        ]
        threads = [
            threading.Thread(target=producer.run, args=(f"{self.options['seed']}/{number}", 0.002))
            for number, producer in enumerate(self.producers)
        ]
        threads.append(threading.Thread(target=self.loop.run, args=(self.options["seed"],)))
        for thread in threads:
            thread.start()
        self.conduct_faults()
        if os.getpid() != self.options["pid"]:
            return False
        self.end(threads, before)
        return True

    def conduct_faults(self):
        """Break things until the time is over; a forked child returns from here too."""
        begin = time.monotonic()
        seconds = self.options["minutes"] * 60
        calm = max(0.5, min(4.0, seconds / 60))
        shares = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9) if seconds > 120 else (0.25, 0.45, 0.65, 0.85)
        rests = [seconds * share for share in shares]
        names = []
        while time.monotonic() - begin < seconds:
            if rests and time.monotonic() - begin > rests[0]:
                rests.pop(0)
                self.come_to_rest()
            if not names:
                names = list(FAULTS)
                self.rng.shuffle(names)
            name = names.pop()
            self.faults[name] += 1
            self.step += 1
            FAULTS[name](self, self.rng.uniform(0.3, 1.0) * calm)
            if os.getpid() != self.options["pid"]:
                return
            CHANGING.clear()
            time.sleep(self.rng.uniform(0.1, 0.5) * calm)
            self.reap()

    def come_to_rest(self):
        """Stop all producers for a moment; see what is left, and how much memory is held."""
        self.gate.clear()
        if not self.loop.idle.wait(30):
            self.violate("the requests did not end")
        time.sleep(FLUSH_S * 4)
        for _ in range(3):
            gc.collect()
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).malloc_trim(0)
        alive = len(self.loop.payloads)
        if alive:
            self.violate(f"payloads alive at rest: {alive}")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.rests.append({
            "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "requests": self.loop.done,
            "payloads": alive,
        })  # fmt: skip
        self.gate.set()

    def end(self, threads, before):
        """Stop everything; write down what was offered."""
        self.disk.mode = None
        self.clock.offset_s = 0
        self.storm = False
        self.ending = True
        self.wake.set()
        self.gate.set()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                self.violate(f"{thread.name} did not end")
        self.reap(final=True)
        begin = time.perf_counter()
        self.recorder.stop("soak ended")
        stop_s = time.perf_counter() - begin
        time.sleep(0.2)
        left = {thread.name for thread in threading.enumerate()} - before["threads"]
        if left:
            self.violate(f"threads left: {sorted(left)}")
        gc.collect()
        names = open_files()
        if len(names) > len(before["files"]):
            names = sorted((Counter(names) - Counter(before["files"])).elements())
            self.violate(f"files left: {names}")
        try:
            os.waitpid(-1, os.WNOHANG)
            self.violate("children left")
        except ChildProcessError:
            pass
        offered = Counter(Engine.begun)
        hooked = offered.pop("soak_hooked", 0)
        result = {
            "pid": os.getpid(),
            "begin_ns": self.real_begin_ns,
            "end_ns": self.clock.real_ns(),
            "stop_s": stop_s,
            "offered": sum(each.offered for each in self.producers) + sum(offered.values()),
            "bad": sum(each.bad for each in self.producers),
            "hooked": hooked,
            "requests": self.loop.done,
            "probes_missed": self.missed,
            "calls": offered,
            "children": self.children,
            "faults": self.faults,
            "disk_hits": self.disk.hits,
            "rests": self.rests,
            "plain_us": spread(self.loop.plain_s),
            "wrapped_us": spread(self.loop.wrapped_s),
            "violations": self.violations,
            "texts": self.texts,
        }
        (self.folder / "result.json").write_text(json.dumps(result))

    # Faults: each lasts about `seconds`

    def broken_disk(self, mode, seconds):
        """Let writes fail or hang for a while."""
        self.disk.mode = mode
        time.sleep(seconds)
        self.disk.mode = None

    def full_disk(self, seconds):
        """Leave no byte free, where the file system is ours; else say that it is full."""
        if not self.options["filesystem_bytes"]:
            self.broken_disk("full", seconds)
            return
        disk = self.folder / "disk"
        # The file system becomes as small as what is in it.
        for _ in range(10):
            status = os.statvfs(disk)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            if self.resize(disk, used):
                break
        time.sleep(seconds)
        self.resize(disk, self.options["filesystem_bytes"])

    def resize(self, disk, size):
        """Give the file system another size; return whether that worked."""
        command = ["mount", "-o", f"remount,size={size}", str(disk)]
        return not subprocess.run(command, check=False, capture_output=True).returncode

    def clock_steps(self, seconds):
        """Set the wall clock forth and back."""
        for offset in (3600.0, -86400.0, 0.5, -0.5, 1e9):
            self.clock.offset_s = offset
            time.sleep(seconds / 5)
        self.clock.offset_s = 0

    def cancellation_storm(self, seconds):
        """Cancel requests wherever they are."""
        self.storm = True
        time.sleep(seconds)
        self.storm = False

    def flat_out_threads(self, seconds):
        """Let all threads record as fast as they can."""
        self.flat_out = True
        CHANGING.update((str(number), number) for number in range(50))
        end = time.monotonic() + min(seconds, 2.0)
        while time.monotonic() < end:
            CHANGING[str(self.rng.random())] = 1
            time.sleep(0.01)
        self.flat_out = False

    def fork_children(self, seconds):
        """Fork children that record and end in every way."""
        for ending in ENDINGS:
            shared = mmap.mmap(-1, 8 * 4096)
            pid = os.fork()
            if not pid:
                self.be_child(ending, shared, seconds)
                return
            self.children.append(
                {"pid": pid, "ending": ending, "shared": shared, "begun": time.monotonic()}
            )
        time.sleep(seconds / 2)
        for child in self.children:
            if child["ending"] in ("kill", "term") and "status" not in child:
                child["killed_at"] = time.monotonic()
                os.kill(child["pid"], getattr(signal, f"SIG{child['ending'].upper()}"))
        self.reap()

    def be_child(self, ending, shared, seconds):
        """Record in a child, and end."""
        self.disk.mode = None
        self.clock.offset_s = 0
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        os.close(devnull)
        rng = random.Random(os.getpid())
        producer = Producer(self, "child")
        self.gate.set()
        endless = ending in ("kill", "term")
        end = time.monotonic() + (60 if endless else seconds / 4)
        while time.monotonic() < end:
            producer.good(rng)
            if producer.offered % TICK == 1 and producer.offered // TICK < 4000:
                struct.pack_into("d", shared, 8 * (1 + producer.offered // TICK), time.monotonic())
            struct.pack_into("q", shared, 0, producer.offered)
            if producer.offered % 10 == 0:
                time.sleep(0.002)
        if ending == "os_exit":
            os._exit(0)
        if ending == "stop":
            self.recorder.stop("child stopped")
            os._exit(0)
        if ending == "sys_exit":
            sys.exit(3)
        if ending == "error":
            raise RuntimeError("a child's own failure")

    def reap(self, *, final=False):
        """Take the exit status of children; kill those that hang."""
        for child in self.children:
            if "status" in child:
                continue
            while True:
                pid, status = os.waitpid(child["pid"], os.WNOHANG)
                late = time.monotonic() - child["begun"]
                if pid or not final:
                    break
                if late > 60:
                    os.kill(child["pid"], signal.SIGKILL)
                    _, status = os.waitpid(child["pid"], 0)
                    self.violate(f"a child that ended by {child['ending']} hung")
                    pid = child["pid"]
                    break
                time.sleep(0.05)
            if not pid:
                continue
            child["status"] = os.waitstatus_to_exitcode(status)
            shared = child.pop("shared")
            child["offered"] = struct.unpack_from("q", shared, 0)[0]
            child["times"] = [
                time_s
                for (time_s,) in struct.iter_unpack(
                    "d", shared[8 : 8 * min(4096, 2 + child["offered"] // TICK)]
                )
            ]
            child["ended"] = child.get("killed_at", time.monotonic())
            shared.close()
            expected = {"os_exit": 0, "stop": 0, "sys_exit": 3, "error": 1, "kill": -9, "term": -15}
            if child["status"] != expected[child["ending"]]:
                self.violate(
                    f"a child that ended by {child['ending']} has status {child['status']}"
                )


ENDINGS = ("os_exit", "stop", "sys_exit", "error", "kill", "term")
FAULTS = {
    "disk full": Soak.full_disk,
    "disk full (injected)": lambda soak, seconds: soak.broken_disk("full", seconds),
    "EIO": lambda soak, seconds: soak.broken_disk("eio", seconds),
    "slow disk": lambda soak, seconds: soak.broken_disk("slow", seconds),
    "short writes": lambda soak, seconds: soak.broken_disk("short", seconds),
    "ftruncate fails": lambda soak, seconds: soak.broken_disk("truncate_fails", seconds),
    "writer raises": lambda soak, seconds: soak.broken_disk("raises", seconds),
    "writer killed": lambda soak, seconds: soak.broken_disk("kills", seconds),
    "clock steps": Soak.clock_steps,
    "cancellation storm": Soak.cancellation_storm,
    "threads flat out": Soak.flat_out_threads,
    "forks": Soak.fork_children,
}


def main():
    """Soak."""
    folder = Path(sys.argv[1])
    options = {**json.loads(sys.argv[2]), "pid": os.getpid()}
    os.chdir(folder)
    soak = Soak(folder, options)
    _soak.append(soak)
    soak.conduct()


if __name__ == "__main__":
    main()
