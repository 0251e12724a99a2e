r"""A run, console logs and trees of files in which every name does what a terminal would obey.

The token holds C0 and C1 controls, ANSI and OSC sequences, a tab, carriage return and newline, line
separators, bidirectional overrides, zero-width and tag characters, markup and a formula.
"""

import json
import re
from pathlib import Path

SMALL_RUN = Path(__file__).parent / "data" / "small_run"

# A line of output that begins with this was forged by a name.
FORGED = "FORGED"
TOKEN = (
    "\x1b[2J\x1b[31m\x1b]0;owned\x07\x9b1A\x85\x08\x7f\t\r\u202e\u2066\u200b\u200f\ufeff\u2028\u2029"
    f"\U000e0041\u3164\n{FORGED}<script>alert(1)</script>&=1"
)
IN_FILE_NAMES = TOKEN.replace("/", "")
_KEPT = {"timestamp", "event", "boot_id", "started", "updated", "ended", "launched", "role", "name"}


def hostile(value, *, kept=_KEPT):
    """Return a copy of a document with the token at the end of every text in it."""
    if isinstance(value, str):
        return value + TOKEN
    if isinstance(value, list):
        return [hostile(each, kept=kept) for each in value]
    if isinstance(value, dict):
        return {
            key: each if key in kept else hostile(each, kept=kept) for key, each in value.items()
        }
    return value


def hostile_run(folder, *, start=IN_FILE_NAMES):
    """Write the small run with the token in every name; return its directory.

    Every event occurs a second time, as one that this package does not have, in a process whose
    name and role it does not have either.
    """
    run = folder / f"{start}run{IN_FILE_NAMES}"
    for path in sorted(SMALL_RUN.glob("step_*/*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        others = [{**event, "event": event["event"] + TOKEN} for event in events]
        names = {path.stem: events, f"{path.stem}{IN_FILE_NAMES}": others}
        for name, content in names.items():
            target = run / path.parent.name / f"{name}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(json.dumps(hostile(event)) + "\n" for event in content))
    (run / "processes").mkdir()
    for path in sorted(SMALL_RUN.glob("processes/*.json")):
        header = hostile(json.loads(path.read_text()))
        header["probes"] = {
            "installed": {TOKEN: 1},
            "missed": {f"probe{TOKEN}": f"reason{TOKEN}"},
            "hits": {},
            "errors": {f"probe{TOKEN}": 3},
        }
        header["fallback"] = f"/tmp{TOKEN}"
        header["counters"] = {**header["counters"], "dropped": 3, "write_errors": 1}
        (run / "processes" / path.name).write_text(json.dumps(header))
        other = {**header, "name": path.stem + IN_FILE_NAMES, "role": header["role"] + TOKEN}
        (run / "processes" / f"{path.stem}{IN_FILE_NAMES}.json").write_text(json.dumps(other))
    (run / "run.json").write_text(
        json.dumps(hostile(json.loads((SMALL_RUN / "run.json").read_text())))
    )
    (run / "nsight" / "journal").mkdir(parents=True)
    capture = {"capture": 1, "role": "actor", "rank": 0, "host": "h1", "pid": 11, "step": 2}
    # Role and host become names of files: a line with odd ones is left out.
    kept = {"tool", "role", "host"}
    line = hostile({**capture, "task": "task", "tool": "nsys", "begin_ns": 1000}, kept=kept)
    (run / "nsight" / "journal" / "actor_h1_11.jsonl").write_text(json.dumps(line) + "\n")
    return run


def hostile_log(source, target):
    """Write a console log with the token, less what would end its lines, in every word of it."""
    inside = re.sub(r"[\n\r\x85\u2028\u2029]", "", TOKEN)
    lines = source.read_text(errors="replace").splitlines()
    target.write_text(
        "".join(
            re.sub(r"(timing_s/\w+|func=\w+|pid=\d+|\b(?:Before|After) \w+)", rf"\1{inside}", line)
            + f"\n{line}\n"
            for line in lines
        )
    )
    return target


def printed_by(captured, *, lines_may_hold=()):
    """Return what is wrong with bytes that were written to a terminal: nothing, if all is well."""
    wrong = []
    text = captured.decode("utf-8")
    for line in text.split("\n"):
        if line.lstrip(" -!|").startswith(FORGED):
            wrong.append(f"forged line: {line[:80]!r}")
        bad = sorted({each for each in line if each not in lines_may_hold and _dangerous(each)})
        if bad:
            wrong.append(f"{bad!r} in {line[:120]!r}")
    return wrong


def _dangerous(character):
    code = ord(character)
    return (
        code < 0x20
        or 0x7F <= code < 0xA0
        or (character in TOKEN.replace("\n", "") and not character.isascii())
    )
