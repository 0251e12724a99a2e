"""Traced functions: their lines, ids, stages, events and sums.

verl's bridge and TransferQueue's client are stand-ins here, with the same names and shapes;
tests/rehearsal/test_recorded.py has the real ones.
"""

import asyncio
import copy
import inspect
import logging
import re
import sys
import types

import msgspec
import pytest
from reading_back import lines_of

from verl_profiler import transfer_queue
from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.instrumentation.status import status
from verl_profiler.probes.transfer_queue import PROBES as MEASURING
from verl_profiler.recording import context, recorder
from verl_profiler.recording.identity import Identity
from verl_profiler.transfer_queue import calls, lines, probes, trace_ids
from verl_profiler.transfer_queue.switches import Switches

BRIDGE = """
import asyncio, functools, inspect
from fake_transfer_queue import KVBatchMeta, client

def tqbridge(dispatch_mode=None):
    def decorator(func):
        def metas(args):
            return [arg for arg in args if isinstance(arg, KVBatchMeta)]

        @functools.wraps(func)
        def inner(*args):
            if not metas(args):
                return func(*args)
            data = asyncio.run(client.async_get_data(metas(args)[0]))
            output = func(*[data if isinstance(arg, KVBatchMeta) else arg for arg in args])
            if isinstance(output, dict):
                return asyncio.run(client.async_put(output, metas(args)[0]))
            return output

        @functools.wraps(func)
        async def async_inner(*args):
            if not metas(args):
                return await func(*args)
            data = await client.async_get_data(metas(args)[0])
            output = await func(*[data if isinstance(arg, KVBatchMeta) else arg for arg in args])
            if isinstance(output, dict):
                return await client.async_put(output, metas(args)[0])
            return output

        return async_inner if inspect.iscoroutinefunction(func) else inner
    return decorator
"""

QUEUE = """
class KVBatchMeta:
    def __init__(self, tags, partition_id="train", extra_info=None):
        self.tags, self.partition_id, self.extra_info = tags, partition_id, extra_info or {}
        self.size = len(tags)

class AsyncTransferQueueClient:
    fails = False

    async def async_get_data(self, metadata):
        if self.fails:
            raise ConnectionError("no storage")
        return {"ids": b"x" * 2**20}

    async def async_put(self, data, metadata=None, partition_id=None):
        return metadata

client = AsyncTransferQueueClient()

async def async_kv_batch_get(keys, partition_id, select_fields=None):
    return await client.async_get_data(KVBatchMeta([{"global_steps": 7}]))

async def async_kv_batch_put(keys, partition_id, fields=None, tags=None):
    if fields is not None:
        await client.async_put(fields, KVBatchMeta([{"global_steps": 7}]))
"""

TABLE = probes.PROBES
QUEUED = "fake_transfer_queue"
CLIENT = f"{QUEUED}:AsyncTransferQueueClient"


def traced(target, like):
    """Return the probe of the table whose target ends like this, for another target."""
    [probe] = [p for p in TABLE if any(t.endswith(like) for t in p.targets)]
    return msgspec.structs.replace(probe, targets=(target,))


def around(like, function):
    """Return the function, traced as the target of the table that ends like this."""
    return wrapping.wrap(traced(f"m:{function.__name__}", like), function)


PLACES = (
    traced("fake_bridge:tqbridge", ":tqbridge"),
    traced(f"{QUEUED}:async_kv_batch_get", "interface:async_kv_batch_get"),
    traced(f"{QUEUED}:async_kv_batch_put", "interface:async_kv_batch_put"),
    traced(f"{CLIENT}.async_get_data", ".async_get_data"),
    traced(f"{CLIENT}.async_put", ".async_put"),
)


@pytest.fixture
def hosts(monkeypatch):
    """The stand-ins for the bridge and the queue, as if they had been imported."""
    found = []
    for name, source in (("fake_transfer_queue", QUEUE), ("fake_bridge", BRIDGE)):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(_initializing=False)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, module.__dict__)
        found.append(module)
    monkeypatch.setattr(probes, "PROBES", PLACES)
    yield found
    placing.uninstall()
    calls.stop()


