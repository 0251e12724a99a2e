"""Load the files that findings give to paste as verl does, and report what they do, as JSON.

    python fixes_on_verl.py FOLDER

The folder has the files.  `test_fixes.py` reads the report.
"""

import inspect
import json
import sys
from types import SimpleNamespace

import hydra
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.rollout.router import _load_router_yaml, _resolve_router_class

FOLDER = sys.argv[1]
SAMPLER = "trainer.v1.sampler.custom_sampler"


def built(*words):
    """Return what verl's own trainer makes of a replay buffer (`_build_replay_buffer`)."""
    trainer = next(
        each
        for each in vars(trainer_base).values()
        if isinstance(each, type) and "_build_replay_buffer" in vars(each)
    )
    config = hydra.compose("ppo_trainer", overrides=list(words))
    given = SimpleNamespace(config=config, trainer_mode="sync", _add_prompts_to_generate=print)
    given._resolve_filter_groups_metric = lambda: trainer._resolve_filter_groups_metric(given)
    made = vars(trainer._build_replay_buffer(given))
    return {key: value for key, value in made.items() if not isinstance(value, dict)}


def sampler():
    """Return what the pasted sampler has another value of than verl's, by how groups are treated."""
    pasted = [f"{SAMPLER}.path={FOLDER}/fast_poll.py", f"{SAMPLER}.name=FastPoll"]
    treated = {
        "": (),
        "filtered": (
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=reward",
        ),
        "refilled": ("trainer.v1.sampler.sync_refill_failed_groups=true",),
    }
    found = {}
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        for name, words in treated.items():
            own, other = built(*words), built(*words, *pasted)
            found[name] = sorted(key for key in own if own[key] != other[key])
    return {"differing": found, "polls": other["poll_interval"]}


def router():
    """Return which replica a conversation gets: at rest, with 7 and with 8 calls, of 4 in the other one."""
    sys.path.insert(0, FOLDER)
    config = _load_router_yaml(f"{FOLDER}/spread_calls.yaml")
    router = _resolve_router_class(config["router_class"])({"a": 1, "b": 2}, config)
    first, _ = router.acquire_server("mine")
    other = "b" if first == "a" else "a"
    stays = [router.acquire_server("mine")[0] == first]
    for calls in (7, 8):
        router._inflight_requests.update({first: calls, other: 4})
        stays.append(router.acquire_server("mine")[0] == first)
    return {"stays": stays, "calls": router._inflight_requests[other]}


def sync():
    """Return whether trainers that share their devices with the rollout set the sync's backend themselves."""
    return {"sync_is_naive": '.backend = "naive"' in inspect.getsource(trainer_base)}


print("REPORT " + json.dumps({**sampler(), **router(), **sync()}))
