"""Sampling devices: what a reading has, who reads, and what happens when it fails or ends.

The driver is a fake with the functions of the real library (nvidia-ml-py 13.615); the
thread, the election and the processes are real.
"""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import fake_nvml
import pytest
from reading_back import headers_of, lines_of
from recording.children import until

from verl_profiler.recording import device_sampler, devices, recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

GIB = 1 << 30
QUICK = device_sampler.Waits(identity_s=0.01, retry_s=0.02)


def fake_device(number):
    """The facts of one device, as NVML has them."""
    return {
        "uuid": f"GPU-{number:08x}",
        "busId": f"00000000:{0x10 + number:02X}:00.0",
        "name": "Fake H100",
        "powerLimit": 700_000,
        "memoryTotal": 80 * GIB,
    }


def fake_reading(utilization, power=100_000, **others):
    """One reading in NVML's units."""
    return {
        "utilizationGpu": utilization,
        "utilizationMemory": utilization // 2,
        "memoryUsed": 10 * GIB,
        "power": power,
        "clockSm": 1980,
        "clockMem": 2619,
        "temperature": 41,
        "clocksEventReasons": 0,
        **others,
    }


def fake_feed(*readings, devices=1, period_s=1000):
    """The same readings of each device, the first of them for as long as a test takes."""
    return {
        "devices": [fake_device(number) for number in range(devices)],
        "period_s": period_s,
        "readings": [list(readings)],
    }


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(devices, "visible_words", lambda: None)
    yield
    if device_sampler._sampler is not None:
        device_sampler._end()
    devices.forget()


@pytest.fixture
def nvml(monkeypatch):
    """The fake driver in place of `pynvml`."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    monkeypatch.setattr(devices, "is_importable", lambda: True)
    return fake_nvml


def config_of(directory, **settings):
    """A worker's settings."""
    return WorkerConfig(
        str(directory),
        str(directory),
        EventSettings(**settings),
        take_anchor(),
        flush_interval_s=0.01,
        device_interval_s=0.2,
    )


def sampled(tmp_path, least=1, seconds=10, role="actor", **settings):
    """Sample until there are so many lines, or so long; return their fields."""
    recorder.start(
        config_of(tmp_path, **settings), lambda: Identity(role, 0), device_sampler.account
    )
    device_sampler.begin(QUICK)
    end = time.monotonic() + seconds
    try:
        until(lambda: len(device_lines(tmp_path)) >= least or time.monotonic() > end)
    finally:
        recorder.stop()
    return [line["extra"] for line in device_lines(tmp_path)]


def device_lines(tmp_path):
    """The `device` events that were written so far."""
    return [line for line in lines_of(tmp_path) if line["event"] == "device"]


def test_a_reading_has_the_librarys_values_in_the_units_of_the_fields(nvml, tmp_path):
    """Milliwatts and millijoules become W and J; bits become names, without idle and set clocks."""
    reading = fake_reading(37, power=412_345, clocksEventReasons=0x1 | 0x2 | 0x4 | 0x20)
    nvml.load(fake_feed(reading))

    (fields,) = sampled(tmp_path)

    assert {
        "device": 0,
        "utilization": 37,
        "memory_utilization": 18,
        "used_bytes": 10 * GIB,
        "power_w": 412,
        "sm_mhz": 1980,
        "memory_mhz": 2619,
        "temperature_c": 41,
        "slowed_by": ["power_cap", "thermal"],
    } == fields
    assert {
        "library": "pynvml",
        "interval_s": 0.2,
        "devices": [
            {
                "device": 0,
                "uuid": "GPU-00000000",
                "bus_id": "0000:10:00.0",
                "model": "Fake H100",
                "total_bytes": 80 * GIB,
                "power_limit_w": 700,
            }
        ],
    } == headers_of(tmp_path)["actor_0"]["device_sampling"]


