"""Events written by hand, as the reader would give them."""

import json
import random

import pytest
from cached_runs import REHEARSED, SMALL
from truth.rows import event_row, role_of

from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables


def _us(moment_s):
    return round(moment_s * 1_000_000)


@pytest.fixture(scope="session")
def span():
    """A function that makes an event: `span("turn", 0, 1.5, request_id="q", turn=0)`, in seconds."""

    def make(event, begin_s, end_s, *, name="worker_0", **more):
        if name == "trainer_0":
            more.setdefault("family", "trainer")
        return event_row(name, event, _us(begin_s), _us(end_s), run="r", **more)

    return make


@pytest.fixture(scope="session")
def instant(span):
    """A function that makes an event without a length: `instant("dispatch", 3)`."""
    return lambda event, at_s, **more: {**span(event, at_s, at_s, **more), "duration_us": None}


@pytest.fixture(scope="session")
def tables():
    """A function that makes tables of events, in any order."""

    def make(events, *, shuffled=0):
        events = list(events)
        if shuffled:
            random.Random(shuffled).shuffle(events)
        names = dict.fromkeys(event["name"] for event in events)
        processes = [
            {"run": "r", "name": name, "role": role_of(name), "rank": int(name.rpartition("_")[2])}
            for name in names
        ]
        return Tables.of({"events": events, "processes": processes})

    return make


@pytest.fixture(scope="session")
def conversation(span):
    """A function that makes the events of one request with tools: two turns, 10 s by default.

    0 s prompt 1 s, turn 0: engine 1 to 4 s, two tools at the same time 4 to 6 s and 4 to 5 s, turn 1:
    engine 6 to 8 s, then post-processing 8 to 9.5 s with a reward of 8.5 to 9 s.
    """

    def make(request_id="q", begin=0.0, scale=1.0, **more):
        who = {"request_id": request_id, **more}

        def at(event, first, last, **extra):
            return span(event, begin + first * scale, begin + last * scale, **{**extra, **who})

        return [
            at("request", 0, 10, turns=2, prompt_tokens=7, response_tokens=30, reward=0.5, uid="u"),
            at("agent_loop", 0, 8),
            at("prompt_build", 0, 1),
            at("turn", 1, 6, turn=0),
            at(
                "engine_call", 1, 4, turn=0, engine_request_id=f"{request_id}-0", response_tokens=20
            ),
            at("tool_execution", 4, 6, turn=0),
            at("tool_call", 4, 6, turn=0, tool="search"),
            at("tool_call", 4, 5, turn=0, tool="calc"),
            at("turn", 6, 8, turn=1),
            at(
                "engine_call", 6, 8, turn=1, engine_request_id=f"{request_id}-1", response_tokens=10
            ),
            at("postprocess", 8, 9.5),
            at("reward", 8.5, 9),
        ]

    return make


@pytest.fixture(scope="session")
def rehearsed():
    """A run of the rehearsal with real SGLang engines: 2 steps, validation before and after."""
    with load(REHEARSED) as run:
        yield run


@pytest.fixture(scope="session")
def small():
    """The generated run that other tests use too."""
    with load(SMALL) as run:
        yield run


@pytest.fixture(scope="session")
def shuffled(rehearsed):
    """The tables of the same run, from the same events in another order."""
    events = rehearsed.rows("SELECT * FROM events")
    for event in events:
        event["extra"] = None if event["extra"] is None else json.loads(event["extra"])
    processes = rehearsed.rows("SELECT * EXCLUDE (header) FROM processes")
    for rows in (events, processes):
        random.Random(7).shuffle(rows)
    return Tables.of({"events": events, "processes": processes})
