"""The SQL files of the derived tables: no statement in them is skipped."""

import duckdb
import pytest

from verl_profiler.reading.tables import derivations
from verl_profiler.reading.tables.schemas import SCHEMAS

FILES = sorted(each.name for each in derivations._FOLDER.iterdir() if each.name != "macros.sql")


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_left_of_a_file_without_its_tables(file):
    """A statement of another form would be skipped silently."""
    text = derivations._read(file)

    assert "" == derivations._STATEMENT.sub("", text).strip()
    assert len(derivations._STATEMENT.findall(text)) == text.count("CREATE ")


def test_every_table_is_read_or_derived():
    """Those that are read: lines, headers and captures."""
    read = {"events", "processes", "captures", "capture_ranges", "capture_work"}

    assert SCHEMAS.keys() - read == derivations.derivations().keys()


def test_macros_leave_out_what_cannot_be_right():
    """Text, numbers that are not exact as DOUBLE, negative and endless times."""
    connection = duckdb.connect()
    connection.execute(derivations.macros())
    row = connection.execute(
        """
        SELECT integer_of(v, 'text'), integer_of(v, 'large'), integer_of(v, 'three'),
            number_of(v, 'large'), number_of(v, 'half'), micros(number_of(v, 'half')), micros(-1),
            micros(1e10), given(true, 1), given(false, 1)
        FROM (SELECT '{"text": "x", "large": 9007199254740993, "three": 3, "half": 0.5}'::JSON AS v)
        """
    ).fetchone()

    assert (None, None, 3, 9007199254740992.0, 0.5, 500_000, None, None, 1, None) == row
