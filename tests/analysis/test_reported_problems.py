"""Problems that users of verl and its neighbors reported, as small runs: who is blamed, and who is not."""

from dataclasses import replace

import pytest
from truth.asynchronous_runs import Plan, Simulation, with_syncs
from truth.asynchronous_runs import events_of as asynchronous_events
from truth.rows import event_row
from truth.synthetic import SECOND, Request, Turn, events_of, tables_of
from truth.test_culprits import (
    each_request,
    each_turn,
    every,
    found_in,
    healthy,
    seconds_per_step,
)
from truth.test_findings import turns_with

from verl_profiler.analysis.registry import explained, explanations


def test_a_tool_that_only_one_workers_requests_call_is_no_fault_of_the_worker():
    """A third of all calls, so not a rare slow one among others."""

    def browsing(_place, request):
        if request.worker == 2:
            return turns_with(tools=(("browse", 3 * SECOND),))(request)
        return turns_with(tools=())(request) if request.worker == 0 else request

    rows, _ = found_in(every(lambda step, _: each_request(step, browsing)))

    assert not [row for row in rows if row["culprit_kind"] == "worker"]
    assert "browse" == rows[0]["culprit"]


def test_what_precedes_the_first_call_is_prompt_building_only_while_prompts_are_built():
    """Of requests that wait for a semaphore of the agent loop, in waves of 4 s."""
    wave_us = 4 * SECOND
    steps = [
        each_request(
            healthy(number),
            lambda place, request: replace(request, build_us=3_000 + place % 3 * wave_us),
        )
        for number in range(1, 6)
    ]
    events, _ = events_of(*steps)
    for event in events:
        if event["event"] == "prompt_build":
            event |= {"begin_us": event["end_us"] - 3_000, "duration_us": 3_000}
    tables = explanations(tables_of(events))

    assert not [row for row in tables["findings"] if row["finding"] == "prompt_build"]
    (replayed,) = [row for row in tables["what_if"] if row["what"] == "no_prompt_build"]
    assert replayed["expected_s"] < 0.1
    assert ("unexplained", 8.0) == (
        tables["findings"][0]["finding"],
        round(tables["findings"][0]["recoverable_s"], 1),
    )


def findings_with(events, more):
    """Return the findings of these events and `more`: name, event, begin_us, end_us and step of each."""
    rows = [event_row(*each[:4], step=each[4]) for each in more]
    return explained(tables_of(events + rows))["findings"]


def test_waking_an_engine_in_the_weight_sync_is_no_slow_transfer():
    """As a deep sleep makes it: 800 of 900 ms."""

    def slow_sync(phase):
        return replace(phase, ranks_us=(900_000,) * 4) if phase.name == "update_weights" else phase

    steps = (healthy(number) for number in range(1, 7))
    events, _ = events_of(
        *(replace(step, phases=tuple(map(slow_sync, step.phases))) for step in steps)
    )
    syncs = [row for row in events if row["event"] == "update_weights" and row["role"] == "actor"]
    rows = findings_with(
        events,
        [
            (row["name"], "memory_resume", row["begin_us"], row["begin_us"] + 800_000, row["step"])
            for row in syncs
        ],
    )

    assert ("engine_sleep", 0.8) == (rows[0]["finding"], round(rows[0]["recoverable_s"], 3))
    assert "network" not in rows[0]["advice"]


def test_the_rank_that_saves_for_longest_is_in_the_finding_of_checkpoints():
    """Its file appears long after those of the others."""
    events, _ = events_of(
        *(replace(healthy(number), pause_us=60 * SECOND) for number in range(1, 7))
    )
    lengths = {"trainer_0": 15, "actor_0": 1, "actor_1": 1, "actor_2": 15, "actor_3": 1}
    rows = findings_with(
        events,
        [
            (name, "save_checkpoint", row["end_us"], row["end_us"] + length * SECOND, row["step"])
            for row in events
            for name, length in lengths.items()
            if row["event"] == "step"
        ],
    )
    (checkpoint,) = [row for row in rows if row["finding"] == "checkpoint"]

    assert (
        "actor_2 takes 15.0 s, the median rank 1.00 s, in 5 of 5 checkpoints."
        == checkpoint["cause"]
    )


