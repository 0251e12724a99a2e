"""Which probes, parameters and settings each version of verl has, by its sources; needs no GPU and no install.

    python tests/verl_drift.py            # compare docs/versions.md with the wheels of VERSIONS
    python tests/verl_drift.py --write    # write it there
    python tests/verl_drift.py FOLDER     # print it for a source tree, the folder that holds `verl`

A new verl is one more of VERSIONS.  `make test-all` compares.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

from omegaconf import OmegaConf, open_dict

from verl_profiler.analysis.explain.fixes import FIXES
from verl_profiler.capture.probes import PROBES as CAPTURES
from verl_profiler.capture.verl_keys import translate
from verl_profiler.launch import memory_saver, prepare, training_facts
from verl_profiler.launch.settings import MemorySaverSettings
from verl_profiler.launch.targets import Sources, find_targets
from verl_profiler.probes import all_probes
from verl_profiler.transfer_queue.probes import PROBES as TRACING

VERSIONS = ("0.8.0", "0.9.0", "0.9.1")
PAGE = Path(__file__).parents[1] / "docs" / "versions.md"
BEGIN, END = "<!-- tests/verl_drift.py begins -->\n", "<!-- tests/verl_drift.py ends -->\n"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl-profiler-tests"
ROLLOUT = "actor_rollout_ref.rollout"
COMPONENTS = ("actor_rollout_ref.actor", ROLLOUT, "actor_rollout_ref.ref", "critic")


class NoWheel(Exception):
    """A wheel is not in the cache and cannot be downloaded."""


def folder_of(version, package="verl"):
    """Return the folder of a version's sources, from its wheel; downloaded once."""
    folder = CACHE / f"{package}-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", CACHE]
        done = subprocess.run(
            [*command, f"{package}=={version}"], check=False, capture_output=True, text=True
        )
        wheels = list(CACHE.glob(f"{package.lower()}-{version}-*.whl"))
        if done.returncode or not wheels:
            raise NoWheel(f"no wheel of {package} {version}: {done.stderr.strip()[-300:]}")
        made = folder.with_suffix(f".{os.getpid()}")
        zipfile.ZipFile(wheels[0]).extractall(made)
        made.replace(folder)
    return folder


def named(probe):
    return f"`{probe.event or probe.targets[0].rpartition('.')[2].rpartition(':')[2]}`"


def families(folder):
    """Return, by category, the probes that a version has fully, partly and not at all.

    Those whose targets are all in other packages are left out, and modules that it does not have: a probe
    has a target for each engine and trainer.
    """
    found = {}
    probes = {"TransferQueue tracing": TRACING, "nsys captures": CAPTURES}
    probes |= {
        each.family: [probe for probe in all_probes() if probe.family == each.family]
        for each in all_probes()
    }
    sources = Sources(folder)
    for family, group in probes.items():
        states = found.setdefault(family, {"fully": [], "partly": [], "none": []})
        for probe in group:
            rows = [row for row in find_targets([probe], sources) if row.target.startswith("verl.")]
            if not rows:
                continue
            there = [row for row in rows if row.state == "found"]
            gaps = any(row.state == "missing" or row.unread for row in rows)
            state = "none" if not there else "partly" if gaps else "fully"
            states[state].append(named(probe))
    return dict(sorted((family, each) for family, each in found.items() if any(each.values())))


def leaves(node, prefix=""):
    for key in node:
        value = None if OmegaConf.is_missing(node, key) else node._get_node(key)
        if OmegaConf.is_dict(value) and len(value):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def settings(folder):
    """Return, by what names them, the keys that a version's trainer config has, and those it has not."""
    file = folder / "verl/trainer/config/_generated_ppo_trainer.yaml"

    def load():
        return OmegaConf.load(file)

    fixes = {key for fix in FIXES.values() for key in fix.keys if not key.startswith("profiler.")}
    facts = training_facts
    recorded = {
        *facts._NUMBERS,
        *facts._FLAGS,
        *(path for paths in facts._PATHS.values() for path in paths),
    }
    named = {"fixes of findings": fixes, "run.json": recorded}
    named["captures"] = written(load(), capture)
    named["`profiler.memory_saver`"] = written(load(), save_memory)
    named["`profiler.events.engine_timing`"] = written(load(), time_engine)
    config = load()
    tree = Sources(folder).tree("verl.workers.config.rollout") or ast.Module([], [])
    fields = {
        f"{ROLLOUT}.{node.target.id}"
        for each in tree.body
        if getattr(each, "name", "") == "RolloutConfig"
        for node in each.body
        if isinstance(node, ast.AnnAssign)
    }
    found = {}
    for name, keys in named.items():
        has = {key for key in keys if has_key(config, key, fields)}
        found[name] = {
            "fully": sorted(has),
            "partly": [],
            "none": sorted(f"`{key}`" for key in keys - has),
        }
    return found


