"""The hook in SGLang's schedulers: only where it is needed, and never in the engine's way."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from verl_profiler.environ import SETTINGS
from verl_profiler.instrumentation import sglang_scheduler
from verl_profiler.instrumentation.sglang_scheduler import load
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig
from verl_profiler.rehearsal.environment import environment


@pytest.fixture
def _settings(monkeypatch):
    config = WorkerConfig("/run", "run", EventSettings(engine_iterations=True), take_anchor())
    monkeypatch.setenv(SETTINGS, config.encode())
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")


def registered(monkeypatch):
    """Call `load` under a registry that writes down what it gets."""
    found = []
    monkeypatch.setattr(sglang_scheduler, "_register_clock", lambda: found.append(1))
    load()
    return bool(found)


def test_sglang_finds_the_entry_point():
    """By its group."""
    (ours,) = [
        point
        for point in entry_points(group="sglang.srt.plugins")
        if point.value.startswith("verl_profiler")
    ]

    assert load is ours.load()


@pytest.mark.usefixtures("_settings")
def test_other_engines_are_left_alone(monkeypatch):
    """SGLang calls every installed plugin, in every engine of the machine."""
    assert registered(monkeypatch)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    assert not registered(monkeypatch)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.delenv(SETTINGS)
    assert not registered(monkeypatch)


@pytest.mark.usefixtures("_settings")
def test_a_failure_is_a_line(monkeypatch, capfd):
    """The engine starts."""
    monkeypatch.setattr(sglang_scheduler, "_register_clock", lambda: 1 / 0)
    load()

    assert "ZeroDivisionError" in capfd.readouterr().err


# SGLang loads its plugins; then a scheduler's metrics begin as on an engine without CUDA.
SGLANG = """
import json
from types import SimpleNamespace
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
arguments = SimpleNamespace(
    enable_forward_pass_metrics=True,
    forward_pass_metrics_worker_id="",
    forward_pass_metrics_ipc_name="ipc://iterations",
)
scheduler = SimpleNamespace(
    server_args=arguments, attn_tp_rank=0, pp_rank=0, pp_size=1, dp_rank=None
)
scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(device_timer=None))
scheduler.draft_worker = None
Scheduler._init_fpm(scheduler)
Scheduler.install_device_timer_on_runners(scheduler)
timer = scheduler.tp_worker.model_runner.device_timer
print(json.dumps({
    "clock": [scheduler.enable_fpm, scheduler._fpm_uses_device_timer, timer is None],
}))
scheduler._fpm_publisher.shutdown()
"""


def test_the_real_sglang_times_iterations_by_its_clock_on_a_cpu(tmp_path):
    """By its own loading of plugins; its device timer's CUDA events would end a scheduler on a CPU."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    config = WorkerConfig("/run", "run", EventSettings(engine_iterations=True), take_anchor())
    inherited = {**os.environ, SETTINGS: config.encode()}
    done = subprocess.run(
        [sys.executable, "-c", SGLANG],
        env={**inherited, **environment("sglang", inherited)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]

    found = json.loads(done.stdout.splitlines()[-1])
    assert [True, False, True] == found["clock"], done.stderr[-2000:]
