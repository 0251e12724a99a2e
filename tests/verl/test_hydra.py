"""`+profiler=multiturn` on the real `main_ppo`: composition, overrides, and wrong inputs."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
        "profiler.events.exclude=[memory]",
        "profiler.events.engine_timing=true",
        "+ray_kwargs.ray_init.runtime_env={env_vars:{MINE:yes},worker_process_setup_hook:a.b}",
    ],
    "events off": [*ENOUGH, *ON, "profiler.events.enabled=false"],
    "cfg": [*ON, "--cfg", "job"],
    "typo in the option": ["+profiler=multturn"],
    "unknown key": [*ENOUGH, *ON, "+profiler.evnts=5"],
    "password in the output's URL": [*ENOUGH, *ON, "profiler.output_dir=sftp://u:pLANTed@host/x"],
    "signature in the output's URL": [*ENOUGH, *ON, "profiler.output_dir='s3://b/x?s=pLANTed'"],
    "unknown keys": [
        *ENOUGH,
        *ON,
        # vLLM's times too.
        "actor_rollout_ref.rollout.name=vllm",
        "profiler.events.engine_timing=true",
        "+trainer.note=pLANTed",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.note=pLANTed",
        "reward.custom_reward_function.path=null",
    ],
    "unwritable": [*ENOUGH, "+profiler=multiturn", "profiler.output_dir=/proc/nope"],
    "sweep": ["-m", *ENOUGH, *ON, "trainer.total_training_steps=1,2"],
    "verl refuses": [*ON],
    "memory saver": [*ENOUGH, "+profiler=memory_saver", "profiler.output_dir=FOLDER/logs/run"],
    "memory saver rehearsed": [
        "+rehearsal=cpu",
        "+profiler=memory_saver_rehearsal",
        "profiler.output_dir=FOLDER/logs/run",
        "actor_rollout_ref.model.path=FOLDER",
        "data.train_files=none",
        "data.val_files=none",
    ],
    "multi-turn script": "profile-sglang-multi-turn.sh 1 --gpus 3 --dry-run",
    "multi-turn script, memory saver": "profile-sglang-multi-turn.sh --tp 2 --gpus 8 --dry-run",
    # Without its critic, whose model verl would look up on the hub.
    "memory example": "examples/memory_saver/run.sh critic.enable=False",
}


def words_of(case, folder):
    """Return the overrides that a script would hand to `main_ppo`; other cases are lists already."""
    if not isinstance(case, str):
        return case
    script, *arguments = case.split()
    for split in ("train", "test"):
        (folder / f"{split}.parquet").touch()
    # The example has no --dry-run: it prints what `echo` makes of it.
    dry = "--dry-run" in arguments
    python = sys.executable if dry else "echo"
    profiler = "memory_saver" if "--tp" in arguments else "multiturn"
    printed = subprocess.run(
        [str(ROOT / script), *arguments],
        env={**os.environ, "PYTHON": python, "DATA_DIR": str(folder), "PROFILER": profiler},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    words = shlex.split(printed.replace("\\\n", " ")) if dry else printed.split()
    return [
        *words[words.index("verl.trainer.main_ppo") + 1 :],
        "profiler.output_dir=FOLDER/logs/run",
    ]


@pytest.fixture(scope="module")
def became(forked, tmp_path_factory):
    """What became of each case, run in one process that imported verl once."""
    folder = tmp_path_factory.mktemp("compose")
    # Looked for, never imported: stands for the package of that name, which needs CUDA.
    stub = folder / "stub"
    stub.mkdir()
    (stub / "torch_memory_saver.py").write_text("torch_memory_saver = None\n")
    cases = [words_of(case, folder) for case in CASES.values()]
    (folder / "cases.json").write_text(json.dumps(cases))
    status, _, err = forked(
        *("compose.py", folder / "cases.json", folder / "results.json"),
        path=[stub],
        HOOK_URL="https://hooks.example/pLANTed",
    )
    assert 0 == status, err[-3000:]
    return dict(zip(CASES, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("case", ["password in the output's URL", "signature in the output's URL"])
def test_a_credential_in_clear_is_refused_before_anything_holds_it(became, case):
    """Neither Hydra's folder nor the console; the message states how to name it."""
    refused = became[case]

    assert 2 == refused["status"], refused["err"]
    assert "credentials from the environment" in refused["err"]
    assert "(clear-credential)" in refused["err"]
    assert [] == refused["holding"]


def test_run_json_has_what_explains_the_training_and_no_text_of_an_unknown_key(became):
    """Of the real config: no fact is omitted for want of a place in the list."""
    launch = became["unknown keys"]["launch"]

    assert "pLANTed" not in json.dumps(launch)
    assert "<omitted>" not in json.dumps([launch["training"], launch["settings"]])
    assert {*ENOUGH} < {*launch["command"]}
    assert "+trainer.note=<omitted>" in launch["command"]


def test_without_the_option_nothing_of_ours_is_active(became):
    """No file, no variable, no hook, no key."""
    off = became["off"]

    assert 0 == off["status"], off["err"]
    assert None is off["seen"]["settings"]
    assert not off["seen"]["ray_init_hooked"]
    assert "verl-profiler" not in off["err"] + off["out"]
    assert "profiler" not in off["seen"]["config"]
    assert not [file for file in off["files"] if file.startswith("logs")]


