"""Damage runs and read them with every command: nothing may fail, hang, grow, or be wrong.

    python benchmarks/fuzz.py [--minutes 10] [--runs N] [--seed 1] [--workers 2]
    python benchmarks/fuzz.py --seed 1 --only 4711 [--without 0,2] --keep /tmp/kept

Each run is a small one with one to six mutations (`fuzz_mutations.py`), which --seed and its number
determine.  Each is read by one or two commands, in worker processes that are killed when they hang.
Held against each command: it ends within --limit-s (time that the machine did not give it does not
count) and within --limit-mb; no traceback; an exit status of 0, 1 or 2; JSON that is JSON; no control
characters in what it prints; nothing left in the temporary folder; nothing written outside the run.
Held against the reader: every event that was not touched is read, with its duration, and a run of which
something is whole is not refused.

What fails is listed by its kind, with the mutations that suffice for it; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fuzz_mutations
from fuzz_mutations import Mutant

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "tests" / "data" / "console_logs"
# What a scratch folder may hold at any time.
SCRATCH_BYTES = 2 << 30
# A worker is replaced after so many runs.
RUNS_PER_WORKER = 300
# All but the ends of lines and tabulators.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@functools.cache
def plots():
    """Return the names of all plots."""
    from verl_profiler.views.questions import VIEWS

    return sorted(VIEWS)


def command_lines(mutant, clean, rng):
    """Choose what reads a run.

    Args:
        mutant: The run.
        clean: An undamaged run, to compare with.
        rng: Chooses.

    Returns:
        Lists of arguments; the first word `events` stands for the comparison of what is read.
    """
    run, log, out = str(mutant.target), str(mutant.log), str(mutant.folder / "out")
    # Names that begin with a dash or a tilde need their folder before them, which they have.
    cache = rng.choice(([], ["--no-cache"]))
    step = rng.choice(([], [], ["--steps", "1:2"]))
    plot = rng.choice(plots())
    # What is quick is drawn more often, so that many runs are read.
    table = (
        (10, ["events"]),
        (3, ["summary", "--follow", run]),
        (10, ["collect", run, *rng.choice(([], ["--json"]))]),
        (12, ["timing", log, *rng.choice((["--json"], ["--csv"]))]),
        (0.3, ["timing", log, "--output-dir", out]),
        (3, ["memory", log, *rng.choice(([], ["--json"]))]),
        (3, ["tq", log, *rng.choice(([], ["--json"], ["--lang", "zh"]))]),
        (1, ["summary", run, *cache, *step]),
        (1, ["summary", run, "--json", *cache, *step]),
        (0.5, ["why", run, *cache, *step, *rng.choice(([], ["--json"]))]),
        (2, ["requests", run, *cache, *step, *rng.choice(([], ["--json"], ["--request", "r"]))]),
        (2, ["tq", run, *cache, *step, *rng.choice(([], ["--json"]))]),
        (1, ["export", rng.choice(("prometheus", "jsonl")), run, *cache, "--out", out]),
        (2, ["memory", run, *cache, *step, *rng.choice(([], ["--json"]))]),
        (0.5, ["report", run, *cache, *step, "-o", out]),
        (1, ["export", "perfetto", run, *cache, *step, "-o", out]),
        (3, ["stuck", run, *rng.choice(([], ["-v"], ["--json"]))]),
        (0.5, ["export", "otlp", run, *cache, *step, "-o", out]),
        (1, ["plot", plot, run, *cache, rng.choice(("--json", "--csv"))]),
        (0.5, ["plot", plot, run, *cache, "--out", f"{out}.svg"]),
        (0.3, ["diff", *rng.sample([run, str(clean)], 2), *cache, *rng.choice(([], ["--json"]))]),
        (0.1, ["check", "--output-dir", run]),
    )  # fmt: skip
    count = rng.choice((1, 1, 2))
    picked = rng.choices([line for _, line in table], [weight for weight, _ in table], k=count)
    return list(dict.fromkeys(map(tuple, picked)))


def own_frame(error):
    """Return where in the package an exception comes from."""
    place = "?"
    for frame in traceback.extract_tb(error.__traceback__):
        if "verl_profiler/" in frame.filename:
            place = f"{frame.filename.rpartition('verl_profiler/')[2]}:{frame.name}:{frame.lineno}"
    return place


def run_command(arguments):
    """Run one command line in this process; return what is wrong with how it ended."""
    from verl_profiler.cli import main

    with tempfile.TemporaryFile() as raw_out, tempfile.TemporaryFile() as raw_errors:
        out = io.TextIOWrapper(raw_out, encoding="utf-8", errors="strict")
        errors = io.TextIOWrapper(raw_errors, encoding="utf-8", errors="backslashreplace")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                status = main(list(arguments))
            except SystemExit as end:
                status = end.code
            except BaseException as error:  # noqa: BLE001  that is what is looked for
                yield (
                    f"traceback {type(error).__name__} at {own_frame(error)}",
                    traceback.format_exc(),
                )
                return
            out.flush()
            errors.flush()
        raw_out.seek(0)
        raw_errors.seek(0)
        text, complaints = raw_out.read().decode(), raw_errors.read().decode()
        out.detach()
        errors.detach()
    if status == 3 and arguments[0] != "--traceback":
        # It failed, and caught that: once more, to see where.
        again = list(run_command(["--traceback", *arguments]))
        yield from again or [(f"internal error once in {arguments[0]}", complaints)]
        return
    if status not in (0, 1, 2):
        yield f"exit status {status}", complaints
    if "Traceback (most recent call last)" in complaints:
        yield f"traceback in a thread of {arguments[0]}", complaints
    for where, printed in (("stdout", text), ("stderr", complaints)):
        found = _CONTROL.search(printed)
        if found:
            begin = max(0, found.start() - 60)
            yield (
                f"control character on {where} of {arguments[0]}",
                repr(printed[begin : begin + 160]),
            )
    if "--json" in arguments and status == 0 and "--out" not in arguments:
        try:
            json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            yield f"no JSON from {arguments[0]} --json: {str(error)[:40]}", text[:300]


def _refuse(name):
    raise ValueError(f"{name} is not JSON")


def compare_events(mutant, cache, *, derived=True):
    """Read a run, and all tables that are derived; return what was lost of its untouched events."""
    from verl_profiler.errors import VerlProfilerError
    from verl_profiler.reading.reader import load
    from verl_profiler.reading.tables.schemas import SCHEMAS

    expected = mutant.expected()
    try:
        with load(mutant.target, cache=cache) as run:
            for table in SCHEMAS if derived else ():
                run.rows(f"SELECT * FROM {table}")
            rows = run.rows("SELECT name, event, duration_us FROM events")
            problems = run.problems
    except VerlProfilerError as error:
        if mutant.whole and any(expected.values()) and error.slug != "several-runs":
            yield f"refused ({error.slug})", str(error)
        return
    except Exception as error:  # noqa: BLE001  that is what is looked for
        yield f"traceback {type(error).__name__} at {own_frame(error)}", traceback.format_exc()
        return
    found = {}
    for row in rows:
        found.setdefault(row["name"], Counter())[row["event"], row["duration_us"]] += 1
    for name, clean in expected.items():
        lost = Counter(clean) - found.get(name, Counter())
        if lost:
            text = f"{name}: {sum(lost.values())} of {len(clean)}, such as {lost.most_common(3)}"
            yield "wrong: untouched events are lost", f"{text}\n" + "\n".join(problems[:20])


def rss_peak_mb():
    """Return the most that this process held since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10


