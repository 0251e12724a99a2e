"""Files that others see whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(target: Path) -> Generator[IO[bytes], None, None]:
    """Open a file beside `target` that takes its place when it is complete.

    Its mode follows the umask.  A link or pipe of that name is replaced, not followed.

    Raises:
        OSError: It cannot be written; what was there before is unchanged.
    """
    # Not `secrets`, which imports more than a training process needs.
    draft = target.with_name(f".{target.name[:80]}.{os.urandom(6).hex()}.part")
    try:
        with draft.open("x+b") as file:
            yield file
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def replace_file(target: Path, content: bytes) -> None:
    """Write a file whole, as `replacing` does.

    Raises:
        OSError: It cannot be written; the old one stays.
    """
    with replacing(target) as file:
        file.write(content)
