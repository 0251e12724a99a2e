"""Turn what a caller puts into an event into bounded JSON, without running code of the caller's.

An object's `__repr__`, `__str__`, `item` or properties may raise, block, or exit the thread.  So only
known types are read, through methods of those types; any other object is written as its type's name.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

# Characters of one value; bytes of all fields of one event, which keeps a line below 64 KiB.
TEXT_LIMIT = 8192
EXTRA_LIMIT = 56 * 1024

# Longer text is encoded, and so copied and cut, in the caller's thread.
_SHORT = 1024
_KEY_LIMIT = 256
_DEPTH_LIMIT = 16
_BYTES_LIMIT = 1024
# Characters of one value and values of one event, tried in turn until the fields fit.
_ATTEMPTS = ((TEXT_LIMIT, 1000), (2048, 500), (512, 200), (64, 50))

_SCALARS = frozenset({int, float, bool, type(None)})
_ENCODED_AS_THEY_ARE = frozenset(
    {dt.date, dt.timedelta, decimal.Decimal, uuid.UUID, range, complex}
)
_TIMES = frozenset({dt.datetime, dt.time})

_CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset)
# `type`, as checkers understand it.
_type_of: Callable[[Any], type[Any]] = type
# A subclass may have its own.
_arguments_of: Callable[[Any], tuple[Any, ...]] = BaseException.args.__get__  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
_items_of_dict = dict[Any, Any].items

_encode = msgspec.json.Encoder().encode


def snapshot(fields: dict[str, Any]) -> dict[str, Any] | msgspec.Raw:
    """Return fields that nobody can change or block on any more.

    Returns:
        The dict itself where all values are short text, numbers or None; else its JSON.
    """
    for value in fields.values():
        kind = _type_of(value)
        if kind is str:
            if len(value) > _SHORT:
                return msgspec.Raw(encode(fields))
        elif kind not in _SCALARS:
            return msgspec.Raw(encode(fields))
    return fields


def encode(fields: Any, limit: int = EXTRA_LIMIT) -> bytes:
    """Return a JSON object of at most `limit` bytes.

    Long text is cut with its length, long and deep containers with the number of what they held.
    """
    for text_limit, values in _ATTEMPTS:
        try:
            data = _encode(_Bounded(text_limit, values).plain(fields))
        except Exception as error:  # noqa: BLE001  a dict that another thread changes meanwhile
            return _encode({"unencodable": type(error).__name__})
        if len(data) <= limit:
            return data
    return _encode({"unencodable": "too large"})


def plain(value: Any) -> Any:
    """Return what JSON can hold of a value, bounded; for what an encoder does not take."""
    return _Bounded(*_ATTEMPTS[0]).plain(value)


def text(value: str, limit: int = TEXT_LIMIT) -> str:
    """Return exact, encodable text of at most `limit` characters, with the length if it is cut."""
    exact = value if type(value) is str else str.__str__(value)
    if len(exact) > limit:
        exact = f"{exact[:limit]}… ({len(exact):,} characters)"
    if not exact.isascii():
        # Lone surrogates cannot be encoded.
        exact = exact.encode("utf-8", "backslashreplace").decode()
    return exact


class _Bounded:
    """Copies one value, as far as its bounds allow."""

    def __init__(self, text_limit: int, values: int) -> None:
        self._text_limit = text_limit
        self._values_left = values
        self._open: set[int] = set()

    def plain(self, value: Any, depth: int = 0) -> Any:
        kind = _type_of(value)
        self._values_left -= 1
        if kind is str:
            return text(value, self._text_limit)
        if kind is int:
            return _integer(value)
        if kind in _SCALARS:
            return value
        if issubclass(kind, _CONTAINERS):
            return self._container(value, kind, depth)
        try:
            return self._object(value, kind, depth)
        except Exception:  # noqa: BLE001  an object that is not what its type promises
            return f"<{_name(kind)} object>"

    def _container(self, value: Any, kind: type[Any], depth: int) -> Any:
        # A subclass may have methods of its own.
        base: Any = next(base for base in _CONTAINERS if issubclass(kind, base))
        size = base.__len__(value)
        if id(value) in self._open:
            return "<cycle>"
        if depth >= _DEPTH_LIMIT:
            return f"<{kind.__name__} of {size:,}, nested too deeply>"
        self._open.add(id(value))
        try:
            if base is dict:
                return self._mapping(_items_of_dict(value), size, depth)
            return self._sequence(base.__iter__(value), size, depth)
        finally:
            self._open.discard(id(value))

    def _mapping(self, items: Iterable[tuple[Any, Any]], size: int, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for number, (key, value) in enumerate(items):
            if self._values_left <= 0:
                made["…"] = f"{size - number:,} more"
                break
            name = self._key(key)
            made[name if name not in made else f"{name} #{number}"] = self.plain(value, depth + 1)
        return made

    def _sequence(self, items: Iterable[Any], size: int, depth: int) -> list[Any]:
        made: list[Any] = []
        for number, value in enumerate(items):
            if self._values_left <= 0:
                made.append(f"… {size - number:,} more")
                break
            made.append(self.plain(value, depth + 1))
        return made

    def _key(self, key: Any) -> str:
        kind = _type_of(key)
        limit = min(self._text_limit, _KEY_LIMIT)
        if issubclass(kind, str):
            return text(key, limit)
        if kind is tuple and all(type(part) is str or type(part) in _SCALARS for part in key):
            return text(repr(key), limit)
        return text(str(self.plain(key, _DEPTH_LIMIT)), limit)

    def _object(self, value: Any, kind: type[Any], depth: int) -> Any:
        if issubclass(kind, enum.Enum):
            return self.plain(object.__getattribute__(value, "_value_"), depth + 1)
        if issubclass(kind, str):
            return text(value, self._text_limit)
        if issubclass(kind, int):
            return _integer(int.__int__(value))
        if issubclass(kind, float):
            return float.__float__(value)
        if kind in _ENCODED_AS_THEY_ARE:
            return value if kind not in (range, complex) else str(value)
        if kind in _TIMES and type(value.tzinfo) in (type(None), dt.timezone):
            return value
        if kind in (bytes, bytearray):
            return bytes(value) if len(value) <= _BYTES_LIMIT else f"<{len(value):,} bytes>"
        if issubclass(kind, type):
            return text(type.__repr__(value), self._text_limit)
        if issubclass(kind, BaseException):
            arguments = _arguments_of(value)
            first = next(iter(arguments), None)
            message = f": {first}" if _type_of(first) is str else ""
            return text(f"{kind.__name__}{message}", self._text_limit)
        if issubclass(kind, pathlib.PurePath) and kind.__module__.startswith("pathlib"):
            return text(str(value), self._text_limit)
        return self._foreign(value, kind, depth)

    def _foreign(self, value: Any, kind: type[Any], depth: int) -> Any:
        for base in kind.__mro__:
            if base.__module__ == "numpy" and base.__name__ == "generic":
                return self.plain(base.item(value), depth + 1)  # type: ignore[attr-defined]
            if "__dataclass_fields__" in vars(base):
                return self.plain(object.__getattribute__(value, "__dict__"), depth)
        name = f"{kind.__module__}.{kind.__name__}"
        if name == "numpy.ndarray":
            if value.size == 1:
                return self.plain(value.item(), depth + 1)
            return f"<array of {value.dtype}, shape {list(value.shape)}>"
        torch = sys.modules.get("torch")
        if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
            # Reading one from a device would wait for the device.
            if value.numel() == 1 and value.device.type == "cpu":
                return self.plain(value.item(), depth + 1)
            return f"<tensor of {value.dtype}, shape {list(value.shape)}, on {value.device}>"
        if name in ("torch.device", "torch.dtype"):
            return str(value)
        return f"<{_name(kind)} object>"


def _integer(value: int) -> int | str:
    bits = value.bit_length()
    if bits <= 63:
        return value
    return str(value) if bits <= 256 else f"<integer of {bits:,} bits>"


def _name(kind: type[Any]) -> str:
    # The built-in representation of a class: <class 'module.Name'>.
    return text(type.__repr__(kind)[8:-2], _KEY_LIMIT)
