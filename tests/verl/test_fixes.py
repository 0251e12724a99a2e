"""What findings give to paste, against the installed verl: every override composes, every file works."""

import subprocess
import sys

import pytest

from verl_profiler.analysis.explain.fixes import FILES, VALUES, overrides_of
from verl_profiler.analysis.explain.rules import RULES

OVERRIDES = sorted(
    {each for rule in RULES.values() for each in (*rule.overrides, *(rule.named_overrides or ()))}
)


@pytest.fixture(scope="module")
def compose():
    hydra = pytest.importorskip("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        yield lambda *words: hydra.compose("ppo_trainer", overrides=list(words))


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_is_of_a_key_that_verl_has(compose, override):
    """Hydra refuses a key that is not in verl's config."""
    from omegaconf import OmegaConf

    (filled,), _ = overrides_of([override], VALUES)
    key, _, value = filled.partition("=")

    assert value.lower() == str(OmegaConf.select(compose(filled), key)).lower()


def test_a_key_that_verl_lacks_is_refused(compose):
    """So the test above can fail."""
    with pytest.raises(Exception, match="no_such_key"):
        compose("trainer.no_such_key=1")


def test_the_replay_buffer_polls_as_often_as_it_is_said_to(tmp_path, verl_environment):
    """The file is loaded and made as verl's trainer does it (trainer_base.py, `_build_replay_buffer`)."""
    (tmp_path / "fast_poll.py").write_text(FILES["fast_poll.py"])
    program = """
from fast_poll import FastPoll
buffer = FastPoll(
    trainer_mode="sync", trainer_config={}, max_off_policy_threshold=8,
    max_off_policy_strategy="drop", sampler_kwargs={}, refill_fn=lambda *_: None,
)
print("polls every", buffer.poll_interval)
"""
    path = f"{tmp_path}:{verl_environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**verl_environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert "polls every 0.2" in done.stdout, done.stderr[-2000:]


def test_the_router_moves_a_conversation_only_from_a_full_replica(tmp_path, verl_environment):
    """The files are loaded as verl does it (router.py, `_create_plugin_extension`), but for the actor."""
    for name in ("spread_calls.py", "spread_calls.yaml"):
        (tmp_path / name).write_text(FILES[name])
    program = """
from verl.workers.rollout.router import _load_router_yaml, _resolve_router_class
config = _load_router_yaml("spread_calls.yaml")
router = _resolve_router_class(config["router_class"])({"a": 1, "b": 2}, config)
first, _ = router.acquire_server("mine")
other = "b" if first == "a" else "a"
print("stays", router.acquire_server("mine")[0] == first)
router._inflight_requests.update({first: 7, other: 4})
print("stays", router.acquire_server("mine")[0] == first)
router._inflight_requests.update({first: 8, other: 4})
print("moves", router.acquire_server("mine")[0] == other, router._inflight_requests[other])
"""
    path = f"{tmp_path}:{verl_environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**verl_environment, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    # Of 4 in the other one, 1.25 * 4 + 2 = 7 may stay.
    lines = done.stdout.splitlines()[-3:]
    assert ["stays True", "stays True", "moves True 5"] == lines, done.stderr[-2000:]
