"""Logs of the original multi-turn logger: three vocabularies, one meaning."""

import json

import pytest
from event_files import ended, write_lines
from picked import picked

from verl_profiler.analysis.requests import request_times
from verl_profiler.analysis.steps import step_phases, step_times
from verl_profiler.reading.reader import load

BASE = "2025-06-13T06:30:{:02d}.{:06d}"


def write(folder, events, name="worker_0", step=3):
    """Write lines as `json.dumps` of the original did: spaces, naive local times."""
    path = folder / f"step_{step}" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for end, event, duration, extra in events:
        entry = {"timestamp": BASE.format(*divmod(end, 1_000_000)), "event": event}
        if duration is not None:
            entry["duration_sec"] = duration
        if extra is not None:
            entry["extra"] = extra
        lines.append(json.dumps({**entry, "workid": 0, "step": step}) + "\n")
    path.write_text("".join(lines))


def request(**more):
    return {"request_id": "r", **more}


FIRST = [
    (1_000_000, "preprocessing", 0.5, None),
    (2_000_000, "engine_call", 0.4, {"turn": 1}),
    (2_100_000, "running_state", 0.6, {"turn": 1}),
    (2_400_000, "tool_execution", 0.3, {"turn": 1}),
    (3_000_000, "async_rollout_request_complete", 2.0, request(turns=1, batch_data_id=5)),
    (5_000_000, "total", 4.5, None),
]
SECOND = [
    (1_000_000, "preprocessing_duration", 0.5, None),
    (1_000_001, "request_start", None, request(initial_prompt_length=9)),
    (2_000_000, "engine_call", 0.4, request(turn=1)),
    (2_050_000, "tool_parsing", 0.05, request(turn=1)),
    (2_100_000, "running_state", 0.6, request(turn=1)),
    (2_400_000, "tool_execution", 0.3, request(turn=1)),
    (3_000_000, "async_rollout_request_complete", 1.999999, request(turns=1, response_length=77)),
    (4_000_000, "barrier_wait_duration", 1.0, None),
    (5_000_000, "total_step_duration", 4.5, None),
]
THIRD = [
    (1_000_000, "preprocessing_duration", 0.5, None),
    (1_000_001, "request_start", None, request(initial_prompt_length=9)),
    (1_500_000, "turn_start", None, request(turn=0, current_sequence_length=9)),
    (1_990_000, "engine_async_generate_actual", 0.38, request()),
    (2_000_000, "turn_engine_call", 0.4, request(turn=0, generated_tokens=70)),
    (2_050_000, "turn_tool_parsing", 0.05, request(turn=0)),
    (2_060_000, "turn_post_process", 0.06, request(turn=0)),
    (2_100_000, "turn_end", 0.6, request(turn=0, has_tool_calls=True)),
    (2_400_000, "tool_execution", 0.3, request(turn=1)),
    (2_450_000, "tool_response_processing", 0.05, request(turn=1)),
    (2_450_001, "tool_calling_state", 0.35, request(turn=1)),
    (2_800_000, "reward_calculation", 0.2, request()),
    (2_900_000, "finalization", 0.1, request()),
    (3_000_000, "async_rollout_request_complete", 1.999999, request(turns=1, response_length=77)),
    (3_500_000, "step_response_length_stats", None, {"batch_size": 1}),
    (5_000_000, "total_step_duration", 4.5, None),
]


@pytest.mark.parametrize("events", [FIRST, SECOND, THIRD])
def test_every_vocabulary_gives_the_same_step_and_request(tmp_path, events):
    """Names, turn numbers and the missing zone are normalized."""
    write(tmp_path, events)

    with load(tmp_path, cache=False) as run:
        turns = run.rows(
            "SELECT event, turn FROM events WHERE turn IS NOT NULL AND event IN "
            "('turn', 'engine_call', 'tool_execution', 'tool_parsing') ORDER BY event"
        )
        (times,) = request_times(run.tables)
        (step,) = step_times(run.tables)
        phases = step_phases(run.tables)

        assert {0} == {row["turn"] for row in turns}
        assert (1, 0, 1) == (times["requests"], times["unfinished"], times["max_turns"])
        assert abs(times["max_s"] - 2.0) < 1e-5
        assert (4.5, False) == (step["gen_s"], step["finished"])
        assert {"gen", "preprocessing"} <= {phase["phase"] for phase in phases}
        assert any("original multi-turn logger" in problem for problem in run.problems)
        assert not any("header" in problem for problem in run.problems)