def has_key(config, key, fields=()):
    """Whether a config has a key, or a place for any keys above it; or a dataclass without a line there."""
    if key in fields:
        return True
    node = config
    for part in key.split("."):
        if not OmegaConf.is_dict(node) or part not in node.keys():  # noqa: SIM118  of no value too
            return OmegaConf.is_dict(node) and not len(node)
        node = node._get_node(part)
    return True


def written(config, change):
    """Return the keys that a translation writes: those whose values differ after it."""
    before = OmegaConf.to_container(config)
    with open_dict(config):
        change(config)
    after = OmegaConf.to_container(config)
    return {key for key in leaves(config) if value(before, key) != value(after, key)}


def value(tree, key):
    for part in key.split("."):
        tree = tree.get(part, "no such key") if isinstance(tree, dict) else "no such key"
    return tree


def capture(config):
    config.trainer.update({"profile_steps": [1], "nnodes": 1, "n_gpus_per_node": 8})
    for place in COMPONENTS:
        node = OmegaConf.select(config, place)
        node.profile_ranks, node.profile_discrete = [3], True
    translate(config, "nsys")


def save_memory(config):
    OmegaConf.update(config, f"{ROLLOUT}.name", "vllm")
    opposite = {
        name: not OmegaConf.select(config, f"{ROLLOUT}.{name}") for name in ("free_cache_engine",)
    }
    requested = MemorySaverSettings(
        enable_memory_saver=True, gpu_memory_utilization=0.123, param_offload=True, optimizer_offload=True,
        **opposite,
    )  # fmt: skip
    list(memory_saver._translate(config, requested))


def time_engine(config):
    for engine in ("vllm", "sglang"):
        OmegaConf.update(config, f"{ROLLOUT}.name", engine)
        prepare._enable_engine_timing(config)


def page(folders):
    """Return the tables of some versions, and what is missing in them."""
    lines = []
    missing = {version: [] for version in folders}
    for title, collect in (
        ("probes of", families),
        ("settings that are set or named by", settings),
    ):
        columns = {version: collect(folder) for version, folder in folders.items()}
        rows = list(dict.fromkeys(row for column in columns.values() for row in column))
        lines += [f"| {title} | {' | '.join(folders)} |", "| --- " * (len(folders) + 1) + "|"]
        for row in rows:
            cells = []
            for version, column in columns.items():
                states = column.get(row, {"fully": [], "partly": [], "none": []})
                total = sum(map(len, states.values()))
                cell = f"{len(states['fully'])} of {total}"
                cells.append(
                    cell + (f", {len(states['partly'])} partly" if states["partly"] else "")
                )
                for state, word in (("partly", "in part"), ("none", "")):
                    if states[state]:
                        counted = Counter(states[state]).items()
                        names = ", ".join(
                            name if n == 1 else f"{name} ({n})" for name, n in counted
                        )
                        missing[version].append(f"{row}{', ' if word else ''}{word}: {names}")
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    lines.append("Not in these versions, or elsewhere:\n")
    lines += [f"- {version}: {'; '.join(each) or 'nothing'}." for version, each in missing.items()]
    return "\n".join(lines) + "\n"


def generated(text):
    """Return the generated part of the page."""
    return text.partition(BEGIN)[2].partition(END)[0]


def main(arguments):
    if arguments and not arguments[0].startswith("-"):
        print(page({"this one": Path(arguments[0])}))
        return 0
    made = page({version: folder_of(version) for version in VERSIONS})
    text = PAGE.read_text()
    if "--write" in arguments:
        PAGE.write_text(text.partition(BEGIN)[0] + BEGIN + made + END + text.partition(END)[2])
        return 0
    print("up to date" if generated(text) == made else f"{made}\ndiffers: run with --write")
    return int(generated(text) != made)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
