"""The step lines that verl prints, of every version from 0.3 to 0.9, as numbers by run and step.

    step:7 - actor/entropy:0.32 - timing_s/gen:10.2 - perf/throughput:np.float64(38.7)

verl prints `%.3f` up to 0.4 and what `pprint` makes of a value since 0.5.  A line may stand behind a
progress bar, be wrapped by a terminal, or be cut.  Logs of several launches in a row are separated:
a launch that begins above the first step of the one before resumes it, and what it did again
counts; one that does not is a run of its own.  Lines of trainers that ran at once, by Ray's process
ids, are of different runs.  Files of other loggers (`metric_files`) and the `perf` lines of slime are
read as such lines.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from verl_profiler.reading.formats.console_log import (
    STDIN,
    ConsoleLine,
    console_lines,
    file_lines,
    lines_of,
    stamps_us,
)
from verl_profiler.reading.formats.metric_files import BOARD, metric_rows
from verl_profiler.reading.problems import Problems

__all__ = [
    "FAMILIES",
    "LoggedRun",
    "StepLine",
    "bars_in",
    "logged_runs",
    "step_lines",
]

# The metrics that are kept, by the beginning of their names.
FAMILIES = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/",
    "response_length/",
    "training/off_policy/",
    "fully_async/",
    "trainer/idle_ratio",
    "rollouter/idle_ratio",
    "train/num_gen_batches",
)

_VALIDATION = ("val-", "val/")
_STEP = re.compile(r"(?<![\w/@.\-])step:(?P<step>\d{1,9})(?= -|\s*$)")
_BETWEEN = " - "
_TIMER = "timing_s/"
_STEP_TIMER = f"{_TIMER}step"
_PERF = "perf "
_DRAWN = "Training Progress:"
_SLIME = re.compile(r"(?<![\w/])perf (?P<step>\d{1,9}): (?P<values>\{[^{}]*'perf/[^{}]*\})")
# tqdm's line, which verl's trainers draw after each step: steps, all steps, time since the launch.
_BAR = re.compile(
    r"Training Progress: [^|\r\n]{1,9}\|[^|\r\n]*\| (\d{1,9})/(\d{1,9}) \[([\d:]{4,12})<"
)
# The block that W&B prints at the end; without a console logger it has the only step.
_SUMMARY = "wandb: Run summary"
_SUMMARIZED = re.compile(r"wandb: +(?P<name>\S+) (?P<value>[-+]?[\d.]+(?:e[-+]?\d+)?)$")
_STEP_NAMES = ("training/global_step", "global_step", "_step")
# slime's step is its waiting and its training; all other timers are parts of these.
_OF_SLIME = ("step", "train_wait", "train")
_ROLLOUT = f"{_TIMER}slime/rollout"

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
_VALUE = (
    rf"(?:(?:np|numpy)\.\w+\((?P<wrapped>{_NUMBER}|True|False)\)|(?P<plain>{_NUMBER})"
    r"|(?:np\.)?(?P<truth>True|False)_?)"
)
_METRIC = re.compile(rf"(?P<name>\S.*?):{_VALUE}\s*")
# The last value of a line, with what another writer put right behind it.
_GLUED = re.compile(rf"(?P<name>[\w/@.()+\-]+):{_VALUE}(?=[^\w.]|[A-Z])")
# A metric whose line ends before its value does.
_WORDS = "|".join(
    word[:end] for word in ("nan", "inf", "True", "False") for end in range(1, len(word))
)
_BEGUN = re.compile(
    rf"[\w/@.()+\-]*|[\w/@.()+\-]+:(?:[-+]?(?:[\d.]*(?:[eE][-+]?)?|{_WORDS})"
    rf"|np|np\.\w*|np\.\w+\((?:{_NUMBER})?[eE.+\-]*)"
)
_ROUNDED = re.compile(r"[-+]?\d+\.\d{3}|nan|inf|[-+]inf")
# No quantity of a training is larger; beyond it, sums of squares would overflow.
_LARGEST = 1e100
# Characters of a line that is shown.
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step, as printed in the console.

    Args:
        step: verl's `global_steps`.
        values: Numbers by metric, of `FAMILIES` only.
        source: The file.
        number: The line in it.
        pid: Of the trainer's process, where Ray prints it.
        validated: The line has results of a validation, or the time that one took.
        rounded: Every number has three decimals, as verl prints them up to 0.4.
        partial: A timer of the line is not a number.
        printed_s: When it was printed: the time of day before it, or the time since the launch that the
            trainer's progress bar has after it.
        run: Its name, in files that have several.
    """

    step: int
    values: dict[str, float]
    source: Path
    number: int
    pid: int | None = None
    validated: bool = False
    rounded: bool = False
    partial: bool = False
    printed_s: float | None = None
    run: str = ""

    @property
    def trained(self) -> bool:
        """The line has timers; one without is that of a validation before training."""
        return any(name.startswith("timing_s/") for name in self.values)


