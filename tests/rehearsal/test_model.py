"""The tiny model: a chat template that verl can extend, and a recipe that is repeatable."""

import random

import pytest

from verl_profiler.rehearsal import model
from verl_profiler.rehearsal.dialogue import dialogue, tools_of

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("_import_path")]

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "…",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
    for name in ("calculate", "check_answer")
]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A model that was taught for two steps only."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "STEPS", 2)
        patch.setattr(model, "TOKENIZER_DIALOGUES", 100)
        model.make(folder, SCHEMAS, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(taught):
    """The tokenizer as verl loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(taught)


def test_the_template_writes_what_was_taught(tokenizer):
    """A chat in training has the same tokens as the same chat in a rollout."""
    tools = tools_of(SCHEMAS)
    for seed in range(20):
        messages = dialogue(random.Random(seed), tools)
        chat = [{"role": role, "content": content} for role, content in messages]
        text = tokenizer.apply_chat_template(chat, tools=SCHEMAS, tokenize=False)
        parts = model._parts(messages, tools)

        assert "".join(part for part, _ in parts) == text
        assert tokenizer.encode(text, add_special_tokens=False) == [
            token for part, _ in parts for token in tokenizer.encode(part, add_special_tokens=False)
        ]


def test_verl_extends_a_chat_turn_by_turn(tokenizer):
    """verl's token builder adds a tool's answer without rendering the chat anew."""
    builders = pytest.importorskip("verl.utils.tokenizer.continuous_token")
    builder = builders.QwenContinuousTokenBuilder(tokenizer)
    chat = [{"role": "user", "content": "What is 1 plus 2?"}]
    said = "<tool_call>{}</tool_call>"
    tokens = builder.build_initial_tokens(chat, tools=SCHEMAS)
    tokens += tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
    before = [*chat, {"role": "assistant", "content": said}]
    after = [*before, {"role": "tool", "content": "3"}]
    merged = builder.merge_context_tokens(before, after, tokens, tools=SCHEMAS)
    whole = tokenizer.apply_chat_template(
        after, tools=SCHEMAS, tokenize=False, add_generation_prompt=True
    )

    assert whole == tokenizer.decode(merged.token_ids)
