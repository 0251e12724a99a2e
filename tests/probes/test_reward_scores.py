"""Waiting for a reward worker's thread is no time of the reward function."""

import asyncio
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from picked import picked
from reading_back import lines_of

from verl_profiler import span
from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import reward
from verl_profiler.recording import recorder

(PROBE,) = reward.PROBES
FUNCTION_S = 0.1


class Manager:
    """Runs the function as verl 0.9.1's managers do: in a pool, with the sample's own dict."""

    def __init__(self, function):
        self.compute_score = function
        self.is_async_reward_score = asyncio.iscoroutinefunction(function)

    async def run_single(self, data):
        info = data.non_tensor_batch["extra_info"][-1]
        if self.is_async_reward_score:
            return {"reward_score": await self.compute_score(extra_info=info)}
        score = await asyncio.get_running_loop().run_in_executor(
            None, lambda: self.compute_score(extra_info=info)
        )
        return {"reward_score": score}


class Worker:
    def __init__(self, manager):
        self.reward_manager = manager

    async def compute_score(self, data):
        return await self.reward_manager.run_single(data)


def sample(info):
    return types.SimpleNamespace(non_tensor_batch={"extra_info": np.array([info], dtype=object)})


async def score_at_once(worker, infos):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    compute = wrapping.wrap(PROBE, Worker.compute_score)
    return await asyncio.gather(
        *(compute(worker, sample(info)) for info in infos), return_exceptions=True
    )


def scores(worker_config):
    return [line for line in lines_of(worker_config.directory) if line["event"] == "reward_score"]


def test_calls_that_wait_for_a_thread_show_the_functions_time_apart(recording, worker_config):
    """Four at once and one thread: the last waits for three others."""

    def function(extra_info):
        time.sleep(FUNCTION_S)
        return 1.0

    asyncio.run(score_at_once(Worker(Manager(function)), [{"n": n} for n in range(4)]))
    recorder.stop()
    lines = sorted(scores(worker_config), key=lambda line: line["duration_sec"])

    for line in lines:
        times = line["extra"]
        assert FUNCTION_S * 0.99 <= times["compute_s"]
        assert times["wait_s"] + times["compute_s"] <= line["duration_sec"]
    assert lines[-1]["extra"]["wait_s"] >= 3 * FUNCTION_S * 0.99
    assert lines[0]["extra"]["wait_s"] < lines[-1]["extra"]["wait_s"]
    assert {} == reward._running


def test_the_function_stays_what_it_was(recording, worker_config):
    """Of its kind, with its name, its result and its very exception, also without a recorder."""
    error = ValueError("mine")

    async def waits(extra_info):
        await asyncio.sleep(0)
        return 0.5

    def fails(extra_info):
        raise error

    waiting, failing = Manager(waits), Manager(fails)
    (result,) = asyncio.run(score_at_once(Worker(waiting), [{}]))
    (raised,) = asyncio.run(score_at_once(Worker(failing), [{}]))
    once = waiting.compute_score
    asyncio.run(score_at_once(Worker(waiting), [{}]))
    recorder.stop()

    assert {"reward_score": 0.5} == result
    assert raised is error
    assert once is waiting.compute_score
    assert ("waits", waits) == (once.__name__, once.__wrapped__)
    assert asyncio.iscoroutinefunction(once)
    assert 0.5 == asyncio.run(once(extra_info={}))
    with pytest.raises(ValueError, match="mine"):
        failing.compute_score(extra_info={})
    assert {} == dict(status.errors)


def test_two_calls_with_the_same_dict_are_not_mixed_up(recording, worker_config):
    """Whose time it is cannot be seen."""
    shared = {}
    asyncio.run(score_at_once(Worker(Manager(lambda extra_info: 1.0)), [shared, shared]))
    recorder.stop()

    assert 2 == len(scores(worker_config))
    assert 0 == sum("compute_s" in line["extra"] for line in scores(worker_config)[1:])
    assert {} == reward._running


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_spans_inside_the_function_carry_the_samples_identity(recording, worker_config, kind):
    """A pool's thread has a context of its own, and keeps nothing of the last sample."""

    def function(extra_info):
        with span("answer_check", n=extra_info["n"]):
            return 1.0

    async def coroutine(extra_info):
        await asyncio.sleep(0)
        return function(extra_info)

    def of(n):
        columns = {"index": 10 + n, "session_id": n % 2, "uid": f"u{n}", "global_steps": 4}
        made = sample({"n": n})
        made.non_tensor_batch |= {
            key: np.array([value], dtype=object) for key, value in columns.items()
        }
        return made

    async def score_all():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        compute = wrapping.wrap(PROBE, Worker.compute_score)
        worker = Worker(Manager(function if kind == "function" else coroutine))
        await asyncio.gather(*(compute(worker, of(n)) for n in range(4)))

    asyncio.run(score_all())
    with span("afterwards"):
        pass
    recorder.stop()
    lines = lines_of(worker_config.directory)

    assert {(n, 10 + n, n % 2, f"u{n}") for n in range(4)} == {
        picked(line["extra"], "n sample session uid")
        for line in lines
        if line["event"] == "answer_check"
    }
    assert {4} == {line["step"] for line in lines if line["event"] == "answer_check"}
    assert [None] == [line.get("extra") for line in lines if line["event"] == "afterwards"]