@pytest.fixture
def trace(hosts, caplog):
    """Switch on, and return what was printed as a list of dicts, in order."""
    caplog.set_level(logging.INFO, logger="verl_profiler.transfer_queue")

    def switch_on(*, records=False, **switches):
        calls.start(Switches(**switches), "run", records=records)
        placing.install(probes.with_tracing(()))
        return lambda: lines.flush() or [parse(record.getMessage()) for record in caplog.records]

    return switch_on


def parse(text):
    """Return a line's fields, with its mark; the values as they are printed."""
    mark, rest = re.fullmatch(r"\[(TQ-\w+)\] (.*)", text).groups()
    return {"mark": mark, **dict(field.split("=", 1) for field in rest.split(" | "))}


def meta_of(queue, *steps, **more):
    return queue.KVBatchMeta([{"global_steps": step} for step in steps], **more)


def stages(lines, mark="TQ-TRACE"):
    return [line["stage"] for line in lines if line["mark"] == mark]


WHOLE = [
    "FUNCTION_START",
    *(f"{stage}_{end}" for stage in ("GET", "COMPUTE", "PUT") for end in ("START", "END")),
    "FUNCTION_END",
]


def test_a_bridged_coroutine_prints_all_its_stages(hosts, trace):
    """In their order, with one call id, the ratios of the guide, and each transfer's size and speed."""
    queue, bridge = hosts
    printed = trace(trace=True, detail=True)

    @bridge.tqbridge()
    async def compute_log_prob(data):
        return {"log_probs": data["ids"] * 3}

    assert inspect.iscoroutinefunction(compute_log_prob)
    asyncio.run(compute_log_prob(meta_of(queue, 3, 3)))

    found = printed()
    function = [line for line in found if line["mark"] == "TQ-TRACE"]
    assert WHOLE == stages(found)
    assert {"compute_log_prob"} == {line["func"] for line in found}
    assert 1 == len({line["call"] for line in function})
    assert {trace_ids.of_batch("train", 3)} == {line["trace_id"] for line in found}
    assert {"3"} == {line["step"] for line in found}
    end = function[-1]
    assert "ok" == end["status"]
    for ratio in ("get_ratio", "compute_ratio", "put_ratio"):
        assert re.fullmatch(r"\d+\.\d\d%", end[ratio])
    assert re.fullmatch(r"\d+\.\d{6}s", end["total_duration"])
    assert "2" == function[1]["batch_size"]
    get, put = (line for line in found if re.fullmatch(r"TQ_CLIENT_\w+_END", line["stage"]))
    assert ["1.00", "3.00"] == [get["data_size_mb"], put["data_size_mb"]]
    for line in (get, put):
        speed = float(line["data_size_mb"]) / float(line["duration"].rstrip("s"))
        assert float(line["throughput_mbps"]) == pytest.approx(speed, rel=0.2)
    assert {end["call"]} == {line["call"].rpartition(".")[0] for line in (get, put)}
    assert get["call"] != put["call"]


