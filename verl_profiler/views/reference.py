"""What a view is, in Markdown: for `plot NAME --list`, and for the site."""

from __future__ import annotations

import re
from pathlib import Path

from verl_profiler.views.columns import column_texts, listed, sections
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import View

# How to read each view, and what to conclude from it.
PROSE = Path(__file__).with_name("plots.md")


def entry(view: View, *, linked: bool = True) -> str:
    """Return what a view shows, what to conclude from it, its limitations and its columns.

    Args:
        view: The view.
        linked: The names of other views are links, for a page that has all of them.
    """
    prose = sections(PROSE)[view.name]
    command = f"verl-profiler plot {view.name} logs/my-run {view.example}".rstrip()
    parts = [
        f"## {view.name}",
        view.question,
        f"    {command}",
        _linked(prose, view.name) if linked else prose,
        listed(column_texts()[view.table or view.name]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _linked(text: str, name: str) -> str:
    """Link the names of other views."""
    return re.sub(
        r"`(\w+)`(?!\])",
        lambda match: (
            f"[{match[1]}](#{match[1]})" if match[1] in VIEWS and match[1] != name else match[0]
        ),
        text,
    )
