"""Output of commands: atomic file writes that overwrite only on request; JSON and CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from verl_profiler.errors import ReadingError
from verl_profiler.events import whole_files
from verl_profiler.events.json_values import is_list, is_mapping, is_tuple
from verl_profiler.render.visible import visible

# A spreadsheet treats a cell that starts like this as a formula, also in its full-width form.
_FORMULA = re.compile(r"[=+\-@＝＋－＠]")
_HEAD_BYTES = 2048
# Maximum number of rows of a table, or items of a list, that `bounded` keeps.
JSON_ROWS = 10_000
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def target_of(
    runs: Sequence[Path], out: Path | None, name: str, *, force: bool, mark: bytes | None = None
) -> Path:
    """Return the file to write: `out`, or `name` in or beside the first run.

    Args:
        runs: The runs as given.
        out: A file, or a folder for `name`.
        name: The file's default name; of a run in object storage, in the working directory.
        force: Replace whatever regular file is there.
        mark: What the first bytes of this command's own output hold; such a file is replaced.

    Raises:
        ReadingError: It exists, was not written by this command, and `force` is False.
    """
    from verl_profiler.reading.remote import is_downloaded

    first = runs[0]
    if out is not None:
        target = out / name if out.is_dir() else out
    elif is_downloaded(first):
        target = Path(f"{first.name.split('.')[0]}-{name}")
    elif first.is_dir():
        target = first / name
    else:
        # An archive or a single file: beside it.
        target = first.with_name(f"{first.name.split('.')[0]}-{name}")
    refuse_overwriting(target, force=force, mark=mark)
    return target


def refuse_overwriting(
    *targets: Path, force: bool, mark: bytes | None = None, because: str = ""
) -> None:
    """Reject files that exist, including dangling links, before the first of them is written.

    Args:
        targets: The files.
        force: Replace whatever regular files are there.
        mark: What the first bytes of this command's own output hold; such files are replaced.
        because: Added to the message: why they are not replaced.

    Raises:
        ReadingError: One exists, and `force` is False; or it is not a regular file, such as a device.
    """
    there = [
        target
        for target in targets
        if os.path.lexists(target) and (mark is None or not _begins_with(target, mark))
    ]
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ReadingError(
            f"{there[0]}{more} would be overwritten{because}.\nAdd --force, or name another --out",
            "output-exists",
        )
    for target in there:
        if not target.is_symlink() and not target.is_file():
            raise ReadingError(
                f"{target} is not a regular file and cannot be replaced.\nName another --out",
                "cannot-write",
            )


def _begins_with(target: Path, mark: bytes) -> bool:
    from verl_profiler.events.files import expanded, open_regular

    try:
        with open_regular(target) as file, expanded(file) as content:
            return mark in content.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False


def write_whole(target: Path, text: Iterable[str]) -> None:
    """Write a temporary file and move it into place: readers never see a partial file.

    Raises:
        ReadingError: It cannot be written.
    """
    with replacing(target) as file:
        # A lone surrogate, as in paths that are not UTF-8, is written as its escape.
        file.writelines(piece.encode(errors="backslashreplace") for piece in text)


@contextlib.contextmanager
def replacing(target: Path) -> Generator[IO[bytes], None, None]:
    """Open a temporary file that replaces `target` when it is complete.

    Its mode follows the umask.  A link is replaced, not followed.  A missing folder is created, and
    stderr has a line that names it.

    Raises:
        ReadingError: It cannot be written; what was there before is unchanged.
    """
    try:
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            print(visible(f"Created the folder {target.parent}"), file=sys.stderr)
        with whole_files.replacing(target) as file:
            yield file
    except OSError as error:
        raise ReadingError(
            f"{target} cannot be written: {error.strerror or error}.\nName another file with --out",
            "cannot-write",
        ) from error


def give(text: str, out: Path | None, *, force: bool) -> None:
    """Write text to a file, or to the terminal where none is named.

    Raises:
        ReadingError: The file is in the way, or cannot be written.
    """
    if out is None:
        sys.stdout.write(text)
        return
    refuse_overwriting(out, force=force)
    write_whole(out, [text])
    print(visible(f"Wrote {out}"))


def print_json(content: Any) -> None:
    """Print a document on stdout."""
    sys.stdout.write(json_text(content))


def bounded(lists: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Sequence[Any]], dict[str, int]]:
    """Return the first `JSON_ROWS` of each list, and by name how many were left out."""
    left_out = {name: len(rows) - JSON_ROWS for name, rows in lists.items()}
    return (
        {name: rows[:JSON_ROWS] for name, rows in lists.items()},
        {name: count for name, count in left_out.items() if count > 0},
    )


def json_text(content: Any) -> str:
    """Return a document as ASCII JSON, with null for NaN and infinity."""
    try:
        text = json.dumps(content, indent=1, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(content), indent=1, default=str, allow_nan=False)
    return text + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if is_mapping(content):
        return {key: _finite(value) for key, value in content.items()}
    if is_list(content) or is_tuple(content):
        return [_finite(each) for each in content]
    return content


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with every column that any row has.

    Text that a spreadsheet would treat as a formula is prefixed with an apostrophe; numbers stay
    numbers.
    """
    listed = list(rows)
    columns = list(dict.fromkeys(name for row in listed for name in row))
    if not columns:
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(name)) for name in columns] for row in listed)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = visible(str(value))
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text
