"""Known reasons of failures in the texts of Ray, torch, the engines and the operating system.

Messages of exceptions may hold prompts, so nothing is taken from them but what these write themselves, in
forms that are known.
"""

from __future__ import annotations

import re

__all__ = ["reason_in"]

_LIMIT = 300
_REASONS = (
    # ray/src/ray/core_worker, raylet/worker_pool.cc.
    re.compile(r"Worker exit type: [A-Z_]+ Worker exit detail: [^\n]{1,200}?(?=\. |\n|$)"),
    # ray/src/ray/raylet: the memory monitor.
    re.compile(r"Memory on the node [^\n]{1,300}?memory usage threshold of [0-9.]*[0-9]"),
    re.compile(r"CUDA out of memory\. Tried to allocate [0-9.]+ [KMGT]iB"),
    re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\([^)\n]{1,200}\)"),
    re.compile(r"No space left on device"),
    re.compile(r"Disk quota exceeded"),
    re.compile(r"CUDA error: [a-z ]{1,80}"),
)


def reason_in(message: str) -> str | None:
    """Return the known reason that a message has; None if it has none."""
    for pattern in _REASONS:
        match = pattern.search(message)
        if match is not None:
            # Lone surrogates cannot be encoded.
            return match[0][:_LIMIT].encode("utf-8", "backslashreplace").decode()
    return None