@dataclass(frozen=True)
class LoggedRun:
    """The steps of one training, from one launch or several.

    Args:
        label: The file's name, and a number where it holds several runs.
        lines: One per step, in order.
        begins: The first step of each launch.
        source: The file in which the run begins.
    """

    label: str
    lines: Sequence[StepLine]
    begins: Sequence[int]
    source: Path

    @property
    def of_slime(self) -> bool:
        """The lines are slime's, which this package does not record."""
        return any(name.startswith(f"{_TIMER}slime/") for name in self.lines[0].values)


def logged_runs(paths: Iterable[Path], problems: list[str]) -> list[LoggedRun]:
    """Read the runs of console logs.

    Args:
        paths: In the order in which they were written; `-` for standard input.
        problems: Takes sentences about what could not be read, and about what was left out.

    Returns:
        The runs that have at least one step with timers.

    Raises:
        ReadingError: A file cannot be read.
    """
    runs: list[LoggedRun] = []
    lines: list[StepLine] = []
    for path in paths:
        read = list(step_lines(path, problems))
        if not any(line.values for line in read):
            problems.append(f"{_name(path)}: {_no_timers(path, read)}")
        lines += read
    for each in _at_once(lines):
        runs += _runs(_launches(each, problems), problems)
    return _labeled(runs)


def step_lines(path: Path, problems: list[str]) -> Iterator[StepLine]:
    """Read the step lines of one log, in the order in which they stand there.

    Args:
        path: A text or gzip file; `-` for standard input.
        problems: Takes sentences about what could not be read, once all lines were taken.

    Raises:
        ReadingError: The file cannot be read.
    """
    last: StepLine | None = None
    for each in _lines_and_bars(path, problems):
        if isinstance(each, StepLine):
            if last is not None:
                yield last
            last = each
        elif last is not None and last.step == each[0] and last.printed_s is None:
            last = replace(last, printed_s=each[2])
    if last is not None:
        yield last


