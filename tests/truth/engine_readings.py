"""Events of engines' own readings."""

from truth.rows import event_row


def reading(name, at_us, *, step=None, **fields):
    """Return what an engine reports of itself at a moment."""
    return event_row(name, "engine_state", None, at_us, step=step, **fields)
