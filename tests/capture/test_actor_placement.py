"""Which actors start under nsys: each has its own entry, whatever its parent has."""

import json
import os
import sys

import pytest

from verl_profiler.capture.actor_placement import UNDER_NSYS, runtime_env_for
from verl_profiler.capture.plan import Plan, RoleCapture

pytest.importorskip("ray")

from ray.runtime_env import RuntimeEnv

OPTIONS = {"trace": "nvtx", "o": "/raw/engine_%p"}
PLAN = Plan(
    "nsys",
    (1,),
    False,
    "/raw",
    "/journal",
    {"engine": RoleCapture((0,), OPTIONS), "tq_storage": RoleCapture(None, OPTIONS)},
)


def test_a_captured_actor_gets_its_own_options():
    """And a PATH on which `python` is the interpreter that has Ray; the user's own variables stay."""
    made = runtime_env_for(PLAN, PLAN.of("engine", 0), {"env_vars": {"RANK": "0"}})
    own = runtime_env_for(PLAN, PLAN.of("tq_storage", None), {"env_vars": {"PATH": "/mine"}})

    assert OPTIONS == made["_nsight"]
    assert "0" == made["env_vars"]["RANK"]
    assert f"{os.path.dirname(sys.executable)}:${{PATH}}" == made["env_vars"]["PATH"]
    assert "/mine" == own["env_vars"]["PATH"]


def test_an_actor_that_is_not_captured_inherits_nothing(monkeypatch):
    """An absent key would be filled from the parent; an explicit None is not, if it is sent."""
    monkeypatch.setenv(UNDER_NSYS, "1")
    made = runtime_env_for(PLAN, PLAN.of("engine", 1), None)

    sent = json.loads(made.serialize())
    assert {"_nsight": None, "env_vars": {UNDER_NSYS: "0"}} == sent


def test_nothing_changes_where_nothing_is_inherited(monkeypatch):
    """So that tasks of a process without nsys still share their workers."""
    assert runtime_env_for(PLAN, None, None) is None

    monkeypatch.setenv(UNDER_NSYS, "0")
    assert runtime_env_for(PLAN, None, None) is None


def test_verls_own_wrapping_is_replaced():
    """It wraps every rank of a worker group, also those that were not chosen."""
    given = RuntimeEnv(nsight={"trace": "cuda"}, env_vars={"RANK": "1"})
    made = runtime_env_for(PLAN, None, given)

    assert made["_nsight"] is None
    assert {"RANK": "1"} == made["env_vars"]


def test_ranks_choose_processes_and_processes_without_a_rank_need_all():
    """TransferQueue's actors have no rank."""
    assert PLAN.of("engine", 1) is None
    assert PLAN.of("engine", None) is None
    assert PLAN.of("tq_storage", None) is not None
    assert PLAN.of("trainer", 0) is None
