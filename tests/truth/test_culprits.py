"""Planted faults: the first finding names the fault and who is behind it, in its true seconds."""

from dataclasses import replace

import pytest
from truth.synthetic import SECOND, Phase, Request, Step, Turn, run_of
from truth.test_findings import turns_with

from verl_profiler.analysis.explain.concentration import Place, concentration
from verl_profiler.analysis.explain.engine_speed import by_load, decoding
from verl_profiler.analysis.registry import explained
from verl_profiler.views.findings import finding_list

# The first one is warm-up; of two alike, eight steps name the one that always leads.
STEPS = 9


def healthy(number):
    """Forty requests in four workers, two replicas, four ranks; who is last changes with the step."""
    last = number % 40
    return Step(
        requests=tuple(
            Request(
                turns=tuple(
                    Turn(
                        tokens=60 + (place == last),
                        tools=(("search" if place % 2 else "calc", 50_000),),
                    )
                    for _ in range(2)
                ),
                worker=place % 4,
                replica=place // 4 % 2,
            )
            for place in range(40)
        ),
        phases=tuple(
            Phase(name, tuple(length + 1_000 * ((rank + number) % 4) for rank in range(4)))
            for name, length in (
                ("old_log_prob", 400_000),
                ("update_actor", 900_000),
                ("update_weights", 90_000),
            )
        ),
        pause_us=20_000,
    )


def each_request(step, change):
    return replace(
        step, requests=tuple(change(place, request) for place, request in enumerate(step.requests))
    )


def each_turn(step, change):
    return each_request(
        step,
        lambda place, request: replace(
            request, turns=tuple(change(place, request, turn) for turn in request.turns)
        ),
    )


def with_tool(name, length, chosen=lambda place: True, **more):
    def change(step, number):
        return each_turn(
            step,
            lambda place, _, turn: (
                replace(turn, tools=((name, length),), **more)
                if chosen((place + number) % 40)
                else turn
            ),
        )

    return change


def slow_rank(rank, more, names=("old_log_prob", "update_actor")):
    def change(step, _):
        return replace(
            step,
            phases=tuple(
                replace(
                    phase,
                    ranks_us=tuple(
                        length + more * (place in rank and phase.name in names)
                        for place, length in enumerate(phase.ranks_us)
                    ),
                )
                for phase in step.phases
            ),
        )

    return change


def slow_calls(is_slow):
    """Calls of some requests take three times as long per token."""
    return every(
        lambda step, _: each_turn(
            step,
            lambda _, request, turn: replace(turn, token_us=30_000 if is_slow(request) else 10_000),
        )
    )


def long_worker(step, _):
    return each_turn(
        step, lambda _, request, turn: replace(turn, tokens=150 if request.worker == 2 else 60)
    )


def blocked(step, _):
    """A call blocks the loop of worker 0 while all of its first answers come."""

    def late(place, request):
        first = replace(request.turns[0], back_us=900_000)
        return request if place % 4 else replace(request, turns=(first, *request.turns[1:]))

    return replace(each_request(step, late), stall=(0, 650_000, 1_545_000), stalled_by="tool_call")


def every(step_of):
    """Make what `planted` needs of a change to one step."""
    return lambda number: step_of(healthy(number), number)


def step_with(**more):
    return every(lambda step, _: replace(step, **more))


def requests_with(**more):
    return every(lambda step, _: each_request(step, lambda _, request: replace(request, **more)))


def saves(number):
    return replace(healthy(number), save_us=6 * SECOND if number == 3 else 0)


# What was planted → the finding, who, and what makes the same run without the fault.
PLANTED = {
    "stuck tool": (
        every(with_tool("search", 30 * SECOND, lambda place: place == 7)),
        "slow_tools",
        "search",
    ),
    "slow rank": (every(slow_rank((2,), 600_000)), "slow_ranks", "actor_2"),
    "slow replica": (slow_calls(lambda each: each.replica), "slow_replica", "engine_1"),
    "slow calls of one worker": (
        slow_calls(lambda each: each.worker == 2),
        "slow_calls",
        "worker_2",
    ),
    "slow weight sync": (
        every(slow_rank(range(4), 2_000_000, ("update_weights",))),
        "weight_sync",
        None,
    ),
    "slow weight sync of a rank": (
        every(slow_rank((1,), 2_000_000, ("update_weights",))),
        "weight_sync",
        "actor_1",
    ),
    "blocking call": (every(blocked), "event_loop", "tool_call"),
    "blocking function of the user's": (
        every(lambda step, n: replace(blocked(step, n), stalled_by="mine:blocks", stalled_of=1)),
        "event_loop",
        "mine:blocks",
    ),
    "long responses in one worker": (every(long_worker), "slow_worker", "worker_2"),
    "no thread for a reward": (
        requests_with(reward_us=2_000_000, scored_us=20_000),
        "reward",
        "waiting for a reward worker",
    ),
    "slow reward": (requests_with(reward_us=2_000_000), "reward", "the reward function"),
    "slow data loading": (step_with(pause_us=2 * SECOND), "between_steps", "between steps"),
    "checkpoint": (saves, "checkpoint", "save_checkpoint"),
    "polling": (
        step_with(poll_us=2 * SECOND),
        "polling",
        "poll interval of the replay buffer",
    ),
    "validation": (step_with(testing_us=2 * SECOND), "validation", "validation"),
}


