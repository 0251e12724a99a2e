"""TransferQueue calls as JSON lines: one document a call or transfer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from verl_profiler.analysis.selection import Steps
from verl_profiler.analysis.tq import tq_calls, tq_transfers
from verl_profiler.reading.tables.tables import Tables

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Name in the document, column, and what to divide it by.
_SHARED = (
    ("run", "run", None),
    ("step", "step", None),
    ("process", "name", None),
    ("role", "role", None),
    ("function", "func", None),
    ("call", "call", None),
    ("trace_ids", "trace_ids", None),
    ("duration_s", "duration_us", 1e6),
    ("rows", "rows", None),
    ("sampled", "sampled", None),
)
_OF_CALLS = tuple((f"{stage}_s", f"{stage}_us", 1e6) for stage in ("get", "compute", "put"))
_OF_TRANSFERS = (
    ("operation", "event", None),
    ("size_bytes", "size_bytes", None),
    ("mib_per_s", "mib_per_s", None),
    *((name, name, None) for name in ("request_id", "sample", "session", "turn")),
)


def json_lines(tables: Tables, steps: Steps = None) -> Iterator[str]:
    """Give a line for every call and transfer, of what is known of it.

    `@timestamp` is when it ended, as everywhere in this package.
    """
    for kind, rows, own in (
        ("call", tq_calls(tables, steps), _OF_CALLS),
        ("transfer", tq_transfers(tables, steps), _OF_TRANSFERS),
    ):
        for row in rows:
            document: dict[str, Any] = {}
            moment_us = row["end_us"] if row["end_us"] is not None else row["begin_us"]
            if moment_us is not None:
                moment = _EPOCH + timedelta(microseconds=moment_us)
                document["@timestamp"] = moment.isoformat(timespec="microseconds")
            document["kind"] = kind
            for name, column, divisor in (*_SHARED, *own):
                value = row[column]
                if value is not None and value != []:
                    document[name] = value if divisor is None else value / divisor
            unfinished = row["duration_us"] is None
            document["status"] = "unfinished" if unfinished else row["status"] or "ok"
            yield json.dumps(document, separators=(",", ":")) + "\n"
