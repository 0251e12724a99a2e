"""The lanes of a timeline: trainer, agent-loop workers, engines, rewards, TransferQueue and ranks.

They are read by SQL from the tables `drawn_scenes` and `drawn_requests`, which
`verl_profiler.views.timelines` makes.  Times are in units of 10 us after the start of their step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_profiler.analysis.selection import grouped, spread
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.colors import color
from verl_profiler.render.frames import short_text

UNIT_US = 10
# Lanes of a role.
_PROCESSES, _ENGINES = 16, 64
_LANE_SPANS = 60
_LANE_LAGS = 30
_PARTS = 160


class Names:
    """Numbers the kinds of spans that are drawn."""

    def __init__(self) -> None:
        self.listed: list[list[Any]] = []
        self._codes: dict[tuple[str, str | None, bool], int] = {}

    def code(self, event: str, tool: str | None = None, *, failed: bool = False) -> int:
        """Return the number of a kind: its place in `listed`."""
        key = (event, tool, failed)
        if key not in self._codes:
            self._codes[key] = len(self.listed)
            shown = None if tool is None else short_text(tool)
            self.listed.append([short_text(event), shown, int(failed), color(event)])
        return self._codes[key]


# Spans that overlap a drawn stretch of time, whatever step they were written under: an engine
# counts its step by the weights that it has.
_OVERLAP = "x.run = s.run AND x.begin_us < s.end_us AND x.end_us > s.begin_us"


def add_lanes(tables: Tables, scenes: Sequence[dict[str, Any]], names: Names) -> None:
    """Give each scene its lanes, from the trainer down to the trainer workers."""
    trainers = _span_lanes(
        tables,
        names,
        "SELECT s.scene, s.base_us, x.name, 'trainer' AS role, x.rank, x.phase AS event, "
        "NULL AS status, x.begin_us, x.duration_us "
        f"FROM phases AS x JOIN drawn_scenes AS s ON {_OVERLAP} WHERE x.phase <> 'step'",
    )
    ranks = _span_lanes(
        tables,
        names,
        "SELECT s.scene, s.base_us, x.name, x.role, x.rank, x.event, x.status, x.begin_us, "
        f"x.duration_us FROM rank_spans AS x JOIN drawn_scenes AS s ON {_OVERLAP}",
    )
    workers = _worker_lanes(tables)
    counts = _count_lanes(tables, names)
    lags = _lags(tables)
    for number, scene in enumerate(scenes):
        lanes = [
            each for kind in (trainers, workers, counts, ranks) for each in kind.get(number, ())
        ]
        for lane in lanes:
            marks = lags.get((number, lane["name"]))
            if marks:
                lane["lags"] = marks
        scene["lanes"] = lanes


def _span_lanes(tables: Tables, names: Names, source: str) -> dict[int, list[dict[str, Any]]]:
    """List the spans of each process, the longest ones where there are many."""
    rows = tables.rows(
        f"""
        WITH inside AS ({source}), ranked AS (
            SELECT *, row_number() OVER (PARTITION BY scene, name
                    ORDER BY duration_us DESC, begin_us, event) AS place,
                count(*) OVER (PARTITION BY scene, name) AS count,
                sum(duration_us) OVER (PARTITION BY scene, name) AS total_us
            FROM inside
        )
        SELECT scene, name, role, event, status IS NOT NULL AS failed,
            (begin_us - base_us) // {UNIT_US} AS begin, duration_us // {UNIT_US} AS length,
            count, total_us
        FROM ranked WHERE place <= {_LANE_SPANS}
        ORDER BY scene, role, rank, name, begin_us, duration_us DESC, event
        """
    )
    lanes: dict[int, list[dict[str, Any]]] = {}
    for (scene, name), own in grouped(rows, "scene", "name").items():
        # Of two spans of the same length, the outer one comes first.
        own.sort(key=lambda row: (row["begin"], -row["length"], depth(row["event"])))
        spans = [
            [names.code(row["event"], failed=row["failed"]), row["begin"], row["length"]]
            for row in own
        ]
        lane = {"kind": "spans", "name": name, "role": own[0]["role"], "of": own[0]["count"]}
        lanes.setdefault(scene, []).append({**lane, "spans": spans, "total": own[0]["total_us"]})
    return {scene: _some_lanes(those, _PROCESSES) for scene, those in lanes.items()}


def depth(event: str) -> int:
    """Count the events that contain this one."""
    known = EVENTS.get(event)
    return 0 if known is None or known.parent is None else 1 + depth(known.parent)


def _some_lanes(lanes: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Keep at most so many lanes of a role: the busiest, and others spread evenly."""
    kept: list[dict[str, Any]] = []
    for those in grouped(lanes, "role").values():
        chosen = spread({lane["name"]: lane["total"] for lane in those}, most)
        some = [lane for lane in those if lane["name"] in chosen]
        if len(some) < len(those):
            some[0]["role_of"] = [len(some), len(those)]
        kept += some
    for lane in kept:
        del lane["total"]
    return kept


