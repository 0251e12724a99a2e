"""The SQL that reads lines of event files into the columns of a Parquet part.

Each line is parsed once, into text; values are cast one by one, and `flawed` marks rows in which
that may have failed, so that a wrong type costs a second parse and not the file: what is wrong, and with which
line, only `salvage` decides.  Whether a line holds
more than the known fields is found by counting its keys; if it does, `rest` keeps all of its `extra`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.reading.legacy_names import FIELD_ALIASES, vocabulary
from verl_profiler.reading.salvage import LINE_LIMIT_BYTES, is_timed
from verl_profiler.reading.scans import scan
from verl_profiler.reading.tables.schemas import COUNT_LIMIT, FIELDS, NUMBER_LIMIT, SCHEMAS

if TYPE_CHECKING:
    import duckdb

# Two thirds of the time of duckdb's defaults, in files of the same size: small row groups stay in
# the processor's cache, no query uses bloom filters, and a dictionary pays for ids of several events.
AS_PARQUET = (
    "(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, ROW_GROUP_SIZE 61440, "
    "WRITE_BLOOM_FILTER false, DICTIONARY_SIZE_LIMIT 4000, PARQUET_VERSION V2, USE_TMP_FILE false)"
)

_NOT_STORED = ("run", "begin_us")
PART_COLUMNS = {
    "file_id": "INTEGER",
    "flawed": "BOOLEAN",
    **{
        column: kind
        for column, kind in SCHEMAS["event_fields"].items()
        if column not in _NOT_STORED
    },
}

_FILE_COLUMNS = {
    "file_id": "INTEGER",
    "path": "VARCHAR",
    **{name: SCHEMAS["events"][name] for name in ("name", "role", "rank", "host", "pid", "step")},
    "shift_us": "BIGINT",
    "drift": "DOUBLE",
    "drift_from_us": "BIGINT",
    "original": "BOOLEAN",
    "first_us": "BIGINT",
}
# Numbers for duckdb, so that it does not hash the same text for each event when it writes Parquet.
_REPEATED = ("name", "role", "host")

_IDENTITY = ("request_id", "turn", "validate", "sample", "session", "status", "error")
_KEYS = ("timestamp", "event", "duration_sec", "workid", "step")
_NUMBERS = ("duration_sec", "step", "turn")
# Whole numbers beyond may have been rounded to DOUBLE; `rest` keeps them.
_EXACT_LIMIT = 9e15
_WITHOUT_KEYS = json.dumps(dict.fromkeys((*_KEYS, "extra")))

# A cast to TIMESTAMP silently drops the offset from UTC; one to TIMESTAMPTZ takes twice as
# long (duckdb 2.0).  Times without an offset are taken for UTC.
_MOMENT = """CASE
        WHEN ends_with(t.timestamp, '+00:00') AND strlen(t.timestamp) >= 25
            THEN epoch_us(try_cast(t.timestamp AS TIMESTAMP))
        WHEN strlen(t.timestamp) >= 19 THEN epoch_us(try_cast(t.timestamp AS TIMESTAMPTZ))
    END"""

_SELECT = """
WITH bounded AS (
    SELECT filename, CASE WHEN strlen(json) < {limit} THEN json ELSE '{{}}' END AS json FROM {scan}
), parsed AS (
    SELECT filename, json AS line, json_transform(json, '{structure}') AS t,
        json_keys(json, ['$', '$.extra']) AS keys
    FROM bounded
), counted AS (
    SELECT filename, line, t, t.extra AS x,
        -- `true` is read as 1.
        CASE WHEN (t.duration_sec = 1 OR t.step = 1 OR t.extra.turn = 1) AND contains(line, 'true')
            THEN regexp_matches(line, '"(duration_sec|step|turn)" *: *true')
            ELSE false END AS is_truth,
        len(keys[1]) <> {line_known} + (keys[2] IS NOT NULL)::FLOAT AS more_keys,
        coalesce(len(keys[2]) <> {extra_known}, false) AS more_fields,
        t.extra IS NOT NULL AND {extra_known} = 0 AS empty_extra,
        -- A known key without a value: that is null, or of another type.
        CASE WHEN more_keys OR more_fields THEN len(list_intersect(keys[1], {line_keys})) > {line_known}
            OR coalesce(len(list_intersect(keys[2], {extra_keys})) > {extra_known}, false)
            ELSE false END AS unread
    FROM parsed
), timed AS (
    SELECT *, {moment} AS moment_us FROM counted
), checked AS (
    SELECT line, t, x, is_truth, more_keys, more_fields, empty_extra, unread, files.* EXCLUDE (path),
        CASE WHEN moment_us BETWEEN 0 AND 9214646400000000 THEN moment_us + shift_us
            + round(drift * (moment_us - drift_from_us))::BIGINT END AS end_us,
        -- Begins, too, are on the driver's clock.
        CASE WHEN t.duration_sec BETWEEN 0 AND 1e9
            THEN try_cast(round(t.duration_sec * 1e6 * (1 + drift)) AS BIGINT) END AS duration_us,
        coalesce(moment_us - round(t.duration_sec * 1e6) < first_us, false) AS early, {largest} AS largest,
        {turn} AS turn, {line_step} AS line_step
    FROM timed JOIN part_files AS files ON path = filename
)
SELECT c.file_id,
    coalesce(t.event IS NULL OR t.event = '' OR t.event[1] IN ('{{', '[') OR end_us IS NULL
        OR (t.duration_sec IS NOT NULL AND duration_us IS NULL)
        OR (v.timed AND early) OR (v.timed AND duration_us IS NULL)
        OR (t.step IS NOT NULL AND line_step IS NULL)
        OR (x.turn IS NOT NULL AND turn IS NULL)
        OR coalesce(x.validate, 'true') NOT IN ('true', 'false')
        OR CASE WHEN empty_extra THEN json_type(line, '$.extra') <> 'OBJECT' END
        OR is_truth OR unread
        OR CASE WHEN more_keys OR more_fields
            THEN contains(line, 'NaN') OR contains(line, 'Infinity') END
        OR largest > {number_limit},
        false) AS flawed,
    c.name, c.role, c.rank, c.host, c.pid,
    coalesce(line_step, c.step) AS step,
    coalesce(v.event, t.event) AS event,
    CASE
        -- A call of unknown length is in no sum.
        WHEN v.timed AND duration_us IS NULL THEN 'user'::part_family
        WHEN c.role = 'trainer' AND duration_us IS NOT NULL AND coalesce(v.phase, true)
            THEN 'trainer'::part_family
        ELSE coalesce(v.family, 'user'::part_family)
    END AS family,
    end_us, duration_us, x.request_id AS request_id,
    turn + coalesce(v.turn_shift, 0) AS turn,
    coalesce(x.validate = 'true', false) AS validate,
    coalesce(x.sample, CASE WHEN c.original THEN line->>'$.extra.{sample_alias}' END) AS sample,
    x.session AS session, x.status AS status, x.error AS error,
    nullif(t.workid, c.rank::VARCHAR) AS workid,
    CASE WHEN v.event <> t.event THEN t.event END AS recorded,
    {fields}
    CASE
        WHEN CASE WHEN more_keys
                THEN len(list_distinct(list_concat(json_keys(line), [{keys}]))) > {key_count} END
            THEN json_merge_patch(json_merge_patch(line, '{without_keys}'),
                coalesce(line->'$.extra', '{{}}'))
        WHEN c.original OR more_fields OR x.validate = 'false' OR largest > {exact_limit} OR {fractions}
            THEN nullif(line->'$.extra', '{{}}')
    END AS rest