def found_in(step_of, steps=STEPS, **more):
    tables, truths = run_of(*(step_of(number) for number in range(1, steps + 1)), **more)
    return explained(tables)["findings"], truths


def seconds_per_step(step_of, steps=STEPS):
    """Return what a run takes per step, with what lies between steps; by the specification alone."""
    made = [step_of(number) for number in range(2, steps + 1)]
    _, truths = run_of(*made)
    between = sum(step.pause_us + step.testing_us for step in made)
    return (sum(truth.duration_us for truth in truths) + between) / (steps - 1) / SECOND


def test_a_healthy_run_accuses_nobody():
    """Who is last changes, so there is no culprit; its time is accounted for as work."""
    rows, _ = found_in(healthy)

    assert [("work", None)] == [(row["finding"], row["culprit"]) for row in rows]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_the_first_finding_and_names_its_culprit(fault):
    """With the seconds that a run without it really takes less."""
    step_of, finding, culprit = PLANTED[fault]
    rows, _ = found_in(step_of)
    true_s = seconds_per_step(step_of) - seconds_per_step(healthy)

    assert (finding, culprit) == (rows[0]["finding"], rows[0]["culprit"]), [
        (row["finding"], row["culprit_text"], row["recoverable_s"]) for row in rows
    ]
    # Recoverable is an upper bound, and no more than a fifth above the truth.
    assert 0.97 * true_s < rows[0]["recoverable_s"] < 1.2 * true_s
    assert culprit is None or rows[0]["evidence"]


def test_a_tool_that_fails_is_named_with_its_failures():
    """Also where it costs no time worth a line; what a model writes wrongly is no fault of a tool."""
    fails = with_tool("calc", 50_000, lambda place: place % 3 == 0, failed="tool_error")
    rows, _ = found_in(every(fails))
    wrong, _ = found_in(
        every(with_tool("calc", 50_000, lambda place: place % 3 == 0, failed="bad_arguments"))
    )

    assert [("failing_tools", "calc"), ("work", None)] == [
        (row["finding"], row["culprit"]) for row in rows
    ]
    assert "calls (tool_error)" in rows[0]["message"]
    assert ["work"] == [row["finding"] for row in wrong]


def test_few_calls_that_fail_after_long_are_named():
    """Two of them, in as many steps that count, each 3 s after which the others have ended."""
    hangs = every(with_tool("calc", 3_000_000, lambda place: place == 9, failed="TimeoutError"))
    rows, _ = found_in(hangs, steps=3)
    true_s = seconds_per_step(hangs, 3) - seconds_per_step(healthy, 3)

    assert ("failing_tools", "calc") == (rows[0]["finding"], rows[0]["culprit"])
    assert 0.97 * true_s < rows[0]["recoverable_s"] < 1.2 * true_s