def _lines_and_bars(path: Path, problems: list[str]) -> Iterator[StepLine | tuple[int, ...]]:
    """Read the step lines, and what the progress bars between them have: step, steps and time."""
    rows = metric_rows(path, problems)
    if rows is not None:
        yield from (
            _of_metrics(StepLine(step, {}, path, number, run=run), values)
            for number, run, step, values in rows
        )
        return
    found = Problems()
    current: _Text | None = None
    printed = False
    summary: dict[str, float] | None = None
    summary_at = 0
    # slime's rollouts have lines of their own, before those of their steps.
    rollouts: dict[int, float] = {}
    for number, raw in file_lines(path, problems):
        if _SUMMARY in raw:
            summary, summary_at = {}, number
        if summary is not None and "wandb: " in raw:
            metrics = (_SUMMARIZED.search(line.text) for line in lines_of(raw, number))
            summary |= {each["name"]: float(each["value"]) for each in metrics if each is not None}
        stepped = current is not None or "step:" in raw or _PERF in raw
        for line in lines_of(raw, number) if stepped else ():
            slime = _SLIME.search(line.text) if _PERF in line.text else None
            if slime is not None:
                printed = True
                at = StepLine(int(slime["step"]), {}, path, number, line.pid)
                values = _of_slime(slime["values"])
                if values.keys() == {_ROLLOUT}:
                    rollouts[at.step] = values[_ROLLOUT]
                else:
                    rollout = {_ROLLOUT: rollouts[at.step]} if at.step in rollouts else {}
                    yield _of_metrics(at, rollout | values)
                continue
            match = _STEP.search(line.text)
            if match is None and current is not None and current.continued(line):
                continue
            if current is not None:
                yield from current.read(path, found)
                current = None
            if match is not None:
                printed = True
                current = _Text(int(match["step"]), line, line.text[match.end() :])
        yield from bars_in(raw)
    if current is not None:
        yield from current.read(path, found)
    step = next((summary[name] for name in _STEP_NAMES if summary and name in summary), None)
    if not printed and summary and (step is not None or f"{_TIMER}gen" in summary):
        yield _of_metrics(StepLine(int(step or 1), {}, path, summary_at), summary)
        known = "" if step is not None else ", without its number"
        found.add(
            "summaries.",
            f"{_name(path)} has no step lines; W&B's summary has the last step{known}.",
        )
    problems += found.sentences()


def _of_metrics(line: StepLine, values: Mapping[str, float]) -> StepLine:
    return replace(
        line,
        values={
            name: value
            for name, value in values.items()
            if name.startswith(FAMILIES) and abs(value) <= _LARGEST
        },
        validated=f"{_TIMER}testing" in values or any(map(_is_validation, values)),
    )


def _of_slime(text: str) -> dict[str, float]:
    """Read the times of a line of slime (slime/observability/); its step is waiting and training."""
    try:
        content = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    values: dict[str, float] = {}
    pairs = cast("dict[Any, Any]", content).items() if isinstance(content, dict) else ()
    for name, value in pairs:
        if str(name).startswith("perf/") and str(name).endswith("_time"):
            timer = str(name).removeprefix("perf/").removesuffix("_time")
            part = "" if timer in _OF_SLIME else "slime/"
            if isinstance(value, int | float):
                values[f"{_TIMER}{part}{timer}"] = float(value)
    return values


class _Text:
    """The text of a step line while it is put together."""

    def __init__(self, step: int, line: ConsoleLine, text: str) -> None:
        self.step = step
        self.line = line
        self.text = text
        self.whole = line.whole
        self.wraps = 0
        self.width = len(line.text)
        self.quoted = (line.before or line.text).lstrip().startswith(">")
        self.printed_s = next((us / 1e6 for us in stamps_us(line.before)), None)

    def continued(self, line: ConsoleLine) -> bool:
        """Take a line as the rest of this one, if that is what it must be."""
        if line.pid is not None or not line.text.strip():
            return False
        text = line.text
        if self.quoted:
            text = text.removeprefix(">").removeprefix(" ")
        open_end = self.text.rpartition(_BETWEEN)[2]
        for joint in ("", " "):
            joined = (open_end + joint + text).removesuffix(_BETWEEN[:-1])
            metrics = [part for part in joined.split(_BETWEEN) if part]
            if _fits(metrics) and (
                len(metrics) > 1
                or not _METRIC.fullmatch(open_end)
                or (self.wraps and len(line.text) <= self.width)
            ):
                self.text += joint + text
                self.whole = line.whole
                self.wraps += 1
                return True
        return False

    def read(self, path: Path, problems: Problems) -> Iterator[StepLine]:
        """Read the numbers."""
        where = f"{_name(path)}, line {self.line.number}: step {self.step}"
        values: dict[str, float] = {}
        validated, rounded, partial, numbers = False, True, False, 0
        metrics = list(_metrics(self.text))
        for place, metric in enumerate(metrics):
            last = place == len(metrics) - 1
            match = _METRIC.fullmatch(metric) or (_GLUED.match(metric) if last else None)
            if last and (match is None or not self.whole):
                problems.add(
                    "truncated lines.",
                    f"{where} is truncated at {metric[-60:]!r}; the rest is unknown.",
                )
                if match is None or match["wrapped"] is None:
                    continue
            if match is None:
                problems.add(
                    "values that are not numbers.", f"{where}: {metric[:80]!r} is not a number."
                )
                continue
            name = match["name"].replace("timing_s/timing_s/", "timing_s/")
            validated |= _is_validation(name) or name == f"{_TIMER}testing"
            numbers += 1
            rounded &= bool(_ROUNDED.fullmatch(match["plain"] or ""))
            if name.startswith(FAMILIES):
                value = _number(match)
                if abs(value) <= _LARGEST:
                    values[name] = value
                else:
                    partial |= name.startswith(_TIMER)
                    problems.add("values that are not quantities.", f"{where}: {name} is {value}.")
        if numbers:
            own = validated, rounded, partial, self.printed_s
            yield StepLine(self.step, values, path, self.line.number, self.line.pid, *own)


