"""The pages of the site that are made from the code: plots, tables, JSON output, fields; the table of costs.

`mkdocs build` makes the pages; `python docs/generated.py FOLDER` writes them into a folder.
`python docs/generated.py` prints the table of costs, for docs/platform.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from json_format import FORMATS, table_docs

from verl_profiler.events.vocabulary import TABLES
from verl_profiler.reading.tables.schemas import COLUMNS
from verl_profiler.views.columns import listed
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.reference import PROSE, entry

__all__ = ["costs", "pages"]


def pages() -> dict[str, str]:
    """Return the pages, in Markdown, by their names."""
    return {
        "plots.md": _plots(),
        "tables.md": _tables(),
        "json.md": _json(),
        "fields.md": TABLES.read_text(encoding="utf-8"),
    }


def costs() -> str:
    """Return the table of measured costs, in Markdown."""
    file = Path(__file__).resolve().parents[1] / "benchmarks/costs.json"
    lines = ["| what | cost | measured with |", "| --- | --- | --- |"]
    lines += [
        f"| {what} | {cost} | `{each['script']}`, {each['date']} |"
        for each in json.loads(file.read_text(encoding="utf-8"))
        for what, cost in each["costs"].items()
    ]
    return "\n".join([*lines, ""])


def _plots() -> str:
    """Return the page, in Markdown."""
    index = _two_columns(
        ("plot", "question"),
        [(f"[{name}](#{name})", view.question) for name, view in VIEWS.items()],
    )
    head, _, _ = PROSE.read_text(encoding="utf-8").partition(f"\n## {next(iter(VIEWS))}\n")
    return "\n".join(
        (
            head.replace("<!-- index -->\n", index),
            *map(entry, VIEWS.values()),
            "",
        )
    )


def _two_columns(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _tables() -> str:
    lines = [
        "# Columns of all tables\n",
        "[Runs in Python and SQL](sql.md) explains the tables.  NULL means not recorded.",
    ]
    for table, columns in COLUMNS.items():
        lines += [f"\n## {table}\n", "| column | type | unit | what |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | {kind} | {field.unit} | {field.doc} |"
            for name, (kind, field) in columns.items()
        ]
    return "\n".join([*lines, ""])


def _json() -> str:
    blocks = ["# Keys of the JSON output\n\n[JSON output](reference.md#json) explains it."]
    for command, keys in FORMATS.items():
        lines = [f"## {command}", "", "| key | type | |", "| --- | --- | --- |"]
        lines += [
            f"| `{name.rstrip('?')}` | {kind}{', or absent' if name.endswith('?') else ''} | {text} |"
            for name, (kind, text) in keys.items()
        ]
        blocks.append("\n".join(lines))
    blocks.append(
        "## Tables\n\nThe same rows as the functions of these names in `verl_profiler.analysis` return in Python."
    )
    for name, (about, columns) in sorted(table_docs().items()):
        blocks.append(f"### {name}\n\n{about}\n\n{listed(columns)}")
    return "\n\n".join(block.strip() for block in blocks) + "\n"


if __name__ == "__main__":
    if not sys.argv[1:]:
        print(costs(), end="")
    for folder in sys.argv[1:]:
        for name, text in pages().items():
            Path(folder, name).write_text(text, encoding="utf-8")
