"""Which events of a run are missing, and why: not recorded, dropped, not written, or not here yet.

The driver writes `shipping.json` about nodes with disks of their own, a run's upload process `upload.json`
beside the copy.  Headers arrive more often than events, so that the count of some missing ones is known; what
was written after the last header is bounded in time.

A header holds up to when its process's files are complete (`complete_until`), overwritten after every
flush.  A killed process whose files are complete beyond the last work of all others has lost nothing.

Analyses for which the details of a run are too few, or too many, are named, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.vocabulary import WORKER_ROLE
from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source
from verl_profiler.reading.processes import Process
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted, share, some

_RANK_LIMIT = 100_000
# The reasons that headers have for dropped events.
_DROPPED = {
    "queue_full": "the queue was full",
    "disk": "the disk rejected them",
    "budget": "the byte budget (profiler.events.max_gb) was used up",
    "bad_event": "they could not be encoded",
    "bad_path": "their file could not be opened",
    "removed": "their file was removed during the run",
    "late": "they were recorded after the end, or could not be written within the time limit at exit",
}
# Of more processes than this, one sentence names so many.
_SHOWN = 4
# A line has at least so many: its timestamp, event and step.
_LINE_BYTES = 40
# Without news of a shipment or an upload for so long, and the interval between two rounds, whoever writes
# them was killed.
_NO_NEWS_S = 90.0
# Without a sign of life for so long, a process has been killed or is stuck.
_SILENCE_S = 60.0
# Written by timer, or about calls that never ended: no evidence of work.
_NO_WORK = ("profiler_cost", "device", "event_loop_lag")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# A dozen replays of a step with so many generate calls take about a minute, and half a gigabyte.
REPLAYED_CALLS = 200_000
# Of each step and process; their details are always recorded.
_SLOWEST = 5
_EXACT = "Counts, durations, components and percentiles of requests, the critical path and tails are exact"


def process_problems(
    source: Source,
    found: dict[str, Process],
    counts: dict[str, int] | None,
    *,
    original: bool,
) -> Iterator[str]:
    """Return what is missing, dropped and unfinished according to the headers.

    Args:
        source: The run.
        found: Its processes.
        counts: Events read, by process name; None where not all were read.
        original: The files are the original logger's, which wrote no headers.
    """
    if original:
        return
    if not source.launch:
        yield "run.json is missing, so the launch is unknown"
    gaps = None
    if source.whole and counts is not None:
        # Of Parquet files, which process an event is of is in the events only.
        gaps = {
            name: max((each.recorded_events or 0) - counts.get(name, 0), 0)
            for name, each in found.items()
            if not source.parquet
        }
    yield from arrival_problems(source, gaps)
    if counts is not None and gaps is not None:
        yield from _missing_files(source, found, counts, gaps)
        yield from _surplus(found, counts)
    yield from _hosts(found)
    yield from _losses(found.values())
    yield from _probe_problems(found)


def _hosts(found: dict[str, Process]) -> Iterator[str]:
    """Say how well the clocks of several hosts are placed on one axis."""
    hosts: dict[str, list[Process]] = {}
    for process in found.values():
        if boot_id := process.of("clock", "boot_id"):
            hosts.setdefault(boot_id, []).append(process)
    if len(hosts) < 2:
        return
    aligned: list[str] = []
    for members in hosts.values():
        worst = max(members, key=lambda each: each.clock_bound_us or 0)
        if worst.clock_bound_us:
            drift = f", drift {worst.drift * 1e6:+.1f} ppm" if worst.drift else ""
            aligned.append(
                f"{worst.of('host')} (moved by {worst.shift_us / 1000:+.3f} ms{drift}) to within "
                f"{worst.clock_bound_us / 1000:.2f} ms (residual "
                f"{(worst.clock_residual_us or 0) / 1000:.2f} ms)"
            )
    if aligned:
        yield f"clocks aligned with the driver's: {', '.join(sorted(aligned)[:8])}"
    unknown = sorted(
        {
            str(each.of("host"))
            for members in hosts.values()
            for each in members
            if each.clock_bound_us is None
        }
    )
    if unknown:
        yield (
            f"the run used {len(hosts)} hosts, and the clocks of {some(unknown, _SHOWN)} were not "
            "compared with the driver's; their times are only as accurate as their wall clocks"
        )


def _missing_files(
    source: Source, found: dict[str, Process], counts: Mapping[str, int], gaps: Mapping[str, int]
) -> Iterator[str]:
    headless = [name for name, process in found.items() if process.header is None]
    if headless:
        yield f"no header in processes/ for {some(headless, _SHOWN)}; their host, clock and losses are unknown"
    late = not_arrived(source)
    yield from _unread([name for name in gaps if gaps[name] and name not in late], counts, found)
    ranks = {p.rank for p in found.values() if p.role == WORKER_ROLE and p.rank is not None}
    # Whoever claims a rank in the millions did not count from 0.
    highest = max(ranks, default=-1)
    absent = sorted(set(range(highest)) - ranks) if highest < _RANK_LIMIT else []
    if absent:
        names = ", ".join(f"worker_{rank}" for rank in absent[:8])
        yield f"no file was found of {names}{' and others' if len(absent) > 8 else ''}"
    fallbacks = [
        f"{name} ({header['fallback']})"
        for name, header in source.headers.items()
        if header.get("fallback")
    ]
    if fallbacks:
        yield f"could not write into the run directory: {', '.join(fallbacks[:5])}"


def named(names: Collection[str]) -> str:
    """Write which processes are meant: the name of one, or how many and the first of them."""
    listed = [*names]
    return listed[0] if len(listed) == 1 else f"{len(listed)} processes ({some(listed, _SHOWN)})"


def _unread(
    names: Sequence[str], counts: Mapping[str, int], found: Mapping[str, Process]
) -> Iterator[str]:
    """Say of which processes events are missing."""
    recorded = {name: found[name].recorded_events or 0 for name in names}
    absent = [name for name in names if not counts.get(name, 0)]
    partly = [name for name in names if counts.get(name, 0)]
    if absent:
        hosts = sorted({str(found[name].of("host")) for name in absent})
        yield (
            f"the event files of {named(absent)} are missing ({sum(recorded[name] for name in absent)} "
            f"events by their headers); look for them on {some(hosts, _SHOWN)}"
        )
    if partly:
        yield (
            f"{named(partly)} wrote {sum(recorded[name] for name in partly)} events and "
            f"{sum(counts[name] for name in partly)} were found; the rest is missing"
        )


def _surplus(found: Mapping[str, Process], counts: Mapping[str, int]) -> Iterator[str]:
    """Say which processes have more lines than they wrote; a killed one wrote some after its header."""
    more = {
        name: (process.recorded_events, counts[name])
        for name, process in found.items()
        if process.of("ended")
        and process.recorded_events
        and counts.get(name, 0) > process.recorded_events
        # Some writers of headers do not count.
        and (process.of("counters", "bytes") or math.inf) >= _LINE_BYTES * process.recorded_events
    }
    if more:
        yield (
            f"{named(more)} wrote {sum(each[0] for each in more.values())} events and "
            f"{sum(each[1] for each in more.values())} were found; some are not of this run (another "
            "run's file? an edited copy?), so its numbers may be wrong"
        )


def _losses(found: Iterable[Process]) -> Iterator[str]:
    """Say which processes dropped events or had errors."""
    dropped: dict[tuple[str, ...], dict[str, int]] = {}
    errors: dict[str, int] = {}
    for process in found:
        if process.dropped:
            by_reason = mapping_or_empty(process.of("counters", "dropped_by"))
            reasons = tuple(str(key) for key, count in by_reason.items() if count)
            dropped.setdefault(reasons or ("queue_full",), {})[process.name] = process.dropped
        if write_errors := process.of("counters", "write_errors"):
            errors[process.name] = write_errors
    for reasons, by_name in dropped.items():
        why = ", ".join(_DROPPED.get(key, key) for key in reasons)
        yield (
            f"{named(by_name)} dropped {sum(by_name.values())} events because {why}; totals are "
            "too low"
        )
    if errors:
        yield f"{named(errors)} had {sum(errors.values())} write errors"


def _probe_problems(found: dict[str, Process]) -> Iterator[str]:
    """Say once per probe what could not be placed or failed, with the processes concerned."""
    missed: dict[tuple[str, str], list[str]] = {}
    failed: dict[str, dict[str, int]] = {}
    for name, process in found.items():
        for probe, reason in mapping_or_empty(process.of("probes", "missed")).items():
            missed.setdefault((str(probe), str(reason)), []).append(name)
        for probe, count in mapping_or_empty(process.of("probes", "errors")).items():
            if count:
                failed.setdefault(str(probe), {})[name] = int(count)
    for (probe, reason), names in sorted(missed.items()):
        yield f"probe {probe} is not installed in {some(names, _SHOWN)}: {reason}"
    for probe, by_name in sorted(failed.items()):
        total = sum(by_name.values())
        yield f"probe {probe} failed {total} times in {some(list(by_name), _SHOWN)}; those events lack fields"


def not_arrived(source: Source) -> Collection[str]:
    """Return the processes of which files may be missing for one of these reasons."""
    return source.headers if _is_incomplete(source) else _of_nodes(source).keys()


def arrival_problems(source: Source, gaps: Mapping[str, int] | None) -> Iterator[str]:
    """Yield a sentence for an upload that has not ended, and for each node that did not send everything.

    Args:
        source: The run.
        gaps: By process, how many events its last header counts that were not read; None where not
            all were read.
    """
    now = datetime.now(timezone.utc)
    nodes = _of_nodes(source)
    if _is_incomplete(source):
        known = {name: gap for name, gap in (gaps or {}).items() if gap and name not in nodes}
        yield _of_upload(source.upload, known, now)
    for node in (source.shipping.get("nodes") or ()) if gaps is not None else ():
        names = sorted(name for name, of in nodes.items() if of is node)
        missing = sum((gaps or {}).get(name, 0) for name in names)
        if node.get("state") != "ended":
            yield from _of_node(source.shipping, node, names, missing, now)


def _is_incomplete(source: Source) -> bool:
    """Return whether a run is a copy whose upload has not ended, or could not upload all."""
    upload = source.upload
    return bool(upload) and (upload.get("ended") is None or bool(upload.get("failed")))


def _of_nodes(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the nodes that did not send everything, by the names of their processes here."""
    found: dict[str, Mapping[str, Any]] = {}
    for node in source.shipping.get("nodes") or ():
        if node.get("state") != "ended":
            processes: Mapping[str, str] = node.get("processes") or {}
            found.update((name, node) for name in processes.values())
    return found