def test_the_latest_vocabulary_fills_the_parts_of_a_request(tmp_path):
    """Parents do not count beside their children, so the parts still add up."""
    write(tmp_path, THIRD)

    with load(tmp_path, cache=False) as run:
        (row,) = run.rows("SELECT * FROM requests")

        assert (400_000, 300_000, 50_000, 50_000, 200_000, 100_000) == picked(
            row, "engine_us tool_us tool_parsing_us token_merge_us reward_us postprocess_us"
        )
        assert row["duration_us"] == sum(
            row[f"{part}_us"] or 0
            for part in (
                "engine",
                "tool",
                "tool_parsing",
                "token_merge",
                "reward",
                "postprocess",
                "prompt_build",
                "other",
            )
        )
        assert (9, 77) == (row["prompt_tokens"], row["response_tokens"])


def test_parts_that_the_first_vocabulary_could_not_tell_are_not_zero(tmp_path):
    """Its calls carry no request id."""
    write(tmp_path, FIRST)

    with load(tmp_path, cache=False) as run:
        (row,) = run.rows("SELECT engine_us, tool_us, sample FROM requests")
        turns = run.rows("SELECT turn, duration_us FROM turns")
        calls = run.rows("SELECT turn, duration_us FROM engine_calls")

        assert (None, None, "5") == tuple(row.values())
        assert [{"turn": 0, "duration_us": 600_000}] == turns
        assert [{"turn": 0, "duration_us": 400_000}] == calls


def test_what_the_file_said_is_kept(tmp_path):
    """The recorded name and turn stay beside the normalized ones."""
    write(tmp_path, THIRD)

    with load(tmp_path, cache=False) as run:
        (row,) = run.rows("SELECT recorded, turn, extra FROM events WHERE event = 'token_merge'")

        assert ("tool_response_processing", 0) == (row["recorded"], row["turn"])
        assert 1 == json.loads(row["extra"])["turn"]


def test_todays_files_without_headers_are_not_taken_for_the_originals(tmp_path):
    """Only a time without an offset is the original's; `engine_call` is in both vocabularies."""
    write_lines(tmp_path, worker_0=[ended("engine_call", 2, 0.1, request_id="r", turn=1)])

    with load(tmp_path, cache=False) as run:
        rows = run.rows("SELECT turn FROM events")

        assert [{"turn": 1}] == rows
        assert not any("original multi-turn logger" in problem for problem in run.problems)


def test_calls_of_the_engine_are_told_from_the_phase_around_them(tmp_path):
    """A fork logs each `engine_async_generate`, and the trainer's reward as worker -1."""
    calls = [(1_600_000 + 900_000 * n, "engine_async_generate", 0.8 + n, None) for n in range(3)]
    whole = [
        (3_600_000, "async_generate_duration", 3.0, None),
        (5_000_000, "total_step_duration", 4.5, None),
    ]
    for worker in range(2):
        write(tmp_path, [*calls, *whole], f"worker_{worker}")
    write(tmp_path, [(41_000_000, "reward_duration", 35.0, None)], "worker_-1")

    with load(tmp_path, cache=False) as run:
        (engine,) = run.rows("SELECT count(*) AS calls, max(duration_us) AS most FROM engine_calls")
        phases = {row["phase"]: row["duration_s"] for row in step_phases(run.tables)}

    assert (6, 2_800_000) == (engine["calls"], engine["most"])
    assert {"gen": 4.5, "async_generate": 3.0, "reward": 35.0} == phases
