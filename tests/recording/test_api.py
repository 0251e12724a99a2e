"""Users' own events: `span` and `log_manager.log`."""

import asyncio
import inspect
import json
from collections import Counter

import pytest
from reading_back import lines_of, recorded_events

from verl_profiler import log_manager, span, start, stop
from verl_profiler.recording import context, recorder
from verl_profiler.recording.context import Request


def in_a_request():
    request = Request(5, validate=True)
    request.request_id, request.turn, request.sample, request.session = "r1", 2, 7, 1
    context.current_request.set(request)


def test_a_span_works_in_every_form():
    """With, async with, decorator with and without a name, sync and async, at once in many tasks."""

    @span
    def plain(x):
        return x

    @span("named", kind="k")
    async def coroutine(x):
        async with span("inner"):
            await asyncio.sleep(0)
            return x

    async def many():
        return await asyncio.gather(*(coroutine(n) for n in range(50)))

    with recorded_events() as events:
        assert 1 == plain(1)
        assert list(range(50)) == asyncio.run(many())

    assert {"plain": 1, "inner": 50, "named": 50} == Counter(event["event"] for event in events)
    assert inspect.iscoroutinefunction(coroutine)
    assert ["x"] == list(inspect.signature(coroutine).parameters)


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (ValueError("x"), {"status": "error", "error": "ValueError"}),
        # No error of the user's.
        (asyncio.CancelledError(), {"status": "cancelled"}),
        # As it ends a generator that is closed inside the span.
        (GeneratorExit(), {"status": "unfinished"}),
    ],
)
def test_the_users_exception_passes_and_is_named(error, fields):
    """The very same object."""

    async def risky():
        async with span("risky"):
            raise error

    with recorded_events() as events, pytest.raises(type(error)) as caught:
        risky().send(None)

    assert error is caught.value
    assert fields.items() <= events[0]["extra"].items()


def test_fields_of_a_span():
    """`add` counts from zero or from what was given, and never raises; any name may be a key, `self` as well."""
    with recorded_events() as events, span("scan", pages=1, mode="fast", self=1, event=2) as scan:
        for _ in range(3):
            scan.add(rows=2, pages=1)
        scan.set(self=3, fields=4)
        scan.add(mode=1, self=1, numbers=5)
        log_manager.log(None, "e", self=6)

    logged, scanned = events
    assert 6 == logged["self"]
    expected = {"rows": 6, "pages": 4, "mode": 1, "self": 4, "event": 2, "fields": 4, "numbers": 5}
    assert expected == scanned["extra"]


def test_names_of_the_profilers_own_events_are_refused(tmp_path, capfd):
    """`span("step")` would be one more training step; the user's code runs on, and others are kept."""
    directory = start(tmp_path / "logs")

    @span
    def turn():
        return 7

    for _ in range(3):
        with span("step", n=1):
            assert 7 == turn()
    with span("my_step"):
        pass
    stop()

    assert ["my_step"] == [line["event"] for line in lines_of(directory)]
    printed = capfd.readouterr().err
    assert 1 == printed.count("span('step') has the name of one of the profiler's own events")
    assert "choose another, such as my_step" in printed
    assert 1 == printed.count("such as my_turn")
    (header,) = [json.loads(path.read_text()) for path in directory.glob("processes/*.json")]
    assert 6 == header["counters"]["dropped"]


