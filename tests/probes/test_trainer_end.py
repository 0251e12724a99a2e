"""The end of training: verl kills its actors as soon as the trainer's `fit` has returned."""

import msgspec
import pytest
from reading_back import lines_of

from verl_profiler.instrumentation import wrapping
from verl_profiler.probes import trainer
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import now
from verl_profiler.recording.identity import Identity

(PROBE,) = (probe for probe in trainer.PROBES if probe.targets[0].endswith(".fit"))


@pytest.mark.parametrize("fails", [False, True])
def test_when_fit_returns_what_was_recorded_before_is_written(recording, fails):
    """Also of other processes, which write as often as this one."""

    class PPOTrainer:
        global_steps = 1

        def fit(self):
            recorder.record("reward", None, now(), {"status": "last"}, 1)
            if fails:
                raise ValueError("out of memory")
            return "done"

    fit = wrapping.wrap(PROBE, PPOTrainer.fit)

    try:
        assert "done" == fit(PPOTrainer())
    except ValueError:
        assert fails
    assert ["last"] == [
        line["extra"]["status"]
        for line in lines_of(recording.directory)
        if line["event"] == "reward"
    ]


@pytest.mark.parametrize("validate", [False, True])
def test_when_fit_returns_the_held_details_of_the_last_step_are_written(worker_config, validate):
    """The slowest requests of a step are known when it is over, which for the last one is the end."""
    events = msgspec.structs.replace(worker_config.events, detail_share=0.0)
    recorder.start(
        msgspec.structs.replace(worker_config, events=events), lambda: Identity("agent_loop", 0)
    )
    about = {"validate": True} if validate else {}
    # The first request has an event of a new name, and is written at once.
    for name, length_ns in (("first", 1_000), ("slow", 3_000_000), ("fast", 1_000)):
        begin = now() - length_ns
        recorder.record("request_start", None, begin, {"sample": name, **about}, 1)
        recorder.record("turn", begin, now(), {"request_id": name, **about}, 1)
        recorder.record("request", begin, now(), {"request_id": name, **about}, 1)
    wrapping.wrap(PROBE, lambda self: None)(None)

    turns = [line for line in lines_of(worker_config.directory) if line["event"] == "turn"]
    recorder.stop()
    # The longest, and the last.
    assert ["first", "slow", "fast"] == [line["extra"]["request_id"] for line in turns]


def test_the_wait_is_no_cost_of_a_step(worker_config):
    """It is behind the last one; a second of it would be most of what the profiler reports."""
    config = msgspec.structs.replace(worker_config, flush_interval_s=60)
    recording = recorder.start(config, lambda: Identity("trainer", 0))
    wrapping.wrap(PROBE, lambda self: None)(None)
    recorder.stop()

    # Half of the wait, which is far more than the hooks take on any machine.
    assert recording.wrapper_ns < 500_000_000
