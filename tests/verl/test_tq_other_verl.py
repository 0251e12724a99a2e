"""TransferQueue tracing on an older verl and its TransferQueue, the real ones; see `OTHER_VERL`.

    pip install --no-deps --target DIR verl==0.8.0 TransferQueue==0.1.7
    VERL_PROFILER_TEST_VERL=DIR pytest tests/verl/test_tq_tracing.py tests/verl/test_tq_other_verl.py

With verl 0.7.0 and TransferQueue 0.1.5.dev3, or 0.6.1 and 0.0.1.dev0, only this file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tq_lines import ON, of, traced_lines

from verl_profiler.transfer_queue.probes import PROBES

HERE = Path(__file__).parent
FOLDER = os.environ.get("VERL_PROFILER_TEST_VERL", "")
VERSION = next((path.name.split("-")[1] for path in Path(FOLDER).glob("verl-*.dist-info")), "")

# What verl checks before it starts.
OVERRIDES = (
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=1",
    "+ray_kwargs.ray_init.address=local",
    "ray_kwargs.ray_init.num_cpus=8",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
    "hydra.output_subdir=null",
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.ray,
    pytest.mark.skipif(not FOLDER, reason="VERL_PROFILER_TEST_VERL names no folder"),
]
optional = pytest.mark.skipif(VERSION > "0.7.1", reason="verl 0.6 and 0.7.0 only")
sync = pytest.mark.skipif(not VERSION.startswith("0.8"), reason="verl 0.8 only")


def run(environment, *command, **variables):
    """Run a command; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert "FOUND " in done.stdout, done.stdout[-4000:]
    return done.stdout


@sync
def test_every_target_of_the_sync_trainer_is_in_its_source():
    """By name."""
    source = Path(FOLDER, "verl/trainer/main_ppo_sync.py").read_text()
    targets = [target for probe in PROBES for target in probe.targets]
    names = [t.rpartition(".")[2] for t in targets if "main_ppo_sync" in t]

    assert len(names) > 5
    assert [] == [name for name in names if f"    def {name}(" not in source]


@sync
@pytest.mark.parametrize("by", ["environment", "setting"])
def test_the_sync_trainer_is_traced(verl_environment, tmp_path, by):
    """The trainer's own functions, which travel by value from `__main__`, and bridged ones in them."""
    command = ["-m", "verl.trainer.main_ppo_sync", *OVERRIDES, f"hydra.run.dir={tmp_path}"]
    switches = ON
    if by == "setting":
        command += ["+profiler=multiturn", f"profiler.output_dir={tmp_path / 'run'}"]
        command += ["profiler.transfer_queue.trace=true", "profiler.transfer_queue.detail=true"]
        switches = {"VERL_LOGGING_LEVEL": "INFO"}
    modules = {"VERL_USE_EXTERNAL_MODULES": "tq_sync_trainer"}
    text = run(verl_environment, *command, **switches, **modules)
    lines = traced_lines(text)
    stages = [line["stage"] for line in of(lines, func="_compute_values", mark="TQ-TRACE")]
    bridged = [line["stage"] for line in of(lines, func="infer_batch", mark="TQ-TRACE")]

    assert "FOUND [4, 5, 6, 7]" in text
    assert ["FUNCTION_START", "COMPUTE_START", "COMPUTE_END", "GET_START", "GET_END"] == stages[:5]
    assert ["PUT_START", "PUT_END", "COMPUTE_START", "COMPUTE_END", "FUNCTION_END"] == stages[-5:]
    assert ["GET_START", "COMPUTE_START", "PUT_START"] == [
        stage for stage in bridged[1:] if stage.endswith("START")
    ]
    assert 1 == len({line["trace_id"] for line in lines})
    assert {"3"} == {line["step"] for line in lines}
    assert "tq/function_count:1 " in text
    if by == "setting":
        events = [
            json.loads(line)
            for path in (tmp_path / "run").glob("step_*/*.jsonl")
            for line in path.read_text().splitlines()
        ]
        functions = [e["extra"]["func"] for e in events if e["event"] == "tq_function"]
        assert {"_compute_values", "infer_batch"} == set(functions)
        assert 2 <= sum(e["event"] == "tq_get" and "call" in e["extra"] for e in events)


@optional
def test_the_optional_queue_is_traced(verl_environment):
    """verl 0.6 and 0.7.0: real `@register`, DataProto on both sides, partitions that name the step."""
    on = run(verl_environment, HERE / "tq_optional_driver.py", **ON)
    off = run(verl_environment, HERE / "tq_optional_driver.py")
    reports = [json.loads(text.partition("FOUND ")[2].splitlines()[0]) for text in (on, off)]
    lines = traced_lines(on)
    ends = of(lines, stage="FUNCTION_END")
    gets = of(lines, func="compute_log_prob", stage="TQ_CLIENT_GET_END")

    assert reports[0]["training"] == reports[1]["training"]
    assert ["1", None] == [report["switch"] for report in reports]
    assert [] == traced_lines(off)
    assert ["compute_log_prob", "compute_log_prob", "broken"] == [line["func"] for line in ends]
    assert ["ok", "ok", "error"] == [line["status"] for line in ends]
    assert "mine" not in ends[0]["trace_id"]
    assert ends[0]["trace_id"] != "N/A"
    assert "mine" == ends[1]["trace_id"]
    assert {"3"} == {line.get("step") for line in ends}
    assert ["0.25", "0.25"] == [line["data_size_mb"] for line in gets]
    assert 3 == reports[0]["logged"][0]["tq/function_count"]
