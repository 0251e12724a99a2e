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
