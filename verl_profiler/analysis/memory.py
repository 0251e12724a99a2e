"""When memory was fullest, over time and by phase, and what the memory saver did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.reading.tables.tables import Tables


def memory_peaks(tables: Tables, steps: Steps = None) -> Rows:
    """Find the highest reading of device memory in each step and role.

    Returns:
        Table `memory_peaks`: one row per run, step and role.  Devices without a memory counter
        (a CPU) have none.
    """
    return tables.rows(
        f"""
        SELECT run, step, role, top.name, top."at", readings, top.allocated_bytes,
            top.reserved_bytes, top.used_bytes, top.total_bytes
        FROM (
            SELECT run, step, role, count(*) AS readings,
                arg_max({{'name': name, 'at': "at", 'allocated_bytes': allocated_bytes,
                    'reserved_bytes': reserved_bytes, 'used_bytes': used_bytes,
                    'total_bytes': total_bytes}},
                    (coalesce(used_bytes, reserved_bytes, allocated_bytes), end_us, name)) AS top
            FROM memory WHERE coalesce(total_bytes, 2) > 1 AND {in_steps(steps)}
            GROUP BY run, step, role
        ) ORDER BY run, step, role
        """
    )


# More readings of a process than this are drawn by the highest in each of so many equal parts.
PARTS = 600


def memory_over_time(tables: Tables, steps: Steps = None) -> Rows:
    """Return the memory readings of each process; with more than `PARTS`, the highest of each interval.

    Returns:
        Table `memory_over_time`: one row per run, process and part of the time, of which there
        are as many as readings, or `PARTS`.
    """
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT *, at_us - min(at_us) OVER (PARTITION BY run) AS since_us
            FROM memory_readings WHERE {in_steps(steps)}
        ), parts AS (
            SELECT *, CASE WHEN count(*) OVER (PARTITION BY run, name) <= {PARTS}
                THEN row_number() OVER (PARTITION BY run, name ORDER BY at_us, "at")
                ELSE least(since_us * {PARTS} // greatest(max(since_us) OVER (PARTITION BY run), 1),
                    {PARTS - 1}) END AS part,
                CASE WHEN "at" = 'after memory_release' THEN 1
                    WHEN "at" = 'after memory_resume' THEN -1 ELSE 0 END AS move
            FROM chosen
        )
        SELECT run, name, any_value(role) AS role,
            arg_max(since_us, (coalesce(used_bytes, 0), coalesce(rss_bytes, 0), since_us)) / 1e6
                AS begin_s,
            min(step) AS step, count(*) AS readings, max(used_bytes) AS used_bytes,
            max(total_bytes) AS total_bytes, max(rss_bytes) AS rss_bytes,
            max(host_used_bytes) AS host_used_bytes, try_cast(sum(move) AS BIGINT) AS moves
        FROM parts GROUP BY run, name, part ORDER BY run, name, begin_s
        """
    )


def phase_spans(tables: Tables, steps: Steps = None) -> Rows:
    """Place the phases of the steps on the time of `memory_over_time`.

    Returns:
        Table `phase_spans`: one row per phase of a step, and per `testing` and `init`, in
        order.
    """
    return tables.rows(
        f"""
        WITH starts AS (
            SELECT run, min(at_us) AS first_us FROM memory_readings
            WHERE {in_steps(steps)} GROUP BY run
        )
        SELECT run, p.step, phase, (begin_us - first_us) / 1e6 AS begin_s,
            (end_us - first_us) / 1e6 AS end_s
        FROM phases AS p JOIN starts USING (run)
        WHERE (parent = 'step' OR (parent IS NULL AND phase <> 'step')) AND {in_steps(steps)}
        ORDER BY run, begin_s, phase
        """
    )


# A call that moves less than this part of the device moved nothing: other processes of the device
# allocate too, and the driver counts in pages of 2 MiB.  A saver none of whose calls ever moves more
# than the second part does not work: caches alone are larger.
_NOTHING_SHARE = 0.005
_DEFEATED_SHARE = 0.02


