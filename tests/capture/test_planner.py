"""The plan: which processes are captured, with which nsys options, and how often."""

from pathlib import Path

import pytest

from verl_profiler.capture.plan import NsightSettings, raw_directory
from verl_profiler.capture.planner import captures_per_process, make_plan
from verl_profiler.capture.verl_keys import Capture
from verl_profiler.errors import ConfigError
from verl_profiler.launch.settings import parse

omegaconf = pytest.importorskip("omegaconf")

RUN = Path("/runs/one")
WORKERS = {"actor": (0, 1)}


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)


def config(**changes):
    """Return the nodes of verl 0.9 that a plan is made from, with `changes` by dotted path."""
    rollout = dict.fromkeys(("data_parallel_size", "pipeline_model_parallel_size"), 1)
    nsys = {
        "controller_nsight_options": {"trace": "cuda,nvtx", "cuda-memory-usage": "true"},
        "worker_nsight_options": {
            "trace": "cuda,nvtx,cublas",
            "cuda-graph-trace": "graph",
            "kill": "none",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": None,
        },
    }
    nodes = {
        "trainer": {"device": "cuda", "total_training_steps": None},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 8},
        "actor_rollout_ref": {
            "actor": {"use_kl_loss": True},
            "rollout": {"tensor_model_parallel_size": 2, **rollout},
        },
        "critic": {"enable": None, "ppo_epochs": 2, "ppo_mini_batch_size": 4},
        "global_profiler": {"tool": "nsys", "steps": [1, 2], "profile_continuous_steps": False},
    }
    nodes["trainer"] |= {"nnodes": 1, "n_gpus_per_node": 4}
    nodes["global_profiler"] |= {"global_tool_config": {"nsys": nsys}, "save_path": "outputs"}
    made = omegaconf.OmegaConf.create(nodes)
    for path, value in changes.items():
        omegaconf.OmegaConf.update(made, path.replace("__", "."), value, force_add=True)
    return made


def settings(**nsight):
    return parse({"output_dir": "x", "nsight": nsight}).nsight


def plan(nsight=None, capture=None, **changes):
    capture = capture or Capture((1, 2), WORKERS, False)
    return make_plan(config(**changes), capture, nsight or NsightSettings(), RUN)


def test_workers_get_verls_options_with_the_count_filled_in():
    """On CUDA verl's own start and stop of the CUDA profiler make the captures."""
    assert {
        "trace": "cuda,nvtx,cublas",
        "cuda-graph-trace": "graph",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat-shutdown:2",
        "kill": "none",
        "o": "/runs/one/nsight/raw/actor_%h_%p",
    } == plan().roles["actor"].options


def test_the_controller_waits_for_our_range():
    """It has no CUDA, and without a capture range nsys would record the whole run."""
    assert {
        "trace": "cuda,nvtx",
        "cuda-memory-usage": "true",
        "capture-range": "nvtx",
        "nvtx-capture": "capture@verl_profiler",
        "capture-range-end": "repeat-shutdown:2",
        "kill": "none",
        "o": "/runs/one/nsight/raw/trainer_%h_%p",
    } == plan().roles["trainer"].options


def test_without_cuda_everyone_waits_for_our_range():
    """`cudaProfilerApi` would give no report there, without any message."""
    options = plan(trainer__device="cpu").roles["actor"].options

    assert "nvtx" == options["capture-range"]
    assert "nvtx" == options["trace"]
    assert [] == [key for key in options if key.startswith("cuda-")]


def test_roles_are_chosen_one_by_one():
    """verl alone captures the controller and all ranks of its workers, and no other process."""
    chosen = settings(roles={"trainer": False, "engine": [1], "agent_loop": True})

    assert {"actor": (0, 1), "agent_loop": None, "engine": (1,)} == {
        role: of.ranks for role, of in plan(chosen).roles.items()
    }


def test_ranks_of_verls_groups_choose_processes():
    """Rank 3 of the rollout is served by replica 1; colocated groups share the actors' processes."""
    capture = Capture((1,), {"rollout": (2, 3)}, False)
    engines = plan(settings(roles={"engine": True}), capture).roles["engine"]
    roles = plan(capture=Capture((1,), {"critic": (3,), "actor": (0,)}, False)).roles

    assert (1,) == engines.ranks
    # The critic's too, and in a group of its own if it has one.
    assert ((0, 3), (3,)) == (roles["actor"].ranks, roles["critic"].ranks)


def test_the_users_options_win_over_verls():
    """For all roles; booleans become true and false in lower case."""
    roles = plan(settings(options={"trace": "osrt", "stats": True})).roles

    for role in ("actor", "trainer"):
        found = roles[role].options
        assert ("osrt", "true") == (found["trace"], found["stats"])


@pytest.mark.parametrize(
    ("capture", "changes", "role", "count"),
    [
        (Capture((1, 2, 5), WORKERS, False), {}, "actor", 3),
        (Capture((1, 2, 5), WORKERS, False), {"trainer__total_training_steps": 2}, "actor", 2),
        (
            Capture((1, 2, 5), WORKERS, False),
            {"global_profiler__profile_continuous_steps": True},
            "actor",
            2,
        ),
        # log-probs, reference and update
        (Capture((1, 2), WORKERS, True), {}, "actor", 6),
        (
            Capture((1, 2), WORKERS, True),
            {"actor_rollout_ref__actor__use_kl_loss": False},
            "actor",
            4,
        ),
        (Capture((1, 2), WORKERS, True), {}, "trainer", 2),
        # two epochs over two mini-batches
        (Capture((1,), {"critic": None}, True), {"algorithm__adv_estimator": "gae"}, "critic", 4),
        (Capture((1,), {"critic": None}, True), {"algorithm__adv_estimator": "gae"}, "actor", 7),
    ],
)
def test_captures_are_counted_in_advance(capture, changes, role, count):
    """nsys ends after so many: one too few loses captures, one too many delays the reports."""
    assert count == captures_per_process(config(**changes), capture, role)


@pytest.mark.parametrize(
    ("nsight", "slug"),
    [
        ({"options": {"output": "x"}}, "nsys-option"),
        ({"options": {"trace": "cuda nvtx"}}, "nsys-option"),
        ({"directory": "/with space"}, "nsys-option"),
        ({"roles": {"transfer_queue": [0]}}, "capture-keys"),
        ({"roles": {"workers": [4]}}, "capture-keys"),
        ({"roles": {"engine": [2]}}, "capture-keys"),
        ({"roles": {"reward": [-1]}}, "capture-keys"),
    ],
)
def test_what_ray_would_break_is_refused_before_training(nsight, slug):
    """Ray joins the options for a shell, and adds its own -o."""
    with pytest.raises(ConfigError) as caught:
        plan(settings(**nsight))

    assert slug == caught.value.slug


def test_other_tools_write_into_the_run_directory_or_have_no_plan():
    """verl's own profiler of the workers takes the folder from its config; others verl supports alone."""
    made = config(global_profiler__tool="torch")
    found = make_plan(made, Capture((1,), WORKERS, False), NsightSettings(), RUN)

    assert "/runs/one/nsight/raw" == made.global_profiler.save_path
    assert {} == found.roles["actor"].options
    assert plan(global_profiler__tool="npu") is None


def test_runs_do_not_share_a_folder_on_the_nodes():
    """The reports of one would be taken for those of the other."""
    assert Path("/scratch/one") == raw_directory(RUN, "/scratch")
    assert Path("/data/me/scratch/one") == raw_directory(RUN, "scratch", "/data/me")
