"""Notify of a phase that is stuck, or over: by a program, by a webhook.

From a thread of its own, which nothing waits for; a failure is printed once and changes nothing.
Settings reach Ray's logs, verl's console log and its trackers in clear, so they only name the webhook's
URL; it is resolved here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

from verl_profiler.recording.complaints import Complaints
from verl_profiler.recording.worker_config import StuckSettings

__all__ = ["VARIABLE", "check", "notify"]

# What the program gets: the text of the console's line.
VARIABLE = "VERL_PROFILER_STUCK"
_TIMEOUT_S = 30.0

_complaints = Complaints()


def notify(settings: StuckSettings, text: str, fields: dict[str, Any]) -> None:
    """Run the program and call the webhook, if they are set; returns at once.

    Args:
        settings: `profiler.stuck`.
        text: One line, which the program gets in `VERL_PROFILER_STUCK`.
        fields: What the webhook gets besides `text`, as one JSON object.
    """
    if settings.notify is None and settings.webhook is None:
        return
    threading.Thread(
        target=_notify,
        args=(settings, text, fields),
        name="verl-profiler notice",
        daemon=True,
    ).start()


def check(settings: StuckSettings) -> None:
    """Print once what `notify` would fail with in this process, before anything is stuck."""
    try:
        if settings.notify is not None:
            _program(settings.notify)
    except OSError as error:
        _complain("profiler.stuck.notify", error)
    try:
        if settings.webhook is not None:
            _url(settings.webhook)
    except (OSError, ValueError) as error:
        _complain("profiler.stuck.webhook", error)


def _notify(settings: StuckSettings, text: str, fields: dict[str, Any]) -> None:
    try:
        if settings.notify is not None:
            _run(settings.notify, text)
    except Exception as error:  # noqa: BLE001  whatever a program can do
        _complain("profiler.stuck.notify", error)
    try:
        if settings.webhook is not None:
            _post(_url(settings.webhook), {"text": text, **fields})
    except Exception as error:  # noqa: BLE001  whatever a network can do
        _complain("profiler.stuck.webhook", error)


def _program(name: str) -> str:
    found = shutil.which(os.path.expanduser(name))
    if found is None:
        raise _UnusableError(f"{name} is not an executable file on this node")
    return found


def _run(name: str, text: str) -> None:
    done = subprocess.run(  # noqa: S603  the user's own program
        [_program(name)],
        env={**os.environ, VARIABLE: text},
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise _UnusableError(f"exit status {done.returncode}")


def _url(reference: str) -> str:
    """Return the URL that `env:NAME` or `file:PATH` names."""
    kind, _, name = reference.partition(":")
    if kind == "file":
        url = Path(name).expanduser().read_text(encoding="utf-8").strip()
    else:
        url = os.environ.get(name, "").strip()
        if not url:
            raise _UnusableError(
                f"the variable {name} is not set in this process. Ray passes the driver's environment on "
                "only where it starts the cluster; elsewhere use file:PATH"
            )
    if re.fullmatch(r"https?://\S+", url) is None:
        raise _UnusableError(f"{reference} does not hold one http or https URL")
    return url


def _post(url: str, content: dict[str, Any]) -> None:
    request = urllib.request.Request(  # noqa: S310  the user's own URL, checked to be http(s)
        url, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
        pass


class _UnusableError(OSError):
    """Its text is ours; messages of other exceptions quote URLs."""


def _complain(setting: str, error: Exception) -> None:
    problem = str(error) if isinstance(error, _UnusableError) else type(error).__name__
    _complaints.make(setting, f"{setting} failed: {problem}; training goes on (stuck-notice)")
