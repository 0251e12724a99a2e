"""Who waits for whom, from headers and open files that are written by hand."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from cached_runs import SMALL, copied
from stuck_runs import (
    GATHER,
    NOW,
    RUN,
    TRAINER,
    WORKER,
    ago,
    call,
    header,
    opened,
    phase,
    request,
    write,
)

from verl_profiler.cli import main
from verl_profiler.live.stuck import lines, verdict

HERE = Path(__file__).parent


def test_a_trainer_that_waits_for_samples_that_nobody_makes():
    """As verl's replay buffer does if a prompt stays marked as running; any other phase may be the trainer's own."""
    lost = "No agent-loop worker has a request: prompts that the trainer waits for may be lost."
    assert verdict(RUN, TRAINER, HERE, NOW).unknown[0].endswith(lost)
    own = {"trainer_0": opened(phases=[phase("adv", 130, 20)])}
    assert not verdict(RUN, own, HERE, NOW).unknown[0].endswith(lost)


def test_calls_of_a_tool_that_never_answers():
    """The oldest names the place; requests that wait for something else make it less certain."""
    calls = [
        call("agent_loop", 99, "verl:run:1", request_id="r1"),
        call("tool_call", 90, "tools:search:7", request_id="r1", tool="search"),
        call("tool_call", 80, "tools:search:7", request_id="r2", tool="search"),
        call("engine_call", 3, "verl:generate:2", request_id="r3", server="s:1"),
    ]
    requests = [request(number) for number in (1, 2, 3)]
    worker = opened(open_requests=3, requests=requests, calls=calls)

    found = verdict(RUN, {**TRAINER, "worker_0": worker}, HERE, NOW)

    assert ("stuck", "medium") == (found.state, found.confidence)
    assert found.culprit.startswith("tool search: 2 calls have not returned")
    assert "tools:search:7" in found.culprit
    assert "gen of step 3 has taken 100.0 s, usually 10.0 s." == found.summary
    # Each thing that waits is one level below what waits for it.
    assert list(lines(found))[2:5] == [
        "trainer_0: gen of step 3, 100.0 s, in verl.trainer:sample:409",
        "└─ worker_0: 3 requests, 99.0 s",
        "   └─ worker_0: 2 in tool_call (search 2), 90.0 s, in tools:search:7",
    ]


def test_many_younger_calls_do_not_outvote_the_one_that_hangs_since_the_start_of_the_phase():
    """Elsewhere 20 generate calls are a minute old, as they are in each step."""
    begun = [request(1)]
    tool = call("tool_call", 99, "tools:search:7", request_id="r1", tool="search")
    young = [
        call("engine_call", 61, "verl:generate:2", request_id=f"r{number}", server="s:1")
        for number in range(2, 22)
    ]
    files = {
        "worker_0": opened(open_requests=1, requests=begun, calls=[tool]),
        "worker_1": opened(requests=[request(number) for number in range(2, 22)], calls=young),
    }

    found = verdict(RUN, {**TRAINER, **files}, HERE, NOW)

    assert found.culprit.startswith("tool search: 1 call has not returned")


def test_calls_that_began_long_after_the_wait_are_no_certain_cause():
    """A trainer waits for 25 min; a tool call of 70 s is one of those that come and go meanwhile."""
    tool = call("tool_call", 70, "tools:search:7", request_id="r1", tool="search")
    begun = call("request", 80, None, request_id="r1", turn=1)
    files = {
        "trainer_0": opened(phases=[phase("gen", 1500, 0.1, longest_s=2.0)]),
        "worker_0": opened(open_requests=1, requests=[begun], calls=[tool]),
    }

    found = verdict(RUN, files, HERE, NOW)

    assert ("stuck", "low") == (found.state, found.confidence)
    assert "began long after the wait" in found.unknown[0]


@pytest.mark.parametrize("name", ["actor_1", "engine_1"])
def test_a_process_that_ended_while_the_trainer_goes_on_is_the_culprit(name):
    """Its server or rank ended in order, two minutes before, and what it served waits for it."""
    ended = {**RUN[name], "complete_until": ago(120), "updated": ago(120), "ended": ago(120)}
    files = {"trainer_0": opened(phases=[phase("update_actor" if name == "actor_1" else "gen")])}
    if name == "actor_1":
        files["actor_0"] = opened(calls=[call("update_actor", 99, GATHER)])
    else:
        files["worker_0"] = WORKER

    found = verdict({**RUN, name: ended}, files, HERE, NOW)

    assert found.culprit.startswith(f"{name}, which ended at 2026-11-23T11:58:00")


def test_a_host_is_named_if_all_its_processes_are_silent():
    """Ranks, a worker and an engine of one node; those of the other node wait for the ranks."""
    headers = {
        name: {**each, "host": f"node-{1 + name.endswith('_1')}"} for name, each in RUN.items()
    }
    for each in headers.values():
        if each["host"] == "node-2":
            each |= {"complete_until": ago(120), "updated": ago(125)}
    waits = opened(calls=[call("update_actor", 99, GATHER)])
    files = {"trainer_0": opened(phases=[phase("update_actor")]), "actor_0": waits}

    found = verdict(headers, files, HERE, NOW)

    assert found.culprit == "host node-2, of which no process has a sign of life (actor_1)"


@pytest.mark.parametrize("event", ["validation", "gen"])
def test_what_is_open_in_a_first_phase_is_stated_without_an_alarm(event):
    """Its usual length is not known, so nobody can tell whether 285 s are unusual."""
    calls = [
        {**call("tool_call", 279, "aiohttp:start:1", request_id=f"r{n}", tool="search"),
         "user": "my_tools:search:41"}
        for n in range(16)
    ]  # fmt: skip
    worker = opened(open_requests=16, requests=[request(n) for n in range(16)], calls=calls)
    trainer = opened(phases=[phase(event, 285, None, 0)])

    found = verdict(RUN, {"trainer_0": trainer, "worker_0": worker, "worker_1": worker}, HERE, NOW)

    assert ("running", None, False) == (found.state, found.culprit, found.is_alarm)
    printed = "\n".join(lines(found))
    assert "32 in tool_call (search 32), 4 min 39 s, in aiohttp:start:1" in printed
    assert "Open: tool search: 32 calls have not returned" in printed
    assert "called by my_tools:search:41" in printed
    assert f"Whether this is unusual: how long {event} usually takes is not known yet." in printed
    known = opened(phases=[phase(event, 50, 285.0, 9)])
    usual = verdict(RUN, {"trainer_0": known, "worker_0": worker}, HERE, NOW)
    assert [] == usual.chain


def test_what_is_open_before_the_first_phase_is_stated():
    """Both ranks load their model since two minutes."""
    load = opened(calls=[call("init_model", 120, "torch.serialization:load:3")])

    found = verdict(RUN, {"actor_0": load, "actor_1": load}, HERE, NOW)

    assert "running" == found.state
    (link,) = found.chain
    assert ("actor_0, actor_1", "init_model", "torch.serialization:load:3") == (
        link.process,
        link.what,
        link.at,
    )
    assert pytest.approx(120.0) == link.open_s
    assert found.unknown[0].startswith("Whether this is unusual: ")


@pytest.mark.parametrize(
    ("at", "culprit", "confidence"),
    [
        ("ray._private.worker:get:2961", "engine_1", "medium"),
        ("aiohttp.client:_request:700", "engine_1", "medium"),
        ("torch.serialization:load:3", "actor_0 in torch.serialization:load:3", "medium"),
        (GATHER, "engine_1", "medium"),
    ],
)
def test_ranks_that_wait_for_a_dead_process_are_not_the_culprit(at, culprit, confidence):
    """One rank sends weights to an engine that wrote nothing for 2 minutes, the other is in a collective."""
    headers = {
        **RUN,
        "engine_1": {**RUN["engine_1"], "complete_until": ago(120), "updated": ago(125)},
    }
    files = {
        "trainer_0": opened(phases=[phase("update_weights")]),
        "actor_0": opened(calls=[call("weight_transfer", 99, at)]),
        "actor_1": opened(calls=[call("weight_transfer", 99, GATHER)]),
    }

    found = verdict(headers, files, HERE, NOW)

    assert found.culprit.startswith(culprit)
    assert confidence == found.confidence


def test_a_blocked_event_loop_is_named_before_the_calls_that_it_keeps_waiting():
    """All its requests are its victims."""
    loop = {"since": ago(95), "open_s": 95, "at": "time:sleep:1", "user": "tools:search:9"}
    worker = opened(
        open_requests=9,
        requests=[request(1)],
        calls=[call("engine_call", 94, "verl:generate:2", request_id="r1")],
        blocked_loops=[{**loop, "stack": ["tools:search:9", "time:sleep:1"]}],
    )

    found = verdict(RUN, {**TRAINER, "worker_0": worker}, HERE, NOW)

    assert (
        "time:sleep:1, called by tools:search:9 blocks the event loop of worker_0" in found.culprit
    )
    assert "high" == found.confidence
    assert ["tools:search:9", "time:sleep:1"] == found.evidence


@pytest.mark.parametrize(
    ("engines", "expected", "confidence"),
    [
        (
            {"engine_1": opened(calls=[call("engine_request", 98, "sglang:wait:5")])},
            "engine_1",
            "high",
        ),
        ({}, "not answered by s:1", "medium"),
    ],
)
def test_generate_calls_are_followed_into_the_engine(engines, expected, confidence):
    """Where no engine has them on record, that is stated."""
    found = verdict(RUN, {**TRAINER, "worker_0": WORKER, **engines}, HERE, NOW)

    assert expected in found.culprit
    assert confidence == found.confidence
    assert bool(engines) != bool(found.unknown)


def test_rewards_are_followed_into_the_users_function():
    """It runs in a thread, which no coroutine shows."""
    calls = [
        call("postprocess", 98, "verl:post:1", sample=4, session=1),
        call("reward", 97, "verl:score:2", sample=4, session=1),
    ]
    worker = opened(
        open_requests=1,
        requests=[call("request", 99, None, request_id="r1", sample=4, session=1)],
        calls=calls,
    )
    reward = opened(threads=[{"thread": "pool_1", "at": "mine:judge:30", "stack": []}])

    found = verdict(RUN, {**TRAINER, "worker_0": worker, "reward_0": reward}, HERE, NOW)

    assert "the reward function, in mine:judge:30; 1 request waits for it" == found.culprit


@pytest.mark.parametrize(
    ("open_s", "usual", "longest", "state"),
    [
        (59, 10.0, None, "running"),
        (119, 20.0, None, "running"),
        (121, 20.0, None, "stuck"),
        (599, None, None, "running"),
        (601, None, None, "stuck"),
        (601, 0.1, 2.0, "stuck"),
        (799, 0.1, 400.0, "running"),
        (801, 0.1, 400.0, "stuck"),
        (1199, 200.0, 400.0, "running"),
        (1201, 200.0, 400.0, "stuck"),
    ],
)
def test_what_takes_long_by_nature_is_not_stuck(open_s, usual, longest, state):
    """Six times its usual length and at least a minute; ten minutes where that is not known.

    An asynchronous trainer's wait for samples: ten minutes, and twice its longest but one too.
    """
    files = {"trainer_0": opened(phases=[phase("gen", open_s, usual, longest_s=longest)])}

    assert state == verdict(RUN, files, HERE, NOW).state


@pytest.mark.parametrize("name", ["actor_1", "worker_1", "engine_1", "tq_storage_h_9", "trainer_0"])
def test_a_process_without_a_sign_of_life_is_the_culprit(name):
    """Stopped, or its host is gone: it wrote nothing for two minutes while the others did."""
    headers = {**RUN, name: {**RUN[name], "complete_until": ago(120), "updated": ago(125)}}
    event = "update_actor" if name.startswith("actor") else "gen"
    files = {"trainer_0": opened(phases=[phase(event)])}
    if name == "trainer_0":
        files[name]["at"] = ago(120)
    if name.startswith(("engine", "tq_storage")):
        files["worker_0"] = WORKER
    if name.startswith("tq_storage"):
        put = call("postprocess", 98, "transfer_queue:put:4", request_id="r1")
        files["worker_0"] = {**WORKER, "calls": [put]}

    found = verdict(headers, files, HERE, NOW)

    assert found.culprit.startswith(name)
    assert "stuck" == found.state
    assert any(name in text for text in found.silent)


@pytest.mark.parametrize(
    ("open_s", "longest", "state"),
    [(599, None, "running"), (601, 5.0, "stuck"), (700, 120.0, "running"), (721, 120.0, "stuck")],
)
def test_a_rollouter_that_stands_still_while_the_trainer_goes_on(open_s, longest, state):
    """After ten minutes, and six times the longest that it has ever been; ranks that train are not to blame."""
    begun = call("request", 900, None, request_id="r1", turn=1)
    calls = [call("tool_call", 900, "tools:search:7", request_id="r1", tool="search")]
    files = {
        "rollouter_0": opened(phases=[phase("no_progress", open_s, longest, longest_s=longest)]),
        "worker_0": opened(open_requests=1, requests=[begun], calls=calls),
        "actor_0": opened(calls=[call("update_actor", 99, "torch:train:3")]),
    }
    headers = {**RUN, "rollouter_0": header("rollouter")}

    found = verdict(headers, files, HERE, NOW)

    assert state == found.state
    if state == "stuck":
        assert found.culprit.startswith("tool search: 1 call has not returned")
        assert found.summary.startswith(
            "rollouter_0 has neither dispatched nor finished a sample for "
        ), found.summary
        assert "high" == found.confidence


def test_a_trainer_that_waits_for_a_rollouter_without_progress():
    """Where most of its tasks are is in its evidence."""
    headers = {**RUN, "rollouter_0": header("rollouter")}
    idle = phase("no_progress", 99, None, in_flight=9)
    files = {**TRAINER, "rollouter_0": opened(phases=[idle])}
    tasks = [
        {"tasks": 3, "stack": ["verl:monitor:1", "asyncio.tasks:sleep:5"]},
        {"tasks": 9, "stack": ["mine:sample:3", "asyncio.locks:Event.wait:213"]},
    ]
    evidence = {"rollouter_0": {"at": ago(50), "stacks": {"tasks": tasks}}}

    found = verdict(headers, files, HERE, NOW, evidence)

    assert (
        "rollouter_0, which has neither dispatched nor finished a sample for 99.0 s, with 9 in flight; most of "
        "its tasks are in mine:sample:3" == found.culprit
    )
    assert "high" == found.confidence


QUEUE = "verl.experimental.fully_async_policy.message_queue:MessageQueueClient.get_sample:201"
FULLY_ASYNC = {
    **RUN,
    "rollouter_0": header("rollouter"),
    "message_queue_0": header("message_queue"),
}


def waiting_trainer(open_s=100.0):
    """A trainer that waits for samples: verl's rollouter puts them into a queue."""
    waits = call("sample_wait", open_s, QUEUE)
    return {"trainer_0": opened(phases=[phase("gen", open_s, 0.1)], calls=[waits])}


