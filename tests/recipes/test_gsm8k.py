"""GSM8K with a tool: the rows of verl's example, and the tool that they name."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from verl_profiler.recipes.gsm8k_data import row, write

EXAMPLE = {"question": "What is 600 and 634?", "answer": "600 + 634 = 1234\n#### 1,234"}


def test_a_row_carries_the_truth_to_reward_and_tool():
    """Without the thousands' comma, as verl's reward function compares."""
    made = row(EXAMPLE, "train", 3)

    assert "1234" == made["reward_model"]["ground_truth"]
    assert {"ground_truth": "1234"} == (
        made["extra_info"]["tools_kwargs"]["calc_gsm8k_reward"]["create_kwargs"]
    )
    assert ("tool_agent", "openai/gsm8k", 3) == (
        made["agent_name"],
        made["data_source"],
        made["extra_info"]["index"],
    )
    assert ["system", "user"] == [message["role"] for message in made["prompt"]]
    assert made["prompt"][1]["content"].startswith("What is 600 and 634? Let's think")


def test_an_answer_without_a_number_is_named():
    """The dataset has none; a copy may."""
    with pytest.raises(ValueError, match="test 0: the answer has no '#### <number>'"):
        row({"question": "?", "answer": "none"}, "test", 0)


@pytest.mark.verl
@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_a_local_copy_is_written_whole(tmp_path):
    """Both files, and nothing else."""
    from pyarrow import parquet

    copy, out = tmp_path / "copy", tmp_path / "out"
    copy.mkdir()
    for split in ("train", "test"):
        (copy / f"{split}.jsonl").write_text(json.dumps(EXAMPLE) + "\n")

    write(out, str(copy))

    assert ["test.parquet", "train.parquet"] == sorted(file.name for file in out.iterdir())
    (written,) = parquet.read_table(out / "train.parquet").to_pylist()
    assert row(EXAMPLE, "train", 0) == written


@pytest.mark.verl
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_the_tool_scores_as_the_reward_does():
    """As verl loads it, from the YAML that ships."""
    from verl.tools.tool_registry import initialize_tools_from_config

    import verl_profiler.recipes

    folder = Path(verl_profiler.recipes.__path__[0])
    (tool,) = initialize_tools_from_config(str(folder / "gsm8k_tool.yaml"))

    async def ask(answer):
        made, _ = await tool.create(create_kwargs={"ground_truth": "1234"})
        response, reward, _ = await tool.execute(made, {"answer": answer})
        await tool.release(made)
        return response.text, reward

    right, earned = asyncio.run(ask("1,234"))
    wrong, _ = asyncio.run(ask("#### 7"))

    assert "calc_gsm8k_reward" == tool.name
    assert 0.0 == earned
    assert (True, True) == (right.endswith("reward=1.0"), wrong.endswith("reward=0.0"))
