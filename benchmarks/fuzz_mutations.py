"""What `fuzz.py` does to a run: its files, their names and kinds, the lines in them, archives of it.

Every mutation draws from a generator of its own, so that leaving one out does not change the others.
What is not touched is listed in `Mutant.clean`: these events have to be read, whatever else is there.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import socket
import sqlite3
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

DATA = ROOT / "tests" / "data"

DEEP = 100_000
BOMB_BYTES = 8 << 30
# Tokens of JSON, and some that only look like it.
TOKENS = (
    "null", "true", "0", "-1", "1.5", "-0.0", "2147483647", "2147483648", "-2147483649",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "1" * 309, "1e308",
    "-1e308", "1e999", "5e-324", "NaN", "Infinity", "-Infinity", '""', '"NaN"', '"1"',
    r'"\u0000"', r'"\u001b[31mred\u001b[0m"', r'"\u001b]0;title\u0007"', r'"\u202eevil\u2066"',
    r'"\u009b31m"', r'"\ud800"', r'"\udc00x\ud83d"', '"\'; DROP TABLE events; --"', r'"\""',
    '"=1+1"', '"<script>alert(1)</script>"', '"]]>"', '"../../../../etc/passwd"', '"%s%n{0}"',
    '"' + "a" * 5000 + '"', "[]", "{}", "[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]", '{"":{"":""}}',
    '{"a":1,"a":2}', '{"extra":{"extra":{}}}', "[" + "1," * 500 + "1]", '"0000-00-00T00:00:00+00:00"',
    '"9999-12-31T23:59:59.999999+00:00"', '"0001-01-01T00:00:00+00:00"', '"2026-11-21T02:33:22"',
    '"2026-11-21T02:33:22.123456+99:99"', '"2026-11-21T02:33:22.123456-12:00"', '"infinity"',
    '"epoch"', '"1970-01-01"', '"\xff"', "\x00", "[1,", "{", '"\\', "tru", "0x10", "01", "+1", ".5",
)  # fmt: skip
NAMES = (
    "worker_0-2", "name=x", "rank=9", "status=y", "duration_us=1", "rest=1", "w orker", "worker_2147483648",
    "worker_99999999999999999999", "worker_-1", "\x1b[31mworker_0", "worker\n0", "worker_0\u202e",
    "worker_0'", 'worker_0"', "worker_*", "worker_[0-9]", "{worker}", "%s", "~root", "..hidden", ".hidden",
    "-rf", "a" * 240, "worker_\udcff\udcfe", "trainer_0;rm", "$(id)", "\u00e9\u4e2d", "=1+1", "<b>x</b>",
)  # fmt: skip
FOLDERS = (
    "step_-1", "step_01", "step_2147483648", "step_9223372036854775808", "step_1e3", "step_", "step_ 1",
    "rank=9", "name=x", "event=turn", "processes=1", "file:x", "~", "step_3",
)  # fmt: skip
LOG_LINES = (
    " " * 4000 + "x", "step:" * 800, "a:" * 2000, "[" * 3000, "(" * 3000, "\x1b[" * 2000,
    "step:1 - timing_s/gen:1e309 - timing_s/step:nan", "step:99999999999999999999 - timing_s/step:1",
    "step:-1 - timing_s/step:-inf", "step:1 - timing_s/step:np.float64(1e400)",
    "step:2 - timing_s/" + "x" * 5000 + ":1.0", "\x00" * 100, "\ufeffstep:1", "x" * 1_000_000,
    "step:1 - timing_s/\x1b[31mred:1.0 - timing_s/step:2.0", "step:1 - timing_s/\u202eevil:1.0",
    "Before rollout offload, memory allocated (GB): 1e999, memory reserved (GB): nan, " + " " * 3000,
    "After switch, memory allocated (GB): -1, memory reserved (GB): , device memory used/total (GB): 1/0",
    "\t" * 4000 + "timing_s", "1" * 5000, "- " * 3000, "step:1 - " * 500,
)  # fmt: skip


class Mutant:
    """A run that is changed, and what of it is as it was.

    Args:
        folder: A folder of its own.
        base: The run that is copied.

    Attributes:
        run: The run directory.
        target: What the commands are given: the run directory or an archive of it.
        log: A console log.
        original: All lines of the base's event files.
        clean: The untouched events of each event file, as (event, microseconds), by path.
        lines: How many lines were changed.
        whole: False where a reader may refuse the whole of it.
        canaries: Files that are no part of the run, and what is in them.
    """

    def __init__(self, folder, base):
        self.folder = folder
        self.run = folder / "run"
        self.target = self.run
        self.log = self.run / "console.log"
        shutil.copytree(base, self.run, symlinks=True)
        self.clean = {
            str(path.relative_to(self.run)): events(path.read_bytes().splitlines())
            for path in sorted(self.run.glob("step_*/*.jsonl"))
        }
        self.original = {
            line for name in self.clean for line in (self.run / name).read_bytes().splitlines()
        }
        self.lines = 0
        self.whole = True
        canary = folder / "canary"
        canary.write_text("not to be written")
        self.canaries = {canary: "not to be written"}

    def expected(self):
        """Return the untouched events by process."""
        by_process = {}
        for name, found in self.clean.items():
            process = Path(name).name.removesuffix(".gz").removesuffix(".jsonl")
            by_process.setdefault(process, []).extend(found)
        return by_process

    def event_file(self, rng):
        """Choose an event file that is still in its place."""
        present = [name for name in self.clean if (self.run / name).is_file()]
        return rng.choice(present) if present else None

    def forget(self, name):
        """Nothing is claimed of this file, or of those below this folder, any more."""
        for path in [path for path in self.clean if path == name or path.startswith(f"{name}/")]:
            del self.clean[path]


def events(lines):
    """Return (event, microseconds) of lines that are known to be good."""
    found = []
    for line in lines:
        content = json.loads(line)
        duration = content.get("duration_sec")
        found.append((content["event"], None if duration is None else round(duration * 1e6)))
    return found


def _write_open(folder):
    """Write what the run's processes have open for long: a phase, a request, a call, a failure."""
    since, at = "2026-11-21T02:33:30+00:00", "2026-11-21T02:35:10+00:00"
    spent = {"since": since, "open_s": 100.0}
    opened = {
        "trainer_0": {
            "phases": [{**spent, "event": "gen", "step": 3, "usual_s": 2.0, "at": "trainer:fit:409"}],
            "failed": {
                "error": "RayActorError", "event": "gen", "step": 3, "pid": 500, "reason": "SIGKILL"
            },
        },
        "worker_0": {
            "requests": [
                {**spent, "event": "request", "at": None, "extra": {"request_id": "r", "doing": "turn"}}
            ],
            "calls": [
                {**spent, "event": "engine_call", "at": "server:generate:1", "extra": {"request_id": "r"}}
            ],
        },
    }  # fmt: skip
    folder.mkdir()
    for name, rows in opened.items():
        content = {"format": 1, "at": at, "after_s": 60.0, **rows}
        (folder / f"{name}.json").write_text(json.dumps(content))


