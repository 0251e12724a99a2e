"""`profiler.output_dir` is a URL: write locally, and upload from a process of its own.

The driver imports no client of any storage, no failure of one reaches it, and the time that it waits
at the end is limited.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from verl_profiler.environ import SETTINGS
from verl_profiler.errors import ConfigError
from verl_profiler.events.redaction import mask_text
from verl_profiler.recording.complaints import say

__all__ = ["claim", "finish", "start"]

_CLAIM_S = 120.0
# The end waits for an upload as long as a file is uploaded within this time.
_SILENCE_S = 120.0
_POLL_S = 0.1
_MODULE = "verl_profiler.shipping.upload"

_uploader: _Uploader | None = None


def claim(url: str, run: Path) -> str:
    """Take a free folder for the run at a URL; its run.json is uploaded.

    Returns:
        The URL, with a number if another run is there.

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
    raise ConfigError(
        f"profiler.output_dir is {mask_text(url)}: {problem}\nCheck the URL, the credentials in the "
        "environment and the endpoint, or choose a directory with profiler.output_dir=DIR.",
        "output-url",
    )


class _Uploader:
    """The process, and when it last uploaded a file."""

    def __init__(self, run: Path, url: str, every_s: float, every_steps: int | None) -> None:
        self.run = run
        self.url = url
        self.pid = os.getpid()
        argv = [sys.executable, "-m", _MODULE, str(run), url, "--every", str(every_s)]
        if every_steps is not None:
            argv += ["--every-steps", str(every_steps)]
        self._process = subprocess.Popen(  # noqa: S603
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            # Ctrl-C reaches the driver only.
            start_new_session=True,
        )
        self._heard_s = time.monotonic()
        threading.Thread(target=self._listen, name="verl-profiler upload", daemon=True).start()

    def end(self) -> None:
        """Have the last files uploaded, and wait."""
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        self._heard_s = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - self._heard_s > _SILENCE_S:
                process.kill()
                process.wait()
                say(
                    f"WARNING not uploaded: {self.url} did not answer for {_SILENCE_S:.0f} s; the files "
                    f"stay in {self.run}. {self._again} (not-uploaded)"
                )
                return
            time.sleep(_POLL_S)
        if process.returncode == 0 and self.run.is_dir():
            say(f"the run was uploaded to {self.url}")
        elif process.returncode not in (0, 1):
            # With 1 it printed a line itself.
            say(
                f"WARNING not uploaded: the upload ended with status {process.returncode}; the files stay "
                f"in {self.run}. {self._again} (not-uploaded)"
            )

    @property
    def _again(self) -> str:
        return f"Run: verl-profiler collect {self.run} --to {self.url}"

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for _ in iter(self._process.stdout or ()):
                self._heard_s = time.monotonic()


def start(run: Path, url: str, every_s: float, every_steps: int | None = None) -> None:
    """Start to upload; called before recording starts, so that it ends after it.

    Args:
        run: The run directory.
        url: What `claim` returned.
        every_s: The longest interval between two uploads.
        every_steps: Upload earlier where so many steps have begun.
    """
    global _uploader
    if _uploader is None:
        atexit.register(finish)
    _uploader = _Uploader(run, url, every_s, every_steps)


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