def test_lines_have_the_documented_fields_in_the_documented_order(hosts, trace, caplog):
    """Older analyzers read them; what is new comes last."""
    queue, bridge = hosts
    trace(trace=True, detail=True)
    bridge.tqbridge()(lambda data: {"out": data["ids"]})(meta_of(queue, 3))
    lines.flush()
    texts = [record.getMessage().partition("] ")[2] for record in caplog.records]
    keys = {re.search(r"stage=(\w+)", text)[1]: re.findall(r"(\w+)=", text) for text in texts}
    ratios = "get_ratio compute_ratio put_ratio"

    assert {
        "FUNCTION_START": "trace_id func pid stage timestamp call step",
        "GET_START": "trace_id func stage batch_size timestamp call step",
        "GET_END": "trace_id func stage duration timestamp call status step",
        "COMPUTE_START": "trace_id func stage timestamp call step",
        "COMPUTE_END": "trace_id func stage duration timestamp call status step",
        "PUT_START": "trace_id func stage timestamp call step",
        "PUT_END": "trace_id func stage duration timestamp call status step",
        "FUNCTION_END": f"trace_id func stage total_duration {ratios} timestamp call status step",
        "TQ_CLIENT_GET_START": "trace_id stage batch_size timestamp func pid call step",
        "TQ_CLIENT_GET_END": "trace_id stage duration data_size_mb throughput_mbps timestamp func pid call status step",
        "TQ_CLIENT_PUT_START": "trace_id stage batch_size data_size_mb timestamp func pid call step",
        "TQ_CLIENT_PUT_END": "trace_id stage duration throughput_mbps data_size_mb timestamp func pid call status step",
    } == {stage: " ".join(found) for stage, found in keys.items()}


@pytest.mark.parametrize(
    ("broken", "closed"),
    [("get", {"GET_END": "error"}), ("compute", {"GET_END": "ok", "COMPUTE_END": "error"})],
)
def test_an_end_always_comes_with_its_status(hosts, trace, monkeypatch, broken, closed):
    """The exception is the host's own, and the next call is traced as if nothing had been."""
    queue, bridge = hosts
    printed = trace(trace=True)
    mine = KeyError("mine")

    @bridge.tqbridge()
    def update_actor(data):
        raise mine

    monkeypatch.setattr(queue.client, "fails", broken == "get")
    with pytest.raises((KeyError, ConnectionError)) as caught:
        update_actor(meta_of(queue, 1))

    assert broken == "get" or caught.value is mine
    ends = {line["stage"]: line["status"] for line in printed() if "status" in line}
    assert {**closed, "FUNCTION_END": "error"} == ends
    assert calls.current.get() is None


def test_what_is_no_whole_call_of_the_queue(hosts, trace):
    """Without metadata, inside of another, without a put, or of a worker that hands samples back by Ray."""
    queue, bridge = hosts
    printed = trace(trace=True)
    train_mini_batch = bridge.tqbridge()(lambda data: {"loss": data["ids"]})
    update_actor = bridge.tqbridge()(train_mini_batch)
    train_mini_batch({"ids": b""})

    worker = type("AgentLoopWorker", (), {})()
    around("._run_agent_loop", lambda self, parameters, trajectory: None)(worker, {}, {"step": 1})
    assert [] == printed()
    assert 5 == bridge.tqbridge()(lambda _data: 5)(meta_of(queue, 1))
    assert [stage for stage in WHOLE if not stage.startswith("PUT")] == stages(printed())
    assert "0.00%" == printed()[-1]["put_ratio"]
    before = len(printed())
    meta = meta_of(queue, 1)
    copied = copy.deepcopy(vars(meta))
    assert update_actor(meta) is meta
    assert copied == vars(meta)
    assert WHOLE == stages(printed()[before:])


def test_a_direct_function_goes_through_its_stages_as_it_works(hosts, trace, worker_config):
    """Reads are GET, writes are PUT, all else is COMPUTE; tags alone are no PUT."""
    queue, _ = hosts
    recorder.start(worker_config, lambda: Identity("trainer", 0))
    printed = trace(trace=True, records=True)

    async def advantage(batch):
        data = await queue.async_kv_batch_get(keys=batch, partition_id="train")
        await queue.async_kv_batch_put(keys=batch, partition_id="train", tags=[{}])
        await queue.async_kv_batch_put(keys=batch, partition_id="train", fields=data)

    asyncio.run(around("._compute_advantage", advantage)(meta_of(queue, 7)))
    recorder.stop()

    assert [
        "FUNCTION_START",
        *(
            f"{stage}_{end}"
            for stage in ("COMPUTE", "GET", "COMPUTE", "PUT", "COMPUTE")
            for end in ("START", "END")
        ),
        "FUNCTION_END",
    ] == stages(printed())
    events = lines_of(worker_config.directory)
    function = next(event for event in events if event["event"] == "tq_function")
    for stage in ("get", "compute", "put"):
        parts = [e["duration_sec"] for e in events if e["event"] == f"tq_function_{stage}"]
        assert sum(parts) == pytest.approx(function["extra"][f"{stage}_s"], abs=1e-5)
    assert {function["extra"]["call"]} == {event["extra"]["call"] for event in events}