def forget_peak():
    """Begin to measure the peak anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def make_mutant(folder, seed, index, left_out):
    """Make one run; return it, the names of its mutations, and what reads it."""
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    rng = random.Random(f"{seed}/{index}")
    base = folder / rng.choice(("base", "base", "base-cached"))
    mutant = Mutant(folder / "case", base)
    names = fuzz_mutations.chosen(rng)
    fuzz_mutations.mutate(mutant, seed, index, names, left_out)
    return mutant, names, command_lines(mutant, folder / "base", rng)


def prepare(folder):
    """Make the undamaged runs in a worker's folder."""
    folder.mkdir(parents=True)
    fuzz_mutations.make_base(folder / "base")
    fuzz_mutations.make_base(folder / "base-cached")
    from verl_profiler.reading.reader import load

    with load(folder / "base-cached") as run:
        run.rows("SELECT * FROM requests")


def worker(folder):
    """Take jobs from stdin, a line each; report on stdout, a line each."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    scratch = folder / "scratch"
    prepare(folder)
    scratch.mkdir()
    home = folder / "home"
    home.mkdir()
    os.chdir(home)
    os.environ.update(HOME=str(home), TMPDIR=str(scratch), COLUMNS="100", MPLBACKEND="agg")
    tempfile.tempdir = None
    # What every run imports or measures once is no run's own.
    for line in (
        ["summary", str(folder / "base")],
        ["plot", "step_durations", str(folder / "base"), "--json"],
    ):
        list(run_command(line))
    for line in sys.stdin:
        job = json.loads(line)
        reports.write(json.dumps({"begin": ["make"]}) + "\n")
        mutant, names, command_list = make_mutant(
            folder, job["seed"], job["index"], job["left_out"]
        )
        reports.write(json.dumps({"made": names, "lines": mutant.lines}) + "\n")
        for arguments in command_list:
            reports.write(json.dumps({"begin": arguments}) + "\n")
            forget_peak()
            wrong = list(
                compare_events(mutant, cache=bool(job["index"] % 2))
                if arguments[0] == "events"
                else run_command(arguments)
            )
            peak = rss_peak_mb()
            left = sorted(path.name for path in scratch.iterdir())
            if left:
                wrong.append((f"scratch left by {arguments[0]}", str(left[:5])))
            wrong += [
                (f"foreign file touched by {arguments[0]}", str(path))
                for path, content in mutant.canaries.items()
                if not path.is_file() or path.read_text() != content
            ]
            outside = Path("/tmp/verl_profiler_fuzz_outside.json")
            if outside.exists():
                wrong.append(("written outside", str(outside)))
            for path in scratch.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in (mutant.folder / "out", mutant.folder / "out.svg"):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            reports.write(json.dumps({"end": arguments, "wrong": wrong, "peak_mb": peak}) + "\n")
        reports.write(json.dumps({"done": job["index"]}) + "\n")


class Pool:
    """Worker processes, each fed and watched by a thread of this one."""

    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.lock = threading.Lock()
        self.failures = {}
        self.counts = Counter()
        self.commands = Counter()
        self.slowest = {}
        self.peak_mb = 0
        self.until = time.monotonic() + args.minutes * 60
        self.indexes = iter([args.only]) if args.only is not None else itertools.count()

    def next_index(self):
        """Return the number of the next run, or None at the end."""
        with self.lock:
            if time.monotonic() >= self.until:
                return None
            index = next(self.indexes, None)
            return None if index is None or index >= self.args.runs else index

    def feed(self, number):
        """Hand runs to one worker after the other until the time is over."""
        life = 0
        index = self.next_index()
        while index is not None:
            life += 1
            with Worker(self.folder / f"worker-{number}-{life}", self.args) as each:
                for _ in range(RUNS_PER_WORKER):
                    self.judge(index, each.do(index, self.args.without))
                    index = self.next_index()
                    if index is None or not each.alive:
                        break

    def judge(self, index, reports):
        """Count what a worker reported of one run."""
        names = []
        with self.lock:
            self.counts["runs"] += 1
            for report in reports:
                if "made" in report:
                    self.counts["lines"] += report["lines"]
                    names = report["made"]
                elif "end" in report:
                    command = report["end"][0]
                    self.commands[command] += 1
                    self.peak_mb = max(self.peak_mb, report["peak_mb"])
                    took = report["took_s"]
                    self.slowest[command] = max(self.slowest.get(command, 0), took)
                    wrong = report["wrong"]
                    if report["peak_mb"] > self.args.limit_mb:
                        wrong.append([f"memory of {command}", f"{report['peak_mb']} MB"])
                    for kind, text in wrong:
                        self._fail(kind, text, index, report["end"])
                elif "killed" in report:
                    self._fail(report["killed"], report["text"], index, report["command"])
            for kind, failure in self.failures.items():
                if failure["index"] == index and kind:
                    failure["names"] = names

    def _fail(self, kind, text, index, command):
        failure = self.failures.setdefault(
            kind, {"count": 0, "text": text, "index": index, "command": command, "names": []}
        )
        failure["count"] += 1

    def reduce(self, kind, failure):
        """Leave out mutations that the failure does not need; return those that are left."""
        names = failure["names"]
        left_out = set(self.args.without)
        with contextlib.ExitStack() as stack:
            each = None
            for place in range(len(names)):
                if place in left_out or len(names) - len(left_out) == 1:
                    continue
                if each is None or not each.alive:
                    folder = self.folder / f"reduce-{failure['index']}-{place}-{len(kind)}"
                    each = stack.enter_context(Worker(folder, self.args))
                reports = each.do(failure["index"], [*left_out, place])
                kinds = {wrong[0] for report in reports for wrong in report.get("wrong", ())}
                kinds |= {report["killed"] for report in reports if "killed" in report}
                if kind in kinds:
                    left_out.add(place)
        return sorted(left_out), [name for place, name in enumerate(names) if place not in left_out]


class Worker:
    """One worker process.  `do` kills it when a command takes too long, too much memory or disk."""

    def __init__(self, folder, args):
        self.folder = folder
        self.args = args
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, "--worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not args.verbose else None,
            start_new_session=True,
        )
        self.alive = True
        self.last_words = []
        if self.process.stderr is not None:
            threading.Thread(target=self._drain, daemon=True).start()
        self.buffer = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def _drain(self):
        for line in self.process.stderr:
            self.last_words = [*self.last_words[-30:], line.decode(errors="replace")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.selector.close()
        self.process.stdin.close()
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self):
        """End the process and what it started."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def do(self, index, left_out):
        """Hand over one run; return its reports."""
        job = {"seed": self.args.seed, "index": index, "left_out": list(left_out)}
        reports = []
        command, begun_s, delay_s = ["start"], time.monotonic(), 0.0
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return [self._killed("worker died", "", command)]
        while True:
            for report in self._read():
                if report is None:
                    time.sleep(0.2)
                    return [*reports, self._killed(f"worker died in {command[0]}", "", command)]
                if "begin" in report:
                    command, begun_s, delay_s = report["begin"], time.monotonic(), self._delay_s()
                    continue
                if "end" in report:
                    report["took_s"] = time.monotonic() - begun_s
                reports.append(report)
                if "done" in report:
                    return reports
            took_s = time.monotonic() - begun_s - (self._delay_s() - delay_s)
            if command[0] in ("start", "make"):
                if took_s > 60 + self.args.limit_s:
                    return [*reports, self._killed("fuzz itself hangs", "", command)]
            elif took_s > self.args.limit_s:
                return [*reports, self._killed(f"hang in {command[0]}", self._stack(), command)]
            elif self._memory_mb() > self.args.limit_mb * 1.2:
                return [*reports, self._killed(f"memory of {command[0]}", "killed", command)]
            elif self._scratch_bytes() > SCRATCH_BYTES:
                return [*reports, self._killed(f"disk filled by {command[0]}", "", command)]

    def _killed(self, kind, text, command):
        self.kill()
        words = "".join(self.last_words)
        return {"killed": kind, "text": f"{text}\n{words}".strip(), "command": command}

    def _stack(self):
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGABRT)
            time.sleep(0.5)
        return ""

    def _read(self):
        if not self.selector.select(0.1):
            return
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            yield None
            return
        *whole, self.buffer = (self.buffer + data).split(b"\n")
        for line in whole:
            yield json.loads(line)

    def _delay_s(self):
        """Return how long its threads waited for a core."""
        total = 0
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    total += int((task / "schedstat").read_text().split()[1])
        return total / 1e9

    def _memory_mb(self):
        with contextlib.suppress(OSError):
            match = re.search(
                r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text()
            )
            return int(match[1]) >> 10 if match else 0
        return 0

    def _scratch_bytes(self):
        total = 0
        for folder, _, files in os.walk(self.folder / "scratch"):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return total


