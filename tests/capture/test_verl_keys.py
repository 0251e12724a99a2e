"""The Nsight guide's keys: checked, translated, removed."""

import pytest

from verl_profiler.capture.verl_keys import Capture, translate
from verl_profiler.errors import ConfigError

omegaconf = pytest.importorskip("omegaconf")


def config(**changes):
    """Return verl 0.9's nodes that matter here, with `changes` by dotted path."""
    made = omegaconf.OmegaConf.create(
        {
            "trainer": {"profile_steps": None, "nnodes": 1, "n_gpus_per_node": 4},
            "actor_rollout_ref": {
                name: {"profiler": {"enable": False, "all_ranks": False, "ranks": []}}
                for name in ("actor", "rollout", "ref")
            },
            "critic": {"profiler": {"enable": False, "all_ranks": False, "ranks": []}},
            "global_profiler": {
                "tool": None,
                "steps": None,
                "global_tool_config": {"nsys": {"discrete": False}},
            },
        }
    )
    for path, value in changes.items():
        omegaconf.OmegaConf.update(made, path.replace("__", "."), value, force_add=True)
    return made


def test_null_and_empty_mean_no_ranks():
    """The guide's prose wins over the comment in its example."""
    made = config(
        trainer__profile_steps=[1],
        actor_rollout_ref__actor__profile_ranks=None,
        actor_rollout_ref__ref__profile_ranks=[],
    )

    assert Capture((1,), {}, False) == translate(made)
    assert not made.actor_rollout_ref.actor.profiler.enable


def test_a_tool_that_the_user_chose_stays_and_without_steps_nothing_is_captured():
    """Only an unset tool becomes nsys; verl's own settings stay as they were."""
    chosen = config(trainer__profile_steps=[1], global_profiler__tool="torch")
    without = config(actor_rollout_ref__actor__profile_ranks=[0])

    translate(chosen)
    assert "torch" == chosen.global_profiler.tool
    assert None is translate(without)
    assert None is without.global_profiler.steps


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trainer__profile_steps": [0]}, "counted from 1"),
        ({"trainer__profile_steps": 3}, "trainer.profile_steps is 3"),
        ({"trainer__profile_steps": [True]}, "must be a list of steps"),
        ({"actor_rollout_ref__actor__profile_ranks": [4]}, "ranks go from 0 to 3"),
        ({"actor_rollout_ref__ref__profile_ranks": "all"}, "profile_ranks_all=true"),
        ({"critic__profile_ranks_all": "yes"}, "must be true or false"),
        ({"critic__profile_discrete": 1}, "must be true or false"),
        (
            {
                "actor_rollout_ref__actor__profile_discrete": True,
                "actor_rollout_ref__ref__profile_discrete": False,
            },
            "must be the same for all components",
        ),
        (
            {"critic__profile_ranks": [0], "actor_rollout_ref__critic__profile_ranks": [1]},
            "both set the same component",
        ),
    ],
)
def test_a_wrong_key_ends_the_run_before_training(changes, text):
    """With the value and what it may be."""
    with pytest.raises(ConfigError, match="capture-keys") as caught:
        translate(config(**changes))

    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("place", "near"),
    [("trainer", "reward_model"), ("actor_rollout_ref.actr", "actor_rollout_ref.actor")],
)
def test_keys_of_no_component_are_refused(place, near):
    """verl would ignore them on some nodes, and fail on others after minutes."""
    made = config()
    omegaconf.OmegaConf.update(made, f"{place}.profile_ranks", [0], force_add=True)
    with pytest.raises(ConfigError) as caught:
        translate(made)

    assert f"{place}.profile_ranks is not a key of a component" in str(caught.value)
    assert near in str(caught.value)
