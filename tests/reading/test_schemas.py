"""The schemas of tables take what they state about fields from the contract."""

import re

from verl_profiler.events.fields import FIELDS
from verl_profiler.reading.tables import schemas

UNITS = {"w": "W", "j": "J", "mhz": "MHz", "c": "°C", "utilization": "%"}


def test_the_unit_in_a_column_is_the_unit_of_its_row():
    """`_us`, `_ns`, `_s` and `_bytes`; rates are no times."""
    for table, columns in schemas.COLUMNS.items():
        for name, (kind, field) in columns.items():
            match = re.search(r"(?<!_per)_(us|ns|s|bytes|w|j|mhz|c|utilization)$", f"_{name}")
            unit = UNITS.get(match[1], match[1]) if match else ""
            assert field.unit == unit, (table, name)
            assert kind in ("BIGINT", "DOUBLE") if match else True, (table, name)
            assert field.doc.endswith((".", "…")), (table, name)


def test_every_frequent_field_has_a_column_of_its_type():
    """The reader's columns are those that the contract marks."""
    marked = {name for name, field in FIELDS.items() if field.column}

    assert marked | {"sampled"} == schemas.FIELDS.keys()
    assert schemas.FIELDS.keys() <= schemas.SCHEMAS["event_fields"].keys()
