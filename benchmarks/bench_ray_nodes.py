"""Load test of a profiled Ray job on several nodes: what the profiler adds, and how that grows.

    python benchmarks/bench_ray_nodes.py                                4 nodes, 32 and 128 processes
    python benchmarks/bench_ray_nodes.py --nodes 8 --processes 256
    python benchmarks/bench_ray_nodes.py --hang --step-s 5              one job, whose last step is taken for a hang

Each node is a raylet in namespaces of its own: network, host name, boot id and monotonic clock, all with
one disk.  A driver prepares as verl's does and starts a trainer; the trainer starts agent-loop workers and
ranks, and has all of them record at a steady rate in steps.  Four jobs follow each other on the
cluster: all processes without the profiler, a quarter of them with it, all with it, and all without it
again, so that a trend of the machine shows.  Two processes run under strace for some steps; `summary`,
`summary --follow` and `stuck` are run while the job records, the last two also while requests are open for long.
Needs root, iproute2 and strace.

Exit status 1: an event was neither read back nor counted as dropped, or a process has no header, or no
evidence of the hang.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

RAY = str(Path(sys.executable).parent / "ray")
COMMAND = str(Path(sys.executable).parent / "verl-profiler")
BRIDGE, NETWORK, PORT = "vpload", "10.213.9", 6489
# Open requests are written from this age on (`profiler.stuck.after`), and some looks later.
_HOLD_S = 80.0
_OPEN_REQUESTS = 4
# A step is a hang from here on, with --hang.
_HANG_S = 20.0
# Processes that start at once; where two cores start more, Ray declares nodes dead.
_AT_ONCE = 16
_PATIENCE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "20",
    "RAY_worker_register_timeout_seconds": "600",
}
_NODE = """
mount --bind {boot} /proc/sys/kernel/random/boot_id
hostname {name}
exec "$@"
"""
_CALL = re.compile(r"(?:\d+ +)?(\d+\.\d+) (\w+)\(")
# Of the calls that are traced.
_WRITES = ("write", "pwrite64", "ftruncate")


def threads_cpu() -> dict[str, float]:
    """Return the CPU seconds of this process's living threads, by the names of Python's."""
    names = {each.native_id: each.name for each in threading.enumerate()}
    ticks = os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[names.get(int(task.name), "other")] += (int(fields[11]) + int(fields[12])) / ticks
    return dict(found)


def profilers(threads: dict[str, float]) -> dict[str, float]:
    """Return those of the profiler's threads."""
    return {name: cpu_s for name, cpu_s in threads.items() if name.startswith("verl-profiler")}


class Recording:
    """What all actors of the job share."""

    def __init__(self, profiled: bool) -> None:
        self.profiled = profiled
        self.ready = {"cpu_s": time.process_time(), "pid": os.getpid()}

    def log(self, event: str, step: int, **extra: Any) -> int:
        """Offer one event; return how many that are."""
        if not self.profiled:
            return 0
        from verl_profiler import log_manager

        log_manager.log(None, event=event, duration=0.001, extra=extra, step=step)
        return 1

    def started(self) -> dict[str, Any]:
        """Return what the start took."""
        return self.ready

    def account(self) -> dict[str, Any]:
        """Return what the process has used so far."""
        memory = Path("/proc/self/smaps_rollup").read_text()
        kb = {k: int(v) for k, v in re.findall(r"^(\w+):\s+(\d+)", memory, re.MULTILINE)}
        return {
            "cpu_s": time.process_time(),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "private_mb": (kb["Private_Clean"] + kb["Private_Dirty"]) / 1e3,
            "resident_mb": kb["Rss"] / 1e3,
            "profiler_cpu_s": profilers(threads_cpu()),
        }


class AgentLoopWorker(Recording):
    """Named as verl's, so that the plugin detects its role."""

    async def work(self, step: int, seconds: float, rate: float, hold: bool) -> int:
        """Record; return how many events were offered."""
        begin, offered = time.monotonic(), 0
        async with contextlib.AsyncExitStack() as held:
            if hold and self.profiled:
                from verl_profiler import span
                from verl_profiler.recording import context

                # As a weight sync would.
                context.process.step = step
                for _ in range(_OPEN_REQUESTS):
                    await held.enter_async_context(_in_task(span, uuid.uuid4().hex))
            while (elapsed := time.monotonic() - begin) < seconds:
                while offered < rate * elapsed:
                    self.log("own_work", step, item=uuid.uuid4().hex, part=offered % 8)
                    offered += 1
                await asyncio.sleep(0.25)
        return offered


