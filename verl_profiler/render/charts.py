"""Charts as Vega-Lite specifications: plain dicts, made of channels, layers and panels.

    chart(
        "Half of the requests took 2.7 s or less",
        "my-run, all steps, training: 400 requests",
        panel(layer(rows, "line", x=quantity("duration_s", "duration [s]"), y=quantity("share"))),
    )

The same dict becomes a picture (`render`), a chart of the report page, and what `plot --spec` writes.
Drawing needs no browser and no network.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import re
import statistics
import struct
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from verl_profiler.events.json_values import is_mapping
from verl_profiler.events.whole_files import replace_file
from verl_profiler.reading.cache_folder import home
from verl_profiler.render.colors import GRID, INK, MUTED
from verl_profiler.render.frames import rounded
from verl_profiler.render.visible import shown, visible

Spec = dict[str, Any]
Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
# A name, a value per place (None draws nothing), and a color.
Series = tuple[str, Sequence[float | None], str]
# A name, rows with a step, the column to draw, a color, and dashes and gaps in pixels.
Line = tuple[str, Sequence[Row], str, str, Sequence[int]]
SOLID = (1, 0)

FORMATS = ("png", "svg")
# The format of a specification, as the names of its files end.
SPEC = "vl.json"
WIDTH = 760

_SNIPPET = "window.vegaEmbed = vegaEmbed; window.dispatchEvent(new Event('vega-ready'));"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# From light to dark in even steps of lightness; the first is for maps in which the least is nothing.
_WHITE_RAMP = ("#FFFFFF", "#8FBBDD", "#1B5A95", "#0B2A4F")
_RAMP = ("#D6E6F2", *_WHITE_RAMP[1:2], "#4B8CC2", *_WHITE_RAMP[2:])
# The opacity of what is pale, behind a color.
_PALE = "66"
# There is room for so many bars, their pieces, and points of a line, over steps.
_BARS = 250
_PIECES = 1_400
_POINTS = 250
# More bars than this have no gaps; up to so many points of a line are marked.
_TOUCHING = 60
_MARKED = 30
# Pixels of a letter, and between names, of few rows and of many.
_LETTER = 6.5
_ROW, _THIN_ROW, _MANY_ROWS = 21, 10, 30
# Letters in a line of a name, and the pixels of a further line.
_LINE, _LINE_HEIGHT = 60, 13
_BREAKS = f"(?!.{{0,{_LINE}}}$)(.{{30,{_LINE - 1}}}[ .:/_]|.{{{_LINE}}})"
_LINES = f"split(replace(datum.label, regexp('{_BREAKS}', 'g'), '$1\\n'), '\\n')"

# The label of a time on an axis.
_SECONDS = (
    "abs(datum.value) < 0.1 && datum.value ? format(datum.value * 1000, '.6~g') + ' ms' "
    ": format(datum.value, ',.6~g') + ' s'"
)

# Each panel has colors and a legend of its own.
_APART = {"scale": {"color": "independent", "shape": "independent", "strokeDash": "independent"}}

_TEXTS: Spec = {
    "labelColor": INK,
    "labelFontSize": 11,
    "labelLimit": 0,
    "titleColor": INK,
    "titleFontSize": 11,
    "titleFontWeight": "normal",
}
_THEME: Spec = {
    "background": "white",
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "padding": 10,
    "view": {"stroke": None},
    "axis": {**_TEXTS, "domainColor": MUTED, "gridColor": GRID, "tickColor": MUTED},
    "legend": {**_TEXTS, "orient": "bottom"},
    "title": {
        "anchor": "start",
        "color": INK,
        "fontSize": 12,
        "fontWeight": "normal",
        "frame": "group",
        "offset": 8,
        "subtitleColor": MUTED,
        "subtitleFontSize": 11,
        "subtitlePadding": 5,
    },
    "concat": {"spacing": 18},
    "line": {"strokeWidth": 1.6},
    "text": {"color": INK, "fontSize": 11},
    "rule": {"color": MUTED},
    "point": {"opacity": 1},
}


def check_installed() -> None:
    """Import the library that draws; a missing one ends a command before it reads anything."""
    importlib.import_module("vl_convert")


def chart(
    title: str,
    about: str,
    *panels: Spec,
    notes: str | Sequence[str] = (),
) -> Spec:
    """Put panels together into a specification.

    Args:
        title: The conclusion, with figures.
        about: Run, steps and how many of what.
        panels: From `panel`, one below the other.
        notes: What the picture leaves out and how to read it; below the panels.
    """
    listed = [notes] if isinstance(notes, str) else list(notes)
    body: Spec
    if len(panels) == 1:
        body = {"width": WIDTH, **panels[0]}
        # Without others, a panel has no title of its own.
        about = "; ".join(filter(None, (about, body.pop("title", ""))))
    else:
        body = {"vconcat": [{"width": WIDTH, **each} for each in panels], "resolve": _APART}
    head: Spec = {
        "text": textwrap.wrap(title, 96, break_on_hyphens=False) or [""],
        "subtitle": textwrap.wrap(about, 130),
        "fontSize": 15,
        "fontWeight": "bold",
        "frame": "bounds",
        "offset": 14,
    }
    made = {"$schema": _SCHEMA, "title": head, "config": copy.deepcopy(_THEME), **body}
    made["usermeta"] = {"notes": listed}
    # Names come from the run.
    return shown(made)


def panel(*layers: Spec | list[Spec], title: str = "", height: float = 0) -> Spec:
    """Lay layers over each other; their axes are shared.

    Args:
        layers: From `layer` and the functions that make several of them.
        title: Of the panel, where there are several.
        height: In pixels; without one, a layer has names on its vertical axis, which need so much.
    """
    flat: list[Spec] = []
    for each in layers:
        flat += each if isinstance(each, list) else [each]
    made: Spec = {"layer": flat}
    if title:
        made["title"] = title
    height = height or next(
        each["encoding"]["y"]["scale"]["domain"] and _names_height(each["encoding"]["y"])
        for each in flat
        if "domain" in each.get("encoding", {}).get("y", {}).get("scale", {})
    )
    return {**made, "height": height}


def _names_height(channel: Spec) -> int:
    listed = channel["scale"]["domain"]
    count = max(len(listed), 2)
    lines = max((1 + len(re.findall(_BREAKS, name)) for name in listed), default=1)
    return count * ((_ROW if count <= _MANY_ROWS else _THIN_ROW) + _LINE_HEIGHT * max(lines - 1, 0))


def layer(
    rows: Sequence[Row],
    mark: str | Spec,
    *,
    tip: Sequence[str] = (),
    **channels: Any,
) -> Spec:
    """Draw a mark per row.

    Args:
        rows: Their fields that channels name are kept.
        mark: Of Vega-Lite: its name, or a dict with a type and looks.
        tip: Fields that the page shows of what is pointed at.
        channels: x, y, x2, y2, color, opacity, text, …: a channel (`quantity`, …), or a constant.
    """
    encoding: Spec = {
        name: each if is_mapping(each) else {"value": each} for name, each in channels.items()
    }
    fields = {each["field"]: None for each in encoding.values() if "field" in each}
    fields |= dict.fromkeys(tip)
    if tip:
        encoding["tooltip"] = [
            {"field": name}
            | (
                {"type": "quantitative", "format": ",.4~g"}
                if any(isinstance(row.get(name), float | int) for row in rows)
                else {}
            )
            for name in tip
        ]
    kept = [{name: rounded(row.get(name)) for name in fields} for row in rows]
    return {"data": {"values": kept}, "mark": mark, "encoding": encoding}


def quantity(
    field: str,
    title: str | None = None,
    *,
    form: str = "",
    ends: tuple[float | None, float | None] = (0, None),
    **axis: Any,
) -> Spec:
    """Return a channel of numbers; its axis begins at 0 unless `ends` have another begin.

    Args:
        field: Of the rows.
        title: Of the axis, with its unit; None for none.
        form: A number format of d3: `%` for shares; `s` for seconds, which are labeled with their unit.
        ends: Of the axis; None where the numbers end.
        axis: More properties of the axis.
    """
    scale: Spec = {"zero": ends[0] == 0}
    if ends[0]:
        scale["domainMin"] = rounded(ends[0])
    if ends[1] is not None:
        # Sums of floats differ in their last digits.
        scale["domainMax"] = rounded(ends[1])
    if form == "s":
        axis["labelExpr"] = _SECONDS
    elif form:
        axis["format"] = ".3~%" if form == "%" else form
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": {"tickCount": 5, **axis},
    }


def steps_axis(steps: Sequence[float], field: str = "step", room: float = 0.6) -> Spec:
    """Return a horizontal channel of steps: whole numbers, a missing step leaves a gap; `room` is at both ends."""
    ends = [min(steps) - room, max(steps) + room] if steps else [0, 1]
    axis: Spec = {"format": "d", "grid": False, "tickMinStep": 1, "tickCount": 12}
    if steps and ends[1] - ends[0] < 12:
        # Vega would mark halves of few steps.
        axis["values"] = list(range(int(min(steps)), int(max(steps)) + 1))
    return {
        "field": field,
        "type": "quantitative",
        "title": "step",
        "scale": {"domain": ends, "nice": False, "zero": False},
        "axis": axis,
    }


def names(field: str, order: Sequence[str]) -> Spec:
    """Return a vertical channel of names, the first on top.

    None is cut: long ones have several lines.  Of very many, some are left out.
    """
    many = len(order) > _MANY_ROWS
    long = any(len(name) > _LINE for name in order)
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(order)},
        "axis": {
            "domain": False,
            "grid": False,
            "ticks": False,
            "labelFontSize": 9 if many else 11,
            "labelOverlap": many,
            **({"labelExpr": _LINES} if long else {}),
        },
    }


def colored(field: str, colors: Mapping[str, str], *, legend: bool = True) -> Spec:
    """Return a channel that colors by meaning; with `legend`, the names are below the panel."""
    longest = max(map(len, colors), default=1)
    columns = max(1, min(len(colors), WIDTH // (7 * longest + 34)))
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(colors), "range": list(colors.values())},
        "legend": {"columns": columns} if legend else None,
    }


def ramp(field: str, title: str, top: float) -> Spec:
    """Return a channel of shades of seconds from white, which is 0, to the darkest, which is `top`."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"range": list(_WHITE_RAMP), "interpolate": "lab", "domain": [0, top]},
        "legend": {"gradientLength": 200, "direction": "horizontal", "tickCount": 4}
        | {"labelExpr": _SECONDS},
    }


