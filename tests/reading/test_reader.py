"""The reader: whatever state a run left its files in, good lines are read and the rest is named."""

import gc
import json
import re
import tempfile
from pathlib import Path

import pytest
from cached_runs import SMALL
from event_files import line, write_header, write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_profiler.errors import ReadingError
from verl_profiler.reading import reader
from verl_profiler.reading.reader import load
from verl_profiler.reading.salvage import repair
from verl_profiler.reading.tables.schemas import FIELDS


def read(folder, query="SELECT * FROM events ORDER BY end_us", **options):
    with load(folder, cache=False, **options) as run:
        return run.rows(query), run.problems


def problems_of(folder):
    """Return the problems of the files, without those about requests that lines here never end."""
    with load(folder, cache=False) as run:
        return [p for p in run.problems if "did not end" not in p]


def test_the_small_run_is_what_was_generated():
    """Counts, steps and requests; no time of a request or step is counted twice or lost."""
    truth = json.loads((SMALL / "truth.json").read_text())

    with load(SMALL, cache=False) as run:
        counts = run.rows("SELECT event, count(*) AS n FROM events GROUP BY event ORDER BY event")
        steps = run.rows("SELECT * FROM steps WHERE finished ORDER BY step")
        requests = run.rows("SELECT * FROM requests")
        calls = run.rows("SELECT * FROM engine_calls")
        problems = run.problems

    keys = ("duration_us", "unaccounted_us", "requests", "validation_requests")
    assert truth["events"] == {row["event"]: row["n"] for row in counts}
    assert [[step[key] for key in keys] for step in truth["steps"].values()] == [
        [row[key] for key in keys] for row in steps
    ]
    for number, step in truth["steps"].items():
        mine = [row for row in requests if str(row["step"]) == number and not row["validate"]]
        slowest = max(mine, key=lambda row: row["duration_us"])
        for key in ("request_id", "duration_us"):
            assert step["slowest"][key] == slowest[key]
    assert [] == problems
    parts = [
        "prompt_build",
        "engine",
        "tool",
        "tool_parsing",
        "token_merge",
        "postprocess",
        "reward",
    ]
    for row in requests:
        total = sum(row[f"{part}_us"] for part in (*parts, "other")) - row["overlap_us"]
        assert row["duration_us"] == total
    for row in steps:
        assert row["duration_us"] == row["phases_us"] + row["unaccounted_us"]
    for row in calls:
        assert row["engine_name"].startswith("engine_")
        assert row["queue_us"] + row["prefill_us"] + row["decode_us"] <= row["duration_us"]


def test_a_repeated_engine_request_id_is_joined_by_time(tmp_path):
    """Under full_determinism one id serves all turns; each call gets its own server interval."""
    calls = [
        line(number * 500_000, extra={"request_id": "d", "turn": number, "engine_request_id": "d"})
        for number in (0, 1)
    ]
    served = [
        line(
            at,
            "engine_request",
            duration_sec=0.1,
            extra={"engine_request_id": "d", "queue_s": queue},
        )
        for at, queue in ((0, 0.0), (490_000, 0.1))
    ]
    write_run(tmp_path, calls)
    write_run(tmp_path, served, "engine_0")

    rows, _ = read(tmp_path, "SELECT turn, queue_us FROM engine_calls ORDER BY turn")

    assert [{"turn": 0, "queue_us": 0}, {"turn": 1, "queue_us": 100_000}] == rows


