"""Let other people's tracers and ours watch the real verl at once; report what each counted, as JSON.

    python other_wrappers.py

A child of its own: importing verl takes seconds and changes the process.  Weave, and what else is not
installed, is a stand-in with the client functions that verl calls; the report says which.
"""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path

import verl_profiler
from verl_profiler.instrumentation import placing
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import select
from verl_profiler.recording import context

# Read when they are used first, which is later.
FOLDER = Path(tempfile.mkdtemp(prefix="other_wrappers_"))
os.environ["VERL_RL_INSIGHT_ENABLE"] = "1"
os.environ["MLFLOW_TRACKING_URI"] = f"file:{FOLDER}/mlruns"
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
REAL_MLFLOW = importlib.util.find_spec("mlflow") is not None


class StandInWeave:
    """The functions of weave that verl 0.9.1 calls."""

    def __init__(self):
        self.begun, self.ended = Counter(), Counter()

    def module(self):
        module, context = types.ModuleType("weave"), types.ModuleType("weave.trace.context")
        module.init = lambda _project: self
        module.attributes = lambda _attributes: contextlib.nullcontext()
        context.call_context = types.SimpleNamespace(
            call_attributes=types.SimpleNamespace(get=dict)
        )
        return {
            "weave": module,
            "weave.trace": types.ModuleType("weave.trace"),
            "weave.trace.context": context,
        }

    def create_call(self, op, inputs, attributes):
        self.begun[op] += 1
        return op

    def finish_call(self, call, output=None, exception=None):
        self.ended[call] += 1


class StandInMlflow:
    """The functions of mlflow that verl 0.9.1 calls."""

    def __init__(self):
        self.spans = Counter()

    def module(self):
        module = types.ModuleType("mlflow")
        # accelerate looks for installed packages by their specs.
        module.__spec__ = importlib.machinery.ModuleSpec("mlflow", None)
        module.config = types.SimpleNamespace(enable_async_logging=lambda: None)
        module.set_tracking_uri = module.set_experiment = lambda _text: None

        @contextlib.contextmanager
        def start_span(name):
            self.spans[name] += 1
            yield types.SimpleNamespace(
                trace_id="1", set_inputs=lambda _: None, set_outputs=lambda _: None
            )

        module.start_span = start_span
        module.set_trace_tag = lambda *_: None
        return {"mlflow": module}


class StandInInsight:
    """The functions of rl-insight that verl 0.9.1 calls; the real ones need a server."""

    __version__ = "0.3.0"

    def __init__(self):
        self.states, self.gauges = Counter(), Counter()

    def init(self, **_):
        pass

    finish = init

    @contextlib.contextmanager
    def trace_state(self, name, **_):
        self.states[name] += 1
        yield

    def metric_gauge(self, name, _value):
        self.gauges[name] += 1


class Remote:
    """An actor's method."""

    def __init__(self, function):
        self.remote = function


def answering(outcome):
    async def answer(**_):
        await asyncio.sleep(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return answer


class Balancer:
    """What a client asks for a server."""

    def __init__(self, outcome):
        server = types.SimpleNamespace(generate=Remote(answering(outcome)))
        self.require_acquire_fields = Remote(answering([]))
        self.require_release_fields = Remote(answering([]))
        self.acquire_server = Remote(answering(("server", server)))
        self.release_server = Remote(lambda **_: None)


def make_client(outcome):
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}})
    return LLMServerClient(config, Balancer(outcome))


async def calls():
    """Make three calls that return, one that fails and one that is cancelled; return what is odd."""
    from verl.workers.rollout.replica import TokenOutput

    odd = []
    context.current_request.set(context.Request(1))
    for _ in range(3):
        answer = TokenOutput(token_ids=[1, 2], extra_fields={})
        got = await make_client(answer).generate("r", prompt_ids=[1], sampling_params={})
        if got is not answer:
            odd.append("another result")
    failure = ValueError("engine")
    try:
        await make_client(failure).generate("r", prompt_ids=[1], sampling_params={})
        odd.append("no failure")
    except ValueError as error:
        if error is not failure:
            odd.append("another failure")
    task = asyncio.ensure_future(
        make_client(TokenOutput(token_ids=[1], extra_fields={})).generate(
            "r", prompt_ids=[1], sampling_params={}
        )
    )
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
        odd.append("no cancellation")
    except asyncio.CancelledError:
        pass
    return odd


def recorded(name, body):
    """Record while `body` runs; return its result and the counts of events."""
    run = verl_profiler.start(FOLDER / name)
    placing.install(select({"rollout", "trainer"}))
    try:
        result = body()
    finally:
        verl_profiler.stop()
        failures = dict(status.errors)
        placing.uninstall()
    return result, counted(run), failures


def counted(run):
    events = Counter()
    for path in run.glob("step_*/*.jsonl"):
        events.update(json.loads(line)["event"] for line in path.read_text().splitlines())
    return events


def trace_config(backend):
    from verl.utils.rollout_trace import RolloutTraceConfig

    RolloutTraceConfig.reset()
    RolloutTraceConfig.init("project", "experiment", backend)
    return RolloutTraceConfig


