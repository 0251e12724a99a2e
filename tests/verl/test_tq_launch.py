"""TransferQueue tracing in the driver: what the command's settings and environment hand on."""

import inspect
import sys

import pytest
from picked import picked

from verl_profiler import transfer_queue
from verl_profiler.errors import ConfigError
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.ray_init import Additions
from verl_profiler.launch import prepare as launch
from verl_profiler.launch.targets import find_targets
from verl_profiler.transfer_queue import probes

omegaconf = pytest.importorskip("omegaconf")


@pytest.fixture
def prepared(tmp_path):
    """Prepare a config without event recording; return what Ray is told to hand on."""

    def prepare(users=None, v1=True, **switches):
        config = omegaconf.OmegaConf.create(
            {
                "profiler": {
                    "output_dir": str(tmp_path),
                    "events": {"enabled": False},
                    "transfer_queue": switches,
                },
                "trainer": {"use_v1": v1},
                "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": users or {"MINE": "1"}}}},
            }
        )
        transfer_queue._announce.cache_clear()
        launch.prepare(config)
        return config.ray_kwargs.ray_init.runtime_env.env_vars

    return prepare


def test_the_settings_travel_also_without_event_files(prepared, monkeypatch):
    """Beside the user's own variables."""
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("TQ_TRACE_SAMPLE_EVERY", "7")
    found = prepared(trace=True)

    assert ("1", "0", "7") == picked(
        found, "TQ_TRACE_ENABLED TQ_TRACE_DETAIL_ENABLED TQ_TRACE_SAMPLE_EVERY"
    )
    assert ("1", "DEBUG") == (found["MINE"], found["VERL_LOGGING_LEVEL"])
    assert found["TQ_TRACE_RUN"]


def test_an_older_verl_may_add_a_variable_of_its_own(prepared):
    """Up to 0.8 it writes into the node, of a config whose keys are fixed."""
    found = prepared(trace=True)
    omegaconf.OmegaConf.set_struct(found._get_root(), True)
    found["TRANSFER_QUEUE_ENABLE"] = "1"

    assert "1" == found.TRANSFER_QUEUE_ENABLE


def test_switched_off_nothing_travels(prepared, monkeypatch):
    """By default, and when the environment says so."""
    assert ["MINE"] == list(prepared())
    monkeypatch.setenv("TQ_TRACE_ENABLED", "0")
    assert ["MINE"] == list(prepared(trace=True))


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TQ_TRACE_ENABLED", "ja", "TQ_TRACE_ENABLED=ja in the environment: use 1 or 0"),
        ("TQ_TRACE_SAMPLE_EVERY", "0", "use 1 for all calls, 10 for every tenth"),
    ],
)
def test_a_variable_that_cannot_be_read_ends_the_command(
    prepared, monkeypatch, variable, value, says
):
    """Before training."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=says):
        prepared(trace=True)


def test_a_variable_of_the_job_is_left_to_the_job(prepared, monkeypatch):
    """Ray refuses one that both name."""
    job = '{"runtime_env": {"env_vars": {"TQ_TRACE_ENABLED": "1"}}}'
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    monkeypatch.setenv("TQ_TRACE_ENABLED", "1")
    found = prepared()

    assert "TQ_TRACE_ENABLED" not in found
    assert "0" == found["TQ_TRACE_DETAIL_ENABLED"]


def test_hidden_lines_are_said(prepared, monkeypatch, capsys):
    """A log level that hides them is no silent loss."""
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")
    monkeypatch.setenv("TQ_TRACE_SAMPLE_EVERY", "10")
    prepared(trace=True)
    said = capsys.readouterr().err

    assert "TransferQueue tracing: TRACE lines; lines of every 10th call" in said
    assert "tq-lines-hidden" in said


def test_ray_init_hands_them_on_without_the_settings(monkeypatch):
    """What the user gives `ray.init` stays; the hook loads the plugin where verl does not."""
    got = []
    ray = type("ray", (), {"init": staticmethod(lambda *a, **k: got.append((a, k)))})
    monkeypatch.setitem(sys.modules, "ray", ray)
    Additions().extend(variables=lambda: {"TQ_TRACE_ENABLED": "1", "MINE": "ours"})
    ray.init("auto", runtime_env={"working_dir": ".", "env_vars": {"MINE": "users"}})
    ray.init(num_cpus=2)
    ray.init("ray://head:10001")
    hooks = [more["runtime_env"].pop("worker_process_setup_hook", None) for _, more in got]

    assert [True, True, False] == [hook is not None for hook in hooks]
    assert [
        (
            ("auto",),
            {
                "runtime_env": {
                    "working_dir": ".",
                    "env_vars": {"TQ_TRACE_ENABLED": "1", "MINE": "users"},
                }
            },
        ),
        (
            (),
            {"num_cpus": 2, "runtime_env": {"env_vars": {"TQ_TRACE_ENABLED": "1", "MINE": "ours"}}},
        ),
        (
            ("ray://head:10001",),
            {"runtime_env": {"env_vars": {"TQ_TRACE_ENABLED": "1", "MINE": "ours"}}},
        ),
    ] == got


def test_the_v0_trainer_is_said_to_have_nothing_to_trace(prepared, capsys):
    """The config knows it before training."""
    prepared(trace=True, v1=False)

    assert "tq-not-there" in capsys.readouterr().err


def test_every_target_is_in_the_installed_sources():
    """A newer verl or TransferQueue shows here first what has moved."""
    # The package itself only re-exports; `main_ppo_sync` is verl 0.8's.
    elsewhere = ("transfer_queue:", "verl.trainer.main_ppo_sync:")
    paths = [t for p in probes.PROBES for t in p.targets if not t.startswith(elsewhere)]
    rows = find_targets(Probe(None, "transfer_queue", (path,)) for path in paths)

    assert {"found"} == {row.state for row in rows}
    assert len(paths) == len(rows)


def test_the_parameters_are_where_they_are_read():
    """Positions of `self`, `metadata` and `data` in the client's methods."""
    client = pytest.importorskip("transfer_queue.client").AsyncTransferQueueClient
    for stage, method in (("GET", "async_get_data"), ("PUT", "async_put")):
        names = probes._PARAMETERS[stage]

        assert names == tuple(inspect.signature(getattr(client, method)).parameters)[: len(names)]
