"""The contract has every field that is written."""

import ast
import dataclasses
import json
import math
import re
import tarfile
from pathlib import Path

import pytest

from verl_profiler import plugin
from verl_profiler.capture import session
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.capture.record import CaptureRecord
from verl_profiler.events.fields import CAPTURE, FIELDS, HEADER, IDENTITY, LINE, fields_of
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.nodes import clock
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity

ROOT = Path(__file__).parents[2]
# Real runs: of every trainer, and one with TransferQueue tracing.
RECORDED = sorted((ROOT / "tests" / "data").glob("**/*run.tar.gz"))
JSON_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "list": list,
    "object": dict,
}
# What puts fields into events: the probes, and what records without one.
WRITERS = [
    *(ROOT / "verl_profiler" / "probes").glob("*.py"),
    *(
        ROOT / "verl_profiler" / "recording" / f"{name}.py"
        for name in (
            "api",
            "call",
            "context",
            "devices",
            "device_timing",
            "event_loop_lag",
        )
    ),
    ROOT / "verl_profiler" / "transfer_queue" / "calls.py",
]
# Keys of dictionaries there that are no events' fields: sums by stage, devices in headers, and what
# engines show in evidence.
NO_FIELDS = {"GET", "COMPUTE", "PUT", "uuid", "bus_id", "power_limit_w"} | {
    *("age_s", "loads", "paused", "requests", "unanswered", "host_used_bytes")
}


# In headers of runs that were recorded before.
GONE = {"pruned_events", "looks", "clock.readings"}


def described(value, known, prefix=""):
    """Yield each path of an object, its value, and its field; None for those that a table lacks."""
    for key, each in value.items():
        path = f"{prefix}{key}"
        field = known.get(path, known.get(f"{prefix}*"))
        if (
            field is None
            and isinstance(each, dict)
            and any(k.startswith(f"{path}.") for k in known)
        ):
            yield from described(each, known, f"{path}.")
        else:
            yield path, each, field


def unknown(value, known):
    """Return the paths of an object that a table does not have."""
    return {path for path, _, field in described(value, known) if field is None}


def fits(field, value):
    """Whether a value has its field's type; amounts and counts are finite and not negative."""
    if isinstance(value, bool) or field.type == "boolean":
        return isinstance(value, bool) and field.type == "boolean"
    if not isinstance(value, JSON_TYPES[field.type]):
        return False
    if field.type not in ("integer", "number"):
        return True
    return math.isfinite(value) and (value >= 0 or (field.type == "number" and not field.unit))


def keys_of(path):
    """Yield the constant keys that a module's functions put into dictionaries."""
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    for node in (node for function in functions for node in ast.walk(function)):
        keys = []
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            keys = [ast.Constant(keyword.arg) for keyword in node.keywords if keyword.arg]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


@pytest.fixture(scope="module", params=RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def recorded(request):
    """The files of a recorded run: name and JSON objects."""
    with tarfile.open(request.param) as archive:
        members = [member for member in archive if member.isfile()]
        return {
            member.name: [json.loads(line) for line in archive.extractfile(member)]
            if member.name.endswith(".jsonl")
            else [json.load(archive.extractfile(member))]
            for member in members
            if member.name.endswith((".jsonl", ".json")) and not member.name.endswith("run.json")
        }


def test_every_key_that_probes_write_is_a_field():
    """One that is missing has no type, no unit and no line in the list of fields."""
    written = {key: path.name for path in WRITERS for key in keys_of(path)}

    assert {"untensored_fields", "begin_error_s", "tags"} <= written.keys()
    assert {} == {
        key: file for key, file in written.items() if key not in {*FIELDS, *IDENTITY, *NO_FIELDS}
    }


def test_every_field_is_of_known_events():
    """And has a sentence, with no `|` in it, which would end the cell."""
    assert [] == [
        name for name, field in FIELDS.items() if not field.events or {*field.events} - {*EVENTS}
    ]
    for table in (LINE, IDENTITY, FIELDS, HEADER, CAPTURE):
        assert [] == [name for name, field in table.items() if "|" in field.doc or not field.doc]


def test_the_unit_in_a_name_is_the_unit_of_its_row():
    """`_s`, `_ns` and `_bytes`."""
    units = {"_s": "s", "_ns": "ns", "_bytes": "bytes"}
    for table in (FIELDS, HEADER, CAPTURE):
        for name, field in table.items():
            match = re.search(r"_(s|ns|bytes)$", name)
            if match:
                assert units[match[0]] == field.unit, name


def test_every_field_of_a_recorded_run_is_in_the_tables(recorded):
    """Of its events and headers."""
    found = set()
    for name, objects in recorded.items():
        for each in objects:
            if "/processes/" in name:
                found |= unknown(each, HEADER) - GONE
            else:
                allowed = {*IDENTITY, *fields_of(each["event"])}
                found |= each.keys() - LINE.keys()
                found |= {(each["event"], key) for key in each.get("extra", {}).keys() - allowed}

    assert set() == found


def test_every_value_of_a_recorded_run_has_the_type_of_its_field(recorded):
    """Only headers have nulls."""
    misfits = set()
    for name, objects in recorded.items():
        table = HEADER if "/processes/" in name else None
        for each in objects:
            values = described(each, table or LINE)
            if table is None:
                values = [*values, *described(each.get("extra", {}), IDENTITY | FIELDS)]
            misfits |= {
                (table is None and each["event"], path, repr(value))
                for path, value, field in values
                if path not in GONE
                and not (fits(field, value) or (table is not None and value is None))
            }

    assert set() == misfits


def test_every_key_that_is_written_now_is_in_the_tables(worker_config, tmp_path):
    """A header with everything, a journal, a list of captures."""
    clock.begin()
    clock.keep("b", "h", [1, 2, 3])
    recorder.start(worker_config, lambda: Identity("trainer", 0), plugin._describe)
    recorder.record("step", 1, 2, {}, 1)
    recorder.stop()
    header = json.loads((Path(worker_config.directory) / "processes/trainer_0.json").read_bytes())
    plan = Plan("torch", (1,), False, "/raw", str(tmp_path), {"a": RoleCapture(None)})
    session.Process(plan, "a", 0).closed()
    (journal,) = tmp_path.glob("*.jsonl")

    assert set() == unknown(header, HEADER)
    assert set() == json.loads(journal.read_text()).keys() - CAPTURE.keys()
    assert set() == {field.name for field in dataclasses.fields(CaptureRecord)} - CAPTURE.keys()
    assert "clock_exchange" in header
