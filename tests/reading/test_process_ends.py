"""What killed processes took with them: said where headers and events show it, and only there."""

import json
from datetime import timedelta

import event_files
import pytest
from event_files import LAUNCHED as START

from verl_profiler.reading.losses import end_problems
from verl_profiler.reading.reader import load

LATER = START + timedelta(days=1)


def at(seconds):
    return (START + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def write_process(run, name, *, events=((1.0, "turn"),), complete=None, ended=None, **header):
    """Write a process with events that ended at these seconds; `complete` is its header's."""
    lines = [json.dumps(event_files.ended(event, end, 0.01)) for end, event in events]
    content = {
        "counters": {"events": len(lines)},
        "started": at(0),
        "updated": at(0.5),
        "ended": None if ended is None else at(ended),
    }
    if complete is not None:
        content.update(
            flush_interval_s=0.5,
            longest_flush_s=0.25,
            complete_until=at(complete),
            written_events=len(lines),
            waiting_events=0,
        )
    event_files.write_run(run, lines, name, header={**content, **header})


def problems(run, now=LATER):
    with load(run, cache=False) as opened:
        return list(end_problems(opened.tables, opened.arrived, now))


def test_a_process_that_was_killed_without_work_has_lost_nothing(tmp_path):
    """As Ray ends its actors; its own work, and what timers write of a waiting trainer, prove nothing."""
    write_process(tmp_path, "trainer_0", events=[(9.0, "step")], ended=9.5)
    write_process(tmp_path, "worker_0", events=[(8.9, "turn")], complete=9.2)
    write_process(tmp_path, "actor_0", events=[(1.0, "update_actor")], complete=9.0)
    with load(tmp_path, cache=False) as opened:
        assert [] == opened.problems
        # An object that SQL can look into, not a text.
        query = "SELECT header->>'$.longest_flush_s' AS s FROM processes WHERE name = 'actor_0'"
        assert [{"s": "0.25"}] == opened.rows(query)
    for event in ("profiler_cost", "event_loop_lag", "device"):
        write_process(tmp_path, "trainer_0", events=[(9.0, "step"), (15.0, event)], ended=15.5)
        assert [] == problems(tmp_path), event
    write_process(tmp_path, "trainer_0", events=[(1.0, "step")], ended=9.5)
    write_process(tmp_path, "actor_0", events=[(1.0, "update_actor")], complete=9.0)
    write_process(tmp_path, "worker_0", events=[(5.0, "turn")], complete=4.9)
    assert [] == problems(tmp_path)
    write_process(tmp_path, "worker_0", complete=4.0, waiting_events=1234)
    assert ["worker_0 was killed before it wrote 1,234 events, now lost"] == problems(tmp_path)


@pytest.mark.parametrize(
    ("complete", "bound"),
    [(8.9, "up to 0.1 s"), (8.5, "up to 0.5 s"), (8.0, "up to 0.8 s"), (3.0, "up to 0.8 s")],
)
def test_no_more_is_said_to_be_missing_than_can_be(tmp_path, complete, bound):
    """The time to the last work of others, at most an interval and the longest delay of a flush."""
    write_process(tmp_path, "trainer_0", events=[(9.0, "step")], ended=9.5)
    write_process(tmp_path, "worker_0", complete=complete)
    write_process(tmp_path, "worker_1", complete=9.4)

    (text,) = problems(tmp_path)
    assert text.startswith("1 of 3 processes were killed while others worked; ")
    assert f"{bound} of events each may be lost (worker_0)" in text


def test_a_process_that_fell_silent_is_named(tmp_path):
    """With its last sign of life, the run's, and the bound."""
    write_process(tmp_path, "trainer_0", events=[(100.0, "step")], ended=100.5, updated=at(100))
    write_process(tmp_path, "worker_0", complete=10.0, updated=at(5))

    (text,) = problems(tmp_path)
    assert text == (
        "worker_0 was killed or hung: last activity at 02:33:30, the run's at 02:35:00 "
        "UTC; up to 0.8 s of events may be lost"
    )


def test_a_run_that_goes_on_has_lost_nothing(tmp_path):
    """Its processes have no end yet; a minute after the last sign of any it counts as killed."""
    write_process(tmp_path, "trainer_0", events=[(9.0, "step")], complete=9.1)
    write_process(tmp_path, "worker_0", complete=8.8)

    assert [] == problems(tmp_path, START + timedelta(seconds=30))
    assert 1 == len(problems(tmp_path, START + timedelta(seconds=100)))


def test_a_run_of_which_no_process_ended_lacks_its_last_events(tmp_path):
    """Killed as a whole, or on a disk that stopped: no process is behind the others, all lost as much."""
    for rank in range(3):
        events = [(8.0 + rank / 10, "turn")]
        write_process(tmp_path, f"worker_{rank}", events=events, complete=9.0 + rank / 10)

    assert [] == problems(tmp_path, START + timedelta(seconds=30))
    (text,) = problems(tmp_path)
    assert text == (
        "none of 3 processes recorded its end: the run was killed, or its disk stopped responding; events "
        "after 02:33:29.0 UTC may be lost (02:33:29.2 of worker_2)"
    )


def test_other_hosts_clocks_are_corrected_before_they_are_compared(tmp_path):
    """Two boots of one wall clock, of which one was an hour ahead, would show an hour of loss."""
    clock = {"boot_id": "b", "monotonic_ns": 10**9, "uncertainty_ns": 10}
    wall_ns = int(START.timestamp()) * 10**9
    write_process(
        tmp_path,
        "trainer_0",
        events=[(9.0, "step")],
        ended=9.5,
        clock={**clock, "wall_ns": wall_ns},
    )
    ahead = {**clock, "wall_ns": wall_ns + 2 * 10**9, "uncertainty_ns": 1000}
    write_process(tmp_path, "worker_0", events=[(3.0, "turn")], complete=11.1, clock=ahead)
    assert [] == problems(tmp_path)

    write_process(tmp_path, "worker_0", events=[(3.0, "turn")], complete=10.9, clock=ahead)
    assert 1 == len(problems(tmp_path))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"complete": 10.0, "updated": at(5)}, "50 processes (NAMES) were killed or hung: "),
        (
            {"complete": 100.6, "updated": at(100), "waiting_events": 7},
            "50 processes (NAMES) were killed before they wrote 350 events, now lost",
        ),
        (
            {"counters": {"events": 1, "dropped": 3}},
            "50 processes (NAMES) dropped 150 events because the queue was full; ",
        ),
        (
            {"counters": {"events": 1, "write_errors": 2}},
            "50 processes (NAMES) had 100 write errors",
        ),
        (
            {"counters": {"events": 3}},
            "50 processes (NAMES) wrote 150 events and 50 were found; the rest is missing",
        ),
        (
            {"counters": {"events": 3}, "events": None},
            "the event files of 50 processes (NAMES) are missing (150 events by their headers); ",
        ),
    ],
)
def test_many_processes_with_one_problem_take_one_line(tmp_path, header, expected):
    """A node that was lost, a disk that was full: a line of each process hides all other problems."""
    write_process(tmp_path, "trainer_0", events=[(100.0, "step")], ended=100.5, updated=at(100))
    ended = {} if "complete" in header else {"ended": 100.5}
    for rank in range(50):
        given = {name: value for name, value in {**ended, **header}.items() if value is not None}
        write_process(tmp_path, f"worker_{rank}", **given)
        if "events" in header:
            (tmp_path / "step_1" / f"worker_{rank}.jsonl").unlink()

    with load(tmp_path, cache=False) as opened:
        (text,) = opened.problems

    names = "worker_0, worker_1, worker_10, worker_11 and 46 others"
    assert text.startswith(expected.replace("NAMES", names))
    assert names in text