def memory_timeline(tables: Tables, steps: Steps = None) -> Rows:
    """Return the memory of each role in each phase of a step, in order.

    Returns:
        Table `memory_timeline`: one row per run, step, phase and role, in order.
    """
    return tables.rows(
        f"""
        WITH known AS (
            SELECT *, coalesce(used_bytes / total_bytes, 0) AS measure
            FROM memory_readings WHERE {in_steps(steps)}
        ), summed AS (
            SELECT run, step, phase, role, min(at_us) AS first_us, count(*) AS readings,
                arg_max({{'name': name, 'used': used_bytes, 'total': total_bytes, 'at': "at"}},
                    (measure, at_us, name)) FILTER (used_bytes IS NOT NULL) AS top,
                min(used_bytes) AS lowest_used_bytes, max(reserved_bytes) AS reserved_bytes,
                max(rss_bytes) AS rss_bytes, max(host_used_bytes) AS host_used_bytes
            FROM known GROUP BY run, step, phase, role
        ), firsts AS (
            SELECT run, step, phase, min(first_us) AS phase_us FROM summed GROUP BY ALL
        ), placed AS (
            SELECT *, row_number() OVER (PARTITION BY run, step ORDER BY phase_us, phase) AS place
            FROM firsts
        )
        SELECT s.run, s.step, s.phase, p.place, s.role, s.readings, top.used AS used_bytes,
            top.used / top.total AS used_share, top.total AS total_bytes, s.lowest_used_bytes,
            s.reserved_bytes, top.name AS fullest, top."at" AS "at", s.rss_bytes, s.host_used_bytes
        FROM summed AS s JOIN placed AS p ON s.run = p.run
            AND s.step IS NOT DISTINCT FROM p.step AND s.phase IS NOT DISTINCT FROM p.phase
        ORDER BY s.run, s.step, p.place, s.role
        """
    )


def sleep_times(tables: Tables, steps: Steps = None) -> Rows:
    """Sum the time that engines took to release memory and to resume it.

    Processes do so at the same time, so a step waits for the slowest of them.

    Returns:
        Table `sleep_times`: one row per run and step.
    """
    return tables.rows(
        f"""
        WITH spans AS (
            SELECT * FROM memory_moves WHERE source = 'call' AND {in_steps(steps)}
        ), processes AS (
            SELECT run, step, name,
                coalesce(sum(duration_us) FILTER (event = 'memory_release'), 0) AS release_us,
                coalesce(sum(duration_us) FILTER (event = 'memory_resume'), 0) AS resume_us
            FROM spans GROUP BY run, step, name
        ), slowest AS (
            SELECT run, step, max(release_us) AS release_us, max(resume_us) AS resume_us,
                arg_max(name, (release_us + resume_us, name)) AS slowest
            FROM processes GROUP BY run, step
        ), counted AS (
            SELECT run, step, count(*) FILTER (event = 'memory_release') AS releases,
                count(*) FILTER (event = 'memory_resume') AS resumes, count(status) AS failed
            FROM spans GROUP BY run, step
        )
        SELECT run, c.step, releases, resumes, failed, w.release_us / 1e6 AS release_s,
            w.resume_us / 1e6 AS resume_s, w.slowest, t.duration_us / 1e6 AS step_s,
            (w.release_us + w.resume_us) / t.duration_us AS share
        FROM counted AS c JOIN slowest AS w USING (run, step)
        LEFT JOIN (SELECT * FROM steps WHERE finished) AS t USING (run, step)
        ORDER BY run, c.step
        """
    )