def test_every_call_has_an_id_of_its_own(hosts, trace):
    """Repeated calls on the same data never collapse; concurrent ones do not mix."""
    queue, bridge = hosts
    printed = trace(trace=True)

    @bridge.tqbridge()
    async def work(data, number):
        await asyncio.sleep(0.01 * (number % 3))
        return {"n": data["ids"]}

    async def many():
        await asyncio.gather(*(work(meta_of(queue, 1), number) for number in range(20)))

    asyncio.run(many())
    by_call = {}
    for line in printed():
        by_call.setdefault(line["call"], []).append(line["stage"])

    assert 20 == len(by_call)
    assert {tuple(WHOLE)} == {tuple(found) for found in by_call.values()}


@pytest.mark.parametrize("every", [1, 4])
def test_every_nth_call_is_printed_and_all_are_counted(hosts, trace, every):
    """Per function; the client's lines follow their function."""
    queue, bridge = hosts
    printed = trace(trace=True, detail=True, sample_every=every)
    one = bridge.tqbridge()(lambda data: {"a": data["ids"]})
    for _ in range(12):
        one(meta_of(queue, 1))
    found = printed()

    assert 12 // every == stages(found).count("FUNCTION_END")
    assert 12 // every == stages(found, "TQ-DETAIL").count("TQ_CLIENT_PUT_END")
    assert ({str(every)} if every > 1 else {None}) == {line.get("sampled") for line in found}


def test_ids_follow_the_samples(hosts):
    """A batch's id is the same wherever it is computed, and another by batch, partition and run."""
    queue, _ = hosts

    def ids(*steps, **more):
        return trace_ids.origin_of(meta_of(queue, *steps, **more)).ids

    trace_ids.set_run("a")
    train = trace_ids.origin_of(meta_of(queue, 3, 3, 4))
    assert (trace_ids.of_batch("train", 3), trace_ids.of_batch("train", 4)) == train.ids
    assert (4, 3) == (train.step, train.rows)
    assert ids(3) == train.ids[:1]
    # verl 0.6 and 0.7.0 open one partition a step and have no tags.
    assert ids(partition_id="train_3") == ids(partition_id="train_3") != ids(partition_id="train_4")
    others = [*ids(3, partition_id="val")]
    trace_ids.set_run("b")
    assert not {*others, *ids(3)} & {*train.ids}
    many = trace_ids.origin_of(meta_of(queue, *range(11))).text.split(",")
    assert (9, "+3") == (len(many), many[-1])
    # One of the user's own, as `extra_info` of the batch or as a tag, is made fit for a line.
    mine = meta_of(queue, 3, extra_info={"trace_id": "batch-9"})
    tags = [{"trace_id": "mine | 1", "global_steps": 2}, {"trace_id": "other"}]
    assert "batch-9" == trace_ids.origin_of(mine).text
    assert "mine_1,other" == trace_ids.origin_of(queue.KVBatchMeta(tags)).text
    assert "N/A" == trace_ids.origin_of(queue.KVBatchMeta([{}])).text


