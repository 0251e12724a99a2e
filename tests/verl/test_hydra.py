"""`+profiler=multiturn` on the real `main_ppo`: composition, overrides, and wrong inputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ON = ["+profiler=multiturn", "profiler.output_dir=FOLDER/logs/run"]
# verl's own validation wants these of any run.
ENOUGH = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=sglang",
    "trainer.n_gpus_per_node=2",
]

CASES = {
    "off": ENOUGH,
    "on": [*ENOUGH, *ON],
    "every key": [
        *ENOUGH,
        *ON,
        "trainer.profile_steps=[2]",
        "actor_rollout_ref.actor.profile_ranks=[0]",
        "actor_rollout_ref.rollout.profile_ranks_all=true",
        "actor_rollout_ref.ref.profile_discrete=true",
        "critic.profile_ranks=[1]",
        "profiler.events.steps=[2,3]",
        "profiler.events.families.memory=false",
        "profiler.events.engine_timing=true",
    ],
    "events off": [*ENOUGH, *ON, "profiler.events.enabled=false"],
    "own runtime_env": [
        *ENOUGH,
        *ON,
        "+ray_kwargs.ray_init.runtime_env={env_vars:{MINE:yes},worker_process_setup_hook:a.b}",
    ],
    "cfg": [*ON, "--cfg", "job"],
    "typo in the option": ["+profiler=multturn"],
    "unknown key": [*ENOUGH, *ON, "+profiler.evnts=5"],
    "unknown key, plain": [*ENOUGH, *ON, "profiler.nope=5"],
    "wrong type": [*ENOUGH, *ON, "profiler.events.flush_interval_s=abc"],
    "unwritable": [*ENOUGH, "+profiler=multiturn", "profiler.output_dir=/proc/nope"],
    "wrong ranks": [*ENOUGH, *ON, "trainer.profile_steps=[1]", "critic.profile_ranks=[7]"],
    "sweep": ["-m", *ENOUGH, *ON, "trainer.total_training_steps=1,2"],
    "verl refuses": [*ON],
}


@pytest.fixture(scope="module")
def became(verl_environment, tmp_path_factory):
    """What became of each case, run in one process that imported verl once."""
    folder = tmp_path_factory.mktemp("compose")
    (folder / "cases.json").write_text(json.dumps(list(CASES.values())))
    subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "compose.py"),
            str(folder / "cases.json"),
            str(folder / "results.json"),
        ],
        env=verl_environment,
        check=True,
        capture_output=True,
        timeout=400,
    )
    return dict(zip(CASES, json.loads((folder / "results.json").read_text()), strict=True))


def test_without_the_option_nothing_of_ours_is_active(became):
    """No file, no variable, no hook, no key."""
    off = became["off"]

    assert 0 == off["status"], off["err"]
    assert None is off["seen"]["settings"]
    assert not off["seen"]["ray_init_hooked"]
    assert "verl-profiler" not in off["err"] + off["out"]
    assert "profiler" not in off["seen"]["config"]
    assert not [file for file in off["files"] if file.startswith("logs")]


def test_with_the_option_the_run_directory_is_made_and_the_settings_travel(became):
    """In the environment, and in what Ray hands to other nodes."""
    on = became["on"]
    assert 0 == on["status"], on["err"]
    carried = on["seen"]["settings"]
    runtime_env = on["seen"]["config"]["ray_kwargs"]["ray_init"]["runtime_env"]

    assert carried == runtime_env["env_vars"]["VERL_PROFILER_SETTINGS"]
    assert json.loads(carried)["directory"].endswith("/logs/run")
    assert on["seen"]["ray_init_hooked"]
    assert "logs/run/run.json" in on["files"]
    assert "[verl-profiler] events are in" in on["err"]


@pytest.mark.parametrize("case", ["on", "every key"])
def test_verl_never_sees_a_key_that_it_does_not_know(became, case):
    """Its own validation ran on this config; none of the guide's keys is left."""
    seen = became[case]["seen"]
    assert seen is not None, became[case]["err"]

    assert "profile_ranks" not in json.dumps(seen["config"])
    assert "profile_discrete" not in json.dumps(seen["config"])
    assert "profile_steps" not in seen["config"]["trainer"]


def test_the_guides_keys_become_verls_own(became):
    """The hybrid worker reads the actor's node: the rollout's `all` wins there."""
    seen = became["every key"]["seen"]
    assert seen is not None, became["every key"]["err"]
    config = seen["config"]

    assert [2] == config["global_profiler"]["steps"]
    assert "nsys" == config["global_profiler"]["tool"]
    assert config["global_profiler"]["global_tool_config"]["nsys"]["discrete"] is True
    assert config["actor_rollout_ref"]["actor"]["profiler"]["all_ranks"] is True
    assert [1] == config["critic"]["profiler"]["ranks"]


def test_overrides_reach_the_workers(became):
    """What a worker decodes is what the command said."""
    events = json.loads(became["every key"]["seen"]["settings"])["events"]
    config = became["every key"]["seen"]["config"]

    assert [2, 3] == events["steps"]
    assert events["families"]["memory"] is False
    engine = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["sglang"]
    assert engine["enable_metrics"] is True


def test_the_users_own_runtime_env_stays(became):
    """Ours is added to it."""
    runtime_env = became["own runtime_env"]["seen"]["config"]["ray_kwargs"]["ray_init"][
        "runtime_env"
    ]

    assert {"MINE", "VERL_PROFILER_SETTINGS"} == set(runtime_env["env_vars"])
    assert "a.b" == runtime_env["worker_process_setup_hook"]


def test_events_may_be_off_while_captures_are_on(became):
    """Nothing is recorded, and the guide's keys are translated all the same."""
    off = became["events off"]

    assert 0 == off["status"], off["err"]
    assert None is off["seen"]["settings"]
    assert not [file for file in off["files"] if file.startswith("logs")]


def test_our_keys_show_in_the_printed_config(became):
    """`--cfg job` is how users look."""
    printed = became["cfg"]["out"]

    assert 0 == became["cfg"]["status"]
    for key in ("profile_steps: null", "profile_ranks: null", "flush_interval_s: 0.5"):
        assert key in printed


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("typo in the option", ["Could not find 'profiler/multturn'", "multiturn"]),
        ("unknown key", ["profiler.evnts is not a setting", "Did you mean profiler.events?"]),
        ("unknown key, plain", ["profiler.nope"]),
        ("wrong type", ["profiler.events.flush_interval_s: Expected `float`, got `str`"]),
        ("unwritable", ["/proc/nope cannot be written", "profiler.output_dir=DIR"]),
        ("wrong ranks", ["critic.profile_ranks is [7]", "ranks go from 0 to 1"]),
        ("sweep", ["multirun", "one by one"]),
    ],
)
def test_a_wrong_input_ends_the_command_before_training(became, case, says):
    """With the place and the mend, and a status that is not 0."""
    end = became[case]

    assert 0 != end["status"]
    assert None is end["seen"]
    for text in says:
        assert text in end["err"]
    assert "Traceback" not in end["err"]


def test_a_run_that_verl_refuses_leaves_no_empty_directory(became):
    """The name is free for the next try."""
    refused = became["verl refuses"]

    assert 0 != refused["status"]
    assert "nothing was recorded" in refused["err"]
    assert not [file for file in refused["files"] if file.startswith("logs/run")]