BAD = [
    ("{not json", "not JSON, dropped"),
    ("[1, 2]", "not a JSON object, dropped"),
    ("17", "not a JSON object, dropped"),
    ('{"event": "x", "step": 1}', "no readable `timestamp`, dropped"),
    (line(timestamp="yesterday"), "no readable `timestamp`, dropped"),
    (line(timestamp=12), "no readable `timestamp`, dropped"),
    (line(event=None), "no `event` name, dropped"),
    (line(event=""), "no `event` name, dropped"),
    (line(event={"a": 1}), "no `event` name, dropped"),
    (line(duration_sec="long"), "`duration_sec` is not a valid duration, dropped"),
    (line(duration_sec=-1), "`duration_sec` is not a valid duration, dropped"),
    (line(duration_sec=1e300), "`duration_sec` is not a valid duration, dropped"),
    (line(duration_sec=True), "`duration_sec` is not a valid duration, dropped"),
    (line(timestamp="infinity"), "no readable `timestamp`, dropped"),
    (line(timestamp="epoch"), "no readable `timestamp`, dropped"),
    (line(timestamp="x" * 25), "no readable `timestamp`, dropped"),
    ("x" * (3 << 20), "longer than 1 MiB, dropped"),
    ("\0" * 40, "zero bytes instead of a line"),
    ('{"a":' * 900 + "1" + "}" * 900, ""),
]
KEPT = [
    (line(2, step="three"), "`step` is not a whole number; the folder's number is used"),
    (line(2, extra={"turn": "x"}), "`turn` is not a whole number; it is not used"),
    (line(2, extra=[1]), "`extra` is not an object; it is not used"),
    (line(2, extra={"validate": 3}), "`validate` is neither true nor false"),
]


def test_a_bad_line_is_named_and_costs_no_other(tmp_path):
    """Lines before and after one that cannot be read are there; of a wrong value, the event is kept."""
    for number, (bad, _) in enumerate([*BAD, *KEPT]):
        write_run(tmp_path, [line(1), bad, line(3)], f"worker_{number}")

    rows, problems = read(tmp_path, "SELECT * FROM events ORDER BY name, end_us")

    found = {}
    for row in rows:
        found.setdefault(row["name"], []).append((row["end_us"] % 1_000_000, row["step"]))
        assert row["turn"] in (0, None)
    text = "\n".join(problems)
    for number, (_, sentence) in enumerate([*BAD, *KEPT]):
        ends = (1, 3) if number < len(BAD) else (1, 2, 3)
        assert [(end, 1) for end in ends] == found[f"worker_{number}"], sentence
        assert sentence in text


def test_what_editors_and_python_make_of_lines_is_read(tmp_path):
    """A mark, ends of Windows; a lone surrogate is JSON that UTF-8 forbids, NaN is none at all."""
    text = "".join(f"{line(number, tool='caf')}\n" for number in (1, 2))
    for number, content in enumerate(
        (
            text.encode("utf-8-sig"),
            text.replace("\n", "\r\n").encode(),
            text.replace("caf", r"\ud800").encode(),
            text.replace("0.25", "NaN").encode(),
        )
    ):
        write_run(tmp_path, [], f"worker_{number}").write_bytes(content)

    rows, _ = read(tmp_path, "SELECT name, end_us FROM events ORDER BY name, end_us")

    assert [(f"worker_{n}", end) for n in range(4) for end in (1, 2)] == [
        (row["name"], row["end_us"] % 1_000_000) for row in rows
    ]


def test_a_file_cut_at_any_byte_reads_as_its_whole_lines(tmp_path):
    """However a process dies, every line it finished is kept, and the rest is reported."""
    path, copy = tmp_path / "worker_0.jsonl", tmp_path / "copy"
    good = [line(number, tool="r\u00e9").encode() for number in range(3)]
    content = b"".join(each + b"\n" for each in good)
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])

        problems = repair(path, copy, "worker_0.jsonl")

        ended = content[:cut].split(b"\n")[-1]
        whole = content[:cut].count(b"\n") + (ended in good)
        kept = [json.loads(each) for each in copy.read_bytes().splitlines()]
        assert [json.loads(each) for each in good[:whole]] == kept
        assert bool(problems) == bool(ended and ended not in good)