def test_a_host_that_comes_late_is_named_and_not_one_whose_passes_wait_for_it():
    """Of two hosts, whose ranks end together: the passes of those that wait are longer by as much."""
    lengths = {"old_log_prob": 2 * SECOND, "update_actor": 2 * SECOND}
    steps = (healthy(number) for number in range(1, 7))
    events, _ = events_of(
        *(
            replace(
                step,
                phases=tuple(
                    replace(phase, ranks_us=(lengths.get(phase.name, phase.ranks_us[0]),) * 4)
                    for phase in step.phases
                ),
            )
            for step in steps
        )
    )
    passes = [
        event_row(
            row["name"],
            "forward_backward",
            row["begin_us"] + 10_000 + number + SECOND * (row["name"] in ("actor_2", "actor_3")),
            row["end_us"] - 10_000,
            step=row["step"],
        )
        for number, row in enumerate(events)
        if row["role"] == "actor" and row["duration_us"] == 2 * SECOND
    ]
    hosts = {f"actor_{rank}": f"host-{rank // 2}" for rank in range(4)}
    rows = explained(tables_of(events + passes, hosts=hosts))["findings"]

    assert ("slow_ranks", "host-1") == (rows[0]["finding"], rows[0]["culprit"])
    assert 2.0 == round(rows[0]["recoverable_s"], 2)


def test_a_host_whose_ranks_are_all_late_is_named_after_few_steps_though_there_are_two():
    """In five syncs one of two hosts is last by chance every 16th time, but not all of its ranks."""
    hosts = {f"actor_{rank}": f"host-{rank // 2}" for rank in range(4)}

    def synced(phase, number):
        if phase.name != "update_weights":
            return phase
        late = (0, 0, 2 * SECOND, 2 * SECOND)
        return replace(phase, ranks_us=tuple(900_000 + us + 1_000 * (number % 3) for us in late))

    steps = (healthy(number) for number in range(1, 7))
    events, _ = events_of(
        *(
            replace(step, phases=tuple(synced(phase, number) for phase in step.phases))
            for number, step in enumerate(steps)
        )
    )
    rows = explained(tables_of(events, hosts=hosts))["findings"]

    assert ("weight_sync", "host-1", 2.0) == (
        rows[0]["finding"],
        rows[0]["culprit"],
        round(rows[0]["recoverable_s"], 1),
    )


def test_requests_that_wait_for_a_lock_of_their_worker_are_few_at_once():
    """One worker's are longer, so that the others have long ended and the average is far below the most."""
    long = turns_with(token_us=60_000)
    steps = []
    for number in range(1, 7):
        step = each_request(
            healthy(number),
            lambda _, request: long(request) if request.worker == 1 else request,
        )
        rows = [row for row in events_of(step)[0] if row["event"] == "request"]
        free_us = [10_000] * 4
        queued = []
        for request, row in zip(step.requests, rows, strict=True):
            queued.append(replace(request, begin_us=free_us[request.worker]))
            free_us[request.worker] += row["duration_us"] + 1_000
        steps.append(replace(step, requests=tuple(queued)))
    rows = explained(tables_of(events_of(*steps)[0]))["findings"]

    assert ("few_at_once", "4 requests are in flight at a time, of 40") == (
        rows[0]["finding"],
        rows[0]["culprit_text"],
    )


