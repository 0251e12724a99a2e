"""Where a request's time in the engines went, against calls of which that is known."""

import itertools
import json
import random
import shutil
from dataclasses import replace

import pytest
from cached_runs import cached
from chart_reading import words
from truth.synthetic import Request, Step, Turn, events_of, run_of, tables_of

from verl_profiler.analysis.engine import CALL_PARTS, engine_lanes, request_engine_time
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.explain.stragglers import straggler_requests
from verl_profiler.reading.reader import load
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice

_MS = 1_000


def batch_by_counting(intervals, begin, end):
    """Return the mean number of intervals that are open, looked at in each millisecond."""
    counts = [sum(first <= at < last for first, last in intervals) for at in range(begin, end, _MS)]
    return sum(counts) / len(counts)


def drawn_requests(source):
    return tuple(
        Request(
            begin_us=10_000 + source.randrange(300) * _MS,
            turns=tuple(
                Turn(
                    tokens=source.randrange(2, 60),
                    token_us=source.randrange(5, 15) * _MS,
                    prefill_us=source.randrange(10, 50) * _MS,
                    acquire_us=_MS,
                    way_us=2 * _MS,
                    held_us=source.randrange(40) * _MS,
                    own_us=_MS,
                    parked_us=source.choice((0, 0, 70)) * _MS,
                    replica=source.randrange(2),
                    tools=(("search", source.randrange(50) * _MS),),
                )
                for _ in range(source.randrange(1, 4))
            ),
            replica=place % 2,
        )
        for place in range(12)
    )


def intervals_of(step):
    """Lay the calls of a step out, each without waiting for others: replica → (running, decoding)."""
    running = {0: [], 1: []}
    decoding = []
    for place, request in enumerate(step.requests):
        at = step.gap_us + request.begin_us + request.build_us
        for turn in request.turns:
            begin = at + turn.acquire_us + turn.way_us + turn.parked_us + turn.held_us
            first = begin + turn.prefill_us
            end = first + turn.decode_us
            running[turn.replica].append((begin, end))
            decoding.append((place, turn.replica, first, end))
            at = end + turn.back_us + turn.own_us + turn.tools[0][1]
    return running, decoding


@pytest.mark.parametrize("seed", range(2))
def test_each_part_and_the_batch(seed):
    """Each part is that of the calls; the batch is counted millisecond by millisecond."""
    step = Step(drawn_requests(random.Random(seed)))
    rows = {row["request_id"]: row for row in request_engine_time(run_of(step)[0], count=100)}
    running, decoding = intervals_of(step)

    assert len(step.requests) == len(rows)
    for place, request in enumerate(step.requests):
        row, turns = rows[f"q{place:04d}"], request.turns
        for part, expected in {
            "outside": sum(t.acquire_us + t.way_us + t.back_us for t in turns),
            "queue": sum(t.held_us for t in turns),
            "parked": sum(t.parked_us for t in turns),
            "prefill": sum(t.prefill_us for t in turns),
            "decode": sum(t.decode_us for t in turns),
            "cold": 0,
            "recomputed": 0,
        }.items():
            assert expected / 1e6 == pytest.approx(row[f"{part}_s"], abs=1e-6), part
        own = [(which, first, end) for at, which, first, end in decoding if at == place]
        weighted = sum(
            batch_by_counting(running[which], first, end) * (end - first)
            for which, first, end in own
        )
        expected = weighted / sum(end - first for _, first, end in own)
        assert expected == pytest.approx(row["batch"])
        moved = sum(a.replica != b.replica for a, b in itertools.pairwise(turns))
        assert (len(turns), moved) == (row["calls"], row["moved"])


KEPT = Turn(prompt=1_000, cached=900, replica=0)