def test_the_same_fault_in_many_files_takes_one_line(tmp_path):
    """A node that was lost leaves an unfinished line per process; other faults stay visible."""
    for number in range(9):
        lines = ["nonsense"] * number + [line(each, workid=number) for each in range(3)]
        path = write_run(tmp_path, lines, f"worker_{number}")
        path.write_bytes(path.read_bytes()[:-20])
    write_run(tmp_path, [line(1), "[1]", line(2)], "worker_9")

    rows, problems = read(tmp_path)

    assert 9 * 2 + 2 == len(rows)
    unfinished = ", ".join(f"step_1/worker_{each}.jsonl:{each + 3}" for each in range(4))
    dropped = ", ".join(f"step_1/worker_{each}.jsonl:1" for each in range(1, 5))
    assert (
        f"{unfinished} and 5 others: unfinished line, dropped (was the process killed?)" in problems
    )
    (sentence,) = [each for each in problems if "not JSON, dropped" in each]
    assert sentence.startswith(f"{dropped} and 4 others: not JSON, dropped")
    assert sentence.endswith("; 28 more lines of these files likewise")
    assert "step_1/worker_9.jsonl:2: not a JSON object, dropped" in problems


def test_invalid_utf_8_is_replaced_and_named(tmp_path):
    """A stray byte in a text costs that byte."""
    path = write_run(tmp_path, [])
    path.write_bytes(f"{line(1)}\n{line(2, event='caf~')}\n".encode().replace(b"~", b"\xe9"))

    rows, problems = read(tmp_path)

    assert ["engine_call", "caf\N{REPLACEMENT CHARACTER}"] == [row["event"] for row in rows]
    assert any("2: not UTF-8" in problem for problem in problems)


def test_an_empty_file_is_named(tmp_path):
    """A process that opened its file and wrote nothing is not passed over."""
    write_run(tmp_path, [line(1)])
    (tmp_path / "step_1/worker_1.jsonl").touch()
    write_header(tmp_path, "worker_1", rank=1)

    assert ["step_1/worker_1.jsonl is empty"] == problems_of(tmp_path)


def test_keywords_of_the_caller_are_kept_in_extra(tmp_path):
    """`log_manager.log(…, color="red")` is not lost, whichever line it is in."""
    write_run(tmp_path, [line(1), line(2, color="red", request=[1, {"step": 1}])])

    rows, _ = read(tmp_path)

    assert {"request_id": "r1", "turn": 0} == json.loads(rows[0]["extra"])
    assert {"request_id": "r1", "turn": 0, "color": "red", "request": [1, {"step": 1}]} == (
        json.loads(rows[1]["extra"])
    )
    assert [] == problems_of(tmp_path)


@pytest.mark.parametrize(("stalls", "has_column"), [(1, False), (100, True)])
def test_fields_far_inside_a_file_are_read(tmp_path, stalls, has_column):
    """A part has columns for what its first lines have; what few others have is read from `rest`."""
    calls = [line(number) for number in range(500)]
    lags = [
        line(500 + number, "event_loop_lag", extra={"loop": "main", "during": "generate"})
        for number in range(stalls)
    ]
    write_run(tmp_path, calls + lags + calls)
    write_run(tmp_path, [line(9, "compute_log_prob", extra={"at": "x", "rows": 3})], "actor_0")

    with load(tmp_path) as run:
        rows = run.rows("SELECT loop, during, rows FROM event_fields")
        extras = run.rows("SELECT extra FROM events WHERE event = 'event_loop_lag'")
        stalled = run.rows("SELECT loop, during FROM lags")
    parts = (tmp_path / ".cache" / "events-1").glob("part-*.parquet")
    query = "SELECT name FROM parquet_schema('{}')"
    columns = [
        {name for (name,) in reader.duckdb.sql(query.format(part)).fetchall()} for part in parts
    ]

    lag = {"loop": "main", "during": "generate"}
    assert stalls == sum(row["loop"] == "main" and row["during"] == "generate" for row in rows)
    assert 1 == sum(row["rows"] == 3 for row in rows)
    assert [lag] * stalls == [json.loads(row["extra"]) for row in extras]
    assert [lag] * stalls == stalled
    assert {has_column} == {"loop" in each for each in columns if "rows" not in each}
    assert 2 == len(columns)


def test_begin_is_timestamp_minus_duration_to_the_microsecond(tmp_path):
    """Offsets are honored and nothing is rounded away."""
    stamp = "2026-11-21T04:33:22.123457+02:00"
    write_run(tmp_path, [line(timestamp=stamp, duration_sec=0.123456), line(2, duration_sec=None)])

    rows, _ = read(tmp_path)

    assert [
        (1795228402000002, 1795228402000002, None),
        (1795228402000001, 1795228402123457, 123456),
    ] == [(row["begin_us"], row["end_us"], row["duration_us"]) for row in rows]


