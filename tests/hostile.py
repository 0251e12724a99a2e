"""Values that no file of a run should hold, and how to put them into one."""

import json

# As text of JSON, because some of them have no other form.
VALUES = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "fraction": "0.5",
    "above int32": "2147483648",
    "above int64": "9223372036854775808",
    "310 digits": "9" * 310,
    "5000 digits": "9" * 5000,
    "large": "1.7e308",
    "overflow": "1e999",
    "minus overflow": "-1e999",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "empty text": '""',
    "text": '"text"',
    "date without zone": '"2026-11-21T02:33:22"',
    "year 0": '"0000-00-00T00:00:00+00:00"',
    "year 9999": '"9999-12-31T23:59:59+00:00"',
    "surrogate": r'"\ud800"',
    "control characters": r'"\u001b[31m\u0000\u202e"',
    "long text": '"' + "x" * 100_000 + '"',
    "empty list": "[]",
    "list": '[1, "a", null]',
    "lists": "[[], [[]], [1, 2, 3]]",
    "empty object": "{}",
    "object": '{"a": null, "b": {"c": []}}',
    "object of huge numbers": '{"a": ' + "9" * 400 + ', "b": 1e999}',
    "nested": "[" * 100_000 + "]" * 100_000,
    "not JSON": "]",
}
_PLACE = "placed here"


def text_with(content, path, value):
    """Return `content` as JSON with the text `value` at `path`, a list of keys and indexes."""
    content = json.loads(json.dumps(content))
    if not path:
        return value
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = _PLACE
    return json.dumps(content).replace(json.dumps(_PLACE), value)


def paths_of(content, path=()):
    """Yield the path of every value within, and of the whole."""
    yield path
    if isinstance(content, dict):
        for key in content:
            yield from paths_of(content[key], (*path, key))
    if isinstance(content, list) and content:
        yield from paths_of(content[0], (*path, 0))