IDLE = phase("no_progress", 95, 2.0, longest_s=2.0, in_flight=6)
LOOP = {
    "since": ago(90),
    "open_s": 90,
    "at": "time:sleep:1",
    "user": "mine:filter:9",
    "stack": ["mine:filter:9", "time:sleep:1"],
}
NO_SAMPLE = (1, "message_queue_0", "no sample")


@pytest.mark.parametrize(
    ("silent", "rollouter", "chain", "culprit", "confidence"),
    [
        # Also while the staleness limit is reached: what it has dispatched should get finished.
        (
            None,
            opened(phases=[IDLE]),
            [NO_SAMPLE, (2, "rollouter_0", "no sample, 6 in flight")],
            "rollouter_0, which has neither dispatched nor finished a sample for 95.0 s, with 6 in flight",
            "medium",
        ),
        (
            None,
            opened(phases=[IDLE], blocked_loops=[LOOP]),
            [NO_SAMPLE, (2, "rollouter_0", "blocked event loop")],
            "time:sleep:1, called by mine:filter:9 blocks the event loop of rollouter_0, which makes the samples",
            "high",
        ),
        # What is stopped writes nothing itself; what is in a stopped queue is not known.
        (
            "rollouter_0",
            None,
            [NO_SAMPLE, (2, "rollouter_0", "no sign of life")],
            "rollouter_0",
            "medium",
        ),
        (
            "message_queue_0",
            None,
            [(1, "message_queue_0", "no sign of life")],
            "message_queue_0",
            "medium",
        ),
    ],
)
def test_a_trainer_is_followed_through_the_queue_to_what_makes_no_samples(
    silent, rollouter, chain, culprit, confidence
):
    """A rollouter with or without a reason on record, and what is stopped between it and the trainer."""
    headers, files = dict(FULLY_ASYNC), waiting_trainer()
    if silent:
        headers[silent] = header(silent.removesuffix("_0"), heard=95)
    else:
        files["rollouter_0"] = rollouter

    found = verdict(headers, files, HERE, NOW)

    links = [(link.depth, link.process, link.what) for link in found.chain]
    assert [(0, "trainer_0", "gen"), *chain] == links
    assert (culprit, confidence) == (found.culprit, found.confidence)


