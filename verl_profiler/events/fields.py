"""Every field of events, headers and captures, from `fields.md`: type, unit, events and one sentence.

The reader's columns, the schemas of tables and the site's list of fields come from these tables, and
tests compare them with what is recorded.  Both halves may import this; it needs no other package.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_profiler.events.vocabulary import TABLES, contract


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        type: As JSON has it: string, integer, number, boolean, list or object.  Headers
            have null where a value is unknown or does not apply; events leave the key out.
        unit: Of numbers, which are then not negative; empty for counts, names and flags.
        doc: One sentence: what it is, and where it is from.
        events: The events that have it; of `FIELDS` only.
        column: Whether the reader makes a column of it; for fields of frequent events.
    """

    type: str
    unit: str
    doc: str
    events: tuple[str, ...] = ()
    column: bool = False


def fields_in(rows: list[list[str]]) -> dict[str, Field]:
    """Return the fields of a table's rows: name, type, unit and sentence."""
    return {name.strip("`"): Field(kind, unit, doc) for name, kind, unit, doc in rows}


_HEADERS, _LINES, _ANY, _OWN, _CAPTURES = (
    rows for heading, rows in contract(TABLES).items() if heading != "Events"
)
# processes/<name>.json; keys of objects with dots between.
HEADER = fields_in(_HEADERS)
# The keys of a line.
LINE = fields_in(_LINES)
# Keys of `extra` that any event may have.
IDENTITY = fields_in(_ANY)
# Keys of `extra` by name: what it is, and the events that have it.
FIELDS = {
    name.strip("`"): Field(kind, unit, doc, tuple(events.split("`")[1::2]), bool(column))
    for name, kind, unit, column, events, doc in _OWN
}
# nsight/captures.json, nsight/<capture>.json and nsight/journal/*.jsonl.
CAPTURE = fields_in(_CAPTURES)


def fields_of(event: str) -> tuple[str, ...]:
    """Return the keys of `extra` that an event has besides the identity."""
    return tuple(name for name, field in FIELDS.items() if event in field.events)
