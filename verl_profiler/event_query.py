"""The SQL that reads lines of event files into the columns of a Parquet part.

Values are read as text where they may have a wrong type, and cast one by one; `flawed` marks rows
in which that failed, so that a wrong type costs a look at the file and not the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from verl_profiler.aliases import vocabulary
from verl_profiler.repair import LINE_LIMIT_BYTES

__all__ = ["PART_COLUMNS", "event_query", "list_files", "quoted"]

PART_COLUMNS = {
    "file_id": "INTEGER",
    "flawed": "BOOLEAN",
    "name": "VARCHAR",
    "role": "VARCHAR",
    "rank": "INTEGER",
    "host": "VARCHAR",
    "pid": "INTEGER",
    "step": "INTEGER",
    "event": "VARCHAR",
    "family": "VARCHAR",
    "end_us": "BIGINT",
    "duration_us": "BIGINT",
    "request_id": "VARCHAR",
    "turn": "INTEGER",
    "validate": "BOOLEAN",
    "sample": "VARCHAR",
    "session": "VARCHAR",
    "status": "VARCHAR",
    "error": "VARCHAR",
    "workid": "VARCHAR",
    "recorded": "VARCHAR",
    "extra": "JSON",
}

_FILE_COLUMNS = {
    "file_id": "INTEGER",
    "path": "VARCHAR",
    "name": "VARCHAR",
    "role": "VARCHAR",
    "rank": "INTEGER",
    "host": "VARCHAR",
    "pid": "INTEGER",
    "step": "INTEGER",
    "shift_us": "BIGINT",
    "drift": "DOUBLE",
    "drift_from_us": "BIGINT",
    "original": "BOOLEAN",
}

_TOP = json.dumps(
    {
        **dict.fromkeys(("timestamp", "event", "duration_sec", "workid", "step"), "VARCHAR"),
        "extra": "JSON",
    }
)
_IDENTITY = json.dumps(
    dict.fromkeys(
        ("request_id", "turn", "validate", "sample", "session", "status", "error"), "VARCHAR"
    )
)
_KEYS = ("timestamp", "event", "duration_sec", "extra", "workid", "step")
_WITHOUT_KEYS = json.dumps(dict.fromkeys(_KEYS))

# A cast to TIMESTAMP drops the offset from UTC without a word; one to TIMESTAMPTZ takes twice as
# long (duckdb 2.0).  Times without an offset are taken for UTC.
_MOMENT = """CASE
        WHEN ends_with(timestamp, '+00:00') AND length(timestamp) >= 25
            THEN epoch_us(try_cast(timestamp AS TIMESTAMP))
        WHEN length(timestamp) >= 19 THEN epoch_us(try_cast(timestamp AS TIMESTAMPTZ))
    END"""

# Lines as the recorder writes them, whose last key is the step of the folder.
_REGULAR = """
    SELECT filename, {moment} AS moment_us, event AS recorded_event,
        try_cast(duration_sec AS DOUBLE) AS duration_s, extra, workid, step AS line_step,
        duration_sec IS NOT NULL AND try_cast(duration_sec AS DOUBLE) IS NULL AS mistyped
    FROM read_json([{paths}], format = 'newline_delimited', filename = true,
        maximum_object_size = {limit},
        columns = {{timestamp: 'VARCHAR', event: 'VARCHAR', duration_sec: 'VARCHAR',
            extra: 'JSON', workid: 'VARCHAR', step: 'INTEGER'}})
"""

# Any other lines: values are read as text and cast one by one, and keys that the format does not
# know (keywords of the caller of `log_manager.log`) go into `extra`.
_IRREGULAR = """
    SELECT filename, {text_moment} AS moment_us,
        top.event AS recorded_event,
        try_cast(top.duration_sec AS DOUBLE) AS duration_s,
        CASE
            WHEN len(list_distinct(list_concat(json_keys(line), [{keys}]))) = {key_count}
                THEN top.extra
            ELSE json_merge_patch(
                json_merge_patch(line, '{without_keys}'), coalesce(top.extra, '{{}}'))
        END AS extra,
        top.workid AS workid,
        whole_number(top.step) AS line_step,
        (top.duration_sec IS NOT NULL AND try_cast(top.duration_sec AS DOUBLE) IS NULL)
            OR (top.step IS NOT NULL AND whole_number(top.step) IS NULL) AS mistyped
    FROM (
        SELECT filename, json AS line, json_transform(json, '{top}') AS top
        FROM read_ndjson_objects([{paths}], filename = true, maximum_object_size = {limit})
    )
