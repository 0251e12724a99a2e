"""Files of a run are regular files of bounded size and depth; everything else is a message."""

import errno
import json
import os

import pytest

from verl_profiler.events.files import (
    UnusableFileError,
    open_regular,
    parse_json,
    read_bounded,
    read_object,
    reason_of,
    status_of_regular,
)


def test_a_small_hole_is_no_fault(tmp_path):
    path = tmp_path / "holes"
    with path.open("wb") as file:
        file.truncate(16 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"end\n")

    assert read_bounded(path, (16 << 20) + 4)[-4:] == b"end\n"
    with pytest.raises(UnusableFileError, match="larger than"):
        read_bounded(path, (16 << 20) + 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("9223372036854775808", 2.0**63),
        ("1" + "0" * 308, 1e308),
        ("1" + "0" * 309, None),
        ("9" * 100_000, None),
        ("1e999", None),
        ("-Infinity", None),
        ("NaN", None),
        (r'"\ud800"', "\ufffd"),
        (r'{"\udfff": "\ud83d\ude00"}', {"\ufffd": "\U0001f600"}),
        ('\ufeff{"a": [1, 2.5, null, true]}', {"a": [1, 2.5, None, True]}),
    ],
)
def test_json_holds_only_what_can_be_written_again(text, value):
    assert parse_json(text.encode()) == value
    assert parse_json(b'{"a": "\xff\xfe"}') == {"a": "\ufffd\ufffd"}
    assert json.dumps(parse_json(text.encode()), allow_nan=False).encode()


@pytest.mark.parametrize("depth", [61, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_a_value_error(depth, opening):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(opening * depth + "1" + {"[": "]"}.get(opening, "}") * depth)


def test_names_that_no_file_can_have_are_an_os_error():
    for name in ("a\0b", "x" * 5000, "/dev/null/x"):
        with pytest.raises(OSError):
            open_regular(name)
        with pytest.raises(OSError):
            status_of_regular(name)


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"null", b'"text"', b"{", b"\0" * 100])
def test_what_is_no_object_is_a_value_error(tmp_path, content):
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(ValueError, match=r"not (a )?JSON"):
        read_object(tmp_path / "file")


def test_a_file_that_its_server_dropped_comes_with_advice():
    """The problem line of one file, as Python and as duckdb put it."""
    error = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/run/step_1/worker_0.jsonl")

    for each in (error, RuntimeError("IO Error: Could not read from file: Stale file handle")):
        assert "run the command again" in reason_of(each)
    assert "again" not in reason_of(PermissionError(errno.EACCES, "Permission denied"))
