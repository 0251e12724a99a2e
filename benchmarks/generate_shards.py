"""Write a run of many processes and steps as the Parquet shards that the reader makes of event files.

    python benchmarks/generate_shards.py /tmp/run --events 1e9
    python benchmarks/generate_shards.py /tmp/run --events 1e9 --for 300
    python benchmarks/generate_shards.py /tmp/run --steps 1000 --workers 64 --requests 512 --base-steps 25
    python benchmarks/generate_shards.py /tmp/run --one-step 1e6 --further-turns 0.3

By default 1,024 processes: 512 agent-loop workers, 128 engines, 382 ranks, a trainer and a reward worker,
with 8,192 requests and a million events a step.  One step (or `--base-steps`) is generated and converted;
its shards are copied in duckdb, each copy with its own step, ids, times and length, so memory does not grow with the run.
Copies of one step have a folder each, `events/step_<N>`, so that a reader of other steps does not open them.
A billion events take about 15 GB.  With `--for`, the command ends after so many seconds; the same
command continues where it ended, and exits with 0 once the run is complete.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from generate_events import Shape, generate

__all__ = ["multiply"]

_GAP_US = 1_000_000
# Every so many steps, one takes half as long again.
_OUTLIERS = 97


def multiply(
    base: Path, folder: Path, events: int, *, end_s: float = math.inf, one_step: bool = False
) -> int:
    """Write the events of `base` many times over, in parts as a conversion makes them.

    Args:
        base: A run directory with event files.
        folder: The run to write, or to go on with.
        events: How many events there should be at least.
        end_s: When to stop, by `time.monotonic`.
        one_step: All requests are of one step, and begin with it.

    Returns:
        How many events there are.
    """
    import duckdb

    from verl_profiler.reading.event_sql import AS_PARQUET
    from verl_profiler.reading.reader import load

    with load(base) as run:
        counted = run.rows(
            "SELECT count(*) AS events, max(step) AS steps, min(begin_us) AS begin_us, "
            "max(end_us) AS end_us FROM events WHERE step > 0"
        )[0]
    parts = sorted((base / ".cache" / "events-1").glob("part-*.parquet"))
    (folder / "events").mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        shutil.copy(base / "run.json", folder / "run.json")
        shutil.copytree(base / "processes", folder / "processes")
    copies = math.ceil(events / counted["events"])
    begins = _begins(copies, counted["end_us"] - counted["begin_us"], counted["begin_us"])
    if one_step:
        # None ends after the first copy's last, which its rollout waits for.
        begins = [(counted["begin_us"], 1 - number / copies / 4) for number in range(copies)]
    with duckdb.connect() as connection:
        connection.execute("SET memory_limit = '2GB'; SET preserve_insertion_order = false")
        for number, (begin_us, factor) in enumerate(begins):
            if time.monotonic() > end_s:
                return number * counted["events"]
            for place, part in enumerate(parts):
                # The first copy also has the events before the first step.
                apart = number and not one_step and counted["steps"] == 1
                target = folder / "events" / (f"step_{number + 1}" if apart else "")
                target.mkdir(exist_ok=True)
                target /= f"part-{number:06d}-{place}.parquet"
                if target.exists():
                    continue
                rows = f"FROM read_parquet('{part}')"
                columns = {row[0] for row in connection.execute(f"DESCRIBE {rows}").fetchall()}
                ids = columns.intersection(("request_id", "engine_request_id", "uid"))

                def moved(time_us: str, begin_us: int = begin_us, factor: float = factor) -> str:
                    after_us = f"({time_us} - {counted['begin_us']})"
                    return f"(floor({after_us} * {factor!r})::BIGINT + {begin_us})"

                further = 0 if one_step else number * counted["steps"]
                which = "step > 0" if number else "true"
                if one_step and number:
                    known = " OR ".join(f"{name} IS NOT NULL" for name in sorted(ids)) or "false"
                    which = f"step > 0 AND ({known})"
                changed = [
                    f"step + {further} AS step",
                    f"{moved('end_us')} AS end_us",
                    f"{moved('end_us')} - {moved('(end_us - duration_us)')} AS duration_us",
                    *(f"'{number:06x}' || {name}[7:] AS {name}" for name in sorted(ids)),
                ]
                written = target.with_suffix(".partial")
                connection.execute(
                    f"COPY (SELECT * REPLACE ({', '.join(changed)}) {rows} "
                    f"WHERE {which}) TO '{written}' {AS_PARQUET}"
                )
                written.rename(target)
    return copies * counted["events"]


def _begins(copies: int, span_us: int, first_us: int) -> list[tuple[int, float]]:
    """Return when each copy begins, and how many times as long it takes."""
    begins: list[tuple[int, float]] = []
    for number in range(copies):
        factor = 1.5 if number % _OUTLIERS == _OUTLIERS - 1 else 1 + 0.1 * math.sin(number)
        begins.append((first_us, factor))
        first_us += math.ceil(span_us * factor) + _GAP_US
    return begins


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate what the command line asks for; return 3 if it is not complete yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the run directory to make")
    parser.add_argument("--events", type=float, help="at least so many; decides the steps")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--one-step", type=float, metavar="REQUESTS", help="so many requests in a single step"
    )
    parser.add_argument("--for", dest="seconds", type=float, default=math.inf, help="stop after")
    for name, default in (
        ("workers", 512),
        ("engines", 128),
        ("ranks", 382),
        ("requests", 8_192),
        ("turns", 64),
        ("seed", 0),
        ("base-steps", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--further-turns", type=float, default=12.5)
    args = parser.parse_args(arguments)
    end_s = time.monotonic() + args.seconds
    base = args.out.with_name(f"{args.out.name}.base") / args.out.name
    if not base.exists():
        fields = ("workers", "engines", "ranks", "requests", "turns", "further_turns", "seed")
        shape = Shape(
            steps=args.base_steps,
            validate_every=0,
            **{name: getattr(args, name) for name in fields},
        )
        one = generate(base, shape)["total"]
        print(
            f"base of {args.base_steps}: {one:,} events of {len(list((base / 'processes').iterdir()))} processes"
        )
    truth = json.loads((base / "truth.json").read_text(encoding="utf-8"))
    # Less the two events before the first step.
    wanted = int(args.events or args.steps * (truth["total"] - 2) / args.base_steps)
    if args.one_step:
        wanted = math.ceil(args.one_step / args.requests) * (truth["total"] - 2)
    total = multiply(base, args.out, wanted, end_s=end_s, one_step=bool(args.one_step))
    complete = total >= wanted
    print(f"{total:,} of {wanted:,} events in {args.out}")
    if complete:
        shutil.rmtree(base.parent)
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
