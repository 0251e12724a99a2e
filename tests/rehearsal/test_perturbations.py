"""What a rehearsal does otherwise on purpose, on verl's own classes."""

import asyncio
import importlib
import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_profiler.rehearsal import perturbations
from verl_profiler.rehearsal.perturbations import DEFAULTS, VARIABLE, checked, setting

of_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed"
)
CONFIG = Path(__file__).parents[2] / "configs" / "rehearsal" / "cpu.yaml"


@pytest.fixture
def ask(monkeypatch):
    """Ask for something, as the driver does."""
    return lambda **settings: monkeypatch.setenv(VARIABLE, json.dumps(checked(settings, ranks=2)))


@pytest.fixture
def adjusted(_import_path, monkeypatch):
    """Make one adjustment to one of verl's classes, which is put back afterwards."""

    def adjust(adjustment, module_name, class_name, *methods):
        module = importlib.import_module(module_name)
        owner = getattr(module, class_name)
        for method in methods:
            monkeypatch.setattr(owner, method, getattr(owner, method))
        before = [getattr(owner, method) for method in methods]
        adjustment(module)
        return owner, [getattr(owner, method) for method in methods] != before

    return adjust


def test_the_option_has_every_setting():
    """With the defaults of the table; a setting without a line in the file could not be given."""
    omegaconf = pytest.importorskip("omegaconf")
    rehearsal = omegaconf.OmegaConf.load(CONFIG).rehearsal

    assert {name: rehearsal[name] for name in DEFAULTS} == DEFAULTS
    assert {"cache_dir", "seed"} == set(rehearsal) - set(DEFAULTS)


def test_what_is_asked_for_arrives(ask):
    """Numbers may be given as text; what is not named keeps its default."""
    assert setting("tool_latency") == 1.0
    ask(tool_latency="5", rank_delay_s=[0, "0.5"], routing="fewest")

    assert setting("tool_latency") == 5.0
    assert setting("rank_delay_s") == [0.0, 0.5]
    assert setting("routing") == "fewest"
    assert setting("poll_interval_s") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing": "random"}, "routing=random: must be one of sticky, fewest, uneven"),
        ({"rank_delay_at": "middle"}, "one of begin, end"),
        ({"rank_delay_s": [1, 2, 3]}, "3 values for 2 ranks: .* for example .0.5, 0.5."),
        ({"replica_delay_s": [1]}, "1 values for 3 replicas: .* for example .0.5, 0.5, 0.5."),
        ({"worker_delay_s": [1]}, "1 values for 4 workers"),
        ({"response_factor": 0.5}, "response_factor=0.5: must be at least 1"),
        ({"response_factor": "long"}, "response_factor=long: must be a number"),
        ({"rank_delay_s": [1, -2]}, "rank_delay_s=-2: must be a number of at least 0"),
        ({"weight_sync_s": "long"}, "weight_sync_s=long"),
        ({"tool_latency": float("nan")}, "tool_latency=nan"),
        ({"tool_latency": {"calculate": "slow"}}, "tool_latency=slow"),
        ({"tool_latency": {"calc": 2}}, "no tool calc; it has calculate, check_answer"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    """Before Ray starts, with what is possible."""
    with pytest.raises(ValueError, match=message):
        checked(settings, ranks=2, replicas=3, workers=4)


@pytest.mark.parametrize("settings", [{"replica_delay_s": [0, 1]}, {"response_factor": 2}])
def test_what_only_the_stand_in_has_is_refused_with_an_engine(settings):
    """It would have no effect."""
    assert checked(settings, ranks=2)
    with pytest.raises(ValueError, match="needs the stand-in engine: use --engine standin"):
        checked(settings, ranks=2, engine="sglang")


@of_verl
@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 0.1), (None, 2.0)])
def test_replay_buffer_polls_as_set(ask, adjusted, seconds, expected):
    """Without a setting verl's own interval stays."""
    ask(poll_interval_s=seconds)
    buffer, _ = adjusted(
        perturbations._poll_interval,
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer",
        "__init__",
    )
    made = buffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
    )

    assert expected == made.poll_interval