def make_base(folder):
    """Make a run that has one of everything.

    Args:
        folder: Where; it is made.
    """
    import nsys_database

    shutil.copytree(DATA / "small_run", folder)
    (folder / "truth.json").unlink(missing_ok=True)
    shutil.copy(DATA / "console_logs" / "verl-0.9.1-real.log", folder / "console.log")
    home = folder / "nsight"
    (home / "journal").mkdir(parents=True)
    (home / "raw").mkdir()
    captures, journal = [], []
    for number, tool, name in (
        (1, "nsys", "actor_0.step1.nsys-rep"),
        (2, "torch", "actor_0.step2.json.gz"),
    ):
        row = {
            "role": "actor", "rank": 0, "host": "node-1", "pid": 500, "step": number, "task": None,
            "tool": tool, "silent": False,
        }  # fmt: skip
        captures.append({
            **row, "number": number, "begin_ns": 1795228402000000000, "end_ns": 1795228403000000000,
            "file": name, "size_bytes": 6, "problem": "", "source": f"actor_node-1_500.{number}.nsys-rep",
        })  # fmt: skip
        journal += [
            {**row, "capture": number, "begin_ns": number * 1000},
            {**row, "capture": number, "end_ns": number * 1000 + 500},
        ]
        (home / Path(name).with_suffix(".json")).write_text(json.dumps(captures[-1]))
    (home / "captures.json").write_text(json.dumps(captures))
    (home / "journal" / "actor_node-1_500.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in journal)
    )
    (home / "actor_0.step1.nsys-rep").write_bytes(b"report")
    (home / "raw" / "actor_node-1_500.3.nsys-rep").write_bytes(b"report")
    shutil.copy(DATA / "torch_trace.json.gz", home / "actor_0.step2.json.gz")
    shutil.copy(DATA / "torch_trace.json.gz", home / "actor_0.step9.json.gz")
    _write_open(folder / "open")
    nsys_database.write(
        home / "actor_0.step1.sqlite",
        ranges=[(0, 1000, "push", "forward_backward", nsys_database.TID)],
        kernels=[(10, 20, 400, "gemm", nsys_database.TID)],
        copies=[(500, 600)],
        epoch_ns=1795228414000000000,
    )


