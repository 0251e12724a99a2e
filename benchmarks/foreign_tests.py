"""Run anyone's pytest suite with and without the profiler, and compare the outcome of every test.

    python benchmarks/foreign_tests.py ROOT FILE [FILE ...] [--timeout 300] [--journal DONE] [--together N]
    python benchmarks/foreign_tests.py /src/verl $(cd /src/verl && find tests -name '*_on_cpu.py')
    python benchmarks/foreign_tests.py /src/TransferQueue tests/test_client.py -- -k put

Each file (or --together so many) runs in a pytest of its own, from ROOT: once as it is, and once with the plugin active as in a
worker of a run: VERL_PROFILER_SETTINGS is set, with every family of probes on, and the plugin is
imported first.  Where a test ends differently, the file is run again, both ways: a test that ends both
ways without the profiler is flaky, and no difference.  With --journal, files that are done are not
run again, and a later call continues.  What follows `--` is for pytest.

Exit status 1: some test ends differently.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

AGAIN = 2


def settings(folder):
    """Make a run directory; return what a worker of that run has in its environment."""
    from verl_profiler.recording import run_directory
    from verl_profiler.recording.clock import take_anchor
    from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

    anchor = take_anchor()
    events = EventSettings()
    made = run_directory.make(str(folder), anchor, events, {})
    return WorkerConfig(str(made), str(folder), events, anchor).encode(), made


def outcomes(report):
    """Return the outcome of each test from a JUnit report."""
    found = {}
    try:
        cases = ET.parse(report).getroot().iter("testcase")
    except (OSError, ET.ParseError):
        return found
    for case in cases:
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = "+".join(sorted(kinds)) or "passed"
    return found


def run_files(args, files, *, active):
    """Run test files in one pytest.

    Returns:
        Outcomes by test (with one named `(file)` for pytest itself), and events and failures of probes
        that were recorded.
    """
    with tempfile.TemporaryDirectory(prefix="verl_profiler_foreign_") as name:
        folder = Path(name)
        report = folder / "report.xml"
        environment = {
            key: value for key, value in os.environ.items() if key != "VERL_PROFILER_SETTINGS"
        }
        command = [sys.executable, "-m", "pytest", "-q", *(["-x"] if args.first else [])]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *files, *args.pytest]
        made = None
        if active:
            environment["VERL_PROFILER_SETTINGS"], made = settings(folder / "run")
            command += ["-p", "verl_profiler.plugin"]
        with (folder / "said.txt").open("wb") as said:
            process = subprocess.Popen(
                command,
                cwd=args.root,
                env=environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                status = process.wait(args.timeout)
            except subprocess.TimeoutExpired:
                status = "too long"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = outcomes(report)
        found["(file)"] = str(status)
        account = recorded(made) if made is not None else {}
        if args.verbose:
            print((folder / "said.txt").read_text(errors="replace")[-3000:])
        return found, account


def recorded(run):
    """Return how many events a run holds, and the failures of probes."""
    time.sleep(0.6)
    events = sum(path.read_bytes().count(b"\n") for path in run.glob("step_*/*.jsonl"))
    errors, installed = Counter(), set()
    for path in run.glob("processes/*.json"):
        try:
            probes = json.loads(path.read_bytes()).get("probes", {})
        except ValueError:
            continue
        errors.update(probes.get("errors", {}))
        installed.update(probes.get("installed", {}))
    return {"events": events, "errors": dict(errors), "probes": len(installed)}


def compare(args, files):
    """Run files both ways; return what came of it."""
    plain, _ = run_files(args, files, active=False)
    active, account = run_files(args, files, active=True)
    seen = {name: {outcome} for name, outcome in plain.items()}
    seen_active = {name: {outcome} for name, outcome in active.items()}
    for _ in range(AGAIN):
        if not different(seen, seen_active):
            break
        for names, is_active in ((seen, False), (seen_active, True)):
            for name, outcome in run_files(args, files, active=is_active)[0].items():
                names.setdefault(name, set()).add(outcome)
    differences = {
        name: [sorted(seen.get(name, ())), sorted(seen_active.get(name, ()))]
        for name in different(seen, seen_active)
    }
    counts = Counter(outcome for name, outcome in active.items() if name != "(file)")
    return {
        "files": files,
        "outcomes": counts,
        "status": plain["(file)"],
        "differences": differences,
        **account,
    }


def different(seen, seen_active):
    """Return the tests that never end with the profiler as they end without it."""
    return [
        name
        for name in sorted({*seen, *seen_active})
        if not seen.get(name, set()) & seen_active.get(name, set())
    ]


def main():
    """Compare; return the exit status."""
    arguments = sys.argv[1:]
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", type=Path, help="where the suite's tests run")
    parser.add_argument("files", nargs="*", type=Path, help="test files, below it")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a file may take")
    parser.add_argument("--together", type=int, default=1, help="so many files in one pytest")
    parser.add_argument("--journal", type=Path, help="a line for each file that is done")
    parser.add_argument("--first", action="store_true", help="end a file at its first failure")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(arguments[:place])
    args.pytest = arguments[place + 1 :]
    done = []
    if args.journal and args.journal.exists():
        done = [json.loads(line) for line in args.journal.read_text().splitlines()]
    known = {file for row in done for file in row["files"]}
    left = [str(file) for file in args.files if str(file) not in known]
    for place in range(0, len(left), args.together):
        row = compare(args, left[place : place + args.together])
        done.append(row)
        words = ", ".join(
            f"{count} {outcome}" for outcome, count in sorted(row["outcomes"].items())
        )
        print(
            f"{' '.join(row['files'])}: {words or row['status']}; {row.get('events', 0)} events",
            flush=True,
        )
        if args.journal:
            with args.journal.open("a") as journal:
                journal.write(json.dumps(row) + "\n")
    return report(done)


def report(rows):
    """Print the sums and every difference; return the exit status."""
    total = Counter()
    for row in rows:
        total.update(row["outcomes"])
        for name, (without, with_profiler) in row["differences"].items():
            print(
                f"DIFFERENT {' '.join(row['files'])} {name}: {without} without, {with_profiler} with the profiler"
            )
        for probe, count in row.get("errors", {}).items():
            print(f"  {' '.join(row['files'])}: probe {probe} failed {count} times")
    events = sum(row.get("events", 0) for row in rows)
    files = sum(len(row["files"]) for row in rows)
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(total.items()))
    differences = sum(len(row["differences"]) for row in rows)
    print(
        f"{files} files, {sum(total.values())} tests ({words}); {events} events recorded; "
        f"{differences} differences"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