def release_effects(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the devices before and after each release and resume.

    Returns:
        Table `release_effects`: one row per run, role, event, tags and source.
    """
    return tables.rows(
        f"""
        WITH moves AS (
            SELECT *, CASE WHEN total_bytes > 1 THEN CASE event
                WHEN 'memory_release' THEN used_before_bytes - used_after_bytes
                ELSE used_after_bytes - used_before_bytes END END AS moved_bytes,
                rss_after_bytes - rss_before_bytes AS rss_change,
                host_used_after_bytes - host_used_before_bytes AS host_change
            FROM memory_moves WHERE status IS NULL AND {in_steps(steps)}
        ), summed AS (
            SELECT run, role, event, tags, source, count(*) AS calls,
                count(moved_bytes) AS measured, try_cast(median(moved_bytes) AS BIGINT) AS moved_bytes,
                min(moved_bytes) AS least_bytes, max(moved_bytes) AS most_bytes,
                try_cast(median(used_before_bytes) FILTER (moved_bytes IS NOT NULL) AS BIGINT)
                    AS used_before_bytes,
                try_cast(median(used_after_bytes) FILTER (moved_bytes IS NOT NULL) AS BIGINT)
                    AS used_after_bytes,
                max(total_bytes) FILTER (total_bytes > 1) AS total_bytes,
                median(duration_us) FILTER (source = 'call') / 1e6 AS p50_s,
                max(duration_us) FILTER (source = 'call') / 1e6 AS max_s,
                arg_max(rss_change, (abs(rss_change), rss_change)) AS rss_bytes,
                arg_max(host_change, (abs(host_change), host_change)) AS host_used_bytes
            FROM moves GROUP BY run, role, event, tags, source
        )
        SELECT *, CASE WHEN measured = 0 THEN 'unknown'
            WHEN most_bytes < {_NOTHING_SHARE} * total_bytes THEN 'nothing'
            ELSE 'moved' END AS effect
        FROM summed ORDER BY run, source, event, tags, role
        """
    )


def memory_findings(
    tables: Tables, steps: Steps = None, *, launches: Mapping[str, Mapping[str, Any]] | None = None
) -> Rows:
    """Return problems with the release of memory, or why they are unknown.

    `launches` is `run.json` by run; a log has none.

    Returns:
        Table `memory_findings`: one row per finding.
    """
    listed = tables.rows(
        f"SELECT run FROM event_counts WHERE {in_steps(steps)} UNION "
        f"SELECT run FROM memory WHERE {in_steps(steps)} ORDER BY run"
    )
    runs = [row["run"] for row in listed]
    effects = release_effects(tables, steps)
    found: Rows = []
    for run in runs:
        training = mapping_or_empty((launches or {}).get(run, {}).get("training"))
        requested = mapping_or_empty(training.get("memory"))
        mine = [row for row in effects if row["run"] == run]
        found += [
            {"run": run, **finding}
            for finding in _findings(mine, requested, training.get("rollout"))
        ]
    return found


# Engine → what switches its saver off.
_SWITCHED_OFF = {
    "sglang": "enable_memory_saver=false out of rollout.engine_kwargs.sglang",
    "vllm": "enable_sleep_mode=false out of rollout",
    "trtllm": "enable_sleep_mode=false out of rollout",
}


def _findings(effects: Rows, requested: Mapping[str, Any], engine: Any) -> list[dict[str, Any]]:
    releases = [row for row in effects if row["event"] == "memory_release"]
    # Ranks that do not lead a replica return at once; their readings are those of the leader's call.
    known = [row for row in effects if row["effect"] != "unknown"]
    on_cpu = requested.get("device") == "cpu"
    if requested.get("free_cache_engine") is False:
        text = "verl never releases the engines' memory: rollout.free_cache_engine is false."
        return [
            _finding("not-requested", False, text, "profiler.memory_saver.free_cache_engine=true")
        ]
    if not effects:
        text = "No releases or resumes of an engine's memory were recorded."
        advice = "Record the event category weights; for a log, set VERL_LOGGING_LEVEL=DEBUG."
        return [_finding("not-recorded", False, text, advice)]
    found: list[dict[str, Any]] = []
    if not known:
        reason = (
            "the run was on a CPU, where a release frees nothing"
            if on_cpu
            else "no device memory could be read in those processes"
        )
        advice = "" if on_cpu else "pip install nvidia-ml-py on the nodes of the engines."
        text = f"The memory freed by releases is unknown: {reason}."
        found.append(_finding("not-measured", False, text, advice))
    elif all(row["most_bytes"] < _DEFEATED_SHARE * row["total_bytes"] for row in known):
        calls = sum(row["calls"] for row in known)
        off = requested.get("enable_memory_saver") is False
        switch = _SWITCHED_OFF.get(engine or "sglang")
        state = f", with {switch.partition(' ')[0]}" if off and switch else ""
        text = (
            f"Releases free nothing{state}: {calls:,} releases and resumes succeeded, and the devices "
            "held as much after them as before."
        )
        advice = (
            f"Take {switch}."
            if off and switch
            else f"The engine {engine} has no memory saver."
            if off
            else "Look for expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, and at "
            "rollout.engine_kwargs.sglang.enable_memory_saver; +profiler=memory_saver checks both."
        )
        found.append(_finding("nothing-freed", True, text, advice))
    promised = requested.get("tags")
    for row in releases:
        tags = set((row["tags"] or "all").split(", "))
        if row["source"] == "call" and promised and not tags & {"all", *promised}:
            text = (
                f"Released was {row['tags']}, where verl's settings promise {', '.join(promised)}."
            )
            found.append(_finding("other-tags", True, text, ""))
    return found


def _finding(slug: str, fault: bool, message: str, advice: str) -> dict[str, Any]:
    return {"slug": slug, "fault": fault, "message": message, "advice": advice}