def test_families_follow_the_vocabulary_and_the_role(tmp_path):
    """Unknown names are the user's, except intervals of the trainer: those are verl's timers."""
    names = ["update_actor", "my_timer", "tq_get"]
    write_run(tmp_path, [line(event=name) for name in names], "trainer_0")
    write_run(tmp_path, [line(event=name) for name in names], "actor_0")

    rows, _ = read(tmp_path, "SELECT role, event, family FROM events")

    assert {
        ("trainer", "update_actor", "trainer"),
        ("trainer", "my_timer", "trainer"),
        ("trainer", "tq_get", "transfer_queue"),
        ("actor", "update_actor", "workers"),
        ("actor", "my_timer", "user"),
        ("actor", "tq_get", "transfer_queue"),
    } == {tuple(row.values()) for row in rows}


def test_a_phase_that_failed_is_named(tmp_path):
    """Why a run ended is the first thing to know about it."""
    failed = {"status": "error", "error": "RayTaskError"}
    write_run(tmp_path, [line(1, "update_actor", extra=failed)], "trainer_0")

    (problem,) = problems_of(tmp_path)
    assert problem == "the trainer's update_actor of step 1 ended in: error (RayTaskError)"


def test_a_request_start_without_its_request_is_unfinished(tmp_path):
    """Starts have no id yet; sample and session say which of them ended, and which never came so far."""
    start = {"event": "request_start", "duration_sec": None}
    ended = {"request_id": "a", "sample": 1, "session": 0, "turns": 1}
    seen = {"request_id": "b", "turn": 0, "sample": 2, "session": 0}
    write_run(
        tmp_path,
        [
            line(1, **start, extra={"sample": 1, "session": 0}),
            line(2, **start, extra={"sample": 2, "session": 0}),
            line(3, **start, extra={"sample": 2, "session": 1}),
            line(4, "request", duration_sec=3e-6, extra=ended),
            line(5, "engine_call", duration_sec=1e-6, extra=seen),
        ],
    )

    rows, problems = read(
        tmp_path,
        "SELECT request_id, session, finished, duration_us, begin_us % 1000000 AS begin, "
        "last_us % 1000000 AS last FROM requests ORDER BY begin_us",
    )

    assert [
        ("a", "0", True, 3, 1, 4),
        ("b", "0", False, None, 2, 5),
        (None, "1", False, None, 3, 3),
    ] == [tuple(row.values()) for row in rows]
    assert any(p.startswith("2 requests started but did not end (step 1") for p in problems)


def test_reading_the_same_id_in_two_steps_gives_two_requests(tmp_path):
    """Under full_determinism verl gives requests the same ids in every step."""
    extra = {"request_id": "det-0", "sample": 0, "session": 0}
    for step in (1, 2):
        write_run(tmp_path, [line(1, "request", extra=extra, step=step)], step=step)

    rows, problems = read(tmp_path, "SELECT step FROM requests ORDER BY step")

    assert ([{"step": 1}, {"step": 2}], []) == (rows, problems)


# Of a process with one event on a host of its own; NAME and HOST are its own.
HEADERS = [
    ({"counters": {"events": 5}}, "NAME wrote 5 events and 1 were found"),
    ({"counters": {"dropped": 3}}, "NAME dropped 3 events because the queue was full"),
    ({"counters": {"write_errors": 2}}, "NAME had 2 write errors"),
    ({"probes": {"missed": {"turn": "gone"}}}, "probe turn is not installed in NAME: gone"),
    ({"probes": {"errors": {"turn": 4}}}, "probe turn failed 4 times in NAME"),
    (
        {"counters": {"dropped": 3, "dropped_by": {"disk": 2, "bad_event": 1, "late": 0}}},
        "NAME dropped 3 events because the disk rejected them, they could not be encoded; totals",
    ),
    ({"dropped_events": 4}, "NAME dropped 4 events because the queue was full"),
    ({"written_events": 5}, "NAME wrote 5 events and 1 were found"),
    ({"format": 9}, "NAME.json has format 9; this version of verl-profiler reads format 1"),
    ({"fallback": "disk full"}, "could not write into the run directory: NAME (disk full)"),
]


