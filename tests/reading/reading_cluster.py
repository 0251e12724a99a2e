"""Read a run with `--on ray` on a cluster of several raylets, and alone; compare the answers.

python tests/reading/reading_cluster.py RUN --raylets 2 [--busy]
python tests/reading/reading_cluster.py RUN --raylets 1 2 4

Prints one JSON object per number of raylets: seconds until the cache was full, by tasks and in this process
alone; shards; how many raylets had tasks; whether the output of every command, and all
rows of every table, are byte for byte those of the run that was read alone; and which files the commands
still made.
"""

import argparse
import contextlib
import hashlib
import io
import json
import shutil
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from verl_profiler.cli import main as command
from verl_profiler.reading.distribute import distribute
from verl_profiler.reading.executors import OnRay
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.schemas import SCHEMAS
from verl_profiler.reading.tables.tables import BY_STEPS

COMMANDS = (
    ("summary",),
    ("summary", "--json"),
    ("why", "--json"),
    ("requests", "--json"),
    ("plot", "step_durations", "--json"),
)


def answers_of(run, commands):
    """Return digests of what commands print, and of the rows of each table."""
    digests = {}
    for name, *options in commands:
        text = io.StringIO()
        place = [options[0], str(run), *options[1:]] if name == "plot" else [str(run), *options]
        with contextlib.redirect_stdout(text):
            assert command([name, *place]) == 0
        # A sum depends on the order of its numbers, in the last digits.
        printed = text.getvalue()
        if "--json" in options:
            content = json.loads(printed, parse_float=lambda digits: f"{float(digits):.9g}")
            printed = json.dumps(content)
        digests[" ".join((name, *options))] = hashlib.sha256(printed.encode()).hexdigest()
    with load(run) as opened:
        for name in BY_STEPS:
            opened.tables.make(name)
            columns = ", ".join(
                f"format('{{:.9g}}', \"{column}\")" if kind == "DOUBLE" else f'"{column}"'
                for column, kind in SCHEMAS[name].items()
            )
            (rows,) = opened.tables.connection.execute(
                f"SELECT count(*), sum(hash({columns})::HUGEINT) FROM {name}"
            ).fetchall()
            digests[name] = str(rows)
    return digests


def cached(run):
    return {path.name for path in run.glob(".cache/*/*.parquet")}


class Counting(OnRay):
    """Uses so many raylets, and notes on which of them tasks ran."""

    def __init__(self, raylets):
        # Others of this machine would get all of the time.
        super().__init__(nice=0)
        self._nodes = dict(list(self._nodes.items())[:raylets])
        self.used = set()

    def run(self, function, shared, arguments):
        def called(common, argument):
            return function(common, argument), ray.get_runtime_context().get_node_id()

        for result, node in super().run(called, shared, arguments):
            self.used.add(node)
            yield result


def read_alone(run, commands):
    """Return the answers of a run that is read in this process, and the seconds of its conversion."""
    shutil.rmtree(run / ".cache", ignore_errors=True)
    begin = time.perf_counter()
    with load(run):
        pass
    alone_s = time.perf_counter() - begin
    return answers_of(run, commands), alone_s


def read(run, raylets, *, busy=True, few=False):
    """Read a run on the cluster that this process has joined, and alone; return how they compare."""
    commands = [("summary",), ("requests", "--json")] if few else COMMANDS
    expected, alone_s = read_alone(run, commands)
    shutil.rmtree(run / ".cache")
    # Held as by a training.
    cpus = int(ray.cluster_resources()["CPU"])
    held = placement_group([{"CPU": 1}] * cpus) if busy else None
    assert held is None or held.wait(60)
    tasks = Counting(raylets)
    begin = time.perf_counter()
    done = distribute([run], tasks)
    tasks_s = time.perf_counter() - begin
    before = cached(run)
    found = answers_of(run, commands)
    if held is not None:
        remove_placement_group(held)
    return {
        "raylets": raylets,
        "tasks_s": round(tasks_s, 2),
        "alone_s": round(alone_s, 2),
        "shards": done,
        "nodes": tasks.nodes,
        "tasks_on": len(tasks.used),
        "different": sorted(name for name in expected if found[name] != expected[name]),
        "made_by_the_reader": sorted(
            name for name in cached(run) - before if name.startswith("part")
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--raylets", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--busy", action="store_true", help="take all CPUs first")
    args = parser.parse_args()
    for raylets in args.raylets:
        cluster = Cluster()
        for number in range(raylets):
            cluster.add_node(num_cpus=1, node_name=f"node-{number}")
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        print(json.dumps(read(args.run.resolve(), raylets, busy=args.busy)), flush=True)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