# Values, lines, files of JSON


def _paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value[:50]):
            yield from _paths(inner, (*path, place))


def _token(rng, *, deep=False):
    if deep and rng.random() < 0.02:
        return "[" * DEEP + "]" * DEEP
    if rng.random() < 0.15:
        return str(
            rng.choice((-1, 1)) * rng.getrandbits(rng.choice((8, 31, 53, 63, 64, 200, 1100)))
        )
    if rng.random() < 0.1:
        text = "".join(chr(rng.randrange(0x250)) for _ in range(rng.randrange(20)))
        return json.dumps(text, ensure_ascii=rng.random() < 0.5)
    return rng.choice(TOKENS)


def changed_json(rng, content, *, deep=False):
    """Return the text of `content` with some values, keys or types changed; maybe no JSON at all."""
    content = json.loads(json.dumps(content))
    tokens = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        path = rng.choice(list(_paths(content)))
        token = _token(rng, deep=deep)
        if not path:
            if rng.random() < 0.3:
                return token
            continue
        inner = content
        for part in path[:-1]:
            inner = inner[part]
        mark = f"@@{len(tokens)}@@"
        action = rng.random()
        if action < 0.7 or not isinstance(inner, dict):
            inner[path[-1]] = mark
            tokens.append(token)
        elif action < 0.8:
            del inner[path[-1]]
        elif action < 0.9:
            inner[
                rng.choice(("", "extra", "step", "\x1b[31m", "x" * 3000, "timestamp", "\u202e"))
            ] = inner.pop(path[-1])
        else:
            inner[f"{path[-1]}{rng.random()}"] = mark
            tokens.append(token)
    text = json.dumps(content, separators=(",", ":"))
    for number, token in enumerate(tokens):
        text = text.replace(f'"@@{number}@@"', token)
    return text


