"""Upload a run directory to object storage while it grows: `profiler.output_dir=s3://…`.

    python -m verl_profiler.storage.upload RUN TARGET --every 60

One such process runs beside the driver, which imports no client of any storage; it ends with its
standard input, after a last upload, also where the driver was killed.  Objects cannot be appended to:
a file is uploaded as it is, again when it has grown by a quarter, or when it no longer grows.  A
failure costs a line on the console; the files stay in RUN.  `upload.json`, which is written there only,
has up to when the run is complete there, and whether more will come: where driver and upload are killed
together, readers report by it that the upload did not end.  Whoever uploads next continues from what is there.

Others see each file whole, the old content or the new one.  An object is there once all of it has arrived;
where there are folders, a file is written beside its place and renamed, which replaces what is there on
disks and by SFTP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler.events.files import parse_json, read_object
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.open_files import FOLDER as OPEN
from verl_profiler.events.redaction import problem_of, public
from verl_profiler.events.remote import (
    RemoteError,
    connect,
    has_folders,
    joined,
    listing,
    name_of,
)
from verl_profiler.events.shipping import UPLOAD_FILE, UPLOAD_FORMAT_VERSION, iso
from verl_profiler.events.vocabulary import RUN_FILE
from verl_profiler.recording.complaints import announce

# Printed with the URL, once a run has a folder there.
CLAIMED = "claimed "

# A file that grows is uploaded again when it has this many times its size, or after so many rounds.
_GROWTH = 1.25
_ROUNDS = 10
_FINAL_ROUNDS = 3
# Read at once; larger files are sent in pieces by the client, with a line that may be cut.
_WHOLE_BYTES = 64 << 20
_CLAIMED_S = 0.5
_FAILURES = 20
_DRAFT = ".part"
# Problems in `upload.json`, and characters of each.
_SHOWN, _LINE = 5, 500


@dataclass
class _Sent:
    """What was uploaded of a file, and how many rounds ago."""

    size: int
    modified_ns: int
    rounds: int = 0


class Upload:
    """Keeps a copy of a run directory elsewhere.

    Args:
        url: Where to.
        run: The run directory.
        every_s: The interval between two uploads; None where a command uploads once.

    Attributes:
        progress: Called after each file.
        files: Files uploaded.
        size_bytes: Their bytes.

    Raises:
        RemoteError: The URL cannot be used.
    """

    def __init__(self, url: str, run: Path, every_s: float | None = None) -> None:
        self._filesystem, self._target = connect(url)
        self._run = run
        self.progress: Callable[[], None] = lambda: None
        self._sent: dict[str, _Sent] = {}
        # Whether it has folders, which must be made; those that were.
        self._folders = has_folders(url)
        self._made: set[str] = set()
        # Another process may write the same file: two launches, or `collect` beside an upload.
        self._draft_end = f".{secrets.token_hex(4)}{_DRAFT}"
        launch: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            launch = read_object(run / RUN_FILE)
        self._account = {
            "format": UPLOAD_FORMAT_VERSION,
            "host": launch.get("host"),
            "directory": str(run.absolute()),
            "url": public(url),
            "every_s": every_s,
        }
        self._uploaded: str | None = None
        self.files = 0
        self.size_bytes = 0

    def round(self, *, final: bool = False) -> list[str]:
        """Upload what has changed.

        Args:
            final: All of it; else what is worth it.

        Returns:
            What failed, as sentences; it is tried again in the next round.
        """
        failed: list[str] = []
        found = dict(self._changing())
        for name, status in found.items():
            known = self._sent.get(name)
            if known is not None:
                known.rounds += 1
            if not final and not self._is_worth(name, status, known):
                continue
            if known is not None and _same(known, status):
                continue
            problem = self._put(name)
            if problem:
                failed.append(problem)
                if len(failed) >= _FAILURES:
                    # The storage is not there.
                    break
        # What replaces them is there.
        gone = [] if failed else [name for name in self._sent if name not in found]
        for name in gone:
            # It was compressed, or is over; others were deleted to make room.
            if name.startswith(f"{OPEN}/") or f"{name}.gz" in found:
                try:
                    self.remove(name)
                    del self._sent[name]
                except Exception as error:  # noqa: BLE001  any client's
                    failed.append(f"{name}: {problem_of(error)}")
        return failed

    def round_with_account(self) -> list[str]:
        """Upload what is worth it, and write up to when the run is complete there; return what failed."""
        begun_s = time.time()
        return self.round() or self._write_account(begun_s)

    def finish(self, wait_s: float = 1.0) -> list[str]:
        """Upload all that is left, and end the account; return what failed, as sentences.

        Args:
            wait_s: How long to wait after the first failure; twice as long after each further one.
        """
        begun_s = time.time()
        failed: list[str] = []
        for number in range(_FINAL_ROUNDS):
            # Processes that still run write a line now and then.
            before = self.files
            failed = self.round(final=True)
            if failed:
                time.sleep(wait_s * 2**number)
            elif self.files == before:
                break
        return failed + self._write_account(None if failed else begun_s, ended=True, failed=failed)

    def write_account(
        self,
        uploaded_s: float | None = None,
        *,
        ended: bool = False,
        failed: Sequence[str] = (),
    ) -> None:
        """Replace `upload.json`.

        Args:
            uploaded_s: When a round began that has just uploaded all that was due; None if none has.
            ended: Whether nothing more is uploaded.
            failed: What could not be uploaded, as sentences.

        Raises:
            Exception: The storage's.
        """
        now = iso(time.time())
        self._uploaded = iso(uploaded_s) or self._uploaded
        content = {
            **self._account,
            "uploaded": self._uploaded,
            "updated": now,
            "ended": now if ended else None,
            "failed": len(failed),
            "problems": [each[:_LINE] for each in failed[:_SHOWN]],
        }
        self._write(UPLOAD_FILE, (json.dumps(content, indent=1) + "\n").encode())

    def _write_account(self, uploaded_s: float | None, **more: Any) -> list[str]:
        try:
            self.write_account(uploaded_s, **more)
        except Exception as error:  # noqa: BLE001  any client's
            return [f"{UPLOAD_FILE}: {problem_of(error)}"]
        return []

    def takes(self, launch: bytes) -> bool:
        """Write a run.json where there is none; return whether it is the one that is there in the end.

        Of launches that find none at the same moment, the last one to write has the name.
        """
        with contextlib.suppress(FileNotFoundError):
            # Clients' `exists` is false for what they may not read, too.
            return self._read(RUN_FILE) == launch
        self._write(RUN_FILE, launch)
        time.sleep(_CLAIMED_S)
        if self._read(RUN_FILE) != launch:
            return False
        self.write_account()
        return True

    def holds_run_of(self) -> str:
        """Return when the run that is there was launched, if it is another one; else nothing."""
        try:
            there = json.loads(self._read(RUN_FILE))
        except (FileNotFoundError, ValueError):
            return ""
        here = json.loads((self._run / RUN_FILE).read_bytes())
        same = all(there.get(key) == here.get(key) for key in ("launched", "host", "pid"))
        return "" if same else str(there.get("launched"))

    def resume(self) -> None:
        """Continue an earlier upload.

        Files of the same size that are there are taken for uploaded; headers are not among them.  What
        was replaced since is then removed there, too.
        """
        # Whatever a client raises, there is no account then.
        with contextlib.suppress(Exception):
            earlier = mapping_or_empty(parse_json(self._read(UPLOAD_FILE)))
            uploaded = earlier.get("uploaded")
            self._uploaded = uploaded if isinstance(uploaded, str) else None
        try:
            there = listing(self._filesystem, self._target)
        except FileNotFoundError:
            return
        prefix = f"{self._target}/"
        for path, about in there.items():
            name = str(path).removeprefix(prefix)
            local = self._run / name
            base = local.name
            if base.startswith(".") and base.endswith(_DRAFT):
                # It was to be renamed by an upload that was killed.
                self.remove(name)
            elif not local.is_file():
                if name != UPLOAD_FILE:
                    self._sent[name] = _Sent(0, 0)
            elif name.endswith((".jsonl", ".gz", ".nsys-rep")):
                status = local.stat()
                if about.get("size") == status.st_size:
                    self._sent[name] = _Sent(status.st_size, status.st_mtime_ns)

    def _write(self, name: str, content: bytes | Path) -> None:
        """Write a file: these bytes, or those of a file that is too large for memory."""
        path = joined(self._target, name)
        folder, _, base = path.rpartition("/")
        if self._folders and folder not in self._made:
            self._filesystem.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        place = f"{folder}/.{base}{self._draft_end}" if self._folders else path
        if isinstance(content, bytes):
            self._filesystem.pipe_file(place, content)
        else:
            self._filesystem.put_file(str(content), place)
        if place != path:
            self._filesystem.mv(place, path)

    def _read(self, name: str) -> bytes:
        return self._filesystem.cat_file(joined(self._target, name))

    def remove(self, name: str) -> None:
        """Remove a file there that may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(joined(self._target, name))

    def _changing(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files of the run, events first, so that headers have no fewer than they state."""
        found: list[str] = []
        for folder, folders, names in os.walk(self._run):
            at = os.path.relpath(folder, self._run)
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".") and (at, name) != ("nsight", "raw")
            ]
            found += [
                os.path.normpath(os.path.join(at, name))
                for name in names
                if not name.startswith(".") and not name.endswith(".part")
            ]
        for name in sorted(found, key=lambda each: (not each.startswith("step"), each)):
            with contextlib.suppress(OSError):
                path = self._run / name
                if path.is_file() and not path.is_symlink():
                    yield name, path.stat()

    def _is_worth(self, name: str, status: os.stat_result, known: _Sent | None) -> bool:
        if known is None or not name.endswith(".jsonl"):
            return True
        quiet_s = time.time() - status.st_mtime
        return status.st_size >= _GROWTH * known.size or known.rounds >= _ROUNDS or quiet_s > 60

    def _put(self, name: str) -> str:
        """Upload a file; return why that failed, or an empty string."""
        path = self._run / name
        try:
            before = path.stat()
            size = before.st_size
            if size <= _WHOLE_BYTES:
                with path.open("rb") as file:
                    data = file.read(_WHOLE_BYTES)
                if name.endswith(".jsonl"):
                    data = data[: data.rfind(b"\n") + 1]
                self._write(name, data)
                size = len(data)
            else:
                self._write(name, path)
        except Exception as error:  # noqa: BLE001  any client's; the others are tried too
            # It may have been compressed or removed just now.
            return f"{name}: {problem_of(error)}" if path.exists() else ""
        self._sent[name] = _Sent(before.st_size, before.st_mtime_ns)
        self.files += 1
        self.size_bytes += size
        self.progress()
        return ""


def _same(known: _Sent, status: os.stat_result) -> bool:
    return (known.size, known.modified_ns) == (status.st_size, status.st_mtime_ns)


def claim(url: str, run: Path) -> str:
    """Take a folder for a run, by uploading its run.json, which shows that writing works.

    Returns:
        The URL, with a random end if another run is there.

    Raises:
        RemoteError: The URL cannot be used, or nothing can be written there.
    """
    name_of(url)
    url = url.rstrip("/")
    launch = (run / RUN_FILE).read_bytes()
    for wanted in (url, f"{url}-{secrets.token_hex(3)}"):
        upload = Upload(wanted, run)
        try:
            if upload.takes(launch):
                return wanted
        except Exception as error:
            raise RemoteError(
                f"nothing can be written to {public(wanted)}: {problem_of(error)}"
            ) from error
    raise RemoteError(f"{public(url)} holds another run, as does a random name beside it")


def main(argv: list[str] | None = None, wait_s: float = 1.0) -> int:
    """Upload until standard input ends; return 1 if something could not be uploaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("target")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS")
    args = parser.parse_args(argv)
    try:
        target = claim(args.target, args.run)
        upload = Upload(target, args.run, args.every)
    except RemoteError as error:
        print(error)
        return 2
    print(f"{CLAIMED}{target}", flush=True)
    with contextlib.suppress(OSError):
        os.nice(10)
    complained = False
    while not _input_ended(args.every):
        failed = upload.round_with_account()
        if failed and not complained:
            announce(
                f"WARNING uploading to {target} fails, and is tried again: {failed[0]}; the files "
                f"stay in {args.run} (not-uploaded)"
            )
        complained = bool(failed)
    if not args.run.is_dir():
        # The run failed before it started.
        for name in (RUN_FILE, UPLOAD_FILE):
            with contextlib.suppress(Exception):
                upload.remove(name)
        return 0
    # The driver waits while files arrive; before, nobody reads what is printed.
    upload.progress = _progress
    failed = upload.finish(wait_s)
    if failed:
        announce(
            f"WARNING {len(failed)} files were not uploaded to {target} ({failed[0]}); they stay in "
            f"{args.run}. Run: verl-profiler collect {args.run} --to {target} (not-uploaded)"
        )
    return 1 if failed else 0


def _progress() -> None:
    """Show the driver that this process is not stuck."""
    with contextlib.suppress(OSError, ValueError):
        print(".", flush=True)


def _input_ended(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main())