@pytest.mark.parametrize(
    ("second", "cold_s", "lost", "moved"),
    [
        # The replica has the context: 1,050 tokens, in pages.
        (replace(KEPT, prompt=1_200, cached=1_040, prefill_us=160_000), 0, 0, 0),
        # Another replica, without anything of it.
        (replace(KEPT, prompt=1_200, cached=0, replica=1, prefill_us=1_200_000), 1.05, 1_050, 1),
        # Another replica that has it, from a request of the same prompt.
        (replace(KEPT, prompt=1_200, cached=900, replica=1, prefill_us=300_000), 0, 0, 1),
        # The same one, which has evicted most.
        (replace(KEPT, prompt=1_200, cached=200, prefill_us=1_000_000), 0.85, 850, 0),
    ],
)
def test_a_lost_prefix(second, cold_s, lost, moved):
    """Prefill of what the previous call had left in a cache is apart from that of new tokens."""
    tables, _ = run_of(Step((Request(turns=(KEPT, second)),)))
    (row,) = request_engine_time(tables)

    assert cold_s == pytest.approx(row["cold_s"])
    assert (lost, moved) == (row["cold_tokens"], row["moved"])
    whole = (KEPT.prefill_us + second.prefill_us) / 1e6
    assert whole == pytest.approx(row["prefill_s"] + row["cold_s"])


def test_a_prefix_that_the_engine_does_not_report_is_not_lost():
    """Nor kept: without the cached tokens all prefill is in one part."""
    second = replace(KEPT, prompt=1_200, cached=None, prefill_us=1_200_000)
    (row,) = request_engine_time(run_of(Step((Request(turns=(KEPT, second)),)))[0])

    assert (None, None) == (row["cold_s"], row["cold_tokens"])
    assert (KEPT.prefill_us + second.prefill_us) / 1e6 == pytest.approx(row["prefill_s"])


def test_a_retraction_is_what_others_did_not_lose():
    """Calls of one replica take 10 and 14 ms per token beside a retracted one, each half as long."""
    others = [
        Request(turns=(Turn(tokens=101, token_us=10_000, prefill_us=100_000, way_us=0),)),
        Request(turns=(Turn(tokens=101, token_us=14_000, prefill_us=100_000, way_us=0),)),
    ]
    lost = Request(turns=(Turn(tokens=51, token_us=10_000, lost_us=3_000_000, retractions=2),))
    other_replica = Request(turns=(Turn(tokens=50, token_us=90_000),), replica=1)
    tables, _ = run_of(Step((*others, lost, other_replica)))
    rows = {row["request_id"]: row for row in request_engine_time(tables)}

    # By the time that each was there: 1.01 and 1.414 s, of 100 tokens each after the first.
    speed = (1.01 * 1.01 / 100 + 1.414 * 1.414 / 100) / (1.01 + 1.414)
    assert 3.51 - 50 * speed == pytest.approx(rows["q0002"]["recomputed_s"], rel=0.002)
    assert 2 == rows["q0002"]["retractions"]
    assert not any(rows[f"q000{place}"]["recomputed_s"] for place in (0, 1, 3))


def test_a_retracted_call_without_others_is_not_guessed():
    """Nothing tells what its tokens would have taken."""
    tables, _ = run_of(Step((Request(turns=(Turn(lost_us=3_000_000, retractions=1),)),)))
    (row,) = request_engine_time(tables)

    assert (0, 3.5) == (row["recomputed_s"], pytest.approx(row["decode_s"]))


def test_slowest_in_the_engine_first_and_what_is_mostly():
    """The most time in the engines first, and its largest part beside decoding named."""
    slow = Request(turns=(Turn(parked_us=4_000_000),))
    rows = request_engine_time(run_of(Step((Request(), slow, Request())))[0], count=1)

    assert [("q0001", "parked")] == [(row["request_id"], row["mostly"]) for row in rows]
    assert rows[0]["engine_s"] > 4


def silent(request):
    return replace(request, turns=tuple(replace(turn, timed=False) for turn in request.turns))


@pytest.mark.parametrize("seed", range(2))
def test_what_the_engine_did_not_report_is_no_part(seed):
    """Neither 0 s of queue nor decoding: one part has the time in the engine, in every form."""
    step = Step(tuple(map(silent, drawn_requests(random.Random(seed)))))
    tables, _ = run_of(step)
    rows = {row["request_id"]: row for row in request_engine_time(tables, count=100)}
    lanes = engine_lanes(tables)

    for place, request in enumerate(step.requests):
        row, turns = rows[f"q{place:04d}"], request.turns
        outside = sum(t.acquire_us + t.way_us + t.back_us for t in turns) / 1e6
        parked = sum(t.parked_us for t in turns) / 1e6
        inside = sum(t.held_us + t.prefill_us + t.decode_us for t in turns) / 1e6
        assert [outside, parked, inside] == pytest.approx(
            [row["outside_s"], row["parked_s"], row["undivided_s"]]
        )
        assert row["engine_s"] == pytest.approx(outside + parked + inside)
        names = ("queue_s", "cold_s", "prefill_s", "recomputed_s", "decode_s", "token_s", "batch")
        assert {None} == {row[name] for name in names}
        assert "undivided" == row["mostly"]
        own = [lane for lane in lanes if lane["request_id"] == row["request_id"]]
        assert {(None, None, None)} == {
            tuple(lane[f"{part}_s"] for part in ("queue", "prefill", "decode")) for lane in own
        }
        assert inside == pytest.approx(sum(lane["undivided_s"] for lane in own))
    straggling = straggler_requests(tables, count=100)
    assert {(None, None)} == {(row["slow_s"], row["queued_s"]) for row in straggling}

    choice = Choice(run="r")
    for name in ("request_engine_time", "engine_lanes"):
        view = VIEWS[name]
        texts = words(view.spec(view.analysis(tables, choice), choice))
        assert "profiler.events.engine_timing=true" in texts, name
        assert "decoding" not in texts, name