FROM checked AS c
LEFT JOIN vocabulary AS v ON v.recorded = t.event
"""


_WRITTEN = {
    name: f"CASE WHEN regexp_full_match({name}, '0|-?[1-9][0-9]{{0,17}}') THEN {name}::JSON "
    f"ELSE to_json({name}) END"
    for name in ("sample", "session", "weight_version")
}


def _member(name: str) -> str:
    """Write a field as a member of a JSON object; NULL where there is none."""
    column = f'"{name}"'
    there = "validate" if name == "validate" else f"{column} IS NOT NULL"
    return (
        f"CASE WHEN {there} THEN '{column}:' || to_json({_WRITTEN.get(name, column)})::VARCHAR END"
    )


# `extra` as it was recorded, but for the order of its keys and the spelling of its numbers.  Putting
# text together takes a third of the time that json_merge_patch takes to leave NULLs out.
_MEMBERS = ", ".join(map(_member, (*_IDENTITY, *FIELDS)))
RECORDED_EXTRA = (
    f"coalesce(rest, nullif(concat('{{', concat_ws(',', {_MEMBERS}), '}}'), '{{}}')::JSON)"
)


def event_query(paths: Sequence[Path], fields: Collection[str] = tuple(FIELDS)) -> str:
    """Return the query over files that `list_files` has listed.

    Args:
        paths: The files.
        fields: Which of `FIELDS` become columns.  A line that holds others keeps them in `rest`.
    """
    chosen = {name: kind for name, kind in FIELDS.items() if name in fields}
    line_known, extra_known = _known("t", _KEYS), _known("t.extra", (*_IDENTITY, *chosen))
    return _SELECT.format(
        structure=json.dumps(_structure(chosen)),
        limit=LINE_LIMIT_BYTES,
        scan=scan(
            "read_ndjson_objects",
            paths,
            f"filename = true, maximum_object_size = {16 << 20}",
        ),
        moment=_MOMENT,
        line_known=line_known,
        extra_known=extra_known,
        line_keys=[*_KEYS],
        extra_keys=[*_IDENTITY, *chosen],
        fields="".join(f'{_field(name, kind)} AS "{name}", ' for name, kind in chosen.items()),
        fractions=" OR ".join(
            (
                "false",
                *(
                    f'x."{name}" <> floor(x."{name}")'
                    for name, kind in chosen.items()
                    if kind == "BIGINT"
                ),
            )
        ),
        largest=_largest(chosen),
        number_limit=NUMBER_LIMIT,
        exact_limit=_EXACT_LIMIT,
        keys=", ".join(f"'{key}'" for key in (*_KEYS, "extra")),
        key_count=len(_KEYS) + 1,
        turn=_whole("x.turn"),
        line_step=_whole("t.step"),
        sample_alias=FIELD_ALIASES["sample"][0],
        without_keys=_WITHOUT_KEYS,
    )


def _structure(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return what `json_transform` reads: whole numbers as DOUBLE, so that a fraction is seen."""
    return {
        **{name: "DOUBLE" if name in _NUMBERS else "VARCHAR" for name in _KEYS},
        "extra": {
            **{name: "DOUBLE" if name in _NUMBERS else "VARCHAR" for name in _IDENTITY},
            **{name: "DOUBLE" if kind == "BIGINT" else kind for name, kind in fields.items()},
        },
    }