def _goes_on(account: Mapping[str, Any], now: datetime) -> bool:
    updated = instant(account.get("updated"))
    silence_s = _NO_NEWS_S + (account.get("every_s") or 0.0)
    return (
        account.get("ended") is None
        and updated is not None
        and (now - updated).total_seconds() < silence_s
    )


def _of_upload(upload: Mapping[str, Any], gaps: Mapping[str, int], now: datetime) -> str:
    uploaded = instant(upload.get("uploaded"))
    last = f"last at {uploaded:%Y-%m-%d %H:%M:%S} UTC" if uploaded else "no upload was completed"
    names = some(sorted(gaps, key=lambda name: (-gaps[name], name)), _SHOWN)
    missing = f"{counted(sum(gaps.values()), 'event')} that its processes had written by their last headers"
    if _goes_on(upload, now):
        rest = f"; {missing} have not arrived yet ({names})" if gaps else ""
        return f"the run is still being uploaded ({last}), or its upload was killed{rest}"
    if upload.get("ended") is None:
        why = f"the upload of the run did not end, so it was killed ({last})"
        later = "what was written later is missing"
        missed = f"{missing} did not arrive ({names}), and {later}" if gaps else later
    else:
        failed = counted(upload.get("failed") or 0, "file")
        first = next(iter(upload.get("problems") or ()), "")
        why = f"{failed} could not be uploaded" + (f" ({first})" if first else "")
        missed = f"{missing} did not arrive ({names})" if gaps else "what they hold is missing"
    directory, url = upload.get("directory") or "RUN", upload.get("url") or "URL"
    host = f" on {upload['host']}" if upload.get("host") else ""
    return (
        f"{why}; {missed}. The rest is in {directory}{host}: run there: verl-profiler collect "
        f"{directory} --to {url}; if that directory is lost, so is the rest"
    )


