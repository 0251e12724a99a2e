"""What the columns of every table hold, from `columns.md`: their titles, formats and sentences."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "COMMON",
    "column_texts",
    "described",
    "format_of",
    "heading",
    "listed",
    "page_view",
    "sections",
    "shown_columns",
]

# The section of the columns that several tables have.
COMMON = "several tables"
# A column, its title where its name does not make one, and its sentence.
_OWN = re.compile(r"^- `([\w*]+)`(?: \((.+?)\))?: (.+)$", re.MULTILINE)
_SHARED = re.compile(r"^As in several tables: (.+)\.$", re.MULTILINE)

_WORDS = {
    "dp": "DP",
    "id": "ID",
    "kv": "KV",
    "mfu": "MFU",
    "mib/s": "MiB/s",
    "rss": "RSS",
    "tflop": "TFLOP",
}


def sections(path: Path) -> dict[str, str]:
    """Return the texts below the second headings of a Markdown file, by heading."""
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def _columns() -> dict[str, tuple[list[str], list[tuple[str, str, str]]]]:
    """Return what `columns.md` has of each table: shared names, and name, title and sentence of its own."""
    return {
        table: (re.findall(r"`(\w+)`", "".join(_SHARED.findall(text))), _OWN.findall(text))
        for table, text in sections(Path(__file__).with_name("columns.md")).items()
    }


@functools.cache
def column_texts() -> dict[str, dict[str, str]]:
    """Return a sentence for each column, by table; a name such as `get_*` stands for a prefix."""
    common = {name: text for name, _, text in _columns()[COMMON][1]}
    return {
        table: {name: common[name] for name in shared} | {name: text for name, _, text in own}
        for table, (shared, own) in _columns().items()
    }


def heading(column: str, table: str = "") -> str:
    """Return the title of a column, without the unit that its values are shown with."""
    _, own = _columns().get(table, ([], []))
    titles = (title for name, title, _ in [*own, *_columns()[COMMON][1]] if name == column)
    title = next(titles, "")
    if title:
        return title
    words = re.sub(r"(?<!_per)_(s|us|bytes)$", "", column).replace("_per_s", "/s").split("_")
    return " ".join(
        _WORDS.get(word) or (word.upper() if re.fullmatch(r"p\d+", word) else word)
        for word in words
    )


def format_of(column: str) -> str:
    """Return how values of a column are shown, by its name.

    Returns:
        `s` (seconds), `q` (seconds, of too few values none), `bytes`, `share`, `n`; empty if the name has no
        unit.
    """
    if column.startswith("s_per_"):
        return "s"
    if column.endswith("_per_s"):
        return "bytes" if column.endswith("bytes_per_s") else "n"
    if column.endswith("_s"):
        return "q" if re.fullmatch(r"p\d+_s", column) else "s"
    if column.endswith("_bytes"):
        return "bytes"
    return "share" if column.endswith("share") or column == "mfu" else ""


def page_view(
    name: str,
    question: str,
    table: dict[str, Any],
    charts: Sequence[Mapping[str, Any]] = (),
    missing: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what the page shows of a view or of a table.

    Args:
        name: Of the table in `columns.md`; without one, columns have no sentences.
        question: That it answers.
        table: Its frame.
        charts: One per run that has one.
        missing: Why another run has none.
    """
    names = [column for column in table["columns"] if column != "s"]
    texts = described(column_texts()[name], names) if name in column_texts() else {}
    return {
        "question": question,
        "charts": [*charts],
        "missing": [*missing],
        "table": table,
        # Times of the wall clock, in microseconds, are for programs.
        "columns": [
            [each, heading(each, name), format_of(each), texts.get(each, "")]
            for each in names
            if not each.endswith("_us")
        ],
    }


def shown_columns(names: Iterable[str], *tables: str) -> list[list[str]]:
    """Return title, format and sentence of columns, each as in the first table that has it."""
    found: list[list[str]] = []
    for name in names:
        table = next((each for each in tables if name in column_texts()[each]), "")
        text = column_texts()[table][name] if table else ""
        found.append([name, heading(name, table), format_of(name), text])
    return found


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