@contextlib.asynccontextmanager
async def _in_task(span: Any, request_id: str) -> Any:
    """Keep a request open in a task of its own."""
    over = asyncio.Event()

    async def run() -> None:
        async with span("episode", request_id=request_id):
            await over.wait()

    task = asyncio.create_task(run())
    yield
    over.set()
    await task


class ActorRank(Recording):
    """A member of verl's worker group: a rank, by its environment."""

    def work(self, step: int, seconds: float, rate: float, hold: bool) -> int:
        """Record; return how many events were offered."""
        begin, offered = time.monotonic(), 0
        while (elapsed := time.monotonic() - begin) < seconds:
            while offered < rate * elapsed:
                self.log("own_work", step, item=uuid.uuid4().hex, part=offered % 8)
                offered += 1
            time.sleep(0.25)
        return offered


class _Trainer:
    """What the profiler takes the step from."""

    global_steps = 0


class TaskRunner(Recording):
    """The trainer: starts the workers, and records steps."""

    def run(
        self, processes: int, steps: int, step_s: float, rate: float, hold: bool
    ) -> dict[str, Any]:
        """Start, train; return what was offered and used."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from verl.utils.profiler.performance import marked_timer

        nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
        workers = []
        begin = time.monotonic()
        for number in range(processes):
            node = nodes[number % len(nodes)]
            options: dict[str, Any] = {
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            rank = number // 2
            if number % 2:
                environment = {"RANK": str(rank), "WG_PREFIX": "ab"}
                options["runtime_env"] = {"env_vars": environment}
                kind, options["name"] = ActorRank, f"abactor_rollout_0:{rank}"
            else:
                kind, options["name"] = AgentLoopWorker, f"agent_loop_worker_{rank}_ab"
            workers.append(ray.remote(kind).options(**options).remote(self.profiled))
            if number % _AT_ONCE == _AT_ONCE - 1:
                ray.get([each.started.remote() for each in workers])
        started = ray.get([each.started.remote() for each in workers])
        self.mark("started", [each["pid"] for each in started[:2]])
        started_s = time.monotonic() - begin
        offered = 0
        cpu = [each["cpu_s"] for each in ray.get([each.account.remote() for each in workers])]
        trainer = _Trainer()
        if self.profiled:
            from verl_profiler.recording import context

            context.process.hold_trainer(trainer)
        accounts: list[list[dict[str, Any]]] = []
        for step in range(1, steps + 1 + hold):
            # The last one is long, with requests that stay open.
            long = step > steps
            trainer.global_steps = step
            work = step, _HOLD_S if long else step_s, rate, long
            with marked_timer("step", {}), marked_timer("gen", {}):
                offered += sum(ray.get([each.work.remote(*work) for each in workers]))
            if step >= steps:
                accounts.append(ray.get([each.account.remote() for each in workers]))
            self.mark(f"ended_{step}")
        steady = [each["cpu_s"] - then for each, then in zip(accounts[0], cpu, strict=True)]
        pairs = zip(accounts[-1], accounts[0], strict=True)
        return {
            "all_started_s": started_s,
            "start_cpu_s": [each["cpu_s"] for each in started],
            "steady_cpu_s": [each / (steps * step_s) for each in steady],
            "held_cpu_s": [(last["cpu_s"] - then["cpu_s"]) / _HOLD_S for last, then in pairs],
            "accounts": accounts[0],
            "offered": offered,
            "trainer": self.account(),
        }

    def mark(self, name: str, content: Any = None) -> None:
        """Let the driver know."""
        path = Path(os.environ["BENCH_MARKS"]) / name
        path.with_suffix(".part").write_text(json.dumps(content))
        path.with_suffix(".part").replace(path)


def wait_until(holds: Any, seconds: float = 1800) -> Any:
    """Wait for something that takes other processes a while; return it."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        if time.monotonic() > end:
            raise TimeoutError(holds)
        time.sleep(0.1)
    return value