def changed_bytes(rng, data):
    """Return `data` with some bytes flipped, inserted, deleted or cut off."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(data) + 1)
        action = rng.random()
        if action < 0.4 and data:
            data[place % len(data)] = rng.randrange(256)
        elif action < 0.6:
            data[place:place] = rng.randbytes(rng.choice((1, 2, 9, 100)))
        elif action < 0.8:
            del data[place : place + rng.choice((1, 2, 9, 100))]
        elif action < 0.9:
            del data[place:]
        else:
            data[place:place] = data[place // 2 : place]
    return bytes(data)


def changed_line(rng, line):
    """Return a line of an event file, without its newline, that is changed somehow."""
    action = rng.random()
    if action < 0.65:
        with contextlib.suppress(ValueError, RecursionError):
            return changed_json(rng, json.loads(line)).encode("utf-8", "surrogatepass")
    if action < 0.9:
        return changed_bytes(rng, line)
    if action < 0.93:
        return line.decode("utf-8", "replace").encode(
            rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-7"))
        )
    return rng.choice(
        (b"", b"null", b"[]", b"{}", b"\x00" * 50, b"\xef\xbb\xbf", b" " * 9000, b"\r")
    )


def lines(mutant, rng):
    """Change lines of an event file; the others of it are as they were."""
    name = mutant.event_file(rng)
    if name is None:
        return
    path = mutant.run / name
    share = rng.choice((0.05, 0.3, 1.0))
    made, kept = [], []
    for line in path.read_bytes().splitlines():
        if rng.random() >= share:
            made.append(line)
            kept += events([line]) if line in mutant.original else []
            continue
        mutant.lines += 1
        made += [changed_line(rng, line)] * rng.choice((1, 1, 1, 1, 2, 3))
    # More of them, so that most of what is read is damaged.
    pool = sorted(mutant.original)
    for _ in range(rng.choice((0, 50, 400))):
        made.insert(rng.randrange(len(made) + 1), changed_line(rng, rng.choice(pool)))
        mutant.lines += 1
    data = b"".join(line + b"\n" for line in made)
    if data[:1] in (b"\xff", b"\xfe", b"\x00") or data[1:4].count(0) > 1:
        # Its first bytes may tell of another encoding of the whole file.
        mutant.forget(name)
    else:
        mutant.clean[name] = kept
    path.write_bytes(data)


def long_line(mutant, rng):
    """Put one very long value into one line."""
    name = mutant.event_file(rng)
    if name is None:
        return
    size = rng.choice((1 << 20, 8 << 20, 15 << 20, 17 << 20))
    line = {"timestamp": "2026-11-21T02:33:35.000000+00:00", "event": "turn", "step": 1}
    key = rng.choice(("event", "timestamp", "text", "request_id", "tool"))
    if key in line:
        line[key] = "x" * size
    else:
        line["extra"] = {key: "x" * size}
    with (mutant.run / name).open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    mutant.lines += 1


def many_names(mutant, rng):
    """Add lines with a name of an event, a request or a process of its own each."""
    name = mutant.event_file(rng)
    if name is None:
        return
    key = rng.choice(("event", "request_id", "tool", "step"))
    with (mutant.run / name).open("a") as file:
        for number in range(rng.choice((100, 3000))):
            line = {"timestamp": "2026-11-21T02:33:35.000000+00:00", "event": "turn", "step": 1}
            line["duration_sec"] = 1e-6
            if key == "event":
                line["event"] = f"e{number}"
            elif key == "step":
                line["step"] = number * 1_000_003
            else:
                line["extra"] = {key: f"n{number}"}
            file.write(json.dumps(line) + "\n")
            mutant.lines += 1


def begin_of(path):
    """Return the first megabyte of a file: another mutation may have made it 10 GB of nothing."""
    with path.open("rb") as file:
        return file.read(1 << 20)


def whole_file(mutant, rng):
    """Change an event file as a whole: cut, encoded, repeated, emptied."""
    name = mutant.event_file(rng)
    if name is None:
        return
    mutant.forget(name)
    path = mutant.run / name
    data = begin_of(path)
    text = data.decode("utf-8", "replace")
    path.write_bytes(
        rng.choice((
            lambda: data[: rng.randrange(len(data) + 1)],
            lambda: text.encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + data,
            lambda: text.encode("utf-32"),
            lambda: data.replace(b"\n", b"\r\n"),
            lambda: data.replace(b"\n", b"\r"),
            lambda: data.replace(b"\n", b""),
            lambda: data + b"\x00" * 4096,
            lambda: b"\x00" * 4096 + data,
            lambda: b"",
            lambda: gzip.compress(data),
            lambda: rng.randbytes(5000),
            lambda: data * 3,
        ))()
    )  # fmt: skip


def compressed(mutant, rng):
    """Replace an event file by a compressed one, whole or damaged, or leave both."""
    name = mutant.event_file(rng)
    if name is None:
        return
    path = mutant.run / name
    target = path.with_name(f"{path.name}.gz")
    if path.is_symlink() or target.exists():
        return
    data = path.read_bytes() if path.stat().st_size < 1 << 20 else begin_of(path)
    whole = gzip.compress(data, 1)
    half = data.index(b"\n", len(data) // 2) + 1 if b"\n" in data[len(data) // 2 :] else len(data)
    action = rng.randrange(8)
    if action < 3:
        # As the recorder leaves it, in one member or two; a new file for what comes later beside it.
        members = gzip.compress(data[:half]) + gzip.compress(data[half:])
        target.write_bytes(whole if action else members)
        path.unlink()
        if action == 1:
            path.write_bytes(b"")
        mutant.clean[str(target.relative_to(mutant.run))] = mutant.clean.pop(name)
        return
    mutant.forget(name)
    target.write_bytes(
        (
            lambda: whole[: rng.randrange(len(whole) + 1)],
            lambda: whole + rng.randbytes(100),
            lambda: changed_bytes(rng, whole),
            lambda: data,
            lambda: gzip.compress(whole),
        )[action - 3]()
    )
    if rng.random() < 0.8:
        path.unlink()


def _json_files(mutant):
    return [
        path
        for path in (
            mutant.run / "run.json",
            *sorted((mutant.run / "processes").glob("*.json")),
            *sorted((mutant.run / "nsight").glob("*.json")),
            *sorted((mutant.run / "open").glob("*.json")),
        )
        if path.is_file() and not path.is_symlink()
    ]


def json_file(mutant, rng):
    """Change a header, run.json or captures.json."""
    files = _json_files(mutant)
    if not files:
        return
    path = rng.choice(files)
    if rng.random() < 0.3:
        path = next((file for file in files if file.name == "captures.json"), path)
    data = begin_of(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = {}
    action = rng.random()
    if action < 0.75:
        data = changed_json(rng, content, deep=True).encode("utf-8", "surrogatepass")
    elif action < 0.9:
        data = changed_bytes(rng, data)
    elif action < 0.95:
        data = b'{"format":1,"name":' * 1000
    else:
        data = json.dumps({"x": "y" * (20 << 20)}).encode()
    path.write_bytes(data)


def _replace_by(path, kind):
    """Put something else in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(path.parent, os.O_DIRECTORY)
            try:
                made.bind(f"/proc/self/fd/{here}/{path.name}")
            except (OSError, UnicodeError):
                path.mkdir(exist_ok=True)
            finally:
                os.close(here)
    else:
        os.symlink(kind, path)


