r"""What a name from a file can do to a terminal: nothing."""

import sys
import unicodedata

import pytest

from verl_profiler.render.visible import escaped, visible

DANGEROUS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_no_character_that_unicode_calls_a_control_or_format_passes():
    """Held against the character database of this Python, code point by code point."""
    hidden = [
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in DANGEROUS or code & 0xFFFE == 0xFFFE
    ]
    made = escaped("".join(map(chr, hidden)))

    assert len(hidden) > 2200
    assert made.isascii()
    assert made.isprintable()


def test_letters_marks_and_symbols_pass():
    """Names in any script are read as they are written."""
    kept = "".join(
        chr(code)
        for code in range(0x20, 0x3000)
        if unicodedata.category(chr(code))[0] in "LNPS"
        # Letters that are blank.
        and code not in (0x115F, 0x1160)
    )
    for name in (kept, "工具 検索 도구", "naïve café 🚀", r"C:\x1b[0m", "a b"):
        assert name == escaped(name)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("\x9b31m", r"\x9b31m"),
        ("two\nlines\tand\rmore", r"two\nlines\tand\rmore"),
        ("abc\u202etxt.exe", r"abc\u202etxt.exe"),
        ("\U000e0041", r"\U000e0041"),
        # The byte 0xff in a path.
        ("p\udcff", r"p\xff"),
        ("\ud800", r"\ud800"),
    ],
)
def test_escapes_are_those_of_python(text, escaped):
    """A reader can copy them into Python, or `printf`."""
    assert escaped == visible(text)


def test_a_very_long_name_is_cut_with_its_length_and_a_whole_text_can_be_had():
    """A word of a command to paste must be whole; a table need not be a megabyte wide."""
    assert visible("x" * 4096) == "x" * 4096
    assert visible("x" * 900_000) == "x" * 4096 + "… (900,000 characters)"
    assert escaped("x" * 900_000) == "x" * 900_000