def theirs_of(backend, weave, mlflow_stand_in, before):
    """Return how many calls of each name the backend has seen since `before`."""
    if backend == "weave":
        seen = weave.begun
    elif mlflow_stand_in is not None:
        seen = mlflow_stand_in.spans
    else:
        import mlflow

        mlflow.flush_trace_async_logging()
        seen = Counter(
            span.name
            for trace in mlflow.search_traces(return_type="list")
            for span in trace.data.spans
        )
    return Counter(seen) - before, Counter(seen)


def rollout_trace(report, backend, weave, mlflow_stand_in):
    """verl's own decorator is below ours, for it is there when the class is made."""
    trace_config(backend)
    _, before = theirs_of(backend, weave, mlflow_stand_in, Counter())
    odd, ours, failures = recorded(f"trace-{backend}", lambda: asyncio.run(calls()))
    theirs, _ = theirs_of(backend, weave, mlflow_stand_in, before)
    report[f"rollout_trace {backend}"] = {
        "odd": odd,
        "ours": ours,
        "theirs": theirs,
        "failures": failures,
    }


def orders(report, weave):
    """The same decorator on a method that verl leaves bare: put there before ours, and after."""
    from verl.utils.rollout_trace import rollout_trace_op
    from verl.workers.rollout.llm_server import LLMServerClient

    trace_config("weave")
    bare = LLMServerClient.__dict__["_acquire_server"]
    name = f"{LLMServerClient.__name__}._acquire_server"

    def seen(label, body):
        before = weave.begun[name]
        odd, ours, failures = recorded(label.replace(" ", "-"), body)
        report[label] = {
            "odd": odd,
            "ours": ours,
            "theirs": {name: weave.begun[name] - before},
            "failures": failures,
        }

    LLMServerClient._acquire_server = theirs = rollout_trace_op(bare)
    seen("theirs first", lambda: asyncio.run(calls()))
    report["theirs first"]["restored"] = LLMServerClient.__dict__["_acquire_server"] is theirs
    LLMServerClient._acquire_server = bare

    def on_top():
        LLMServerClient._acquire_server = rollout_trace_op(
            LLMServerClient.__dict__["_acquire_server"]
        )
        return asyncio.run(calls())

    seen("ours first", on_top)

    # Theirs stays, with ours below it, taken off: it goes on, and ours is silent.
    before = weave.begun[name]
    run = verl_profiler.start(FOLDER / "taken-off")
    odd = asyncio.run(calls())
    verl_profiler.stop()
    report["ours taken off below theirs"] = {
        "odd": odd,
        "ours": counted(run),
        "theirs": {name: weave.begun[name] - before},
    }
    seen("ours placed again below theirs", lambda: asyncio.run(calls()))
    seen("and once more", lambda: asyncio.run(calls()))
    LLMServerClient._acquire_server = bare


def verls_profiler(report, insight):
    """`marked_timer`, `DistProfiler.annotate` and rl-insight around what ours watches."""
    from verl.utils.profiler import DistProfiler, ProfilerConfig, marked_timer
    from verl.utils.profiler.performance import simple_timer
    from verl.utils.tracking import RLInsightLogger, Tracking

    RLInsightLogger._rl_insight_module = insight
    RLInsightLogger._init_done = False

    class Trainer:
        global_steps = 1

    class Worker:
        def __init__(self):
            config = ProfilerConfig(tool="none", enable=True, all_ranks=True, ranks=[])
            self.profiler = DistProfiler(0, config)
            self.profiler.start()
            self.timing = {}

        @DistProfiler.annotate(role="actor_update", color="red")
        def update_actor(self, data):
            with marked_timer("update_actor", self.timing, color="red"):
                pass
            with simple_timer("adv", self.timing):
                pass
            return data

    def body():
        odd = []
        trainer = Trainer()
        context.process.hold_trainer(trainer)
        worker, data = Worker(), object()
        if [data] * 4 != [worker.update_actor(data) for _ in range(4)]:
            odd.append("another result")
        if worker.timing.keys() != {"update_actor", "adv"}:
            odd.append(f"timers {sorted(worker.timing)}")
        context.process.reset()
        tracking = Tracking.__new__(Tracking)
        tracking.logger = {"rl_insight": RLInsightLogger("project", "experiment")}
        for step in (1, 2):
            tracking.log({"critic/score": 0.5, "training/global_step": step}, step=step)
        tracking.logger = {}
        return odd

    odd, ours, failures = recorded("verls", body)
    report["verl's profiler and rl-insight"] = {
        "odd": odd,
        "ours": ours,
        "theirs": {**insight.states, **insight.gauges},
        "failures": failures,
    }


def main():
    weave = StandInWeave()
    sys.modules.update(weave.module())
    mlflow_stand_in = None
    if not REAL_MLFLOW:
        mlflow_stand_in = StandInMlflow()
        sys.modules.update(mlflow_stand_in.module())
    report = {"real_mlflow": REAL_MLFLOW}
    rollout_trace(report, "weave", weave, mlflow_stand_in)
    rollout_trace(report, "mlflow", weave, mlflow_stand_in)
    orders(report, weave)
    trace_config(None)
    verls_profiler(report, StandInInsight())
    shutil.rmtree(FOLDER, ignore_errors=True)
    print("\nREPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
