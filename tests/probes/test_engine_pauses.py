"""How long a request waits that comes to a paused engine, by the times of its call and of the pauses."""

import pytest

from verl_profiler.instrumentation.status import status
from verl_profiler.probes import engine
from verl_profiler.recording import open_calls, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now


class Engine:
    """The server of this process, whose calls begin and end at times that the test sets."""

    def __init__(self):
        self.lines = []
        # Later than what earlier tests did.
        self.zero_ns = now()

    def begin(self, at):
        arguments = {"request_id": "a", "prompt_ids": [1]}
        call = Call("engine_request", self.zero_ns + at, kwargs=arguments)
        engine._begin_generate(call)
        call.begin_ns = self.zero_ns + at
        return call

    def end(self, call, at):
        call.end_ns = self.zero_ns + at
        engine._end_generate(call, [7])

    def record(self, event, begin_ns, end_ns, *_):
        self.lines.append((event, begin_ns - self.zero_ns, end_ns - self.zero_ns))

    def pause(self):
        engine._begin_abort(Call("engine_abort", 0, kwargs={"self": self}))

    def resume(self, at):
        end_ns = self.zero_ns + at
        engine._end_resume(Call("engine_resume", end_ns - 1, end_ns=end_ns), None)


@pytest.fixture
def server(monkeypatch):
    made = Engine()
    monkeypatch.setattr(open_calls, "paused_ns", None)
    monkeypatch.setattr(engine, "is_probed", lambda *_: True)
    monkeypatch.setattr(recorder, "record", made.record)
    yield made
    engine.context.current_engine_call.set(None)


@pytest.mark.parametrize(
    ("before", "meanwhile", "end", "waited"),
    [
        # Until its pause ends, and not until a later one, which aborts it.
        (["pause"], [200, "pause"], 400, [(100, 200)]),
        # It ends in its pause, as one that its client cancels; resumes before it do not count.
        (["pause", 50, "pause"], [], 150, [(100, 150)]),
        # It came before the pause, which aborts it.
        ([], ["pause"], 150, []),
    ],
)
def test_a_request_waits_while_its_engine_is_paused(server, before, meanwhile, end, waited):
    """The request begins at 100; numbers are the times of resumes."""

    def play(moves):
        for move in moves:
            if move == "pause":
                server.pause()
            else:
                server.resume(move)

    play(before)
    call = server.begin(100)
    play(meanwhile)
    server.end(call, end)

    assert [("engine_parked", *times) for times in waited] == server.lines


def test_a_resume_that_fails_ends_no_pause(server):
    """The engine stays paused."""
    server.pause()
    call = Call("engine_resume", 10, end_ns=20)
    call.error = RuntimeError()
    engine._end_resume(call, None)

    assert open_calls.paused_ns is not None


def test_an_abort_that_no_probed_resume_follows_is_no_pause(server, monkeypatch, capfd):
    """It would last for the rest of the run; the line names what is not recorded then."""
    monkeypatch.undo()
    monkeypatch.setattr(open_calls, "paused_ns", None)
    server.pause()

    assert open_calls.paused_ns is None
    assert "how long requests wait in paused engines will be missing" in capfd.readouterr().err
    status.clear()
