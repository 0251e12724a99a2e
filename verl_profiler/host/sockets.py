"""TCP connections of this process or another one of this host, from /proc: states and bytes that wait."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import Counter
from typing import Any

__all__ = ["connections"]

# linux/include/net/tcp_states.h.
_STATES = {
    1: "ESTABLISHED",
    2: "SYN_SENT",
    3: "SYN_RECV",
    4: "FIN_WAIT1",
    5: "FIN_WAIT2",
    6: "TIME_WAIT",
    7: "CLOSE",
    8: "CLOSE_WAIT",
    9: "LAST_ACK",
    10: "LISTEN",
    11: "CLOSING",
}
_MOST_BYTES = 16 << 20
_MOST_FILES = 20_000
_SHOWN = 20
_LISTEN = 10


def connections(pid: int | str = "self") -> dict[str, Any]:
    """Return the TCP connections of a process.

    Args:
        pid: Of this host, readable by this user.

    Returns:
        `states`: how many connections are in each; `listening`: ports; `ports`: local ports of the
        connections, at most 2000; `waiting`: those with bytes that wait, the fullest 20: `local` and
        `peer` as address and port, `state`, `unsent` (not acknowledged by the peer) and `unread` (not
        read by this process), bytes.

    Raises:
        OSError: /proc cannot be read.
    """
    inodes = _sockets_of(pid)
    states: Counter[str] = Counter()
    listening: set[int] = set()
    ports: set[int] = set()
    waiting: list[dict[str, Any]] = []
    for family in ("tcp", "tcp6"):
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/{pid}/net/{family}", "rb") as file,
        ):
            for line in file.read(_MOST_BYTES).splitlines()[1:]:
                fields = line.split()
                if len(fields) < 10 or fields[9] not in inodes:
                    continue
                local, peer = _address(fields[1]), _address(fields[2])
                number = int(fields[3], 16)
                state = _STATES.get(number, str(number))
                states[state] += 1
                if number == _LISTEN:
                    # There, the queues are of connections.
                    listening.add(local[1])
                    continue
                ports.add(local[1])
                unsent, unread = (int(part, 16) for part in fields[4].split(b":"))
                if unsent or unread:
                    waiting.append(
                        {
                            "local": _text(local),
                            "peer": _text(peer),
                            "state": state,
                            "unsent": unsent,
                            "unread": unread,
                        }
                    )
    waiting.sort(key=lambda row: -(row["unsent"] + row["unread"]))
    return {
        "states": dict(states.most_common()),
        "listening": sorted(listening)[:_SHOWN],
        "ports": sorted(ports)[:2000],
        "waiting": waiting[:_SHOWN],
    }


def _sockets_of(pid: int | str) -> set[bytes]:
    """Return the inodes of a process's sockets, as /proc/net/tcp writes them."""
    found: set[bytes] = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder)[:_MOST_FILES]:
        # Files are closed meanwhile.
        with contextlib.suppress(OSError):
            target = os.readlink(os.path.join(folder, name))
            if target.startswith("socket:["):
                found.add(target[8:-1].encode())
    return found


def _address(text: bytes) -> tuple[str, int]:
    """Read `0100007F:1F90`: words of 32 bits in the order of the host, then the port."""
    host, _, port = text.partition(b":")
    words = bytes.fromhex(host.decode())
    count = len(words) // 4
    raw = struct.pack(f"{count}I", *struct.unpack(f">{count}I", words))
    if count == 1:
        return socket.inet_ntop(socket.AF_INET, raw), int(port, 16)
    if raw.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, raw[12:]), int(port, 16)
    return socket.inet_ntop(socket.AF_INET6, raw), int(port, 16)


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
