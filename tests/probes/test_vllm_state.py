"""Readings of a vLLM engine: sums of its iterations, twice a second, and the last one before it idles."""

from types import SimpleNamespace

import pytest
from picked import picked

from verl_profiler.probes import engine_state
from verl_profiler.recording import context, evidence

CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
    scheduler_config=SimpleNamespace(max_num_seqs=8),
)


class FakeEngine:
    """In the place of `AsyncLLM`, with as many requests."""

    def __init__(self, requests):
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: requests)


def end_init(engine):
    engine_state._end_init(SimpleNamespace(arguments={"self": engine}), None)


class FakeStatLoggerBase:
    """In the place of vLLM's `StatLoggerBase`: what it has besides `record`."""

    def log(self):
        return "logged"


def fake_iteration(running, waiting, usage, generated, computed=0, preempted=0, hits=(0, 0)):
    """In the form of vLLM's `SchedulerStats` and `IterationStats` (vllm 0.27.1)."""
    scheduler = SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(hits=hits[0], queries=hits[1]),
        spec_decoding_stats=None,
    )
    iteration = SimpleNamespace(
        num_generation_tokens=generated,
        prompt_token_stats=SimpleNamespace(computed=computed),
        num_preempted_reqs=preempted,
    )
    return scheduler, iteration


@pytest.fixture
def recording(monkeypatch, engine_recording):
    """Readings by a clock that the test sets."""
    clock = SimpleNamespace(ns=10**9)
    monkeypatch.setattr(engine_state, "now", lambda: clock.ns)
    monkeypatch.setitem(
        engine_state.sys.modules,
        engine_state._LOGGERS,
        SimpleNamespace(StatLoggerBase=FakeStatLoggerBase),
    )

    made = engine_recording("engine_state")
    made.clock = clock
    return made


def test_iterations_are_summed_for_half_a_second(recording):
    """The first is recorded at once, and so is the one after which nothing runs."""
    recording.start()
    (made,) = engine_state._with_readings([])
    logger = made(CONFIG, 1)
    for after_ms, iteration in (
        (0, fake_iteration(2, 1, 0.5, 1, computed=40, hits=(32, 72))),
        (300, fake_iteration(3, 0, 0.75, 3, preempted=1)),
        (300, fake_iteration(3, 0, 0.8, 3)),
        (10, fake_iteration(0, 0, 0.0, 2)),
    ):
        recording.clock.ns += after_ms * 10**6
        logger.record(*iteration, mm_cache_stats=None, engine_idx=1)
    logger.record(None, None)

    lines = recording.end()

    assert [
        (2, 1, 80, 1, 40, 1, 0, 32, 72),
        (3, 0, 128, 2, 0, 6, 1, 0, 0),
        (0, 0, 0, 1, 0, 2, 0, 0, 0),
    ] == [
        picked(
            line,
            "running_requests waiting_requests kv_used_tokens iterations prefill_tokens decode_tokens "
            "retractions prefix_hit_tokens prefix_queried_tokens",
        )
        for line in lines
    ]
    assert {(1, 160, 8)} == {
        (line["dp_rank"], line["kv_capacity_tokens"], line["running_limit"]) for line in lines
    }
    assert "logged" == logger.log()
    assert isinstance(logger, FakeStatLoggerBase)


def test_each_iteration_of_a_captured_step_is_a_reading(recording, monkeypatch):
    """Of step 3 alone; what was summed before belongs to the first of them."""
    recording.start(captured_steps=(3,))
    (made,) = engine_state._with_readings([])
    logger = made(CONFIG)
    for step in (2, 2, 3, 3, 4, 4):
        monkeypatch.setattr(context.process, "step", step)
        recording.clock.ns += 10 * 10**6
        logger.record(*fake_iteration(2, 0, 0.5, 2))

    # The first is recorded at once; those of step 4 wait for the end of half a second.
    assert [1, 2, 1] == [line["iterations"] for line in recording.end()]


def test_statistics_stay_off_unless_readings_are_asked_for(recording, capfd):
    """vLLM keeps statistics as soon as there is any additional logger."""
    others = [object()]

    assert others is engine_state._with_readings(others)
    recording.start(enabled=False)
    assert others is engine_state._with_readings(others)
    end_init(FakeEngine(3))
    assert "engine-state" not in capfd.readouterr().err


def test_an_engine_without_such_loggers_is_reported_once_it_is_made(recording, capfd, monkeypatch):
    """It serves like any other."""
    recording.start()
    monkeypatch.delitem(engine_state.sys.modules, engine_state._LOGGERS)

    assert [] == engine_state._with_readings([])
    end_init(FakeEngine(3))

    assert 1 == capfd.readouterr().err.count("engine-state-missing")


def test_other_statistics_than_expected_end_the_readings(recording, capfd):
    """Not the engine, which calls on every iteration."""
    recording.start()
    (made,) = engine_state._with_readings([])
    logger = made(CONFIG)
    for _ in range(3):
        logger.record(SimpleNamespace(), None)

    assert [] == recording.end()
    assert 1 == capfd.readouterr().err.count("engine-state-failed")


@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_stuck_engine_shows(recording, enabled):
    """The requests of the server, and the last iteration with its age where readings are recorded."""
    recording.start(enabled=enabled)
    engine = FakeEngine(3)
    end_init(engine)
    for made in engine_state._with_readings([]):
        made(CONFIG).record(*fake_iteration(2, 1, 0.5, 1))
    recording.clock.ns += 7 * 10**9

    found = evidence.gather()["engine"]

    assert 3 == found["requests"]
    loads = [(each["running_requests"], each["age_s"]) for each in found.get("loads", ())]
    assert loads == ([(2, 7.0)] if enabled else [])
    del engine
    assert "engine" not in evidence.gather(), "the engine is gone"
