"""Planted hangs: while a file names a place, whoever comes there waits until it no longer does.

The file is `+faults.hang=FILE`; whoever runs the rehearsal writes one of `PLACES` into it, in the middle of
the run, and removes it again.
"""

import asyncio
import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt
from rehearsal_faults import setting

PLACES = {
    "tool": "the tools never answer",
    "blocking_tool": "a tool blocks the event loop of its worker",
    "reward": "the reward function never returns",
    "semaphore": "the tools wait for a semaphore that they hold themselves",
    "engine": "the first replica answers nothing (stand-in only)",
    "paused": "the first replica is paused and not resumed",
    "rank": "the second rank does not train, and the others wait for it in a collective",
    "barrier": "the second rank skips a barrier, in which the first one waits for it",
    "collective": "the second rank stops itself (SIGSTOP) in a collective",
    "rollouter": "the rollouter of a fully asynchronous run generates no more samples",
    "weight_sync": "the weights are never sent (stand-in only)",
}
_POLL_S = 0.1


def _is_planted(place: str) -> bool:
    path = setting("hang")
    if path is None:
        return False
    try:
        return Path(path).read_text(encoding="utf-8").strip() == place
    except OSError:
        return False


async def wait_at(place: str) -> None:
    """Wait here while the file names this place; the event loop runs on."""
    while _is_planted(place):
        await asyncio.sleep(_POLL_S)


def block_at(place: str) -> None:
    """Wait here while the file names this place; the thread is blocked."""
    while _is_planted(place):
        time.sleep(_POLL_S)


async def deadlock_at(place: str) -> None:
    """Wait here for a semaphore of this very call while the file names this place."""
    if not _is_planted(place):
        return
    slots = asyncio.Semaphore(1)

    async def rescue() -> None:
        await wait_at(place)
        slots.release()

    rescuer = asyncio.create_task(rescue())
    async with slots, slots:
        await rescuer


# Resumes that are still to come, by server.
_resumes: dict[int, asyncio.Task[None]] = {}


async def pause_at(place: str, server: Any) -> None:
    """Pause an engine server; it is resumed when the file no longer names this place."""
    if not _is_planted(place) or id(server) in _resumes:
        return

    async def resume() -> None:
        await wait_at(place)
        await server.resume_generation()
        del _resumes[id(server)]

    _resumes[id(server)] = asyncio.create_task(resume())
    await server.abort_all_requests()


def _blocked(function: Callable[..., Any], place: str, rank: str | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def hanging(*args: Any, **kwargs: Any) -> Any:
        if rank is None or os.environ.get("RANK") == rank:
            block_at(place)
        return function(*args, **kwargs)

    return hanging


def _in_collectives(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hang two ranks in collectives that do not come about."""

    @functools.wraps(function)
    def hanging(*args: Any, **kwargs: Any) -> Any:
        rank = os.environ.get("RANK")
        # A group is made by all ranks, and these hangs need two.
        if rank in ("0", "1") and os.environ.get("WORLD_SIZE") == "2":
            _skip_barrier(rank)
            _stop_in_collective(rank)
        return function(*args, **kwargs)

    return hanging


_barrier_group: Any = None


def _skip_barrier(rank: str) -> None:
    """Let the first rank wait in a barrier, which the second one only enters when the hang is over."""
    global _barrier_group
    distributed: Any = importlib.import_module("torch.distributed")
    hang = setting("hang")
    entered = Path(f"{hang}.entered")
    if _barrier_group is None:
        # All ranks come here before the first hang.
        _barrier_group = distributed.new_group([0, 1], backend="gloo")
        if rank == "1":
            threading.Thread(target=_make_up_for, args=(entered,), daemon=True).start()
    if rank == "0" and _is_planted("barrier"):
        entered.touch()
        distributed.barrier(_barrier_group)


def _make_up_for(entered: Path) -> None:
    """Enter the barrier in which the first rank is, once nothing is planted any more."""
    distributed: Any = importlib.import_module("torch.distributed")
    while True:
        time.sleep(_POLL_S)
        if entered.exists() and not _is_planted("barrier"):
            entered.unlink()
            distributed.barrier(_barrier_group)


def _stop_in_collective(rank: str) -> None:
    if not _is_planted("collective"):
        return
    if rank == "0":
        # The second one waits for it in the next collective, and is stopped there.
        time.sleep(1.0)
    else:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def _hanging_reward(module: Any) -> None:
    module.default_compute_score = _blocked(module.default_compute_score, "reward", None)


def _hanging_workers(module: Any) -> None:
    training = module.TrainingWorker
    training.train_mini_batch = _in_collectives(_blocked(training.train_mini_batch, "rank", "1"))


def _pausing_server(module: Any) -> None:
    server_class = module.SGLangHttpServer
    generate = server_class.generate

    @functools.wraps(generate)
    async def pausing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.replica_rank == 0:
            await pause_at("paused", self)
        return await generate(self, *args, **kwargs)

    server_class.generate = pausing


def _hanging_rollouter(module: Any) -> None:
    manager_class = module.FullyAsyncAgentLoopManager
    generate = manager_class.generate_sequences_single

    @functools.wraps(generate)
    async def hanging(self: Any, *args: Any, **kwargs: Any) -> Any:
        await wait_at("rollouter")
        return await generate(self, *args, **kwargs)

    manager_class.generate_sequences_single = hanging


def _hanging_tools(module: Any) -> None:
    spend = module.spend

    @functools.wraps(spend)
    async def hanging(*args: Any, tool: str, **kwargs: Any) -> None:
        await wait_at("tool")
        await deadlock_at("semaphore")
        if tool == "check_answer":
            block_at("blocking_tool")
        await spend(*args, tool=tool, **kwargs)

    module.spend = hanging


def _hanging_sync(module: Any) -> None:
    adapter = module.StandinAdapter
    update_weights = adapter.update_weights

    @functools.wraps(update_weights)
    async def hanging(*args: Any, **kwargs: Any) -> None:
        await wait_at("weight_sync")
        await update_weights(*args, **kwargs)

    adapter.update_weights = hanging


def install() -> None:
    """Register all hangs, if a file was given that names one."""
    for name, hang in HANGS if setting("hang") is not None else ():
        wrapt.register_post_import_hook(hang, name)


HANGS: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("verl.utils.reward_score", _hanging_reward),
    ("verl.workers.engine_workers", _hanging_workers),
    ("verl.experimental.fully_async_policy.fully_async_rollouter", _hanging_rollouter),
    ("verl.workers.rollout.sglang_rollout.async_sglang_server", _pausing_server),
    ("verl_profiler.rehearsal.latency", _hanging_tools),
    ("verl_profiler.rehearsal.standin", _hanging_sync),
)
