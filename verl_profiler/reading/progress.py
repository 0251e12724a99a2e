"""What a reader that takes long is doing, for whoever watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

__all__ = ["Watcher", "doing", "watched"]


class Watcher:
    """Is called by readers of this process, from any of its threads; does nothing by itself."""

    def began(self, what: str) -> None:
        """Something has begun that may take long."""

    def ended(self) -> None:
        """It is over."""


_watcher: Watcher | None = None


@contextlib.contextmanager
def watched(watcher: Watcher) -> Generator[None, None, None]:
    """Have one watcher called, instead of the one before."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


@contextlib.contextmanager
def doing(what: str, number: int = 1, of: int = 1) -> Generator[None, None, None]:
    """Tell the watcher what is done inside.

    Args:
        what: A noun: `table turns`.
        number: Which of several like it, from 1.
        of: How many there are.
    """
    watcher = _watcher
    if watcher is None:
        yield
        return
    watcher.began(what if of == 1 else f"{what}, {number:,} of {of:,}")
    try:
        yield
    finally:
        watcher.ended()
