"""What the columns of every table hold, from `columns.md`: their titles, formats and sentences."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The section of the columns that several tables have, the first.
COMMON = "several tables"
# A column, its title where its name does not make one, and its sentence.
_OWN = re.compile(r"^- `([\w*]+)`(?: \((.+?)\))?: (.+)$", re.MULTILINE)
_CAPTION = re.compile(r"^In the report: (.+)$", re.MULTILINE)
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


@functools.cache
def sections(path: Path) -> dict[str, str]:
    """Return the texts below the second headings of a Markdown file, by heading."""
    parts = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def _columns() -> dict[str, dict[str, tuple[str, str]]]:
    """Return each column's title, empty where its name makes one, and its sentence, by table."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for table, text in sections(Path(__file__).with_name("columns.md")).items():
        shared = re.findall(r"`(\w+)`", "".join(_SHARED.findall(text)))
        found[table] = {name: found[COMMON][name] for name in shared}
        found[table] |= {name: (title, sentence) for name, title, sentence in _OWN.findall(text)}
    return found


@functools.cache
def column_texts() -> dict[str, dict[str, str]]:
    """Return a sentence for each column, by table; a name such as `get_*` stands for a prefix."""
    return {
        table: {name: text for name, (_, text) in columns.items()}
        for table, columns in _columns().items()
    }


def caption(table: str) -> str:
    """Return the caption of a table that no view draws."""
    text = sections(Path(__file__).with_name("columns.md")).get(table, "")
    found = _CAPTION.search(text)
    return found[1] if found else table.capitalize()


def heading(column: str, table: str = "") -> str:
    """Return the title of a column, without the unit that its values are shown with."""
    every = {**_columns()[COMMON], **_columns().get(table, {})}
    title, _ = every.get(column, ("", ""))
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
    # Times of the wall clock, in microseconds, are for programs.
    names = [each for each in table["columns"] if each != "s" and not each.endswith("_us")]
    return {
        "question": question,
        "charts": [*charts],
        "missing": [*missing],
        "table": table,
        "columns": shown_columns(names, name),
    }


def section(
    name: str,
    title: str,
    topic: str | None,
    views: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> dict[str, Any]:
    """Return a section of a page: its name, title, topic, the views that it shows, and sentences."""
    link = name.replace("tq_", "TransferQueue ").replace("_", " ")
    return {
        "name": name,
        "title": title,
        "link": f"{link[0].upper()}{link[1:].partition('-')[0]}",
        "topic": topic,
        "views": [*views],
        "notes": [*notes],
    }


def shown_columns(names: Iterable[str], *tables: str) -> list[list[str]]:
    """Return name, title, format and sentence of columns, each as in the first table that has it."""
    found: list[list[str]] = []
    for name in names:
        prefix = f"{name.partition('_')[0]}_*"
        texts = {table: column_texts().get(table, {}) for table in tables}
        table = next((each for each in tables if {name, prefix} & {*texts[each]}), "")
        own = texts.get(table, {})
        found.append(
            [name, heading(name, table), format_of(name), own.get(name, own.get(prefix, ""))]
        )
    return found


def listed(columns: Mapping[str, str]) -> str:
    """Return the columns of a table, with their sentences, in Markdown."""
    rows = [f"| `{name}` | {text} |" for name, text in columns.items()]
    return "\n".join(["| column | meaning |", "| --- | --- |", *rows])
