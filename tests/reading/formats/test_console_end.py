"""What ended a training, in the texts that people attach to issues (shortened, with other names)."""

import pytest

from verl_profiler.reading.formats.console_end import log_end

STEP = "(TaskRunner pid=7) step:6 - timing_s/gen:120.0 - timing_s/step:220.0\n"
DRIVER = (
    "Error executing job with overrides: ['x=1']\nTraceback (most recent call last):\n"
    '  File "/w/my_launcher.py", line 97, in main\n    ray.get(runner.run.remote(config))\n'
)
# https://github.com/verl-project/verl/issues/3453, 4995 and 2950.
HOST = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 10.0.0.4, ID: 87d7) where the lease (lease ID: 79, "
    "name=worker_4:AgentLoopWorker.__init__, pid=2285, memory used=10.13GB) was running was 891.06GB / 937.50GB "
    "(0.950459), which exceeds the memory usage threshold of 0.95. Ray killed this worker. Top 10 memory users:\n"
    "PID\tMEM(GB)\tCOMMAND\n1802\t220.11\tray::TaskRunner.run\n2285\t10.13\tray::AgentLoopWorker\n"
    "31\t56.57\tray::WorkerDict.actor_rollout_generate_sequences\n"
)
WATCHDOG = "(WorkerDict pid={pid}) [rank{rank}]:[E325 04:13:11.372 ProcessGroupNCCL.cpp:{line}] [PG {group} Rank {rank}] {text}\n"
NEW = "failure detected by watchdog at work sequence id: {0} PG status: last enqueued work: {0}, last completed work: 9"
OLD = "Exception detected by watchdog at work: {0}, last enqueued NCCL work: {0}, last completed NCCL work: 9."


def ended(tmp_path, text):
    log = tmp_path / "train.log"
    log.write_text(STEP + text)
    return log_end(log)


def test_the_host_s_memory_and_who_holds_it_are_named_not_whom_ray_killed(tmp_path):
    text = ended(tmp_path, DRIVER + HOST)

    assert "(891.06 GB of 937.50 GB were used, the most by ray::TaskRunner.run (220 GB))." in text
    assert "10.13" not in text
    workers = "".join(
        f"{pid} 56.57 ray::WorkerDict.actor_rollout_generate_sequences\n" for pid in range(5)
    )
    assert "the most by ray::WorkerDict.actor_rollout_generate_sequences (339 GB)" in ended(
        tmp_path, DRIVER + HOST + workers
    )


def test_the_frame_is_that_of_the_process_that_raised(tmp_path):
    """Not the launcher's, which waited for it, and no frame of the standard library below verl's."""
    raised = (
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::main_task() (pid=82, ip=10.0.0.2)\n"
        '  File "/w/verl/workers/actor/dp_actor.py", line 240, in update_policy\n    loss.backward()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB.\n"
    )
    assert "in update_policy (/w/verl/workers/actor/dp_actor.py:240): CUDA" in ended(
        tmp_path, DRIVER + raised
    )
    # https://github.com/verl-project/verl/issues/4921.
    asleep = (
        "ray.exceptions.RayTaskError(ActorDiedError): ray::TaskRunner.run() (pid=88, ip=10.0.0.2)\n"
        '  File "/usr/lib/python3.10/concurrent/futures/_base.py", line 403, in __get_result\n'
        '  File "/x/dist-packages/verl/workers/rollout/vllm_rollout/vllm_async_server.py", line 563, in sleep\n'
        '  File "/usr/lib/python3.10/asyncio/tasks.py", line 650, in _wrap_awaitable\n'
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict\n\tactor_id: 50\n"
    )
    text = ended(tmp_path, DRIVER + asleep)
    assert "failed with ActorDiedError in sleep (" in text
    assert "before finishing this task (WorkerDict)" in text


def test_an_engine_s_own_traceback_is_the_cause(tmp_path):
    """https://github.com/verl-project/verl/issues/6583."""
    core = "(vLLMHttpServer pid=31) (EngineCore_DP0 pid=900) ERROR 05-30 03:11:02 [core.py:866] "
    text = ended(
        tmp_path,
        f"{core}EngineCore encountered a fatal error.\n{core}Traceback (most recent call last):\n"
        f'{core}  File "/x/vllm/v1/executor/multiproc_executor.py", line 364, in get_response\n'
        f"{core}TimeoutError: RPC call to sample_tokens timed out.\n{DRIVER}"
        "ray.exceptions.RayTaskError(EngineDeadError): ray::Worker.generate() (pid=7, ip=10.0.0.2)\n"
        '  File "/x/vllm/v1/engine/async_llm.py", line 540, in generate\n'
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for "
        "the root cause.\n",
    )
    assert text.startswith(
        "After step 6 TimeoutError was raised in get_response (/x/vllm/v1/executor/multiproc_executor.py:364, "
        "engine): RPC call to sample_tokens timed out; then it failed with EngineDeadError in generate"
    )


@pytest.mark.parametrize(
    ("group", "form"), [("ID 0 PG GUID 3(default_pg)", NEW), ("0 (default_pg)", OLD)]
)
def test_ranks_that_had_begun_fewer_collectives_are_named(tmp_path, group, form):
    """https://github.com/verl-project/verl/issues/5750: the others waited for them."""
    lines = "".join(
        WATCHDOG.format(
            pid=10 + rank,
            rank=rank,
            line=99,
            group=group,
            text=form.format(461 if rank == 3 else 463),
        )
        for rank in range(8)
    )
    watchdog = (
        "(WorkerDict pid=10) [rank0]:[E325 04:13:11.372 x.cpp:632] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=463, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013 milliseconds.\n"
    )
    assert "(default_pg) rank 3 had begun 461 collectives, others 463)." in ended(
        tmp_path, watchdog + lines
    )
    assert "had begun" not in ended(tmp_path, watchdog + lines.replace("461", "463"))


