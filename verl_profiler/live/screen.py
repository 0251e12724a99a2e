"""One screen of a running training, 80 columns by 24 lines or the terminal's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.live.flow_lines import flow_lines, flow_steps
from verl_profiler.live.state import Live, Step
from verl_profiler.reading.quantiles import interpolated, least_values, quantile
from verl_profiler.render.text import align
from verl_profiler.units import seconds, share

__all__ = ["frame", "header_problems"]

# After this long without an event or header update, a run has ended or hangs.
SILENCE_S = 60.0
_SLOWEST = 4
_TOOLS = 4
_STEPS = 5
_PROBLEMS = 3


def frame(
    live: Live,
    launch: Mapping[str, Any],
    headers: Mapping[str, Mapping[str, Any]],
    *,
    title: str,
    now_s: float,
    problems: Sequence[str] = (),
    width: int = 80,
    height: int = 24,
) -> list[str]:
    """Return the lines of a screen, none longer than `width` and no more than `height`.

    Args:
        live: The state of the run.
        launch: run.json.
        headers: The processes' headers by name.
        title: The run's title.
        now_s: Seconds since 1970.
        problems: Reading problems.
        width: Columns.
        height: Lines.
    """
    state, now_s = _state(live, headers, now_s)
    clock = datetime.fromtimestamp(now_s, timezone.utc).strftime("%H:%M:%S UTC")
    blocks = [[f"{title}  {state}  {clock}"]]
    step = live.current
    if step is None:
        blocks.append(["no events yet"])
    elif live.flow.is_asynchronous(launch):
        blocks += [
            flow_lines(live, now_s),
            _slowest(live, now_s),
            flow_steps(live),
        ]
    else:
        blocks += [
            [*_step_lines(live, now_s), *_request_lines(live, step, launch, now_s)],
            _slowest(live, now_s),
            _tools(step, sampled=live.sampled),
            _steps(live),
        ]
    found = [*problems, *header_problems(headers)]
    if found:
        more = f" (and {len(found) - _PROBLEMS} more)" if len(found) > _PROBLEMS else ""
        blocks.append([f"problems{more}", *(f"  {text}" for text in found[:_PROBLEMS])])
    else:
        blocks.append(["no problems"])
    return _fitted([block for block in blocks if block], width, height)


def header_problems(headers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return problems from the processes' headers: dropped events, failures, silence."""
    found: list[str] = []
    heard = {name: _heard(header) for name, header in headers.items()}
    latest = max((moment for moment in heard.values() if moment is not None), default=None)
    for name, header in headers.items():
        counters = mapping_or_empty(header.get("counters"))
        probes = mapping_or_empty(header.get("probes"))
        if counters.get("dropped"):
            found.append(f"{name} dropped {counters['dropped']} events")
        if counters.get("write_errors"):
            found.append(f"{name} had {counters['write_errors']} write errors")
        failed = sum(mapping_or_empty(probes.get("errors")).values())
        if failed:
            found.append(f"{name}: probes failed {failed} times")
        if header.get("fallback"):
            found.append(f"{name} writes to a fallback directory: {header['fallback']}")
        moment = heard[name]
        if moment is not None and latest is not None and header.get("ended") is None:
            silent_s = latest - moment
            if silent_s > SILENCE_S:
                found.append(f"{name}: no update for {seconds(silent_s)}")
    missed = {
        probe
        for header in headers.values()
        for probe in mapping_or_empty(mapping_or_empty(header.get("probes")).get("missed"))
    }
    if missed:
        found.append(f"inactive probes: {', '.join(sorted(missed))}")
    return found


def _state(live: Live, headers: Mapping[str, Mapping[str, Any]], now_s: float) -> tuple[str, float]:
    """Return the state of the run, and the time that ages are relative to."""
    moments = map(_heard, headers.values())
    last_s = max((live.newest_s, *(moment for moment in moments if moment is not None)))
    trainers = [header for name, header in headers.items() if name.startswith("trainer_")]
    if trainers and all(header.get("ended") for header in trainers):
        return "ended", live.newest_s
    if now_s - last_s > SILENCE_S:
        return f"no event for {seconds(now_s - last_s)}", live.newest_s
    return "live", now_s


def _step_lines(live: Live, now_s: float) -> list[str]:
    step = live.current
    assert step is not None  # noqa: S101
    if step.duration_s is not None:
        return [f"step {step.number}  ended after {seconds(step.duration_s)}"]
    phase = live.phase()
    if phase is None:
        return ["before the first step" if not step.number else f"step {step.number}"]
    name, begin_s, last_time = phase
    before = f" ({seconds(last_time)} in the previous step)" if last_time is not None else ""
    elapsed = f"{seconds(max(now_s - step.begin_s, 0))} so far"
    return [f"step {step.number}  {elapsed}; {name} for {seconds(max(now_s - begin_s, 0))}{before}"]