KINDS = (
    "fifo", "folder", "socket", "/dev/zero", "/dev/full", "/dev/stdin", "/dev/tty", "/dev/urandom",
    "nowhere", ".", "/proc/self/mem", "/proc/kmsg", "CANARY",
)  # fmt: skip


def file_kind(mutant, rng):
    """Replace a file or a folder by something that is no regular file."""
    places = [path for path in sorted(mutant.run.rglob("*")) if ".cache" not in path.parts]
    if not places:
        return
    wanted = rng.choice(("event", "header", "nsight", "log", "any"))
    chosen = {
        "event": [path for path in places if path.suffix == ".jsonl"],
        "header": _json_files(mutant),
        "nsight": [path for path in places if "nsight" in path.parts and path.is_file()],
        "log": [path for path in places if path.name == "console.log"],
    }.get(wanted) or places
    path = rng.choice(chosen)
    if path == mutant.log:
        mutant.whole = False
    if path.is_dir():
        mutant.forget(str(path.relative_to(mutant.run)))
    mutant.forget(str(path.relative_to(mutant.run)))
    _replace_by(path, _kind(mutant, rng))


def _kind(mutant, rng):
    kind = rng.choice(KINDS)
    return mutant.folder / "canary" if kind == "CANARY" else kind


def file_name(mutant, rng):
    """Add a copy of an event file, or of its header, under another name."""
    name = mutant.event_file(rng)
    if name is None:
        return
    path = mutant.run / name
    made = rng.choice(NAMES)
    with contextlib.suppress(OSError, ValueError):
        target = path.with_name(os.fsdecode(os.fsencode(f"{made}.jsonl")))
        if not target.exists():
            shutil.copy(path, target)
        header = mutant.run / "processes" / f"{path.stem}.json"
        if header.is_file() and not header.is_symlink() and rng.random() < 0.5:
            shutil.copy(header, header.with_name(f"{made}.json"))


