"""The driver's part: several runs in one driver, failures, and what they leave behind."""

import os
import sys
import types
from pathlib import Path

import pytest

from verl_profiler.capture import actor_placement
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.launch import prepare as launch
from verl_profiler.launch.settings import parse
from verl_profiler.recording import recorder, run_directory
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import WorkerConfig

omegaconf = pytest.importorskip("omegaconf")


@pytest.fixture
def ray(monkeypatch):
    """A Ray of one node that starts, or fails to."""
    module = types.ModuleType("ray")
    module.failure = None

    def init(**_options):
        if module.failure is not None:
            raise module.failure

    module.init = init
    module.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setattr("verl_profiler.nodes.thread.start", lambda *_: None)
    return module


@pytest.fixture
def prepare(tmp_path):
    """Prepare a run that captures nothing; return its directory."""

    def prepared(others=None, **settings):
        config = {"profiler": {"output_dir": str(tmp_path / "run"), **settings}, **(others or {})}
        launch.prepare(omegaconf.OmegaConf.create(config))
        return recorder.active().directory

    yield prepared
    recorder.stop()


@pytest.mark.parametrize(
    ("variable", "experiment", "expected"),
    [
        ("mine", "gsm8k", "logs/mine"),
        (None, "gsm8k", "logs/gsm8k"),
        ("", "gsm8k", "logs/gsm8k"),
        (None, None, "logs/multiturn_log_dir"),
    ],
)
def test_a_run_is_named_by_the_variable_or_the_experiment(
    ray, monkeypatch, tmp_path, variable, experiment, expected
):
    """verl's own trainer.experiment_name where nobody sets EXPERIMENT_NAME; with the packaged YAML."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXPERIMENT_NAME", raising=False)
    if variable is not None:
        monkeypatch.setenv("EXPERIMENT_NAME", variable)
    file = Path(launch.__file__).parents[2] / "configs" / "profiler" / "multiturn.yaml"
    config = omegaconf.OmegaConf.create(
        {
            "profiler": omegaconf.OmegaConf.load(file).profiler,
            "trainer": {"experiment_name": experiment},
        }
    )
    launch.prepare(config)
    directory = recorder.active().directory
    recorder.stop()

    assert tmp_path / expected == directory


def test_the_console_has_one_line_at_the_start_and_the_commands_at_the_end(ray, prepare, capsys):
    """To follow the run, and to read it; also where nothing was recorded that could be summarized."""
    directory = prepare()
    ray.init()
    begin = capsys.readouterr().err
    launch.end(failed=False)
    end = capsys.readouterr().err

    assert (
        f"[verl-profiler] recording to {directory}; follow: verl-profiler summary --follow {directory}\n"
        == begin
    )
    assert (
        f"[verl-profiler] events are in {directory}; next: verl-profiler summary {directory}, "
        f"verl-profiler report {directory}\n" == end
    )


def test_a_run_whose_ray_did_not_start_leaves_no_directory(ray, prepare):
    """Nothing was recorded, and nothing is to be collected; an earlier run's Ray may have started."""
    first = prepare()
    ray.init()
    launch.end(failed=False)
    ray.failure = ConnectionError("no cluster")
    second = prepare()
    with pytest.raises(ConnectionError):
        ray.init()
    launch.end(failed=True)

    assert (True, False) == (first.exists(), second.exists())


def test_preparing_twice_keeps_the_last_run(ray, prepare, tmp_path):
    """For example in a notebook; the first run's directory stays, closed."""
    directories = [prepare(), prepare()]

    assert [tmp_path / "run", tmp_path / "run-2"] == directories
    assert recorder.active().directory == directories[1]
    assert '"end_reason":"another run"' in next((tmp_path / "run/processes").iterdir()).read_text()


def test_a_run_that_is_not_recorded_ends_the_recording_before_it(ray, prepare, tmp_path):
    """Otherwise its events would be in the directory of another run."""
    prepare()
    node = {"output_dir": str(tmp_path / "run"), "events": {"enabled": False}}
    launch.prepare(omegaconf.OmegaConf.create({"profiler": node}))

    assert recorder.active() is None
    assert "VERL_PROFILER_SETTINGS" not in os.environ


def test_a_failing_end_raises_nothing(ray, prepare, monkeypatch, capsys):
    """Training has ended, and keeps its result."""
    prepare()

    def fail(_directory):
        raise OSError("gone")

    monkeypatch.setattr(run_directory, "discard", fail)
    launch.end(failed=True)

    assert "gone" in capsys.readouterr().err


def test_a_preparation_that_fails_leaves_no_directory(ray, prepare, tmp_path):
    """Whatever fails; here, the arguments of `ray.init` are no mapping."""
    with pytest.raises(ValueError, match="Input cfg is not an OmegaConf config object"):
        prepare({"ray_kwargs": {"ray_init": "auto"}})

    assert not (tmp_path / "run").exists()
    assert "VERL_PROFILER_SETTINGS" not in os.environ


def plan(name):
    options = {"trace": name}
    roles = {"engine": RoleCapture(None, options)}
    return Plan("nsys", (1,), False, "/raw", "/journal", roles)


def test_processes_get_the_captured_steps(tmp_path):
    """Without a plan none, also after the way through the environment."""
    settings = parse({"output_dir": "x"})
    for made, steps in ((None, ()), (plan("x"), (1,))):
        sent = launch._worker_config(settings, tmp_path, take_anchor(), made).encode()

        assert steps == WorkerConfig.decode(sent).captured_steps


class Handle:
    """What the creation of an actor returns."""


@pytest.fixture
def created(monkeypatch):
    """Create an engine and a task in this process; return the options that Ray gets."""
    actor = pytest.importorskip("ray.actor")
    function = pytest.importorskip("ray.remote_function")
    got = []

    def _remote(_self, *_args, **options):
        got.append(options)
        return Handle()

    monkeypatch.setattr(actor.ActorClass, "_remote", _remote)
    monkeypatch.setattr(function.RemoteFunction, "_remote", _remote)
    engine = types.SimpleNamespace(
        __ray_metadata__=types.SimpleNamespace(class_name="SGLangHttpServer")
    )

    def create(rank=0, class_name=None):
        if class_name:
            engine.__ray_metadata__.class_name = class_name
        handle = actor.ActorClass._remote(engine, name=f"sglang_server_{rank}_0")
        return handle, (got[-1].get("runtime_env") or {}).get("_nsight")

    yield create
    actor_placement.hook_creation(None)


def test_a_second_run_captures_with_its_own_plan(created):
    """And one without captures captures nothing."""
    found = []
    for each in (plan("first"), plan("second"), None):
        actor_placement.hook_creation(each)
        found.append(created()[1])

    assert [{"trace": "first"}, {"trace": "second"}, None] == found


def test_captured_actors_are_those_that_are_alive_and_of_this_run(created):
    """A run that restarts its engines for two weeks keeps no list of them."""
    actor_placement.hook_creation(plan("first"))
    for _ in range(50):
        created()
    kept, _ = created()

    assert [kept] == [reference() for _, _, reference in actor_placement.captured_actors]
    actor_placement.hook_creation(plan("second"))
    assert [] == actor_placement.captured_actors


def test_a_run_that_did_not_start_leaves_nothing_at_its_url(ray, prepare, tmp_path):
    """As on a disk."""
    pytest.importorskip("fsspec")
    place = tmp_path / "storage"
    place.mkdir()
    run = prepare(output_dir=f"file://{place}/run", spool_dir=str(tmp_path / "spool"))
    launch.end(failed=True)
    assert not run.exists()
    assert [] == [path for path in place.rglob("*") if path.is_file()]
