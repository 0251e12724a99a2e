"""Every column of docs/metrics.md, for each recorded run, by arithmetic over its lines alone."""

from collections import Counter, defaultdict
from copy import copy
from datetime import datetime
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from cached_runs import cached
from reading_back import lines_with_files

from verl_profiler.analysis.engine import request_token_rates, token_rates
from verl_profiler.analysis.steps import rollout_tail, step_durations, step_tail, step_times
from verl_profiler.reading.reader import load

DATA = Path(__file__).parents[1] / "data"
RUNS = ["small_run", *sorted(path.name[:-7] for path in DATA.glob("*_run.tar.gz"))]
SYNCS = ("update_weights", "sync_rollout_weights", "param_sync")
VALIDATIONS = ("testing", "validation")
TRAINING = ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


class Line:
    """A line of an event file; begin and end in microseconds."""

    def __init__(self, content):
        self.process, self.event = content["file"], content["event"]
        self.step, self.extra = content.get("step"), content["extra"]
        self.validate = bool(self.extra.get("validate"))
        at = datetime.fromisoformat(content["timestamp"])
        self.end = int(at.timestamp()) * 10**6 + at.microsecond
        self.length = round((content.get("duration_sec") or 0) * 1e6)
        self.begin = self.end - self.length

    def inside(self, other):
        return other.begin <= self.begin and self.end <= other.end and self.length < other.length


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    """The run as the product reads it, and its lines."""
    folder = cached(request.param)
    lines = [*map(Line, lines_with_files(folder))]
    with load(folder) as opened:
        yield opened, lines


def by_step(lines):
    found = defaultdict(list)
    for line in lines:
        found[line.step].append(line)
    return found


def near(value):
    return pytest.approx(value, abs=2e-6, rel=1e-9)


def finished(lines):
    """Return the lines of `step` by step; several are one, from the first begin to the last end."""
    found = {}
    for line in lines:
        if line.event == "step":
            whole = found.setdefault(line.step, copy(line))
            whole.begin, whole.end = min(whole.begin, line.begin), max(whole.end, line.end)
            whole.length = whole.end - whole.begin
    return found


def test_times_of_steps(run):
    """`steps.duration_us`, `gens.duration_us`, `testing_s`, `to_next_s`, and where the time went."""
    opened, lines = run
    wholes = finished(lines)
    trainer = by_step(
        line for line in lines if line.process in {w.process for w in wholes.values()}
    )
    durations = {row["step"]: row for row in step_durations(opened.tables) if row["finished"]}
    times = {row["step"]: row for row in step_times(opened.tables) if row["finished"]}
    assert set(wholes) == set(times) == set(durations)
    for step, whole in wholes.items():
        # Timers of the step: inside of it, and of no other that is.
        inside = [
            line for line in trainer[step]
            if line.event in (*TRAINING, *SYNCS, *VALIDATIONS, "gen", "save_checkpoint", "prepare_step")
            and line.inside(whole)
        ]  # fmt: skip
        spent = Counter()
        for line in inside:
            if not any(line.inside(other) for other in inside):
                spent[line.event] += line.length / 1e6
        checks = [line for line in trainer[step] if line.event in VALIDATIONS]
        outermost = [line for line in checks if not any(line.inside(other) for other in checks)]
        testing = sum(line.length for line in outermost) / 1e6
        following = wholes.get(step + 1)
        to_next = (following.begin - whole.begin) / 1e6 if following else None
        row = times[step]
        assert row["duration_s"] == near(whole.length / 1e6)
        assert row["gen_s"] == (near(spent["gen"]) if "gen" in spent else row["gen_s"])
        assert row["testing_s"] == (near(testing) if checks else None)
        if following:
            assert row["to_next_s"] == near(to_next)
        row = durations[step]
        assert row["training_s"] == near(sum(spent[event] for event in TRAINING))
        assert row["weights_s"] == near(sum(spent[event] for event in SYNCS))
        assert row["checkpoint_s"] == near(spent["save_checkpoint"])
        assert row["other_s"] >= spent["prepare_step"] - 2e-6
        parts = ("gen_s", "training_s", "weights_s", "checkpoint_s", "other_s", "unaccounted_s")
        assert sum(row[part] for part in parts) == near(row["step_s"])


