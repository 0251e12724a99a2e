"""Two weeks in ten minutes: a host that records while everything goes wrong, judged from outside.

    python benchmarks/soak.py [--minutes 10] [--events 1e7] [--requests 1e6] [--seed 1]

`soak_host.py` runs in a process of its own: the real recorder and real wrappers, threads that record,
requests whose generators are dropped after one item, bad events, forked children that end in every
way, and seeded faults: full, failing and slow disks, failing and killed writers, steps of the clock,
cancellations.  As root the disk is a small file system of its own that is really full.

Then its files are read here, by code of this script, and held against the host's own count of what
it offered: each event is written at most once or counted as dropped, each line is JSON, memory is
flat, a probed call costs what it may, and no thread, file or child is left.  Prints a table; the
exit status is 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import msgspec

HOST = Path(__file__).with_name("soak_host.py")
DISK_BYTES = 8 << 30


class Table:
    """Rows of a claim, what was seen, and whether it holds."""

    def __init__(self):
        self.failed = 0

    def row(self, claim, seen, *, holds=None):
        """Print one row; None for what is only said."""
        word = {None: "", True: "ok", False: "FAILED"}[holds]
        self.failed += holds is False
        print(f"{claim:46} {seen:60} {word}".rstrip(), flush=True)


class Lines:
    """What the files of a run hold, by process."""

    def __init__(self, root):
        self.lines = Counter()
        self.own = Counter()
        self.bad = []
        self.torn = 0
        self.unfinished = []
        self.ids = {}
        self.twice = 0
        self.first_us = {}
        self.last_us = {}
        self.hooked = 0
        decode = msgspec.json.Decoder().decode
        for path in sorted(root.rglob("*.jsonl")):
            self._read(path, decode)

    def _read(self, path, decode):
        name = path.stem
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.unfinished.append(f"{path.name}:{number}")
                try:
                    content = decode(line)
                    stamp = content["timestamp"]
                    event = content["event"]
                except (msgspec.DecodeError, KeyError, TypeError) as error:
                    if path.parent.name == "custom":
                        # A file that others may write too: what was torn there stays.
                        self.torn += 1
                        continue
                    self.bad.append(f"{path}:{number}: {error}")
                    continue
                self._count(name, content, stamp, event)

    def _count(self, name, content, stamp, event):
        extra = content.get("extra")
        extra = extra if isinstance(extra, dict) else {}
        identity = extra.get("id")
        if isinstance(identity, str) and identity.count(":") == 2:
            pid, producer, count = identity.split(":")
            if event == "soak_path":
                # This file is named by the process, not by the recorder.
                name = int(pid)
            seen = self.ids.setdefault((pid, producer), bytearray())
            count = int(count)
            if count >= len(seen):
                seen.extend(bytes(max(count + 1 - len(seen), len(seen))))
            self.twice += seen[count]
            seen[count] = 1
        if event == "profiler_cost":
            self.own[name] += 1
        self.hooked += event == "soak_hooked"
        self.lines[name] += 1
        if stamp < self.first_us.get(name, "9"):
            self.first_us[name] = stamp
        if stamp > self.last_us.get(name, "0"):
            self.last_us[name] = stamp


def seconds_of(stamp):
    """Return seconds since 1970."""
    return datetime.fromisoformat(stamp).timestamp()


def headers_of(run):
    """Return the headers by process."""
    found = {}
    for path in sorted((run / "processes").glob("*.json")):
        with contextlib.suppress(ValueError):
            found[path.stem] = json.loads(path.read_bytes())
    return found


def judge_host(table, result, lines, header, name):
    """Hold the counts of the host's process together."""
    counters = header["counters"]
    written = lines.lines[name] + lines.lines[result["pid"]]
    own = lines.own[name]
    offered = result["offered"]
    dropped = counters["dropped"]
    table.row(
        "offered",
        f"{offered:,} events, {result['bad']:,} of them bad; {result['requests']:,} requests",
    )
    by = counters.get("dropped_by")
    table.row("counted as dropped", f"{dropped:,}" + (f" {by}" if by else ""))
    table.row(
        "the header's count of lines is right",
        f"{counters['events']:,} and {written:,}",
        holds=counters["events"] == written,
    )
    if "own_events" in counters:
        table.row(
            "the header's count of its own lines is right",
            f"{counters['own_events']:,} and {own:,}",
            holds=counters["own_events"] == own,
        )
    # Calls whose probe failed may have an event or none.
    missing = offered + own - written - dropped
    slack = result["hooked"] if lines.hooked else 0
    table.row(
        "offered + own = written + dropped",
        f"{offered:,} + {own:,} = {written:,} + {dropped:,}   missing {missing:,}",
        holds=-slack <= missing <= 0 if slack else missing == 0,
    )
    if name not in lines.first_us:
        table.row("the host has lines", "none", holds=False)
        return
    begin, end = result["begin_ns"] / 1e9, result["end_ns"] / 1e9
    first, last = seconds_of(lines.first_us[name]), seconds_of(lines.last_us[name])
    table.row(
        "times lie in the run, whatever the clock did",
        f"{first - begin:+.1f} s and {last - end:+.1f} s from its ends",
        holds=begin - 2 < first and last < end + 2,
    )


