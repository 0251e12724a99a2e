"""What the views are, in Markdown: one for `plot NAME --list`, all for the site."""

from __future__ import annotations

import inspect
import re

from verl_profiler.views.columns import COMMON, listed
from verl_profiler.views.page_sections import SECTIONS, section_of
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import View

__all__ = ["entry", "reference"]

_HEAD = """\
# Plots

Every question below has a plot and tables.
`verl-profiler plot NAME logs/my-run` draws the plot, `--json` and `--csv` give its numbers:
CSV has the table of the same name, JSON also those of other panels ([json](json.md)).
`verl-profiler plot all logs/my-run --out figures` draws all of them.
"""

_OPTIONS = """\
Options that all plots take: `--steps`, `--out`, `--format png|svg|pdf`, `--force`, `--json`, `--csv`.
A percentile of too few values has no mark, and is empty in `--json` and `--csv`: \
[metrics](metrics.md#quantiles).
`--worker`, `--validate`, `--percentiles` and `--slowest` are refused by plots that do not honor them.

The explanation of one step in a terminal: `verl-profiler why logs/my-run --steps 5`.
What to do first: [findings](findings.md), at the top of the summary and of the report.
One request in a terminal: `verl-profiler requests logs/my-run --step 5 --slowest 20`, then \
`--request ID`.

## Sections of the report page

[report](report.md) describes the page.
"""


def reference() -> str:
    """Return the page, in Markdown."""
    index = _table(
        ("plot", "question"),
        [(f"[{name}](#{name})", view.question) for name, view in VIEWS.items()],
    )
    sections = _table(
        ("section", "what to conclude from it"),
        [(section.title, section.conclude) for section in SECTIONS.values()],
    )
    columns = _table(("column", "meaning"), [(f"`{name}`", text) for name, text in COMMON.items()])
    return "\n".join(
        (
            _HEAD,
            index,
            _OPTIONS,
            sections,
            *map(entry, VIEWS.values()),
            "## Columns of several tables\n",
            columns.rstrip("\n"),
            "",
        )
    )


def entry(view: View) -> str:
    """Return what a view shows, what to conclude from it, its limitations and its columns."""
    section = section_of(view.name)
    command = f"verl-profiler plot {view.name} logs/my-run {view.example}".rstrip()
    parts = [
        f"## {view.name}",
        view.question,
        f"    {command}",
        f"On the report page: {SECTIONS[section].title}." if section else "",
        _prose(view.shows, view.name),
        f"**What to conclude**\n\n{_prose(view.conclude, view.name)}",
        f"**Limitations.** {_prose(view.limits, view.name)}",
        listed(view.columns),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _prose(text: str, name: str) -> str:
    """Link the names of other views."""
    return re.sub(
        r"`(\w+)`(?!\])",
        lambda match: (
            f"[{match[1]}](#{match[1]})" if match[1] in VIEWS and match[1] != name else match[0]
        ),
        inspect.cleandoc(text),
    )


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