def _metrics(text: str) -> Iterator[str]:
    """Split a line into `name:value`; a name may hold the separator."""
    carried = ""
    for metric in text.split(_BETWEEN):
        if ":" in metric:
            if carried and metric.startswith(FAMILIES):
                yield carried.removesuffix(_BETWEEN)
                carried = ""
            yield carried + metric
            carried = ""
        elif carried or metric.strip():
            carried += metric + _BETWEEN
    if carried:
        yield carried.removesuffix(_BETWEEN)


def _fits(metrics: Sequence[str]) -> bool:
    *complete, last = metrics
    return all(_strict(metric) for metric in complete) and bool(
        _strict(last) or _BEGUN.fullmatch(last)
    )


def _strict(metric: str) -> bool:
    match = _METRIC.fullmatch(metric)
    return match is not None and not re.search(r"[\s:]", match["name"])


def bars_in(text: str) -> list[tuple[int, ...]]:
    """Return what the trainer's progress bars in a text have: step, steps, and seconds since the launch."""
    found: list[tuple[str, ...]] = _BAR.findall(text) if _DRAWN in text else []
    return [tuple(map(_seconds_of, each)) for each in found]


def _seconds_of(time: str) -> int:
    """Return a number, or the seconds of `1:02:10`."""
    return functools.reduce(lambda total, part: total * 60 + int(part), time.split(":"), 0)


def _is_validation(name: str) -> bool:
    return name.startswith(_VALIDATION)


def _number(match: re.Match[str]) -> float:
    text = match["wrapped"] or match["plain"] or match["truth"]
    return float(text == "True") if text in ("True", "False") else float(text)


def _at_once(lines: Sequence[StepLine]) -> list[list[StepLine]]:
    """Separate runs that have names, and trainers that logged whole steps in turns."""
    trainers = [(line.run, line.pid) for line in lines if _STEP_TIMER in line.values]
    turns = [
        each for each, before in zip(trainers, [None, *trainers], strict=False) if each != before
    ]
    several = {each for each in turns if turns.count(each) > 1}
    if not several and len({line.run for line in lines}) < 2:
        return [list(lines)]
    found: dict[tuple[str, int | None], list[StepLine]] = {}
    for line in lines:
        # A process that logs no step belongs to whatever run logged last.
        key = (
            (line.run, line.pid)
            if (line.run, line.pid) in trainers
            else next(reversed(found), None)
        )
        if key is not None:
            found.setdefault(key, []).append(line)
            found[key] = found.pop(key)
    order = list(dict.fromkeys(trainers))
    return [found[key] for key in order if key in found]


