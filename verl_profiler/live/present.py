"""What a run does at present: its step and phase, when it last wrote an event, whether it is stuck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_profiler.events.vocabulary import PHASES, WORKER_ROLE
from verl_profiler.live.ended_runs import clock_text
from verl_profiler.live.open_processes import age_text, parts, phase_text, since
from verl_profiler.live.process_files import ProcessFiles
from verl_profiler.live.stuck import verdict
from verl_profiler.live.stuck_lines import alarm
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import seconds

__all__ = ["Present", "present"]

_TIMERS = tuple(phase for phase in PHASES if phase != "testing")
# The last step and the one before, with several of each phase.
_ROWS = 200


@dataclass(frozen=True)
class Present:
    """What a run did when it was read.

    Args:
        state: As in `Verdict`.
        alarm: What a run is stuck on or failed of, as `summary` prints it.
        doing: Step and phase; None between steps and where no step is on record.
        since_s: Its start, in seconds since 1970.
        usually: How long it took before, to be appended.
        newest_s: The end of the last event, in seconds since 1970.
    """

    state: str
    alarm: str | None
    doing: str | None = None
    since_s: float | None = None
    usually: str = ""
    newest_s: float | None = None

    def line(self, now_s: float) -> str:
        """Return it as one line.

        Args:
            now_s: When it was read, in seconds since 1970; of a run that is over, ages end with its last event.
        """
        over = self.state in ("ended", "killed", "failed")
        texts = [self.state]
        if self.doing is not None and self.state != "ended":
            length_s = (self.newest_s if over else now_s) or now_s
            spent = (
                "" if self.since_s is None else f" for {seconds(max(length_s - self.since_s, 0))}"
            )
            texts.append(f"{self.doing}{spent}{self.usually}")
        if self.newest_s is None:
            texts.append("no events yet")
        elif over:
            texts.append(f"last event {clock_text(self.newest_s)}")
        else:
            texts.append(f"last event {seconds(max(now_s - self.newest_s, 0))} ago")
        return "; ".join(texts)


def present(files: ProcessFiles, tables: Tables) -> Present:
    """Return what a run does.

    A phase that is open for long is on record; otherwise it follows from the last one that ended, in
    the order of the step before.
    """
    opened = files.open_files()
    found = verdict(files.headers(), opened, files.directory)
    newest_us = tables.row("SELECT max(end_us) AS newest FROM event_counts").get("newest")
    newest_s = None if newest_us is None else newest_us / 1e6
    doing, since_s, usually = _doing(tables)
    rows = [
        row
        for name, content in opened.items()
        if name.startswith("trainer_")
        for row in parts(content, "phases")[-1:]
    ]
    if rows:
        begin_s = since(rows[0], newest_s or 0.0)
        doing, since_s, usually = phase_text(rows[0]), begin_s, age_text(rows[0])
    return Present(found.state, alarm(found, files.directory), doing, since_s, usually, newest_s)


def _doing(tables: Tables) -> tuple[str | None, float | None, str]:
    """Infer the trainer's step and phase, its start, and how long it took in the step before."""
    names = ", ".join(f"'{name}'" for name in ("step", *_TIMERS))
    rows = tables.rows(
        f"""
        SELECT step, event, end_us / 1e6 AS end_s, duration_us / 1e6 AS spent_s FROM event_fields
        WHERE role = 'trainer' AND step > 0 AND duration_us IS NOT NULL AND event IN ({names})
        ORDER BY end_us DESC, event = 'step' DESC LIMIT {_ROWS}
        """
    )[::-1]
    ended = {row["step"]: row["end_s"] for row in rows if row["event"] == "step"}
    timers = [row for row in rows if row["event"] != "step"]
    last = max((row["step"] for row in timers), default=None)
    if last is not None and last not in ended:
        own = [row for row in timers if row["step"] == last]
        return _following(last, own, [row for row in timers if row["step"] == last - 1])
    # Requests of a step begin before its first phase ends.
    before = max(ended, default=None)
    begun = tables.row(
        "SELECT step, min(begin_us) / 1e6 AS begin_s FROM event_fields "
        f"WHERE role = '{WORKER_ROLE}' AND step > {before or 0} GROUP BY step ORDER BY step LIMIT 1"
    )
    if begun.get("step") is None:
        return ("before the first step" if before is None else f"step {before} ended"), None, ""
    begin_s = max(begun["begin_s"], ended.get(before, begun["begin_s"]))
    lengths = [
        row["spent_s"] for row in timers if (row["step"], row["event"]) == (before, _TIMERS[0])
    ]
    return f"{_TIMERS[0]} of step {begun['step']}", begin_s, _usually(before, lengths)


def _following(
    step: int, own: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]
) -> tuple[str, float, str]:
    """Return what follows the phases of a step that ended."""
    done, order = ([row["event"] for row in rows] for rows in (own, before))
    begin_s = own[-1]["end_s"]
    if done[-1] not in order:
        return f"step {step} after {done[-1]}", begin_s, ""
    place = len(done) if done == order[: len(done)] else order.index(done[-1]) + 1
    if place == len(order):
        return f"end of step {step}", begin_s, ""
    lengths = [row["spent_s"] for row in before if row["event"] == order[place]]
    return f"{order[place]} of step {step}", begin_s, _usually(step - 1, lengths)


def _usually(step: int | None, lengths: Sequence[float]) -> str:
    return f", {seconds(sum(lengths))} in step {step}" if lengths else ""
