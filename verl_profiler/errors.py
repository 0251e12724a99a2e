"""Base classes of all errors, each with a slug.  Imported by both halves.

    VerlProfilerError
    ├── ConfigError            before training: a setting cannot be used
    └── ReadingError           after training: files cannot be read as requested

`docs/messages.md` has an entry per slug: cause, meaning, remedy.
"""

from __future__ import annotations

import shlex
import sys

# Modules outside the core, with the smallest extra of pyproject.toml that installs each.
_EXTRAS = {
    "duckdb": "analysis",
    "numpy": "analysis",
    "scipy": "analysis",
    "vl_convert": "plots",
    "jinja2": "report",
    "markupsafe": "report",
    "prometheus_client": "prometheus",
    "google": "otel",
    "opentelemetry": "otel",
    "fsspec": "remote",
    "s3fs": "remote",
}


def extra_of(error: BaseException) -> str | None:
    """Return the extra that installs what could not be imported; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    return _EXTRAS.get((error.name or "").partition(".")[0])


def install_line(extra: str) -> str:
    """Return the command that adds an extra to this environment.

    pip and uv take the extra from the metadata of the installed package, whether that came from a
    clone, a wheel or an index.
    """
    return f"{shlex.quote(sys.executable)} -m pip install 'verl-profiler[{extra}]'"


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