def folder_name(mutant, rng):
    """Add a folder with a step's files under another name, or one with a file in it."""
    steps = sorted(path for path in mutant.run.glob("step_*") if path.is_dir())
    target = mutant.run / rng.choice(FOLDERS)
    if not steps or target.exists() or target.is_symlink():
        return
    step = rng.choice(steps)
    with contextlib.suppress(OSError, shutil.Error):
        target.mkdir()
        for path in sorted(step.glob("*.jsonl")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                # Names of their own, so that nothing that is there comes twice.
                shutil.copy(path, target / f"copy_of_{path.name}")


def parent_name(mutant, rng):
    """Move the run into a folder whose name means something elsewhere."""
    name = rng.choice((
        "rank=9", "name=x", "duration_us=1", "rest=1", "step=7", "a'b", 'a"b', "a*b", "[a]", "{a}", "a b",
        "a\nb", "\x1b[31ma", "~", "~root", "file:", "%20", "a;b", "-a", "\u202ea", "b\udcff", "$HOME", "a,b",
        "event=turn",
    ))  # fmt: skip
    folder = mutant.folder / name
    with contextlib.suppress(OSError, ValueError):
        folder.mkdir()
        moved = folder / rng.choice(("run", name))
        mutant.run.rename(moved)
        mutant.log = moved / "console.log"
        mutant.run = mutant.target = moved


def console(mutant, rng):
    """Change the console log."""
    if not mutant.log.is_file() or mutant.log.is_symlink():
        return
    sources = sorted((DATA / "console_logs").glob("*.log"))
    found = rng.choice(sources).read_text(errors="replace").splitlines()
    made = []
    for line in found:
        action = rng.random()
        if action < 0.7:
            made.append(line)
            continue
        mutant.lines += 1
        if action < 0.85:
            token = rng.choice((*TOKENS, "1e400", "-inf", "nan", "9" * 400, ""))
            numbers = list(re.finditer(r"-?\d+(\.\d+)?", line))
            if numbers:
                match = rng.choice(numbers)
                made.append(line[: match.start()] + token + line[match.end() :])
        elif action < 0.93:
            made.append(changed_bytes(rng, line.encode()).decode("utf-8", "surrogateescape"))
        else:
            made.append(rng.choice(LOG_LINES))
    data = "\n".join(made).encode("utf-8", "surrogateescape" if "\ud800" not in made else "replace")
    action = rng.random()
    if action < 0.1:
        data = data.decode("utf-8", "replace").encode("utf-16")
    elif action < 0.2:
        data = gzip.compress(data)
    mutant.log.write_bytes(data)
    if rng.random() < 0.1:
        packed = mutant.log.with_name("console.log.gz")
        packed.write_bytes(gzip.compress(data)[: rng.choice((10, 500, 1 << 30))])
        mutant.log = packed


def torch_trace(mutant, rng):
    """Change a trace of torch's profiler."""
    path = mutant.run / "nsight" / rng.choice(("actor_0.step2.json.gz", "actor_0.step9.json.gz"))
    if not path.is_file() or path.is_symlink():
        return
    text = gzip.decompress((DATA / "torch_trace.json.gz").read_bytes())
    content = json.loads(text)
    for _ in range(rng.choice((0, 1, 8))):
        event = rng.choice(content["traceEvents"])
        event.update(rng.choice(content["traceEvents"]))
    action = rng.random()
    if action < 0.7:
        made = changed_json(rng, content, deep=True).encode("utf-8", "surrogatepass")
    else:
        made = changed_bytes(rng, text)
    packed = gzip.compress(made)
    action = rng.random()
    if action < 0.1:
        packed = changed_bytes(rng, packed)
    elif action < 0.15:
        packed = made
    elif action < 0.2:
        packed = _gzip_bomb()
    path.write_bytes(packed)


def nsys(mutant, rng):
    """Change an SQLite export of nsys: values of any type, columns and tables gone, bytes."""
    path = mutant.run / "nsight" / "actor_0.step1.sqlite"
    if not path.is_file() or path.is_symlink():
        return
    if rng.random() < 0.3:
        path.write_bytes(changed_bytes(rng, begin_of(path)))
        return
    values = (
        None, -1, 2**62, -(2**63), 1.5e308, float("inf"), "x", "", "\x1b[31m", b"\xff\x00", "\ud7ff", "9" * 400,
    )  # fmt: skip
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(path)) as connection,
    ):
        for _ in range(rng.choice((1, 2, 6))):
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
            if not tables:
                break
            table = rng.choice(tables)
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info('{table}')")]
            column = rng.choice(columns)
            action = rng.random()
            with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
                if action < 0.75:
                    connection.execute(f'UPDATE "{table}" SET "{column}" = ?', [rng.choice(values)])
                elif action < 0.85:
                    connection.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
                elif action < 0.95:
                    connection.execute(f'DROP TABLE "{table}"')
                else:
                    connection.execute(
                        f'CREATE VIEW "{table}2" AS WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL '
                        "SELECT x + 1 FROM r) SELECT x FROM r"
                    )
        connection.commit()


