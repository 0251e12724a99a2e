"""Random damage: the reader never fails, and agrees with a slow, simple oracle on what is left."""

import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_profiler.reading.reader import load
from verl_profiler.reading.salvage import repair

STAMP = "2026-11-21T02:33:22.{:06d}+00:00"
GOOD = [
    json.dumps(
        {
            "timestamp": STAMP.format(number),
            "event": event,
            "duration_sec": number / 1e6,
            "extra": {"request_id": "r\u00e9", "turn": number, "tool": 'a"b\\'},
            "workid": 0,
            "step": 1,
        },
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    for number, event in enumerate(["turn", "tool_call", "engine_call", "request"])
]
WHOLE = b"".join(line + b"\n" for line in GOOD)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["2026-11-21T02:33:22+00:00", "infinity", "3", "", "\x00", "{", "["]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
keys = st.sampled_from(["timestamp", "event", "duration_sec", "extra", "workid", "step", "more"])
quick = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def read(content, header=None):
    """Read one file with these bytes; return end times by microsecond, and the problems."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_1" / "worker_0.jsonl"
        path.parent.mkdir()
        path.write_bytes(content)
        if header is not None:
            (Path(folder) / "processes").mkdir()
            (Path(folder) / "processes" / "worker_0.json").write_text(header, encoding="utf-8")
        with load(folder, cache=False) as run:
            rows = run.rows("SELECT end_us FROM events ORDER BY end_us")
            for table in ("requests", "turns", "engine_calls", "steps", "phases", "processes"):
                run.rows(f"SELECT * FROM {table}")
            return [row["end_us"] for row in rows], run.problems


def surely_good(content):
    """Return the undamaged lines of `content`."""
    return [line for line in content.split(b"\n") if line in GOOD]


@quick
@given(st.data())
def test_flipped_bytes_cost_only_their_lines(data):
    """Any byte may change to any other, several times over."""
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    good = surely_good(bytes(content))

    read_at, problems = read(bytes(content))

    begin = 1795228402000000
    assert {begin + GOOD.index(line) for line in good} <= set(read_at)
    assert len(read_at) <= bytes(content).count(b"\n") + 1
    assert len(good) == len(GOOD) or problems


@quick
@given(st.binary(max_size=400), st.integers(0, 4))
def test_inserted_bytes_cost_only_the_line_they_are_in(noise, position):
    """Garbage between lines, with or without newlines, of any encoding."""
    content = b"".join(line + b"\n" for line in GOOD[:position]) + noise + b"\n"
    content += b"".join(line + b"\n" for line in GOOD[position:])

    read_at, _ = read(content)

    # Two bytes at the very beginning may say that the whole file is UTF-16.
    if not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        assert len(read_at) >= len(surely_good(content)) >= 4


@quick
@given(st.lists(st.tuples(keys, json_values), min_size=1, max_size=4))
def test_any_value_of_any_type_in_any_field_is_survived(changes):
    """One line has wrong types; its neighbors are read, and the line is dropped or kept whole."""
    changed = {**json.loads(GOOD[1]), **dict(changes)}
    line = json.dumps(changed, separators=(",", ":")).encode()
    content = GOOD[0] + b"\n" + line + b"\n" + GOOD[2] + b"\n"

    read_at, problems = read(content)

    begin = 1795228402000000
    assert {begin, begin + 2} <= set(read_at)
    assert 2 <= len(read_at) <= 3
    if len(read_at) == 2:
        assert any("worker_0.jsonl:2:" in problem for problem in problems), problems


@quick
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "format",
                "name",
                "role",
                "rank",
                "clock",
                "probes",
                "counters",
                "ended",
                "updated",
                "host",
                "pid",
            ]
        ),
        json_values,
    )
)
def test_any_header_is_survived(header):
    """Headers are evidence, not truth."""
    read_at, _ = read(WHOLE, json.dumps(header))

    assert len(GOOD) == len(read_at)


def test_a_file_cut_at_any_byte_reads_as_its_whole_lines(tmp_path):
    """However a process dies, every line it finished is kept, and the rest is reported."""
    path, copy = tmp_path / "worker_0.jsonl", tmp_path / "copy"
    for cut in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:cut])

        problems = repair(path, copy, "worker_0.jsonl")

        kept = [json.loads(line) for line in copy.read_bytes().splitlines()]
        whole = WHOLE[:cut].count(b"\n")
        ended = WHOLE[:cut].split(b"\n")[-1]
        if ended in GOOD:
            whole, ended = whole + 1, b""
        assert [json.loads(line) for line in GOOD[:whole]] == kept
        assert bool(problems) == bool(ended)


@quick
@given(st.permutations(range(len(GOOD))))
def test_the_order_of_lines_does_not_matter(order):
    """Concurrent events end in any order."""
    straight = read(WHOLE)

    mixed = read(b"".join(GOOD[index] + b"\n" for index in order))

    assert straight == mixed
