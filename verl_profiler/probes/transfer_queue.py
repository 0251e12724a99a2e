"""TransferQueue's client: every put, get and question, with bytes.

All of TransferQueue's interfaces, synchronous ones too, end in these coroutines of the class
(TransferQueue 0.1.11 client.py); the synchronous ones run on the client's own loop thread.
"""

from __future__ import annotations

import functools
from typing import Any

from verl_profiler.events.json_values import is_list, is_tuple
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.batch_sizes import tensors_of
from verl_profiler.probes.values import plain
from verl_profiler.recording.call import Call

_probe = of_family("transfer_queue")

_CLIENT = "transfer_queue.client:AsyncTransferQueueClient"


def _fields_of(data: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    fields = getattr(data, "_tensordict", None)
    if fields is not None:
        extra["size_bytes"], others = tensors_of(data)
        extra["fields"] = len(fields)
        if others:
            extra["untensored_fields"] = others
    shape = getattr(data, "batch_size", None)
    if shape:
        extra["rows"] = int(shape[0])
    return extra


def _partition(metadata: Any, fallback: Any = None) -> dict[str, Any]:
    partitions = getattr(metadata, "partition_ids", None)
    name = partitions[0] if partitions else fallback
    return {} if name is None else {"partition": plain(name)}


def _begin_put(call: Call) -> None:
    arguments = call.arguments
    call.extra = {
        **_fields_of(arguments["data"]),
        **_partition(arguments.get("metadata"), arguments.get("partition_id")),
    }


def end_get(call: Call, result: Any) -> None:
    """Take the fields of a get from its result."""
    call.extra = {**_fields_of(result), **_partition(call.arguments["metadata"])}


def _count_rows(call: Call) -> None:
    arguments = call.arguments
    extra = call.extra = call.extra or {}
    keys = arguments.get("keys") or arguments.get("global_indexes")
    if is_list(keys) or is_tuple(keys):
        extra["rows"] = len(keys)
    size = getattr(arguments.get("metadata"), "size", None)
    if isinstance(size, int):
        extra["rows"] = size


def _begin_query(op: str, call: Call) -> None:
    call.extra = {"op": op}
    _count_rows(call)


_QUERIES = ("get_meta", "set_custom_meta", "kv_retrieve_meta", "kv_retrieve_keys", "kv_list")

PROBES = (
    _probe("tq_put", f"{_CLIENT}.async_put", reads=("data",), enter=_begin_put),
    _probe("tq_get", f"{_CLIENT}.async_get_data", reads=("metadata",), leave=end_get),
    *(
        _probe(
            "tq_meta",
            f"{_CLIENT}.async_{op}",
            enter=functools.partial(_begin_query, op),
            optional=True,
        )
        for op in _QUERIES
    ),
    *(
        _probe("tq_clear", f"{_CLIENT}.async_{op}", enter=_count_rows)
        for op in ("clear_samples", "clear_partition")
    ),
)
