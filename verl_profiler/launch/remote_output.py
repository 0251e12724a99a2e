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
from verl_profiler.recording.complaints import say

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
    """The process, and when it last uploaded a file."""

    def __init__(self, run: Path, url: str, every_s: float) -> None:
        self.run = run
        self.url = url
        self.pid = os.getpid()
        self._argv = [sys.executable, "-m", _MODULE, str(run), url, "--every", str(every_s)]
        self._ending = threading.Event()
        # Held while a process is started, or told to end.
        self._starting = threading.Lock()
        self._process = self._started()
        self._heard_s = time.monotonic()
        threading.Thread(target=self._watch, name="verl-profiler upload", daemon=True).start()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            # Ctrl-C reaches the driver only.
            start_new_session=True,
        )

    def end(self) -> None:
        """Have the last files uploaded, and wait; where the process is killed meanwhile, once more."""
        status = self._last_status()
        if status not in (None, 0, 1):
            say(
                f"WARNING the upload process {_ended(status)} before it had uploaded everything; it is "
                "started again (upload-restarted)"
            )
            with self._starting:
                self._process = self._started()
            threading.Thread(target=self._listen, args=[self._process], daemon=True).start()
            status = self._last_status()
        if status is None:
            say(
                f"WARNING not uploaded: {self.url} did not answer for {_SILENCE_S:.0f} s; the files "
                f"stay in {self.run}. {self._again} (not-uploaded)"
            )
        elif status == 0 and self.run.is_dir():
            say(f"the run was uploaded to {self.url}")
        elif status not in (0, 1):
            # With 1 it printed a line itself.
            say(
                f"WARNING not uploaded: the upload process {_ended(status)}; the files stay in "
                f"{self.run}. {self._again} (not-uploaded)"
            )

    def _last_status(self) -> int | None:
        """Let the process end, and return its status; None where it made no progress."""
        self._ending.set()
        with self._starting:
            process = self._process
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        self._heard_s = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - self._heard_s > _SILENCE_S:
                process.kill()
                process.wait()
                return None
            time.sleep(_POLL_S)
        return process.returncode

    @property
    def _again(self) -> str:
        return f"Run: verl-profiler collect {self.run} --to {self.url}"

    def _watch(self) -> None:
        """Start a process that ended early again, a few times."""
        for number in range(_RESTARTS + 1):
            process = self._process
            self._listen(process)
            status = process.wait()
            if self._ending.is_set():
                return
            wait_s = _RESTART_S * 2**number
            again = (
                "and is not started again before the end of the run"
                if number == _RESTARTS
                else f"and is started again in {wait_s:.0f} s"
            )
            say(
                f"WARNING the upload process to {self.url} {_ended(status)}, {again}; the files stay in "
                f"{self.run} (upload-restarted)"
            )
            if number == _RESTARTS or self._ending.wait(wait_s):
                return
            with self._starting:
                if self._ending.is_set():
                    return
                self._process = self._started()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for _ in iter(process.stdout or ()):
                self._heard_s = time.monotonic()


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
        say(f"WARNING not uploaded: {error!r} (not-uploaded)")


def _environment() -> dict[str, str]:
    """Return the environment of a process that is not recorded itself."""
    return {name: value for name, value in os.environ.items() if name != SETTINGS}
