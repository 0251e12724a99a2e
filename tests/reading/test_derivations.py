"""The SQL macros of the derived tables."""

import duckdb

from verl_profiler.reading.tables import derivations


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
