"""How long a request waits that comes to a paused engine, by the times of its call and of the pauses."""

import asyncio
import sys
import types

import pytest

from verl_profiler.instrumentation import placing
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import engine
from verl_profiler.recording import open_calls, recorder
from verl_profiler.recording.call import Call
from verl_profiler.testing import recorded_events

# verl's servers.
SERVERS = [server for server in engine._SERVERS if server.startswith("verl.")]
# vLLM's has it since verl 0.9.1, the others never.
GATE = "open_submission_gate"


class Engine:
    """The server of this process, whose calls begin and end at times that the test sets."""

    def __init__(self):
        self.lines = []

    def begin(self, at):
        arguments = {"request_id": "a", "prompt_ids": [1]}
        call = Call("engine_request", at, kwargs=arguments)
        engine._begin_generate(call)
        call.begin_ns = at
        return call

    def end(self, call, at):
        call.end_ns = at
        engine._end_generate(call, [7])

    def pause(self):
        engine._begin_abort(Call("engine_abort", 0, kwargs={"self": self}))

    def resume(self, at):
        engine._end_resume(Call("engine_resume", at - 1, end_ns=at), None)


@pytest.fixture
def server(monkeypatch):
    made = Engine()
    monkeypatch.setattr(engine, "_server", engine._Server())
    monkeypatch.setattr(open_calls, "paused_ns", None)
    monkeypatch.setattr(engine, "_pauses", lambda _server: True)
    monkeypatch.setattr(recorder, "record", lambda *line: made.lines.append(line[:3]))
    yield made
    engine.context.current_engine_call.set(None)


def test_a_request_waits_until_its_pause_ends(server):
    """And not until a later one, which aborts it."""
    server.pause()
    call = server.begin(100)
    server.resume(200)
    server.pause()
    server.end(call, 400)

    assert [("engine_parked", 100, 200)] == server.lines


def test_a_request_that_ends_in_its_pause_has_only_waited(server):
    """As one that its client cancels; resumes before it do not count."""
    server.pause()
    server.resume(50)
    server.pause()
    call = server.begin(100)
    server.end(call, 150)

    assert [("engine_parked", 100, 150)] == server.lines


def test_a_request_that_came_before_the_pause_has_not_waited(server):
    """The pause aborts it."""
    call = server.begin(100)
    server.pause()
    server.end(call, 150)

    assert [] == server.lines


def stub_server(monkeypatch, target, without=()):
    """Return a stub in the place of one of verl's servers, which pauses as verl's do.

    Args:
        monkeypatch: Takes the stub of its module away.
        target: Module and class.
        without: Methods that this version does not have.
    """
    module_name, _, name = target.partition(":")

    class Stub:
        def __init__(self):
            self.resumed = asyncio.Event()
            self.resumed.set()

        async def generate(self, prompt_ids, sampling_params, request_id):
            await self.resumed.wait()
            return [1]

        async def set_global_steps(self, global_steps):
            pass

        async def abort_all_requests(self):
            self.resumed.clear()

        async def open_submission_gate(self):
            self.resumed.set()

        async def resume_generation(self):
            self.resumed.set()

    for method in without:
        delattr(Stub, method)
    Stub.__name__ = name
    module = types.ModuleType(module_name)
    setattr(module, name, Stub)
    monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.setattr(engine, "_server", engine._Server())
    return Stub


async def pause(server, resume):
    """Pause a server; one request comes meanwhile, and one after the pause.  Return what is paused then."""
    await server.abort_all_requests()
    paused = [open_calls.paused_ns is not None]
    early = asyncio.create_task(server.generate([5], {}, "early"))
    await asyncio.sleep(0)
    await resume()
    await early
    paused.append(open_calls.paused_ns is not None)
    await server.generate([5], {}, "late")
    return paused


@pytest.fixture
def recorded(monkeypatch):
    """Give a function that plays a pause on a stub of a server, and returns what came of it."""

    def play(target, without=(), change=lambda _server: None):
        made = stub_server(monkeypatch, target, without)
        with recorded_events() as events:
            placing.install(engine.PROBES)
            try:
                server = made()
                change(server)
                # verl's replicas call the first, where a server has it.
                resume = getattr(server, "open_submission_gate", None) or getattr(
                    server, "resume_generation", server.resumed.set
                )

                async def resume_or_set():
                    found = resume()
                    if found is not None:
                        await found

                paused = asyncio.run(pause(server, resume_or_set))
                missed = dict(status.missed)
            finally:
                placing.uninstall()
        assert 1 == sum(line["event"] == "engine_abort" for line in events)
        parked = [
            line["extra"]["engine_request_id"]
            for line in events
            if line["event"] == "engine_parked"
        ]
        return paused, parked, missed

    yield play
    open_calls.paused_ns = None


@pytest.mark.parametrize(
    ("target", "without"),
    [*((server, (GATE,)) for server in SERVERS), *((s, ()) for s in SERVERS if "vllm" in s)],
)
def test_a_pause_ends_on_every_version(recorded, target, without):
    """With the methods that the servers of each version have."""
    assert ([True, False], ["early"], {}) == recorded(target, without)


@pytest.mark.parametrize("target", SERVERS)
def test_a_pause_whose_end_has_no_probe_is_unknown(recorded, target, capfd):
    """And not one that lasts for the rest of the run."""
    paused, parked, missed = recorded(target, (GATE, "resume_generation"))

    assert ([False, False], []) == (paused, parked)
    assert missed["engine_resume"].endswith(
        "; how long requests wait in paused engines is not recorded"
    )
    said = [line for line in capfd.readouterr().err.splitlines() if "engine_resume" in line]
    assert ["how long requests wait in paused engines will be missing. (target-changed)"] == [
        line.partition("not affected; ")[2] for line in said
    ]


def test_an_abort_that_pauses_nothing_is_no_pause(recorded):
    """As of vLLM before 0.12, whose engine runs what comes next."""
    target = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
    assert target in SERVERS

    def old_engine(server):
        server.engine = types.SimpleNamespace()

    assert ([False, False], [], {}) == recorded(target, change=old_engine)


def test_a_resume_that_fails_ends_no_pause(server):
    """The engine stays paused."""
    server.pause()
    call = Call("engine_resume", 10, end_ns=20)
    call.error = RuntimeError()
    engine._end_resume(call, None)

    assert open_calls.paused_ns is not None
