"""Hooks of mkdocs: pages from the repository's root and from the code, and links that hold in the site.

The pages link to each other, and to files outside of docs/, as they lie in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from generated import pages
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# README.md would take the place of index.md.
PLACES = {
    "README.md": "overview.md",
    "README.zh.md": "overview.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\]\n]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root, and those that are made from the code."""
    for page, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / page).read_text()))
    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where their targets are in the site; of files that are not in it, keep the text."""
    place = page.file.src_uri
    source = next((name for name, to in PLACES.items() if to == place), f"docs/{place}")

    def in_site(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = PLACES.get(target, target)
        if target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target not in PLACES.values():
            return text
        target = posixpath.relpath(target, posixpath.dirname(place) or ".")
        return f"[{text}]({target}{anchor or ''})"

    return LINK.sub(in_site, markdown)
