"""Write a run directory as a training would leave it, with known ground truth.

    python benchmarks/generate_events.py /tmp/run --events 1e6
    python benchmarks/generate_events.py /tmp/run --steps 2 --workers 2 --requests 8

All roles, long-tailed tools, a worker that is slower than the others, one stall of an event loop,
validation, and the profiler's own accounts.  `truth.json` beside the events says what an analysis
has to find.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = ["Shape", "generate", "shape_for"]

BEGIN_US = 1_795_228_400_000_000
TOOLS = ("calc", "search", "sandbox")
POLL_US = 2_000_000


@dataclass
class Shape:
    """How large the run is and what is wrong in it.

    Args:
        requests: Per training step, over all workers.
        turns: At most so many per request.
        further_turns: How many turns a request has beyond the first, in the mean, but for that limit.
        straggler: The worker whose engine calls take three times as long; None for none.
        stall_step: The step in which worker 0's event loop stands still; None for none.
        validate_every: Steps between validations; 0 for none.
    """

    steps: int = 2
    workers: int = 2
    requests: int = 8
    turns: int = 4
    further_turns: float = 1 / 0.7
    engines: int = 1
    ranks: int = 2
    seed: int = 0
    straggler: int | None = 1
    stall_step: int | None = 2
    stall_us: int = 1_500_000
    validate_every: int = 2
    validation_requests: int = 4


@dataclass
class _Process:
    name: str
    role: str
    rank: int
    lines: list[tuple[int, str]] = field(default_factory=list)
    events: int = 0
    size: int = 0
    steps: list[int] = field(default_factory=list)


class _Clock:
    """Microseconds to ISO text; the part up to the second is kept."""

    def __init__(self) -> None:
        self._second = -1
        self._prefix = ""

    def text(self, moment_us: int) -> str:
        second, rest = divmod(moment_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, timezone.utc).strftime(
                "%Y-%m-%dT%H:%M:%S."
            )
        return f"{self._prefix}{rest:06d}+00:00"


class _Writer:
    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.random = random.Random(shape.seed)
        self.clock = _Clock()
        self.processes: dict[str, _Process] = {}
        self.counts: dict[str, int] = {}
        self.step = 0
        self.stall: tuple[int, int] | None = None

    def process(self, name: str, role: str, rank: int) -> _Process:
        return self.processes.setdefault(name, _Process(name, role, rank))

    def span(self, process: _Process, event: str, begin: int, end: int, extra: str = "") -> None:
        body = f',"extra":{{{extra}}}' if extra else ""
        duration = repr((end - begin) / 1e6)
        tail = f'"workid":{process.rank},"step":{self.step}}}\n'
        process.lines.append((end, f'","event":"{event}","duration_sec":{duration}{body},{tail}'))

    def instant(self, process: _Process, event: str, moment: int, extra: str = "") -> None:
        body = f',"extra":{{{extra}}}' if extra else ""
        process.lines.append(
            (moment, f'","event":"{event}"{body},"workid":{process.rank},"step":{self.step}}}\n')
        )

    def after(self, moment: int, length: int, *, stalls: bool) -> int:
        """Return when something that takes `length` is over, in a loop that may stand still."""
        end = moment + length
        if stalls and self.stall is not None and self.stall[0] <= end < self.stall[1]:
            return self.stall[1]
        return end

    def flush(self) -> None:
        """Write the lines of the current step, in the order in which they ended."""
        folder = self.folder / f"step_{self.step}"
        folder.mkdir(exist_ok=True)
        text = self.clock.text
        for process in self.processes.values():
            if not process.lines:
                continue
            events = len(process.lines)
            last = max(end for end, _ in process.lines)
            cost = (
                f'"events":{events},"bytes":{events * 210},"dropped":0,'
                f'"wrapper_s":{events * 8e-7:.9f},"writer_s":{events * 3e-6:.9f}'
            )
            self.instant(process, "profiler_cost", last + 10, cost)
            process.lines.sort(key=lambda line: line[0])
            path = folder / f"{process.name}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for end, line in process.lines:
                    file.write(f'{{"timestamp":"{text(end)}{line}')
            for _, line in process.lines:
                event = line[11 : line.index('"', 11)]
                self.counts[event] = self.counts.get(event, 0) + 1
            process.events += len(process.lines)
            process.size += path.stat().st_size
            process.steps.append(self.step)
            process.lines.clear()


def generate(folder: Path, shape: Shape) -> dict[str, Any]:
    """Write a run into `folder`, which must not exist, and return its ground truth."""
    folder.mkdir(parents=True)
    writer = _Writer(folder, shape)
    for rank in range(shape.workers):
        writer.process(f"worker_{rank}", "agent_loop", rank)
    truth: dict[str, Any] = {"steps": {}}
    now = BEGIN_US
    trainer = writer.process("trainer_0", "trainer", 0)
    writer.span(trainer, "init", now, now + 9_000_000)
    writer.flush()
    now += 10_000_000
    for step in range(1, shape.steps + 1):
        writer.step = step
        now, truth["steps"][str(step)] = _step(writer, now, step)
        writer.flush()
        now += 20_000
    truth["events"] = dict(sorted(writer.counts.items()))
    truth["total"] = sum(writer.counts.values())
    truth["straggler"] = None if shape.straggler is None else f"worker_{shape.straggler}"
    _write_headers(writer, now)
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")
    return truth


def _step(writer: _Writer, begin: int, step: int) -> tuple[int, dict[str, Any]]:
    shape, rng = writer.shape, writer.random
    trainer = writer.process("trainer_0", "trainer", 0)
    writer.stall = None
    if step == shape.stall_step:
        writer.stall = (begin + 900_000, begin + 900_000 + shape.stall_us)
        writer.span(
            writer.process("worker_0", "agent_loop", 0),
            "event_loop_lag",
            *writer.stall,
            '"loop":"main"',
        )
    requests = [
        _request(writer, begin + 30_000, number, validate=False) for number in range(shape.requests)
    ]
    last = max(request["end_us"] for request in requests)
    gen_end = begin + math.ceil((last - begin) / POLL_US) * POLL_US
    writer.span(
        trainer, "sample_wait", begin + 5_000, gen_end - 1_000, f'"samples":{len(requests)}'
    )
    writer.span(trainer, "sleep_replicas", gen_end - 900, gen_end - 100)
    writer.span(trainer, "gen", begin, gen_end)
    for engine in range(shape.engines):
        process = writer.process(f"engine_{engine}", "engine", engine)
        writer.span(process, "memory_release", gen_end, gen_end + 40_000, '"tags":["kv_cache"]')
    phases = {"gen": gen_end - begin}
    now = gen_end
    for phase, base in (
        ("old_log_prob", 400_000),
        ("ref", 350_000),
        ("adv", 3_000),
        ("update_actor", 1_500_000),
        ("update_weights", 300_000),
    ):
        now += 400
        length = round(base * rng.uniform(0.9, 1.1))
        _rank_work(writer, phase, now, length)
        writer.span(trainer, phase, now, now + length)
        phases[phase] = length
        now += length
    for engine in range(shape.engines):
        process = writer.process(f"engine_{engine}", "engine", engine)
        writer.span(process, "memory_resume", now - 60_000, now - 20_000, '"tags":["kv_cache"]')
    end = now + 700
    writer.span(trainer, "step", begin, end)
    writer.instant(trainer, "metrics", end + 50, f'"metrics":{{"training/global_step":{step}}}')
    result: dict[str, Any] = {
        "duration_us": end - begin,
        "phases_us": phases,
        "unaccounted_us": end - begin - sum(phases.values()),
        "requests": len(requests),
        "request_end_us": last,
        "gen_end_us": gen_end,
        "slowest": max(requests, key=lambda request: request["duration_us"]),
        "tool_us": sum(request["tool_us"] for request in requests),
        "engine_us": sum(request["engine_us"] for request in requests),
        "stall_us": 0 if writer.stall is None else shape.stall_us,
        "validation_requests": 0,
    }
    if shape.validate_every and step % shape.validate_every == 0:
        writer.stall = None
        begin_validation = end + 1_000
        validated = [
            _request(writer, begin_validation + 5_000, 10_000 + number, validate=True)
            for number in range(shape.validation_requests)
        ]
        end = max(request["end_us"] for request in validated) + 3_000
        writer.span(trainer, "validation", begin_validation + 2_000, end - 1_000, '"validate":true')
        writer.span(trainer, "testing", begin_validation, end)
        result["validation_requests"] = len(validated)
    return end, result


def _request(writer: _Writer, begin: int, number: int, *, validate: bool) -> dict[str, Any]:
    shape, rng = writer.shape, writer.random
    worker = number % shape.workers
    process = writer.process(f"worker_{worker}", "agent_loop", worker)
    engine_number = number % shape.engines
    engine = writer.process(f"engine_{engine_number}", "engine", engine_number)
    stalls = worker == 0
    slow = 3 if worker == shape.straggler and not validate else 1
    request_id = f"{rng.getrandbits(128):032x}"
    tail = f',"sample":{number},"session":0' + (',"validate":true' if validate else "")
    who = f'"request_id":"{request_id}"{tail}'
    uid = f'"uid":"{request_id[:8]}"'
    begin += rng.randrange(40_000)
    writer.instant(process, "request_start", begin, tail[1:] + "," + uid)
    loop_begin = begin + 300
    now = writer.after(loop_begin, rng.randrange(400, 3_000), stalls=stalls)
    prompt_tokens = rng.randrange(80, 400)
    writer.span(process, "prompt_build", loop_begin + 50, now, f'{who},"tokens":{prompt_tokens}')
    further = rng.expovariate(1 / shape.further_turns) if shape.further_turns else 0.0
    turns = min(1 + int(further), shape.turns)
    context = prompt_tokens
    response_tokens = 0
    sums = {"engine_us": 0, "tool_us": 0}
    slowest_tool: tuple[int, str | None, int | None] = (0, None, None)
    for turn in range(turns):
        here = f'"request_id":"{request_id}","turn":{turn}{tail}'
        turn_begin = now
        tokens = max(1, round(rng.lognormvariate(4, 0.6)))
        engine_id = f"{request_id}{turn:02d}"
        queue = rng.randrange(200, 40_000)
        prefill = 2_000 + context * 20
        decode = tokens * 4_000 * slow
        served = now + 1_500
        served_end = served + queue + prefill + decode
        now = writer.after(now, 1_500 + queue + prefill + decode + 1_200, stalls=stalls)
        server = f'"server":"engine-{engine_number}"'
        writer.span(
            process, "server_acquire", turn_begin + 100, turn_begin + 900, f"{here},{server}"
        )
        reason = "stop" if turn == turns - 1 else "tool_calls"
        counts = f'"prompt_tokens":{context},"response_tokens":{tokens},"finish_reason":"{reason}"'
        writer.span(
            process,
            "engine_call",
            turn_begin,
            now,
            f'{here},"engine_request_id":"{engine_id}",{server},{counts}',
        )
        writer.span(
            engine,
            "engine_request",
            served,
            served_end,
            f'"request_id":"{request_id}","engine_request_id":"{engine_id}",{counts},'
            f'"cached_tokens":{context // 2},"queue_s":{queue / 1e6!r},"prefill_s":{prefill / 1e6!r},'
            f'"decode_s":{decode / 1e6!r},"weight_version":{writer.step - 1}',
        )
        sums["engine_us"] += now - turn_begin
        context += tokens
        response_tokens += tokens
        merge_begin = now
        now = writer.after(now, rng.randrange(100, 600), stalls=stalls)
        writer.span(process, "token_merge", merge_begin, now, f'{here},"of":"response"')
        parse_begin = now
        now = writer.after(now, rng.randrange(50, 400), stalls=stalls)
        calls = 0 if turn == turns - 1 else rng.choice((1, 1, 1, 2))
        writer.span(process, "tool_parsing", parse_begin, now, f'{here},"tool_calls":{calls}')
        if calls:
            tools_begin = now
            ends = []
            for _ in range(calls):
                tool = rng.choices(TOOLS, (6, 3, 1))[0]
                median = {"calc": 9.2, "search": 11.8, "sandbox": 12.5}[tool]
                end = writer.after(
                    tools_begin, round(rng.lognormvariate(median, 1.0)), stalls=stalls
                )
                status = ',"status":"error","error":"tool_error"' if rng.random() < 0.02 else ""
                writer.span(
                    process, "tool_call", tools_begin, end, f'{here},"tool":"{tool}"{status}'
                )
                slowest_tool = max(
                    slowest_tool, (end - tools_begin, tool, turn), key=lambda each: each[0]
                )
                ends.append(end)
            now = max(ends)
            sums["tool_us"] += now - tools_begin
            writer.span(process, "tool_execution", tools_begin, now, f'{here},"tool_calls":{calls}')
            merge_begin = now
            now = writer.after(now, rng.randrange(200, 900), stalls=stalls)
            writer.span(process, "token_merge", merge_begin, now, f'{here},"of":"tool_response"')
            context += 30 * calls
        writer.span(process, "turn", turn_begin, now, f'{here},"tool_calls":{calls}')
    writer.span(process, "agent_loop", loop_begin, now, who)
    post_begin = now + 60
    score = round(rng.random())
    rewarded = writer.after(post_begin + 200, rng.randrange(2_000, 30_000), stalls=stalls)
    reward_worker = writer.process("reward_0", "reward", 0)
    writer.span(
        reward_worker,
        "reward_score",
        post_begin + 500,
        max(post_begin + 501, rewarded - 400),
        f'{uid},"score":{score}',
    )
    writer.span(process, "reward", post_begin + 200, rewarded, f'{who},"score":{score}')
    put_end = writer.after(rewarded + 100, rng.randrange(300, 2_500), stalls=stalls)
    writer.span(
        process,
        "tq_put",
        rewarded + 100,
        put_end,
        f'{who},"size_bytes":{context * 40},"rows":1,"partition":"train"',
    )
    now = put_end + 100
    writer.span(process, "postprocess", post_begin, now, who)
    end = now + 40
    writer.span(
        process,
        "request",
        begin,
        end,
        f'{who},"agent":"tool_agent","turns":{turns},"prompt_tokens":{prompt_tokens},'
        f'"response_tokens":{response_tokens},"reward":{score},{uid}',
    )
    return {
        "request_id": request_id,
        "worker": process.name,
        "begin_us": begin,
        "end_us": end,
        "duration_us": end - begin,
        "turns": turns,
        **sums,
        "slowest_tool_us": slowest_tool[0],
        "slowest_tool": slowest_tool[1],
        "slowest_tool_turn": slowest_tool[2],
    }


def _rank_work(writer: _Writer, phase: str, begin: int, length: int) -> None:
    """Write what the trainer's ranks did during a phase; the last rank is always the slowest."""
    event = {
        "old_log_prob": "compute_log_prob",
        "ref": "compute_ref_log_prob",
        "update_actor": "update_actor",
        "update_weights": "update_weights",
    }.get(phase)
    if event is None:
        return
    for rank in range(writer.shape.ranks):
        process = writer.process(f"actor_{rank}", "actor", rank)
        share = 0.95 if rank == writer.shape.ranks - 1 else 0.8
        end = begin + 500 + round((length - 1_000) * share)
        writer.span(process, event, begin + 500, end)
        inner = (begin + 1_000, end - 500)
        if event == "update_actor":
            writer.span(process, "train_mini_batch", *inner)
            writer.span(process, "train_batch", *inner)
            split = inner[0] + (inner[1] - inner[0]) * 9 // 10
            writer.span(process, "forward_backward", inner[0], split, '"forward_only":false')
            writer.span(process, "optimizer_step", split, inner[1])
            used = (rank % 16 + 3) * 1_000_000_000 + writer.step * 1_000_000
            writer.instant(
                process,
                "memory",
                inner[1],
                f'"at":"after update_actor","allocated_bytes":{used},"reserved_bytes":{used * 2},'
                f'"used_bytes":{used * 2},"total_bytes":80000000000',
            )
        elif event == "update_weights":
            writer.span(process, "weight_transfer", *inner, f'"weight_version":{writer.step}')
        else:
            writer.span(process, "infer_batch", *inner)


