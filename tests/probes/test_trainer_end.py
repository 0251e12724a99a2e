"""The end of training: verl kills its actors as soon as the trainer's `fit` has returned."""

import pytest
from reading_back import lines_of

from verl_profiler.instrumentation import wrapping
from verl_profiler.probes import trainer
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import now

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


def test_the_wait_is_no_cost_of_a_step(recording, monkeypatch):
    """It is behind the last one; a second of it would be most of what the profiler reports."""
    monkeypatch.setattr(trainer, "_LONGEST_WAIT_S", 1.0)
    monkeypatch.setattr(trainer, "_FLUSH_S", 1.0)
    wrapping.wrap(PROBE, lambda self: None)(None)

    # Half of the wait, which is far more than the hooks take on any machine.
    assert recording.wrapper_ns < 500_000_000
