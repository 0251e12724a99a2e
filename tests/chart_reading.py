"""What one can read in a chart: its texts, and the rows that it draws."""

__all__ = ["channels", "data_in", "inner", "panels_of", "title_of", "words"]


def inner(spec):
    """Yield the layers and panels of a chart, however deep."""
    for key in ("layer", "vconcat"):
        for each in spec.get(key, ()):
            yield each
            yield from inner(each)


def title_of(spec):
    """Return the title of a chart, its lines joined."""
    return " ".join(spec["title"]["text"])


def panels_of(spec):
    """Return the panels of a chart, the first on top."""
    return spec.get("vconcat") or [spec]


def data_in(spec, field=None):
    """Return the rows of all layers, or those of layers that draw a field."""
    found = []
    for each in (spec, *inner(spec)):
        fields = {channel.get("field") for channel in channels(each).values()}
        if field is None or field in fields:
            found += each.get("data", {}).get("values", [])
    return found


def channels(spec):
    """Return the encoding of one layer, without tooltips."""
    encoding = spec.get("encoding", {})
    return {name: each for name, each in encoding.items() if name != "tooltip"}


def every_channel(spec):
    """Yield the channels of all layers by name."""
    for each in (spec, *inner(spec)):
        yield from channels(each).items()


def words(spec):
    """Return every text of a chart: titles, notes, axes, names and texts inside it."""
    found = [*spec["title"]["text"], *spec["title"]["subtitle"], *spec["usermeta"]["notes"]]
    found += [each.get("title") for each in inner(spec)]
    for name, channel in every_channel(spec):
        found.append(channel.get("title"))
        scale = channel.get("scale", {})
        if channel.get("type") == "nominal" and channel.get("legend", True):
            found += scale.get("domain", [])
        if name == "text":
            found += [row[channel["field"]] for row in data_in(spec, channel["field"])]
    return "\n".join(text for text in found if text)