def test_the_options_keys_reach_verl_and_the_workers(became):
    """verl's own validation ran on this config; the hybrid worker reads the actor's node: `all` wins."""
    seen = became["every key"]["seen"]
    assert seen is not None, became["every key"]["err"]
    config, events = seen["config"], json.loads(seen["settings"])["events"]
    runtime_env = config["ray_kwargs"]["ray_init"]["runtime_env"]

    assert "profile_discrete" not in json.dumps(config)
    assert [2] == config["global_profiler"]["steps"]
    assert config["actor_rollout_ref"]["actor"]["profiler"]["all_ranks"] is True
    assert ([2, 3], ["memory"]) == (events["steps"], events["exclude"])
    # Ours is added to what the user has.
    assert {"MINE", "VERL_PROFILER_SETTINGS"} == set(runtime_env["env_vars"])
    assert seen["settings"] == runtime_env["env_vars"]["VERL_PROFILER_SETTINGS"]
    assert "a.b" == runtime_env["worker_process_setup_hook"]
    # Engines are configured for their times.
    engine = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["sglang"]
    vllm = became["unknown keys"]["seen"]["config"]["actor_rollout_ref"]["rollout"]
    assert (True, False) == (engine["enable_metrics"], vllm["disable_log_stats"])


def test_profiling_alone_changes_no_setting_of_verls(became):
    """Memory or other: the composed config is that of a run without the profiler."""
    off, on = became["off"]["seen"]["config"], became["on"]["seen"]["config"]
    ray_init = on["ray_kwargs"]["ray_init"]
    assert ["VERL_PROFILER_SETTINGS"] == list(ray_init.pop("runtime_env")["env_vars"])
    off["ray_kwargs"]["ray_init"].pop("runtime_env", None)

    ours = ("profiler", "hydra")
    off, on = ({key: each[key] for key in each if key not in ours} for each in (off, on))
    assert off == on
    assert "(memory-s" not in became["on"]["err"]


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
    for key in ("profile_steps: null", "profile_ranks: null", "ship_every_s: 60.0"):
        assert key in printed


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("typo in the option", ["Could not find 'profiler/multturn'", "multiturn"]),
        ("unknown key", ["profiler.evnts is not a setting", "Did you mean profiler.events?"]),
        ("unwritable", ["/proc/nope cannot be written", "profiler.output_dir=DIR"]),
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


def test_the_preset_becomes_verls_own_keys(became):
    """With a saver that is in use, offloads for all training models, and samples."""
    seen = became["memory saver"]["seen"]
    assert seen is not None, became["memory saver"]["err"]
    config = seen["config"]
    rollout = config["actor_rollout_ref"]["rollout"]

    assert (True, 0.4) == (rollout["free_cache_engine"], rollout["gpu_memory_utilization"])
    assert {"enable_memory_saver": True} == rollout["engine_kwargs"]["sglang"]
    for node in (
        config["actor_rollout_ref"]["actor"]["fsdp_config"],
        config["actor_rollout_ref"]["ref"]["fsdp_config"],
        config["critic"]["fsdp"],
    ):
        assert (True, True) == (node["param_offload"], node["optimizer_offload"])


def test_the_rehearsal_of_the_preset_leaves_the_saver_off(became):
    """SGLang's processes would not start with it on a CPU; the rest of the preset holds."""
    case = became["memory saver rehearsed"]
    assert 0 == case["status"], case["err"]
    config = case["seen"]["config"]
    rollout = config["actor_rollout_ref"]["rollout"]

    assert rollout["engine_kwargs"]["sglang"]["enable_memory_saver"] is False
    assert 0.1 == rollout["gpu_memory_utilization"]
    assert config["actor_rollout_ref"]["actor"]["fsdp_config"]["param_offload"] is True


@pytest.mark.parametrize(
    "case", ["multi-turn script", "multi-turn script, memory saver", "memory example"]
)
def test_the_scripts_commands_pass_verls_own_validation(became, case):
    """Every key exists, and the sizes fit together."""
    ended = became[case]

    assert 0 == ended["status"], ended["err"]
    assert "sglang" == ended["seen"]["config"]["actor_rollout_ref"]["rollout"]["name"]


def test_an_sft_command_gets_the_reason_for_which_hydra_refuses_it(tmp_path):
    """With verl's own config, which has a group `profiler`; without the option nothing is printed."""
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0], "trainer/config")
    script = tmp_path / "sft_trainer.py"
    script.write_text(
        "import hydra\n"
        f"@hydra.main(version_base=None, config_path={str(folder)!r}, config_name='sft_trainer_engine')\n"
        "def main(config):\n"
        "    print('RAN', config.profiler.tool)\n"
        "main()\n"
    )

    def run(*words, rank="0"):
        return subprocess.run(
            [sys.executable, str(script), *words, f"hydra.run.dir={tmp_path}"],
            env={**os.environ, "RANK": rank},
            capture_output=True,
            text=True,
            check=False,
        )

    with_option, of_other_rank, without = (
        run("+profiler=multiturn"),
        run("+profiler=x", rank="1"),
        run(),
    )
    assert 0 != with_option.returncode
    assert "(sft-trainer)" in with_option.stderr
    assert "(sft-trainer)" not in of_other_rank.stderr
    assert ("RAN torch\n", "") == (without.stdout, without.stderr)
