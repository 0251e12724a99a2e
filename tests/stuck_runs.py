"""Headers and open files of made-up runs that hang or failed."""

import json
from datetime import datetime, timedelta, timezone

GATHER = "torch.distributed.distributed_c10d:all_gather:4287"
NOW = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def ago(seconds):
    return (NOW - timedelta(seconds=seconds)).isoformat()


def header(role, rank=0, *, heard=0.2, ended=None, **more):
    return {
        "role": role,
        "rank": rank,
        "host": "elsewhere",
        "pid": 1,
        "flush_interval_s": 0.5,
        "complete_until": ago(heard),
        "updated": ago(heard + 5),
        "ended": ended,
        **more,
    }


def phase(event="gen", open_s=100.0, usual=10.0, step=3, **more):
    return {
        "event": event,
        "step": step,
        "since": ago(open_s),
        "open_s": open_s,
        "usual_s": usual,
        "at": "verl.trainer:sample:409",
        **more,
    }


def call(event, open_s, at, **extra):
    return {"event": event, "since": ago(open_s), "open_s": open_s, "at": at, "extra": extra}


def opened(**rows):
    return {"format": 1, "at": ago(1), "after_s": 60.0, **rows}


RUN = {
    "trainer_0": header("trainer"),
    "worker_0": header("agent_loop"),
    "worker_1": header("agent_loop", 1),
    "actor_0": header("actor"),
    "actor_1": header("actor", 1),
    "engine_0": header("engine"),
    "engine_1": header("engine", 1),
    "reward_0": header("reward"),
    "tq_storage_h_9": header("tq_storage", None),
}
TRAINER = {"trainer_0": opened(phases=[phase("step", 130, 20), phase()])}


def request(number, doing="turn"):
    return call("request", 99, None, request_id=f"r{number}", turn=1, doing=doing)


# It waits for an engine's answer.
WORKER = opened(
    open_requests=1,
    requests=[request(1)],
    calls=[call("engine_call", 98, "verl:generate:2", request_id="r1", server="s:1")],
)


def write(folder, headers, files):
    for kind, contents in (("processes", headers), ("open", files)):
        (folder / kind).mkdir(parents=True)
        for name, content in contents.items():
            (folder / kind / f"{name}.json").write_text(json.dumps(content))
    (folder / "step_1").mkdir()
    (folder / "run.json").write_text('{"format": 1}')
