"""Which data a call works on: one id per batch of samples that was submitted together.

verl 0.9 attaches a partition and a global step to every sample where it makes it, as tags that
TransferQueue passes on to all processes.  The id is made of these two and the run's name, so it is
the same wherever the samples turn up, and nothing is added to them.  Ids that a user attached,
as a tag of the samples or as `extra_info` (`meta_info` of a DataProto), come first.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import contains, itemgetter
from typing import Any, NamedTuple

from verl_profiler.events.json_values import mapping_or_empty

# By name: the classes exist twice in verl (a stand-in where TransferQueue is not installed).
_META_CLASSES = ("KVBatchMeta", "BatchMeta")
_UNPRINTABLE = re.compile(r"[\s|,]+")
_OF_STEP = re.compile(r"_(\d+)$")
_SHOWN = 8

_run = ""


class Origin(NamedTuple):
    """Where the samples of one call come from.

    Args:
        ids: The trace ids, those of the first samples first.
        step: The newest global step that one of them was submitted in.
        rows: How many samples there are.
    """

    ids: tuple[str, ...] = ()
    step: int | None = None
    rows: int | None = None

    @property
    def text(self) -> str:
        """Return the ids as a line shows them: `N/A`, or up to eight with commas between."""
        if not self.ids:
            return "N/A"
        shown = ",".join(self.ids[:_SHOWN])
        return shown if len(self.ids) <= _SHOWN else f"{shown},+{len(self.ids) - _SHOWN}"


def set_run(run: str) -> None:
    """Take the run's name, which is in every id."""
    global _run
    _run = run
    of_batch.cache_clear()


@lru_cache(4096)
def of_batch(partition: str, step: int | None) -> str:
    """Return the id of what was submitted for a partition in a global step."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{_run}/{partition}/{step}"))


def find_meta(values: Iterable[Any]) -> Any:
    """Return the first of the values that is TransferQueue's metadata of a batch, or None."""
    for value in values:
        if type(value).__name__ in _META_CLASSES:
            return value
    return None


def origin_of(meta: Any) -> Origin:
    """Say where the samples of a KVBatchMeta or BatchMeta come from."""
    rows = getattr(meta, "size", None)
    rows = rows if isinstance(rows, int) else None
    extra_info = mapping_or_empty(getattr(meta, "extra_info", None))
    own = extra_info.get("trace_id")
    tags = getattr(meta, "tags", None) or getattr(meta, "custom_meta", None) or ()
    partition, newest = _partition_of(meta, extra_info)
    named, steps = _look_through(tags)
    ids = [_printable(name) for name in named]
    if partition is not None:
        ids += [of_batch(str(partition), step) for step in steps if step is not None]
    # verl 0.6 and 0.7.0 have no tags; they open a partition a step, `train_3`.
    of_step = _OF_STEP.search(str(partition))
    if own is not None:
        ids = [_printable(own)]
    elif not ids and of_step:
        ids = [of_batch(str(partition), None)]
    if newest is None and of_step:
        newest = int(of_step[1])
    known = [step for step in (*steps, newest) if isinstance(step, int)]
    return Origin(tuple(ids), max(known, default=None), rows)


def _look_through(tags: Sequence[Mapping[str, Any]]) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return the trace ids in the tags, and the global steps of those without; each once."""
    # A batch has a thousand tags, nearly always of one step and without ids: no loop in Python.
    named: dict[Any, None] = {}
    if any(map(contains, tags, repeat("trace_id"))):
        named = dict.fromkeys(tag["trace_id"] for tag in tags if "trace_id" in tag)
        tags = [tag for tag in tags if "trace_id" not in tag]
    try:
        return named, dict.fromkeys(map(itemgetter("global_steps"), tags))
    except KeyError:
        return named, dict.fromkeys(tag.get("global_steps") for tag in tags)


def _partition_of(meta: Any, extra_info: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the partition, and the global step where the metadata itself has it."""
    step = extra_info.get("global_steps")
    samples = getattr(meta, "samples", None)
    if not samples:
        partitions = getattr(meta, "partition_ids", None)
        return (partitions[0] if partitions else getattr(meta, "partition_id", None)), step
    # Up to TransferQueue 0.1.5.  The first release has steps in place of partitions.
    partition = getattr(samples[0], "partition_id", None)
    if partition is None:
        step = getattr(samples[0], "global_step", step)
        partition = f"{'val' if extra_info.get('validate') else 'train'}_{step}"
    return partition, step


def _printable(name: Any) -> str:
    return _UNPRINTABLE.sub("_", str(name)) or "N/A"
