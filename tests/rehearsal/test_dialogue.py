"""Questions, dialogues and prompt files: seeded, and made for the tools that a recipe has."""

import json
import random
import re

from verl_profiler.rehearsal.dialogue import dialogue, tools_of

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