def test_a_slow_host_is_named_and_not_one_of_its_ranks():
    """Two ranks of one of three hosts take turns in being last."""
    hosts = {f"actor_{rank}": f"host-{rank // 2}" for rank in range(6)}

    def step_of(number):
        return replace(
            healthy(number),
            phases=tuple(
                Phase(
                    name,
                    tuple(
                        500_000
                        + 1_000 * ((rank + number) % 6)
                        + (400_000 + 20_000 * ((rank + number + part) % 2)) * (rank // 2 == 1)
                        for rank in range(6)
                    ),
                )
                for part, name in enumerate(("old_log_prob", "update_actor"))
            ),
        )

    rows, _ = found_in(step_of, hosts=hosts)

    assert ("slow_ranks", "host", "host-1") == (
        rows[0]["finding"],
        rows[0]["culprit_kind"],
        rows[0]["culprit"],
    )
    # Two phases, each 420 ms longer than on the other hosts, less up to 5 ms of theirs.
    assert 0.8 < rows[0]["recoverable_s"] < 0.85


@pytest.mark.parametrize(
    ("slow", "named"), [((2, 3), ("slow_host", "host-1")), ((2,), ("slow_replica", "engine_2"))]
)
def test_a_host_whose_replicas_are_all_slow_is_named_and_not_for_one_of_them(slow, named):
    """Tools on its workers take 1.3 times as long too, by the median of times that differ tenfold."""
    hosts = {f"engine_{replica}": f"host-{replica // 2}" for replica in range(4)}
    hosts |= {f"worker_{worker}": f"host-{worker // 2}" for worker in range(4)}

    def step_of(number):
        def request(place, each):
            replica = place // 2 % 4
            length = (20_000, 100_000, 130_000, 200_000)[(place // 4 + number) % 4]
            if place % 4 < 2 and length == 130_000:
                length = 70_000
            turn = replace(
                each.turns[0],
                tokens=60,
                token_us=25_000 if replica in slow else 10_000,
                tools=(("search", length),),
            )
            return replace(each, replica=replica, turns=(turn, turn))

        return each_request(healthy(number), request)

    rows, _ = found_in(step_of, hosts=hosts)

    assert named == (rows[0]["finding"], rows[0]["culprit"])


def test_of_long_requests_those_are_counted_that_the_step_waits_for():
    """In each of the four measured steps one has 20 times the tokens, and five have three times."""
    step_of = every(
        lambda step, number: each_request(
            step,
            lambda place, each: replace(
                each,
                turns=tuple(
                    replace(turn, tokens=1200 if place == number else 180 if place % 8 == 5 else 60)
                    for turn in each.turns
                ),
            ),
        )
    )
    rows, _ = found_in(step_of, steps=5)

    assert "tail" == rows[0]["finding"]
    assert "The last to finish are 4 of 160 requests with 20.0 times" in rows[0]["cause"]


def test_ranks_that_take_turns_in_being_slow_are_no_culprit():
    """Uneven batches: each step another rank is late; the advice is to balance."""
    rows, _ = found_in(every(lambda step, number: slow_rank((number % 4,), 800_000)(step, number)))

    assert "slow_ranks" == rows[0]["finding"]
    assert rows[0]["culprit"] is None
    assert "spread over 4" in rows[0]["culprit_text"]
    # Verl's V1 trainers never read trainer.balance_batch.
    assert [] == rows[0]["overrides"]


@pytest.mark.parametrize(
    ("what", "change", "finding", "who"),
    [
        ("tools", with_tool("search", 6 * SECOND), "tool_time", "search"),
        (
            "decoding",
            lambda step, _: each_turn(step, lambda _, __, turn: replace(turn, tokens=400)),
            "decode_bound",
            "decode",
        ),
        (
            "queueing without the engine's times",
            lambda step, _: each_turn(
                step, lambda _, __, turn: replace(turn, held_us=4 * SECOND, timed=False)
            ),
            "engine_bound",
            "profiler.events.engine_timing",
        ),
        (
            "training",
            lambda step, _: replace(step, phases=(Phase("update_actor", (9 * SECOND,) * 4),)),
            "trainer_bound",
            "update_actor",
        ),
    ],
)
def test_what_dominates_is_a_finding_where_nothing_is_an_outlier(what, change, finding, who):
    """Every call is as slow as the next; silence would mean that nothing is worth 3 %."""
    rows, _ = found_in(every(change))

    assert finding == rows[0]["finding"]
    assert rows[0]["dominates"]
    assert who in rows[0]["message"].lower() or who in rows[0]["culprit_text"]
    assert "not an anomaly" in finding_list(rows)


def calls_of(lengths):
    """Return a step whose tool calls take turns in these lengths (µs)."""
    return every(
        lambda step, number: each_turn(
            step,
            lambda place, _, turn: replace(
                turn, tools=(("search", lengths[(place + number) % len(lengths)]),)
            ),
        )
    )


@pytest.mark.parametrize(
    ("lengths", "measured"),
    [
        ((6 * SECOND,), "the median took 6.00 s and the longest 6.00 s."),
        (
            (*[5 * SECOND] * 19, 9 * SECOND),
            "the median took 5.00 s and the longest 9.00 s.",
        ),
    ],
)
def test_a_tool_is_described_by_its_calls(lengths, measured):
    """Nothing else is printed of them: not that they are alike, nor why they are slow."""
    rows, _ = found_in(calls_of(lengths))
    tools = [row for row in rows if row["finding"] in ("tool_time", "slow_tools")]

    assert tools
    for row in tools:
        # 40 requests of two turns in eight steps.
        assert f"Of 640 calls of search, {measured}" == row["cause"]


def of_worker(change):
    """Change the requests of worker 2 in each step."""
    return every(
        lambda step, _: each_request(
            step, lambda _, request: change(request) if request.worker == 2 else request
        )
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (turns_with(tools=(("search", 3 * SECOND),)), "because they wait for tools: "),
        (turns_with(tokens=300), "because they generate more tokens: "),
        (lambda request: replace(request, begin_us=3 * SECOND), "because they start later: "),
        (lambda request: replace(request, reward_us=3 * SECOND), None),
    ],
)
def test_a_late_worker_is_described_by_its_requests(change, reason):
    """What its last requests take longer for; more workers are no remedy for their work."""
    rows, _ = found_in(of_worker(change))
    row = next((row for row in rows if row["finding"] == "slow_worker"), None)

    if row is not None:
        assert "worker_2" == row["culprit"]
        assert (reason is None) == (row["cause"] == "")
        assert reason is None or reason in row["cause"]
    for each in rows:
        if each["finding"] not in ("uneven_workers", "event_loop", "late_start"):
            assert "num_workers" not in " ".join(each["overrides"]) + each["advice"]
            assert "ore agent-loop workers" not in each["advice"]


def test_what_dominates_comes_after_what_is_out_of_the_ordinary():
    """A slow rank in a run that training bounds is named first."""

    def change(step, number):
        long = replace(step, phases=(Phase("update_actor", (9 * SECOND,) * 4),))
        return slow_rank((1,), SECOND)(long, number)

    rows, _ = found_in(every(change))

    assert ["slow_ranks", "trainer_bound", "work"] == [row["finding"] for row in rows]
    assert "actor_1" == rows[0]["culprit"]


def test_two_steps_establish_nobody():
    """In two of two phases, as chance alone has it for one of four ranks in a quarter of such runs."""

    def step_of(number):
        step = replace(healthy(number), phases=healthy(number).phases[1:2])
        return slow_rank((2,), 600_000)(step, number)

    rows, _ = found_in(step_of, steps=2)

    assert "slow_ranks" == rows[0]["finding"]
    assert rows[0]["culprit"] is None
    assert "not significant: actor_2" in rows[0]["culprit_text"]


@pytest.mark.parametrize("members", [2, 64])
def test_a_group_of_equals_is_rarely_accused(members):
    """In a thousand runs in which chance decides, at most one in a hundred names somebody."""
    import random

    chance = random.Random(members)
    names = [f"rank_{number}" for number in range(members)]
    shares = dict.fromkeys(names, 1 / members)
    accused = 0
    for _ in range(1_000):
        steps = chance.choice((3, 5, 10, 20))
        places = [
            Place(step, {chance.choice(names): chance.expovariate(1)}) for step in range(steps)
        ]
        accused += concentration("rank", places, shares).who is not None

    assert accused <= 20


def test_a_member_that_leads_always_is_named_from_enough_places_on():
    """The probabilities are those of a coin, by hand: 2 x 0.5^8 is below 1 %, 2 x 0.5^7 is not."""
    shares = {"a": 0.5, "b": 0.5}
    named = {
        count: concentration("rank", [Place(n, {"a": 1.0}) for n in range(count)], shares)
        for count in (7, 8)
    }

    assert (None, "a") == (named[7].who, named[8].who)
    assert pytest.approx(2 * 0.5**8) == named[8].chance
    assert "last in 8 of 8 steps" == named[8].where


def test_the_bound_of_a_blocked_loop_covers_what_the_estimate_cannot_see():
    """A tool that blocks its own loop takes as long as it blocks: the path gives that time to the tool."""
    # When the tools begin: on the way, in the engine, back.
    begin = 1_000 + 10_000 + 3_000 + 500 + 1_500 + 20_000 + 500_000 + 1_000 + 700

    def step_of(number, *, blocked=True):
        """The last request waits for another's blocking call, or in every second step for its own."""
        own = number % 2 == 0
        first = 100_000 if not blocked else 600_000 if own else 700_000
        tools = [(("patient", first),), (("hasty", 1_000 if own or not blocked else 600_000),)]
        stall = (0, begin + (0 if own else 100_000), begin + (600_000 if own else 700_000))
        return Step(
            (*(Request(turns=(Turn(tools=each),)) for each in tools), *[Request(worker=1)] * 3),
            stall=stall if blocked else None,
            stalled_by="mine:blocks",
            stalled_of=0 if own else 1,
        )

    rows, _ = found_in(step_of)
    (row,) = (row for row in rows if row["finding"] == "event_loop")
    true_s = seconds_per_step(step_of) - seconds_per_step(lambda n: step_of(n, blocked=False))

    assert true_s == pytest.approx((0.5 + 0.6) / 2)
    # Only where another request's call blocked; that call takes 0.6 s of the 0.7 s also where it does not block.
    assert row["recoverable_s"] == pytest.approx((0.7 - 0.6) / 2)
    assert row["bound_s"] == pytest.approx(0.6)
    assert all(other["bound_s"] is None for other in rows if other is not row)
    assert row["recoverable_s"] < true_s <= row["bound_s"]


def test_of_many_sums_those_of_workers_are_added_up():
    """Four workers of two replicas; loads, times and slopes of the replicas stay."""
    (whole,), (added,) = (decoding(run_of(healthy(1))[0], None, most).values() for most in (8, 7))

    assert (8, {""}) == (len(whole), {each["worker"] for each in added})
    assert by_load(whole) == by_load(added)