def test_headers_tell_what_is_missing(tmp_path):
    """What a process knows about its own losses reaches the reader."""
    for rank, (changes, sentence) in enumerate(HEADERS):
        run = tmp_path / str(rank)
        header = {"rank": rank, "host": f"n{rank}", **changes}
        write_run(run, [line(rank)], f"worker_{rank}", header=header)

        text = "\n".join(problems_of(run))

        assert sentence.replace("NAME", f"worker_{rank}").replace("HOST", f"n{rank}") in text


def answers(folder, **options):
    """Return how long steps, phases, requests and ranks took, and the problems."""
    with load(folder, cache=False, **options) as run:
        tables = ("phases", "requests", "tool_calls", "engine_calls", "rank_spans", "reward_scores")
        sums = {
            name: run.rows(
                f"SELECT step, count(*), sum(duration_us) FROM {name} GROUP BY 1 ORDER BY 1"
            )
            for name in tables
        }
        return sums, run.problems


def test_the_order_of_lines_does_not_matter(run):
    """Concurrent events end in any order."""
    truth = answers(run)
    for path in run.glob("step_*/*.jsonl"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))

    assert truth == answers(run)


def test_lines_of_another_run_are_named(run):
    """Not copies: how many there are is known from the header, which is whose is not."""
    path = run / "step_2/actor_0.jsonl"
    lines = path.read_text()
    path.write_text(lines + lines.replace(":33:", ":34:"))
    count = lines.count("\n")

    _, problems = answers(run)

    wrote = json.loads((run / "processes/actor_0.json").read_text())["counters"]["events"]
    found = f"actor_0 wrote {wrote} events and {wrote + count} were found; some are not"
    assert any(problem.startswith(found) for problem in problems), problems