def marked(marks: Path, name: str, result: Any) -> Any:
    """Wait until the trainer is so far; return what it said, or raise what it raised."""
    import ray

    def is_so_far() -> bool:
        if ray.wait([result], timeout=0)[0]:
            ray.get(result)
        return (marks / name).exists()

    wait_until(is_so_far)
    return json.loads((marks / name).read_text())


def count_messages() -> Counter[str]:
    """Count what this driver's threads send to other nodes; return the counts, which grow."""
    from verl_profiler.nodes import clock, rounds

    counts: Counter[str] = Counter()

    def counting(owner: Any, name: str, key: Any) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[key(args)] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    counting(rounds, "NodeActor", lambda _: "actors")
    counting(clock, "exchange", lambda _: "clock bursts")
    counting(rounds.Nodes, "_called", lambda args: f"calls of {args[2]}")
    return counts


def account_for_ended_threads() -> dict[str, float]:
    """Sum up the CPU seconds of threads of the profiler as they end; return the sums, which grow."""
    ended: dict[str, float] = defaultdict(float)
    original = threading.Thread.run

    def run(self: threading.Thread) -> None:
        try:
            original(self)
        finally:
            if self.name.startswith("verl-profiler"):
                ended[self.name] += time.thread_time()

    threading.Thread.run = run  # type: ignore[method-assign]
    return ended


