"""One self-contained HTML file per run: data, style and script inlined, nothing fetched.

Everything that comes from event files reaches the page as JSON in a data block, and from there as
text nodes; a content security policy with the hashes of the page's own script and style forbids
everything else, requests to the network included.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_PAGE = Path(__file__).with_name("page")
_LEVEL = 6

_IMPORT = re.compile(r"^import (\{[^}]*\}) from '\./(\w+)\.js';$", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:(?:async )?function|const|class) (\w+))", re.MULTILINE)
# Of no use to a browser: types, comments on lines of their own, indentation.
_UNUSED = re.compile(r"[ ]*/\*\*(?:[^*]|\*(?!/))*\*/\n?|^[ ]*//.*\n|^[ ]+", re.MULTILINE)

# Inside <script> only these can end the block or start a comment, and U+2028 and U+2029 were no
# part of JavaScript strings before ES2019.  All of them are as good as their escapes.
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def template(name: str) -> jinja2.Template:
    """Return a page's template; whatever is put into it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def trusted(text: str) -> Markup:
    """Mark text of the package's own, or from `script_json`, which a template takes as it is."""
    return Markup(text)  # noqa: S704


def script_json(value: Any) -> str:
    """Write JSON that can stand inside a <script> element.

    Raises:
        ValueError: A number is not finite; JSON has no such numbers.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def part(name: str) -> str:
    """Return a file of the page, to be inlined."""
    text = (_PAGE / name).read_text(encoding="utf-8")
    if "</" in text or "<!--" in text:
        raise AssertionError(f"{name} cannot be inlined: it holds a tag")
    return text


def script(name: str) -> str:
    """Return a JavaScript module of the page and all that it imports as one script.

    Each module becomes a function that returns its exports, after those that it imports.  They are
    called when the data block is unpacked.
    """
    first: dict[str, str] = {}
    _place("unpack", first)
    placed = dict(first)
    _place(name, placed)
    others = "".join(text for module, text in placed.items() if module not in first)
    return (
        f"(() => {{\n'use strict';\n{''.join(first.values())}$unpack.whenUnpacked(() => {{\n"
        f"{others}}});\n}})();\n"
    )


def _place(name: str, placed: dict[str, str]) -> None:
    """Add the text of a module after those that it imports, where they are missing."""
    if name in placed:
        return
    text = part(f"{name}.js")
    for _, imported in _IMPORT.findall(text):
        _place(imported, placed)
    exports = ", ".join(_EXPORT.findall(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = $\2;", text))
    placed[name] = (
        f"const ${name} = (() => {{\n{_UNUSED.sub('', body)}return {{{exports}}};\n}})();\n"
    )


def packed(text: str) -> str:
    """Return a text compressed and in Base64, as `unpack.js` reads it."""
    return base64.b64encode(gzip.compress(text.encode(), _LEVEL, mtime=0)).decode()


def digest(text: str) -> str:
    """Return what the content security policy calls an inlined text by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