def test_a_call_without_its_engine_is_not_divided():
    """An agent loop's call alone has a length, and nothing of it is outside, queue or decoding."""
    made, _ = events_of(Step((Request(turns=(Turn(held_us=20_000),)),)))
    (row,) = request_engine_time(tables_of([e for e in made if e["event"] != "engine_request"]))

    assert row["engine_s"] == row["undivided_s"] == pytest.approx(0.543)
    parts = set(CALL_PARTS) - {"undivided"}
    assert {None} == {row[f"{part}_s"] for part in parts}
    assert (None, None, "undivided") == (row["retractions"], row["batch"], row["mostly"])


def test_first_token_and_speed_of_each_engine_request():
    """Queue and prefill until the first token; nothing where the engine does not report them."""
    turn = Turn(tokens=41, token_us=10_000, prefill_us=30_000, held_us=20_000)
    made, without = (
        events_of(Step((request,)))[0]
        for request in (Request(turns=(turn,)), silent(Request(turns=(turn,))))
    )
    query = "SELECT first_token_us, decode_tokens_per_s FROM engine_requests"

    assert [(50_000, pytest.approx(40 / 0.41))] == [
        tuple(row.values()) for row in tables_of(made).rows(query)
    ]
    assert [(None, None)] == [tuple(row.values()) for row in tables_of(without).rows(query)]


def parked_for_ever(folder):
    """Make of a recorded run what version 0.1 recorded on verl 0.9.0: aborts of vLLM, and no resumes."""
    header = folder / "processes" / "engine_0.json"
    content = json.loads(header.read_text())
    content["probes"]["installed"].pop("engine_resume")
    content["probes"]["missed"] = {"engine_resume": "it has no vLLMHttpServer.open_submission_gate"}
    header.write_text(json.dumps(content))
    paused = False
    for path in sorted(folder.glob("step_*/engine_0.jsonl")):
        lines = []
        for line in map(json.loads, path.read_text().splitlines()):
            paused |= line["event"] == "engine_abort"
            if line["event"] not in ("engine_resume", "engine_parked"):
                lines.append(line)
            if paused and line["event"] == "engine_request":
                kept = {"engine_request_id": line["extra"]["engine_request_id"]}
                lines.append({**line, "event": "engine_parked", "extra": kept})
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_waits_in_pauses_whose_end_was_not_recorded_are_unknown(tmp_path):
    """And not the whole length of each call: devices have generated as long as with the ends."""
    seconds, parked = [], []
    for name, change in (("whole", lambda folder: None), ("half", parked_for_ever)):
        folder = tmp_path / name
        shutil.copytree(
            cached("vllm_colocate_async_run"), folder, ignore=shutil.ignore_patterns(".cache")
        )
        change(folder)
        run = load(folder)
        rows = run.tables.rows(
            "SELECT parked_us FROM engine_call_times WHERE engine_name IS NOT NULL"
        )
        parked.append({row["parked_us"] is None for row in rows})
        assert rows
        generated = [
            row["device_s"]
            for row in bubble_ledger(run.tables)
            if row["account"].startswith("generating")
        ]
        seconds.append(sum(generated))
        told = [each for each in run.problems if "engine_resume" in each]
        assert (name == "half") == bool(told)

    assert [{False}, {True}] == parked
    assert seconds[0] > 0
    assert seconds[0] <= seconds[1] <= 1.1 * seconds[0]