def command(words: list[str]) -> dict[str, Any]:
    """Run a command of the reader; return its CPU seconds and what it printed."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([COMMAND, *words], stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    return {
        "command": words[0],
        "status": process.returncode,
        "cpu_s": used.ru_utime + used.ru_stime,
        "lines": text.count("\n"),
        "longest": max(map(len, text.splitlines()), default=0),
        "text": text,
    }


def drive(args: argparse.Namespace) -> None:
    """Be the driver of one job; leave results in a file."""
    import ray
    from omegaconf import OmegaConf

    marks = args.folder / args.label
    marks.mkdir()
    config = OmegaConf.create(
        {
            "profiler": {"output_dir": str(args.folder / "logs" / args.label)},
            "ray_kwargs": {
                "ray_init": {
                    "address": f"{NETWORK}.1:{PORT}",
                    "runtime_env": {"env_vars": {"BENCH_MARKS": str(marks)}},
                }
            },
        }
    )
    if args.hang:
        config.profiler.stuck = {"after": _HANG_S}
    found: dict[str, Any] = {"label": args.label, "processes": args.processes}
    run, counts, ended = None, Counter[str](), account_for_ended_threads()
    if args.profiled:
        import verl_profiler

        counts = count_messages()
        config = verl_profiler.prepare(config)
        from verl_profiler.recording import recorder

        run = recorder.active().directory  # type: ignore[union-attr]
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))  # type: ignore[arg-type]
    runner = ray.remote(TaskRunner).options(num_cpus=0).remote(args.profiled)
    result = runner.run.remote(args.processes, args.steps, args.step_s, args.rate, args.hold)
    pids = marked(marks, "started", result)
    begin, before = time.monotonic(), profilers(threads_cpu())
    started = {"counts": dict(counts), "cpu_s": time.process_time(), "ended": dict(ended)}
    if run is not None:
        traces = [strace(pid, args.folder / f"{args.label}.strace.{pid}") for pid in pids]
        marked(marks, f"ended_{max(args.steps - 1, 1)}", result)
        found["traced_s"] = time.monotonic() - begin
        for trace in traces:
            trace.send_signal(signal.SIGINT)
        words = [["summary", str(run)], ["summary", "--follow", str(run)], ["stuck", str(run)]]
        found["commands"] = [command(each) for each in words]
        if args.hold:
            marked(marks, f"ended_{args.steps}", result)
            # Some looks after `profiler.stuck.after`.
            time.sleep(_HOLD_S - 8)
            found["commands"] += [command(each) for each in words[1:]]
    found.update(ray.get(result))
    lasted_s = time.monotonic() - begin
    after = profilers(threads_cpu())
    found["driver"] = {
        "lasted_s": lasted_s,
        "cpu_s": time.process_time() - started["cpu_s"],
        "profiler_cpu_s": {name: after[name] - before.get(name, 0) for name in after},
        "ended_threads_cpu_s": {k: v - started["ended"].get(k, 0) for k, v in ended.items()},
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "messages_at_start": started["counts"],
        "messages": {k: v - started["counts"].get(k, 0) for k, v in counts.items()},
    }
    if run is not None:
        from verl_profiler.launch import prepare

        found["run"] = str(run)
        begin = time.monotonic()
        prepare.end(failed=False)
        found["end_s"] = time.monotonic() - begin
    ray.shutdown()
    (marks / "results.json").write_text(json.dumps(found))


def strace(pid: int, path: Path) -> subprocess.Popen[bytes]:
    """Trace what a process does with files."""
    kinds = "trace=%file,getdents64,write,pwrite64,ftruncate"
    words = ["strace", "-f", "-y", "-p", str(pid), "-e", kinds, "-ttt", "-o", str(path)]
    return subprocess.Popen(words, stderr=subprocess.DEVNULL)


def operations(trace: Path, run: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count system calls on the run: those of metadata, those that write, and paths of the first."""
    metadata: Counter[str] = Counter()
    writes: Counter[str] = Counter()
    paths: Counter[str] = Counter()
    for line in trace.read_text(errors="replace").splitlines():
        match = _CALL.match(line)
        if match is None or run not in line:
            continue
        name = match[2]
        (writes if name in _WRITES else metadata)[name] += 1
        if name not in _WRITES:
            path = line.partition(run)[2].split('"')[0].split(">")[0]
            paths[f"{name} {re.sub(r'[0-9]+', 'N', path) or '/'}"] += 1
    return metadata, writes, paths


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[list[str]]]:
    """Join network namespaces by a bridge; give the words that run a program on each host."""
    names = [f"vpload{number}" for number in range(2, count + 1)]
    words: list[list[str]] = []
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names, 2):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "host", "netns", name)
            ip("link", "set", name, "master", BRIDGE, "up")
            inside = ["netns", "exec", name, "ip"]
            ip(*inside, "addr", "add", f"{NETWORK}.{number}/24", "dev", "host")
            ip(*inside, "link", "set", "host", "up")
            ip(*inside, "link", "set", "lo", "up")
            boot = folder / f"boot_id.{number}"
            boot.write_text(f"{uuid.uuid4()}\n")
            ahead = ["unshare", "-m", "-u", "-T", "--monotonic", str(1000 * number)]
            script = ["sh", "-ec", _NODE.format(boot=boot, name=name), "sh"]
            words.append(["ip", "netns", "exec", name, *ahead, *script])
        yield words
    finally:
        for name in names:
            subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def node(log: Path, words: list[str], inside: list[str]) -> Iterator[None]:
    """Run a raylet, and at the end everything that it started."""
    start = [RAY, "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    start += ["--object-store-memory=80000000", *words]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*inside, *start],
            env={**os.environ, **_PATIENCE},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def listens() -> bool:
    """Whether the head takes connections."""
    with contextlib.suppress(OSError):
        socket.create_connection((f"{NETWORK}.1", PORT), timeout=1).close()
        return True
    return False


def job(args: argparse.Namespace, folder: Path, label: str, processes: int) -> dict[str, Any]:
    """Run one driver; return its results, and how many lines of the profiler it printed."""
    words = [sys.executable, __file__, "--drive", "--folder", str(folder), "--label", label]
    words += ["--processes", str(processes), "--steps", str(args.steps), "--rate", str(args.rate)]
    words += ["--step-s", str(args.step_s), *(["--hold"] if label == "all" else [])]
    words += ["--hang"] if args.hang else []
    words += [] if label.startswith("without") else ["--profiled"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")}
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**environment, **_PATIENCE, "PYTHONUNBUFFERED": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-5000:])
    results: dict[str, Any] = json.loads((folder / label / "results.json").read_text())
    results["printed"] = done.stdout.splitlines()
    return results


