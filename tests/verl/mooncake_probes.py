"""Send weights with verl's Mooncake checkpoint engine with all probes on; report their events as JSON.

    python mooncake_probes.py

A process per rank: 0 sends, 1 relays, 2 receives.  The engine and its process group are verl's own.  The library below is Mooncake's own over TCP if it is
installed (mooncake-transfer-engine-non-cuda), or else a fake that copies between the processes' memory.
"""

import asyncio
import ctypes
import importlib.util
import json
import os
import socket
from types import SimpleNamespace

import probes_report
import torch
from weight_receiver import Worker, fake, receive, weights

from verl_profiler.recording import context

RANKS = 3
BUCKET = 64
LIBC = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Library:
    """A fake of Mooncake's `TransferEngine`: one-sided copies, by the kernel."""

    def __init__(self):
        # Other processes of the user may read and write here, where the kernel restricts that.
        LIBC.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)

    def initialize(self, *_):
        return 0

    def get_rpc_port(self):
        return os.getpid()

    def batch_register_memory(self, *_):
        return 0

    def transfer_sync_read(self, session, own, other, length):
        return self.copy(LIBC.process_vm_readv, session, own, other, length)

    def transfer_sync_write(self, session, own, other, length):
        return self.copy(LIBC.process_vm_writev, session, own, other, length)

    def copy(self, function, session, own, other, length):
        ends = (ctypes.byref(Vector(address, length)) for address in (own, other))
        local, remote = ends
        pid = int(session.rpartition(":")[2])
        return 0 if function(pid, local, 1, remote, 1, 0) == length else ctypes.get_errno()


def library():
    """Return the module `mooncake.engine`: of the installed package, or the fake."""
    try:
        if importlib.util.find_spec("mooncake.engine") is not None:
            importlib.import_module("mooncake.engine")
            return "real"
    except ImportError:
        pass
    fake("mooncake")
    fake("mooncake.engine", TransferEngine=Library)
    return "fake"


def made(rank, port):
    from verl.checkpoint_engine import mooncake_checkpoint_engine as of_verl

    class OverTcp(of_verl.TransferEngine):
        def initialize(self, host, metadata, _protocol, name):
            return super().initialize(host, metadata, "tcp", name)

    of_verl.TransferEngine = OverTcp
    ignore = lambda *_: None
    device = SimpleNamespace(device_count=lambda: 1, set_device=ignore, synchronize=ignore)
    of_verl.get_torch_device = lambda: device
    of_verl.ray.util.get_node_ip_address = lambda: "127.0.0.1"
    os.environ["RANK"] = str(rank)
    engine = of_verl.MooncakeCheckpointEngine(BUCKET, device="cpu", rollout_dtype=torch.uint8)
    engine.init_process_group(rank, RANKS, {"addr": "127.0.0.1", "port": port})
    return engine


def run(rank, port):
    directory = probes_report.begin("actor")
    context.process.step = 2
    report = {"library": library()}
    engine = made(rank, port)
    if rank:
        report["got"] = receive(Worker(engine))
    else:
        asyncio.run(engine.send_weights(iter(weights()), global_steps=2))
    # Reads outside of a sync, as of KV caches, are not the checkpoint engine's.
    here = engine.session_id if rank else None
    if here:
        buffer = engine.magic_buf.data_ptr()
        engine.engine.transfer_sync_read(here, buffer, buffer, 4)
    probes_report.end(directory, report)


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [probes_report.forked(run, rank, port) for rank in range(RANKS)]
    print("REPORT " + json.dumps([probes_report.report_of(each) for each in ranks]))


if __name__ == "__main__":
    main()