@of_verl
@pytest.mark.parametrize(
    ("routing", "first_calls", "later"),
    [
        # What goes to `a` and `b` when eight requests begin, and when they call again in `a`'s favour.
        ("sticky", (4, 4), True),
        ("uneven", (6, 2), True),
        ("fewest", (4, 4), False),
    ],
)
def test_replicas_are_chosen_as_set(ask, adjusted, routing, first_calls, later):
    """Sticky requests stay where they were; with `fewest` each call goes where there are fewest."""
    ask(routing=routing)
    balancer, _ = adjusted(
        perturbations._routing,
        "verl.workers.rollout.router",
        "GlobalRequestLoadBalancer",
        "acquire_server",
    )
    made = balancer({"a": "A", "b": "B"})
    began = {str(number): made.acquire_server(str(number))[0] for number in range(8)}
    chosen = list(began.values())
    for server in chosen:
        made.release_server(server)
    for _ in range(20):
        made._inflight_requests["b"] += 1
    again = {request: made.acquire_server(request)[0] for request in began}

    assert first_calls == (chosen.count("a"), chosen.count("b"))
    assert later == (again == began)
    if not later:
        assert set(again.values()) == {"a"}


@of_verl
def test_nothing_is_wrapped_where_nothing_is_asked(ask, adjusted):
    """verl's own methods stay verl's own."""
    ask()
    engine_workers = "verl.workers.engine_workers"
    for adjustment, *where in (
        (perturbations._slow_ranks, engine_workers, "TrainingWorker", "infer_batch"),
        (
            perturbations._slow_workers,
            "verl.experimental.agent_loop.tool_agent_loop",
            "ToolAgentLoop",
            "_handle_generating_state",
        ),
        (perturbations._slow_sync, engine_workers, "ActorRolloutRefWorker", "update_weights"),
        (
            perturbations._routing,
            "verl.workers.rollout.router",
            "GlobalRequestLoadBalancer",
            "acquire_server",
        ),
    ):
        assert not adjusted(adjustment, *where)[1]


@of_verl
@pytest.mark.parametrize("at", ["begin", "end"])
def test_a_rank_stands_still_at_its_end_of_the_work(ask, adjusted, monkeypatch, at):
    """The rank with the delay sleeps once per phase; verl's marks of the methods stay."""
    order = []
    monkeypatch.setattr(time, "sleep", order.append)
    monkeypatch.setenv("RANK", "1")
    ask(rank_delay_s=[0.1, 0.7], rank_delay_at=at)
    methods = ("infer_batch", "train_mini_batch")
    owner = importlib.import_module("verl.workers.engine_workers").TrainingWorker
    for method in methods:

        def work(self):
            order.append("work")
            return self

        work.dispatched_as = method
        monkeypatch.setattr(owner, method, work)
    owner, _ = adjusted(
        perturbations._slow_ranks, "verl.workers.engine_workers", "TrainingWorker", *methods
    )

    assert all(getattr(owner, method)("result") == "result" for method in methods)
    assert ([0.7, "work"] if at == "begin" else ["work", 0.7]) * 2 == order
    assert methods == tuple(getattr(owner, method).dispatched_as for method in methods)


@of_verl
def test_a_worker_blocks_its_event_loop_at_each_turn(ask, adjusted, monkeypatch):
    """By the delay of its own number, before verl's turn; other workers are not delayed."""
    ray = pytest.importorskip("ray")
    order = []
    monkeypatch.setattr(time, "sleep", order.append)

    async def turn(self, data):
        order.append("turn")
        return data

    module = "verl.experimental.agent_loop.tool_agent_loop"
    name = "_handle_generating_state"
    monkeypatch.setattr(importlib.import_module(module).ToolAgentLoop, name, turn)
    ask(worker_delay_s=[0, 0.25])
    owner, _ = adjusted(perturbations._slow_workers, module, "ToolAgentLoop", name)
    for number in (1, 0):
        perturbations._worker_number.cache_clear()
        context = SimpleNamespace(get_actor_name=lambda n=number: f"agent_loop_worker_{n}_1a2b3c4d")
        monkeypatch.setattr(ray, "get_runtime_context", lambda found=context: found)
        assert asyncio.run(getattr(owner, name)("loop", "data")) == "data"
    perturbations._worker_number.cache_clear()

    assert order == [0.25, "turn", 0.0, "turn"]


@of_verl
def test_a_weight_sync_takes_longer(ask, adjusted, monkeypatch):
    """It waits before it begins, without blocking its loop."""
    order = []

    async def sleep(seconds):
        order.append(seconds)

    async def synchronize(self):
        order.append("synchronized")
        return self

    monkeypatch.setattr(asyncio, "sleep", sleep)
    owner = importlib.import_module("verl.workers.engine_workers").ActorRolloutRefWorker
    monkeypatch.setattr(owner, "update_weights", synchronize)
    ask(weight_sync_s=1.5)
    owner, _ = adjusted(
        perturbations._slow_sync,
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker",
        "update_weights",
    )

    assert asyncio.run(owner.update_weights("rank")) == "rank"
    assert order == [1.5, "synchronized"]
