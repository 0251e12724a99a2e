"""Events of engines' own readings."""

from truth.rows import event_row


def reading(name, at_us, *, step=None, **fields):
    """Return what an engine reports of itself at a moment."""
    return event_row(name, "engine_state", None, at_us, step=step, **fields)


def iterations(name, begin_us, end_us, **sums):
    """Return what an engine reports of its passes from one moment to another."""
    return event_row(name, "engine_iterations", begin_us, end_us, step=None, **sums)