"""

_SELECT = """
WITH lines AS ({lines}
), typed AS (
    SELECT f.*, lines.* EXCLUDE (filename, duration_s, workid),
        nullif(workid, f.rank::VARCHAR) AS workid,
        CASE WHEN moment_us BETWEEN 0 AND 9214646400000000 THEN moment_us + f.shift_us
            + round(f.drift * (moment_us - f.drift_from_us))::BIGINT END AS end_us,
        CASE WHEN duration_s BETWEEN 0 AND 1e9 THEN round(duration_s * 1e6)::BIGINT END
            AS duration_us,
        duration_s IS NOT NULL AND NOT coalesce(duration_s BETWEEN 0 AND 1e9, false)
            AS bad_duration,
        json_transform(CASE WHEN starts_with(extra::VARCHAR, '{{') THEN extra END,
            '{identity}') AS who
    FROM lines JOIN part_files AS f ON f.path = lines.filename
)
SELECT
    t.file_id,
    coalesce(
        t.mistyped OR t.bad_duration OR t.recorded_event IS NULL OR t.recorded_event = ''
        OR t.recorded_event[1] IN ('{{', '[') OR t.end_us IS NULL
        OR (t.who.turn IS NOT NULL AND whole_number(t.who.turn) IS NULL)
        OR coalesce(t.who.validate, 'true') NOT IN ('true', 'false')
        OR NOT starts_with(t.extra::VARCHAR, '{{'),
        false) AS flawed,
    t.name, t.role, t.rank, t.host, t.pid,
    coalesce(t.line_step, t.step) AS step,
    coalesce(v.event, t.recorded_event) AS event,
    CASE
        WHEN t.role = 'trainer' AND t.duration_us IS NOT NULL AND coalesce(v.phase, true)
            THEN 'trainer'
        ELSE coalesce(v.family, 'user')
    END AS family,
    t.end_us, t.duration_us,
    t.who.request_id AS request_id,
    whole_number(t.who.turn) + coalesce(v.turn_shift, 0) AS turn,
    coalesce(t.who.validate = 'true', false) AS validate,
    coalesce(t.who.sample, CASE WHEN t.original THEN t.extra->>'$.batch_data_id' END) AS sample,
    t.who.session AS session, t.who.status AS status, t.who.error AS error,
    t.workid,
    CASE WHEN v.event <> t.recorded_event THEN t.recorded_event END AS recorded,
    CASE WHEN t.extra::VARCHAR <> '{{}}' THEN t.extra END AS extra
FROM typed AS t
LEFT JOIN vocabulary AS v ON v.recorded = t.recorded_event AND v.original = t.original
"""


def event_query(regular: Sequence[Path], irregular: Sequence[Path]) -> str:
    """Return the query over files that `list_files` has listed.

    Args:
        regular: Files all of whose lines end with the step of their folder, as the recorder's do.
        irregular: Any others.
    """
    words = {
        "moment": _MOMENT,
        "text_moment": re.sub(r"\btimestamp\b", "top.timestamp", _MOMENT),
        "top": _TOP,
        "identity": _IDENTITY,
        "without_keys": _WITHOUT_KEYS,
        "keys": ", ".join(f"'{key}'" for key in _KEYS),
        "key_count": len(_KEYS),
        "limit": 2 * LINE_LIMIT_BYTES,
    }
    lines = [
        template.format(paths=", ".join(f"'{quoted(path)}'" for path in paths), **words)
        for template, paths in ((_REGULAR, regular), (_IRREGULAR, irregular))
        if paths
    ]
    return _SELECT.format(lines="    UNION ALL BY NAME".join(lines), **words)


def list_files(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[dict[str, Any]], scratch: Path
) -> None:
    """Make the tables that `event_query` joins: the files, and the vocabulary.

    Args:
        connection: Where the query will run.
        rows: One per file: file_id, path, name, role, rank, host, pid, step, shift_us, original.
        scratch: A folder for a temporary file.
    """
    _prepare(connection)
    listing = scratch / "part_files.json"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = ", ".join(f"{name}: '{kind}'" for name, kind in _FILE_COLUMNS.items())
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE part_files AS SELECT * FROM "
        f"read_json('{quoted(listing)}', format = 'newline_delimited', columns = {{{columns}}})"
    )


def _prepare(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute(
        "CREATE OR REPLACE TEMP MACRO whole_number(text) AS "
        "CASE WHEN regexp_full_match(text, '-?[0-9]{1,9}') THEN text::INTEGER END"
    )
    rows = ", ".join(
        f"({original}, '{recorded}', '{event}', '{family}', {shift}, {phase})"
        for original, recorded, event, family, shift, phase in vocabulary()
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE vocabulary AS SELECT * FROM "
        f"(VALUES {rows}) AS v(original, recorded, event, family, turn_shift, phase)"
    )


def quoted(path: Path) -> str:
    """Return a path as the inside of an SQL string."""
    return str(path).replace("'", "''")
