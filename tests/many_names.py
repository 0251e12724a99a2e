"""Runs with very many distinct names: of events, tools, requests, processes, or of everything.

python tests/many_names.py KIND COUNT FOLDER
"""

import json
import shutil
import sys
from itertools import cycle, islice
from pathlib import Path

SMALL_RUN = Path(__file__).parent / "data" / "small_run"


def _files():
    """Yield step folder, process and lines of the small run."""
    for path in sorted(SMALL_RUN.glob("step_[12]/*.jsonl")):
        yield path, [json.loads(line) for line in path.read_text().splitlines()]


def _of(event):
    return [line for _, lines in _files() for line in lines if line["event"] == event]


def _events(run, count):
    """Every event of `span` has a name of its own, in the trainer and in the workers."""
    for name in ("trainer_0", "worker_0", "actor_0"):
        (like,) = islice((e for e in _lines(f"step_1/{name}.jsonl") if "duration_sec" in e), 1)
        like = {**like, "extra": {}}
        named = ({**like, "event": f"own_{name}_{n}"} for n in range(count))
        _append(run, f"step_1/{name}.jsonl", named)


def _tools(run, count):
    """Every call of a tool is one of another tool; every third fails."""
    calls = cycle(_of("tool_call"))
    _append(
        run,
        "step_1/worker_0.jsonl",
        (
            {
                **call,
                "extra": {
                    **call["extra"],
                    "tool": f"tool_{n}",
                    **({"status": "error", "error": f"Error{n}"} if n % 3 == 0 else {}),
                },
            }
            for n, call in zip(range(count), calls, strict=False)
        ),
    )


def _requests(run, count):
    """Every request of one worker and step, each with a turn and an engine call."""
    like = _lines("step_1/worker_0.jsonl")
    wanted = {"request_start", "turn", "engine_call", "tool_call", "request"}
    first = next(e["extra"]["request_id"] for e in like if e["event"] == "request")
    mine = [e for e in like if e["event"] in wanted and _belongs(e, first)]

    def renamed():
        for n in range(count):
            for event in mine:
                extra = {**event["extra"], "sample": 1000 + n}
                for key in ("request_id", "engine_request_id", "uid"):
                    if key in extra:
                        extra[key] = f"{extra[key]}-{n}"
                yield {**event, "extra": extra}

    _append(run, "step_1/worker_0.jsonl", renamed())


def _belongs(event, request):
    extra = event["extra"]
    return extra.get("request_id") == request or extra.get("uid") == request[:8]


def _roles(run, count):
    """Every process has a role of its own, a host of its own and one event."""
    header = json.loads((SMALL_RUN / "processes/actor_0.json").read_text())
    (like,) = islice((e for e in _lines("step_1/actor_0.jsonl") if "duration_sec" in e), 1)
    for n in range(count):
        name = f"role{n}x_0"
        content = {**header, "name": name, "role": f"role{n}x", "host": f"host-{n}", "pid": n}
        (run / f"processes/{name}.json").write_text(json.dumps(content))
        (run / f"step_1/{name}.jsonl").write_text(json.dumps(like) + "\n")


def _everything(run, count):
    """Every text and every key of every event is another one, the name of the event apart."""
    all_lines = [(path, line) for path, lines in _files() for line in lines]
    texts = [(path, line) for path, line in all_lines if line.get("extra")]
    by_file = {}
    for n, (path, line) in zip(range(count), cycle(texts), strict=False):
        by_file.setdefault(path, []).append({**line, "extra": _distinct(line["extra"], n)})
    for path, lines in by_file.items():
        _append(run, str(path.relative_to(SMALL_RUN)), lines)


def _distinct(value, n):
    if isinstance(value, str):
        return f"{value}-{n}"
    if isinstance(value, list):
        return [_distinct(each, n) for each in value]
    if isinstance(value, dict):
        inner = {key: _distinct(each, n) for key, each in value.items()}
        return {**inner, f"key_{n}": n}
    return value


KINDS = {
    "events": _events,
    "tools": _tools,
    "requests": _requests,
    "roles": _roles,
    "everything": _everything,
}


def many_names(folder, kind, count):
    """Write the small run with `count` names of a kind beside its own; return its directory."""
    run = Path(folder) / f"many-{kind}"
    shutil.copytree(SMALL_RUN, run, ignore=shutil.ignore_patterns(".cache"))
    KINDS[kind](run, count)
    return run


def _lines(name):
    return [json.loads(line) for line in (SMALL_RUN / name).read_text().splitlines()]


def _append(run, name, events):
    with (run / name).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


if __name__ == "__main__":
    print(many_names(sys.argv[3], sys.argv[1], int(float(sys.argv[2]))))
