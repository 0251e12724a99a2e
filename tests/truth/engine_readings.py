"""Events of engines' own readings."""


def reading(name, at_us, *, step=None, **fields):
    """Return what an engine reports of itself at a moment."""
    return {
        "run": "made",
        "name": name,
        "role": "engine",
        "rank": int(name.rpartition("_")[2]),
        "host": "one",
        "step": step,
        "event": "engine_state",
        "family": "engine",
        "begin_us": None,
        "end_us": at_us,
        "duration_us": None,
        "validate": False,
        "extra": fields,
    }
