"""`profiler.output_dir` is a URL: write locally, and upload from a process of its own.

The driver imports no client of any storage, no failure of one reaches it, and the time that it waits
at the end is limited.  A process that was killed is started again, and continues from what is there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from verl_profiler.environ import SETTINGS
from verl_profiler.errors import ConfigError
from verl_profiler.events.redaction import public
from verl_profiler.recording.complaints import announce

__all__ = ["claim", "finish", "start"]

_CLAIM_S = 120.0
# The end waits for an upload as long as a file is uploaded within this time.
_SILENCE_S = 120.0
_POLL_S = 0.1
# The first restart comes after this time; each one after twice the time of the one before.
_RESTART_S = 5.0
_RESTARTS = 6
_MODULE = "verl_profiler.storage.upload"

_uploader: _Uploader | None = None


def claim(url: str, run: Path) -> str:
    """Take a free folder for the run at a URL; its run.json is uploaded.

    Returns:
        The URL, with a random end if another run is there.

    Raises:
        ConfigError: A package is missing, or nothing can be written there.
    """
    argv = [sys.executable, "-m", _MODULE, "--claim", str(run), url]
    try:
        done = subprocess.run(  # noqa: S603
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=_CLAIM_S,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_CLAIM_S:.0f} s"
    else:
        claimed = done.stdout.strip().splitlines()
        if done.returncode == 0 and claimed:
            return claimed[-1]
        lines = done.stderr.strip().splitlines()
        # What `RemoteError` states, or the end of a traceback.
        problem = "\n".join(lines if done.returncode == 2 else lines[-1:]) or "no reason was given"
    about = public(url)
    raise ConfigError(
        f"profiler.output_dir{'' if about in problem else f' is {about}'}: {problem}\nCheck the URL, the "
        "credentials in the environment and the endpoint, or choose a directory with "
        "profiler.output_dir=DIR.",
        "output-url",
    )


class _Uploader:
    """The process, and the thread that listens to it and starts it again where it was killed."""

    def __init__(self, run: Path, url: str, every_s: float) -> None:
        self.run = run
        self.url = url
        self.pid = os.getpid()
        self._argv = [sys.executable, "-m", _MODULE, str(run), url, "--every", str(every_s)]
        self._ending = threading.Event()
        # Held while a process is started, or its input closed: it then ends after a last upload.
        self._starting = threading.Lock()
        self._process = self._started()
        self._status = 0
        self._problem = ""
        self._heard_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._watch, name="verl-profiler upload", daemon=True
        )
        self._thread.start()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            # Ctrl-C reaches the driver only.
            start_new_session=True,
        )

    def _watch(self) -> None:
        """Listen until the upload has ended; a few times in a run, and once at its end, start it again."""
        wait_s = _RESTART_S
        for left in range(_RESTARTS, -1, -1):
            self._listen()
            if self._problem or (self._ending.is_set() and self._status in (0, 1)):
                return
            again = f"in {wait_s:.0f} s" if left else "at the end of the run"
            announce(
                f"WARNING the upload process to {self.url} {_ended(self._status)}, and is started again "
                f"{'now' if self._ending.is_set() else again}; the files stay in {self.run} "
                "(upload-restarted)"
            )
            self._ending.wait(wait_s if left else None)
            wait_s *= 2
            with self._starting:
                self._process = self._started()
                if self._ending.is_set():
                    self._close_input()
                    break
        self._listen()

    def _listen(self) -> None:
        process = self._process
        with contextlib.suppress(OSError, ValueError):
            for _ in iter(process.stdout or ()):
                self._heard_s = time.monotonic()
        self._status = process.wait()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def end(self) -> None:
        """Have the last files uploaded, and wait while it makes progress."""
        with self._starting:
            self._ending.set()
            self._close_input()
        self._heard_s = time.monotonic()
        while self._thread.is_alive() and not self._problem:
            self._thread.join(_POLL_S)
            if time.monotonic() - self._heard_s > _SILENCE_S:
                self._problem = f"{self.url} did not answer for {_SILENCE_S:.0f} s"
                self._process.kill()
        if not self._problem and self._status not in (0, 1):
            self._problem = f"the upload process {_ended(self._status)}"
        if self._problem:
            announce(
                f"WARNING not uploaded: {self._problem}; the files stay in {self.run}. Run: "
                f"verl-profiler collect {self.run} --to {self.url} (not-uploaded)"
            )
        elif self._status == 0 and self.run.is_dir():
            # With 1 it printed a line itself.
            announce(f"the run was uploaded to {self.url}")


def _ended(status: int) -> str:
    """Return how a process ended, as `was killed (SIGKILL)`."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed ({signal.Signals(-status).name})"
    return f"was killed (signal {-status})"


def start(run: Path, url: str, every_s: float) -> None:
    """Start to upload; called before recording starts, so that it ends after it.

    Args:
        run: The run directory.
        url: What `claim` returned.
        every_s: The interval between two uploads.
    """
    global _uploader
    if _uploader is None:
        atexit.register(finish)
    _uploader = _Uploader(run, url, every_s)


def finish() -> None:
    """Upload what is left; does nothing the second time.  Never raises."""
    global _uploader
    uploader, _uploader = _uploader, None
    try:
        if uploader is not None and uploader.pid == os.getpid():
            uploader.end()
    except Exception as error:  # noqa: BLE001  training has succeeded; the files are still there
        announce(f"WARNING not uploaded: {error!r} (not-uploaded)")


def _environment() -> dict[str, str]:
    """Return the environment of a process that is not recorded itself."""
    return {name: value for name, value in os.environ.items() if name != SETTINGS}
