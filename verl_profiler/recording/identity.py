"""Who this process is: its role and rank, from the names that verl and Ray give it.

Ray puts the instance into `worker.actors` before it runs the constructor.  Asking the core worker
for an actor's name in a process that is no actor aborts the process (ray 2.60), so the instance
is looked for first.  `ray` is looked up in `sys.modules`, never imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """Who this process is: role, rank, and what Ray calls it."""

    role: str
    rank: int | None
    replica: int | None = None
    actor_name: str | None = None
    actor_class: str | None = None


# (pattern of the actor name, role); the first group is the rank.  verl 0.9.1: agent_loop.py:1218,
# async_sglang_server.py:839, vllm_async_server.py, reward_loop.py:335.
_ACTOR_NAMES = (
    (r"agent_loop_worker_(\d+)", "agent_loop"),
    (r"(?:sglang|vllm|trtllm|standin)_server_(?:decode_)?(\d+)", "engine"),
    (r"reward_loop_worker_(\d+)", "reward"),
)

# Ranks of a replica that is no part of the trainer's worker group (verl 0.9.1 replica.py:217).
_REPLICA_RANKS = r"^rollout_(?:standalone|colocate)_(\d+)"

# (part of the actor class's name, role), for actors without a telling name.
_ACTOR_CLASSES = (
    ("FullyAsyncRollouter", "rollouter"),
    ("FullyAsyncTrainer", "trainer"),
    ("FullyAsyncTaskRunner", "task_runner"),
    ("TaskRunner", "trainer"),
    ("MessageQueue", "message_queue"),
    ("AgentLoopWorker", "agent_loop"),
    # uni-agent's.
    ("AgentFrameworkWorker", "agent_loop"),
    ("HttpServer", "engine"),
    ("RewardLoopWorker", "reward"),
    ("TransferQueueController", "tq_controller"),
    ("StorageUnit", "tq_storage"),
    ("LoadBalancer", "load_balancer"),
    ("RequestRouter", "load_balancer"),
)


def identify() -> Identity | None:
    """Return who this process is, or None while Ray has not made it an actor."""
    worker = _ray_worker()
    class_name = _actor_class(worker) if worker is not None else None
    if class_name is None:
        return None
    return of_actor(_actor_name(worker), class_name, os.environ)


def of_actor(name: str | None, class_name: str, environment: Mapping[str, str]) -> Identity:
    """Return who an actor is, or will be.

    Args:
        name: The actor's name, if it has one.
        class_name: The name of its class.
        environment: Its environment variables; a worker group's members have RANK and WG_PREFIX.
    """
    for pattern, role in _ACTOR_NAMES:
        match = re.search(pattern, name or "")
        if match:
            rank = int(match.group(1))
            replica = rank if role == "engine" else None
            return Identity(role, rank, replica, name, class_name)
    standalone = re.search(_REPLICA_RANKS, name or "")
    if standalone and "RANK" in environment:
        # The rank counts within the replica.
        replica, size = int(standalone.group(1)), int(environment.get("WORLD_SIZE", 1))
        rank = replica * size + int(environment["RANK"])
        return Identity("rollout", rank, replica, name, class_name)
    if "RANK" in environment and "WG_PREFIX" in environment:
        return Identity(_trainer_role(name), int(environment["RANK"]), None, name, class_name)
    for part, role in _ACTOR_CLASSES:
        if part in class_name:
            return Identity(role, 0 if role == "trainer" else None, None, name, class_name)
    return Identity(_noun(class_name), None, None, name, class_name)


def _trainer_role(name: str | None) -> str:
    """Tell the hybrid actor's worker group from the critic's and the reference's.

    Colocated groups share one process under the class WorkerDict; it is called `actor`, since it
    holds the actor.  A group of its own carries its role in the actor's name.
    """
    for role in ("critic", "ref", "rm"):
        if name is not None and re.search(rf"(^|_){role}(_|$)", name.lower()):
            return role
    return "actor"


def _noun(class_name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()


def _ray_worker() -> Any:
    module = sys.modules.get("ray._private.worker")
    worker = getattr(module, "global_worker", None)
    if worker is None or not getattr(worker, "connected", False):
        return None
    return worker


def _actor_name(worker: Any) -> str | None:
    try:
        return worker.core_worker.get_actor_name().decode() or None
    except Exception:  # noqa: BLE001  not an actor yet, or another Ray
        return None


def _actor_class(worker: Any) -> str | None:
    for instance in list(getattr(worker, "actors", {}).values()):
        if instance is not None:
            return type(instance).__name__
    return None