def _write_headers(writer: _Writer, now: int) -> None:
    folder, shape = writer.folder, writer.shape
    boot = "00000000-0000-4000-8000-000000000000"
    clock = {
        "boot_id": boot,
        "wall_ns": BEGIN_US * 1000,
        "monotonic_ns": 5_000_000_000,
        "uncertainty_ns": 90,
    }
    versions = {"verl_profiler": "0.1.0", "verl": "0.9.1", "ray": "2.60.0"}
    launch = {
        "format": 1,
        "experiment": folder.name,
        "launched": datetime.fromtimestamp(BEGIN_US / 1e6, timezone.utc).isoformat(
            timespec="microseconds"
        ),
        "host": "node-1",
        "pid": 4100 + shape.seed,
        "command": ["python", "-m", "verl.trainer.main_ppo", "+profiler=multiturn"],
        "cwd": "/",
        "versions": {**versions, "python": "3.11.7"},
        "settings": {},
        "training": {"n_gpus_per_node": shape.ranks, "nnodes": 1, "rollout": "sglang"},
        "clock": clock,
    }
    (folder / "run.json").write_text(json.dumps(launch, indent=1) + "\n", encoding="utf-8")
    (folder / "processes").mkdir()
    elapsed = (now - BEGIN_US) * 1000
    for number, process in enumerate(writer.processes.values()):
        header = {
            "format": 1,
            "name": process.name,
            "role": process.role,
            "rank": process.rank,
            "replica": process.rank if process.role == "engine" else None,
            "host": "node-1",
            "ip": "10.0.0.1",
            "pid": 4200 + number,
            "ppid": 4100,
            "actor_name": process.name,
            "actor_class": None,
            "python": "3.11.7",
            "versions": versions,
            "clock": {
                **clock,
                "shared": True,
                "last_wall_ns": clock["wall_ns"] + elapsed,
                "last_monotonic_ns": clock["monotonic_ns"] + elapsed,
            },
            "probes": {"installed": {}, "missed": {}, "hits": {}, "errors": {}},
            "counters": {
                "events": process.events,
                "bytes": process.size,
                "dropped": 0,
                "write_errors": 0,
                "wrapper_s": round(process.events * 8e-7, 9),
                "writer_s": round(process.events * 3e-6, 9),
            },
            "steps": process.steps,
            "started": writer.clock.text(BEGIN_US),
            "updated": writer.clock.text(now),
            "ended": writer.clock.text(now),
            "end_reason": "exit",
            "directory": "/logs/" + folder.name,
            "fallback": None,
        }
        (folder / "processes" / f"{process.name}.json").write_text(
            json.dumps(header) + "\n", encoding="utf-8"
        )


def shape_for(events: int) -> Shape:
    """Return a run of about `events` lines: 16 workers and at most 20,000 requests a step."""
    per_request = 23
    requests = max(16, min(2_048, events // per_request // 4))
    steps = max(1, round(events / per_request / requests))
    return Shape(steps=steps, workers=16, requests=requests, turns=8, engines=4, ranks=8)


def main() -> int:
    """Generate what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the run directory to make")
    parser.add_argument("--events", type=float, help="about how many lines; decides the rest")
    names = ("steps", "workers", "requests", "turns", "engines", "ranks", "seed")
    for name in names:
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
    arguments = parser.parse_args()
    if arguments.out.exists():
        print(f"{arguments.out} exists; remove it or name another", file=sys.stderr)
        return 2
    shape = Shape(**{name: getattr(arguments, name) for name in names})
    if arguments.events:
        shape = shape_for(int(arguments.events))
    total = generate(arguments.out, shape)["total"]
    print(f"Wrote {total} events to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
