"""Values that no file of a run should hold, and a small run to put them into."""

import json
import shutil

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


RUN = {
    "format": 1,
    "experiment": "small",
    "launched": "2026-11-21T02:33:20+00:00",
    "host": "vm",
    "pid": 7,
    "command": ["python", "-m", "verl.trainer.main_ppo"],
    "cwd": "/repo",
    "versions": {"python": "3.11.7", "verl": "0.9.1"},
    "settings": {
        "output_dir": "/runs/small",
        "events": {"enabled": True, "steps": None, "families": {"trainer": True}},
        "transfer_queue": {"trace": False},
        "nsight": {"directory": None},
    },
    "training": {
        "model": "/m",
        "rollout": "sglang",
        "rollout_n": 4,
        "train_batch_size": 8,
        "nnodes": 1,
        "memory": {"asked": {"free_cache_engine": True}, "engine": "sglang"},
    },
    "clock": {
        "boot_id": "d5714b26",
        "wall_ns": 1795234281347310389,
        "monotonic_ns": 5958832630942,
        "uncertainty_ns": 65,
        "shared": False,
    },
}
HEADER = {
    "format": 1,
    "name": "worker_0",
    "role": "agent_loop",
    "rank": 0,
    "replica": None,
    "host": "vm",
    "ip": "10.0.0.1",
    "pid": 9,
    "ppid": 7,
    "actor_name": None,
    "actor_class": "AgentLoopWorker",
    "python": "3.11.7",
    "clock": {
        "boot_id": "d5714b26",
        "wall_ns": 1795234281347310389,
        "monotonic_ns": 5958832630942,
        "uncertainty_ns": 65,
        "shared": True,
        "readings": [[1795234281347310389, 5958832630942, 65]],
        "last_wall_ns": 1795234496799295858,
        "last_monotonic_ns": 6174284616686,
    },
    "clock_exchange": {
        "boot_id": "d5714b26",
        "peers": [{"boot_id": "other", "samples": [[5958832630942, 1000, 500]]}],
    },
    "counters": {
        "events": 6,
        "bytes": 900,
        "dropped": 0,
        "write_errors": 0,
        "wrapper_s": 0.01,
        "writer_s": 0.02,
    },
    "started": "2026-11-21T02:33:20+00:00",
    "updated": "2026-11-21T02:34:20+00:00",
    "ended": "2026-11-21T02:34:20+00:00",
    "end_reason": "exit",
    "directory": "/runs/small",
    "fallback": None,
    "versions": {"verl": "0.9.1"},
    "probes": {
        "installed": {"request": ["a:B.c"]},
        "missed": {"turn": "not there"},
        "hits": {"request": 3},
        "errors": {"request": 1},
    },
}
TRAINER = [
    ("gen", 20.0, {}),
    ("update_actor", 5.0, {}),
    ("metrics", None, {"metrics": {"a": 1.5}}),
    ("step", 30.0, {}),
]
WORKER = [
    ("request_start", None, {"sample": "0", "session": "0", "uid": "u"}),
    ("engine_call", 1.5, {"request_id": "r", "turn": 0, "response_tokens": 20}),
    ("tool_call", 0.5, {"request_id": "r", "turn": 0, "tool": "calculator"}),
    ("turn", 2.5, {"request_id": "r", "turn": 0, "tool_calls": 1}),
    ("tq_put", 0.1, {"size_bytes": 100, "rows": 1}),
    (
        "request",
        3.0,
        {"request_id": "r", "sample": "0", "session": "0", "turns": 1, "validate": False},
    ),
]


def line_of(number, event, duration, extra, step=1):
    """Return an event line as a dict."""
    line = {
        "timestamp": f"2026-11-21T02:33:{22 + number:02d}.000000+00:00",
        "event": event,
        "duration_sec": duration,
        "extra": extra,
        "workid": 0,
        "step": step,
    }
    return {key: value for key, value in line.items() if value is not None}


LINES = {
    "trainer_0": [line_of(4 * n, *event) for n, event in enumerate(TRAINER)],
    "worker_0": [line_of(n, *event) for n, event in enumerate(WORKER)],
}
CAPTURE = {
    "role": "actor",
    "rank": 0,
    "host": "vm",
    "pid": 9,
    "step": 1,
    "task": "update",
    "number": 1,
    "begin_ns": 1795234282000000000,
    "end_ns": 1795234283000000000,
    "tool": "nsys",
    "file": "actor_0.step1.nsys-rep",
    "size_bytes": 4,
    "problem": None,
    "source": "x",
    "silent": False,
}
TORCH = {
    "schemaVersion": 1,
    "host_name": "vm",
    "baseTimeNanoseconds": 1795234281000000000,
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "main"}},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 9, "tid": 1, "ts": 100.5,
         "dur": 3.5, "args": {"Input": [1, 2]}},
        {"ph": "X", "name": "kernel", "cat": "kernel", "pid": 0, "tid": 7, "ts": 101.5, "dur": 2.0},
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 9, "tid": 1, "ts": 100.5},
        {"ph": "f", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 101.5},
        {"ph": "B", "name": "outer", "pid": 9, "tid": 2, "ts": 100.0},
        {"ph": "E", "name": "outer", "pid": 9, "tid": 2, "ts": 110.0},
        {"ph": "i", "name": "mark", "pid": 9, "tid": 2, "ts": 105.0, "s": "t"},
        {"ph": "C", "name": "memory", "pid": 9, "ts": 104.0, "args": {"bytes": 5}},
    ],
}  # fmt: skip


def small_run(folder):
    """Write the run and return its directory."""
    run = folder / "small"
    if run.exists():
        shutil.rmtree(run)
    (run / "processes").mkdir(parents=True)
    (run / "step_1").mkdir()
    (run / "run.json").write_text(json.dumps(RUN))
    for name, role, lines in (
        ("trainer_0", "trainer", LINES["trainer_0"]),
        ("worker_0", "agent_loop", LINES["worker_0"]),
    ):
        counters = {**HEADER["counters"], "events": len(lines)}
        header = {**HEADER, "name": name, "role": role, "counters": counters}
        (run / "processes" / f"{name}.json").write_text(json.dumps(header))
        (run / "step_1" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    return run