@pytest.mark.parametrize(("age_s", "culprit"), [(30, "rollouter_0, "), (90, "tool search: ")])
def test_requests_that_are_far_younger_than_the_standstill_do_not_explain_it(age_s, culprit):
    """They come and go; one that is about as old does."""
    begun = call("request", age_s, None, request_id="r1", turn=1)
    tool = call("tool_call", age_s, "tools:search:7", request_id="r1", tool="search")
    files = {
        **waiting_trainer(),
        "rollouter_0": opened(phases=[IDLE]),
        "worker_0": opened(open_requests=1, requests=[begun], calls=[tool], after_s=20.0),
    }
    for each in files.values():
        each["after_s"] = 10.0

    assert verdict(FULLY_ASYNC, files, HERE, NOW).culprit.startswith(culprit)


def test_a_rollouter_that_is_found_before_its_trainer_waits():
    """The queue still has samples; without evidence, it is what is known."""
    idle = phase("no_progress", 700, 20.0, longest_s=20.0, in_flight=6)

    found = verdict(FULLY_ASYNC, {"rollouter_0": opened(phases=[idle])}, HERE, NOW)

    assert found.summary == (
        "rollouter_0 has neither dispatched nor finished a sample for 11 min 40 s, with 6 in flight."
    )
    assert found.culprit == (
        "rollouter_0, which has neither dispatched nor finished a sample for 11 min 40 s, with 6 in flight"
    )
    assert "medium" == found.confidence


