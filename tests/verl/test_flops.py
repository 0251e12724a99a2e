"""Tokens and FLOPs of batches, from verl's real counter and real nested tensors."""

from types import SimpleNamespace

import pytest

from verl_profiler.instrumentation import wrapping
from verl_profiler.probes.workers import PROBES

LENGTHS = [100, 28, 72]
OUTPUT, ESTIMATE, INFER, FORWARD = (
    next(probe for probe in PROBES if probe.name == name)
    for name in ("_postprocess_output", "batch_flops", "infer_batch", "forward_backward")
)


@pytest.fixture
def estimate(recording, monkeypatch):
    """Return a function that calls verl's counter through the probe, and gives result and event."""

    flops_counter = pytest.importorskip("verl.utils.flops_counter")
    transformers = pytest.importorskip("transformers")

    def call(device, **config):
        model = transformers.Qwen2Config(
            vocab_size=400,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        for name, value in config.items():
            setattr(model, name, value)
        own = flops_counter.get_device_flops
        monkeypatch.setattr(
            flops_counter, "get_device_flops", lambda unit="T": own(unit, device_name=device)
        )
        counter = flops_counter.FlopsCounter(model)
        taken = []
        monkeypatch.setattr(recording, "queue", taken)
        wrapped = wrapping.wrap(ESTIMATE, flops_counter.FlopsCounter.estimate_flops)
        result = wrapped(counter, LENGTHS, 0.5)
        ((name, begin, _, extra, *_),) = [item for item in taken if item[0] == "batch_flops"]
        assert (name, begin) == ("batch_flops", None)
        return result, extra

    return call


def test_what_verl_does_not_know_is_left_out(estimate):
    """It promises infinity for other devices, and estimates 0 for other models."""
    _, extra = estimate("Another GPU", model_type="another")

    assert not {"tflops", "promised_tflops"} & extra.keys()
    assert 200 == extra["tokens"]


@pytest.fixture
def batch(recording, monkeypatch):
    """Return a function that has a worker's engine infer these sequences, and gives the call's fields."""

    def call(lengths, *, nested=True, counts=True):
        torch = pytest.importorskip("torch")
        tensordict = pytest.importorskip("tensordict")
        rows = [torch.zeros(length, dtype=torch.long) for length in lengths]
        if nested:
            ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        else:
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        class Engine:
            def is_mp_src_rank_with_outputs(self):
                return counts

            def forward_backward_batch(self, data, loss_function=None, forward_only=False):
                pass

        class Worker:
            def infer_batch(self, data):
                data = tensordict.TensorDict({"input_ids": ids}, batch_size=[len(lengths)])
                wrapping.wrap(FORWARD, Engine.forward_backward_batch)(Engine(), data, None, True)

        taken = []
        monkeypatch.setattr(recording, "queue", taken)
        # A critic's worker gets metadata, which its method exchanges for the data.
        wrapping.wrap(INFER, Worker.infer_batch)(Worker(), SimpleNamespace(tags=[]))
        assert ["forward_backward", "infer_batch"] == [item[0] for item in taken]
        return taken[1][3] or {}

    return call


def test_tokens_are_those_of_nested_sequences(batch):
    """As verl 0.9.1's trainers pass them; of one of the ranks that share a batch."""
    assert {"tokens": 200, "sequences": 3} == batch(LENGTHS)
    assert {} == batch(LENGTHS, counts=False)


def test_padded_sequences_are_not_counted(batch):
    """Their mask may be on the device: reading it would wait."""
    assert {} == batch(LENGTHS, nested=False)


def test_the_work_of_any_engine_is_recorded_once(reported):
    """Of one that verl does not have: its class overrides what the base classes do, or calls it."""
    report = reported("engine_probes.py")
    fields = ("forward_only", "model", "optimizer")
    recorded = [
        (each["event"], *(each.get("extra", {}).get(field) for field in fields))
        for each in report["events"]
        if each["event"] in ("forward_backward", "optimizer_step", "load", "offload")
    ]

    assert {} == report["errors"]
    assert [[1], 0.5, "cpu", "cuda"] * 2 == report["answers"]
    assert (
        2
        * [
            ("forward_backward", True, None, None),
            ("optimizer_step", None, None, None),
            ("offload", None, True, True),
            ("load", None, True, False),
        ]
        == recorded
    )
