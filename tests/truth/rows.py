"""Rows of events, as the reader would give them."""

from verl_profiler.events.vocabulary import EVENTS

__all__ = ["event_row", "role_of"]

_COLUMNS = ("request_id", "turn", "status", "error", "session", "sample", "validate")
_ROLES = {"worker": "agent_loop"}


def role_of(name):
    """Return the role of a process."""
    role = name.rpartition("_")[0]
    return _ROLES.get(role, role)


def event_row(name, event, begin_us, end_us, *, step=1, run="made", family=None, **extra):
    """Return an event of a process; an instant has no begin."""
    columns = {key: extra.pop(key) for key in _COLUMNS if key in extra}
    if family is None:
        family = EVENTS[event].family if event in EVENTS else "trainer"
        if name == "trainer_0" and family in ("workers", "weights"):
            family = "trainer"
    return {
        "run": run,
        "name": name,
        "role": role_of(name),
        "rank": int(name.rpartition("_")[2]),
        "host": "one",
        "step": step,
        "event": event,
        "family": family,
        "begin_us": begin_us,
        "end_us": end_us,
        "duration_us": None if begin_us is None else end_us - begin_us,
        "validate": False,
        **columns,
        "extra": extra or None,
    }
