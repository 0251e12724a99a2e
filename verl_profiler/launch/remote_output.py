"""`profiler.output_dir` is a URL: write locally, and upload from a process of its own.

The driver imports no client of any storage, no failure of one reaches it, and the time that it waits
at the end is limited.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from verl_profiler.environ import SETTINGS
from verl_profiler.errors import ConfigError
from verl_profiler.events.redaction import public
from verl_profiler.recording.complaints import announce
from verl_profiler.storage.upload import CLAIMED

_CLAIM_S = 120.0
# The end waits for an upload as long as a file is uploaded within this time.
_SILENCE_S = 120.0
_MODULE = "verl_profiler.storage.upload"

_uploader: Uploader | None = None


class Uploader:
    """The process; its output, one line for the folder and then one for each file of the last upload.

    Attributes:
        url: Where the run is uploaded to.

    Raises:
        ConfigError: A package is missing, or nothing can be written there.
    """

    def __init__(self, url: str, run: Path, every_s: float) -> None:
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
        *before, claimed = self._read(_CLAIM_S).splitlines() or [""]
        if not claimed.startswith(CLAIMED):
            problem = "\n".join([*before, claimed]) or f"the upload process {self._ended()}"
            raise _not_claimed(url, problem)
        self.url = claimed.removeprefix(CLAIMED)

    def _read(self, patience_s: float) -> str:
        """Return what the process prints until it ends or has a folder, or why nothing came in time."""
        printed, last = b"", b""
        output = self._process.stdout
        while output is not None and not last.startswith(CLAIMED.encode()):
            if not _readable(output, patience_s):
                self._process.kill()
                return f"no answer within {patience_s:.0f} s"
            data = os.read(output.fileno(), 1 << 16)
            if not data:
                break
            printed += data
            last = printed.splitlines()[-1] if printed.endswith(b"\n") else b""
        return printed.decode(errors="backslashreplace")

    def end(self) -> None:
        """Have the last files uploaded, and wait while it makes progress."""
        # It then ends after a last upload.
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        output, failed = self._process.stdout, ""
        while output is not None:
            if not _readable(output, _SILENCE_S):
                failed = f"{self.url} did not answer for {_SILENCE_S:.0f} s"
                self._process.kill()
                break
            if not os.read(output.fileno(), 1 << 16):
                break
        status = self._process.wait()
        # With 1 it printed a line itself.
        if failed or status not in (0, 1):
            announce(
                f"WARNING not uploaded: {failed or f'the upload process {self._ended()}'}; the files stay "
                f"in {self.run}. Run: verl-profiler collect {self.run} --to {self.url} (not-uploaded)"
            )
        elif status == 0 and self.run.is_dir():
            announce(f"the run was uploaded to {self.url}")

    def _ended(self) -> str:
        """Return how the process ended, as `was killed (SIGKILL)`."""
        status = self._process.wait()
        if status >= 0:
            return f"ended with status {status}"
        with contextlib.suppress(ValueError):
            return f"was killed ({signal.Signals(-status).name})"
        return f"was killed (signal {-status})"


def _readable(output: IO[bytes], patience_s: float) -> bool:
    """Wait until there is output, or its end.  `select` refuses the descriptors of a driver with many files."""
    polled = select.poll()
    polled.register(output, select.POLLIN)
    return bool(polled.poll(patience_s * 1000))


def _not_claimed(url: str, problem: str) -> ConfigError:
    about = public(url)
    return ConfigError(
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
