"""Make engines by verl's own registry, of classes that verl does not have; report their events as JSON.

    python engine_probes.py

`test_flops.py` reads the report.
"""

import sys

import probes_report


def engines():
    """Register two engines: one overrides all that is probed, as VeOmni's; one only calls its base."""
    from verl.workers.engine import EngineRegistry, FSDPEngine

    class Mine(FSDPEngine):
        def __init__(self):
            pass

        def forward_backward_batch(self, data, loss_function, forward_only=False):
            return data

        def optimizer_step(self):
            return 0.5

        def to(self, device, model=True, optimizer=True, grad=True):
            return device

    class Theirs(Mine):
        def to(self, device, model=True, optimizer=True, grad=True):
            return super().to(device, model=model, optimizer=optimizer, grad=grad)

    for model, made in (("language_model", Mine), ("value_model", Theirs)):
        EngineRegistry.register(model, backend="mine", device=["cpu", "cuda", "npu"])(made)
    return [EngineRegistry.new(model, "mine") for model in ("language_model", "value_model")]


def main():
    directory = probes_report.begin("actor")
    answers = []
    for engine in engines():
        answers += [
            engine.forward_backward_batch([1], None, forward_only=True),
            engine.optimizer_step(),
            engine.to("cpu"),
            engine.to("cuda", optimizer=False),
        ]
    probes_report.end(directory, {"answers": answers})


if __name__ == "__main__":
    sys.exit(main())