def _of_node(
    shipping: Mapping[str, Any],
    node: Mapping[str, Any],
    names: list[str],
    missing: int,
    now: datetime,
) -> Iterator[str]:
    host = node.get("host") or "a node"
    named = some(names, _SHOWN)
    shipped, seen, left = (instant(node.get(key)) for key in ("shipped", "seen", "left"))
    last = f"its events were last shipped at {_clock(shipped)}" if shipped else "no shipment ended"
    known = f"{counted(missing, 'event')} that its processes had written by {_clock(seen)} did not arrive"
    if left is not None:
        gap_s = (left - (seen or left)).total_seconds()
        yield (
            f"{host} left the cluster by {_clock(left)}; {last}: {known}, and up to {gap_s:.0f} s of "
            f"later events are lost with its disk ({named})"
        )
    elif not _goes_on(shipping, now):
        why = f" ({node['problem']})" if node.get("problem") else ""
        yield (
            f"{host} did not send all of its events{why}; {last}: {known}, later ones are on its disk "
            f"({named}). While the cluster is up, run: verl-profiler collect --ray "
            f"{shipping.get('directory') or 'RUN'}"
        )
    elif missing:
        yield (
            f"{counted(missing, 'event')} of {named} are still on {host}; they are shipped every "
            f"{shipping.get('every_s') or 0.0:g} s"
        )


