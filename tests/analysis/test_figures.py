"""Figures of the small run, each also computed by plain Python from the lines of its event files.

The run has two finished steps, two workers, one engine, and a validation after step 2.
"""

import functools
from datetime import datetime
from statistics import median, quantiles

import pytest
from analyses import ANALYSES
from cached_runs import SMALL
from reading_back import lines_with_files

LINES = lines_with_files(SMALL)

LAUNCHED = datetime.fromisoformat("2026-11-21T02:33:20+00:00")


def of(event, step=1, process="", *, validate=False):
    """Return the lines of an event: training or validation, of processes whose name begins so."""
    return [
        line
        for line in LINES
        if (event, step) == (line["event"], line["step"])
        and line["file"].startswith(process)
        and validate == line["extra"].get("validate", False)
    ]


def lengths(lines):
    return [line["duration_sec"] for line in lines]


def total(lines):
    return sum(lengths(lines))


def extra(key, lines):
    return [line["extra"][key] for line in lines]


def ends(lines):
    times = [datetime.fromisoformat(line["timestamp"]) for line in lines]
    return [(time - LAUNCHED).total_seconds() for time in times]


def begins(lines):
    return [end - line["duration_sec"] for end, line in zip(ends(lines), lines, strict=True)]


def whole(lines):
    """Return the time from the first begin to the last end."""
    return max(ends(lines)) - min(begins(lines))


def busy(lines):
    """Return the time in which at least one of the lines was under way."""
    covered = until = 0.0
    for begin, end in sorted(zip(begins(lines), ends(lines), strict=True)):
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return covered


def percentile(share, values):
    """Interpolate linearly between the two nearest values, as numpy does by default."""
    return quantiles(values, n=100, method="inclusive")[share - 1]


def trainer(*events, step=1):
    return sum(total(of(event, step, "trainer")) for event in events)


def last_request():
    """Return the request of step 1 that ended last: it used three tools, one of them slow."""
    return max(of("request"), key=lambda line: line["timestamp"])["extra"]["request_id"]


def of_last_request(event):
    return [line for line in of(event) if last_request() == line["extra"]["request_id"]]


def polling():
    """Return the time from the last request's end to the end of the trainer's wait for samples."""
    return [max(ends(of("sample_wait", step))) - max(ends(of("request", step))) for step in (1, 2)]