def test_a_device_that_does_not_change_has_one_line(nvml, tmp_path, monkeypatch):
    """Noise of power and temperature is no change; after the longest interval there is a line anyway."""
    jitter = [fake_reading(0, power=70_000 + 1000 * n, temperature=40 + n) for n in (0, 2, 1)]
    nvml.load(fake_feed(*jitter, period_s=0.2))
    assert 1 == len(sampled(tmp_path / "a", least=2, seconds=1))

    monkeypatch.setattr(device_sampler, "LONGEST_S", 0.3)
    assert 2 <= len(sampled(tmp_path / "b", least=2))


def test_a_reading_after_a_time_without_any_has_its_length(nvml, tmp_path, monkeypatch):
    """Another thread held the interpreter; also where nothing has changed."""
    nvml.load(fake_feed(fake_reading(0)))
    read, lengths = devices.Device.read, iter([0, 0, 1.0])

    def slow(device):
        time.sleep(next(lengths, 0))
        return read(device)

    monkeypatch.setattr(devices.Device, "read", slow)
    first, second = sampled(tmp_path, least=2)[:2]

    assert "gap_s" not in first
    assert second["gap_s"] >= 1.0


def test_what_a_device_does_not_support_is_left_out(nvml, tmp_path):
    """And is not tried again."""
    reading = fake_reading(5)
    del reading["power"], reading["clocksEventReasons"]
    nvml.load(fake_feed(reading))
    device = devices.open_devices()[0]
    first = device.read()
    before = nvml.calls
    device.read()

    assert {"utilization", "used_bytes", "sm_mhz"} < first.keys()
    assert not {"power_w", "slowed_by"} & first.keys()
    assert 6 == nvml.calls - before, "two of utilization, memory, two clocks, temperature"


def test_a_lost_device_is_one_line_on_the_console(nvml, tmp_path, capfd):
    """The others are sampled as before."""
    feed = fake_feed(fake_reading(0), devices=2, period_s=0.25)
    feed["readings"] = [
        [fake_reading(10), {"error": "GPU is lost"}],
        [fake_reading(0), fake_reading(1)],
    ]
    nvml.load(feed)

    lines = sampled(tmp_path, least=5)

    assert [10] == [fields["utilization"] for fields in lines if fields["device"] == 0]
    assert 3 <= len([fields for fields in lines if fields["device"] == 1])
    printed = [line for line in capfd.readouterr().err.splitlines() if "device" in line]
    assert 1 == len(printed)
    assert "device 0 is no longer sampled: NVMLError('GPU is lost') (device-lost)" in printed[0]


def test_where_nothing_is_sampled_nothing_is_asked(nvml, tmp_path, monkeypatch, capfd):
    """Off; in the trainer, agent loops and queues; without a driver, as on a laptop."""
    nvml.load(fake_feed(fake_reading(0)))
    before = nvml.calls
    recorder.start(config_of(tmp_path / "off", devices=False), lambda: Identity("actor", 0), dict)
    device_sampler.begin(QUICK)
    assert device_sampler._sampler is None
    recorder.stop()
    assert [] == sampled(tmp_path / "loop", seconds=0.3, role="agent_loop")
    assert before == nvml.calls
    nvml.load(None)
    monkeypatch.delenv("FAKE_NVML_FEED", raising=False)
    assert [] == sampled(tmp_path / "none", seconds=0.3)
    assert "device" not in capfd.readouterr().err


def test_a_hung_driver_does_not_hold_up_the_end(nvml, tmp_path, monkeypatch):
    """The thread stays behind."""
    nvml.load(fake_feed(fake_reading(0)))
    hung = []

    def hang(_handle):
        hung.append(1)
        time.sleep(5)

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", hang)
    recorder.start(config_of(tmp_path), lambda: Identity("actor", 0), dict)
    device_sampler.begin(QUICK._replace(end_s=0.05))
    until(lambda: hung)
    thread = device_sampler._sampler

    recorder.stop()

    assert thread.is_alive()
    assert device_sampler._sampler is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("1,3", [1, 3]),
        ("GPU-00000002", [2]),
        ("", [0, 1, 2, 3]),
        ("9", [0, 1, 2, 3]),
    ],
)
def test_devices_that_the_run_was_not_given_are_left_out(nvml, monkeypatch, words, expected):
    """By index or UUID; a variable that names none of them is not about them."""
    nvml.load(fake_feed(fake_reading(0), devices=4))

    monkeypatch.setattr(devices, "visible_words", lambda: words)

    assert expected == [device.index for device in devices.open_devices()]


