"""Write GSM8K with a tool as verl's multi-turn example has it: `train.parquet` and `test.parquet`.

    python -m verl_profiler.recipes.gsm8k_data --out ~/data/gsm8k_with_tool
    python -m verl_profiler.recipes.gsm8k_data --out DIR --dataset a-local-copy

The rows are those of verl's `examples/data_preprocess/gsm8k_tool_agent_loop.py`, which is not part of
its wheel.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["row", "write"]

DATASET = "openai/gsm8k"
_SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
_INSTRUCTION = "Let's think step by step and output the final answer after `####`."


def row(example: Mapping[str, str], split: str, index: int) -> dict[str, Any]:
    """Turn one question of the dataset into a prompt with a tool.

    Args:
        example: `question` and `answer`, which ends in `#### <number>`.
        split: `train` or `test`.
        index: Its place in the split.

    Raises:
        ValueError: The answer has no `####`.
    """
    found = re.search(r"#### (-?[0-9.,]+)", example["answer"])
    if found is None:
        raise ValueError(f"{split} {index}: the answer has no '#### <number>'")
    truth = found[1].replace(",", "")
    return {
        "data_source": DATASET,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"{example['question']} {_INSTRUCTION}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": example["answer"],
            "question": example["question"],
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
        },
    }


def write(folder: Path, dataset: str = DATASET) -> None:
    """Write both files; each whole or not at all.

    Args:
        folder: Made if it is missing.
        dataset: Name on the Hugging Face hub, or a local copy of it.
    """
    datasets: Any = importlib.import_module("datasets")
    local = Path(dataset).is_dir() and not (Path(dataset) / "main").is_dir()
    loaded = datasets.load_dataset(dataset, None if local else "main")
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [row(example, split, index) for index, example in enumerate(loaded[split])]
        target = folder / f"{split}.parquet"
        scratch = target.with_suffix(".part")
        datasets.Dataset.from_list(rows).to_parquet(str(scratch))
        scratch.replace(target)
        print(f"Wrote {target} ({len(rows):,} prompts)", flush=True)


def main() -> int:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m verl_profiler.recipes.gsm8k_data")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--dataset", default=DATASET, help="hub name or folder of a local copy")
    args = parser.parse_args()
    try:
        write(args.out.expanduser(), args.dataset)
    except Exception as error:  # noqa: BLE001  no network, no such folder: the library's own words
        print(
            f"GSM8K could not be prepared: {error}\n"
            "Without a network, give a local copy with --dataset DIR.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