@pytest.mark.parametrize(
    "change",
    [
        # Another writer's, for each process; no event has a byte.
        lambda header: header["counters"].update(events=1, bytes=1),
        # Of a running process the header is written after the lines.
        lambda header: header.update(
            ended=None, counters={**header["counters"], "events": header["counters"]["events"] - 2}
        ),
    ],
)
def test_a_header_with_fewer_events_accuses_no_file(run, change):
    for path in (run / "processes").glob("*.json"):
        header = json.loads(path.read_text())
        change(header)
        path.write_text(json.dumps(header))
    with load(run, cache=False) as opened:
        assert not [text for text in opened.problems if "were found" in text]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (86_400.0, "begins before its process started, dropped"),
        (None, "`tool_call` has no `duration_sec`; it is in no sum"),
        (float("nan"), "`tool_call` has no `duration_sec`; it is in no sum"),
        (-2.0, "`duration_sec` is not a valid duration, dropped"),
    ],
)
def test_a_duration_that_cannot_be_is_named_and_in_no_sum(run, wrong, sentence):
    """A tool call that begins before its process, of unknown length, or ends before it begins."""
    path = run / "step_1/worker_0.jsonl"
    lines = path.read_text().splitlines()
    place = next(n for n, text in enumerate(lines) if '"tool_call"' in text)
    call = json.loads(lines[place])
    without = sum(
        round(json.loads(text)["duration_sec"] * 1e6)
        for n, text in enumerate(lines)
        if '"event":"tool_call"' in text and n != place
    )
    lines[place] = json.dumps({**call, "duration_sec": wrong}, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")

    with load(run, cache=False) as opened:
        calls = opened.rows(
            "SELECT duration_us FROM tool_calls WHERE name = 'worker_0' AND step = 1"
        )
        (longest,) = opened.rows("SELECT max(duration_us) AS us FROM event_fields WHERE step = 1")
        problems = opened.problems

    assert without == sum(row["duration_us"] for row in calls)
    assert longest["us"] < 10e6
    assert any(sentence in each for each in problems), problems


def test_a_header_without_files_and_files_without_a_header_are_named(tmp_path):
    """Files on another host and workers that left nothing are missed; headers that are not there are named."""
    write_run(tmp_path, [line(1)], "actor_0", header=False)
    for rank in (0, 2):
        write_run(tmp_path, [line(rank + 5)], f"worker_{rank}", header={"rank": rank})
    write_header(tmp_path, "engine_0", counters={"events": 12}, host="far")

    problems = problems_of(tmp_path)

    missing = "the event files of engine_0 are missing (12 events by their headers)"
    assert f"{missing}; look for them on far" in problems
    assert any(p.startswith("no header in processes/ for actor_0;") for p in problems)
    assert "no file was found of worker_1" in problems


@pytest.mark.parametrize(
    ("boots", "ends", "problem"),
    [("bb", [13_000, 10_000], None), ("ab", [10_000, 10_000], "the run used 2 hosts")],
)
def test_processes_of_one_boot_share_the_best_anchor(tmp_path, boots, ends, problem):
    """Anchors of one kernel differ by the error of reading them; of two kernels nothing is known."""
    for rank, (wall, uncertainty) in enumerate([(1_000_000, 900), (4_000_000, 50)]):
        clock = {
            "boot_id": boots[rank],
            "monotonic_ns": 0,
            "wall_ns": wall,
            "uncertainty_ns": uncertainty,
        }
        write_run(tmp_path, [line(10_000)], f"worker_{rank}", header={"rank": rank, "clock": clock})

    rows, problems = read(tmp_path, "SELECT end_us % 1000000 AS end FROM events ORDER BY name")

    assert ends == [row["end"] for row in rows]
    assert problem is None or any(problem in each for each in problems)


def test_a_step_folder_and_a_file_open_alone(tmp_path):
    """The run's headers are used, its other files are not, and none is called missing."""
    whole, _ = read(SMALL, "SELECT count(*) AS n FROM events WHERE step = 1")

    step, problems = read(SMALL / "step_1", "SELECT count(*) AS n FROM events")
    file, more = read(
        SMALL / "step_1" / "trainer_0.jsonl", "SELECT DISTINCT role, host FROM events"
    )

    assert whole == step
    assert [{"role": "trainer", "host": "node-1"}] == file
    assert [] == problems
    assert [] == more


def test_a_folder_with_one_run_is_that_run_and_with_two_is_asked_about(tmp_path):
    """`logs` is enough while there is one run in it."""
    write_run(tmp_path / "one", [line(1)])

    rows, _ = read(tmp_path)
    write_run(tmp_path / "two", [line(1)])

    assert ["one"] == [row["run"] for row in rows]
    with pytest.raises(ReadingError, match="holds 2 runs"):
        load(tmp_path)


def test_a_folder_with_only_archives_of_runs_lists_them(tmp_path):
    """As `runs` does; beside the folder of a run, that is read."""
    (tmp_path / "packed.tar.gz").write_bytes(b"")

    with pytest.raises(ReadingError, match=r"holds 1 run; name one(.|\n)*packed.tar.gz"):
        load(tmp_path)
    write_run(tmp_path / "one", [line(1)])
    assert ["one"] == [row["run"] for row in read(tmp_path)[0]]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_nothing_to_read_is_an_error_that_says_what_to_name(tmp_path, make):
    """A wrong path is the user's error, with the next step."""
    make(tmp_path / "nothing")

    with pytest.raises(ReadingError, match="such as logs/my-run"):
        load(tmp_path / "nothing")


def test_a_resumed_run_is_read_as_one_and_its_repeated_steps_are_named(tmp_path):
    """Steps that were done twice stay apart."""
    for name, steps in (("run", (1, 2)), ("run-2", (2, 3))):
        for step in steps:
            write_run(tmp_path / name, [line(1, "request", step=step)], step=step)

    with load([tmp_path / "run", tmp_path / "run-2"], cache=False) as run:
        rows = run.rows("SELECT run, step FROM steps ORDER BY run, step")
        problems = run.problems

    found = [tuple(row.values()) for row in rows]
    assert [("run", 1), ("run", 2), ("run-2", 2), ("run-2", 3)] == found
    assert ["1 step (such as 2) are in run and run-2; they are not merged"] == problems


def test_a_run_named_twice_or_copied_is_read_once(tmp_path):
    """Sums are not doubled."""
    write_run(tmp_path / "run", [line(1)])
    copy = tmp_path / "copy"
    write_run(copy, [line(1)])
    (copy / "run.json").write_bytes((tmp_path / "run" / "run.json").read_bytes())

    with load([tmp_path / "run", tmp_path / "run", copy], cache=False) as run:
        rows = run.rows("SELECT count(*) AS n FROM events")
        problems = run.problems

    assert [{"n": 1}] == rows
    assert any("was given twice" in problem for problem in problems)
    assert any("is a copy of the run in" in problem for problem in problems)


def test_a_parquet_file_of_something_else_is_refused(tmp_path):
    """The message says what is missing in it."""
    with reader.duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT 1 AS x) TO '{tmp_path}/x.parquet' (FORMAT parquet)")

    with pytest.raises(ReadingError, match="is not a table of events"):
        load(tmp_path / "x.parquet")


