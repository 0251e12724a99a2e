"""`tq/*`: sums of all processes, once a step, in what verl's loggers get."""

import json
import sys

import pytest

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.wrapping import wrap
from verl_profiler.transfer_queue import metrics

SECOND = 10**9


class Store:
    """A stand-in for Ray's key-value store."""

    def __init__(self):
        self.entries = {}

    def _internal_kv_initialized(self):
        return True

    def _internal_kv_list(self, prefix, *, namespace):
        return [key for key in self.entries if key.startswith(prefix.encode())]

    def _internal_kv_get(self, key, *, namespace):
        return self.entries[key]

    def _internal_kv_put(self, key, value, *, namespace):
        self.entries[key.encode()] = value


@pytest.fixture
def store(monkeypatch):
    """Metrics that run, with other processes' entries to be set."""
    found = Store()
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", found)
    monkeypatch.setattr(metrics.atexit, "register", lambda call: None)
    metrics.start("run")
    yield found
    metrics.stop()


class Tracking:
    """As verl's."""

    def __init__(self):
        self.got = []

    def log(self, data, step, backend=None):
        self.got.append((data, step))


@pytest.fixture
def log(store):
    """verl's `Tracking.log`, wrapped; returns what the loggers got."""
    probe = Probe(None, "transfer_queue", ("m:Tracking.log",), arguments=metrics.add_to_log)
    wrapped = wrap(probe, Tracking.log)
    tracking = Tracking()

    def call(*args, **kwargs):
        wrapped(tracking, *args, **kwargs)
        return tracking.got[-1][0]

    return call


def others(store, name, **sums):
    store.entries[f"run/{name}".encode()] = json.dumps(sums).encode()


def test_sums_over_all_processes_since_the_last_step(store, log):
    """Running sums of the others, and those of this process."""
    spent = {"GET": SECOND, "COMPUTE": 8 * SECOND, "PUT": SECOND}
    counts = {"GET": 1, "COMPUTE": 1, "PUT": 1}
    metrics.add_function(10 * SECOND, spent, counts, failed=False)
    others(store, "b", client_get_ns=2 * SECOND, client_get_bytes=2**20 * 500, client_get_count=4)
    first = log({"loss": 1.0}, 1)
    others(store, "b", client_get_ns=3 * SECOND, client_get_bytes=2**20 * 900, client_get_count=5)
    second = log({"loss": 2.0}, step=2)

    assert 1.0 == first["loss"]
    assert (10.0, 1.0, 1.0, 0.2) == (
        first["tq/total_time"],
        first["tq/get_time_total"],
        first["tq/put_time_mean"],
        first["tq/overhead_share"],
    )
    assert (500.0, 250.0, 4) == (
        first["tq/get_size_mb_total"],
        first["tq/get_throughput_mbps"],
        first["tq/client_get_count"],
    )
    assert (400.0, 400.0, 1) == (
        second["tq/data_size_mb_total"],
        second["tq/get_throughput_mbps"],
        second["tq/client_get_count"],
    )
    assert "tq/total_time" not in second


def test_a_step_gets_them_once(store, log):
    """A second log of the step must not overwrite the first one's numbers."""
    others(store, "b", client_put_ns=SECOND, client_put_bytes=2**20, client_put_count=1)

    assert "tq/client_put_count" in log({}, 1)
    others(store, "b", client_put_ns=2 * SECOND, client_put_bytes=2**21, client_put_count=3)
    assert {"loss": 1} == log({"loss": 1}, 1)
    assert 2 == log({}, 2)["tq/client_put_count"]


def test_what_verl_logs_is_logged(store, log, capsys):
    """Its own dict stays as it is; no zeros for what was not there; what cannot be read costs a line."""
    assert [1] == log([1], 1)
    data = {"loss": 1}
    assert data == log(data, 1)
    others(store, "b", client_put_ns=SECOND, client_put_bytes=2**20, client_put_count=1)
    assert {*data} < {*log(data=data, step=2)}
    assert {"loss": 1} == data
    # It fails.
    store.entries = None
    assert data == log(data, 3)
    assert "tq-metrics" in capsys.readouterr().err