def _clock(moment: datetime | None) -> str:
    return f"{moment:%H:%M:%S} UTC" if moment is not None else "an unknown time"


def end_problems(
    tables: Tables, processes: Iterable[Process], now: datetime | None = None
) -> Iterator[str]:
    """Yield a sentence for each thing that processes took with them when they were killed.

    Args:
        tables: Of one run or several.
        processes: Theirs, without those whose files did not arrive from their node.
        now: The present, to distinguish a run that goes on from one that was killed as a whole.
    """
    now_us = ((now or datetime.now(timezone.utc)) - _EPOCH) // timedelta(microseconds=1)
    runs: dict[str, list[Process]] = {}
    for process in sorted(processes, key=lambda each: (each.run, each.name)):
        if process.header is not None:
            runs.setdefault(process.run, []).append(process)
    for run, members in runs.items():
        if any(each.of("ended") is None for each in members):
            yield from _of_run(members, _last_work(tables, run), now_us)


def _of_run(members: list[Process], work: Mapping[str, int], now_us: int) -> Iterator[str]:
    killed = [each for each in members if each.of("ended") is None]
    heard = {each.name: _heard_us(each) for each in members}
    last_us = max((us for us in (*heard.values(), *work.values()) if us is not None), default=0)
    silent = [each for each in killed if last_us - (heard[each.name] or last_us) > _SILENCE_S * 1e6]
    yield from _fell_silent(silent, last_us)
    over = any(each.of("ended") and each.role in ("trainer", "driver") for each in members)
    if not over and now_us - last_us <= _SILENCE_S * 1e6:
        # It goes on, for all that is known, and nothing has been lost.
        return
    waited = {each.name: count for each in killed if (count := each.of("waiting_events"))}
    if waited:
        yield (
            f"{named(waited)} {_was(waited)} killed before {'they' if len(waited) > 1 else 'it'} wrote "
            f"{counted(sum(waited.values()), 'event')}, now lost"
        )
    rest = [each for each in killed if each not in silent]
    complete = {each.name: each.placed_us("complete_until") for each in rest}
    known = {us: name for name, us in complete.items() if us is not None}
    if known and len(killed) == len(members):
        # Compared with each other, none of them has lost anything.
        first_us, last_us = min(known), max(known)
        later = f" ({_tenths(last_us)} of {known[last_us]})" if last_us > first_us else ""
        ends = f"none of {len(members):,} processes recorded its end"
        if len(members) == 1:
            ends = f"{members[0].name} recorded no end"
        yield (
            f"{ends}: the run was killed, or its disk stopped responding; events after "
            f"{_tenths(first_us)} UTC may be lost{later}"
        )
        return
    lost: dict[str, float] = {}
    for each in rest:
        until_us = complete[each.name]
        others_us = max((us for name, us in work.items() if name != each.name), default=0)
        if until_us is not None and others_us > until_us:
            lost[each.name] = min((others_us - until_us) / 1e6, _window_s(each))
    if lost:
        yield (
            f"{len(lost)} of {len(members)} processes were killed while others worked; "
            f"{_bound(max(lost.values()))} each may be lost ({some(lost, _SHOWN)})"
        )