@pytest.mark.parametrize(
    ("sample", "extra_info", "named"),
    [
        ({"partition_id": "train_3"}, {"global_steps": 3}, "train_3"),
        ({"global_step": 3}, {"validate": True}, "val_3"),
    ],
)
def test_metadata_of_the_first_releases_has_ids_and_steps(sample, extra_info, named):
    """They know partitions or steps by the sample, and no tags."""
    meta = type("BatchMeta", (), {"size": 2})()
    meta.samples = [types.SimpleNamespace(**sample)] * 2
    meta.extra_info = extra_info

    assert ((trace_ids.of_batch(named, None),), 3, 2) == trace_ids.origin_of(meta)


def test_classes_of_the_command_itself_are_wrapped(monkeypatch):
    """`python -m verl.trainer.main_ppo_sync` defines its trainer in `__main__`; Ray takes it by value."""
    main = types.ModuleType("__main__")
    main.__file__ = "/somewhere/verl/trainer/main_ppo_sync.py"
    main.PPOTrainer = type("PPOTrainer", (), {"_compute_values": lambda self, batch: batch})
    original = main.PPOTrainer._compute_values
    monkeypatch.setitem(sys.modules, "__main__", main)
    transfer_queue.wrap_main()
    wrapper = main.PPOTrainer._compute_values

    assert original is wrapper.__wrapped__
    assert {} == status.missed
    assert 5 == main.PPOTrainer()._compute_values(5)
    placing.uninstall()
    assert original is main.PPOTrainer._compute_values


def test_the_request_is_in_the_events_of_a_rollout(hosts, trace, worker_config):
    """Known only while it runs; many requests of one batch can be told apart."""
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    printed = trace(trace=True, records=True)
    request = context.Request(5)
    request.request_id = "r1"

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, **kwargs):
        token = context.current_request.set(request)
        await hosts[0].async_kv_batch_put(keys=["k"], partition_id="val", fields={"a": b"1"})
        context.current_request.reset(token)
        return agent_name

    worker = type("AgentLoopWorkerTQ", (), {})()
    coroutine = around("._run_agent_loop", _run_agent_loop)(
        worker, {}, {"step": 5, "validate": True}, agent_name="tool_agent", global_steps=5
    )

    assert "tool_agent" == asyncio.run(coroutine)
    recorder.stop()
    assert {trace_ids.of_batch("val", 5)} == {line["trace_id"] for line in printed()}
    event = next(
        line for line in lines_of(worker_config.directory) if line["event"] == "tq_function"
    )
    assert ("r1", 5) == (event["extra"]["request_id"], event["step"])


def test_a_target_that_is_measured_too_has_one_wrapper(hosts, worker_config):
    """Whose events name call and function, to be joined with the functions'; switched off, none has one."""
    queue, bridge = hosts
    recorder.start(worker_config, lambda: Identity("actor", 0))
    client = queue.AsyncTransferQueueClient
    before = (client.async_get_data, client.async_put)
    decorator = bridge.tqbridge
    measuring = [
        msgspec.structs.replace(probe, targets=(f"{CLIENT}.{probe.targets[0].rpartition('.')[2]}",))
        for probe in MEASURING
        if probe.event in ("tq_get", "tq_put")
    ]
    calls.start(Switches(trace=True), "run", records=True)
    placing.install(probes.with_tracing(measuring))
    assert before == (client.async_get_data.__wrapped__, client.async_put.__wrapped__)
    assert decorator is not bridge.tqbridge
    decorated = bridge.tqbridge()(update_actor := lambda data: {"a": data["ids"]})
    decorated(meta_of(queue, 4))
    placing.uninstall()
    calls.stop()
    recorder.stop()
    assert before == (client.async_get_data, client.async_put)
    assert decorator is bridge.tqbridge
    # What was decorated meanwhile only calls.
    assert decorated(meta_of(queue, 1)).size == 1
    events = {event["event"]: event["extra"] for event in lines_of(worker_config.directory)}

    function = events["tq_function"]
    for event, number in (("tq_get", 1), ("tq_put", 2)):
        assert {
            "func": update_actor.__name__,
            "call": f"{function['call']}.{number}",
            "trace_id": function["trace_id"],
        }.items() <= events[event].items()
