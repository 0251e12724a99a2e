"""What the worker of `tq_optional_driver` computes, in a module of its own as verl's workers are."""

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register


class Worker:
    """Methods as verl's workers have them."""

    def __init__(self):
        self.seen = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute_log_prob(self, data):
        """Halve the tokens."""
        self.seen.append([data.batch["input_ids"].sum().item(), sorted(map(str, data.meta_info))])
        return DataProto.from_dict({"log_probs": data.batch["input_ids"].float()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def broken(self, data):
        """Fail."""
        raise ValueError(f"{len(data)} rows")