def keep(args, folder):
    """Make the one run of --only and leave it for a person to look at."""
    args.keep.mkdir(parents=True, exist_ok=True)
    prepare(args.keep / "files")
    mutant, names, commands = make_mutant(args.keep / "files", args.seed, args.only, args.without)
    left = [name for place, name in enumerate(names) if place not in args.without]
    print(f"mutations: {', '.join(left)}")
    for command in commands:
        if command[0] == "events":
            print(f"  reading {mutant.target} with verl_profiler.load")
        else:
            print("  verl-profiler --traceback " + " ".join(map(repr, command)))


def report(pool, args, took_s):
    """Print what was done and what failed; return the exit status."""
    print(
        f"seed {args.seed}: {pool.counts['runs']} runs with {pool.counts['lines']} changed lines, "
        f"{sum(pool.commands.values())} commands in {took_s:.0f} s; peak {pool.peak_mb} MB"
    )
    for command, count in sorted(pool.commands.items()):
        print(f"  {command:10} {count:7}  slowest {pool.slowest[command]:5.1f} s")
    failures = sorted(pool.failures.items(), key=lambda item: -item[1]["count"])
    for kind, failure in failures:
        left_out, names = ([], failure["names"])
        if args.reduce:
            left_out, names = pool.reduce(kind, failure)
        without = f" --without {','.join(map(str, left_out))}" if left_out else ""
        print(f"\nFAILED {failure['count']} times: {kind}")
        print(f"  {' '.join(map(ascii, failure['command']))}   mutations: {', '.join(names)}")
        print(
            f"  again: python benchmarks/fuzz.py --seed {args.seed} --only {failure['index']}{without}"
        )
        print("    " + failure["text"].strip()[-args.text :].replace("\n", "\n    "))
    print(f"\n{len(failures)} kinds of failure" if failures else "\nno failures")
    return 1 if failures else 0


def main():
    """Fuzz; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=10**9, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=10)
    parser.add_argument("--limit-mb", type=int, default=1000)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument(
        "--without",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[],
        help="leave out these of its mutations, from 0",
    )
    parser.add_argument("--keep", type=Path, help="with --only: make the run here, read nothing")
    parser.add_argument("--no-reduce", dest="reduce", action="store_false")
    parser.add_argument("--text", type=int, default=1200, help="so much of each traceback")
    parser.add_argument("--verbose", action="store_true", help="show what workers print")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker)
        return 0
    if args.keep is not None:
        keep(args, args.keep)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="verl_profiler_fuzz_"))
    begun_s = time.monotonic()
    try:
        pool = Pool(args, folder)
        threads = [
            threading.Thread(target=pool.feed, args=(number,))
            for number in range(1 if args.only is not None else args.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return report(pool, args, time.monotonic() - begun_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
