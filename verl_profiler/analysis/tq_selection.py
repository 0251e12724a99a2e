"""Which traced calls an analysis looks at, and what is said of their speed."""

from __future__ import annotations

__all__ = ["FAIR_MIB_S", "GOOD_MIB_S", "SPEED", "of_function"]

# The guide's classes, in MB of 2^20 bytes a second.
GOOD_MIB_S = 500
FAIR_MIB_S = 100

# SQL: the class of the column `mib_per_s`.
SPEED = (
    f"CASE WHEN mib_per_s > {GOOD_MIB_S} THEN 'good' WHEN mib_per_s >= {FAIR_MIB_S} THEN 'fair' "
    "WHEN mib_per_s IS NOT NULL THEN 'poor' END"
)


def of_function(function: str | None, column: str = "func") -> str:
    """Return the SQL condition for the calls of one function; None for all."""
    if function is None:
        return "true"
    quoted = function.replace("'", "''")
    return f"{column} = '{quoted}'"