def test_the_variable_is_that_of_the_parent():
    """Ray narrows a worker's own."""
    code = (
        "from verl_profiler.recording.devices import visible_words as v; "
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '7'; print(v())"
    )
    parent = (
        f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {code!r}]))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "2,3"}
    printed = subprocess.check_output([sys.executable, "-c", parent], env=environment, text=True)

    assert "2,3" in printed


PROCESS = """
import os, sys, time
sys.path[:0] = {paths!r}
from verl_profiler.recording import devices, device_sampler, recorder
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import WorkerConfig

devices.visible_words = lambda: None
config, rank = WorkerConfig.decode(sys.argv[1]), int(sys.argv[2])
recorder.start(config, lambda: Identity("actor", rank), device_sampler.account)
device_sampler.begin(device_sampler.Waits(retry_s=0.1))
child = os.fork() if sys.argv[3:] == ["fork"] else None
if child == 0:
    recorder.stop()
    time.sleep(120)
    os._exit(0)
print(child or "", flush=True)
sys.stdin.readline()
recorder.stop()
"""


@pytest.fixture
def processes(tmp_path):
    """Return a function that starts a process of the run, with the fake driver on its path."""
    # Changes all the time, so that each reading has a line.
    feed = fake_feed(fake_reading(0), fake_reading(100), period_s=0.2)
    variables = fake_nvml.install(tmp_path / "path", feed)
    code = PROCESS.format(paths=[variables["PYTHONPATH"]])
    started = []
    children = []

    def start(run, rank, *words):
        process = subprocess.Popen(
            [sys.executable, "-c", code, config_of(run).encode(), str(rank), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        started.append(process)
        child = process.stdout.readline().strip()
        children.extend([int(child)] if child else [])
        return process

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def samplers(run):
    """Who has written readings, with how many."""
    return {
        file.stem: file.read_text().count('"event":"device"')
        for file in run.glob("step_*/*.jsonl")
        if '"event":"device"' in file.read_text()
    }


def test_one_process_samples_and_another_takes_over_when_it_is_killed(processes, tmp_path):
    """Also if the killed one has a forked child that lives on, as a data loader's worker does.

    Another run on the same host samples for itself.
    """
    run, other = tmp_path / "run", tmp_path / "other"
    processes(other, 0)
    first = processes(run, 0, "fork")
    until(lambda: samplers(run).get("actor_0", 0) >= 2)
    for rank in (1, 2, 3):
        processes(run, rank)
    time.sleep(1)
    assert {"actor_0"} == samplers(run).keys()

    first.kill()
    first.wait()
    count = samplers(run)["actor_0"]

    until(lambda: max(samplers(run).get(f"actor_{rank}", 0) for rank in (1, 2, 3)) >= 3)
    assert 2 == len(samplers(run))
    assert {"actor_0"} == samplers(other).keys()
    assert count == samplers(run)["actor_0"]


def test_devices_of_a_process_are_known_where_torch_uses_them(monkeypatch):
    """A fake torch.cuda: its UUID without prefix, its PCI numbers; else those of an engine's replica."""
    facts = SimpleNamespace(uuid="0a-1b", pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 8,
        current_device=lambda: 5,
        get_device_properties=lambda index: {5: facts}[index],
        mem_get_info=lambda: (1, 2),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert [] == devices.used_devices(), "another thread has a current device of its own"

    devices.memory_of_devices()

    assert [{"uuid": "GPU-0a-1b", "bus_id": "0000:17:00.0"}] == devices.used_devices()

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    devices.forget()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-x")
    devices.remember_replica((1, 3))
    assert [{"device": 5}, {"uuid": "GPU-x"}] == devices.used_devices()
