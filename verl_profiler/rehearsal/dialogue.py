"""Training data of the tiny model: questions, and dialogues that answer them with tool calls.

The questions resemble GSM8K.  The dialogues call whatever tools a recipe has:
each call names one of them and fills its required parameters, so a rehearsal of your own recipe
calls your own tools.
"""

from __future__ import annotations

import importlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler.events.json_values import is_list, mapping_or_empty

_NAMES = ("Ann", "Ben", "Eva", "Max", "Mia", "Tom")
_THINGS = ("apples", "books", "coins", "pens")

# Number of tool calls per dialogue; a few make many, as in real runs.
_CALLS = (0, 1, 1, 2, 2, 2, 3, 3, 4, 5)

# Parameters with these names receive the result, other strings an expression.
_RESULT_NAMES = ("answer", "number", "result", "value")


@dataclass(frozen=True)
class Question:
    """A question about one addition, with its answer."""

    text: str
    left: int
    right: int

    @property
    def answer(self) -> int:
        """The expected number at the end of the final message."""
        return self.left + self.right


@dataclass(frozen=True)
class Tool:
    """A tool's name, and the JSON schemas of its required parameters."""

    name: str
    parameters: dict[str, dict[str, Any]]


def tools_of(schemas: list[dict[str, Any]]) -> list[Tool]:
    """Return the tools described by a list of schemas in OpenAI's format."""
    tools: list[Tool] = []
    for schema in schemas:
        function = schema["function"]
        parameters = mapping_or_empty(function.get("parameters"))
        properties = mapping_or_empty(parameters.get("properties"))
        required: list[str] = parameters.get("required") or list(properties)
        tools.append(Tool(function["name"], {name: properties[name] for name in required}))
    return tools


def question(rng: random.Random) -> Question:
    """Return a random question."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    left, right = rng.randrange(1, 50), rng.randrange(1, 50)
    return Question(
        f"{name} has {left} {thing} and gets {right} more. How many {thing} does {name} have?",
        left,
        right,
    )


def dialogue(rng: random.Random, tools: list[Tool]) -> list[tuple[str, str]]:
    """Return a random dialogue as (role, content): question, rounds of tool calls, final answer."""
    problem = question(rng)
    messages = [("user", problem.text)]
    for _ in range(rng.choice(_CALLS) if tools else 0):
        tool = rng.choice(tools)
        arguments = {
            name: _value(rng, name, schema, problem) for name, schema in tool.parameters.items()
        }
        call = json.dumps({"name": tool.name, "arguments": arguments})
        messages.append(("assistant", f"{_thought(rng)}<tool_call>{call}</tool_call>"))
        messages.append(("tool", rng.choice((str(problem.answer), "right", "wrong", "ok"))))
    messages.append(("assistant", f"{_thought(rng)}#### {problem.answer}"))
    return messages


def _thought(rng: random.Random) -> str:
    """Return no, some or, one time in eight, many sentences, so that lengths have a tail."""
    count = rng.randrange(8, 17) if rng.random() < 0.125 else int(rng.expovariate(0.6))
    return "Let me think about it. " * count


def _value(rng: random.Random, name: str, schema: dict[str, Any], problem: Question) -> Any:
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    if is_list(kind):
        kind = kind[0]
    values: dict[str, Any] = {
        "array": [problem.left, problem.right],
        "boolean": rng.random() < 0.5,
        "integer": problem.answer if name in _RESULT_NAMES else problem.left,
        "number": problem.answer if name in _RESULT_NAMES else problem.left,
        "object": {},
    }
    text = str(problem.answer) if name in _RESULT_NAMES else f"{problem.left}+{problem.right}"
    return values.get(kind, text)


_TRAIN_ROWS = 256
_VALIDATION_ROWS = 16


def rows(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return prompts with the columns that verl's GSM8K preprocessing writes."""
    rng = random.Random(f"{seed} {split}")
    result: list[dict[str, Any]] = []
    for index in range(count):
        problem = question(rng)
        answer = str(problem.answer)
        result.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": problem.text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "question": problem.text,
                    "answer": answer,
                    "tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": answer}}},
                },
            }
        )
    return result


def write(directory: Path, seed: int) -> None:
    """Write `train.parquet` and `validation.parquet` into an existing directory."""
    pa: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    for split, count in (("train", _TRAIN_ROWS), ("validation", _VALIDATION_ROWS)):
        table = pa.Table.from_pylist(rows(split, count, seed))
        parquet.write_table(table, directory / f"{split}.parquet")
