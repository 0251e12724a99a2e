"""What a rehearsal does otherwise on purpose, on verl's own classes."""

import asyncio
import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rehearsal_faults as faults
import rehearsal_hangs as hangs

from verl_profiler.rehearsal import latency
from verl_profiler.rehearsal.environment import environment

of_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed"
)


@pytest.fixture(scope="session")
def _import_path():
    folders = environment("standin", {}).get("PYTHONPATH")
    if folders and folders not in sys.path:
        sys.path.insert(0, folders)


@pytest.fixture
def ask(monkeypatch):
    """Ask for something, as the driver does."""
    return lambda **settings: monkeypatch.setenv(faults.VARIABLE, json.dumps(settings))


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


def test_the_driver_takes_faults_from_its_command_line():
    """What is not named keeps its default; what is no fault ends the driver before Ray starts."""
    words = ["main_ppo", "+rehearsal=cpu", "+faults.rank_delay_s=[0,0.5]", "+faults.routing=fewest"]

    assert faults.given(words) == {"rank_delay_s": [0, 0.5], "routing": "fewest"}
    assert faults.given(["+faults.tool_latency={calculate:4}"]) == {
        "tool_latency": {"calculate": 4}
    }
    with pytest.raises(SystemExit, match=r"no fault rank_delay: there are hang, .*rank_delay_s"):
        faults.given(["+faults.rank_delay=1"])


def test_the_environment_keeps_what_it_had():
    """Other modules and folders come with the faults'."""
    environment = faults.with_faults({"PYTHONPATH": "/mine", "VERL_USE_EXTERNAL_MODULES": "mine"})

    assert environment["VERL_USE_EXTERNAL_MODULES"] == "mine,load_faults"
    folder, mine = environment["PYTHONPATH"].split(":")
    assert mine == "/mine"
    assert (Path(folder) / "load_faults.py").exists()


@pytest.mark.parametrize(
    ("factor", "calculate", "check_answer"), [(5.0, 5, 5), ({"calculate": 4.0}, 4, 1)]
)
def test_tools_are_as_slow_as_asked(ask, monkeypatch, factor, calculate, check_answer):
    """All of them, or one of them."""
    plain = latency.latency_s("a call")
    monkeypatch.setattr(latency, "latency_s", latency.latency_s)
    ask(tool_latency=factor)
    faults._slow_tools(latency)

    assert latency.latency_s("a call", tool="calculate") == calculate * plain
    assert latency.latency_s("a call", tool="check_answer") == check_answer * plain


def test_a_planted_tool_waits_until_nothing_is_planted(ask, monkeypatch, tmp_path):
    """A place that the file does not name goes on."""
    spent = []

    async def spend(key, *, tool):
        spent.append(tool)

    module = SimpleNamespace(spend=spend)
    hang = tmp_path / "hang"
    ask(hang=str(hang))
    hangs._hanging_tools(module)

    async def call():
        hang.write_text("reward")
        await module.spend("key", tool="calculate")
        hang.write_text("tool")
        waiting = asyncio.create_task(module.spend("key", tool="check_answer"))
        await asyncio.sleep(0)
        assert not waiting.done()
        hang.unlink()
        await waiting

    asyncio.run(call())

    assert spent == ["calculate", "check_answer"]


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
        faults._routing,
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
        (faults._slow_ranks, engine_workers, "TrainingWorker", "infer_batch"),
        (
            faults._slow_workers,
            "verl.experimental.agent_loop.tool_agent_loop",
            "ToolAgentLoop",
            "_handle_generating_state",
        ),
        (faults._slow_sync, engine_workers, "ActorRolloutRefWorker", "update_weights"),
        (
            faults._routing,
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
        faults._slow_ranks, "verl.workers.engine_workers", "TrainingWorker", *methods
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
    owner, _ = adjusted(faults._slow_workers, module, "ToolAgentLoop", name)
    for number in (1, 0):
        faults._worker_number.cache_clear()
        context = SimpleNamespace(get_actor_name=lambda n=number: f"agent_loop_worker_{n}_1a2b3c4d")
        monkeypatch.setattr(ray, "get_runtime_context", lambda found=context: found)
        assert asyncio.run(getattr(owner, name)("loop", "data")) == "data"
    faults._worker_number.cache_clear()

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
        faults._slow_sync,
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker",
        "update_weights",
    )

    assert asyncio.run(owner.update_weights("rank")) == "rank"
    assert order == [1.5, "synchronized"]


@of_verl
@pytest.mark.usefixtures("_import_path")
def test_the_standin_is_slow_and_long_as_asked(ask, monkeypatch):
    """The delay comes once per forward pass; five tokens become `factor` as many before the end."""
    module = importlib.import_module("faulty_standin")
    server = module.FaultyServer.__new__(module.FaultyServer)
    server._replica_rank, server.filler_ids = 1, [2, 3]
    passes = []
    monkeypatch.setattr(module.StandinServer, "_step", lambda self, begun: passes.append(begun))
    monkeypatch.setattr(time, "sleep", passes.append)
    ask(replica_delay_s=[0, 0.02], response_factor=1.5)
    server._step([])

    assert passes == [[], 0.02]
    assert server._filler(5) == [2, 3]
    ask(response_factor=2)
    assert server._filler(5) == [2, 3, 2, 3, 2]
    server._step([])
    assert passes[-1] == 0.0