def _fell_silent(silent: list[Process], last_us: int) -> Iterator[str]:
    """Yield a sentence for all of them."""
    if silent:
        heard_us = sorted({_heard_us(each) or 0 for each in silent})
        last = " to ".join(dict.fromkeys(map(_time, (heard_us[0], heard_us[-1]))))
        names = [each.name for each in silent]
        each = " each" if names[1:] else ""
        yield (
            f"{named(names)} {_was(names)} killed or hung: last activity at {last}, the run's at "
            f"{_time(last_us)} UTC; {_bound(max(map(_window_s, silent)))}{each} may be lost"
        )


def _was(names: Collection[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _time(us: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=us):%H:%M:%S}"


def _tenths(us: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=us):%H:%M:%S.%f}"[:-5]


def _heard_us(process: Process) -> int | None:
    """Return the last sign of life of a process, on the run's axis."""
    signs = (process.placed_us("complete_until"), process.placed_us("updated"))
    return max((us for us in signs if us is not None), default=None)


def _window_s(process: Process) -> float:
    """Return of how much time events can be missing at most."""
    return (process.of("flush_interval_s") or 0.5) + (process.of("longest_flush_s") or 0.0)


def _last_work(tables: Tables, run: str) -> dict[str, int]:
    """Return by process when it is last known to have worked."""
    rows = tables.rows(
        "SELECT name, max(end_us) AS end_us FROM event_fields WHERE run = ? "
        f"AND event NOT IN {_NO_WORK} AND status IS DISTINCT FROM 'unfinished' "
        "AND end_us IS NOT NULL GROUP BY name",
        [run],
    )
    return {row["name"]: row["end_us"] for row in rows}


def _bound(seconds: float) -> str:
    length = f"{seconds:.1f} s" if seconds >= 0.05 else f"{max(seconds * 1000, 1):.0f} ms"
    return f"up to {length} of events"


def detail_notes(tables: Tables) -> Iterator[str]:
    """Yield for each run with sampled details how many requests have them, and what is an estimate."""
    for row in tables.rows(
        """
        WITH chosen AS (
            SELECT run, min(one_in) AS least, max(one_in) AS most
            FROM (
                SELECT run, integer_of(rest, 'one_in') AS one_in FROM event_fields
                WHERE event = 'request' AND family = 'rollout' AND rest IS NOT NULL
            ) WHERE one_in IS NOT NULL GROUP BY run
        ), settings AS (
            SELECT run, count(*) AS requests, count_if(detailed) AS detailed FROM requests GROUP BY run
        )
        SELECT * FROM chosen JOIN settings USING (run) WHERE detailed < requests ORDER BY run
        """
    ):
        least, most = row["least"], row["most"]
        slowest = f"the {_SLOWEST} slowest of each step and process"
        if not most:
            chosen = f"only of {slowest}"
        else:
            part = (
                share(1 / most)
                if least == most
                else f"{share(1 / most)} to {share(1 / max(least, 1))}"
            )
            if least == 0:
                part = f"at most {share(1 / most)}, none at the end"
            chosen = f"share {part}, and {slowest}"
        estimates = (
            "numbers of turns, engine calls and tools (≈) are estimated from them"
            if most
            else "numbers of turns, engine calls and tools are those of these requests alone"
        )
        yield (
            f"{row['run']}: details of {row['detailed']:,} of {counted(row['requests'], 'request')} were "
            f"recorded ({chosen}). {_EXACT}; {estimates}. What-if needs the details of all requests of "
            "a step (profiler.events.detail_share=1)."
        )


def too_large(tables: Tables) -> list[dict[str, Any]]:
    """Return run, step and calls of the steps that are not replayed, because they have too many calls."""
    return tables.rows(
        "SELECT run, step, sum(events)::BIGINT AS calls FROM event_counts "
        "WHERE event = 'engine_call' AND family = 'rollout' GROUP BY run, step "
        f"HAVING sum(events) > {REPLAYED_CALLS} ORDER BY run, step"
    )


def replay_notes(tables: Tables) -> Iterator[str]:
    """Yield a sentence for the steps that are too large to be replayed."""
    steps = too_large(tables)
    if steps:
        most = max(steps, key=lambda row: row["calls"])
        others = f" and {counted(len(steps) - 1, 'other step')}" if len(steps) > 1 else ""
        yield (
            f"What-if leaves out step {most['step']} with {most['calls']:,} generate calls{others}: a step "
            f"is replayed if it has at most {REPLAYED_CALLS:,}."
        )