@pytest.mark.parametrize("leave", [lambda run: run.close(), lambda run: None])
def test_no_temporary_files_are_left(tmp_path, monkeypatch, leave):
    """Neither after `close` nor when a run is forgotten."""
    write_run(tmp_path / "run", [line(1), "bad"])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    run = load(tmp_path / "run", cache=False)
    leave(run)
    del run
    gc.collect()

    assert [] == list(scratch.iterdir())


def test_an_asof_join_compares_no_row_with_each_of_the_other_side(tmp_path):
    """Whatever number of rows duckdb expects: of 80,000 calls that it took for 5, that were 10^8 pairs."""
    few = "(SELECT DISTINCT end_us FROM event_fields)"
    write_run(tmp_path, [line(1)])

    with load(tmp_path, cache=False) as run:
        run.tables.connection.execute("PRAGMA enable_optimizer")
        ((_, plan),) = run.tables.connection.execute(
            f"EXPLAIN SELECT * FROM {few} AS a ASOF JOIN {few} AS b ON b.end_us <= a.end_us"
        ).fetchall()

    assert re.search("asof.join", plan, re.IGNORECASE)
    assert not re.search("loop.join", plan, re.IGNORECASE)


def test_the_memory_limit_must_be_an_amount(tmp_path):
    """A wrong argument is named with a right one."""
    write_run(tmp_path, [line(1)])

    with pytest.raises(ReadingError, match="Write for example 2GB"):
        load(tmp_path, memory_limit="much")


FIELD_VALUES = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: {
                "VARCHAR": st.text(st.characters(codec="utf-8", exclude_characters="\0")),
                "BIGINT": st.integers(0, 1 << 52),
                "DOUBLE": st.floats(0, 1e9),
            }[kind]
            for name, kind in FIELDS.items()
            if name != "weight_version"
        },
        "weight_version": st.integers(0, 9) | st.text("abc", min_size=1),
        "sample": st.integers(0, 1 << 40) | st.text("abc-", min_size=1),
        "turn": st.integers(0, 99),
        "validate": st.booleans(),
        "own": st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-9, 9)
            | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner)
            ),
        ),
        "tokens": st.just(2.5),
    },
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(extras=st.lists(FIELD_VALUES, min_size=1, max_size=30), compact=st.booleans())
def test_extra_comes_back_as_it_was_recorded(extras, compact):
    """Fields become columns on the way, and are put together again; others are kept."""
    with tempfile.TemporaryDirectory() as folder:
        separators = (",", ":") if compact else None
        lines = [
            json.dumps(json.loads(line(number, extra=extra)), separators=separators)
            for number, extra in enumerate(extras)
        ]
        rows, problems = read(
            write_run(Path(folder) / "run", lines).parents[1],
            "SELECT extra FROM events ORDER BY end_us",
        )

    assert [] == [problem for problem in problems if "worker_0.jsonl" in problem]
    assert extras == [json.loads(row["extra"] or "{}") for row in rows]
