"""Create the rehearsal's model: a tiny Qwen2 trained to call the tools of a recipe.

    python -m verl_profiler.rehearsal.model --out DIR --function-tools FILE --tool-config FILE

A random model never writes a tool call, so a rehearsal with one would have a single turn.  This one
has 0.3 million parameters and a byte tokenizer; after `STEPS` steps on generated dialogues, about
90 % of its calls are well-formed.  It does not reason: its numbers are mostly wrong.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from pathlib import Path
from typing import Any

from verl_profiler.rehearsal.dialogue import Tool, dialogue, tools_of

STEPS = 120
_LEARNING_RATE = 8e-3
_WARMUP_STEPS = 10
_DIALOGUES_PER_STEP = 16
_VOCABULARY = 400
TOKENIZER_DIALOGUES = 1000

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]

# Qwen's chat template, with the tools' names instead of their schemas.
_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: "
    "{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(directory: Path, schemas: list[dict[str, Any]], seed: int) -> None:
    """Train a model to call the tools in `schemas`, and save it with its tokenizer.

    Args:
        directory: Existing output directory.
        schemas: Tool schemas in OpenAI's format.
        seed: Seed of weights and dialogues.  With the same versions on the same machine, the same
            seed gives the same files.
    """
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tools = tools_of(schemas)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = _tokenizer([_text(dialogue(rng, tools), tools) for _ in range(TOKENIZER_DIALOGUES)])
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        # 32 dimensions each: with fewer, vLLM's attention for CPUs does not run.
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config)
    _teach(model, tokenizer, tools, rng)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer(texts: list[str]) -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    pre_tokenizers = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def _parts(messages: list[tuple[str, str]], tools: list[Tool]) -> list[tuple[str, bool]]:
    """Split a rendered chat into pieces of text and whether the model generated each."""
    parts: list[tuple[str, bool]] = []
    if tools:
        names = "".join(f"{tool.name} " for tool in tools)
        parts.append((f"<|im_start|>system\nTools: {names}<|im_end|>\n", False))
    for role, content in messages:
        parts.append((f"<|im_start|>{role}\n", False))
        parts.append((f"{content}<|im_end|>", role == "assistant"))
        parts.append(("\n", False))
    return parts


def _text(messages: list[tuple[str, str]], tools: list[Tool]) -> str:
    return "".join(text for text, _ in _parts(messages, tools))


def _teach(model: Any, tokenizer: Any, tools: list[Tool], rng: random.Random) -> None:
    torch: Any = importlib.import_module("torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

    def rate(done: int) -> float:
        return min((done + 1) / _WARMUP_STEPS, 1.0) * (1 - done / STEPS)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    begin = time.monotonic()
    for step in range(1, STEPS + 1):
        batch: list[tuple[list[int], list[int]]] = []
        for _ in range(_DIALOGUES_PER_STEP):
            ids: list[int] = []
            labels: list[int] = []
            for text, written in _parts(dialogue(rng, tools), tools):
                part = tokenizer.encode(text, add_special_tokens=False)
                ids += part
                labels += part if written else [-100] * len(part)
            batch.append((ids, labels))
        width = max(len(ids) for ids, _ in batch)
        input_ids = torch.full((len(batch), width), tokenizer.pad_token_id)
        targets = torch.full((len(batch), width), -100)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for row, (ids, labels) in enumerate(batch):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            targets[row, : len(ids)] = torch.tensor(labels)
            mask[row, : len(ids)] = 1
        loss = model(input_ids=input_ids, attention_mask=mask, labels=targets).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            elapsed = time.monotonic() - begin
            print(f"step {step} of {STEPS}, loss {loss.item():.2f}, {elapsed:.0f} s", flush=True)


def main() -> None:
    """Create the model requested on the command line."""
    parser = argparse.ArgumentParser(prog="python -m verl_profiler.rehearsal.model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--function-tools", help="verl's multi_turn.function_tool_path")
    parser.add_argument("--tool-config", help="verl's multi_turn.tool_config_path")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and dialogues")
    args = parser.parse_args()

    from verl.tools.tool_registry import load_all_tools

    tools = load_all_tools(args.tool_config, args.function_tools)
    schemas = [tool.tool_schema.model_dump(exclude_none=True) for tool in tools]
    args.out.mkdir(parents=True, exist_ok=True)
    make(args.out, schemas, args.seed)


if __name__ == "__main__":
    main()
