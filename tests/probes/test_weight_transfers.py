"""Buckets of a weight sync: lines of the first ones, and one of the others.

Of whole syncs, a rehearsal of each push has what is sent and received (tests/rehearsal/test_asynchronous.py).
"""

import asyncio
from types import SimpleNamespace

from reading_back import lines_of

from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.status import status
from verl_profiler.probes.weight_transfers import LIMIT, PROBES
from verl_profiler.recording import recorder


def around(method, function):
    (probe,) = (p for p in PROBES if p.targets[0].endswith(f"GlooCheckpointEngine.{method}"))
    return wrapping.wrap(probe, function)


def test_a_large_model_has_no_more_lines_than_a_small_one(recording, worker_config):
    """The buckets after the limit share a line; sizes and numbers add up to those of the sync."""

    class Engine:
        rank = 0
        send_bucket = around("send_bucket", lambda self, described, bucket, is_last: bucket)

        async def send_all(self, weights, global_steps=None):
            for bucket in weights:
                self.send_bucket(None, bucket, False)

        send_weights = around("send_weights", send_all)

    for step, count in ((1, LIMIT + 38), (2, 3)):
        buckets = [SimpleNamespace(nbytes=10)] * count
        asyncio.run(Engine().send_weights(buckets, global_steps=step))
    recorder.stop()
    lines = lines_of(worker_config.directory)

    assert {} == dict(status.errors)
    for version, count in ((1, LIMIT + 38), (2, 3)):
        (sync,) = (
            line["extra"]
            for line in lines
            if line["event"] == "weight_send" and line["extra"]["weight_version"] == version
        )
        assert count == sync["buckets"]
    of_buckets = [line["extra"] for line in lines if line["event"] == "weight_bucket"]
    shared = [each for each in of_buckets if "buckets" in each]
    assert (LIMIT + 1 + 3, [38]) == (len(of_buckets), [each["buckets"] for each in shared])
    assert 10 * (LIMIT + 38 + 3) == sum(each["size_bytes"] for each in of_buckets)
    assert {True} == {each["sender"] for each in of_buckets}