def test_a_log_that_goes_on_with_requests_alone_names_what_came_before(tmp_path):
    """https://github.com/THUDM/slime/issues/1487."""
    last = "(Actor pid=3) [2026-03-24 06:36:50] timer.py:24 - Timer actor_train start\n"
    polled = '(SGLangEngine pid=4) [2026-03-24 06:{:02d}:07] INFO:  10.0.0.2:41646 - "GET /metrics HTTP/1.1" 200 OK\n'
    text = last + "".join(polled.format(minute) for minute in range(37, 52))

    assert (
        "For the last 14 min 17 s of the log only HTTP servers printed lines; the last other line: "
        "[2026-03-24 06:36:50] timer.py:24 - Timer actor_train start"
    ) == ended(tmp_path, text)
    assert ended(tmp_path, last + polled.format(40)) == ""


def test_slime_s_steps_are_finished(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "(Actor pid=3) x.py:44 - perf 51: {'perf/sleep_time': 2.0, 'perf/train_time': 300.2, 'perf/step_time': 619.1}\n"
        "Traceback (most recent call last):\n"
        "httpx.HTTPStatusError: Server error '503 Service Unavailable' for url 'http://10.0.0.2:3938/generate'\n"
    )
    assert log_end(log).startswith(
        "After step 51 it failed with HTTPStatusError: Server error '503"
    )


def test_what_a_request_s_process_handled_did_not_end_the_training(tmp_path):
    """https://github.com/verl-project/verl/issues/4124: the agent loop goes on without the tool."""
    handled = (
        "(AgentLoopWorker pid={0}) ERROR Error when executing tool: 'solve'\n"
        "(AgentLoopWorker pid={0}) Traceback (most recent call last):\n"
        '(AgentLoopWorker pid={0})   File "/w/verl/tool_agent_loop.py", line 143, in _call_tool\n'
        "(AgentLoopWorker pid={0}) KeyError: 'solve'\n"
    )
    text = "".join(map(handled.format, (5, 6, 5))) + "(AgentLoopWorker pid=5) goes on\n"

    assert (
        "After step 6 KeyError was raised 3 times in _call_tool (/w/verl/tool_agent_loop.py:143, tool): 'solve'; "
        "the log does not show that this ended the training."
    ) == ended(tmp_path, text)


@pytest.mark.parametrize(
    "last",
    [
        "(TaskRunner pid=7) 'Final validation metrics: {...}'\n",
        "Training Progress: 100%|##########| 6/6 [21:58<00:00, 219.9s/it]\n",
    ],
)
def test_what_fails_after_the_last_step_is_after_it(tmp_path, last):
    """https://github.com/verl-project/verl/issues/1299."""
    died = "(raylet) A worker died. Worker exit type: SYSTEM_ERROR Worker exit detail: Connection error. Some.\n"

    assert ended(tmp_path, last + died).startswith(
        "All steps were finished at step 6; then it failed (Worker exit type: SYSTEM_ERROR"
    )
    assert ended(tmp_path, last.replace("6/6", "6/9").replace("Final", "") + died).startswith(
        "After step 6 it failed"
    )


def test_timeouts_that_are_many_are_named(tmp_path):
    """https://github.com/microsoft/agent-lightning/issues/218, and verl's 3478, which goes on."""
    line = "(P server) Task rollout-8{:x}c-f{} timed out after 600.0s, requeued\n"
    lines = "".join(line.format(n + 8, n) for n in range(8))
    named = f"The log has 8 lines of timeouts such as: {line.format(15, 7).strip()}"

    assert f": 'r'. {named}" in ended(tmp_path, lines + DRIVER + "KeyError: 'r'\n")
    log = tmp_path / "goes_on.log"
    log.write_text(lines + STEP)
    assert named == log_end(log)
    log.write_text(line.format(1, 1) + STEP)
    assert not log_end(log)


def test_what_a_server_raises_all_the_time_comes_before_what_ended_the_training(tmp_path):
    """https://github.com/microsoft/agent-lightning/issues/355: requests that are too long."""
    server = "(PatchedvLLMServer pid=24) ERROR 12-03 04:20:11 [serving_chat.py:205] "
    lines = "".join(
        f'{server}  File "/x/site-packages/vllm/entrypoints/openai/serving_engine.py", line 560, in _validate\n'
        f"{server}ValueError: However, you requested {22_000 + n} tokens\n"
        for n in range(30)
    )
    raised = "After step 6 ValueError was raised 30 times in _validate ("

    assert ended(tmp_path, lines).startswith(raised)
    assert ended(tmp_path, lines).endswith("does not show that this ended the training.")
    failed = (
        '  File "/x/site-packages/agentlightning/verl/daemon.py", line 371, in get_train_data_batch\n'
        "AssertionError\n"
    )
    text = ended(tmp_path, lines + failed)
    assert text.startswith(raised)
    assert "; then it failed with AssertionError in get_train_data_batch" in text
    assert not ended(tmp_path, lines[: len(lines) // 10] + failed).startswith(raised[:22])
