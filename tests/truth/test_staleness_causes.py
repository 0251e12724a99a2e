"""What consumed samples were in while weights went on, against runs whose states are counted by the millisecond."""

from collections import defaultdict
from pathlib import Path

import pytest
from truth.asynchronous_runs import EPOCH, MS, Plan, Simulation, events_of, with_syncs
from truth.rows import event_row
from truth.synthetic import tables_of
from truth.test_staleness import PLANS

from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import CAUSES, staleness_causes
from verl_profiler.reading.reader import load

PLANS = {
    **PLANS,
    "pauses after aborts": Plan(
        stages=lambda number: (700 + 90 * (number % 4), 60, 400), ahead=8, pause_ms=35
    ),
    "every other step": Plan(steps=6, ahead=8, sync_every=2),
}
DATA = Path(__file__).parents[1] / "data"


def causes_of(rows, part="all"):
    """The rows by step, what and cause."""
    return {(r["step"], r["what"], r["cause"]): r for r in rows if r["part"] == part}


def state_of(sample, now):
    """What a sample of the simulation is in during one millisecond."""
    if sample.end is not None and now >= sample.end:
        return "queue"
    begun = [call for call in sample.calls if call.begin <= now]
    if not begun:
        return "dispatch"
    call = begun[-1]
    if call.end is None or now < call.end:
        return "redone" if call.aborted and not call.tokens else "generating"
    return "paused" if call.aborted else "between_calls"


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_seconds_and_versions_of_each_state(plan):
    """Counted by walking through each sample's milliseconds and the weight syncs that began in them."""
    run = Simulation(plan)
    syncs = [(begin, step) for event, step, begin, _ in run.timers if event == "update_weights"]
    rows = causes_of(staleness_causes(tables_of(with_syncs(events_of(run)))))
    ages, behind, counts = defaultdict(float), defaultdict(int), defaultdict(int)
    for sample in run.consumed:
        step = sample.consumed_step
        counts[step] += 1
        for now in range(sample.begin, sample.taken):
            ages[step, state_of(sample, now)] += 1e-3
        for begin, version in syncs:
            if min(sample.tokens) < version <= sample.trainer_version:
                # Each step of the simulation is a version, so one sync may be several.
                behind[step, state_of(sample, begin - 1)] += plan.sync_every

    assert behind, "nothing went stale"
    assert {(step, cause) for step, _, cause in rows} == set(ages)
    for (step, _, cause), row in rows.items():
        assert row["samples"] == counts[step]
        assert row["age_s"] * counts[step] == pytest.approx(ages[step, cause])
        assert row["behind"] * counts[step] == pytest.approx(behind[step, cause])


# One prompt with two requests, by hand; in ms.  The first waits for a tool; the second is aborted at
# 900 after three tokens and sent again at 1000, which a paused engine parks until 1400.
def by_hand():
    def event(name, kind, begin, end=None, *, extra=None, **more):
        extra = {"uid": "p", **(extra or {})} if kind != "weight_sync" else extra
        times = EPOCH + begin * MS, EPOCH + (begin if end is None else end) * MS
        made = event_row(name, kind, *times, run="hand", family="rollout", **more, **extra)
        return made if end is not None else made | {"duration_us": None}

    def call(kind, who, turn, begin, end, **extra):
        return event(
            "worker_0", kind, begin, end, request_id=who, turn=turn, session=who[1],
            extra={"engine_request_id": f"{who}-{turn}-{extra.get('attempt', 0)}", **extra},
        )  # fmt: skip

    def sync(begin, end, version):
        return event("trainer_0", "weight_sync", begin, end, extra={"weight_version": version})

    events = [
        event("trainer_0", "dispatch", 0, extra={"prompts": 1, "weight_version": "4"}),
        event("trainer_0", "step", 0, 5000),
        sync(80, 95, 5),
        call("engine_call", "q0", 0, 100, 300, response_tokens=5),
        call("engine_call", "q0", 1, 500, 800, response_tokens=5),
        call("engine_call", "q1", 0, 150, 1600, response_tokens=7, attempts=2),
        call("engine_attempt", "q1", 0, 150, 900, attempt=0, response_tokens=3,
             finish_reason="aborted", weight_version="5"),
        sync(890, 990, 6),
        call("engine_attempt", "q1", 0, 1000, 1600, attempt=1, response_tokens=4,
             finish_reason="stop", weight_version="7"),
        event("engine_0", "engine_parked", 1000, 1400,
              extra={"engine_request_id": "q1-0-1"}),
        sync(1200, 1300, 7),
        sync(2000, 2100, 8),
    ]  # fmt: skip
    for session, end, newest in ((0, 850, 5), (1, 1650, 7)):
        who = {"request_id": f"q{session}", "session": str(session)}
        events.append(event("worker_0", "request_start", 50, **who))
        events.append(event("worker_0", "request", 50, end, **who))
        events.append(
            event(
                "trainer_0", "sample_consumed", 3000, session=str(session),
                extra={"consumed_step": 3, "trainer_version": 8, "min_weight_version": 5,
                       "max_weight_version": newest},
            )
        )  # fmt: skip
    del events[0]["extra"]["uid"]
    return events


