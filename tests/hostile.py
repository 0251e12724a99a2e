"""How to put a value that no file of a run should hold into one."""

import json

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