def tints(count: int) -> list[str]:
    """Return so many colors of the sequence, from light to dark; a single one is the middle."""
    made: list[str] = []
    for place in range(count):
        at = (place / (count - 1) if count > 1 else 0.5) * (len(_RAMP) - 1)
        first = min(int(at), len(_RAMP) - 2)
        ends = [[int(code[i : i + 2], 16) for i in (1, 3, 5)] for code in _RAMP[first : first + 2]]
        parts = (round(low + (high - low) * (at - first)) for low, high in zip(*ends, strict=True))
        made.append("#" + "".join(f"{part:02X}" for part in parts))
    return made


def pile(places: Sequence[Any], series: Iterable[Series]) -> Rows:
    """Stack values at each place, negative ones below zero: rows with at, part, value, low and high."""
    tops: dict[tuple[int, bool], float] = {}
    rows: Rows = []
    for name, values, _ in series:
        for place, value in enumerate(values):
            if not value or not math.isfinite(value):
                continue
            key = place, value > 0
            low = tops.get(key, 0.0)
            tops[key] = low + value
            rows.append(
                {"at": places[place], "part": name, "value": value, "low": low, "high": low + value}
            )
    return rows


def step_bars(
    steps: Sequence[int],
    series: Iterable[Series],
    title: str,
    *,
    pale: Iterable[str] = (),
    form: str = "",
) -> list[Spec]:
    """Stack bars over steps, from the bottom up; negative values hang below zero.

    Of more steps than there is room for, neighbors share a bar of their mean, which the axis says.

    Args:
        steps: Those of the axis.
        series: What to stack.
        title: Of the vertical axis, with its unit.
        pale: Names that are drawn lighter, since they are no part of what is measured.
        form: Of the vertical axis.
    """
    parts, lighter = _drawn(series), {*pale}
    each, groups = _neighbors(steps, min(_BARS, _PIECES // max(len(parts), 1)))
    places = [min(steps) + group * each + (each - 1) / 2 for group in groups]
    listed = [
        (name, [sum(values[at] or 0 for at in own) / len(own) for own in groups.values()], code)
        for name, values, code in parts
    ]
    touching = len(groups) > _TOUCHING
    half = each * (0.5 if touching else 0.39)
    rows = [
        row | {"from": row["at"] - half, "to": row["at"] + half, "step": row["at"]}
        for row in pile(places, listed)
    ]
    return [
        layer(
            rows,
            {"type": "rect", "stroke": "white", "strokeWidth": 0 if touching else 0.4},
            tip=("step", "part", "value"),
            x=steps_axis(steps, "from"),
            x2={"field": "to"},
            y=quantity("low", title + _mean_of(each), form=form),
            y2={"field": "high"},
            color=colored(
                "part", {name: code + _PALE * (name in lighter) for name, _, code in parts}
            ),
        )
    ]


def _neighbors(steps: Sequence[int], most: int) -> tuple[int, dict[int, list[int]]]:
    """Return how many neighboring steps share a place, and the places with their steps' indices."""
    first, last = min(steps), max(steps)
    each = 1 if len(steps) <= most else -(-(last - first + 1) // most)
    groups: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        groups.setdefault((step - first) // each, []).append(at)
    return each, groups


def _mean_of(each: int) -> str:
    return f", mean of {each} steps each" if each > 1 else ""


def _drawn(series: Iterable[Series]) -> list[Series]:
    """Leave out parts that are nowhere; the legend names what can be seen."""
    listed = list(series)
    return [part for part in listed if any(part[1])] or listed


def name_bars(
    order: Sequence[str],
    series: Iterable[Series],
    title: str,
    *,
    above: str = "",
    texts: Sequence[str] = (),
) -> Spec:
    """Return a panel of stacked horizontal bars of seconds with their names, the first on top.

    Args:
        order: A name per bar; equal ones are numbered.
        series: What to stack; a part without a name is in no legend.
        title: Of the horizontal axis.
        above: The title of the panel, where there are several.
        texts: At the ends of the bars.
    """
    listed = _drawn(series)
    own = _unlike(order)
    rows = pile(own, listed)
    ends = {
        name: max((row["high"] for row in rows if row["at"] == name), default=0) for name in own
    }
    # The longest text has room behind the longest bar, also where the names take some of the width.
    room = WIDTH - 120
    left = max(room - _LETTER * max(map(len, texts), default=0), room / 3)
    top = max(ends.values(), default=0) * room / left if texts else None
    y = names("at", own)
    x = quantity("low", title, form="s", ends=(0, top or None))
    codes = {name: code for name, _, code in listed}
    drawn = [
        layer(
            rows,
            {"type": "bar", "stroke": "white", "strokeWidth": 0.4, "height": {"band": 0.74}},
            tip=("at", "value") if "" in codes else ("at", "part", "value"),
            x=x,
            x2={"field": "high"},
            y=y,
            color=colored("part", codes, legend="" not in codes),
        )
    ]
    if texts:
        written = [
            {"at": name, "high": ends[name], "text": text}
            for name, text in zip(own, texts, strict=True)
        ]
        mark = {"type": "text", "align": "left", "baseline": "middle", "dx": 6}
        drawn.append(layer(written, mark, x={**x, "field": "high"}, y=y, text={"field": "text"}))
    return panel(drawn, title=above)


def _unlike(order: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    made: list[str] = []
    for name in map(visible, order):
        counts[name] = counts.get(name, 0) + 1
        made.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return made


def step_lines(
    steps: Sequence[int],
    series: Iterable[Line],
    title: str,
    *,
    form: str = "",
) -> list[Spec]:
    """Draw lines over steps, broken where steps of a line's own stride are missing.

    Of very many steps, neighbors share a point, their mean, which the axis says.

    Args:
        steps: Those of the axis.
        series: What to draw; rows without a value are left out.
        title: Of the vertical axis, with its unit.
        form: Of the vertical axis.
    """
    each, groups = _neighbors(steps, _POINTS)
    place = {
        steps[at]: min(steps) + group * each + (each - 1) / 2
        for group, own in groups.items()
        for at in own
    }
    rows: Rows = []
    colors: dict[str, str] = {}
    dashes: dict[str, Sequence[int]] = {}
    marked = False
    for name, own, key, code, dash in series:
        among: dict[float, list[float]] = {}
        for row in own:
            if row[key] is not None and row["step"] in place:
                among.setdefault(place[row["step"]], []).append(row[key])
        if not among:
            continue
        values = {at: statistics.fmean(found) for at, found in among.items()}
        colors[name], dashes[name] = code, dash
        points = _gapped(values)
        marked = marked or len(values) <= _MARKED or len(points) > len(values)
        rows += [{"step": step, "line": name, "value": value} for step, value in points]
    color = colored("line", colors)
    color["legend"]["symbolType"] = "stroke"
    mark: Spec = {"type": "line", "point": {"size": 22, "filled": True} if marked else False}
    more: Spec = {"color": color}
    if {*dashes.values()} - {SOLID}:
        more["strokeDash"] = color | {
            "scale": {"domain": list(dashes), "range": [*map(list, dashes.values())]}
        }
    return [
        layer(
            rows,
            mark,
            tip=("step", "line", "value"),
            x=steps_axis(steps),
            y=quantity("value", title + _mean_of(each), form=form),
            **more,
        )
    ]


def _gapped(values: Mapping[float, float]) -> list[tuple[float, float | None]]:
    """Return the points of a line that is broken where steps of its own stride are missing."""
    steps = sorted(values)
    strides = [after - before for before, after in pairwise(steps)]
    stride = statistics.median_low(strides) if strides else 1
    points: list[tuple[float, float | None]] = []
    for step in steps:
        if points and step - points[-1][0] > stride:
            points.append((points[-1][0] + stride / 2, None))
        points.append((step, values[step]))
    return points


def fewer(rows: Rows, key: str, every: int) -> Rows:
    """Keep of so many successive rows of a line, twice, the highest and the lowest."""
    if every <= 1:
        return rows
    kept: Rows = []
    for at in range(0, len(rows), 2 * every):
        group = rows[at : at + 2 * every]
        values = [row[key] or 0 for row in group]
        kept += [
            group[end] for end in sorted({values.index(min(values)), values.index(max(values))})
        ]
    return kept


def whole(spec: Spec) -> Spec:
    """Return a specification with its notes drawn below the panels."""
    lines = [line for note in spec["usermeta"]["notes"] for line in textwrap.wrap(note, 140)]
    if not lines:
        return spec
    head = {key: spec[key] for key in ("$schema", "title", "config", "usermeta")}
    body = {key: each for key, each in spec.items() if key not in head}
    below: Spec = {
        "width": WIDTH,
        "height": 14 * len(lines),
        "data": {"values": [{"notes": 1}]},
        "mark": {"type": "text", "align": "left", "baseline": "top", "x": 0, "y": 0}
        | {"color": MUTED, "fontSize": 10, "lineHeight": 14},
        "encoding": {"text": {"value": lines}},
    }
    return {**head, "vconcat": [body, below], "resolve": _APART}


def render(spec: Spec, form: str, *, description: str = "") -> bytes:
    """Draw a specification; the same one gives the same bytes.

    Args:
        spec: From `chart`.
        form: One of `FORMATS`, or `SPEC` for the specification as JSON.
        description: PNG and SVG files carry it near their beginning.
    """
    if form == SPEC:
        # For any editor of Vega-Lite.
        text = json.dumps(whole(spec), indent=1, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()
    import vl_convert

    drawn: Any = vl_convert
    text = json.dumps(whole(spec), allow_nan=False)
    if form == "svg":
        svg: str = drawn.vegalite_to_svg(text)
        return svg.replace(">", f"><desc>{description}</desc>", 1).encode()
    picture: bytes = drawn.vegalite_to_png(text, scale=1.5)
    return _described(picture, description) if description else picture


def bundle() -> str:
    """Return Vega with all it needs as one script module, which hands `vegaEmbed` to the page.

    Making it takes a second, so it is kept in the home of the caches.
    """
    import vl_convert

    drawn: Any = vl_convert
    place = home() / f"vega-{drawn.__version__}-{zlib.crc32(_SNIPPET.encode()):08x}.js"
    with contextlib.suppress(OSError):
        return place.read_text(encoding="utf-8")
    text: str = drawn.javascript_bundle(_SNIPPET)
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, text.encode())
    return text


def _described(picture: bytes, description: str) -> bytes:
    """Put a text behind the header of a PNG file."""
    content = b"tEXtDescription\0" + description.encode("latin-1", "replace")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    # The signature and the header are 33 bytes.
    return picture[:33] + chunk + picture[33:]