def parquet(mutant, rng):
    """Put something that calls itself Parquet beside the event files."""
    folder = mutant.run / rng.choice((".", "events"))
    if folder.exists() and not folder.is_dir():
        return
    folder.mkdir(exist_ok=True)
    path = folder / "events.parquet"
    if not path.exists():
        path.write_bytes(rng.choice((b"", b"PAR1", b"PAR1" + rng.randbytes(500) + b"PAR1")))


def cache(mutant, rng):
    """Damage or forge what a reader kept in the run's `.cache`."""
    kept = mutant.run / ".cache"
    # Not what an earlier mutation linked to: a read of /proc/kmsg waits.
    files = [path for path in kept.rglob("*") if path.is_file() and not path.is_symlink()]
    places = sorted(files) if kept.is_dir() else []
    action = rng.random()
    if action < 0.6 and places:
        path = rng.choice(places)
        content = begin_of(path)
        if rng.random() < 0.5:
            _replace_by(path, _kind(mutant, rng))
        elif path.suffix == ".json":
            path.write_bytes(changed_bytes(rng, content))
        else:
            path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif action < 0.8 and kept.is_dir():
        folder = rng.choice([kept, *sorted(path for path in kept.iterdir() if path.is_dir())])
        elsewhere = mutant.folder / "elsewhere"
        if elsewhere.exists():
            return
        shutil.move(folder, elsewhere)
        folder.symlink_to(elsewhere)
        foreign = elsewhere / "foreign.parquet"
        foreign.write_text("of somebody else")
        mutant.canaries[foreign] = "of somebody else"
    else:
        _replace_by(kept, _kind(mutant, rng))


# Archives

_bombs: dict[str, bytes] = {}


def _gzip_bomb():
    if "gzip" not in _bombs:
        _bombs["gzip"] = gzip.compress(bytes(64 << 20), 1) * (BOMB_BYTES >> 26)
    return _bombs["gzip"]


def _zstd_bomb():
    import zstandard

    if "zstd" not in _bombs:
        compress = zstandard.ZstdCompressor().compress
        entry = tarfile.TarInfo("run/step_1/worker_0.jsonl")
        entry.size = BOMB_BYTES
        _bombs["zstd"] = compress(entry.tobuf()) + compress(bytes(64 << 20)) * (BOMB_BYTES >> 26)
    return _bombs["zstd"]


def _sparse_tar():
    """A member of 1 TB, none of which is there."""
    entry = tarfile.TarInfo("run/step_1/worker_0.jsonl")
    entry.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "run/step_1/worker_0.jsonl",
        "GNU.sparse.realsize": str(1 << 40),
    }
    entry.size = 512
    return entry.tobuf(tarfile.PAX_FORMAT) + b"1\n0\n0\n".ljust(512, b"\0") + bytes(1024)


def _pax_bomb():
    """An extended header that is said to be large, or that holds very many records."""
    entry = tarfile.TarInfo("PaxHeaders/x")
    entry.type = tarfile.XHDTYPE
    entry.size = 1 << 33
    return entry.tobuf() + b"9 path=a\n" * 100_000