def judge_children(table, result, lines, headers, kill_loss_s):
    """Hold each child's count against its files."""
    names = {header.get("pid"): name for name, header in headers.items()}
    by_ending = {}
    for child in result["children"]:
        by_ending.setdefault(child["ending"], []).append(child)
    for ending, children in sorted(by_ending.items()):
        offered = sum(child["offered"] for child in children)
        missing, silent_s, ended = 0, [], 0
        for child in children:
            name = names.get(child["pid"])
            header = headers.get(name, {})
            written = lines.lines[name] + lines.lines[child["pid"]] if name else 0
            own = lines.own[name]
            if header.get("ended"):
                ended += 1
                dropped = header["counters"]["dropped"]
                lacking = child["offered"] + own - written - dropped
                # A signal may come between an event and its count by the child.
                missing += 0 if ending == "term" and lacking == -1 else abs(lacking)
            seen = lines.ids.get((str(child["pid"]), "child"), bytearray())
            first = next(
                (
                    place
                    for place in range(child["offered"])
                    if place >= len(seen) or not seen[place]
                ),
                None,
            )
            if first is not None and not header.get("ended"):
                times = child["times"]
                silent_s.append(child["ended"] - times[min(first // 50, len(times) - 1)])
        if ending in ("sys_exit", "error", "stop", "term"):
            table.row(
                f"children that ended by {ending}",
                f"{len(children)}, {ended} ended in order; {offered:,} offered, {missing:,} missing",
                holds=ended == len(children) and not missing,
            )
        else:
            worst = max(silent_s, default=0.0)
            table.row(
                f"children that ended by {ending}",
                f"{len(children)}; {offered:,} offered, the last {worst:.2f} s lost at most",
                holds=worst <= kill_loss_s,
            )


def judge_memory(table, result, share):
    """Hold memory against what it was after the warm-up."""
    rests = result["rests"]
    used = [rest["rss_mb"] for rest in rests]
    text = " ".join(f"{mb:.0f}" for mb in used)
    if len(used) < 3:
        table.row("memory", f"{text} MB")
        return
    # The first rest ends the warm-up.
    early, late = statistics.mean(used[1:3]), statistics.mean(used[-2:])
    table.row(
        f"memory flat within {share:.0%}, at {len(used)} rests",
        f"{text} MB: {late / early - 1:+.1%}",
        holds=late <= early * (1 + share),
    )
    files = [rest["files"] for rest in rests]
    table.row("open files at the rests", " ".join(map(str, files)), holds=files[-1] <= files[0] + 4)
    alive = [rest["payloads"] for rest in rests]
    table.row("requests alive at the rests", " ".join(map(str, alive)), holds=not any(alive))


def judge(table, result, root, args):
    """Judge everything; the table counts what failed."""
    run = root / "disk" / "run"
    headers = headers_of(run)
    lines = Lines(root)
    name = next(
        (name for name, header in headers.items() if header.get("pid") == result["pid"]), None
    )
    table.row("faults", ", ".join(f"{count} {fault}" for fault, count in result["faults"].items()))
    table.row(
        "writes that were broken",
        ", ".join(f"{count} {mode}" for mode, count in result["disk_hits"].items()),
    )
    table.row(
        "every probe was placed",
        str(result["probes_missed"] or "all"),
        holds=not result["probes_missed"],
    )
    table.row(
        "every line is JSON",
        f"{sum(lines.lines.values()):,} lines, bad: {lines.bad[:3]}",
        holds=not lines.bad,
    )
    table.row("every line is whole", str(lines.unfinished[:3] or "yes"), holds=not lines.unfinished)
    table.row("pieces of lines in files of the user's choice", f"{lines.torn:,}")
    table.row("no event twice", f"{lines.twice:,} twice", holds=not lines.twice)
    if name is None or "counters" not in headers[name]:
        table.row("the host has a header", "none", holds=False)
    else:
        judge_host(table, result, lines, headers[name], name)
    judge_children(table, result, lines, headers, args.kill_loss_s)
    judge_memory(table, result, args.memory_share)
    (plain50, plain99), (wrapped50, wrapped99) = result["plain_us"], result["wrapped_us"]
    ratio = wrapped99 / plain99 if plain99 else 0.0
    table.row(
        "ten calls without and with a probe, p50",
        f"{plain50:.0f} and {wrapped50:.0f} µs, {(wrapped50 - plain50) / 10:.1f} µs a call",
    )
    table.row(
        "  p99",
        f"{plain99:.0f} and {wrapped99:.0f} µs, {ratio:.2f} times",
        holds=ratio <= args.latency_ratio if args.latency_ratio else None,
    )
    table.row("stop took", f"{result['stop_s']:.2f} s")
    for kind, count in result["violations"].items():
        table.row(kind[:46], f"{count:,} times", holds=False)
        print(f"    {kind}\n    " + result["texts"].get(kind, "").replace("\n", "\n    "))


def main():
    """Soak and judge; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--events", type=float, default=1e7, help="about so many are offered")
    parser.add_argument("--requests", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--max-pending", type=int, default=50_000)
    parser.add_argument("--memory-share", type=float, default=0.05)
    parser.add_argument("--latency-ratio", type=float, default=2.0, help="of the p99; 0: none")
    parser.add_argument("--kill-loss-s", type=float, default=5.0, help="what SIGKILL may cost")
    parser.add_argument("--keep", type=Path, help="leave the files here")
    parser.add_argument("--no-mount", action="store_true", help="as if not root")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="verl_profiler_soak_"))
    (root / "disk").mkdir(parents=True)
    may_mount = os.geteuid() == 0 and not args.no_mount
    mounted = may_mount and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "verl_profiler_soak", root / "disk"],
        check=False,
        capture_output=True,
    ).returncode  # fmt: skip
    options = {
        "minutes": args.minutes,
        "events": args.events,
        "requests": args.requests,
        "seed": args.seed,
        "threads": args.threads,
        "max_pending": args.max_pending,
        "filesystem_bytes": DISK_BYTES if mounted else 0,
    }
    table = Table()
    begin = time.monotonic()
    try:
        print(
            f"seed {args.seed}, {args.minutes:g} minutes; the disk is {'a tmpfs' if mounted else 'a folder'}"
        )
        with (root / "stderr.txt").open("wb") as stderr:
            ended = subprocess.run(
                [sys.executable, "-X", "faulthandler", HOST, root, json.dumps(options)],
                check=False,
                stderr=stderr,
                timeout=args.minutes * 60 * 2 + 300,
            )
        said = (root / "stderr.txt").read_text(errors="replace").splitlines()
        table.row("the host's exit status", str(ended.returncode), holds=ended.returncode == 0)
        table.row("lines on stderr", f"{len(said):,}")
        if (root / "result.json").exists():
            judge(table, json.loads((root / "result.json").read_text()), root, args)
        else:
            table.row("the host wrote its account", "no", holds=False)
            print("\n".join(said[-30:]))
    finally:
        if mounted and args.keep is None:
            subprocess.run(["umount", root / "disk"], check=False)
        if args.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    print(
        f"{time.monotonic() - begin:.0f} s; "
        + (f"{table.failed} FAILED" if table.failed else "all held")
    )
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