def read_back(run: Path) -> dict[str, Any]:
    """Read a run after its end."""
    from verl_profiler.reading.reader import load

    with load(run, cache=False) as loaded:
        read = loaded.rows("SELECT count(*) AS n FROM event_fields WHERE event = 'own_work'")
        dropped = loaded.rows("SELECT sum(dropped)::BIGINT AS n FROM processes")
        problems = loaded.problems
    headers = [json.loads(path.read_text()) for path in run.glob("processes/*.json")]
    peers = [
        {"host": peer["host"], "samples": len(peer["samples"])}
        for header in headers
        for peer in header.get("clock_exchange", {}).get("peers", [])
    ]
    return {
        "read": read[0]["n"],
        "dropped": dropped[0]["n"] or 0,
        "problems": problems,
        "headers": Counter(header["role"] for header in headers),
        "renamed": sum(bool(re.search(r"_\d+-\d+$", header["name"])) for header in headers),
        "not_ended": sum(header["ended"] is None for header in headers),
        "peers": peers,
        "files": sum(len(names) for _, _, names in os.walk(run)),
    }


def report_hang(found: dict[str, Any]) -> int:
    """Print what the processes wrote of themselves; return 1 when one did not."""
    run = Path(found["run"])
    (folder,) = (run / "evidence").iterdir()
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    print(
        f"{found['processes']} processes, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    )
    print(f"  evidence of {len(files)} processes", end="")
    requested = min(json.loads(path.read_text())["at"] for path in files)
    first = datetime.fromisoformat(requested).timestamp()
    print(f", written {files[0].stat().st_mtime - first:.1f} to", end="")
    print(f" {files[-1].stat().st_mtime - first:.1f} s after the first began", end="")
    print(f"; {sum(path.stat().st_size for path in files) / len(files) / 1e3:.0f} kB each")
    unanswered = Counter(
        name for path in files for name in json.loads(path.read_text()).get("unanswered", [])
    )
    print(f"  sources without an answer: {dict(unanswered)}")
    print(
        f"  CPU per process while it records: {median(found['steady_cpu_s']):.2%} of a core, in",
        end="",
    )
    print(f" the step of the hang {median(found['held_cpu_s']):.2%}")
    for each in found["commands"]:
        print(f"  {each['command']}: status {each['status']}, {each['cpu_s']:.1f} s of CPU")
        print(*(f"      | {line[:200]}" for line in each["text"].splitlines()), sep="\n")
    ours = [line for line in found["printed"] if "stuck" in line or "silent" in line]
    print(*(f"      {line[:200]}" for line in ours), sep="\n")
    # All but the driver's.
    return int(len(files) < found["processes"] + 1)


def report(args: argparse.Namespace, jobs: dict[str, dict[str, Any]], folder: Path) -> int:
    """Print all; return 1 when events or processes are missing."""
    without, again = jobs.pop("without"), jobs.pop("without_again")
    failed = False
    base = {
        "start, CPU": median(without["start_cpu_s"] + again["start_cpu_s"]),
        "steady": median(without["steady_cpu_s"] + again["steady_cpu_s"]),
        "private": median(each["private_mb"] for each in without["accounts"]),
        "threads": median(each["threads"] for each in without["accounts"]),
        "descriptors": median(each["descriptors"] for each in without["accounts"]),
    }
    print(f"{args.nodes} nodes, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    for label, found in jobs.items():
        read = read_back(Path(found["run"]))
        driver, seconds = found["driver"], found["driver"]["lasted_s"]
        print(f"{label}: {found['processes']} processes, {args.rate:g} events/s each")
        rows = {
            "start, CPU": median(found["start_cpu_s"]),
            "steady": median(found["steady_cpu_s"]),
            "private": median(each["private_mb"] for each in found["accounts"]),
            "threads": median(each["threads"] for each in found["accounts"]),
            "descriptors": median(each["descriptors"] for each in found["accounts"]),
        }
        for name, value in rows.items():
            print(f"  {name}, per process: {value:.4g}, without {base[name]:.4g}: ", end="")
            print(f"× {value / base[name]:.3f}, + {value - base[name]:.4g}")
        print(f"  all started after {found['all_started_s']:.0f} s", end="")
        print(f", without {without['all_started_s']:.0f} s before and", end="")
        print(f" {again['all_started_s']:.0f} s after ({without['processes']} processes)")
        for who, each in (("driver", driver), ("trainer", found["trainer"])):
            spent = {**each["profiler_cpu_s"], **each.get("ended_threads_cpu_s", {})}
            print(f"  {who}: {sum(spent.values()):.2f} s of CPU in the profiler's threads", end="")
            print(f" in {seconds:.0f} s ({spent})")
            print(f"    {each['threads']} threads, {each['descriptors']} descriptors", end="")
            other = without[who]
            print(f"; without {other['threads']} and {other['descriptors']}")
        print(f"  messages of the driver until all had started: {driver['messages_at_start']}")
        print(f"  and in the {seconds:.0f} s after: {driver['messages']}")
        print(f"  clock samples kept: {read['peers']}")
        print(f"  headers: {dict(read['headers'])}, {read['renamed']} renamed", end="")
        print(f", {read['not_ended']} not ended; {read['files']} files")
        for trace in sorted(folder.glob(f"{label}.strace.*")):
            metadata, writes, paths = operations(trace, found["run"])
            minutes = found["traced_s"] / 60
            print(f"  {sum(metadata.values()) / minutes:.1f} operations on metadata", end="")
            print(f" per process and minute, {sum(writes.values()) / minutes:.0f} writes")
            for name, count in paths.most_common(12):
                print(f"      {count} {name}")
        ours = [line for line in found["printed"] if "[verl-profiler]" in line]
        print(f"  console: {len(found['printed'])} lines, {len(ours)} of them ours")
        print(*(f"      {line[:160]}" for line in ours[:12]), sep="\n")
        for each in found["commands"]:
            print(
                f"  {each['command']}: status {each['status']}, {each['cpu_s']:.1f} s of CPU",
                end="",
            )
            print(f", {each['lines']} lines, the longest {each['longest']}")
            if label == "all":
                print(*(f"      | {line[:200]}" for line in each["text"].splitlines()), sep="\n")
        print(f"  end of the driver's part: {found['end_s']:.1f} s")
        print(f"  events offered {found['offered']:,}; read {read['read']:,}", end="")
        print(f", counted as dropped {read['dropped']:,}")
        print(*(f"  problem: {each[:300]}" for each in read["problems"][:8]), sep="\n")
        missing = found["offered"] - read["read"] - read["dropped"]
        recorded = read["headers"]["agent_loop"] + read["headers"]["actor"]
        failed = failed or missing > 0 or recorded != found["processes"]
    return int(failed)


def main() -> int:
    """Start the cluster, run the jobs, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--processes", type=int, default=128)
    parser.add_argument("--rate", type=float, default=20, help="events per second and process")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=15)
    parser.add_argument("--hang", action="store_true", help="one job, whose last step is a hang")
    parser.add_argument("--keep", type=Path, help="leave all files in this folder, a new one")
    for name in ("--drive", "--profiled", "--hold"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--label", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Installed packages have their bytecode; sources would be compiled in each process.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.drive:
        drive(args)
        return 0
    with contextlib.ExitStack() as stack:
        if args.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray_nodes-")))
        else:
            folder = args.keep.absolute()
            folder.mkdir()
        # Ray's sockets have no room for a long path.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="vpl-"))
        inside = stack.enter_context(hosts(folder, args.nodes))
        head = ["--head", f"--node-ip-address={NETWORK}.1", f"--port={PORT}", f"--temp-dir={short}"]
        head += ["--include-dashboard=false"]
        stack.enter_context(node(folder / "head.log", head, []))
        wait_until(listens)
        for number, words in enumerate(inside, 2):
            other = [f"--address={NETWORK}.1:{PORT}", f"--node-ip-address={NETWORK}.{number}"]
            stack.enter_context(node(folder / f"node{number}.log", other, words))
            # One after the other: they choose names for their sockets in one folder.
            log = folder / f"node{number}.log"
            wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 120)
        if args.hang:
            return report_hang(job(args, folder, "all", args.processes))
        jobs: dict[str, dict[str, Any]] = {}
        for label, processes in (
            ("without", args.processes),
            ("quarter", args.processes // 4),
            ("all", args.processes),
            ("without_again", args.processes),
        ):
            jobs[label] = job(args, folder, label, processes)
        return report(args, jobs, folder)


if __name__ == "__main__":
    if not all(map(shutil.which, ("ip", "unshare", "strace"))) or os.getuid():
        sys.exit("needs root, iproute2, unshare and strace")
    sys.exit(main())
