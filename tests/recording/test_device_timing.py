"""Times on the device, with a fake CUDA that runs behind the host and cannot be waited for."""

import sys
from types import SimpleNamespace

import pytest
from fake_cuda import FakeCuda

from verl_profiler.instrumentation import wrapping
from verl_profiler.probes.workers import PROBES
from verl_profiler.recording import device_timing

(FORWARD,) = [probe for probe in PROBES if probe.event == "forward_backward"]


@pytest.fixture(autouse=True)
def _nothing_waiting():
    yield
    device_timing.forget()


@pytest.fixture
def cuda(monkeypatch):
    """In the place of torch's."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


def forward(cuda, length_ms, *, error=None):
    """Call a wrapped engine's method that puts so much work into the stream and returns at once."""

    class Engine:
        def forward_backward_batch(self, data, loss_function=None, forward_only=False):
            if length_ms is not None:
                cuda.work(length_ms)
            if error is not None:
                raise error
            return "result"

    engine = Engine()
    call = wrapping.wrap(FORWARD, Engine.forward_backward_batch)
    return call(engine, None)


def timed(queued):
    """The device's times that were recorded so far."""
    return [
        (extra["of"], extra["device_s"])
        for name, _, _, extra, *_ in queued.queue
        if name == "device_time"
    ]


def test_a_call_is_timed_when_the_device_has_passed_it(cuda, queued):
    """At a later call; the time is that of its own work, although the device began late."""
    cuda.work(500)
    assert "result" == forward(cuda, 70)
    forward(cuda, 30)
    assert [] == timed(queued), "the device is still at work of before"

    cuda.advance(580)
    forward(cuda, 10)
    assert [("forward_backward", 0.07)] == timed(queued)
    cuda.advance(1000)
    forward(cuda, 10)

    assert [0.07, 0.03, 0.01] == [device_s for _, device_s in timed(queued)]


def test_events_are_used_again(cuda, queued):
    """And nothing else of torch.cuda is asked for."""
    for _ in range(20):
        forward(cuda, 1)
        cuda.advance(1)

    assert cuda.created <= 4
    assert {"record", "query"} == set(cuda.calls)


def test_calls_that_wait_are_bounded(cuda, queued):
    """A device that hangs."""
    cuda.work(1e9)
    for _ in range(2 * device_timing._WAITING):
        forward(cuda, 1)

    assert device_timing._WAITING == len(device_timing._waiting)


def test_no_event_without_a_context(queued, monkeypatch, capfd):
    """Or with a torch that has no CUDA: the call is recorded as ever."""
    fake = FakeCuda(initialized=False)
    for torch in (SimpleNamespace(cuda=fake), SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert "result" == forward(fake, 5)

    assert [] == fake.calls
    assert 0 == fake.created
    assert "" == capfd.readouterr().err


def test_nothing_is_asked_during_the_capture_of_a_graph(cuda, queued):
    """CUDA refuses to query an event there, and the capture fails; events that wait go on waiting."""
    forward(cuda, 70)
    cuda.calls.clear()
    cuda.created = 0
    cuda.capturing = True
    assert "result" == forward(cuda, 5)
    assert [] == cuda.calls
    assert 0 == cuda.created
    assert 1 == len(device_timing._waiting)


def test_a_failed_call_has_no_time(cuda, queued):
    """Its exception is the host's own."""
    error = ValueError("of the host")
    with pytest.raises(ValueError, match="of the host") as caught:
        forward(cuda, 5, error=error)

    assert error is caught.value
    assert 0 == len(device_timing._waiting)


def test_when_cuda_refuses_it_is_one_line(cuda, queued, capfd, monkeypatch):
    """And not tried again."""

    def refuse(*, enable_timing):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cuda, "Event", refuse, raising=False)
    for _ in range(3):
        assert "result" == forward(cuda, 5)

    printed = [line for line in capfd.readouterr().err.splitlines() if "device time" in line]
    assert 1 == len(printed)
    assert "(device-time-failed)" in printed[0]
