"""Every test leaves nothing behind: no probe, no writer thread, no variable, no recording."""

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

import pytest
import real_nsys
from cached_runs import CACHES
from fake_nvtx import FakeNvtx
from hypothesis import HealthCheck, settings

from verl_profiler.capture import session
from verl_profiler.environ import CACHE_HOME
from verl_profiler.instrumentation import nvtx_ranges, placing
from verl_profiler.instrumentation.status import status
from verl_profiler.recording import context, recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores SIGINT, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How fast examples are generated depends on the machine's load.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

# No test reads or fills the user's own caches.
os.environ[CACHE_HOME] = str(CACHES)

# Workers that a Ray node starts before any is needed: verl's actors take none of them, for they have
# variables of their own; each costs 3 s of CPU.
os.environ.update(RAY_prestart_worker_first_driver="0")

DATA = Path(__file__).parent / "data"

# For the recorder's threads to end; a busy machine's disk may stand still for seconds.
_PATIENCE_S = 60


# Few tests of many seconds each: a worker that begins such a file last keeps the others waiting.
_LONG = {
    *("test_browser.py", "test_damaged_input.py", "test_docs.py", "test_every_analysis.py"),
    *("test_following.py", "test_how_to.py", "test_json_format.py", "test_large_runs.py"),
    *("test_object_storage.py", "test_planted.py", "test_plots.py", "test_runs.py"),
    *("test_sampled_details.py", "test_wheel.py"),
}


@functools.cache
def _starts_ray(file):
    return re.search(r"\bmark\.(ray|rehearsal)\b", file.read_text()) is not None


def pytest_collection_modifyitems(items):
    """Put files of long tests first, then those of many."""
    tests = Counter(item.path for item in items)

    def place(item):
        long = item.path.name in _LONG or _starts_ray(item.path)
        return not long, -tests[item.path], str(item.path)

    items.sort(key=place)


def pytest_collection_finish():
    """Spare each later collection of garbage what is there from now on: all modules and all tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give all files that start Ray to one worker, and to one all that share a process with verl in it."""
    from xdist.scheduler import LoadFileScheduling

    # Files stay in the order in which they were collected.
    config.option.loadscopereorder = False

    class OneWorkerForRay(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if _starts_ray(config.rootpath / file):
                return "ray"
            return "verl" if file.startswith("tests/verl/") else file

    return OneWorkerForRay(config, log)


def _data_files():
    """Return the files of tests/data with what changes when one is written."""
    found = {}
    for folder, _, names in os.walk(DATA):
        for name in names:
            path = os.path.join(folder, name)
            status = os.stat(path)
            found[path] = status.st_size, status.st_mtime_ns
    return found


@pytest.fixture(scope="session")
def _data_before():
    return _data_files()


def _place(thread):
    frame = sys._current_frames().get(thread.ident)
    return traceback.format_stack(frame)[-1].strip() if frame else "no frame"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(_data_before):
    environment = dict(os.environ)
    yield
    left = []
    data = _data_files()
    if data != _data_before:
        # Also what a fixture of the module or the session wrote, which its first test is blamed for.
        changed = sorted(path for path, _ in data.items() ^ _data_before.items())
        left.append(f"written in tests/data: {sorted(set(changed))}")
        _data_before.clear()
        _data_before.update(data)
    if recorder.active() is not None:
        left.append("a running recorder")
        recorder.stop("left behind by a test")
    if status.installed:
        left.append(f"probes: {status.installed}")
        placing.uninstall()
    for thread in threading.enumerate():
        if thread.name in ("verl-profiler writer", "verl-profiler memory"):
            # `stop` waits a bounded time for a disk that does not respond; a leak does not end.
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                left.append(f"{thread.name}, in {_place(thread)}")
    if nvtx_ranges.is_on():
        left.append("NVTX ranges")
        nvtx_ranges.switch_off()
    session._current = None
    context.process.reset()
    context.current_request.set(None)
    context.current_engine_call.set(None)
    status.clear()
    os.environ.clear()
    os.environ.update(environment)

    assert [] == left


@pytest.fixture
def worker_config(tmp_path):
    """What a process gets from the driver: a run directory that exists, quick flushes."""
    directory = tmp_path / "run"
    directory.mkdir()
    return WorkerConfig(
        str(directory), str(directory), EventSettings(), take_anchor(), flush_interval_s=0.01
    )


@pytest.fixture
def recording(worker_config):
    """A recorder that runs in this process as `worker_0`; stopped when the test ends."""
    active = recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    yield active
    recorder.stop()


@pytest.fixture(scope="session")
def namespaces():
    """The start of a command line that runs in its own mount and process namespaces."""
    argv = ["unshare", "-mpf", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        argv = ["unshare", "-r", *argv[1:]]
    try:
        done = subprocess.run([*argv, "unshare", "-mu", "true"], capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no namespaces: {error}")
    if done.returncode:
        pytest.skip(f"no namespaces: {done.stderr.decode().strip()}")
    return argv


@pytest.fixture(scope="session")
def nsys_or_reason():
    """What a real nsys needs in the environment, with an nvtx that it hears; or why there is none."""
    try:
        return real_nsys.environment()
    except real_nsys.CannotBeHad as error:
        return f"no real nsys: {error}"


@pytest.fixture
def nsys(nsys_or_reason):
    """What a real nsys needs in the environment."""
    if isinstance(nsys_or_reason, str):
        pytest.skip(nsys_or_reason)
    return nsys_or_reason


@pytest.fixture
def nvtx(monkeypatch):
    """A stand-in in the place of nvtx, in a process that a tool watches."""
    made = FakeNvtx()
    monkeypatch.setenv("NVTX_INJECTION64_PATH", __file__)
    monkeypatch.setitem(sys.modules, "nvtx", made)
    return made
