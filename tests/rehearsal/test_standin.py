"""The stand-in engine: requests that run together get what each would get alone."""

import asyncio
import time
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("_import_path")]

EOS, PAD = 1, 0
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12], [3, 4, 5], [20, 21, 22, 23, 24])


@pytest.fixture(scope="module")
def model(_import_path):
    """A random model: what it says means nothing, but is the same each time."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return transformers.Qwen2ForCausalLM(config).eval()


def standin():
    return pytest.importorskip("verl_profiler.rehearsal.standin")


@pytest.fixture
def server(model):
    """A server without Ray, and without loading its model from files."""
    made = standin().StandinServer.__new__(standin().StandinServer)
    made._config = SimpleNamespace(prompt_length=16, response_length=24, max_num_seqs=256)
    made._replica_rank = 0
    made._model = model
    made._pad_token_id = PAD
    made._eos_token_ids = {EOS}
    made._global_steps = 5
    made._waiting, made._batch, made._loop = [], None, None
    made._model_lock = asyncio.Lock()
    made._resumed, made._rejects = asyncio.Event(), False
    made._resumed.set()
    return made


def _alone(model, prompt, tokens):
    """Decode greedily without cache, batch or padding."""
    import torch

    ids, log_probs = list(prompt), []
    with torch.no_grad():
        for _ in range(tokens):
            scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(scores.argmax()))
            log_probs.append(float(scores.max()))
            if ids[-1] == EOS:
                break
    return ids[len(prompt) :], log_probs


GREEDY = {"temperature": 0, "logprobs": True}


def test_a_batch_decodes_as_each_request_alone(model, server):
    """Padding, the shared cache and rows that leave early change nothing."""

    async def together():
        return await asyncio.gather(
            *(server.generate(prompt, GREEDY, str(key)) for key, prompt in enumerate(PROMPTS))
        )

    for prompt, output in zip(PROMPTS, asyncio.run(together()), strict=True):
        tokens, log_probs = _alone(model, prompt, 24)

        assert tokens == output.token_ids
        assert log_probs == pytest.approx(output.log_probs, abs=1e-4)
        assert "completed" == output.stop_reason
        assert {"global_steps": 5} == output.extra_fields


@pytest.mark.parametrize("rejects", [False, True])
def test_a_request_of_a_pause_waits_or_returns_at_once(server, rejects, monkeypatch):
    """As in vLLM: it is generated after the pause, which is no queue time, or is aborted without tokens."""
    queued, answered = [], server._answered

    def noted(request):
        queued.append(request.came)
        return answered(request)

    monkeypatch.setattr(server, "_answered", noted)

    async def pause():
        await server.abort_all_requests(reject_request=rejects)
        running = asyncio.create_task(server.generate(PROMPTS[0], GREEDY, "0"))
        done, _ = await asyncio.wait([running], timeout=None if rejects else 0.05)
        resumed = time.monotonic()
        await server.resume_generation()
        output = await running
        assert all(came >= resumed for came in queued)
        return bool(done), output

    ended, output = asyncio.run(pause())

    assert rejects == ended
    assert ("aborted" if rejects else "completed") == output.stop_reason
    assert bool(output.token_ids) != rejects


def test_a_failure_reaches_the_requests(server):
    """A request that waits for ever would stop the trainer without a word."""

    def fail(*_inputs, **_named):
        raise RuntimeError("no memory")

    server._model = fail

    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(server.generate(PROMPTS[0], GREEDY, "a"))
