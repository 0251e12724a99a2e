"""`export trackers`: the report and the findings of a run for its trackers."""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.output import json_text
from verl_profiler.errors import ReadingError
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.vocabulary import TRACKERS
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from verl_profiler.exports.trackers import Profile
    from verl_profiler.reading.reader import Run

_COLUMNS = ("finding", "message", "recoverable_s", "share", "who", "try")


def publish_run(args: argparse.Namespace) -> int:
    """Publish; print a line per tracker; return 0, or 1 if one failed or there is nothing to publish.

    Raises:
        ReadingError: The paths cannot be used, or there is no tracker (exit code 2).
    """
    from verl_profiler.cli.report import write
    from verl_profiler.reading.reader import load

    with tempfile.TemporaryDirectory(prefix="verl-profiler-") as made:
        folder = Path(made)
        with load(args.runs, cache=not args.no_cache) as opened:
            training = _training(opened)
            trackers = list(dict.fromkeys(args.tracker or training.get("logger") or ()))
            if not trackers:
                raise ReadingError(
                    "the run has no logger to publish to.\n"
                    f"Name one: verl-profiler export trackers RUN --tracker {' '.join(TRACKERS)}",
                    "no-tracker",
                )
            report = write(
                args.runs, folder / "report.html", None, force=False, cache=not args.no_cache
            )
            if report is None:
                return 1
            profile = _profile(
                opened,
                report,
                args.project or str(training.get("project_name") or "verl"),
                args.experiment or str(training.get("experiment_name") or opened.labels[0]),
            )
        done = [_published(profile, tracker) for tracker in trackers]
    return 0 if all(done) else 1


def _training(opened: Run) -> Mapping[str, Any]:
    found = (launch.get("training") for launch in opened.launches.values())
    return mapping_or_empty(next(filter(None, found), None))


def _published(profile: Profile, tracker: str) -> bool:
    from verl_profiler.exports.trackers import publish

    try:
        where = publish(profile, tracker)
    except ImportError as error:
        print(visible(f"Not published to {tracker}: {error}"))
    except Exception as error:  # noqa: BLE001  the client's own, of any kind; others are still tried
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        print(visible(f"Not published to {tracker}: {what}"))
    else:
        print(visible(f"Published to {tracker}: {where}"))
        return True
    return False


def _profile(opened: Run, report: Path, project: str, experiment: str) -> Profile:
    from verl_profiler.analysis.overview import headline, phase_totals
    from verl_profiler.analysis.registry import explained
    from verl_profiler.analysis.selection import left_out
    from verl_profiler.analysis.steps import step_phases, step_times
    from verl_profiler.exports.trackers import Profile
    from verl_profiler.views.findings import finding_texts

    why = explained(opened.tables, None)
    rows = why["findings"]
    texts = finding_texts(rows)
    markdown = _markdown(experiment, rows, opened.problems)
    paths = report.with_name("findings.md"), report.with_name("findings.json")
    paths[0].write_text(markdown, encoding="utf-8", errors="backslashreplace")
    paths[1].write_text(
        json_text({"format": 2, "findings": rows, "problems": opened.problems}), encoding="utf-8"
    )
    warm_up = left_out(opened.tables)
    scalars: dict[str, float | None] = {"profile/finding_count": float(len(rows))}
    for row in headline(step_times(opened.tables, None), why["bubble_ledger"], warm_up)[:1]:
        scalars |= {
            "profile/steps": float(row["steps"]),
            "profile/step_mean_s": row["step_mean_s"],
            "profile/useful_device_share": row["useful_share"],
        }
    scalars.setdefault("profile/steps", 0.0)
    for row in phase_totals(step_phases(opened.tables, None), left_out=warm_up):
        scalars.setdefault(f"profile/phase/{row['phase']}_mean_s", row["mean_s"])
    for row in rows:
        if row["recoverable_s"] is not None:
            scalars.setdefault(f"profile/recoverable/{row['finding']}_s", row["recoverable_s"])
    return Profile(
        project,
        experiment,
        [report, *paths],
        markdown,
        _COLUMNS,
        [
            tuple((row | text)[name] for name in _COLUMNS)
            for row, text in zip(rows, texts, strict=True)
        ],
        {name: value for name, value in scalars.items() if value is not None},
    )


def _markdown(experiment: str, rows: list[dict[str, Any]], problems: list[str]) -> str:
    """Return what the summary prints of the findings, as a block of code."""
    from verl_profiler.views.findings import finding_list
    from verl_profiler.views.text_tables import warnings

    found = finding_list(rows) or "No anomaly was found."
    blocks = [f"Profile of {visible(experiment)}", found, warnings(problems)]
    return textwrap.indent("\n\n".join(blocks), "    ") + "\n"
