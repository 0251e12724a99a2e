"""The facts of an exception that ends a phase of the trainer: its type, the process it comes from, the cause.

Messages of exceptions may hold prompts, so nothing is taken from them but what Ray, torch and the
operating system write themselves, in forms that are known.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from verl_profiler.recording.values import text

__all__ = ["failure_of"]

_NAME_LIMIT = 200
# Tracebacks of several processes, one in the other.
_MESSAGE_LIMIT = 200_000
# ray/exceptions.py, ray 2.40 to 2.55: `ray::Class.method() (pid=1, ip=10.0.0.1, actor_id=...)`.
_TASK = r"\(pid=([0-9]{1,10}), ip=([0-9A-Za-z.:-]{1,100})"
# The same file, of an actor that died.
_ACTOR = r"\tpid: ([0-9]{1,10})\n(?:\t[^\n]{0,300}\n){0,5}?\tip: ([0-9A-Za-z.:-]{1,100})"


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return the facts of a failure that its exception has.

    Returns:
        `error`, the name of its type, of the original one where Ray wrapped it; if Ray names it, `pid`
        and `ip` of the process that raised it or died; `reason`, if the message has a known one.
    """
    cause = getattr(error, "cause", None)
    # Of a type that Ray makes of its own and the original one, that is: "RayTaskError(ValueError)".
    wrapped = type(error).__name__.startswith("RayTaskError") and isinstance(cause, BaseException)
    found: dict[str, Any] = {"error": text(type(cause if wrapped else error).__name__, _NAME_LIMIT)}
    # Its patterns are of no use before something fails.
    from verl_profiler.events.failure_texts import reason_in

    message = ""
    # The host's exceptions may fail to be written.
    with contextlib.suppress(Exception):
        message = str(error)[:_MESSAGE_LIMIT]
    places = re.findall(_ACTOR, message) or re.findall(_TASK, message)
    if places:
        # The innermost: the tasks that waited for it are named before it.
        found["pid"], found["ip"] = int(places[-1][0]), places[-1][1]
    reason = reason_in(message)
    return found if reason is None else {**found, "reason": reason}
