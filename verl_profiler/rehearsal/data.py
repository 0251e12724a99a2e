"""Write the rehearsal's prompts: small Parquet files in the shape of verl's GSM8K example.

Command: `python -m verl_profiler.rehearsal.data --out DIR`.
"""

from __future__ import annotations

import argparse
import importlib
import random
from pathlib import Path
from typing import Any

from verl_profiler.rehearsal.dialogue import question

__all__ = ["rows", "write"]

TRAIN_ROWS = 256
VALIDATION_ROWS = 16


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
    for split, count in (("train", TRAIN_ROWS), ("validation", VALIDATION_ROWS)):
        table = pa.Table.from_pylist(rows(split, count, seed))
        parquet.write_table(table, directory / f"{split}.parquet")


def main() -> None:
    """Write the files requested on the command line."""
    parser = argparse.ArgumentParser(prog="python -m verl_profiler.rehearsal.data")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out, args.seed)


if __name__ == "__main__":
    main()
