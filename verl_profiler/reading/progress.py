"""What a reader that takes long is doing, for whoever watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

# Is called by readers of this process, from any of its threads: with what begins, with None when it is over.
_show: Callable[[str | None], None] | None = None


@contextlib.contextmanager
def watched(show: Callable[[str | None], None] | None) -> Generator[None, None, None]:
    """Have one function called, instead of the one before; none when None."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before


@contextlib.contextmanager
def doing(what: str, number: int = 1, of: int = 1) -> Generator[None, None, None]:
    """Show what is done inside.

    Args:
        what: A noun: `table turns`.
        number: Which of several like it, from 1.
        of: How many there are.
    """
    show = _show
    if show is None:
        yield
        return
    show(what if of == 1 else f"{what}, {number:,} of {of:,}")
    try:
        yield
    finally:
        show(None)
