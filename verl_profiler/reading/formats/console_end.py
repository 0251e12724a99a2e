"""What ended a training, from its console: the exception with its own frame, and known reasons."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from verl_profiler.events.failure_texts import text_and_meaning
from verl_profiler.reading.formats.console_log import ConsoleLine, file_lines, lines_of, stamps_us
from verl_profiler.reading.formats.console_steps import bars_in
from verl_profiler.units import counted, seconds

# File, line and function.
_Frame: TypeAlias = "tuple[str, str, str]"


class _Failure(NamedTuple):
    """An exception: its type, message and frame, and the name of the process that printed it."""

    name: str
    message: str
    at: _Frame | None
    process: str


_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,7}), in (?P<name>\S{1,200})'
)
_ERROR = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Stopped|Killed))"
    r"(?:: (?P<message>.*))?$"
)
_WRAPPED = re.compile(r"^(?:ray\.exceptions\.)?RayTaskError\(")
# What names an exception's object after it: omegaconf its key, Ray its actor.
_OBJECT = re.compile(r"^\s+(?:full_key: |class_name: (?:\S{1,150}\.)?)(\w\S{0,200})$")
# What vLLM puts before a line of its engine's process.
_ENGINE = re.compile(
    r"^(?:\(\S{1,80} pid=\d{1,10}\) )?ERROR \d\d-\d\d [\d:]{8} \[[\w./]{1,80}:\d{1,6}\] ?"
)
# The message of an exception that another process caused, which printed its own before.
_CAUSED = re.compile(r"See (?:stack trace|root cause) \(?above")
# Of Ray, when the memory of a host ran out: how much was used, and rows of processes with GB and command.
_USED = re.compile(r" was running was (?P<used>[\d.]{1,12})GB / (?P<all>[\d.]{1,12})GB ")
_HOLDER = re.compile(r"^\d{1,10}\s+(?P<gb>\d{1,6}(?:\.\d{1,3})?)\s+(?P<who>ray::[\w.:<>]{1,100})")
# Of c10d's watchdog, for each rank of a group in which a collective did not end.
_COLLECTIVE = re.compile(
    r"\[PG (?:ID \d{1,6} PG GUID )?(?P<group>[^\]\n]{1,120}?) ?Rank (?P<rank>\d{1,6})\].{1,200}?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d{1,12})"
)
# Processes that handle what the requests of a step raise; verl's trainer goes on.
_OF_REQUESTS = re.compile(r"^(?:AgentLoop|Reward|Execution)|Server$")
# What an HTTP server prints of each request, as for the checks of its health.
_REQUEST = re.compile(r'"(?:GET|POST|HEAD) /\S{0,300} HTTP/\d')
_DIGITS = re.compile(r"\d+")
_IDS = re.compile(r"[0-9a-f-]{0,40}\d[0-9a-f-]{0,40}")
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
# What verl prints after the last step.
_COMPLETE = "Final validation metrics"
# A finished step of verl, and of slime.
_STEP = re.compile(
    r"(?<![\w/@.\-])step:(?P<step>\d{1,9}) - |(?<![\w/])perf (?P<perf>\d{1,9}): \{[^{}]*'perf/train_time'"
)
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
# Of installed code, what training is made of.
_OF_TRAINING = re.compile(r"/(?:verl|sglang|vllm)/")
_MESSAGE = 300
# Of requests alone, as long as `stuck` waits where a usual length is not known.
_SILENT_S = 600
# Timeouts, and exceptions of installed code before the last one, that are named.
_OFTEN = 5
# Ranks that are named.
_NAMED = 4
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
    # Lines that differ in numbers only.
    timeouts: dict[str, tuple[int, str]] = {}
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
        for line in lines_of(raw, number) if "step:" in raw or "perf " in raw else ():
            finished = _STEP.search(line.text)
            if finished is not None:
                step = int(finished["step"] or finished["perf"])
                since.clear()
        for bar in bars_in(raw) if step is None else ():
            if bars and bar[0] > bars[-1][0]:
                since.clear()
            elif bars and bar[0] < bars[0][0]:
                bars.clear()
            bars[1:] = [bar]
        since.append(raw)
        if "timed out" in raw:
            shape = _IDS.sub("", raw)
            timeouts[shape] = timeouts.get(shape, (0, ""))[0] + 1, raw
    phase = _START_UP[reached][1] if reached >= 0 else ""
    end = _End()
    for line in (line for raw in since for line in lines_of(raw, 0)):
        end.take(line)
    what = end.failure()
    unlogged = _unlogged(bars) if step is None else ""
    if step is not None or unlogged:
        at = f"step {bars[-1][0] if step is None else step}"
        after = f"All steps were finished at {at}; then" if end.complete else f"After {at}"
        ended = f"{after} {what}." if what else ""
        told = ended or end.silence(), unlogged, _often(timeouts.values())
        return " ".join(each for each in told if each)
    if what:
        return f"No step was finished: {f'after {phase} ' if phase else ''}{what}."
    if phase:
        at = f"the log ends after {phase}; its last line: {end.last.text.strip()[:_MESSAGE]}"
        return f"No step was finished: {at}"
    return end.silence()


class _End:
    """What the lines since the last step show."""

    def __init__(self) -> None:
        self._failures: list[_Failure] = []
        # By process: frames, and those of a call that waited for another process.
        self._frames: dict[int | None, list[_Frame]] = {}
        self._waited: dict[int | None, list[_Frame]] = {}
        self._debugger = False
        # All steps were finished.
        self.complete = False
        # The text by which it is known, and what that means.
        self._reason = "", ""
        # Lines of a log differ mostly in their numbers.
        self._shapes: set[str] = set()
        self._host = ""
        self._holders: dict[str, float] = {}
        self._collectives: dict[str, dict[str, int]] = {}
        # The last line, and the last one that is no request of an HTTP server.
        self._end = self.last = ConsoleLine("", 0)

    def take(self, line: ConsoleLine) -> None:
        """Take the next line."""
        if line.text.strip():
            self._end = line
            self.last = self.last if self.last.text and _REQUEST.search(line.text) else line
        self._debugger |= _DEBUGGER.match(line.text) is not None
        self.complete |= _COMPLETE in line.text or any(
            step >= steps for step, steps, _ in bars_in(line.text)
        )
        shape = _DIGITS.sub("", line.text)
        if not self._reason[0] and shape not in self._shapes:
            self._shapes.add(shape)
            self._reason = text_and_meaning(line.text)
        text = _ENGINE.sub("", line.text)
        frame, wrapped = _FRAME.match(text), _WRAPPED.match(text)
        if frame is not None:
            own = self._frames.setdefault(line.pid, [])
            own.append((frame["file"], frame["line"], frame["name"]))
        elif wrapped is not None:
            self._waited[line.pid] = self._frames.pop(line.pid, [])
        elif (error := _ERROR.match(text)) is not None:
            own = self._frames.pop(line.pid, []) or self._waited.pop(line.pid, [])
            at = max(reversed(own), key=_nearness, default=None)
            name = error["type"].rpartition(".")[2]
            self._failures.append(_Failure(name, error["message"] or "", at, line.process or ""))
        elif (named := _OBJECT.match(text)) is not None and self._failures:
            last = self._failures[-1]
            message = f"{last.message.rstrip('.')} ({named[1]})"
            self._failures[-1] = last._replace(message=message)
        elif (used := _USED.search(text)) is not None:
            self._host = f"{used['used']} GB of {used['all']} GB were used"
            self._holders.clear()
        elif (holder := _HOLDER.match(text)) is not None:
            who = holder["who"]
            self._holders[who] = self._holders.get(who, 0.0) + float(holder["gb"])
        elif (rank := _COLLECTIVE.search(text)) is not None:
            ranks = self._collectives.setdefault(rank["group"], {})
            ranks[rank["rank"]] = int(rank["enqueued"])

    def failure(self) -> str:
        """Return what ended the training; empty if the lines do not show it."""
        framed = [each for each in self._failures if each.at is not None] or self._failures
        text, meaning = self._reason
        what = "it failed" if text else ""
        if self._debugger:
            what = "it waits in a debugger (Pdb)"
        elif framed:
            name, message, at, process = framed[-1]
            what = f"it failed with {_failure(name, at, message)}"
            if before := _before(framed):
                what = f"{before}; then {what}"
            elif not text and _OF_REQUESTS.search(process):
                what = f"{_raised(framed, framed[-1])}; the log does not show that this ended the training"
        more = [*_apart(self._collectives)]
        if self._host:
            who = max(self._holders, key=self._holders.__getitem__, default=None)
            most = f", the most by {who} ({self._holders[who]:,.0f} GB)" if who else ""
            more.append(f"{self._host}{most}")
        elif text not in what:
            more.insert(0, f"{text} ({meaning})" if meaning else text)
        elif meaning:
            more.insert(0, meaning)
        return f"{what} ({'; '.join(more)})" if what and more else what

    def silence(self) -> str:
        """Return since when only HTTP servers printed anything, if for long; else empty."""
        at, until = (stamps_us(f"{each.before} {each.text}") for each in (self.last, self._end))
        if not at or not until or until[-1] - at[0] < _SILENT_S * 1e6:
            return ""
        return (
            f"For the last {seconds((until[-1] - at[0]) / 1e6)} of the log only HTTP servers printed lines; "
            f"the last other line: {self.last.text.strip()[:_MESSAGE]}"
        )


def _often(timeouts: Iterable[tuple[int, str]]) -> str:
    """Return the timeouts that are most, of lines by their number; empty if they are few."""
    times, raw = max(timeouts, default=(0, ""))
    shown = "".join(line.text.strip()[:_MESSAGE] for line in lines_of(raw, 0))
    return f"The log has {times:,} lines of timeouts such as: {shown}" if times >= _OFTEN else ""


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
    """Return what caused the last exception, or what was raised before by the user's code or often; else empty."""
    *others, last = failures
    causes = [each for each in others if _CAUSED.search(each.message) is None]
    if causes and _CAUSED.search(last.message) is not None:
        return _raised(causes[-1:], causes[-1])
    if last.at is not None and _is_own(last.at):
        return ""
    times = Counter((each.name, each.at) for each in others)
    ranked = [
        (_is_own(each.at), times[each.name, each.at], each)
        for each in others
        if each.at is not None and each.at != last.at
    ]
    own, most, one = max(ranked, key=lambda each: each[:2], default=(False, 0, last))
    return _raised(others, one) if own or most >= _OFTEN else ""


def _raised(failures: Sequence[_Failure], one: _Failure) -> str:
    """Return how often an exception was raised in one place."""
    times = sum((each.name, each.at) == (one.name, one.at) for each in failures)
    count = f" {times:,} times" if times > 1 else ""
    return f"{one.name} {_failure(f'was raised{count}', one.at, one.message)}"


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


def _nearness(frame: _Frame) -> int:
    """Return how near to the user a frame is: the user's code, then verl's and its engines'."""
    return 2 * _is_own(frame) + (_OF_TRAINING.search(frame[0]) is not None)


def _apart(collectives: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Name the ranks of each group that had begun fewer collectives than others, which waited for them."""
    for group, ranks in collectives.items():
        least, most = min(ranks.values()), max(ranks.values())
        behind = sorted((rank for rank, number in ranks.items() if number == least), key=int)
        if least < most:
            named = ", ".join(behind[:_NAMED]) + (", …" if behind[_NAMED:] else "")
            yield (
                f"in group {group} {'rank' if len(behind) == 1 else 'ranks'} {named} had begun {least:,} "
                f"collectives, others {most:,}"
            )
