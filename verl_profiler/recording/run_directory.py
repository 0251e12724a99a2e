"""Make the directory of one launch, and write what was launched into it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.errors import ConfigError
from verl_profiler.events.redaction import recorded_command, recorded_values
from verl_profiler.events.vocabulary import FORMAT_VERSION, RUN_FILE
from verl_profiler.recording.clock import Anchor
from verl_profiler.recording.complaints import announce


def make(output_dir: str, clock: Anchor, settings: Any, training: Mapping[str, Any]) -> Path:
    """Make the run directory; a second launch with one name gets `<name>-2`, and so on.

    Args:
        output_dir: `profiler.output_dir`; a relative path is taken from the current directory, or the home.
        clock: The driver's anchor.
        settings: The checked settings, for run.json.
        training: The settings of the training, for run.json.

    Returns:
        The directory, absolute.

    Raises:
        ConfigError: If it cannot be made or written.
    """
    wanted = _absolute(output_dir)
    content = msgspec.json.format(
        msgspec.json.encode(_launch(wanted.name, clock, settings, training)), indent=2
    )
    for number in range(1, 100_000):
        directory = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # An older logger's files there must not be mixed with ours.
            if (
                number == 1
                and any(directory.glob("step_*"))
                and not (directory / RUN_FILE).exists()
            ):
                continue
            descriptor = os.open(directory / RUN_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            if directory.is_dir():
                continue
            raise ConfigError(
                f"profiler.output_dir is {output_dir!r}, but {directory} is a file.\n"
                "Choose another with profiler.output_dir=DIR.",
                "output-dir",
            ) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            advice = (
                "Free some space, or choose another disk"
                if error.errno == errno.ENOSPC
                else "Choose a directory that this user can write to"
            )
            raise ConfigError(
                f"profiler.output_dir is {output_dir!r}, but {directory} cannot be written: "
                f"{reason}.\n{advice}, with profiler.output_dir=DIR.",
                "output-dir",
            ) from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(content + b"\n")
        return directory
    raise ConfigError(
        f"profiler.output_dir is {output_dir!r}, and 100000 launches of that name exist already.\n"
        "Set EXPERIMENT_NAME or profiler.output_dir to a unique name.",
        "output-dir",
    )


def _absolute(output_dir: str) -> Path:
    """Return an absolute path; of a relative one in Ray's copy of a working directory, below the home."""
    given = Path(os.path.expanduser(output_dir))
    here = Path.cwd()
    # ray._private.runtime_env.working_dir: `ray job submit --working-dir` starts the command there.
    if given.is_absolute() or "working_dir_files" not in here.parts:
        return Path(os.path.abspath(given))
    announce(
        f"this working directory is Ray's copy, which Ray deletes: the run directory is in {Path.home()}, "
        "or set an absolute profiler.output_dir"
    )
    return Path(os.path.abspath(Path.home() / given))


def discard(directory: Path) -> None:
    """Remove a run directory that holds nothing but what this process made."""
    headers = directory / "processes"
    if any(directory.glob("step_*")) or len(list(headers.glob("*.json"))) > 1:
        return
    for file in (directory / RUN_FILE, *headers.glob("*.json")):
        file.unlink(missing_ok=True)
    for folder in (headers, directory):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _launch(
    experiment: str, clock: Anchor, settings: Any, training: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of run.json: see `events.redaction` for what is left out."""
    words = getattr(sys, "orig_argv", sys.argv)
    return {
        "format": FORMAT_VERSION,
        "experiment": experiment,
        "launched": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "+00:00",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # `python -m x` shows in sys.orig_argv only.
        "command": recorded_command(words),
        "cwd": os.getcwd(),
        "versions": versions(),
        "settings": recorded_values(msgspec.to_builtins(settings), "settings"),
        "training": recorded_values(dict(training), "training"),
        "clock": msgspec.to_builtins(clock),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of what a run depends on; absent packages are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in (
        "verl-profiler",
        "verl",
        "ray",
        "torch",
        "sglang",
        "vllm",
        "TransferQueue",
        "transformers",
        "nvtx",
    ):
        with contextlib.suppress(PackageNotFoundError):
            found[name.lower().replace("-", "_")] = version(name)
    return found