def _launches(lines: Sequence[StepLine], problems: list[str]) -> list[list[StepLine]]:
    """Cut the lines where a new launch begins; leave out lines that stand there twice."""
    launches: list[list[StepLine]] = [[]]
    last: StepLine | None = None
    twice = 0
    for place, line in enumerate(lines):
        current = launches[-1]
        if any(
            line.trained and line.step == earlier.step and line.values == earlier.values
            for earlier in current[-2:]
        ):
            twice += 1
            continue
        if last is not None and current:
            same_process = None in (line.pid, last.pid) or line.pid == last.pid
            after = lines[place + 1] if place + 1 < len(lines) else None
            # Without a process, a validation of an earlier step may begin a launch that resumes there.
            known = line.pid is not None or bool(line.values) or line.step == last.step
            known = known or after is None or after.step > last.step
            # What a process logs that logs no steps is of the step that it names.
            same_process |= not line.trained and not line.validated and bool(line.values)
            index = _index_of(line, current) if same_process and known else None
            if index is not None:
                current[index] = _together(current[index], line)
                last = current[-1]
                continue
            back = line.step <= last.step if line.trained else line.step < last.step
            if back or not same_process:
                launches.append([])
                last = None
        launches[-1].append(line)
        if line.trained:
            last = line
    if twice:
        problems.append(f"{twice} step line{'s' * (twice > 1)} occur twice; each is counted once.")
    return launches


def _index_of(line: StepLine, launch: Sequence[StepLine]) -> int | None:
    """Return where a launch has the step of a line that adds to it, perhaps after later steps."""
    for index in range(len(launch) - 1, -1, -1):
        if launch[index].step == line.step:
            return None if line.values.keys() & launch[index].values else index
    return None


def _together(line: StepLine, more: StepLine) -> StepLine:
    """Add what a second line has of the same step, such as its validation or a user's metrics."""
    return replace(
        line,
        values={**line.values, **more.values},
        validated=line.validated or more.validated,
        printed_s=line.printed_s if more.printed_s is None else more.printed_s,
    )


def _runs(launches: Iterable[list[StepLine]], problems: list[str]) -> list[LoggedRun]:
    """Put launches that resume the one before together."""
    runs: list[tuple[list[StepLine], list[int]]] = []
    for launch in launches:
        trained = [line for line in launch if line.trained]
        if not trained:
            continue
        first = trained[0]
        if runs and first.step > runs[-1][1][0]:
            lines, begins = runs[-1]
            replaced = [line.step for line in lines if line.step >= first.step]
            lines[:] = [line for line in lines if line.step < first.step]
            begins[:] = [step for step in begins if step < first.step]
            where = (
                f"{_name(first.source)}, line {first.number}: training resumes at step {first.step}"
            )
            problems.append(
                f"{where}; what was logged earlier for {_steps(replaced)} was repeated and is not shown."
                if replaced
                else f"{where}."
            )
        else:
            lines, begins = list[StepLine](), list[int]()
            runs.append((lines, begins))
        lines += trained
        begins.append(first.step)
    return [LoggedRun("", lines, begins, lines[0].source) for lines, begins in runs]


def _labeled(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Name each run after its file; number those of the same name."""
    stems = [_stem(run.source) for run in runs]
    several = Counter(stems)
    seen: Counter[str] = Counter()
    labeled: list[LoggedRun] = []
    for run, stem in zip(runs, stems, strict=True):
        seen[stem] += 1
        label = f"{stem}-{seen[stem]}" if several[stem] > 1 else stem
        labeled.append(LoggedRun(label, run.lines, run.begins, run.source))
    return labeled


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _no_timers(path: Path, read: Sequence[StepLine]) -> str:
    if not read and BOARD in path.name:
        return "there are no scalars of steps in it; name the file that trainer.logger=[tensorboard] wrote."
    if not read:
        written = (line.text.strip() for line in console_lines(path, []))
        last = next(iter(deque(filter(None, written), maxlen=1)), None)
        end = "it is empty." if last is None else f"its last line: {last[:_SHOWN]}"
        return f"there is no line `step:N - …` in it, as verl prints one per step; {end}"
    return (
        f"its {len(read)} step line{'s have' if len(read) > 1 else ' has'} no timers (timing_s/…); "
        "a validation before training has none, and neither has supervised fine-tuning."
    )


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


def _stem(path: Path) -> str:
    if path == STDIN:
        return "stdin"
    if BOARD in path.name:
        return path.absolute().parent.name
    name = path.name.removesuffix(".gz")
    return name.rpartition(".")[0] or name
