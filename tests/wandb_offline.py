"""Read what wandb keeps of an offline run."""

import struct

import pytest


def wandb_records(folder):
    """Yield the records of the one offline run below a folder: a header, then LevelDB's log format."""
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""