def test_attributes_never_meet_the_recorders_own_fields():
    """Whatever they are called, a call fails, a turn counts and a request ends only for verl."""
    own = {
        "status": 200,
        "error": "none",
        "turn": 9,
        "validate": "schema",
        "sampled": 4,
        "request_id": "mine",
        "sample": 1,
        "session": "login",
        "uid": "me",
    }
    of_another_kind = {"tokens": "many", "rows": True, "tool": 5, "size_bytes": 1 << 60}
    of_the_same_kind = {"prompt_tokens": 3, "func": "lookup", "count": [1], "step": 3, "event": "x"}
    stored = {f"user_{name}": value for name, value in {**own, **of_another_kind}.items()}

    with recorded_events() as events:
        with span("outside", **{**own, "request_id": 17}, **of_another_kind, **of_the_same_kind):
            pass
        with pytest.raises(ValueError), span("failed", status=200, user_status="kept"):
            raise ValueError
        in_a_request()
        with span("inside") as inside:
            inside.set(**own, **of_another_kind, **of_the_same_kind)
            inside.add(sampled=1)
        with span("same", request_id="r1", turn=2, sample=7):
            pass
        log_manager.log(None, "logged", extra=own | of_another_kind, error="x", tokens="y")
        log_manager.log(None, "logged", extra={"status": 200, "request_id": [1], "turn": "left"})
    outside, failed, inside, same, logged, strange = events

    identity = {"request_id": "r1", "turn": 2, "sample": 7, "session": 1, "validate": True}
    assert {**stored, "user_request_id": 17, **of_the_same_kind} == outside["extra"]
    assert {
        "user_status": "kept",
        "user_user_status": 200,
        "status": "error",
        "error": "ValueError",
    } == failed["extra"]
    assert {**identity, **stored, "user_sampled": 5, **of_the_same_kind} == inside["extra"]
    assert identity == same["extra"]
    # By `log_manager.log`, `extra` may name the request and the turn.
    named = {name: own[name] for name in ("request_id", "turn", "sample", "session", "uid")}
    assert {
        **identity,
        **named,
        **{key: value for key, value in stored.items() if key[5:] not in named},
    } == logged["extra"]
    assert ("x", "y") == (logged["user_error"], logged["user_tokens"])
    assert {
        **identity,
        "user_status": 200,
        "user_request_id": [1],
        "user_turn": "left",
    } == strange["extra"]


def test_a_span_that_names_a_request_keeps_its_id():
    """Which is the one that its `request` line has, whatever is set afterwards."""
    with recorded_events() as events, span("task", request_id="t1", uid="u", session=3) as task:
        task.set(request_id="t2", status="done")

    assert [
        ("request_start", "t1"),
        ("task", "t1"),
        ("request", "t1"),
    ] == [(event["event"], event["extra"]["request_id"]) for event in events]
    assert {
        "request_id": "t1",
        "session": 3,
        "uid": "u",
        "user_request_id": "t2",
        "user_status": "done",
    } == events[1]["extra"]


def test_a_generator_cannot_be_decorated():
    """Its body runs while the caller iterates; the time would be wrong."""
    with pytest.raises(TypeError, match="Put `with span"):

        @span("rows")
        def rows():
            yield 1


def test_a_path_goes_into_this_launchs_directory(tmp_path, monkeypatch):
    """Whose number the user's path does not have; so does the default of code without a name."""
    monkeypatch.chdir(tmp_path)
    start(tmp_path / "logs" / "gsm8k")
    stop()
    directory = start(tmp_path / "logs" / "gsm8k")
    log_manager.log(tmp_path / "logs" / "gsm8k" / "step_1" / "mine.jsonl", event="e", step=1)
    log_manager.log("logs/multiturn_log_dir/step_1/worker_0.jsonl", event="e", step=1)
    stop()

    assert "gsm8k-2" == directory.name
    assert ["mine.jsonl", "worker_0.jsonl"] == sorted(
        path.name for path in directory.glob("step_1/*") if "process" not in path.name
    )


def test_without_a_path_the_process_writes_to_its_own_file(tmp_path):
    """Everything from the context."""
    in_a_request()
    directory = start(tmp_path / "logs", role="reward", rank=2)
    log_manager.log(None, event="e")
    stop()

    (line,) = lines_of(directory)
    assert (directory / "step_5" / "reward_2.jsonl").exists()
    assert ("r1", 2) == (line["extra"]["request_id"], line["workid"])


def test_without_a_profiler_nothing_happens(tmp_path, monkeypatch):
    """The user's code runs the same outside a profiled run."""
    monkeypatch.chdir(tmp_path)
    with span("x"):
        log_manager.log("step_1/worker_0.jsonl", event="e", duration=1)

    assert [] == list(tmp_path.iterdir())
    assert None is recorder.active()


def test_a_second_start_is_refused(tmp_path):
    """Two recorders in one process would share names."""
    start(tmp_path / "a")
    with pytest.raises(RuntimeError, match="already recording"):
        start(tmp_path / "b")
    stop()
