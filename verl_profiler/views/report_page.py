"""The page of a run: what `sections` gathers, in one self-contained file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.render.charts import bundle
from verl_profiler.render.colors import (
    ENGINE_COLORS,
    PART_COLORS,
    PHASE_COLORS,
    color,
)
from verl_profiler.render.html import digest, packed, part, script, script_json, template, trusted
from verl_profiler.render.text import unbroken
from verl_profiler.views.findings import finding_texts


def page(
    document: Mapping[str, Any],
    *,
    made: str,
    difference: Mapping[str, Any] | str | None = None,
    plain_characters: int = 1_000_000,
) -> str:
    """Write the page.

    Args:
        document: What `sections.document` returns.
        made: When and by which version, for the foot of the page.
        difference: What `diff_text.diff_parts` returns of two runs, or why they were not compared.
        plain_characters: A larger data block is compressed.
    """
    style = part("report.css")
    scripts = script("report")
    text = script_json(
        {
            **document,
            "colors": _colors(document),
        }
    )
    vega = bundle()
    large = len(text) > plain_characters
    return template("report.html").render(
        title=", ".join(document["about"]["runs"]),
        sentences=[*map(unbroken, document["sentences"])],
        findings=finding_texts(document["findings"]),
        sections={each["name"] for each in document["sections"]},
        difference=difference,
        made=made,
        stepped=bool(document["steps"]["rows"]),
        style=trusted(style),
        script=trusted(scripts),
        data=trusted(packed(text) if large else text),
        packed=large,
        vega=trusted(packed(vega)),
        policy="; ".join(
            (
                "default-src 'none'",
                f"script-src '{digest(scripts)}' '{digest(vega)}'",
                f"style-src '{digest(style)}'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
    )


def _colors(document: Mapping[str, Any]) -> dict[str, str]:
    """Give each phase, part and category that occurs its color."""
    colors = {**PART_COLORS, **PHASE_COLORS, **ENGINE_COLORS}
    table = document["time_tree"]
    if table["columns"]:
        place = table["columns"].index("phase")
        colors.update({row[place]: color(row[place]) for row in table["rows"] if row[place]})
    return colors
