"""Ranges in SGLang's schedulers: only where they are asked for, and never in the engine's way."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from importlib.metadata import entry_points

import pytest
from fake_nvtx import FakeNvtx

from verl_profiler.environ import SETTINGS
from verl_profiler.instrumentation import sglang_scheduler
from verl_profiler.instrumentation.sglang_scheduler import load
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig
from verl_profiler.rehearsal.environment import environment


class Batch:
    """As much of SGLang's as the ranges read."""

    forward_mode = types.SimpleNamespace(name="DECODE")
    reqs = (1, 2, 3)


@pytest.fixture
def _settings(monkeypatch):
    worker_config = WorkerConfig("/run", "run", EventSettings(), take_anchor())
    monkeypatch.setenv(SETTINGS, worker_config.encode())
    monkeypatch.setenv("NVTX_INJECTION64_PATH", __file__)


def with_registry(monkeypatch, register):
    """Let SGLang's registry of hooks call this function, with a stand-in for nvtx."""
    registry = types.SimpleNamespace(register=register)
    hooks = types.SimpleNamespace(
        HookRegistry=registry, HookType=types.SimpleNamespace(AROUND="around")
    )
    module = types.SimpleNamespace(hook_registry=hooks)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", module)
    monkeypatch.setitem(sys.modules, "nvtx", FakeNvtx())


def registered(monkeypatch):
    """Call `load` under a registry that writes down what it gets."""
    found = []
    with_registry(monkeypatch, lambda target, *_: found.append(target))
    load()
    return [target.rpartition(".")[2] for target in found]


def test_sglang_finds_the_entry_point():
    """By its group."""
    (ours,) = [
        point
        for point in entry_points(group="sglang.srt.plugins")
        if point.value.startswith("verl_profiler")
    ]

    assert load is ours.load()


@pytest.mark.usefixtures("_settings")
def test_ranges_are_opened_under_a_tool(monkeypatch):
    """Elsewhere, and in an engine without the profiler, the scheduler's functions stay as they are."""
    assert ["run_batch", "process_batch_result"] == registered(monkeypatch)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/nonexistent/lib.so")
    assert not registered(monkeypatch)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", __file__)
    # SGLang calls every installed plugin, in every engine of the machine.
    monkeypatch.delenv(SETTINGS)
    assert not registered(monkeypatch)


@pytest.mark.usefixtures("_settings")
def test_a_failure_costs_the_ranges_only(monkeypatch, capfd):
    """And is said."""
    with_registry(monkeypatch, lambda *_: 1 / 0)
    load()

    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_batch_is_a_range_with_its_kind_and_size(nvtx):
    """Result and arguments pass through."""
    hook = sglang_scheduler._in_range(nvtx, sglang_scheduler._forward)
    result = hook(lambda *args, **kwargs: (args, kwargs), "scheduler", Batch, proxy=1)

    assert (("scheduler", Batch), {"proxy": 1}) == result
    assert [
        ("push", "forward_decode", "verl_profiler", "scheduler", 3),
        ("pop", "verl_profiler"),
    ] == nvtx.calls


def test_an_error_of_the_scheduler_passes_and_the_range_ends(nvtx):
    """The same exception object."""
    error = RuntimeError("out of memory")

    def run_batch(_scheduler, _batch):
        raise error

    hook = sglang_scheduler._in_range(nvtx, sglang_scheduler._result)
    with pytest.raises(RuntimeError) as caught:
        hook(run_batch, "scheduler", Batch)

    assert error is caught.value
    assert ("pop", "verl_profiler") == nvtx.calls[-1]


# SGLang loads its plugins; then a scheduler's metrics begin as on an engine without CUDA.
SGLANG = """
import inspect, json
from types import SimpleNamespace
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
before = {name: inspect.signature(vars(Scheduler)[name]) for name in METHODS}
load_plugins()
after = {name: vars(Scheduler)[name] for name in METHODS}
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
    "wrapped": [hasattr(each, "__wrapped__") for each in after.values()],
    "changed": [name for name, each in after.items() if inspect.signature(each) != before[name]],
    "clock": [scheduler.enable_fpm, scheduler._fpm_uses_device_timer, timer is None],
}))
scheduler._fpm_publisher.shutdown()
"""


def test_the_real_sglang_has_ranges_under_a_tool_and_on_a_cpu_times_iterations_by_its_clock(
    nsys_or_reason, tmp_path
):
    """By its own loading of plugins; its device timer's CUDA events would end a scheduler on a CPU."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    # With nsys comes the nvtx that opens the ranges; any file stands for the library of a tool.
    tool = {} if isinstance(nsys_or_reason, str) else nsys_or_reason
    tool = {**tool, "NVTX_INJECTION64_PATH": __file__} if tool else {}
    config = WorkerConfig("/run", "run", EventSettings(engine_iterations=True), take_anchor())
    inherited = {**os.environ, **tool, SETTINGS: config.encode()}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SGLANG.replace("METHODS", "('run_batch', 'process_batch_result')"),
        ],
        env={**inherited, **environment("sglang", inherited)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]

    found = json.loads(done.stdout.splitlines()[-1])
    assert ([True, False, True], []) == (found["clock"], found["changed"]), done.stderr[-2000:]
    assert [bool(tool)] * 2 == found["wrapped"], done.stderr[-2000:]
