"""Runs that are converted elsewhere: nothing is left to do for a reader, and its answers are the same."""

import json
import os
import pickle
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_profiler.cli import main
from verl_profiler.errors import ReadingError
from verl_profiler.reading import convert
from verl_profiler.reading.distribute import distribute
from verl_profiler.reading.executors import OnRay, executor
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables import tables


class Apart:
    """Calls a function with pickled copies, as another process would get them.

    Args:
        changed: What this node has otherwise than the one that asks.
    """

    def __init__(self, **changed):
        self._changed = changed

    def run(self, function, shared, arguments):
        for argument in arguments:
            yield pickle.loads(pickle.dumps(function))(
                *pickle.loads(pickle.dumps([replace(shared, **self._changed), argument]))
            )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several parts and several groups of steps, of a small run."""
    monkeypatch.setattr(convert, "PART_BYTES", 15_000)
    monkeypatch.setattr(tables, "CHUNK_EVENTS", 100)


def cached(run):
    return sorted(path.name for path in run.glob(".cache/*/*.parquet"))


def test_a_reader_finds_all_shards_converted(run, tmp_path, capsys):
    """Its answers are those of a run that was read alone."""
    alone = shutil.copytree(run, tmp_path / "alone" / "run")
    done = distribute([run], Apart())
    assert done > 2
    before = cached(run)
    assert len(before) >= done
    with load(run) as opened:
        opened.tables.make(*tables.BY_STEPS)
    assert before == [name for name in cached(run) if name.startswith("part")]
    texts = []
    for each in (run, alone):
        assert main(["summary", str(each)]) == 0
        assert main(["requests", str(each), "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_only_the_steps_that_were_requested(run, tmp_path, monkeypatch):
    """Of several runs, all are converted."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    launch = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(launch | {"pid": 1}))
    monkeypatch.setattr(convert, "PART_BYTES", 1)
    both = distribute([run, other], Apart())
    assert cached(other)
    assert cached(run)
    whole = both // 2
    shutil.rmtree(run / ".cache")
    assert distribute([run], Apart(), (2, 2)) < whole
    before = cached(run)
    with load(run, steps=(2, 2)) as opened:
        opened.tables.make(*tables.BY_STEPS)
    assert [name for name in cached(run) if name.startswith("part")] == before


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        # Its directory of the same name does not have the file that was made in the run's.
        ("token", ".cache/events-1/absent", "has a different directory at .*/.cache/events-1"),
        ("versions", "0", "has another version of verl-profiler or duckdb"),
    ],
)
def test_a_node_that_cannot_read_the_run_converts_nothing(run, name, value, reason):
    changed = {name: run / value if name == "token" else value}
    with pytest.raises(RuntimeError, match=reason):
        distribute([run], Apart(**changed))
    assert not cached(run)


class Tasks:
    """Stands in for the module `ray` where tasks run: on nodes that fail, or not."""

    class exceptions:
        RayError = OSError

    def __init__(self, *failing):
        self.failing = failing

    def nodes(self):
        return [
            {"NodeID": each, "NodeManagerHostname": f"host-{each}", "Alive": True} for each in "ab"
        ]

    def put(self, value):
        return value

    def wait(self, tasks, num_returns):
        return tasks[:1], tasks[1:]

    def remote(self, scheduling_strategy, **_options):
        """Return what makes a task of a function: the node, the function and its arguments."""
        return lambda function: SimpleNamespace(
            remote=lambda *given: (scheduling_strategy, function, *given)
        )

    def get(self, task):
        if task[0] in self.failing:
            raise OSError("the node died")
        return task[1](*task[2:])


def on_ray(monkeypatch, *failing):
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setitem(sys.modules, "ray", Tasks(*failing))
    return OnRay(nice=os.getpriority(os.PRIO_PROCESS, 0))


def test_a_node_that_dies_is_left_out_and_others_do_its_work(monkeypatch):
    tasks = on_ray(monkeypatch, "a")
    assert [*range(10, 16)] == sorted(tasks.run(lambda shared, n: shared + n, 10, range(6)))
    assert (1, {"host-a (a)": "the node died"}) == (tasks.nodes, tasks.left_out)
    with pytest.raises(
        ReadingError, match=r"(?s)host-a \(a\): the node died\n  host-b .*share"
    ) as caught:
        [*on_ray(monkeypatch, "a", "b").run(print, None, range(6))]
    assert caught.value.slug == "not-shared"


def test_what_cannot_be_distributed_is_an_error(run, tmp_path, capsys, monkeypatch):
    """A part of a run, a file, two options that exclude each other, no Ray, no cache."""
    for part, message in (("step_1", "is a part of a run"), ("run.json", "is not a run directory")):
        with pytest.raises(ReadingError, match=message):
            distribute([run / part], Apart())
    for options, message in (
        (("--on", "ray", "--no-cache"), "cannot be used with --no-cache"),
        (("--on", "ray"), "needs ray, which is not installed"),
    ):
        monkeypatch.setitem(sys.modules, "ray", None)
        try:
            status = main(["summary", str(run), *options])
        except SystemExit as error:
            status = error.code
        assert status == 2
        assert message in capsys.readouterr().err
    (run / ".cache").touch()
    monkeypatch.setenv("VERL_PROFILER_CACHE_HOME", str(run / "run.json" / "no folder"))
    with pytest.raises(ReadingError, match=r"the cache of .* cannot be written"):
        distribute([run], Apart())


def test_a_cache_at_home_is_filled_for_a_run_that_cannot_be_written(run, tmp_path, monkeypatch):
    (run / ".cache").touch()
    monkeypatch.setenv("VERL_PROFILER_CACHE_HOME", str(tmp_path / "caches"))
    assert distribute([run], Apart())
    assert not cached(run)
    assert list(tmp_path.glob("caches/runs/run-*/events-1/part-*.parquet"))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_a_cluster_is_an_error_at_once(run, capsys, monkeypatch, scheme):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
    assert main(["summary", str(run), "--on", "ray"]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}: " in error
    assert "(no-ray-cluster)" in error


def test_no_cluster_is_started(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ReadingError, match="RAY_ADDRESS is local"), executor():
        pass