def _request_lines(live: Live, step: Step, launch: Mapping[str, Any], now_s: float) -> list[str]:
    launched = mapping_or_empty(launch.get("training"))
    expected = step.started
    if isinstance(launched.get("train_batch_size"), int) and step.number:
        expected = max(expected, launched["train_batch_size"] * (launched.get("rollout_n") or 1))
    training = [key for key in live.in_flight if not key[2]]
    validating = len(live.in_flight) - len(training)
    done = len(step.ends)
    text = f"requests  {len(training)} in flight, {done} of {expected} finished"
    if expected:
        text += f" ({share(done / expected)})"
    if validating:
        text += f", {validating} of validation"
    if step.failed:
        text += f", {step.failed} failed"
    lines = [text]
    if done:
        lengths = ", ".join(
            f"{label} {_quantile(step.seconds, place)}"
            for label, place in (("p50", 0.5), ("p95", 0.95), ("max", 1))
        )
        lines.append(f"          {lengths}{_tail(step, expected, now_s)}")
    tokens, requests = live.rate_window(now_s)
    lines.append(f"rate      {tokens:,.0f} generated tokens/s, {requests:.1f} requests/s")
    return lines


def _quantile(values: Sequence[float], place: float) -> str:
    value = quantile(values, place)
    return "too few" if values and value is None else seconds(value)


def _tail(step: Step, expected: int, now_s: float) -> str:
    """Return how long the last requests have been awaited."""
    ends = sorted(step.ends)
    last_s = now_s if len(ends) < expected and step.duration_s is None else ends[-1]
    for percent in (95, 80):
        part = percent / 100
        # The quantile of all expected requests: those still running end later than these.
        if expected < least_values(part) or len(ends) <= -(-percent * (expected - 1) // 100):
            continue
        every = [*ends, *[ends[-1]] * (expected - len(ends))]
        return f"; tail {seconds(last_s - interpolated(every, part))} since {percent} % finished"
    return ""


def _slowest(live: Live, now_s: float) -> list[str]:
    slowest = sorted(live.in_flight.values(), key=lambda each: each.begin_s)[:_SLOWEST]
    if not slowest:
        return []
    rows = [["slowest now", "worker", "sample", "turn", "waits for", "age"]]
    rows += [
        [
            (each.request_id or "-")[:11],
            each.name,
            "/".join(part for part in (each.sample, each.session) if part is not None) or "-",
            str(each.turn),
            each.doing,
            seconds(max(now_s - each.begin_s, 0)),
        ]
        for each in slowest
    ]
    return align(rows, left=(0, 1, 2, 4), indent="").splitlines()


def _tools(step: Step, *, sampled: bool) -> list[str]:
    if not step.tools:
        return []
    # Estimated from the requests whose details are recorded.
    rows = [["tool", "≈ calls" if sampled else "calls", "p50", "p95", "max", "failed"]]
    busiest = sorted(step.tools.items(), key=lambda item: -sum(item[1].seconds))[:_TOOLS]
    rows += [
        [
            name[:24],
            str(len(tool.seconds)),
            *(_quantile(tool.seconds, place) for place in (0.5, 0.95, 1)),
            str(tool.failed),
        ]
        for name, tool in busiest
    ]
    return align(rows, indent="").splitlines()


def _steps(live: Live) -> list[str]:
    ended = [step for _, step in sorted(live.steps.items()) if step.duration_s is not None]
    if not ended:
        return []
    rows = [["steps", "took", "longest phase"]]
    for step in ended[-_STEPS:]:
        longest = max(step.phase_seconds.items(), key=lambda phase: phase[1], default=None)
        total = step.duration_s or 0.0
        part = f"{longest[0]} {share(longest[1] / total)}" if longest and total else "-"
        rows.append([str(step.number), seconds(total), part])
    return align(rows, left=(0, 2), indent="").splitlines()


def _fitted(blocks: list[list[str]], width: int, height: int) -> list[str]:
    """Put blank lines between blocks if there is room, and truncate to the screen."""
    lines = [line for block in blocks for line in block]
    spare = height - len(lines)
    fitted: list[str] = []
    for place, block in enumerate(blocks):
        if place and spare > 0:
            fitted.append("")
            spare -= 1
        fitted += block
    # Problems come last, and are never cut.
    kept = blocks[-1]
    if len(fitted) > height:
        fitted = [*fitted[: max(height - len(kept), 0)], *kept][:height]
    return [align([[line]], indent="")[:width] for line in fitted]


def _heard(header: Mapping[str, Any]) -> float | None:
    """Return the time of a process's last update: headers are rewritten every 15 s."""
    moments = (_moment(header.get(key)) for key in ("updated", "complete_until"))
    return max((moment for moment in moments if moment is not None), default=None)


def _moment(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
