"""What evidence comes to, from files that are written by hand."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from stuck_runs import GATHER, NOW, RUN, TRAINER, WORKER, ago, call, header, opened, phase, write

from verl_profiler.cli import main
from verl_profiler.live.stuck import lines, verdict

HERE = Path(__file__).parent


def shown(files, evidence, headers=RUN, now=NOW):
    evidence = {name: {"at": ago(50), **content} for name, content in evidence.items()}
    return verdict(headers, files, HERE, now, evidence)


def load(**fields):
    return {"engine": {"loads": [fields]}}


def ranks_of(*rows):
    names = ("running_requests", "waiting_requests", "kv_used_tokens", "kv_capacity_tokens")
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"engine": {"requests": 8, "loads": ranks_of((3, 4, 100, 1000), (2, 1, 20, 1000))}},
            "engine_0: 5 running, 5 waiting, KV cache 6 % of 2,000 tokens, 8 requests in its server",
        ),
        (
            {"engine": {"requests": 1, "paused": True, "unanswered": "scheduler"}},
            "engine_0: its scheduler does not answer, 1 request in its server, paused",
        ),
        ({"unanswered": ["engine"]}, "engine_0: its server does not answer"),
        (
            {"engine": {"loads": [{"running_requests": 3, "age_s": 88.2}]}},
            "engine_0: 3 running, last iteration 88 s before",
        ),
    ],
)
def test_the_load_of_an_engine_at_the_hang(content, expected):
    """In one line; of all its data-parallel ranks together."""
    found = shown({**TRAINER, "worker_0": WORKER}, {"engine_0": content})

    assert [expected] == found.facts
    assert [expected] == [line for line in lines(found) if line.startswith("engine_0")]


def test_a_scheduler_that_does_not_answer_is_the_culprit():
    """The server's process is well, and waits for it."""
    holding = opened(calls=[call("engine_request", 98, "sglang:wait:5")])
    evidence = {"engine_1": {"engine": {"requests": 1, "unanswered": "scheduler"}}}

    found = shown({**TRAINER, "worker_0": WORKER, "engine_1": holding}, evidence)

    assert (
        "the scheduler of engine_1, which does not answer: 1 generate call is not answered by s:1"
        == found.culprit
    )
    assert "high" == found.confidence


@pytest.mark.parametrize(
    ("ranks", "fact", "culprit", "confidence"),
    [
        (
            [GATHER] * 7 + ["torch.serialization:load:3"],
            "7 of 8 ranks are in all_gather, actor_7 is in torch.serialization:load:3",
            "actor_7 in torch.serialization:load:3",
            "high",
        ),
        (
            [GATHER, GATHER, "torch.distributed.distributed_c10d:barrier:7"],
            "2 of 3 ranks are in all_gather, 1 of 3 ranks is in barrier",
            "ranks in different collectives: actor_0, actor_1 in all_gather, actor_2 in barrier",
            "medium",
        ),
        (
            [GATHER, None],
            "1 of 2 ranks is in all_gather, actor_1 is in no recorded call",
            "actor_1: in no call, while the other ranks wait in a collective",
            "medium",
        ),
        ([GATHER] * 2, "2 of 2 ranks are in all_gather", "all ranks wait for each other", "low"),
    ],
)
def test_where_the_ranks_are(ranks, fact, culprit, confidence):
    """From their stacks; in a collective they wait, and the one that is not in it is the culprit."""
    files = {
        f"actor_{rank}": opened(calls=[call("update_actor", 99, at)])
        for rank, at in enumerate(ranks)
        if at is not None
    }
    headers = {
        "trainer_0": RUN["trainer_0"],
        **{f"actor_{rank}": header("actor", rank) for rank in range(len(ranks))},
    }

    found = shown({"trainer_0": opened(phases=[phase("update_actor")]), **files}, {}, headers)

    assert [fact] == found.facts
    assert found.culprit.startswith(culprit)
    assert confidence == found.confidence


def test_threads_that_only_wait_for_work_are_not_listed():
    """Each process has some, and they hide the one that does something."""
    idle = ["concurrent.futures.thread:_worker:81", "threading:Condition.wait:327"]
    rows = [
        {"thread": "t", "stack": ["threading:Thread.run:1", at]} for at in (*idle, "mine:load:3")
    ]
    evidence = {
        "actor_0": {"stacks": {"threads": rows}},
        "actor_1": {"stacks": {"threads": rows[:2]}},
    }

    assert ["actor_0:", "    threads in mine:load:3"] == shown(TRAINER, evidence).details


@pytest.mark.parametrize(("at", "counts"), [(100, True), (150, False)])
def test_evidence_of_others_counts_while_the_trainer_is_silent(at, counts):
    """They gathered it because it has written nothing; what is older is of another hang."""
    headers = {**RUN, "trainer_0": header("trainer", heard=120)}
    evidence = {"engine_0": {"at": ago(at), **load(running_requests=1)}}

    found = verdict(headers, {}, HERE, NOW, evidence)

    assert found.culprit.startswith("trainer_0")
    assert counts == (found.facts == ["engine_0: 1 running"])


def test_evidence_of_an_earlier_hang_is_not_of_this_one():
    """Nor of a run that is not stuck."""
    evidence = {"engine_0": {"at": ago(150), **load(running_requests=1)}}

    assert [] == verdict(RUN, TRAINER, HERE, NOW, evidence).facts
    evidence["engine_0"]["at"] = ago(50)
    assert ["engine_0: 1 running"] == verdict(RUN, TRAINER, HERE, NOW, evidence).facts
    assert [] == verdict(RUN, {}, HERE, NOW, evidence).facts
    later = NOW + timedelta(hours=1)
    assert ["engine_0: 1 running"] == verdict(RUN, TRAINER, HERE, later, evidence).facts


def test_the_last_hang_of_a_run_counts(tmp_path, capsys):
    """In a folder of its own for each."""
    write(tmp_path / "run", RUN, TRAINER)
    for number, count in ((2, 5), (10, 7)):
        folder = tmp_path / "run" / "evidence" / str(number)
        folder.mkdir(parents=True)
        content = {"at": ago(50), **load(running_requests=count)}
        (folder / "engine_0.json").write_text(json.dumps(content))
    (tmp_path / "run" / "evidence" / "x").mkdir()

    assert 1 == main(["stuck", str(tmp_path / "run"), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert ["engine_0: 7 running"] == found["facts"]
    assert ["engine_0:", "    engine: 7 running"] == found["details"]
