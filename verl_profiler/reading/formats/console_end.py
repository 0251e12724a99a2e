"""What ended a training, from its console: the exception with its own frame, and known reasons."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from verl_profiler.events.failure_texts import reason_in
from verl_profiler.reading.formats.console_log import file_lines, lines_of
from verl_profiler.reading.formats.console_steps import bars_in
from verl_profiler.units import counted, seconds

# File, line and function; the type of an exception, its message and its frame.
_Frame: TypeAlias = "tuple[str, str, str]"
_Failure: TypeAlias = "tuple[str, str, _Frame | None]"

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,7}), in (?P<name>\S{1,200})'
)
_ERROR = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Stopped|Killed))"
    r"(?:: (?P<message>.*))?$"
)
_WRAPPED = re.compile(r"^(?:ray\.exceptions\.)?RayTaskError\(")
# omegaconf names the key after its exception.
_KEY = re.compile(r"^\s+full_key: (\S{1,200})")
_DEBUGGER = re.compile(r"^\(Pdb\)|^> \S+\(\d+\)\S*\(\)$")
# What a trainer, its workers and engines print once a phase of start-up is over, in this order.
_START_UP = (
    ("Started a local Ray instance", "Ray was started"),
    ("Connected to Ray cluster", "Ray was connected"),
    ("dataset len: ", "the dataset was read"),
    ("Total training steps: ", "the data loaders were made"),
    ("After FSDP, memory allocated", "the model was loaded and sharded"),
    ("HTTP server started on port", "an engine was started"),
    ("Application startup complete", "an engine was started"),
    ("Training Progress: ", "start-up was over"),
)
_STEP = re.compile(r"(?<![\w/@.\-])step:(?P<step>\d{1,9}) - ")
# Whose code a frame is: by its file or function, the first that fits.
_WHOSE = (
    (re.compile(r"reward|compute_score"), "reward function"),
    (re.compile(r"omegaconf|hydra|/config"), "configuration"),
    (re.compile(r"tool"), "tool"),
    (re.compile(r"dataset|dataloader"), "data"),
    (re.compile(r"sglang|vllm"), "engine"),
)
# Frames of code that is installed, not the user's: packages, the standard library, verl and its engines.
_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3|^<frozen|/(?:verl|ray|torch|sglang|vllm|verl_profiler)/"
)
_MESSAGE = 300
# Lines since the last step that are looked at, the last ones.
_SINCE = 200_000


def log_end(path: Path) -> str:
    """Read how a console ends.

    Args:
        path: A text or gzip file.

    Returns:
        What ended the training, as one sentence; empty if the console does not show it.

    Raises:
        ReadingError: The file cannot be read.
    """
    step: int | None = None
    reached, trains = -1, False
    # The first of a launch, and the last.
    bars: list[tuple[int, ...]] = []
    # What a step was finished after did not end the training.
    since: deque[str] = deque(maxlen=_SINCE)
    for number, raw in file_lines(path, []):
        if step is None:
            for place in range(reached + 1, len(_START_UP)):
                reached = place if _START_UP[place][0] in raw else reached
            if reached == len(_START_UP) - 1 and not trains:
                # What the trainer started after was handled: SGLang's server prints what it does without.
                trains = True
                since.clear()
        for line in lines_of(raw, number) if "step:" in raw else ():
            finished = _STEP.search(line.text)
            if finished is not None:
                step = int(finished["step"])
                since.clear()
        for bar in bars_in(raw) if step is None else ():
            if bars and bar[0] > bars[-1][0]:
                since.clear()
            elif bars and bar[0] < bars[0][0]:
                bars.clear()
            bars[1:] = [bar]
        since.append(raw)
    phase = _START_UP[reached][1] if reached >= 0 else ""
    debugger, reason, last = False, "", ""
    failures: list[_Failure] = []
    frames: dict[int | None, list[_Frame]] = {}
    for line in (line for raw in since for line in lines_of(raw, 0)):
        last = line.text.strip() or last
        debugger = debugger or _DEBUGGER.match(line.text) is not None
        reason = reason or reason_in(line.text) or ""
        found = _FRAME.match(line.text)
        if found is not None:
            frames.setdefault(line.pid, []).append((found["file"], found["line"], found["name"]))
            continue
        error = None if _WRAPPED.match(line.text) else _ERROR.match(line.text)
        if error is not None:
            own = frames.pop(line.pid, [])
            at = next((each for each in reversed(own) if _is_own(each)), own[-1] if own else None)
            failures.append((error["type"].rpartition(".")[2], error["message"] or "", at))
        key = _KEY.match(line.text)
        if key is not None and failures:
            name, message, at = failures[-1]
            failures[-1] = name, f"{message} ({key[1]})", at
    framed = [each for each in failures if each[2] is not None] or failures
    if debugger:
        what = "it waits in a debugger (Pdb)"
    elif framed:
        name, message, at = framed[-1]
        what = f"it failed with {_failure(name, at, message)}"
        if before := _before(framed):
            what = f"{before}; then {what}"
    elif reason:
        what = "it failed"
    else:
        what = ""
    if what and reason and reason not in what:
        what += f" ({reason})"
    unlogged = _unlogged(bars) if step is None else ""
    if step is not None or unlogged:
        ended = f"After step {bars[-1][0] if step is None else step} {what}." if what else ""
        return " ".join(each for each in (ended, unlogged) if each)
    if what:
        return f"No step was finished: {f'after {phase} ' if phase else ''}{what}."
    if phase:
        return f"No step was finished: the log ends after {phase}; its last line: {last[:_MESSAGE]}"
    return ""


def _unlogged(bars: Sequence[tuple[int, ...]]) -> str:
    """Return what the trainer's progress bar shows of steps that the log has no line of; else empty."""
    # A launch draws its first bar at 00:00, before its first step.
    if not bars or (bars[-1][0] == bars[0][0] and not bars[0][2]):
        return ""
    (before, _, start_s), (step, steps, end_s) = bars[0], bars[-1]
    number, at = step - before, f"step {step:,} of {steps:,}"
    if number:
        at += f" after {counted(number, 'step')} in {seconds(end_s - start_s)}"
    if number > 1:
        at += f", {seconds((end_s - start_s) / number)} each"
    return (
        f"The progress bar is at {at}; the log has no figures of steps. Add console to trainer.logger, "
        "or name the file that another logger wrote."
    )


def _before(failures: Sequence[_Failure]) -> str:
    """Return what the user's code raised most often before an exception of installed code; else empty."""
    *others, last = failures
    if last[2] is not None and _is_own(last[2]):
        return ""
    raised = Counter(
        (name, at) for name, _, at in others if at is not None and _is_own(at) and at != last[2]
    )
    if not raised:
        return ""
    ((name, at), times), *_ = raised.most_common(1)
    message = next(text for each, text, place in others if (each, place) == (name, at))
    count = f" {times:,} times" if times > 1 else ""
    return f"{name} {_failure(f'was raised{count}', at, message)}"


def _failure(error: str, at: _Frame | None, message: str) -> str:
    place = ""
    if at is not None:
        file, line, function = at
        whose = next(
            (f", {what}" for each, what in _WHOSE if each.search(f"{file}:{line} {function}")), ""
        )
        place = f" in {function} ({file}:{line}{whose})"
    return f"{error}{place}{': ' + message[:_MESSAGE].rstrip('.') if message else ''}"


def _is_own(frame: _Frame) -> bool:
    return _INSTALLED.search(frame[0]) is None
