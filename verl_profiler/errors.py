"""Base classes of all errors, each with a slug.  Imported by both halves.

    VerlProfilerError
    ├── ConfigError            before training: a setting cannot be used
    └── ReadingError           after training: files cannot be read as requested

`docs/messages.md` has an entry per slug: cause, meaning, remedy.
"""

from __future__ import annotations

__all__ = ["ConfigError", "ReadingError", "VerlProfilerError"]


class VerlProfilerError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened, what it means, what to do.
        slug: The entry in docs/messages.md; printed in parentheses at the end.
    """

    exit_code = 2

    def __init__(self, message: str, slug: str) -> None:
        super().__init__(f"{message} ({slug})")
        self.message = message
        self.slug = slug

    def __reduce__(self) -> tuple[type[VerlProfilerError], tuple[str, str]]:
        """Return what a copy in another process is made of."""
        return type(self), (self.message, self.slug)


class ConfigError(VerlProfilerError):
    """A setting that cannot be used; raised before training starts."""


class ReadingError(VerlProfilerError):
    """Files that cannot be read as requested."""