def test_prefill_of_what_was_cached_before_delays_all_calls_of_its_replica():
    """One request decodes for 20 s; meanwhile the second calls of eight others each stop the replica for 0.5 s."""
    long = Request(turns=(Turn(tokens=2_000, prompt=500),))
    others = [
        Request(
            turns=(
                Turn(tokens=20, prompt=2_000),
                Turn(tokens=20, prompt=2_100, cached=0, prefill_us=SECOND // 2),
            ),
            begin_us=(1 + 2 * number) * SECOND,
        )
        for number in range(8)
    ]
    rows, _ = found_in(lambda number: replace(healthy(number), requests=(long, *others)), 6)

    (cold,) = (row for row in rows if row["finding"] == "cold_prefix_cache")
    # 80 of the 2,100 tokens are new.
    assert 3.8 < cold["recoverable_s"] <= 4.0


def test_calls_that_queue_behind_the_first_prefill_of_their_replica_wait_for_it_and_for_no_limit():
    """The engines compile for 3 s when the first call of a step comes."""

    def compiled(place, request):
        first, *more = (replace(turn, prompt=100) for turn in request.turns)
        slow = {"prefill_us": 3 * SECOND} if place in (0, 4) else {"held_us": 3 * SECOND - 1_000}
        return replace(request, turns=(replace(first, **slow), *more))

    rows, _ = found_in(every(lambda step, _: each_request(step, compiled)), 6)

    assert "slow_prefill" == rows[0]["finding"]
    # Twenty first calls have 20 ms each at the speed of later ones.
    assert pytest.approx(3.0 - 20 * 0.02, abs=0.05) == rows[0]["recoverable_s"]
    assert "engine_queue" not in {row["finding"] for row in rows}


def untimed(change=lambda request, turn: turn):
    """Change each turn; the engines report no times, as by default."""
    return lambda _place, request, turn: replace(change(request, turn), timed=False)


def test_a_slow_replica_is_named_though_the_engines_report_no_times():
    def slow(request, turn):
        return replace(turn, token_us=16_000 if request.replica == 1 else 10_000)

    rows, _ = found_in(every(lambda step, _: each_turn(step, untimed(slow))))
    sound_s, slow_s = (
        seconds_per_step(every(lambda step, _, change=change: each_turn(step, untimed(change))))
        for change in (lambda _, turn: turn, slow)
    )

    assert ("slow_replica", "engine_1") == (rows[0]["finding"], rows[0]["culprit"])
    assert pytest.approx(slow_s - sound_s, rel=0.2) == rows[0]["recoverable_s"]


def test_a_step_with_a_longer_response_takes_no_longer_for_unknown_reasons():
    """Of six steps without engine times, in one of which a response has six times the tokens."""
    steps = [each_turn(healthy(number), untimed()) for number in range(1, 8)]
    first, *others = steps[4].requests
    long = replace(
        first, turns=tuple(replace(each, tokens=6 * each.tokens) for each in first.turns)
    )
    steps[4] = replace(steps[4], requests=(long, *others))
    rows = explained(tables_of(events_of(*steps)[0]))["findings"]

    assert not [row for row in rows if row["finding"] in ("uneven_times", "stalled_step")]


def test_a_queue_behind_prefill_of_what_was_cached_before_has_its_own_remedy():
    def cold(_place, request):
        turns = (
            replace(turn, prompt=2_000 + 200 * number, cached=0, prefill_us=60_000 * number)
            for number, turn in enumerate(request.turns, 1)
        )
        return replace(request, turns=tuple(turns))

    rows, _ = found_in(every(lambda step, _: replace(each_request(step, cold), slots=2)), 6)
    (queue,) = [row for row in rows if row["finding"] == "engine_queue"]

    assert "of the prefill is of tokens that each call's previous one had cached" in queue["cause"]
    assert not queue["overrides"]


def test_an_asynchronous_run_that_waits_for_tools_blames_them_and_not_the_split_of_devices():
    """The gain is about that of the same run with quick tools; devices of the trainer would only be lost."""
    plan = Plan(
        steps=9, ahead=4, train_ms=600, separate=True, trainer_devices=4, stages=with_tool(2_600)
    )
    quick = Simulation(replace(plan, stages=with_tool(90)))
    slow = Simulation(plan)

    found = explained(tables_of(with_syncs(asynchronous_events(slow))))["findings"]

    saved_s = step_s(slow) - step_s(quick)
    assert ("tool_time", "t") == (found[0]["finding"], found[0]["culprit"])
    assert 0.8 * saved_s <= found[0]["recoverable_s"] <= 1.25 * saved_s
    assert not [row for row in found if row["finding"] in ("split_off", "waits_for_rollout")]


def with_tool(tool_ms):
    """Stages of requests with two generate calls and a tool call between them."""
    return lambda number: (300 + 70 * (number % 5), tool_ms, 200)


def step_s(run):
    """Return the mean length of the steps after the first."""
    lengths = [
        end - begin for event, step, begin, end in run.timers if event == "step" and step > 1
    ]
    return sum(lengths) / len(lengths) / 1000


class Saving(Simulation):
    """Saves a checkpoint after each step, while the replicas go on."""

    def _run_step(self):
        super()._run_step()
        begin = self.now
        self._serve(True)
        self._pass(400, "overhead")
        self._note("save_checkpoint", begin)


def test_what_an_asynchronous_trainer_does_besides_training_gains_less_than_it_takes():
    """The rollout is ahead afterwards by as much, and the trainer waits less."""
    plan = Plan(steps=9, ahead=4, train_ms=600, separate=True, stages=with_tool(90))
    with_saves, without = Saving(plan), Simulation(plan)

    found = explained(tables_of(with_syncs(asynchronous_events(with_saves))))["findings"]

    saved_s = (started(with_saves) - started(without)) / (plan.steps - 2)
    assert 0.2 < saved_s < 0.3
    assert "checkpoint" == found[0]["finding"]
    assert 0.8 * saved_s <= found[0]["recoverable_s"] <= 1.25 * saved_s
    assert "takes 400 ms per step" in found[0]["message"]


def started(run):
    """Return the time from the start of the second step to that of the last."""
    starts = [begin for event, _, begin, _ in run.timers if event == "step"]
    return (starts[-1] - starts[1]) / 1000


def test_a_rollouter_that_always_has_as_many_samples_as_it_may_is_told_to_take_more():
    """Neither more devices nor a higher staleness would help; one that has fewer gets other advice."""
    run = Simulation(
        Plan(steps=6, ahead=4, train_ms=300, separate=True, rollouter=True, stages=with_tool(90))
    )
    events = [each for each in asynchronous_events(run) if each["event"] != "dispatch_pause"]
    advice = {}
    for running in (8, 5):
        depths = [
            event_row(
                "rollouter_0", "queue_depth", each["begin_us"], each["begin_us"], step=each["step"],
                queue="rollouter", running=running, capacity=8,
            )
            for each in events
            if each["event"] == "request"
        ]  # fmt: skip
        found = explained(tables_of([*with_syncs(events), *depths]))["findings"]
        (waits,) = [row for row in found if row["finding"].startswith("waits_")]
        advice[running] = waits["advice"]

    assert "no more than 8 samples at once" in advice[8]
    assert "concurrent_samples_per_replica" not in advice[5]


def test_a_worker_whose_requests_start_late_is_named_with_what_the_others_leave_of_it():
    """Its requests start 3 s late; in every third step those of another worker end last nevertheless."""

    def with_start(begin_us):
        def change(step, number):
            def of(_, request):
                if request.worker == 0:
                    return turns_with(tokens=250 if number % 3 == 0 else 130)(request)
                return replace(request, begin_us=begin_us) if request.worker == 2 else request

            return each_request(step, of)

        return every(change)

    late = with_start(3 * SECOND)
    rows, _ = found_in(late)
    saved_s = seconds_per_step(late) - seconds_per_step(with_start(0))
    (found,) = [row for row in rows if row["finding"] == "late_start"]

    assert 0.7 < saved_s < 2
    assert "worker_2" == found["culprit"]
    assert 0.8 * saved_s <= found["recoverable_s"] <= 1.25 * saved_s


def test_the_replica_that_receives_weights_last_is_named_in_an_asynchronous_run():
    """The others are done 500 ms before; without any, the sync as a whole is what stops the trainer."""
    run = Simulation(Plan(steps=9, replicas=3, sync_ms=600, separate=True, stages=with_tool(90)))
    events = with_syncs(asynchronous_events(run))
    syncs = [each for each in events if each["event"] == "update_weights"]
    found = {}
    for others_us in (100_000, 590_000):
        received = [
            event_row(
                f"rollout_{replica}", "weight_receive", each["begin_us"],
                each["end_us"] if replica == 1 else each["begin_us"] + others_us,
                step=each["step"], family="weights",
            )
            for each in syncs
            for replica in range(3)
        ]  # fmt: skip
        (first, *_) = explained(tables_of([*events, *received]))["findings"]
        found[others_us] = first["finding"], first["culprit"], round(first["recoverable_s"], 2)

    assert ("weight_sync", "rollout_1", 0.5) == found[100_000]
    assert ("sync_bound", "weight_sync") == found[590_000][:2]
