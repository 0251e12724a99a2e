"""The metrics of a training from the files of other loggers, as the step lines of a console.

{"step": 7, "data": {"timing_s/gen": 10.2}}          verl's `file` logger
{"_step": 7, "timing_s/gen": 10.2}                   W&B's history, and its wandb-summary.json
_step,timing_s/gen,timing_s/step                     the same as CSV; `step` of others
Step,my-run - timing_s/gen,my-run - timing_s/step    CSV of a W&B panel: a run per beginning
run_id,key,value,step                                MLflow's metrics, one value per row
Wall time,Step,Value                                 TensorBoard's CSV, one metric per file
events.out.tfevents.*                                TensorBoard's own file
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from verl_profiler.errors import ReadingError
from verl_profiler.reading.formats.console_log import file_lines

# In the names of TensorBoard's files.
BOARD = ".tfevents."

_STEPS = ("_step", "step", "global_step", "training/global_step", "trainer/global_step")
_PANEL = " - "
# W&B adds these columns to those of a panel.
_BOUNDS = ("__MIN", "__MAX")
# SwanLab adds a column of times to each metric.
_TIMES = "_timestamp"
_FAMILY = "timing_s/"
_SCALAR = ["wall time", "step", "value"]
# TensorBoard writes the metric's `/` as `_` into the name of the file.
_TAG = re.compile(
    r"(?P<family>timing_s|timing_per_token_ms|perf)[_/](?P<metric>[\w.-]+?)(?: ?\(\d+\))?\.csv"
)
# A JSON object over more lines than this is a trace, not a summary.
_MOST_LINES = 10_000
_PARTS = re.compile(r"^agent_loop_(generate_sequences|tool_calls|compute_score|slowest)_")

# Of each line: its number in the file, the run (empty where the file has one), the step, the numbers.
MetricRow = tuple[int, str, int, dict[str, float]]


def metric_rows(path: Path, problems: list[str]) -> Iterator[MetricRow] | None:
    """Read a file of metrics.

    Args:
        path: A file, also compressed with gzip; read from its beginning.
        problems: Takes sentences about what could not be read.

    Returns:
        The number of the line, the run, the step and its metrics of each row, in the order of the
        file; None for a file that is none of these, such as a console log.

    Raises:
        ReadingError: The file cannot be read.
    """
    if BOARD in path.name:
        return _board_rows(path)
    lines = file_lines(path, [])
    number, first = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    head = first.strip().removeprefix("\ufeff")
    if head.startswith("{"):
        content = _object(head) if head != "{" else _small(path)
        return _json_rows(path, problems) if content is not None and _is_step(content) else None
    names = _names(head)
    tag = _TAG.search(path.name)
    if tag is not None and [name.lower() for name in names] == _SCALAR:
        metric = _PARTS.sub(r"agent_loop/\1/", tag["metric"])
        return _wide_rows(path, number, [*names[:2], f"{tag['family']}/{metric}"], problems)
    if {"key", "value", "step"} <= set(names):
        return _long_rows(path, number, names, problems)
    if any(map(_is_step_name, names)) and any(_FAMILY in name for name in names):
        return _wide_rows(path, number, names, problems)
    return None


def _json_rows(path: Path, problems: list[str]) -> Iterator[MetricRow]:
    whole = _small(path)
    objects: Iterable[tuple[int, dict[str, Any] | None]] = (
        [(1, whole)]
        if whole is not None
        else (
            (number, _object(line)) for number, line in file_lines(path, problems) if line.strip()
        )
    )
    unread = 0
    for number, content in objects:
        data = _metrics(content) if content is not None else None
        step = _step(content) if content is not None else None
        if data is None or step is None:
            unread += 1
            continue
        yield number, "", step, _numbers(data)
    if unread:
        problems.append(f"{path}: {unread} lines are not metrics of a step.")


def _board_rows(path: Path) -> Iterator[MetricRow]:
    """Read the scalars of TensorBoard's events.

    Raises:
        ReadingError: The file cannot be read, or tensorboard is not installed.
    """
    next(file_lines(path, []), None)
    try:
        # Modules without types.
        loading: Any = importlib.import_module(
            "tensorboard.backend.event_processing.event_file_loader"
        )
        tensors: Any = importlib.import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise ReadingError(
            f"{path} is a file of TensorBoard, which is not installed.\n"
            "pip install tensorboard, or read it where verl is installed",
            "no-tensorboard",
        ) from error
    steps: dict[int, dict[str, Any]] = {}
    for event in loading.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                steps.setdefault(event.step, {})[value.tag] = tensors.make_ndarray(value.tensor)
    for number, (step, values) in enumerate(steps.items(), 1):
        yield number, "", step, _numbers(values)


def _wide_rows(
    path: Path, head: int, names: Sequence[str], problems: list[str]
) -> Iterator[MetricRow]:
    unread = 0
    step = next(filter(_is_step_name, names))
    for number, row in _csv_rows(path, head, names, problems):
        at = _whole(row.get(step))
        if at is None:
            unread += 1
            continue
        runs: dict[str, dict[str, Any]] = {}
        for name, value in row.items():
            if name is None or name == step or name.endswith((*_BOUNDS, _TIMES)):
                continue
            before, between, metric = name.rpartition(_PANEL)
            runs.setdefault(before if between else "", {})[metric] = value
        for run, values in runs.items():
            numbers = _numbers(values)
            if numbers:
                yield number, run, at, numbers
    if unread:
        problems.append(f"{path}: {unread} rows have no step.")


def _long_rows(
    path: Path, head: int, names: Sequence[str], problems: list[str]
) -> Iterator[MetricRow]:
    found: dict[tuple[str, int], tuple[int, dict[str, float]]] = {}
    for number, row in _csv_rows(path, head, names, problems):
        at, values = _whole(row.get("step")), _numbers({row.get("key") or "": row.get("value")})
        if at is not None:
            found.setdefault((row.get("run_id") or "", at), (number, {}))[1].update(values)
    for (run, at), (number, values) in sorted(found.items()):
        yield number, run, at, values


def _csv_rows(
    path: Path, head: int, names: Sequence[str], problems: list[str]
) -> Iterator[tuple[int, Mapping[str | None, Any]]]:
    lines: Iterable[str] = (line for number, line in file_lines(path, problems) if number > head)
    reader = csv.DictReader(lines, names)
    try:
        for row in reader:
            yield reader.line_num + head, row
    except csv.Error as error:
        problems.append(
            f"{path}: line {reader.line_num + head} is not CSV ({error}); the rest is not read."
        )


def _small(path: Path) -> dict[str, Any] | None:
    """Return the object of a file that is one, such as wandb-summary.json; None if it is large."""
    lines = [line for _, line in itertools.islice(file_lines(path, []), _MOST_LINES + 1)]
    return _object("".join(lines)) if len(lines) <= _MOST_LINES else None


def _is_step(content: Mapping[str, Any]) -> bool:
    names = _metrics(content) or {}
    return _step(content) is not None and any(name.startswith(_FAMILY) for name in names)


def _metrics(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the metrics of a step: verl's logger has them in `data`."""
    data = content.get("data", content)
    return cast("Mapping[str, Any]", data) if isinstance(data, dict) else None


def _is_step_name(name: str) -> bool:
    return name in _STEPS or name.lower() == "step"


def _names(head: str) -> list[str]:
    try:
        return next(csv.reader([head]), list[str]())
    except csv.Error:
        return []


def _object(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", content) if isinstance(content, dict) else None


def _step(content: Mapping[str, Any]) -> int | None:
    return next((at for name in _STEPS if (at := _whole(content.get(name))) is not None), None)


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    return {
        str(name): number
        for name, value in values.items()
        if (number := _number(value)) is not None
    }


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
