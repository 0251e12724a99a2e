"""What was launched, as data of the report page: command, versions, settings and processes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_profiler.events.json_values import is_list, is_object, mapping_or_empty
from verl_profiler.events.redaction import recorded_command, recorded_values
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
    usual = {*_texts(defaults, "settings")}
    launches: list[dict[str, Any]] = []
    for label in run.labels:
        launch = run.launches.get(label) or {}
        facts = [
            [key, short_text(str(recorded_values(launch[key], key)))]
            for key in ("experiment", "launched", "host", "cwd")
            if launch.get(key) is not None
        ]
        command = launch.get("command")
        if is_list(command):
            words = recorded_command([str(word) for word in command])
            facts.append(["command", short_text(" ".join(words), 4_000)])
        groups: dict[str, list[list[str]]] = {}
        for group in ("training", "versions", "settings"):
            value = launch.get(group)
            if is_object(value):
                kept = (each for each in _texts(value, group) if each not in usual)
                groups[group] = [[*each] for each in kept]
        launches.append({"run": short_text(label), "facts": facts, **groups})
    return {
        "runs": [short_text(label) for label in run.labels],
        "line": _line([run.launches.get(label) or {} for label in run.labels]),
        "launches": launches,
        "notes": [short_text(note, 2_000) for note in run.notes],
    }


# Versions that the line of facts names, under the names that verl's users know.
_VERSIONS = ("verl", "sglang", "vllm", "torch")


def _line(launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was run, and when, as a few texts; what launches differ in, once for each value."""
    texts: list[str] = []
    for column in zip(*(launch_facts(each).values() for each in launches), strict=True):
        values = list(dict.fromkeys(each for each in column if each))
        texts += [short_text(" / ".join(values))] if values else []
    return texts


def launch_facts(launch: Mapping[str, Any]) -> dict[str, str]:
    """Return launched, devices, model, batch and versions of a launch; empty what was not recorded."""
    training = mapping_or_empty(recorded_values(launch.get("training"), "training"))
    versions = mapping_or_empty(recorded_values(launch.get("versions"), "versions"))
    nodes, each = training.get("nnodes"), training.get("n_gpus_per_node")
    on_cpu = any(str(each).endswith("+cpu") for each in versions.values())
    device = "device" if on_cpu else "GPU"
    batch, samples = training.get("train_batch_size"), training.get("rollout_n")
    named = [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)]
    return {
        "launched": str(launch.get("launched") or "")[:16].replace("T", " "),
        "devices": f"{nodes} × {each} {device}{'s' * (each != 1)}" if nodes and each else "",
        "model": str(training.get("model") or "").rstrip("/").rpartition("/")[2],
        "batch": f"batch {batch}" + (f" × {samples}" if samples else "") if batch else "",
        "versions": ", ".join(named),
    }


def _texts(value: Mapping[str, Any], group: str) -> list[tuple[str, str]]:
    """Return what a group of run.json has, as keys and texts; of verl's, what is set."""
    flat = itertools.islice(_flat(recorded_values(value, group)), 200)
    kept = (each for each in flat if group == "settings" or each[1] != "null")
    return [(short_text(key), short_text(text)) for key, text in kept]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        if is_object(each) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            text = each if isinstance(each, str) else json.dumps(each, default=str)
            yield f"{prefix}{key}", text
