"""Send weights with verl's NIXL checkpoint engine with all probes on; report their events as JSON.

    python nixl_probes.py

The engine is verl's own; the libraries below it (nixl, cupy) are fakes, and so is the agent: it copies
between buffers of this process.  First a sender runs, then a rank that receives and relays.
"""

import asyncio
import sys
import types
from collections import deque
from types import SimpleNamespace

import probes_report
import torch

from verl_profiler.recording import context

BUCKET = 64
# Bytes of each weight: three buckets.
SIZES = (40, 24, 60, 8)


def fake(name, **attributes):
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


class Agent:
    """A fake of the wrapper of NIXL's agent: every read takes two polls."""

    def __init__(self, incoming=()):
        self.sent = []
        self.incoming = deque(incoming)
        self.unread = deque()
        self.polls = 0

    def send_message(self, _name, message):
        message = {**message, "remote_descs": message["remote_descs"].clone()}
        self.sent.append(message)
        self.unread.append(message["notify_key"])

    async def get_notification(self, _name):
        await asyncio.sleep(0.01)
        return self.unread.popleft()

    async def read_message(self, _name):
        return dict(self.incoming.popleft())

    def initialize_xfer(self, _kind, local, remote, _name, _key):
        local.copy_(remote)
        self.polls = 0

    def transfer(self, _handle):
        return "PROC"

    def check_xfer_state(self, _handle):
        self.polls += 1
        return "DONE" if self.polls > 1 else "PROC"

    def release_xfer_handle(self, _handle):
        pass


def engine(nixl, agent, **attributes):
    made = nixl.NIXLCheckpointEngine.__new__(nixl.NIXLCheckpointEngine)
    first, second = (torch.zeros(BUCKET, dtype=torch.uint8) for _ in range(2))
    made.__dict__.update(
        agent=agent, bucket_size=BUCKET, send_buf=first, recv_buf=second, send_descs=first,
        recv_descs=second, **attributes,
    )  # fmt: skip
    return made


async def run(nixl, report):
    weights = [
        (str(at), torch.full((size,), at, dtype=torch.uint8)) for at, size in enumerate(SIZES)
    ]
    sender = Agent()
    sending = engine(nixl, sender, rank=0, next_agent="relay")
    await sending.send_weights((each for each in weights), global_steps=2)
    report["buckets"] = len(sender.sent)
    relay = Agent(sender.sent)
    receiving = engine(nixl, relay, rank=1, prev_agent="sender", next_agent="last")
    got = [(name, value.clone()) async for name, value in receiving.receive_weights(global_steps=2)]
    report["same"] = [name for name, _ in got] == [name for name, _ in weights] and all(
        torch.equal(value, sent) for (_, value), (_, sent) in zip(got, weights, strict=True)
    )
    report["relayed"] = len(relay.sent)


def main():
    directory = probes_report.begin("actor")
    context.process.step = 2
    fake("cupy", ndarray=object)
    fake("nixl")
    fake("nixl._api", nixl_agent=object, nixl_agent_config=object)
    fake("nixl._bindings", nixlXferDList=object)
    sys.modules["nixl"].__dict__.update(
        _api=sys.modules["nixl._api"], _bindings=sys.modules["nixl._bindings"]
    )
    torch.cuda = SimpleNamespace(**{**vars(torch.cuda), "synchronize": lambda: None})
    from verl.checkpoint_engine import nixl_checkpoint_engine

    report = {}
    asyncio.run(run(nixl_checkpoint_engine, report))
    probes_report.end(directory, report)


if __name__ == "__main__":
    main()
