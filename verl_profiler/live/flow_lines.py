"""The lines of a screen about an asynchronous run: trainer, rollout, queue, versions, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from verl_profiler.live.flow import Flow, Taken
from verl_profiler.live.state import RATE_S, Live, Step
from verl_profiler.render.text import align
from verl_profiler.units import seconds, share

__all__ = ["flow_lines", "flow_steps"]

_STEPS = 5
_REPLICAS = 8
# The trainer's timers in which it waits for samples.
_WAITS = frozenset({"gen"})
# A pool that waits for less of its time than this does not wait.
_LITTLE = 0.05


def flow_lines(live: Live, now_s: float) -> list[str]:
    """Return what each pool does now and did in the last finished step, and what lies between them."""
    flow = live.flow
    rows = [["trainer", _trainer(live, now_s)], ["rollout", _rollout(live)]]
    last = _last(live)
    if last is not None:
        rows.append(["waits", _who_waits(live, last)])
    rows += [["queue", text] for text in _queues(flow)]
    rows.append(["versions", _versions(flow)])
    if flow.taken:
        step = max(flow.taken)
        rows.append(["staleness", f"step {step}: {_taken(flow.taken[step])}"])
    tokens, requests = live.rate_window(now_s)
    while flow.times and flow.times[0] < now_s - RATE_S:
        flow.times.popleft()
    samples = len(flow.times) / RATE_S
    rates = f"{tokens:,.0f} generated tokens/s, {requests:.1f} requests/s, {samples:.1f}"
    rows.append(["rate", f"{rates} samples/s consumed"])
    return [f"{name:<9}  {text}" for name, text in rows if text]


def flow_steps(live: Live) -> list[str]:
    """Return a table of the latest finished steps."""
    ended = [step for _, step in sorted(live.steps.items()) if step.duration_s is not None]
    if not ended:
        return []
    rows = [["steps", "took", "waited", "samples", "behind", "at most", "dropped"]]
    for step in ended[-_STEPS:]:
        taken = live.flow.taken.get(step.number, Taken())
        behind = taken.behind
        rows.append(
            [
                str(step.number),
                seconds(step.duration_s or 0.0),
                share(_waited(step)),
                str(taken.samples),
                f"{sum(behind) / len(behind):.2f}" if behind else "-",
                str(max(behind)) if behind else "-",
                str(sum(taken.dropped.values())),
            ]
        )
    return align(rows, left=(0,), indent="").splitlines()


def _last(live: Live) -> Step | None:
    """Return the last finished step."""
    ended = [number for number, step in live.steps.items() if step.duration_s is not None]
    return live.steps[max(ended)] if ended else None


def _trainer(live: Live, now_s: float) -> str:
    step = live.training
    if step is None:
        return "before the first step"
    if step.duration_s is not None:
        return f"step {step.number} ended after {seconds(step.duration_s)}"
    phase = live.phase_of(step)
    if phase is None:
        return f"step {step.number}"
    name, begin_s, last_s = phase
    doing = "waits for samples" if name in _WAITS else name
    before = f" ({seconds(last_s)} in the previous step)" if last_s is not None else ""
    return f"step {step.number}, {doing} for {seconds(max(now_s - begin_s, 0))}{before}"


def _rollout(live: Live) -> str:
    training = sum(not key[2] for key in live.in_flight)
    text = f"{training} request{'s' * (training != 1)} in flight"
    validating = len(live.in_flight) - training
    return text + (f", {validating} of validation" if validating else "")


def _waited(step: Step) -> float:
    """Return the share of a finished step in which the trainer waited for samples."""
    spent = step.phase_seconds
    return sum(spent.get(name, 0.0) for name in _WAITS) / (step.duration_s or 1.0)


def _who_waits(live: Live, step: Step) -> str:
    """Return which pool waited for the other one in a finished step."""
    trainer = _waited(step)
    idle = _without_requests(live, step) if live.flow.is_separate else None
    if idle is None:
        return f"step {step.number}: trainer {share(trainer)} of the time for samples"
    if max(trainer, idle) < _LITTLE:
        bound = "balanced"
    elif min(trainer, idle) > max(trainer, idle) / 2:
        bound = "in turn"
    else:
        bound = f"bounded by the {'rollout' if trainer > idle else 'trainer'}"
    return f"step {step.number}: trainer {share(trainer)}, rollout {share(idle)} of it; {bound}"


def _without_requests(live: Live, step: Step) -> float | None:
    """Return the share of a finished step in which no request was in flight.

    None where requests of that time were not read, because the run was long when it was opened.
    """
    taken = live.flow.taken.get(step.number)
    read = [number for number, each in live.steps.items() if each.started or each.ends]
    if taken is None or taken.dispatched is None or step.end_s is None or not step.duration_s:
        return None
    if not read or taken.dispatched < min(read):
        return None
    begin_s, end_s = step.end_s - step.duration_s, step.end_s
    spans = [
        (end - length, end)
        for each in live.steps.values()
        for end, length in zip(each.ends, each.seconds, strict=True)
    ]
    spans += [(each.begin_s, end_s) for key, each in live.in_flight.items() if not key[2]]
    return 1 - _covered(spans, begin_s, end_s) / (end_s - begin_s)


def _covered(spans: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Return how much of a time at least one span covers."""
    covered, until_s = 0.0, begin_s
    for begin, end in sorted(spans):
        if min(end, end_s) > until_s:
            covered += min(end, end_s) - max(begin, until_s)
            until_s = min(end, end_s)
    return covered


def _queues(flow: Flow) -> list[str]:
    texts: list[str] = []
    for name, (_, counts) in sorted(flow.queues.items()):
        capacity = counts.get("capacity")
        held = {state: count for state, count in counts.items() if state != "capacity"}
        parts = [f"{count} {state}" for state, count in held.items()]
        if capacity is not None and len(held) == 1:
            ((state, count),) = held.items()
            parts = [f"{count} of {capacity} {state}"]
            if count >= capacity:
                parts.append("full")
        texts.append(f"{name}: {', '.join(parts)}")
    return texts


def _versions(flow: Flow) -> str:
    """Return the weight versions of the trainer and the replicas; these by version if there are many."""
    parts = [] if flow.trainer_version is None else [f"trainer {flow.trainer_version}"]
    own = {replica: version for replica, (_, version) in sorted(flow.versions.items())}
    if len(own) <= _REPLICAS:
        parts += [f"replica {replica}: {version}" for replica, version in own.items()]
    else:
        counts = Counter(own.values())
        parts += [f"{counts[version]} replicas: {version}" for version in sorted(counts)]
    return ", ".join(parts)


def _taken(taken: Taken) -> str:
    parts = [f"{taken.samples} samples"]
    if taken.behind:
        off = sum(behind > 0 for behind in taken.behind)
        parts.append(
            f"{sum(taken.behind) / len(taken.behind):.2f} versions behind (at most "
            f"{max(taken.behind)}), {off} off-policy"
        )
    parts += [f"{count} prompts dropped ({why})" for why, count in sorted(taken.dropped.items())]
    return ", ".join(parts)
