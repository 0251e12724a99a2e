"""Readings of memory: what cannot be read is left out, and nothing is touched that is not in use."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from verl_profiler.instrumentation.wrapping import wrap
from verl_profiler.probes.weights import PROBES
from verl_profiler.recording import devices


class FakeNvml:
    """A driver with four devices of 80 units, of which device n has 10 n in use."""

    class Error(Exception):
        """What it raises."""

    def __init__(self):
        self.asked = []

    def nvmlInit(self):
        """Start, or say that there is no driver."""

    def nvmlDeviceGetCount(self):
        return 4

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):
        self.asked.append(handle)
        return SimpleNamespace(used=10 * handle, total=80)


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    yield
    devices.forget()


@pytest.fixture
def nvml(monkeypatch):
    """A driver that answers, in place of `pynvml`."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def accelerator(*, initialized):
    """A torch.cuda that fails when it is asked before it is in use."""

    def mem_get_info():
        if not initialized:
            # No subclass of Exception, which would be taken for a device in trouble.
            pytest.fail("this would make a context")
        return 97, 100

    return SimpleNamespace(
        is_initialized=lambda: initialized, mem_get_info=mem_get_info, current_device=lambda: 3
    )


def test_host_memory_is_that_of_this_process_and_of_its_machine():
    """More than nothing, and the process holds less than the machine."""
    found = devices.memory_of_host(whole=True)

    assert 1_000_000 < found["rss_bytes"] < found["host_used_bytes"]
    assert {"rss_bytes"} == set(devices.memory_of_host())


def test_memory_that_the_driver_reserves_is_not_in_use(nvml, monkeypatch):
    """An H100 (driver 580) on which torch read 1045233664 of 85017493504 bytes, and nvidia-smi 997 MiB.

    NVML's first structure counted 480 MiB more; older libraries and drivers have no other.
    """
    first = SimpleNamespace(used=1548550144, total=85520809984)
    second = SimpleNamespace(used=1045233664, total=85520809984, reserved=503316480)
    answers = {None: first, 0x2000028: second}
    nvml.nvmlDeviceGetMemoryInfo = lambda _handle, version=None: answers[version]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert {"used_bytes": 1548550144, "total_bytes": 85520809984} == devices.memory_of_devices()

    nvml.nvmlMemory_v2 = 0x2000028
    assert {"used_bytes": 1045233664, "total_bytes": 85017493504} == devices.memory_of_devices()
    del answers[0x2000028]
    assert {"used_bytes": 1548550144, "total_bytes": 85520809984} == devices.memory_of_devices()


def test_a_device_is_asked_through_torch_if_it_is_in_use(monkeypatch):
    """The current one; else a question would make a context of hundreds of megabytes."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=accelerator(initialized=True)))
    assert {"used_bytes": 3, "total_bytes": 100} == devices.memory_of_devices()

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=accelerator(initialized=False)))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert {} == devices.memory_of_devices()


@pytest.mark.parametrize(
    ("visible", "chosen", "expected"),
    [
        (None, None, {"used_bytes": 60, "total_bytes": 320, "devices": 4}),
        ("3,1", None, {"used_bytes": 40, "total_bytes": 160, "devices": 2}),
        ("3,1", (0,), {"used_bytes": 30, "total_bytes": 80}),
        ("GPU-b", None, {"used_bytes": 10, "total_bytes": 80}),
        ("", None, {}),
        ("7,GPU-unknown", None, {}),
    ],
)
def test_the_driver_is_asked_about_the_visible_devices(
    nvml, monkeypatch, visible, chosen, expected
):
    """And of those about the replica's own."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert expected == devices.memory_of_devices(chosen)


def test_without_a_driver_it_is_asked_once(nvml, monkeypatch):
    """Not at every release."""
    tries = []

    def no_driver():
        tries.append(1)
        raise FakeNvml.Error("no driver")

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)

    assert [{}, {}] == [devices.memory_of_devices(), devices.memory_of_devices()]
    assert [1] == tries


def probe_of(event, target):
    """The probe with this event on this target."""
    return next(p for p in PROBES if p.event == event and any(target in t for t in p.targets))


def test_a_release_says_its_tags_and_the_memory_around_it(nvml, queued, monkeypatch):
    """On the devices of the replica: of those visible, the first two from number 1 on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")

    class TokenizerManager:
        server_args = SimpleNamespace(base_gpu_id=1, tp_size=2, gpu_id_step=1, nnodes=1)

        async def release_memory_occupation(self, obj, request=None):
            nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=1, total=80)
            return "released"

    probe = probe_of("memory_release", "TokenizerManager")
    traced = wrap(probe, TokenizerManager.release_memory_occupation)
    request = SimpleNamespace(tags=["kv_cache", "weights"])

    assert "released" == asyncio.run(traced(TokenizerManager(), request))
    ((name, begin, end, extra, _),) = [e for e in queued.queue if e[0] == "memory_release"]
    assert "memory_release" == name
    assert begin <= end
    assert ["kv_cache", "weights"] == extra["tags"]
    assert (30, 2) == (extra["used_before_bytes"], extra["used_after_bytes"])
    assert (160, 2) == (extra["total_bytes"], extra["devices"])
    assert extra["rss_before_bytes"] > 0 < extra["host_used_after_bytes"]


@pytest.mark.parametrize(
    ("adapter", "recorded"),
    [
        (SimpleNamespace(_is_server_tp_leader=lambda: True, rollout_rank=2), True),
        (SimpleNamespace(_is_server_tp_leader=lambda: False, rollout_rank=0), False),
        (SimpleNamespace(rollout_rank=0), True),
        (SimpleNamespace(rollout_rank=1), False),
        (SimpleNamespace(), True),
    ],
)
def test_a_resume_through_the_adapter_names_its_tags(queued, adapter, recorded):
    """Without any device, the host's memory is there; ranks that ask no engine return at once and are left out."""

    def resume(self, tags):
        return None

    wrap(probe_of("memory_resume", "ServerAdapter.resume"), resume)(adapter, tags=["weights"])
    found = [extra for name, _, _, extra, _ in queued.queue if name == "memory_resume"]

    assert recorded == bool(found)
    for extra in found:
        assert ["weights"] == extra["tags"]
        assert "used_before_bytes" not in extra
        assert extra["rss_after_bytes"] > 0
