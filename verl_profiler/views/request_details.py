"""All requests of a step with their spans, as a script beside the report that its page loads on demand.

The page has the slowest requests of each step and a sample of the others.  Pages that are opened from
disk may load scripts of their own folder, but no other data; so each step is a script that hands a
compressed text to the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.html import packed, script_json
from verl_profiler.views.timeline_lanes import Names
from verl_profiler.views.timelines import request_frame

__all__ = ["MARK", "details_file", "request_details"]

# At the beginning of each file.
MARK = b"verlProfilerDetails("


def details_file(place: int, label: str) -> str:
    """Return the name of a step's file; the place is part of it where the label is no number."""
    return f"step_{label}.js" if label.isdigit() else f"place_{place}.js"


def request_details(
    tables: Tables, listed: Rows, drawn: Mapping[str, Any], key: str
) -> Iterator[tuple[int, str]]:
    """Yield place and script of each step that has requests which are not drawn.

    Args:
        tables: The tables of the run.
        listed: The rows of `step_times`, one per place.
        drawn: What `timelines` returned.
        key: What the page compares, so that it does not take files of another report.
    """
    scenes = {
        scene["s"]: number for number, scene in enumerate(drawn["scenes"]) if not scene["validate"]
    }
    there = drawn["requests"]
    rows = (dict(zip(there["columns"], row, strict=True)) for row in there["rows"])
    drawn_of = Counter(row["s"] for row in rows if not row["validate"])
    places = {(row["run"], row["step"]): place for place, row in enumerate(listed)}
    for place, row in enumerate(listed):
        if row["step"] is None or row["requests"] <= drawn_of[place]:
            continue
        scene = scenes.get(place)
        connection = tables.connection
        tables.make("requests", "steps")
        try:
            connection.execute(
                f"""
                CREATE OR REPLACE TEMP TABLE drawn_requests AS
                SELECT row_number() OVER (ORDER BY r.begin_us, request_id, sample, session, name) - 1
                    AS number, t.begin_us AS base_us, {"NULL" if scene is None else scene}::INTEGER
                    AS scene, r.*
                FROM requests AS r JOIN steps AS t USING (run, step)
                WHERE r.run = ? AND r.step = ? AND NOT r.validate
                """,
                [row["run"], row["step"]],
            )
            names = Names()
            table = request_frame(tables, places, names)
        finally:
            for name in ("drawn_requests", "drawn_spans"):
                connection.execute(f"DROP TABLE IF EXISTS {name}")
        text = script_json({"names": names.listed, "requests": table})
        about = script_json({"key": key, "s": place, "packed": packed(text)})
        yield place, f"{MARK.decode()}{about});\n"