def test_a_run_that_was_killed_while_it_hung_is_explained_afterwards():
    """An hour later; ages are up to its last sign of life."""
    calls = [call("tool_call", 90, "tools:search:7", request_id="r1", tool="search")]
    worker = opened(open_requests=1, requests=[request(1)], calls=calls)

    found = verdict(RUN, {**TRAINER, "worker_0": worker}, HERE, NOW + timedelta(hours=1))

    assert "stuck" == found.state
    assert "tool search" in found.culprit
    assert "has taken 99.8 s" in found.summary
    assert [] == found.silent, "all were killed at once"


def test_other_runs_are_not_stuck():
    """Killed while all was well; ended; not begun."""
    ended = {**RUN, "trainer_0": header("trainer", ended=ago(1))}

    assert "killed" == verdict(RUN, {}, HERE, NOW + timedelta(hours=1)).state
    assert "ended" == verdict(ended, {}, HERE, NOW + timedelta(hours=1)).state
    assert "running" == verdict({}, {}, HERE, NOW).state
    assert "running" == verdict(RUN, {}, HERE, NOW).state


def test_the_command_prints_it_and_exits_with_1(tmp_path, capsys):
    """And what is damaged is named."""
    write(tmp_path / "run", RUN, TRAINER)
    (tmp_path / "run" / "open" / "worker_0.json").write_text(
        '{"calls": [{"since": 3}], "at": "no"}'
    )

    status = main(["stuck", str(tmp_path / "run"), "-v"])

    printed = capsys.readouterr().out
    assert 1 == status
    assert printed.startswith("stuck: gen of step 3 has taken")
    assert "Culprit: trainer_0, in verl.trainer:sample:409" in printed
    assert (
        "Data quality: open/worker_0.json cannot be read (Expected `str | null`, got `int` - at"
        in (printed)
    )


