"""Notify of a phase that is stuck, or over: by a command, by a webhook.

From a thread of its own, which nothing waits for; a failure is printed once and changes nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import urllib.request
from typing import Any

from verl_profiler.recording.complaints import Complaints
from verl_profiler.recording.worker_config import StuckSettings

__all__ = ["VARIABLE", "notify"]

# What the command gets: the text of the console's line.
VARIABLE = "VERL_PROFILER_STUCK"
_TIMEOUT_S = 30.0

_complaints = Complaints()


def notify(settings: StuckSettings, text: str, fields: dict[str, Any]) -> None:
    """Run the command and call the webhook, if they are set; returns at once.

    Args:
        settings: `profiler.stuck`.
        text: One line, which the command gets in `VERL_PROFILER_STUCK`.
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


def _notify(settings: StuckSettings, text: str, fields: dict[str, Any]) -> None:
    try:
        if settings.notify is not None:
            _run(settings.notify, text)
    except Exception as error:  # noqa: BLE001  whatever a command can do
        # Its arguments may hold a credential, and messages of exceptions quote them.
        _complain("profiler.stuck.notify", type(error).__name__)
    try:
        if settings.webhook is not None:
            _post(settings.webhook, {"text": text, **fields})
    except Exception as error:  # noqa: BLE001  whatever a network can do
        _complain("profiler.stuck.webhook", type(error).__name__)


def _run(command: str, text: str) -> None:
    done = subprocess.run(  # noqa: S603  the user's own command
        shlex.split(command),
        env={**os.environ, VARIABLE: text},
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        _complain("profiler.stuck.notify", f"exit status {done.returncode}")


def _post(url: str, content: dict[str, Any]) -> None:
    request = urllib.request.Request(  # noqa: S310  the user's own URL, checked to be http(s)
        url, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
        pass


def _complain(setting: str, problem: str) -> None:
    _complaints.make(setting, f"{setting} failed: {problem}; training goes on (stuck-notice)")
