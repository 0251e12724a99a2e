"""What a run does at present: its step and phase, when it last wrote an event, whether it is stuck."""

from __future__ import annotations

from dataclasses import dataclass

from verl_profiler.events.vocabulary import PHASES
from verl_profiler.live.open_processes import (
    ProcessFiles,
    age_text,
    clock_text,
    parts,
    phase_text,
    since,
)
from verl_profiler.live.stuck import alarm, verdict
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import seconds

_TIMERS = tuple(phase for phase in PHASES if phase != "testing")


@dataclass(frozen=True)
class Present:
    """What a run did when it was read.

    Args:
        state: As in `Verdict`.
        alarm: What a run is stuck on or failed of, as `summary` prints it.
        doing: Step and phase, or what ended last; None where that is not known.
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
    """Return what a run does: the phase that is on record as open, else what ended last."""
    opened = files.open_files()
    found = verdict(files.headers(), opened, files.directory)
    newest_us = tables.row("SELECT max(end_us) AS newest FROM event_counts").get("newest")
    newest_s = None if newest_us is None else newest_us / 1e6
    doing, since_s, usually = *_last_phase(tables), ""
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


def _last_phase(tables: Tables) -> tuple[str, float | None]:
    """Return the phase of the trainer that ended last, and when."""
    names = ", ".join(f"'{name}'" for name in ("step", *_TIMERS))
    row = tables.row(
        f"""
        SELECT step, event, end_us / 1e6 AS end_s FROM event_fields
        WHERE role = 'trainer' AND step > 0 AND duration_us IS NOT NULL AND event IN ({names})
        ORDER BY end_us DESC, event = 'step' DESC LIMIT 1
        """
    )
    if not row:
        return "before the first step", None
    if row["event"] == "step":
        return f"after step {row['step']}", row["end_s"]
    return f"after {row['event']} of step {row['step']}", row["end_s"]
