"""`profiler.output_dir` is a URL: write locally, and upload from a process of its own.

The driver imports no client of any storage, no failure of one reaches it, and the time that it waits
at the end is limited.
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
from verl_profiler.storage.upload import CLAIMED

__all__ = ["Uploader", "claim", "finish", "start"]

_CLAIM_S = 120.0
# The end waits for an upload as long as a file is uploaded within this time.
_SILENCE_S = 120.0
_POLL_S = 0.1
_MODULE = "verl_profiler.storage.upload"

_uploader: Uploader | None = None


class Uploader:
    """The process, and the thread that listens to it.

    Attributes:
        url: Where the run is uploaded to; empty before a folder was claimed.
    """

    def __init__(self, url: str, run: Path, every_s: float) -> None:
        self.url = ""
        self.run = run
        self.pid = os.getpid()
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", _MODULE, str(run), url, "--every", str(every_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not recorded itself.
            env={name: value for name, value in os.environ.items() if name != SETTINGS},
            # Ctrl-C reaches the driver only.
            start_new_session=True,
        )
        self._claimed = threading.Event()
        self._ending = False
        self._failed = ""
        self._heard_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._listen, name="verl-profiler upload", daemon=True
        )
        self._thread.start()

    def claimed(self) -> str:
        """Wait for the folder; return why there is none, or an empty string."""
        if not self._claimed.wait(_CLAIM_S):
            self._process.kill()
            return f"no answer within {_CLAIM_S:.0f} s"
        return "" if self.url else self._failed

    def _listen(self) -> None:
        printed: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            for line in iter(self._process.stdout or ()):
                self._heard_s = time.monotonic()
                text = line.decode(errors="backslashreplace").rstrip()
                if text.startswith(CLAIMED):
                    self.url = text.removeprefix(CLAIMED)
                    self._claimed.set()
                elif not self.url:
                    printed.append(text)
        status = self._process.wait()
        # With 1 it printed a line itself.
        if status not in (0, 1) or not self._ending:
            self._failed = "\n".join(printed) or f"the upload process {_ended(status)}"
            if self.url and not self._ending:
                self._announce()
        self._claimed.set()

    def _announce(self) -> None:
        announce(
            f"WARNING not uploaded: {self._failed}; the files stay in {self.run}. Run: "
            f"verl-profiler collect {self.run} --to {self.url} (not-uploaded)"
        )

    def end(self) -> None:
        """Have the last files uploaded, and wait while it makes progress."""
        self._ending, had_ended = True, not self._thread.is_alive()
        # It then ends after a last upload.
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._heard_s = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            if time.monotonic() - self._heard_s > _SILENCE_S:
                self._failed = f"{self.url} did not answer for {_SILENCE_S:.0f} s"
                self._process.kill()
                break
        if self._failed and not had_ended:
            self._announce()
        elif self._process.returncode == 0 and self.run.is_dir():
            announce(f"the run was uploaded to {self.url}")


def _ended(status: int) -> str:
    """Return how a process ended, as `was killed (SIGKILL)`."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed ({signal.Signals(-status).name})"
    return f"was killed (signal {-status})"


def claim(url: str, run: Path, every_s: float) -> Uploader:
    """Take a free folder for the run at a URL, and start to upload.

    Args:
        url: Where to; its last part gets a random end if another run is there.
        run: The run directory.
        every_s: The interval between two uploads.

    Raises:
        ConfigError: A package is missing, or nothing can be written there.
    """
    uploader = Uploader(url, run, every_s)
    problem = uploader.claimed()
    if not problem:
        return uploader
    about = public(url)
    raise ConfigError(
        f"profiler.output_dir{'' if about in problem else f' is {about}'}: {problem}\nCheck the URL, the "
        "credentials in the environment and the endpoint, or choose a directory with "
        "profiler.output_dir=DIR.",
        "output-url",
    )


def start(uploader: Uploader) -> None:
    """Have the upload end with this process; called before recording starts, so that it ends after it."""
    global _uploader
    if _uploader is None:
        atexit.register(finish)
    _uploader = uploader


def finish() -> None:
    """Upload what is left; does nothing the second time.  Never raises."""
    global _uploader
    uploader, _uploader = _uploader, None
    try:
        if uploader is not None and uploader.pid == os.getpid():
            uploader.end()
    except Exception as error:  # noqa: BLE001  training has succeeded; the files are still there
        announce(f"WARNING not uploaded: {error!r} (not-uploaded)")
