"""One self-contained HTML file per run: data, style and script inlined, nothing fetched.

Everything that comes from event files reaches the page as JSON in a data block, and from there as
text nodes; a content security policy with the hashes of the page's own script and style forbids
everything else, requests to the network included.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_profiler.errors import ReadingError
from verl_profiler.render.colors import ENGINE_COLORS, PART_COLORS, PHASE_COLORS, color, owner_color
from verl_profiler.views.findings import finding_texts

try:
    import jinja2
    from markupsafe import Markup
except ImportError as error:
    raise ReadingError(
        "the report needs jinja2, which is not installed.\npip install 'verl-profiler[report]'",
        "missing-extra",
    ) from error

__all__ = ["digest", "page", "part", "script_json", "template"]

_PAGE = Path(__file__).with_name("page")
_SCRIPTS = ("format.js", "table.js", "charts.js", "timeline.js", "request.js", "report.js")

# Inside <script> only these can end the block or start a comment, and U+2028 and U+2029 were no
# part of JavaScript strings before ES2019.  All of them are as good as their escapes.
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def page(document: Mapping[str, Any], *, made: str) -> str:
    """Write the page.

    Args:
        document: What `sections.document` returns.
        made: When and by which version, for the foot of the page.
    """
    style = part("report.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(part, _SCRIPTS)) + "})();\n"
    data = {**document, "colors": _colors(document)}
    return template("report.html").render(
        title=", ".join(document["about"]["runs"]),
        sentences=document["sentences"],
        findings=finding_texts(document["findings"]),
        made=made,
        # The package's own files, and JSON without a character that could end its element.
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        data=Markup(script_json(data)),  # noqa: S704
        policy="; ".join(
            (
                "default-src 'none'",
                f"script-src '{digest(script)}'",
                f"style-src '{digest(style)}'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
    )


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


def digest(text: str) -> str:
    """Return what the content security policy calls an inlined text by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _colors(document: Mapping[str, Any]) -> dict[str, str]:
    """Give each phase, part and owner that occurs its color."""
    colors = {**PART_COLORS, **PHASE_COLORS, **ENGINE_COLORS}
    log = document["log"]
    tables = [(document["step_phases"], "phase")]
    tables += [(log["differences"], "timer"), (log["timers"], "timer")] if log else []
    for table, column in tables:
        if table["columns"]:
            place = table["columns"].index(column)
            colors.update({row[place]: color(row[place]) for row in table["rows"] if row[place]})
    path = document["critical_path"]
    for row in path["rows"]:
        owner = row[path["columns"].index("owner")]
        colors[f"path:{owner}"] = owner_color(owner)
    return colors