def test_the_command_waits_for_the_end_and_prints_json(tmp_path, capsys):
    """A run that is over needs no waiting."""
    write(tmp_path / "run", {"trainer_0": header("trainer", ended=ago(1))}, {})

    assert 0 == main(["stuck", str(tmp_path / "run"), "--wait", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert ("ended", None, []) == (found["state"], found["culprit"], found["problems"])


@pytest.mark.parametrize("command", [["summary"], ["summary", "--follow"]])
def test_other_commands_point_to_it(tmp_path, capsys, command):
    """What the run is stuck on comes first."""
    run = copied(SMALL, tmp_path / "run")
    (run / "processes" / "trainer_0.json").write_text(json.dumps(RUN["trainer_0"]))
    (run / "open").mkdir()
    (run / "open" / "trainer_0.json").write_text(json.dumps(TRAINER["trainer_0"]))

    main([*command, str(run)])

    printed = capsys.readouterr().out
    begin = "stuck: gen of step 3 has taken"
    if command != ["summary"]:
        # What is open is on record, whatever the order of the phases was.
        begin = "stuck; gen of step 3 for "
        assert ", usually 10.0 s; last event " in printed.partition("\n")[0]
        assert printed.splitlines()[1].startswith("stuck: gen of step 3 has taken")
    assert printed.startswith(begin)
    assert f"See verl-profiler stuck {run}\n" in printed


def test_a_thousand_processes_fit_on_a_screen():
    """Those that have been silent for longest are named, the others counted."""
    headers = {"trainer_0": header("trainer")}
    files = dict(TRAINER)
    for number in range(1000):
        name = f"worker_{number}"
        headers[name] = header("agent_loop", number, heard=100 + number)
        rows = [
            call("request", 90, None, request_id=f"{number}-{each}", turn=1, doing="tool_call")
            for each in range(8)
        ]
        calls = [
            call("tool_call", 90, f"tools:search:{number}", request_id=f"{number}-0", tool="search")
        ]
        if number < 500:
            files[name] = opened(open_requests=8, requests=rows, calls=calls)
    found = verdict(headers, files, HERE, NOW)

    text = list(lines(found))
    assert len(text) <= 45
    silent = [line for line in text if "has written nothing since" in line]
    assert silent == [
        line for line in text if line.startswith(tuple(f"worker_{n} " for n in range(994, 1000)))
    ]
    assert silent[0].startswith("worker_999 ")
    assert "and 494 more silent processes; -v lists them" in text
    assert len(list(lines(found, verbose=True))) > 500
