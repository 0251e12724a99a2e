"""The SQL that makes each table from `events` and `processes`: the files in `sql/`, one per group of tables.

A derivation may read the events, the processes and other derived tables, and gives at least the
columns of `SCHEMAS`, under the same names.  In the files, `CREATE TABLE` marks a table whose rows are
kept, `CREATE VIEW` one that is read from the events each time; `macros.sql` has what they share.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections.abc import Mapping
from functools import cache
from string import Template
from typing import NamedTuple

from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.reading.event_sql import RECORDED_EXTRA
from verl_profiler.reading.legacy_names import FIELD_ALIASES
from verl_profiler.reading.tables.schemas import FIELDS, NUMBER_LIMIT, SCHEMAS

# Times are rounded when they are written, ends and durations each, to milliseconds in some logs: an
# event may stick out of the one that contains it by so much.
NESTING_US = 2_000

# Clocks of different hosts: a request may end after the `gen` that waited for it by so much.
GEN_TOLERANCE_US = 50_000

# A call that ends so soon after a stall of its event loop had waited for the loop.
STALL_NOTICED_US = 50_000

# SQL of an event: a wait in a paused engine whose process had no probe of the end of pauses, so that its
# length is not known.
UNKNOWN_PAUSE = (
    "(event = 'engine_parked' AND (run, name) IN "
    "(SELECT (run, name) FROM processes WHERE NOT has_probe(header, 'engine_resume')))"
)

# Explanations that join on the step that dispatched a request hold for these runs only.
SYNCHRONOUS = "run NOT IN (SELECT run FROM asynchronous)"
# The time of a row of `engine_call_times` in the engine: decoding, or all of it where the engine reports no times.
IN_ENGINE = "coalesce(decode_us, undivided_us)"

_ANYWHERE = (
    *("tq_put", "tq_get", "tq_meta", "tq_clear"),
    *("load", "offload", "memory_release", "memory_resume"),
)
_INNERMOST = 1000
_FOLDER = importlib.resources.files("verl_profiler.reading.tables") / "sql"
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_STATEMENT = re.compile(r"^CREATE (TABLE|VIEW) (\w+) AS\n(.*?);$", re.MULTILINE | re.DOTALL)


class Derivation(NamedTuple):
    """How a table is made.

    Args:
        query: Its SQL.
        kept: Whether its rows are kept, or read from the events each time.
    """

    query: str
    kept: bool


def caused_wait(ends: str, group: str) -> str:
    """Return the SQL that charges the waiting of those that are done to those that are not.

    For the k-th of n to end, that is the sum over the gaps before its end of (number done) / (number
    not done).

    Args:
        ends: A table with `end_us` and `who`.
        group: Its columns, by which the waiting goes.
    """
    return f"""
    SELECT * EXCLUDE (gap_us), sum(gap_us * (place - 1) / (many - place + 1)) OVER (
            PARTITION BY {group} ORDER BY place
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS caused_wait_us
    FROM (
        SELECT *, row_number() OVER ordered AS place, count(*) OVER (PARTITION BY {group}) AS many,
            coalesce(end_us - lag(end_us) OVER ordered, 0) AS gap_us
        FROM {ends}
        WINDOW ordered AS (PARTITION BY {group} ORDER BY end_us, who)
    )
"""


def from_rest(name: str, of: str = "rest") -> str:
    """Return the SQL of a field of an event that is in a JSON object, under any of its names."""
    read = {
        "VARCHAR": "({}->>'{}')",
        "BIGINT": "integer_of({}, '{}')",
        "DOUBLE": "number_of({}, '{}')",
    }
    keys = (name, *FIELD_ALIASES.get(name, ()))
    return f"coalesce({', '.join(read[FIELDS[name]].format(of, key) for key in keys)})"


def _depth(event: str) -> int:
    parent = EVENTS[event].parent
    if event in _ANYWHERE:
        return _INNERMOST
    # A step may contain any timer of the trainer.
    return -(event == "step") if parent is None else 1 + max(_depth(parent), 0)


_WHEN = " ".join(f"WHEN '{name}' THEN {_depth(name)}" for name in EVENTS)
# SQL of how many events contain an event; what may be inside any other comes last.
DEPTH = f"CASE event {_WHEN} ELSE {_INNERMOST} END"


@cache
def macros() -> str:
    """Return the statements that a connection needs before any derivation."""
    return _read("macros.sql")


@cache
def derivations() -> Mapping[str, Derivation]:
    """Return how each table is made that is not read from files."""
    fields = ", ".join(f'{from_rest(name, "extra")} AS "{name}"' for name in FIELDS)
    # Each of the two may be given, and the other is made from it.
    found = {
        "event_fields": Derivation(f"SELECT *, {fields}, extra AS rest FROM events", kept=False),
        "events": Derivation(f"SELECT *, {RECORDED_EXTRA} AS extra FROM event_fields", kept=False),
    }
    for file in sorted(each.name for each in _FOLDER.iterdir()):
        for kind, name, query in _STATEMENT.findall(_read(file)):
            found[name] = Derivation(query, kept=kind == "TABLE")
    return found


@cache
def fingerprint() -> str:
    """Return what changes with any table's SQL or columns: a table may be made from others."""
    content = json.dumps([macros(), derivations(), SCHEMAS])
    return hashlib.sha256(content.encode()).hexdigest()


def _read(file: str) -> str:
    text = (_FOLDER / file).read_text(encoding="utf-8")
    return Template(_COMMENT.sub("", text)).substitute(
        number_limit=NUMBER_LIMIT,
        nesting_us=NESTING_US,
        gen_tolerance_us=GEN_TOLERANCE_US,
        stall_noticed_us=STALL_NOTICED_US,
        synchronous=SYNCHRONOUS,
        unknown_pause=UNKNOWN_PAUSE,
        caused_wait=caused_wait("ends", "run, step"),
        depth=DEPTH,
    )