def test_requests_and_their_tokens(run):
    """Counts of requests, and tokens of each as its line and its generate calls state them."""
    opened, lines = run
    calls = defaultdict(list)
    for line in lines:
        if line.event == "engine_call" and line.process.startswith("worker"):
            calls[line.process, line.step, line.extra.get("request_id")].append(line)
    ended = [line for line in lines if line.event == "request"]
    rows = {
        (row["name"], row["step"], row["request_id"]): row
        for row in opened.rows("SELECT * FROM requests WHERE finished")
    }
    assert len(ended) == len(rows)
    for line in ended:
        key = (line.process, line.step, line.extra["request_id"])
        row, extra = rows[key], line.extra
        returned = sum(call.extra.get("response_tokens") or 0 for call in calls[key])
        generated = extra.get("generated_tokens", returned)
        response = extra.get("response_tokens")
        assert (row["prompt_tokens"], row["response_tokens"]) == (
            extra.get("prompt_tokens"),
            response,
        )
        assert row["duration_us"] == line.length
        assert row["engine_us"] == sum(call.length for call in calls[key])
        assert row["generated_tokens"] == generated
        if response is not None:
            assert row["tool_tokens"] == extra.get("tool_tokens", response - generated)
    starts = Counter(x.step for x in lines if x.event == "request_start" and not x.validate)
    ends = Counter(line.step for line in ended if not line.validate)
    for row in step_times(opened.tables):
        assert row["requests"] - row["unfinished_requests"] == ends[row["step"]]
        if starts:
            assert row["requests"] == starts[row["step"]]


def test_rollouts_and_tails(run):
    """`rollout_s`, `spread_s` and the tails of steps that consume what they dispatch."""
    opened, lines = run
    requests = by_step(line for line in lines if line.event == "request" and not line.validate)
    tails = {row["step"]: row for row in step_tail(opened.tables)}
    for row in rollout_tail(opened.tables):
        own = requests[row["step"]]
        last = max(line.end for line in own)
        rollout = (last - min(line.begin for line in own)) / 1e6
        assert row["rollout_s"] == tails[row["step"]]["spread_s"] == near(rollout)
        for share, least in ((80, 5), (95, 20), (99, 100)):
            shown = [tails[row["step"]][f"after_p{share}_s"], row[f"tail{share}_s"]]
            ends = np.sort([line.end - last for line in own]).astype(float)
            tail = -float(np.quantile(ends, share / 100)) / 1e6
            assert shown == [near(tail) if len(own) >= least else None] * 2


def test_tokens_per_second(run):
    """Tokens over the step, over the time with a call in flight, and over the time of calls."""
    opened, lines = run
    wholes = finished(lines)
    training = [line for line in lines if not line.validate and line.process.startswith("worker")]
    requests = by_step(line for line in training if line.event == "request")
    calls = by_step(line for line in training if line.event == "engine_call")
    engine_us = Counter()
    for line in training:
        if line.event == "engine_call":
            engine_us[line.step, line.extra.get("request_id")] += line.length
    medians = {row["step"]: row["rate_p50"] for row in request_token_rates(opened.tables)}
    for row in token_rates(opened.tables):
        step = row["step"]
        tokens = sum(call.extra.get("response_tokens") or 0 for call in calls[step])
        busy = at = 0
        for call in sorted(calls[step], key=lambda each: each.begin):
            busy += max(call.end - max(call.begin, at), 0)
            at = max(at, call.end)
        spent = sum(call.length for call in calls[step])
        assert row["engine_tokens_per_s"] == near(tokens / busy * 1e6)
        assert row["call_tokens_per_s"] == near(tokens / spent * 1e6)
        generated = {
            line.extra["request_id"]: line.extra["generated_tokens"]
            for line in requests[step]
            if "generated_tokens" in line.extra
        }
        if step in wholes and len(generated) == len(requests[step]) > 0:
            rate = sum(generated.values()) / wholes[step].length * 1e6
            assert row["generated_tokens_per_s"] == near(rate)
            rates = [
                tokens / engine_us[step, name] * 1e6
                for name, tokens in generated.items()
                if engine_us[step, name]
            ]
            assert medians[step] == near(median(rates))
