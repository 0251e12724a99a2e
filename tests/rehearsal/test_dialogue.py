"""Questions, dialogues and prompt files: seeded, and made for the tools that a recipe has."""

import json
import random
import re

import pytest

from verl_profiler.rehearsal import data
from verl_profiler.rehearsal.dialogue import Question, Tool, dialogue, question, tools_of

CALL = re.compile(r"<tool_call>(.*)</tool_call>")

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": ["integer", "null"]},
                "answer": {"type": "integer"},
                "exact": {"type": "boolean"},
                "fields": {"type": "array"},
                "filters": {"type": "object"},
                "order": {"type": "string", "enum": ["new", "old"]},
                "hint": {"type": "string"},
            },
            "required": ["query", "limit", "answer", "exact", "fields", "filters", "order"],
        },
    },
}


def _calls(tools, seeds=200):
    for seed in range(seeds):
        for role, content in dialogue(random.Random(seed), tools):
            found = CALL.search(content)
            if role == "assistant" and found:
                yield json.loads(found[1])


def test_the_same_seed_gives_the_same_questions_dialogues_and_rows():
    """Wherever it runs; validation asks other questions than training."""
    tools = tools_of([SCHEMA])
    train = data.rows("train", 8, seed=0)

    assert question(random.Random(7)) == question(random.Random(7)) != question(random.Random(8))
    assert dialogue(random.Random(7), tools) == dialogue(random.Random(7), tools)
    assert train == data.rows("train", 8, seed=0) != data.rows("train", 8, seed=1)
    assert train[0]["prompt"] != data.rows("validation", 8, seed=0)[0]["prompt"]
    assert 12 == Question("…", 5, 7).answer


def test_a_tool_has_the_parameters_that_its_schema_requires():
    """All of them where it has no `required`, which OpenAI's form lets be absent; or none."""
    (tool,) = tools_of([SCHEMA])
    plain = {"function": {"name": "a", "parameters": {"properties": {"b": {"type": "string"}}}}}

    assert "search" == tool.name
    assert SCHEMA["function"]["parameters"]["required"] == list(tool.parameters)
    assert [Tool("a", {"b": {"type": "string"}})] == tools_of([plain])
    assert [Tool("now", {})] == tools_of([{"function": {"name": "now"}}])


def test_every_call_is_json_with_the_declared_types():
    """Each required parameter is there, with a value of its JSON type."""
    calls = list(_calls(tools_of([SCHEMA])))
    types = {
        "query": str,
        "limit": int,
        "answer": int,
        "exact": bool,
        "fields": list,
        "filters": dict,
        "order": str,
    }

    assert len(calls) > 100
    for call in calls:
        assert call["name"] == "search"
        assert list(types) == list(call["arguments"])
        for name, kind in types.items():
            assert type(call["arguments"][name]) is kind
        assert call["arguments"]["order"] in ("new", "old")


def test_all_tools_are_called():
    """A model that is taught two tools sees both; one without any, single turns."""
    tools = [Tool("one", {}), Tool("two", {})]

    assert {"one", "two"} == {call["name"] for call in _calls(tools)}
    for seed in range(20):
        roles = [role for role, _ in dialogue(random.Random(seed), [])]
        assert roles == ["user", "assistant"]


def test_dialogues_have_between_one_and_several_turns():
    """Turns vary, each call is answered by a tool message, and the last message has the answer."""
    turns = set()
    for seed in range(200):
        messages = dialogue(random.Random(seed), [Tool("one", {})])
        roles = [role for role, _ in messages]
        rounds = (len(roles) - 2) // 2
        turns.add(rounds)

        assert ["user", *["assistant", "tool"] * rounds, "assistant"] == roles
        assert re.search(r"#### \d+$", messages[-1][1])
    assert {0, 1, 2, 3} <= turns


def test_rows_have_the_columns_of_verls_gsm8k_example():
    """Verl reads these columns; the stateful tool finds its ground truth in them."""
    rows = data.rows("train", 5, seed=0)

    assert len(rows) == 5
    for index, row in enumerate(rows):
        assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} == set(row)
        assert row["data_source"] == "openai/gsm8k"
        assert [message["role"] for message in row["prompt"]] == ["user"]
        truth = row["reward_model"]["ground_truth"]
        assert truth.isdigit()
        assert index == row["extra_info"]["index"]
        created = row["extra_info"]["tools_kwargs"]["check_answer"]["create_kwargs"]
        assert {"ground_truth": truth} == created


def test_the_files_hold_the_rows(tmp_path):
    """What is written is what `rows` returns."""
    parquet = pytest.importorskip("pyarrow.parquet")
    data.write(tmp_path, seed=3)

    for split, count in (("train", data.TRAIN_ROWS), ("validation", data.VALIDATION_ROWS)):
        table = parquet.read_table(tmp_path / f"{split}.parquet")

        assert data.rows(split, count, seed=3) == table.to_pylist()
