"""Put all probes on the real verl in one process and report what changed, as JSON on stdout.

First those that measure, then with those of TransferQueue tracing.

    python transparency.py

A child of its own, because importing verl, SGLang and the agent loops takes seconds and changes
the process.  `test_transparency.py` reads the report.
"""

import importlib
import inspect
import json
import os
import pickle
import sys
import tempfile

import cloudpickle

from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import all_probes
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig
from verl_profiler.transfer_queue import calls
from verl_profiler.transfer_queue.probes import PROBES as TRACING
from verl_profiler.transfer_queue.probes import with_tracing
from verl_profiler.transfer_queue.switches import Switches

MAGIC_ATTR = "attrs_3141562937"


def import_hosts():
    """Import every module that a probe names; return those that are not to be had here."""
    absent = {}
    probes = [*all_probes(), *TRACING]
    for module in sorted({t.partition(":")[0] for p in probes for t in p.targets}):
        try:
            importlib.import_module(module)
        except Exception as error:
            absent[module] = repr(error)
    return absent


def places(probes):
    """Return (target, probe, owner, attribute, static attribute) of every target that exists."""
    found = []
    for probe in probes:
        for target in probe.targets:
            module, _, path = target.partition(":")
            if module not in sys.modules:
                continue
            place = placing.resolve(sys.modules[module], path)
            if place is not None:
                found.append((target, probe, *place))
    return found


def function_of(static):
    return static.__func__ if isinstance(static, (staticmethod, classmethod)) else static


def wrappers_of_ours(function):
    """Return how many functions of ours a call of this one goes through, as `__wrapped__` shows."""
    count = 0
    while function is not None:
        function = function_of(function)
        code = getattr(function, "__code__", None)
        count += code is not None and code.co_filename == wrapping.__file__
        function = getattr(function, "__wrapped__", None)
    return count


def kind(function):
    return [
        inspect.iscoroutinefunction(function),
        inspect.isasyncgenfunction(function),
        inspect.isgeneratorfunction(function),
    ]


def unpickling():
    """Return a function that gets pickles by target, and returns which fail where no probe ever was.

    Called before the probes are placed: a fork of this process reads the pickles.
    """
    (orders, to_fork), (from_fork, answers) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_fork)
        bad = {}
        with open(orders, "rb") as file:
            for target, parts in pickle.load(file).items():
                try:
                    carrier, function = map(pickle.loads, parts)
                    assert callable(carrier.probed)
                    assert callable(function)
                except Exception as error:
                    bad[target] = repr(error)
        with open(answers, "w") as file:
            json.dump(bad, file)
        os._exit(0)
    os.close(answers)

    def unpickled(parts):
        with open(to_fork, "wb") as file:
            pickle.dump(parts, file)
        with open(from_fork) as file:
            return json.load(file)

    return unpickled


def pickled(function):
    """Return a wrapper as pickles: in a class that travels by value, as `@ray.remote` classes do, and alone."""
    carrier = type("Carrier", (), {"probed": function})
    carrier.__module__ = "__main__"
    return cloudpickle.dumps(carrier), cloudpickle.dumps(function)


def main():
    """Run all checks and print the report."""
    absent = import_hosts()
    untouched = not any(
        wrappers_of_ours(static) for *_, static in places([*all_probes(), *TRACING])
    )
    unpickled = unpickling()
    folder = tempfile.mkdtemp()
    config = WorkerConfig(folder, folder, EventSettings(), take_anchor(), flush_interval_s=60)
    recorder.start(config, lambda: Identity("agent_loop", 0))
    report = {"measuring": check(all_probes())}
    calls.start(Switches(trace=True), "run", records=True)
    # These are the others too.
    report["tracing"] = check(with_tracing(all_probes()), unpickled)
    calls.stop()
    recorder.stop()
    for part in report.values():
        part.update(absent=absent, untouched=untouched)
    print("\nREPORT " + json.dumps(report))


def check(probes, unpickled=None):
    """Return what is wrong with these probes."""
    before = places(probes)
    placing.install(probes)
    report = {"installed": dict(status.installed), "missed": dict(status.missed)}
    first = {target: vars(owner)[name] for target, _, owner, name, _ in before}
    placing.install(probes)
    report["wrapped_twice"] = [
        target for target, _, owner, name, _ in before if vars(owner)[name] is not first[target]
    ]
    report["wrappers"] = {
        target: wrappers_of_ours(vars(owner)[name]) for target, _, owner, name, _ in before
    }
    targets = {}
    for target, _, owner, name, static in before:
        original, wrapper = function_of(static), function_of(vars(owner)[name])
        if wrapper is original:
            continue
        problems = []
        if inspect.signature(original) != inspect.signature(wrapper):
            problems.append("another signature")
        if kind(original) != kind(wrapper):
            problems.append("another kind")
        if type(static) is not type(vars(owner)[name]):
            problems.append("no longer a static or class method")
        lost = vars(original).keys() - vars(wrapper).keys()
        if lost:
            problems.append(f"lost attributes {sorted(lost)}")
        if getattr(original, MAGIC_ATTR, None) is not getattr(wrapper, MAGIC_ATTR, None):
            problems.append("lost MAGIC_ATTR")
        targets[target] = problems
    report["targets"] = targets
    report["registered"] = [
        target for target, *_, static in before if hasattr(function_of(static), MAGIC_ATTR)
    ]
    if unpickled is not None:
        report["unpicklable"] = unpickled(
            {
                target: pickled(function_of(vars(owner)[name]))
                for target, _, owner, name, _ in before
            }
        )
    placing.uninstall()
    report["not_restored"] = [
        target for target, _, owner, name, static in before if vars(owner)[name] is not static
    ]
    return report


if __name__ == "__main__":
    main()