def _worker_lanes(tables: Tables) -> dict[int, list[dict[str, Any]]]:
    """List the agent-loop workers; the page packs their requests into rows."""
    rows = tables.rows(
        f"""
        WITH drawn AS (
            SELECT scene, name, count(*) AS drawn FROM drawn_requests
            WHERE scene IS NOT NULL GROUP BY scene, name
        ), every AS (
            SELECT s.scene, r.name, min(r.rank) AS rank, count(*) AS requests,
                (max(r.begin_us + coalesce(r.duration_us, 0)) - any_value(s.base_us)) // {UNIT_US} AS last
            FROM requests AS r JOIN drawn_scenes AS s
                ON r.run = s.run AND r.step = s.step AND r.validate = s.validate
            GROUP BY s.scene, r.name
        )
        SELECT scene, 'requests' AS kind, name, 'agent_loop' AS role, coalesce(drawn, 0) AS drawn,
            requests AS of, last
        FROM every LEFT JOIN drawn USING (scene, name) ORDER BY scene, rank, name
        """
    )
    lanes: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        lanes.setdefault(row.pop("scene"), []).append(row)
    return lanes


def _count_lanes(tables: Tables, names: Names) -> dict[int, list[dict[str, Any]]]:
    """Count the calls that are open at a time: in each engine, in the rewards, in the queue."""
    served = tables.row("SELECT count(*) AS rows FROM engine_requests")["rows"]
    engines = (
        "SELECT s.*, x.name AS lane, 'engine_request' AS event, x.begin_us AS from_us, "
        "x.end_us AS to_us FROM engine_requests AS x"
        if served
        else "SELECT s.*, coalesce(x.server, 'engine') AS lane, 'engine_call' AS event, "
        "x.begin_us AS from_us, x.end_us AS to_us FROM engine_calls AS x"
    )
    rows = tables.rows(
        f"""
        WITH spans AS MATERIALIZED (
            {engines} JOIN drawn_scenes AS s ON {_OVERLAP}
            UNION ALL
            SELECT s.*, 'reward functions', 'reward_score', x.begin_us, x.end_us
            FROM reward_scores AS x JOIN drawn_scenes AS s ON {_OVERLAP}
            UNION ALL
            SELECT s.*, 'TransferQueue', 'tq_get', x.begin_us, x.end_us
            FROM transfers AS x JOIN drawn_scenes AS s ON {_OVERLAP}
        ), changes AS (
            SELECT *, greatest(from_us, begin_us) AS at_us, 1 AS change FROM spans
            UNION ALL SELECT *, least(to_us, end_us), -1 FROM spans
        ), running AS (
            SELECT scene, lane, event, begin_us, end_us, at_us, sum(sum(change)) OVER (
                PARTITION BY scene, lane, event ORDER BY at_us ROWS UNBOUNDED PRECEDING) AS open
            FROM changes GROUP BY scene, lane, event, begin_us, end_us, at_us
        ), parts AS (
            SELECT scene, lane, event, least(floor((at_us - begin_us) * {_PARTS}.0
                / greatest(end_us - begin_us, 1)), {_PARTS - 1})::INTEGER AS part,
                max(open)::INTEGER AS most, arg_max(open, at_us)::INTEGER AS last
            FROM running GROUP BY scene, lane, event, part
        )
        SELECT scene, 'count' AS kind, lane AS name, event AS role, max(most) AS most,
            max(most) AS total, list([part, most, last] ORDER BY part) AS counts
        FROM parts GROUP BY scene, lane, event
        ORDER BY scene, event NOT IN ('engine_request', 'engine_call'), event, lane
        """
    )
    lanes: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        lanes.setdefault(row.pop("scene"), []).append({**row, "code": names.code(row["role"])})
    return {scene: _some_lanes(those, _ENGINES) for scene, those in lanes.items()}


def _lags(tables: Tables) -> dict[tuple[int, str], list[list[Any]]]:
    """List the event-loop stalls of each process: the longest of each scene."""
    rows = tables.rows(
        f"""
        SELECT s.scene, x.name, (x.begin_us - s.base_us) // {UNIT_US} AS begin,
            x.duration_us // {UNIT_US} AS length, x.during
        FROM lags AS x JOIN drawn_scenes AS s ON {_OVERLAP}
        QUALIFY row_number() OVER (PARTITION BY s.scene, x.name ORDER BY x.duration_us DESC)
            <= {_LANE_LAGS}
        ORDER BY s.scene, x.name, x.begin_us
        """
    )
    lags: dict[tuple[int, str], list[list[Any]]] = {}
    for row in rows:
        during = row["during"]
        lag = [row["begin"], row["length"]]
        lags.setdefault((row["scene"], row["name"]), []).append(
            lag if during is None else [*lag, short_text(during)]
        )
    return lags