ONE, TRAINING = {"step": 1}, {"step": 1, "validate": False}
PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
# Analysis, its row, column, what it must be, and how that follows from the lines.
FIGURES = [
    # Steps
    ("step_times", ONE, "unaccounted_s", 0.0027, lambda: trainer("step") - trainer(*PHASES)),
    ("step_phases", {"step": 1, "phase": "gen"}, "share", 0.599953984,
     lambda: trainer("gen") / trainer("step")),
    ("step_metrics", {"step": 2, "name": "adv"}, "value", 0.002999, lambda: trainer("adv", step=2)),
    ("validation_times", {"step": 2}, "rollout_s", 1.079721,
     lambda: whole(of("request", 2, validate=True))),
    # Requests and turns
    ("request_times", {"step": 2, "validate": True}, "requests", 4,
     lambda: len(of("request", 2, validate=True))),
    ("request_percentiles", {"step": None, "percentile": 80.0}, "duration_s", 1.57763,
     lambda: percentile(80, lengths(of("request")) + lengths(of("request", 2)))),
    ("request_parts", {**TRAINING, "part": "tool"}, "total_s", 1.65611,
     lambda: total(of("tool_execution"))),
    ("request_parts", {**TRAINING, "part": "engine"}, "share", 0.772017194,
     lambda: total(of("engine_call")) / total(of("request"))),
    ("request_breakdown", {"step": 1, "sample": "0"}, "tool_calls", 4,
     lambda: len(of_last_request("tool_call"))),
    ("slowest_requests", ONE, "engine_s", 0.906883, lambda: total(of_last_request("engine_call"))),
    ("turns_per_request", {**TRAINING, "turns": 1}, "requests", 5,
     lambda: extra("turns", of("request")).count(1)),
    # The tail
    ("step_tail", ONE, "poll_s", 1.528337, lambda: ends(of("gen"))[0] - max(ends(of("request")))),
    ("rollout_tail", ONE, "bubble_share", 0.592012015,
     lambda: 1 - total(of("request")) / (8 * whole(of("request")))),
    ("rollout_tail", ONE, "idle_share", 0.056512185,
     lambda: (max(ends(of("request"))) - max(ends(of("request", 1, "worker_1"))))
     / (2 * whole(of("request")))),
    ("rollout_balance", {"step": 1, "name": "worker_1"}, "busy_s", 2.157413,
     lambda: whole(of("request", 1, "worker_1"))),
    # Tools and rewards
    ("tool_latencies", {"tool": "search"}, "p50_s", 0.1919665,
     lambda: median(line["duration_sec"] for line in of("tool_call") + of("tool_call", 2)
                    if line["extra"]["tool"] == "search")),
    ("tool_times", {**TRAINING, "tool": "sandbox"}, "share", 0.833470124,
     lambda: 1.43694 / total(of("tool_call"))),
    ("reward_times", {"step": 1, "part": "reward"}, "total_s", 0.116483,
     lambda: total(of("reward"))),
    # The engine
    ("engine_times", TRAINING, "cached_tokens", 1626,
     lambda: sum(extra("cached_tokens", of("engine_request")))),
    # Processes, weights, memory, the profiler itself
    ("worker_balance", {"step": 1, "phase": "update_actor"}, "waited_s", 0.241716,
     lambda: 2 * max(lengths(of("update_actor", 1, "actor")))
     - total(of("update_actor", 1, "actor"))),
    ("weight_sync", ONE, "transfer_s", 0.306848, lambda: max(lengths(of("weight_transfer")))),
    ("loop_suspects", {"step": 2, "name": "worker_0"}, "step_share", 0.236212363,
     lambda: total(of("event_loop_lag", 2)) / trainer("step", step=2)),
    ("sleep_times", ONE, "share", 0.01199908,
     lambda: (total(of("memory_release")) + total(of("memory_resume"))) / total(of("step"))),
    ("profiler_cost", ONE, "events", 195, lambda: sum(extra("events", of("profiler_cost")))),
    # TransferQueue
    ("transfer_totals", {"step": 2}, "size_bytes", 179520,
     lambda: sum(extra("size_bytes", of("tq_put", 2) + of("tq_put", 2, validate=True)))),
    ("tq_throughput", {"caller": None}, "mib_per_s", 11.628634236,
     lambda: 283560 / 2**20 / 0.023255),
    # What made the step as long as it was
    ("critical_path", {"step": 1, "category": "polling"}, "duration_s", 1.527337,
     lambda: polling()[0]),
    ("critical_path", {"step": 1, "category": "update_actor"}, "duration_s", 1.377882,
     # The rank that ends last also has the longest optimizer step.
     lambda: max(lengths(of("update_actor", 1, "actor")))
     - max(lengths(of("optimizer_step", 1, "actor")))),
    ("what_if", {"what": "no_polling"}, "saved_s", 1.5489475, lambda: sum(polling()) / 2),
    ("straggler_requests", ONE, "behind_s", 1.64385,
     lambda: max(ends(of("request"))) - median(ends(of("request")))),
]  # fmt: skip


def test_a_figure_is_what_the_lines_give(small):
    """The number, its derivation and the analysis agree; quantiles may be cut to microseconds."""
    rows = functools.cache(lambda analysis: ANALYSES[analysis](small.tables))
    wrong = []
    for analysis, row, column, figure, by_hand in FIGURES:
        first = next(found for found in rows(analysis) if row.items() <= found.items())
        near = pytest.approx(figure, rel=1e-9, abs=1e-7)
        if by_hand() != near or first[column] != near:
            wrong.append((analysis, column, figure, by_hand(), first[column]))

    assert [] == wrong