def archive(mutant, rng):
    """Pack the run, and damage the archive, or put members into it that no run has."""
    action = rng.random()
    suffix = rng.choice((".tar", ".tar.gz", ".tgz", ".tar.zst"))
    mutant.target = mutant.folder / f"packed{suffix}"
    if action < 0.1:
        data = rng.choice((_sparse_tar, _pax_bomb))()
        mutant.clean.clear()
    elif action < 0.2:
        data = b""
        mutant.target = mutant.folder / rng.choice(("packed.tar.zst", "packed.tar.gz"))
        mutant.target.write_bytes(_zstd_bomb() if suffix == ".tar.zst" else _gzip_bomb())
        mutant.clean.clear()
        mutant.whole = False
        return
    else:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for path in sorted(mutant.run.rglob("*")):
                name = f"run/{path.relative_to(mutant.run)}"
                if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                    with contextlib.suppress(OSError, ValueError):
                        tar.add(path, name, recursive=False)
                elif path.is_symlink() or path.is_fifo():
                    tar.add(path, name, recursive=False)
            for _ in range(rng.choice((0, 0, 1, 3))):
                _add_member(tar, rng)
        data = stream.getvalue()
        for name in list(mutant.clean):
            path = mutant.run / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size >= 1 << 20:
                mutant.forget(name)
        if rng.random() < 0.3:
            data = changed_bytes(rng, data)
            mutant.clean.clear()
            mutant.whole = False
    if mutant.target.name.endswith((".gz", ".tgz")):
        data = gzip.compress(data, 1)
    elif mutant.target.name.endswith(".zst"):
        import zstandard

        data = zstandard.ZstdCompressor().compress(data)
    if rng.random() < 0.2:
        data = changed_bytes(rng, data)
        mutant.clean.clear()
    if not mutant.clean:
        mutant.whole = False
    mutant.target.write_bytes(data)


def _add_member(tar, rng):
    entry = tarfile.TarInfo(
        rng.choice((
            "../../outside.json", "/tmp/verl_profiler_fuzz_outside.json", "run/link.jsonl", "run/step_1/zero.jsonl",
            "run/.cache/events-1/x.parquet", "run/step_9/worker_9.jsonl", "run/" + "d/" * 200 + "x.json",
            "run/step_1", "run/run.json/x.json", "run/processes/" + "n" * 250 + ".json",
        ))
    )  # fmt: skip
    kind = rng.choice((
        tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE,
    ))  # fmt: skip
    entry.type = kind
    data = b""
    if kind == tarfile.REGTYPE:
        data = rng.choice((b"", b"{}", rng.randbytes(100)))
        entry.size = len(data)
    elif kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        entry.linkname = rng.choice(("/etc/hostname", "../..", "run/run.json", ".", "/dev/zero"))
    else:
        entry.devmajor, entry.devminor = 1, 5
    tar.addfile(entry, io.BytesIO(data))


# How often each is drawn.
MUTATIONS = {
    lines: 10,
    json_file: 6,
    whole_file: 2,
    compressed: 2,
    file_kind: 3,
    file_name: 3,
    folder_name: 2,
    console: 3,
    torch_trace: 2,
    nsys: 2,
    cache: 2,
    many_names: 1,
    long_line: 0.3,
    parquet: 0.5,
}
# These end a list of mutations: what comes after would not be seen.
LAST = {parent_name: 1.5, archive: 1.5}


def chosen(rng):
    """Choose mutations; return their names."""
    names = [
        mutation.__name__
        for mutation in rng.choices(
            list(MUTATIONS), list(MUTATIONS.values()), k=rng.choice((1, 1, 2, 3, 5))
        )
    ]
    if rng.random() < 0.2:
        names.append(rng.choices(list(LAST), list(LAST.values()))[0].__name__)
    return names


def mutate(mutant, seed, index, names, left_out=()):
    """Apply mutations.

    Args:
        mutant: Changed in place.
        seed: Of the whole.
        index: Of this run.
        names: All mutations.
        left_out: Places in `names` of those that are left out.
    """
    by_name = {mutation.__name__: mutation for mutation in (*MUTATIONS, *LAST)}
    for place, name in enumerate(names):
        if place not in left_out:
            by_name[name](mutant, random.Random(f"{seed}/{index}/{place}"))
