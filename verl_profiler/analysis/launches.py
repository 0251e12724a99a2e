"""What was launched, from `run.json`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from verl_profiler.events.json_values import is_list, is_object, mapping_or_empty
from verl_profiler.events.redaction import recorded_command, recorded_values

# Versions that the line of facts names, under the names that verl's users know.
_VERSIONS = ("verl", "sglang", "vllm", "torch")


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


def launch_command(launch: Mapping[str, Any]) -> str:
    """Return the command of a launch, without what is not to be recorded; empty where it was not recorded."""
    command = launch.get("command")
    return " ".join(recorded_command([*map(str, command)])) if is_list(command) else ""


def launch_texts(value: Mapping[str, Any], group: str) -> list[tuple[str, str]]:
    """Return what a group of run.json has, as keys and texts; of verl's, what is set."""
    flat = itertools.islice(_flat(recorded_values(value, group)), 200)
    kept = (each for each in flat if group == "settings" or each[1] != "null")
    return [*kept]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        if is_object(each) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            text = each if isinstance(each, str) else json.dumps(each, default=str)
            yield f"{prefix}{key}", text
