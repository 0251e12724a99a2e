"""Prometheus: what its own parser and tools read, and what a scrape gets."""

import http.client
import shutil
import socket
import subprocess
import urllib.request

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from verl_profiler.analysis.tq import tq_functions
from verl_profiler.errors import ReadingError
from verl_profiler.exports.prometheus import BUCKETS_S, exposition, metrics, serve


def samples(text):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**named):
    return frozenset({"run": "training.log", **named}.items())


@pytest.fixture
def text(log_tables):
    """What a scrape would get."""
    counts = {"training.log": {"missing": 3, "unreadable": 0}}
    return exposition(lambda: list(metrics(log_tables, counts=counts)))


def test_the_official_parser_reads_the_numbers_of_the_report(text, log_tables):
    """Counts, sums and shares are those of `verl-profiler tq`, sampled calls scaled."""
    found = samples(text)

    for row in tq_functions(log_tables):
        named = labels(function=row["func"])
        assert row["total_s"] == found["verl_tq_call_duration_seconds_sum", named]
        assert row["calls"] == found["verl_tq_call_duration_seconds_count", named]
        assert row["overhead_share"] == found["verl_tq_overhead_ratio", named]
    assert 1 == found["verl_tq_calls_total", labels(function="generate", status="error")]
    assert 2 == found["verl_tq_calls_total", labels(function="update", status="ok")]
    moved = labels(caller="update", operation="get")
    assert 2 * 30 * 2**20 == found["verl_tq_transfer_bytes_total", moved]
    assert 3 == found["verl_tq_log_lines", labels(reason="missing")]


def test_buckets_are_cumulative_and_end_in_the_count(text):
    """As a histogram's must; a length on a bound is in its bucket."""
    found = samples(text)

    for (name, named), value in found.items():
        if not name.endswith("_count"):
            continue
        buckets = [
            found[name.replace("_count", "_bucket"), named | {("le", bound)}]
            for bound in [*map(str, BUCKETS_S), "+Inf"]
        ]
        assert sorted(buckets) == buckets
        assert value == buckets[-1]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's promtool is not here")
def test_promtool_finds_no_fault(text):
    """It knows the conventions for names, units and help texts."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)


def test_a_scrape_reads_the_run_anew(log_tables):
    """A run that grows is seen to grow; only this machine is answered."""
    reads = []

    def read():
        reads.append(1)
        counts = {"training.log": {"missing": len(reads)}}
        return list(metrics(log_tables, counts=counts))

    server, thread = serve(read, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        texts = [urllib.request.urlopen(url, timeout=30).read().decode() for _ in range(2)]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)

    named = labels(reason="missing")
    assert [1, 2] == [samples(each)["verl_tq_log_lines", named] for each in texts]
    assert "127.0.0.1" == server.server_address[0]


def asked(read, names=(), **headers):
    """Serve metrics for one request; return the answer's status and text."""
    server, thread = serve(read, "127.0.0.1", 0, list(names))
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("[::1]:9464", 200),
        ("10.1.2.3", 200),
        ("LocalHost:9464", 200),
        (socket.gethostname(), 200),
        ("metrics.example:9464", 200),
        ("rebound.example:9464", 403),
        ("127.0.0.1.rebound.example", 403),
        ("localhost.rebound.example:9464", 403),
        ("localhost@rebound.example", 403),
    ],
)
def test_only_names_of_this_machine_are_served(log_tables, host, status):
    """A page that points its own name here (DNS rebinding) reads nothing."""
    answered, text = asked(lambda: list(metrics(log_tables)), ["metrics.example"], Host=host)

    assert status == answered
    assert (status == 200) == (b"verl_tq_calls" in text)


def test_a_run_that_cannot_be_read_is_an_answer(capfd):
    """Not a traceback in the terminal, and an end of the connection."""

    def read():
        raise ReadingError("it is gone.", "no-such-run")

    assert (503, b"it is gone. (no-such-run)\n") == asked(read)
    assert "" == capfd.readouterr().err


def test_an_address_in_use_is_an_error(log_tables):
    """Not a traceback of the server's."""
    server, thread = serve(list, "127.0.0.1", 0)
    try:
        with pytest.raises(ReadingError, match="cannot be served"):
            serve(list, "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
