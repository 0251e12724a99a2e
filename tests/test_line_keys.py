"""Lines as the recorder writes them are read by a shorter query, and give the same rows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_profiler import conversion, line_keys
from verl_profiler.line_keys import count_keys
from verl_profiler.reader import load

REGULAR = {
    "timestamp": "2026-11-21T02:33:22.000001+00:00",
    "event": "engine_call",
    "duration_sec": 0.25,
    "extra": {"request_id": "r1", "turn": 0, "prompt_tokens": 7, "validate": True},
    "workid": 0,
    "step": 1,
}


def changed(**fields):
    content = {**REGULAR, **fields}
    return {key: value for key, value in content.items() if value is not None}


def with_extra(**fields):
    return changed(extra={**REGULAR["extra"], **fields})


def read(folder, lines):
    """Write a run of these lines; return its rows, its problems, and whether it was regular."""
    path = folder / "step_1" / "worker_0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with load(folder) as run:
        rows = run.rows("SELECT * FROM event_fields ORDER BY ALL")
        problems = run.problems
    stamp = json.loads(next((folder / ".cache").rglob("stamp.json")).read_text())
    return rows, problems, [part["regular"] for part in stamp["parts"].values()]


def compact(content):
    return json.dumps(content, separators=(",", ":"))


ALIKE = {
    "all fields": REGULAR,
    "no extra": changed(extra=None),
    "no step and no worker": changed(step=None, workid=None),
    "an event with other fields": changed(
        event="profiler_cost", extra={"events": 5, "bytes": 9, "wrapper_s": 0.1}
    ),
    "other fields in an event of the user": changed(
        event="mine", extra={"mine": {"deep": [True, {}]}, "tool": "t", "flag": True}
    ),
    "an empty extra": changed(extra={}),
    "text with quotes": with_extra(tool='say "yes"'),
}
UNLIKE = {
    "a field of the user in our event": with_extra(mine=1),
    "a key beside the known ones": changed(mine=1),
    "null": with_extra(tool=None),
    "false": with_extra(validate=False),
    "a fraction of a token": with_extra(prompt_tokens=7.5),
    "true for a number": changed(duration_sec=True),
    "true for text": with_extra(tool=True),
    "an object for text": with_extra(tool={"a": 1}),
    "text for a number": changed(duration_sec="soon"),
    "a list for extra": changed(extra=[]),
    "text for extra": changed(extra="none"),
    "a turn of one half": with_extra(turn=0.5),
    "text that looks like a key": with_extra(tool='{"a":1}'),
    "no time": changed(timestamp=None),
}


@pytest.mark.parametrize("case", [*ALIKE, *UNLIKE])
def test_both_queries_give_the_same(case, tmp_path, monkeypatch):
    """The shorter query is used where it gives what the longer one gives, and nowhere else."""
    lines = [compact(REGULAR), compact({**ALIKE, **UNLIKE}[case]), compact(REGULAR)]

    rows, problems, regular = read(tmp_path / "run", lines)
    monkeypatch.setattr(conversion, "_IRREGULAR_PARTS", 0)
    whole_rows, whole_problems, never = read(tmp_path / "whole", lines)

    for row in (*rows, *whole_rows):
        row.pop("run")
    assert ([case in ALIKE], [False]) == (regular, never)
    assert (whole_rows, whole_problems) == (rows, problems)


def test_spaces_behind_keys_are_for_the_longer_query(tmp_path):
    """Python's own json writes them."""
    rows, _, regular = read(tmp_path, [json.dumps(REGULAR)])

    assert [False] == regular
    assert 7 == rows[0]["prompt_tokens"]


def test_after_some_irregular_parts_none_is_read_twice(tmp_path, monkeypatch):
    """A run of a user's own fields is not read twice to its end."""
    monkeypatch.setattr(conversion, "_PART_BYTES", 1)
    asked = []
    original = conversion.build_part
    monkeypatch.setattr(
        conversion,
        "build_part",
        lambda *args, **how: asked.append(how["regular"]) or original(*args, **how),
    )
    for step in range(4):
        path = tmp_path / f"step_{step}" / "worker_0.jsonl"
        path.parent.mkdir()
        path.write_text(compact(with_extra(mine=step)) + "\n")

    with load(tmp_path) as run:
        rows = run.rows("SELECT step FROM events")

    assert [True, True, False, False] == asked
    assert 4 == len(rows)


@given(st.lists(st.sampled_from(['"', '":', ":", "t", "{", "true", "é", "a", "\n", "\\"])))
def test_keys_are_counted_across_blocks(tmp_path_factory, pieces):
    """Wherever a block ends, each end of a key is counted once."""
    content = "".join(pieces).encode()
    path = tmp_path_factory.mktemp("keys") / "lines"
    path.write_bytes(content)
    ends = [content[place : place + 3] for place in range(len(content) - 2)]
    keys = [end for end in ends if end[:2] == b'":']

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_keys, "_BLOCK_BYTES", 3)
        counted = count_keys(path)

    assert len(keys) + sum(end[2:] in (b"t", b"{") for end in keys) == counted


def test_a_file_with_spaces_behind_keys_is_not_counted(tmp_path):
    """Neither at the end of a block."""
    path = tmp_path / "lines"
    path.write_bytes(b"x" * ((1 << 17) - 2) + b'": 1')

    assert count_keys(path) is None