def test_figures_by_hand():
    """Of each request, and the means of both."""
    rows = staleness_causes(tables_of(by_hand()))

    each = causes_of(rows, "request")
    figures = {key[1:]: (row["age_s"], row["behind"], row["earlier"]) for key, row in each.items()}
    assert figures == {
        # Dispatched at version 4, with the first token at 5.
        ("q0", "dispatch"): (pytest.approx(0.1), 0, 1),
        ("q0", "generating"): (pytest.approx(0.5), 0, 0),
        ("q0", "between_calls"): (pytest.approx(0.25), 0, 0),
        # Versions 6 and 7 came while the other request of the prompt went on.
        ("q0", "group"): (pytest.approx(0.8), 2, 0),
        ("q0", "queue"): (pytest.approx(1.35), 1, 0),
        ("q1", "dispatch"): (pytest.approx(0.15), 0, 1),
        # The sync of version 6 interrupted it; that of version 7 came while it was parked.
        ("q1", "generating"): (pytest.approx(0.95), 1, 0),
        ("q1", "paused"): (pytest.approx(0.5), 1, 0),
        ("q1", "between_calls"): (pytest.approx(0.05), 0, 0),
        ("q1", "queue"): (pytest.approx(1.35), 1, 0),
    }
    means = causes_of(rows)
    assert means[3, "all", "group"]["age_s"] == pytest.approx(0.4)
    assert means[3, "all", "group"]["behind"] == 1
    assert means[3, "all", "group"]["stale_samples"] == 1
    assert means[3, "all", "queue"]["stale_samples"] == 2
    assert all(row["samples"] == 2 for row in means.values())


def test_a_call_without_tokens_was_redone():
    """The attempt that an abort left nothing of."""
    events = by_hand()
    (aborted,) = (each for each in events if each["extra"].get("finish_reason") == "aborted")
    aborted["extra"]["response_tokens"] = 0
    each = causes_of(staleness_causes(tables_of(events)), "request")

    assert each[3, "q1", "redone"]["age_s"] == pytest.approx(0.75)
    assert each[3, "q1", "redone"]["behind"] == 1
    assert each[3, "q1", "generating"]["age_s"] == pytest.approx(0.2)


def test_a_version_that_no_sync_has_sent_is_the_trainers_since_its_update():
    """As with one step off policy, whose trainer consumes before it syncs."""
    events = by_hand()
    (last,) = (each for each in events if each["extra"].get("weight_version") == 8)
    last |= {"event": "update_actor", "family": "trainer", "extra": None}
    before = causes_of(staleness_causes(tables_of(events)), "request")
    last |= {"begin_us": EPOCH + 700 * MS, "end_us": EPOCH + 840 * MS}
    after = causes_of(staleness_causes(tables_of(events)), "request")

    assert before[3, "q0", "queue"]["behind"] == 1
    assert after[3, "q0", "queue"]["behind"] == 0
    assert after[3, "q0", "between_calls"]["behind"] == 1


def test_without_calls_only_the_request_is_known():
    """As where details are sampled."""
    events = [each for each in by_hand() if not each["event"].startswith("engine_")]
    each = causes_of(staleness_causes(tables_of(events)), "request")

    assert {key[2]: row["age_s"] for key, row in each.items() if key[1] == "q0"} == {
        "dispatch": pytest.approx(0.05),
        "unknown": pytest.approx(0.8),
        "group": pytest.approx(0.8),
        "queue": pytest.approx(1.35),
    }
    assert each[3, "q0", "group"]["behind"] == 2


@pytest.mark.parametrize(
    "name", ["colocate_async", "separate_async", "fully_async", "sglang_colocate_async"]
)
def test_causes_of_recorded_runs_sum_to_their_staleness(name):
    """And their seconds to the time from dispatch to consumption."""
    with load([DATA / f"{name}_run.tar.gz"]) as run:
        rows = staleness_causes(run.tables)
        whole = {row["step"]: row for row in staleness(run.tables) if row["part"] == "all"}
        ages = run.tables.rows(
            """
            SELECT consumed_step AS step, sum(at_us - r.begin_us) / 1e6 AS age_s
            FROM samples AS s JOIN requests AS r USING (run, uid, session)
            WHERE fate = 'consumed' AND NOT validate GROUP BY consumed_step
            """
        )

    assert {row["cause"] for row in rows} <= set(CAUSES) - {"unknown"}
    for row in ages:
        own = [each for each in rows if each["part"] == "all" and each["step"] == row["step"]]
        assert sum(each["behind"] for each in own) == pytest.approx(whole[row["step"]]["behind"])
        without = sum(each["age_s"] for each in own if each["cause"] != "dispatch")
        assert without < row["age_s"] / own[0]["samples"]
        assert sum(each["age_s"] for each in own) > row["age_s"] / own[0]["samples"]
    named = [row for row in rows if row["part"] == "request"]
    assert sum(row["behind"] for row in named) > 0
