"""What was launched, as data of the report page: command, versions, settings and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.launches import launch_command, launch_facts, launch_texts
from verl_profiler.events.json_values import is_object
from verl_profiler.events.redaction import recorded_values
from verl_profiler.reading.reader import Run
from verl_profiler.render.frames import short_text


def about_run(run: Run, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was launched.

    Args:
        run: An open run.
        defaults: Settings of the profiler; those of the run that are the same are left out.

    Returns:
        runs (labels), line (date, devices, model, batch and versions, as texts), launches (facts and
        groups of settings), notes (of the reader).
    """
    usual = {*launch_texts(defaults, "settings")}
    launches: list[dict[str, Any]] = []
    for label in run.labels:
        launch = run.launches.get(label) or {}
        facts = [
            [key, short_text(str(recorded_values(launch[key], key)))]
            for key in ("experiment", "launched", "host", "cwd")
            if launch.get(key) is not None
        ]
        if command := launch_command(launch):
            facts.append(["command", short_text(command, 4_000)])
        groups = {
            group: [
                [*map(short_text, each)]
                for each in launch_texts(launch[group], group)
                if each not in usual
            ]
            for group in ("training", "versions", "settings")
            if is_object(launch.get(group))
        }
        launches.append({"run": short_text(label), "facts": facts, **groups})
    every = [launch_facts(run.launches.get(label) or {}) for label in run.labels]
    # What launches differ in is there once for each value.
    line = [
        " / ".join(dict.fromkeys(facts[key] for facts in every if facts[key]))
        for key in launch_facts({})
    ]
    return {
        "runs": [short_text(label) for label in run.labels],
        "line": [short_text(text) for text in line if text],
        "launches": launches,
        "notes": [short_text(note, 2_000) for note in run.notes],
    }