def _known(struct: str, keys: Sequence[str]) -> str:
    """Count the keys that are there."""
    return "(" + " + ".join(f'({struct}."{key}" IS NOT NULL)::FLOAT' for key in keys) + ")"


def _whole(value: str) -> str:
    within = f"{value} BETWEEN -{COUNT_LIMIT} AND {COUNT_LIMIT}"
    return f"CASE WHEN {value} = floor({value}) AND {within} THEN try_cast({value} AS INTEGER) END"


def _largest(fields: Mapping[str, str]) -> str:
    """Return the SQL of the largest number of a line; of all, NaN is the largest."""
    sizes = [f'abs(x."{name}")' for name, kind in fields.items() if kind != "VARCHAR"]
    return f"greatest({', '.join(('0', *sizes))})"


def _field(name: str, kind: str) -> str:
    """Return the SQL of a field's column; only where keys are left over, other names are tried.

    Numbers that are out of range are flaws, which the second reading has no more.
    """
    value = f'try_cast(x."{name}" AS BIGINT)' if kind == "BIGINT" else f'x."{name}"'
    aliases = [
        f"try_cast(line->>'$.extra.{alias}' AS {kind})" for alias in FIELD_ALIASES.get(name, ())
    ]
    if not aliases:
        return value
    return f"CASE WHEN more_fields THEN coalesce({', '.join((value, *aliases))}) ELSE {value} END"


def list_files(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[dict[str, Any]], listing: Path
) -> None:
    """Make the tables that `event_query` joins: the files, and the vocabulary.

    Args:
        connection: Where the query will run.
        rows: One per file: file_id, path, name, role, rank, host, pid, step, shift_us, original.
        listing: A temporary file to write.
    """
    _make_vocabulary(connection, original=any(row["original"] for row in rows))
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = ", ".join(f"{name}: '{kind}'" for name, kind in _FILE_COLUMNS.items())
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE part_files AS SELECT * FROM "
        + scan("read_json", [listing], f"format = 'newline_delimited', columns = {{{columns}}}")
    )
    for name in _REPEATED:
        connection.execute(
            f"CREATE OR REPLACE TEMP TYPE part_{name} AS ENUM "
            f"(SELECT DISTINCT coalesce({name}, '') FROM part_files)"
        )
        connection.execute(f"ALTER TABLE part_files ALTER {name} TYPE part_{name}")


def _make_vocabulary(connection: duckdb.DuckDBPyConnection, *, original: bool) -> None:
    rows = ", ".join(
        f"('{recorded}', '{event}', '{family}', {shift}, {phase}, "
        f"{not original and is_timed(event)})"
        for of_original, recorded, event, family, shift, phase in vocabulary()
        if of_original == original
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE vocabulary AS SELECT * FROM "
        f"(VALUES {rows}) AS v(recorded, event, family, turn_shift, phase, timed);"
        "CREATE OR REPLACE TEMP TYPE part_family AS ENUM "
        "(SELECT family FROM vocabulary UNION VALUES ('user'), ('trainer'));"
        "ALTER TABLE vocabulary ALTER family TYPE part_family"
    )
