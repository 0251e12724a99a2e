"""Prometheus: what its own parser and tools read, and what a scrape gets."""

import shutil
import subprocess

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from verl_profiler.analysis.tq import tq_functions
from verl_profiler.exports.prometheus import BUCKETS_S, exposition, metrics


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
    return exposition(list(metrics(log_tables, counts=counts)))


def test_the_official_parser_reads_the_numbers_of_the_report(text, log_tables):
    """Counts and sums are those of `verl-profiler tq`, sampled calls scaled."""
    found = samples(text)

    for row in tq_functions(log_tables):
        named = labels(function=row["func"])
        assert row["total_s"] == found["verl_tq_call_duration_seconds_sum", named]
        assert row["calls"] == found["verl_tq_call_duration_seconds_count", named]
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
