"""What the columns of every table hold, with the unit, from `columns.md`; how docs and pages list them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["COMMON", "column_texts", "described", "listed", "sections"]

# The section of the columns that several tables have.
COMMON = "several tables"
_OWN = re.compile(r"^- `([\w*]+)`: (.+)$", re.MULTILINE)
_SHARED = re.compile(r"^As in several tables: (.+)\.$", re.MULTILINE)


def sections(path: Path) -> dict[str, str]:
    """Return the texts below the second headings of a Markdown file, by heading."""
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def column_texts() -> dict[str, dict[str, str]]:
    """Return a sentence for each column, by table; a name such as `get_*` stands for a prefix."""
    found = {
        table: (_SHARED.findall(text), dict(_OWN.findall(text)))
        for table, text in sections(Path(__file__).with_name("columns.md")).items()
    }
    common = found[COMMON][1]
    return {
        table: {name: common[name] for line in shared for name in re.findall(r"`(\w+)`", line)}
        | own
        for table, (shared, own) in found.items()
    }


def described(columns: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the sentences of columns by name.

    Args:
        columns: Of their table.
        names: Those to describe.

    Raises:
        KeyError: A column has no sentence.
    """
    patterns = {key[:-1]: text for key, text in columns.items() if key.endswith("*")}
    texts: dict[str, str] = {}
    for name in names:
        pattern = next((text for start, text in patterns.items() if name.startswith(start)), None)
        texts[name] = pattern or columns[name]
    return texts


def listed(columns: Mapping[str, str], others: str = "#columns-of-several-tables") -> str:
    """Return the columns of a table in Markdown.

    Args:
        columns: With their sentences.
        others: Link to the sentences of the columns that several tables have.
    """
    common = column_texts()[COMMON]
    shared = [name for name, text in columns.items() if common.get(name) == text]
    own = [(name, text) for name, text in columns.items() if name not in shared]
    rows = [
        "| column | meaning |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in own),
    ]
    names = ", ".join(f"`{name}`" for name in shared)
    parts = ["\n".join(rows)] if own else []
    parts += (
        [f"{'Also, as' if own else 'As'} [in several tables]({others}): {names}."] if shared else []
    )
    return "\n\n".join(parts)
