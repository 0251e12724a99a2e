"""The changes that verl needs for a CPU, on verl's own modules."""

import importlib
import importlib.util

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


def test_every_adjusted_module_exists():
    """A module that verl moved would leave its adjustment undone without a word."""
    for name, _ in adjust.ADJUSTMENTS:
        assert importlib.util.find_spec(name) is not None, name
