"""The scripts for a GPU machine: what they would run, what they refuse, and how they are written."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "profile-sglang-multi-turn.sh"
SCRIPTS = [SCRIPT, *sorted(ROOT.glob("examples/*/*.sh"))]


def run(*arguments, **variables):
    """Run the script in this environment, without GPUs of this machine."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "WANDB_API_KEY")
    }
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={**kept, "PYTHON": sys.executable, "EXPERIMENT_NAME": "test", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def overrides(printed):
    """Return the Hydra overrides of a printed command as a dict."""
    command = printed[printed.index("EXPERIMENT_NAME=") :].replace("\\\n", " ")
    words = shlex.split(command)
    return dict(word.split("=", 1) for word in words[4:] if "=" in word)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    """No unquoted word, no lost status."""
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stdout)


@pytest.mark.parametrize("words", [["2"], ["--tp=2"]])
def test_the_size_is_given_as_the_guide_does_or_as_an_option(words):
    """And further words go to Hydra, last."""
    done = run(*words, "--gpus", "8", "--dry-run", "trainer.total_epochs=1")
    said = overrides(done.stdout)

    assert 0 == done.returncode, done.stderr
    assert "2" == said["actor_rollout_ref.rollout.tensor_model_parallel_size"]
    assert "8" == said["trainer.n_gpus_per_node"]
    assert "1" == said["trainer.total_epochs"]
    assert "multiturn" == said["+profiler"]
    assert done.stdout.rstrip().endswith("trainer.total_epochs=1")


@pytest.mark.parametrize("gpus", [3, 64])
def test_the_batches_fit_any_number_of_gpus(gpus):
    """verl wants the requests shared evenly, and micro batches that divide each share."""
    said = overrides(run("1", "--gpus", str(gpus), "--dry-run").stdout)
    batch = int(said["data.train_batch_size"])
    requests = batch * int(said["actor_rollout_ref.rollout.n"])
    micro = int(said["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"])

    assert 256 - gpus < batch <= 256
    assert 0 == requests % gpus
    assert 0 == requests // gpus % micro
    assert 1 <= micro <= 32


def test_the_gpus_are_those_that_are_visible(tmp_path):
    """CUDA_VISIBLE_DEVICES first, then nvidia-smi."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: x\\nGPU 1: x\\nGPU 2: x\\nGPU 3: x\\n'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    visible = overrides(run("1", "--dry-run", CUDA_VISIBLE_DEVICES="0,3,5", PATH=path).stdout)
    counted = overrides(run("1", "--dry-run", PATH=path).stdout)

    assert ("3", "4") == (visible["trainer.n_gpus_per_node"], counted["trainer.n_gpus_per_node"])


def test_missing_data_is_prepared_first(tmp_path):
    """From the hub or from a local copy; data that is there is not touched."""
    missing = run("1", "--gpus", "1", "--dry-run", DATA_DIR=str(tmp_path), GSM8K="copy of it")
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").touch()
    there = run("1", "--gpus", "1", "--dry-run", DATA_DIR=str(tmp_path))

    first = shlex.split(missing.stdout.splitlines()[0])
    assert ["-m", "verl_profiler.recipes.gsm8k_data"] == first[1:3]
    assert ["--out", str(tmp_path), "--dataset", "copy of it"] == first[3:]
    assert there.stdout.startswith("EXPERIMENT_NAME=")
    assert f"{tmp_path}/train.parquet" == overrides(there.stdout)["data.train_files"]


def test_a_rehearsal_takes_the_same_recipe():
    """Its sizes are the rehearsal's; two replicas of the size given."""
    printed = run("--tp", "2", "--rehearse", "--dry-run", REHEARSE_ENGINE="sglang").stdout
    words = shlex.split(printed.replace("\\\n", " "))

    assert ["-m", "verl_profiler", "rehearse", "--engine", "sglang"] == words[2:7]
    assert ["--ranks", "4"] == words[9:11]
    assert "data.train_batch_size" not in printed
    assert (
        "calc_gsm8k_reward"
        in Path(
            overrides(printed)["actor_rollout_ref.rollout.multi_turn.tool_config_path"]
        ).read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "Usage:"),
        (["--dry-run"], {}, "the tensor parallel size is missing"),
        (["two"], {}, "not 'two'"),
        (["1", "2"], {}, "unexpected argument 2: the tensor parallel size is already 1"),
        (["--tp"], {}, "--tp needs a number"),
        (["1", "--gpus", "x"], {}, "not 'x'"),
        (["3", "--gpus", "4"], {}, "4 GPUs are not divisible by tensor parallel size 3"),
        (["1", "--force"], {}, "unknown option --force"),
        (["1"], {"CUDA_VISIBLE_DEVICES": "-1"}, "selects no GPU"),
        (["1", "--gpus", "1"], {"EXPERIMENT_NAME": "a b"}, "EXPERIMENT_NAME is 'a b'"),
        (["1", "--gpus", "1"], {"PYTHON": "no-such-python"}, "no-such-python not found"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(arguments, variables, message, tmp_path):
    """Status 2, nothing started, nothing written."""
    done = run(*arguments, **{"DATA_DIR": str(tmp_path), **variables})

    assert 2 == done.returncode
    assert message in done.stderr
    assert [] == list(tmp_path.iterdir())


def test_the_memory_preset_is_not_contradicted():
    """The recipe's own offloads and share of the device stand back."""
    plain = overrides(run("1", "--gpus", "1", "--dry-run").stdout)
    preset = overrides(run("1", "--gpus", "1", "--dry-run", PROFILER="memory_saver").stdout)
    words = ("offload", "gpu_memory_utilization")

    assert 4 == sum(any(word in key for word in words) for key in plain)
    assert 0 == sum(any(word in key for word in words) for key in preset)


def test_the_gpu_check_ends_with_a_line_where_there_is_none(tmp_path):
    """Up to the first CUDA call it runs here."""
    if importlib.util.find_spec("torch") is None or Path("/dev/nvidiactl").exists():
        pytest.skip("no torch, or a GPU")
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (1, "") == (done.returncode, done.stdout)
    assert ["gpu_check needs a GPU: torch.cuda.is_available() is false here"] == (
        done.stderr.splitlines()
    )
    assert not (tmp_path / "out").exists()


def test_the_lock_of_the_rehearsal_has_what_its_lists_name():
    """In the listed versions, each with the hash of its file, but for torch."""
    folder = ROOT / "verl_profiler" / "rehearsal"

    def listed(name):
        for line in (folder / name).read_text().splitlines():
            if line.startswith("-r "):
                yield from listed(line[3:])
            elif line and not line.startswith("#"):
                yield Requirement(line)

    locked = {}
    for line in (folder / "lock-sglang.txt").read_text().splitlines()[1:]:
        named, digest = line.split(" --hash=sha256:")
        assert 64 == len(digest)
        name, version = named.split("==")
        locked[canonicalize_name(name)] = version
    for wanted in [*listed("requirements-sglang.txt"), *listed("requirements-sglang-no-deps.txt")]:
        if wanted.name != "torch":
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted
