r"""Names from files, made harmless: what a terminal would obey, or hide, becomes an escape.

    visible("tool\x1b[2J")  ->  r"tool\x1b[2J", of printable characters only

Escaped are control characters (C0, DEL, C1), format characters (bidirectional overrides, zero-width
ones, tags), line and paragraph separators, surrogates, noncharacters, and whatever Unicode lets a
terminal ignore.  A newline in a name would forge a line of ours, so it is escaped as well; text that
is laid out already goes through `visible_lines`.
"""

from __future__ import annotations

import functools
import re
from typing import Any, TypeGuard

from verl_profiler.events.json_values import is_mapping

# All but the newline: C0, DEL and C1; Cf; default ignorable; Zl and Zp; surrogates; noncharacters.
_HIDDEN = (
    "\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    "\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"
) + "".join(
    f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(1 << 16, 0x110000, 1 << 16)
)
_IN_LINES = re.compile(f"[{_HIDDEN}]")
_IN_NAMES = re.compile(f"[\n{_HIDDEN}]")
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}

# A name that is longer is cut: more than any path has.
_LONGEST = 4096
_NUMBERS = frozenset({int, float, bool, type(None)})


def visible(text: str) -> str:
    """Return a name with every hidden character escaped, newlines included; a very long one is cut."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text):,} characters)"
    return escaped(text)


def escaped(text: str) -> str:
    """Return the whole text with every hidden character escaped, newlines included."""
    if text.isascii() and text.isprintable():
        return text
    return _IN_NAMES.sub(_escape, text)


def visible_lines(text: str) -> str:
    """Return text of several lines with every hidden character but the newlines escaped."""
    return _IN_LINES.sub(_escape, text)


def shown(content: Any) -> Any:
    """Return a copy of dicts, lists, tuples and sets in which every string is `visible`."""
    if isinstance(content, str):
        return visible(content)
    if is_mapping(content):
        # Most values of a table are numbers, and its rows have the same keys: without the two
        # short ways this took most of the time of a summary of 10^5 names.
        return {
            _visible_key(key): value if type(value) in _NUMBERS else shown(value)
            for key, value in content.items()
        }
    if _is_collection(content):
        return type(content)(shown(each) for each in content)
    return content


def _is_collection(
    value: object,
) -> TypeGuard[list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]]:
    return isinstance(value, (list, tuple, set, frozenset))


@functools.lru_cache(1024)
def _visible_key(key: Any) -> Any:
    return shown(key)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    # A byte of a path that is not UTF-8.
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
