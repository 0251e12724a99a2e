"""Write the rehearsal's prompts: small Parquet files in the shape of verl's GSM8K example."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

from verl_profiler.rehearsal.dialogue import question

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
