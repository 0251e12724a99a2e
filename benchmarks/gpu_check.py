"""Measure on a GPU what the profiler assumes of one, and print what holds.

    python benchmarks/gpu_check.py [--out DIR]
    python benchmarks/gpu_check.py --training [--out DIR] [OVERRIDE …]
    python benchmarks/gpu_check.py --collect DIR     # with a package index: fetch what a GPU machine lacks
    python benchmarks/gpu_check.py --wheels DIR      # without one: use what --collect fetched

Needs torch with CUDA.  The checks call the package's own functions and compare with torch.profiler,
nvidia-smi and ncu.  With --training a trainer of verl runs with its rank on the GPU (`rehearse`).
"""

import argparse
import contextlib
import datetime as dt
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import measuring

torch: Any = None
OUT = Path()
ROWS: list[tuple[str, str, str]] = []
GIB = 1 << 30
READING = (
    "memory_mhz memory_utilization power_w slowed_by sm_mhz temperature_c used_bytes utilization"
)
FACTS = "bus_id device model power_limit_w total_bytes uuid"
NEEDED = ("msgspec", "wrapt", "nvidia-ml-py", "nvtx")
OVERRIDES = """trainer.profile_steps=[2] profiler.nsight.tool=torch actor_rollout_ref.actor.profile_ranks=[0]
trainer.val_before_train=false trainer.test_freq=-1 rehearsal.poll_interval_s=0.1
data.train_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.fsdp_config.param_offload=true
actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"""
USED = """import torch; torch.zeros(1, device='cuda')
from verl_profiler.recording import devices; print(devices.used_devices())"""
WITHOUT_CONTEXT = "from verl_profiler.recording import devices; print(devices.memory_of_devices())"
SAMPLES = """import os, time
from verl_profiler.recording import device_sampler, recorder
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import WorkerConfig
identity = Identity('actor', int(os.environ['PLACE']))
recorder.start(WorkerConfig.decode(os.environ['CONFIG']), lambda: identity, device_sampler.account)
device_sampler.begin(); time.sleep(60)"""
IN_RANGE = """import gpu_check, torch
from verl_profiler.instrumentation import nvtx_ranges
print('attached', nvtx_ranges.switch_on(), flush=True)
gpu_check.torch = torch; numbers = torch.zeros(8, device='cuda'); call = gpu_check.wrapped()
with gpu_check.recording():
    numbers.add_(1); call(lambda: [numbers.mul_(2) for _ in range(3)]); numbers.add_(1)"""


def row(claim: str, measured: Any, holds: bool | None = None) -> None:
    """Add a row to the table; without `holds` it is a number to read."""
    ROWS.append((claim, str(measured), {True: "holds", False: "DOES NOT HOLD", None: "-"}[holds]))


def now_text() -> str:
    """Return the time as events have it."""
    return dt.datetime.now(dt.timezone.utc).isoformat()


def near(one: float, other: float, share: float) -> bool:
    """Whether two numbers differ by at most this share."""
    return abs(one - other) <= share * abs(other)


@contextlib.contextmanager
def recording(role: str = "test", **settings: Any):
    """Record in this process, with the devices; the list that is yielded has the events after the block."""
    from verl_profiler.recording import device_sampler

    events: list[dict[str, Any]] = []
    with measuring.recording(role, **settings) as lines:
        device_sampler.begin()
        yield events
    events.extend({**line, **line.get("extra", {})} for line in map(json.loads, lines))


def smi(fields: str) -> list[str]:
    """Return what nvidia-smi reads of the first device."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.check_output(query, text=True).splitlines()[0].split(", ")


def child(code: str, *before: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python, after these words, with this process's import path."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [*before, sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wrapped(event: str = "forward_backward") -> Any:
    """Return a probed method of an engine, as a worker calls it; it calls its argument."""
    from verl_profiler.instrumentation import wrapping
    from verl_profiler.probes.workers import PROBES

    class Engine:
        def forward_backward_batch(self, data: Any, forward_only: bool = False) -> Any:
            return data()

    (probe,) = [each for each in PROBES if each.event == event]
    call, engine = wrapping.wrap(probe, Engine.forward_backward_batch), Engine()
    return lambda work: call(engine, work)


def device_times(work: Any, count: int) -> list[dict[str, Any]]:
    """Call a probed method so often; return its times on the device."""
    from verl_profiler.recording import device_timing

    call = wrapped()
    with recording() as events:
        for _ in range(count):
            call(work)
        torch.cuda.synchronize()
        device_timing.harvest()
    return [event for event in events if event["event"] == "device_time"]


def multiply(seconds: float) -> None:
    """Keep the device at work."""
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            one @ one
        torch.cuda.synchronize()


def check_nvml() -> None:
    """Fields, identity, and the time of NVML's calls."""
    from verl_profiler.recording import devices

    visible_words = devices.visible_words
    devices.visible_words = lambda: None
    device = devices.open_devices()[0]
    reading, facts = device.read(), device.facts
    row("NVML has every field of a reading", reading, " ".join(sorted(reading)) == READING)
    row("NVML has every fact of a device", facts, " ".join(sorted(facts)) == FACTS)
    torch.zeros(1, device="cuda")
    devices.memory_of_devices()
    used = devices.used_devices()
    same = [{name: facts[name] for name in ("uuid", "bus_id")}]
    row("torch's UUID and bus id are NVML's", used, used == same)
    for words in (facts["uuid"], "0"):
        devices.visible_words = lambda words=words: words
        chosen = devices.open_devices()
        told = child(USED, CUDA_VISIBLE_DEVICES=words).communicate()[0].strip()
        holds = told == str(same) and chosen[0].facts == facts
        row(f"the same with CUDA_VISIBLE_DEVICES={words[:8]}", told, holds)
    devices.visible_words = visible_words
    for getter in device._getters:
        spent: list[float] = []
        for _ in range(100):
            begin = time.perf_counter()
            fields = getter()
            spent.append((time.perf_counter() - begin) * 1e3)
        spent.sort()
        row(f"ms to read {[*fields]}", f"median {spent[50]:.2f}, longest {spent[-1]:.2f}")


def check_load() -> None:
    """What is sampled idle, at work, and beside one thread on the device; against nvidia-smi."""
    fields = "utilization.gpu,power.draw,clocks.sm,memory.used,clocks_event_reasons.active"
    last: dict[str, dict[str, Any]] = {}
    work = {
        "idle": lambda: time.sleep(5),
        "one thread": lambda: [torch.cuda._sleep(9 * 10**9), torch.cuda.synchronize()],
        "matrix products": lambda: multiply(5),
    }
    import pynvml

    pynvml.nvmlInit()
    counter = pynvml.nvmlDeviceGetHandleByIndex(0)
    for name, function in work.items():
        with recording("actor", device_interval_s=0.2) as events:
            thread = threading.Thread(target=function)
            thread.start()
            time.sleep(2)
            begin, energy = now_text(), pynvml.nvmlDeviceGetTotalEnergyConsumption(counter)
            time.sleep(1.5)
            energy = (pynvml.nvmlDeviceGetTotalEnergyConsumption(counter) - energy) / 1e3
            told, end = smi(fields), now_text()
            thread.join()
        readings = [each for each in events if each["event"] == "device"]
        readings = [each for each in readings if each["timestamp"] <= end]
        last[name] = readings[-1]
        powers = [each["power_w"] for each in readings if each["timestamp"] >= begin] or [math.nan]
        row(
            f"{name}: J in 1.5 s, and power over time",
            f"{energy:.0f}, {statistics.mean(powers) * 1.5:.0f}",
        )
        shown = "utilization", "power_w", "sm_mhz", "used_bytes", "slowed_by"
        row(f"{name}: nvidia-smi {fields}", f"{[last[name][key] for key in shown]} / {told}")
        row(
            f"{name}: used bytes",
            told[3],
            near(last[name]["used_bytes"] / 2**20, float(told[3]), 0.02),
        )
    busy, idle, thread_only = (last[name] for name in ("matrix products", "idle", "one thread"))
    row("idle: utilization 0", idle["utilization"], idle["utilization"] == 0)
    holds = busy["utilization"] > 90 < thread_only["utilization"]
    powers = f"{busy['power_w']} and {thread_only['power_w']} W"
    row("both others: utilization above 90", powers, holds and thread_only["power_w"] < 350)


def check_events() -> None:
    """Pairs of CUDA events against torch.profiler; beside streams; in a graph."""
    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(8):
            one @ one

    device_times(products, 3)
    with torch.profiler.profile() as profile:
        ours = [each["device_s"] for each in device_times(products, 20)]
    kernels = [each for each in profile.events() if each.device_type.name == "CUDA"]
    kernels.sort(key=lambda each: each.time_range.start)
    parts = len(kernels) // 20
    calls = [kernels[n * parts : (n + 1) * parts] for n in range(20)]
    truth = [(each[-1].time_range.end - each[0].time_range.start) / 1e6 for each in calls]
    measured = (
        f"median {statistics.median(ours) * 1e6:.1f} / {statistics.median(truth) * 1e6:.1f} us"
    )
    row("a call's device time is its kernels'", measured, near(sum(ours), sum(truth), 0.02))
    cycles, side = 40_000_000, torch.cuda.Stream()

    def beside() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * cycles)
        torch.cuda._sleep(cycles)

    alone, other = (device_times(work, 5) for work in (lambda: torch.cuda._sleep(cycles), beside))
    first, second = (statistics.median(e["device_s"] for e in times) for times in (alone, other))
    measured = f"{first * 1e3:.2f}, with it {second * 1e3:.2f} ms"
    row("work in another stream does not count", measured, near(second, first, 0.1))
    longest = max(each["host_s"] for each in alone[1:])
    row("nothing waits for the device", f"{longest * 1e3:.2f} ms on the host", longest < first / 2)
    small, call = torch.zeros(8, device="cuda"), wrapped()

    def launch() -> None:
        small.add_(1)

    def each_us(function: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3000):
            function()
        return (time.perf_counter() - begin) / 3000 * 1e6

    with recording():
        bare, probed = (
            statistics.median(each_us(each) for _ in range(5))
            for each in (launch, lambda: call(launch))
        )
        row(
            "us of a launch, and of it in a probed call with two events",
            f"{bare:.1f}, {probed:.1f}",
        )
        call(lambda: torch.cuda._sleep(cycles))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(launch)
        small.zero_()
        graph.replay()
        row("a graph is captured while events wait", small[0].item(), small[0].item() == 1)


def check_capture() -> None:
    """A trace of the torch profiler, as the capture code writes and the reader reads it."""
    from verl_profiler.capture.tools.torch import TOOL
    from verl_profiler.reading.formats.foreign_traces import read_trace

    one = torch.randn(2048, 2048, device="cuda")

    def work() -> None:
        for _ in range(10):
            (one @ one).relu_()
        torch.cuda.synchronize()

    work()
    begin_ns = time.time_ns()
    handle: Any = TOOL.start(None)  # pyright: ignore[reportArgumentType]
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    TOOL.stop(handle, OUT / "capture.json.gz")
    trace: Any = read_trace(OUT / "capture.json.gz")
    spans = [
        each for thread in trace.threads.values() for each in thread if each.category == "kernel"
    ]
    ours = sum(each.end_ns - each.begin_ns for each in spans) / 1e3
    theirs = sum(
        e.self_device_time_total for e in handle.key_averages() if e.device_type.name == "CUDA"
    )
    measured = f"{len(spans)} kernels, {ours:.1f} / {theirs:.1f} us"
    row("kernels of a capture sum to key_averages", measured, near(ours, theirs, 0.01))
    inside = all(begin_ns <= each.begin_ns <= each.end_ns <= time.time_ns() for each in spans)
    row("they lie in the time of the capture", f"{trace.left_out} left out", inside)


def check_ranges() -> None:
    """NVTX ranges in ncu."""
    ncu = shutil.which("ncu") or next(map(str, Path("/opt/nvidia").glob("nsight-compute/*/ncu")))
    options = "--nvtx --metrics gpu__time_duration.sum --csv --clock-control none --nvtx-include"
    told = child(IN_RANGE, ncu, *options.split(), "verl_profiler@forward_backward/").communicate()[
        0
    ]
    (OUT / "ncu.txt").write_text(told)
    count = told.count("gpu__time_duration")
    measured = f"{count} kernels; {told.partition('attached')[2][:6].strip()}"
    row("ncu gets the 3 kernels of a range, and no other", measured, count == 3)
    row("ranges are opened under ncu", measured, "attached True" in told)


def check_memory() -> None:
    """Device memory around allocations: by torch, by NVML, and over time."""
    from verl_profiler.recording import devices

    torch.cuda.empty_cache()
    before = int(smi("memory.used")[0])
    told = json.loads(child(WITHOUT_CONTEXT).communicate()[0].replace("'", '"'))
    here = devices.memory_of_devices()
    for name, read in (("without a context", told), ("through torch", here)):
        used = read["used_bytes"] / 2**20
        row(
            f"memory {name} is nvidia-smi's {before} MiB",
            f"{used:.0f} {read}",
            near(used, before, 0.02),
        )
    row("and their totals agree", "", told["total_bytes"] == here["total_bytes"])
    levels: list[int] = []

    def level() -> None:
        levels.append((devices.memory_of_devices()["used_bytes"] - here["used_bytes"]) >> 20)
        time.sleep(0.3)

    with recording("actor", device_interval_s=0.05) as events:
        level()
        held = torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
        level()
        kept = held.cpu()
        del held
        level()
        torch.cuda.empty_cache()
        level()
        again = kept.to("cuda")
        level()
    del again
    measured, holds = f"{levels} MiB", levels == [0, 4096, 4096, 0, 4096]
    row("4 GiB allocated, freed, released (empty_cache), resumed", measured, holds)
    # Readings that are like the one before are left out.
    samples = [e["used_bytes"] - here["used_bytes"] for e in events if e["event"] == "device"]
    highs, lows = samples.count(4 * GIB), samples.count(0)
    row("the sampler sees both levels", f"{highs} high, {lows} low", highs > 0 and lows > 0)


def check_election() -> None:
    """One process of a host samples, another takes over, and none makes a context."""
    with tempfile.TemporaryDirectory() as folder:
        settings, before = (
            measuring.config(folder, device_interval_s=0.2).encode(),
            int(smi("memory.used")[0]),
        )
        processes = [child(SAMPLES, CONFIG=settings, PLACE=str(rank)) for rank in range(3)]

        def sampling() -> set[int]:
            files = Path(folder).glob("step_*/*.jsonl")
            return {int(file.stem[-1]) for file in files if '"device"' in file.read_text()}

        time.sleep(4)
        first, after = sampling(), int(smi("memory.used")[0])
        row("one of three processes samples", first, len(first) == 1)
        row("it makes no CUDA context", f"{before}, then {after} MiB", after - before < 64)
        for rank in first:
            processes[rank].kill()
        time.sleep(4)
        row("after it is killed one other does", sampling() - first, len(sampling()) == 2)
        for each in processes:
            each.kill()


def check_cost() -> None:
    """A training step with and without recording: interleaved pairs of blocks."""
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, device="cuda")
    model = torch.nn.TransformerEncoder(layer, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(16, 1024, 1024, device="cuda")
    forward, step = wrapped("forward_backward"), wrapped("optimizer_step")

    def passes() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()

    def block(steps: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            forward(passes)
            step(optimizer.step)
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    block(10)
    ratios: list[float] = []
    lengths: list[float] = []
    for pair in range(16):
        times = {}
        for records in (pair % 2 == 0, pair % 2 == 1):
            with recording("actor") if records else contextlib.nullcontext():
                # Without the start of the recorder and of its threads.
                block(10)
                times[records] = block(20)
        ratios.append(times[True] / times[False])
        lengths.append(times[False] * 1e3)
    ratios.sort()
    middle = statistics.median(ratios)
    measured = (
        f"{middle:.4f} ({ratios[1]:.4f} to {ratios[-2]:.4f}) of {statistics.median(lengths):.1f} ms"
    )
    row("cost of a training step, 16 pairs", measured, middle < 1.02)


def widened(source: Path, target: Path, layers: int = 8, width: int = 4096) -> None:
    """Write a model that computes what the rehearsal's does, with more and wider layers."""
    import transformers

    old = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    shape = {"num_hidden_layers": layers, "intermediate_size": width}
    settings = transformers.AutoConfig.from_pretrained(source)
    settings.update({**shape, "layer_types": ["full_attention"] * layers})
    new = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    state = new.state_dict()
    for name, value in state.items():
        if "o_proj" in name or "down_proj" in name:
            value.zero_()
    for name, value in old.state_dict().items():
        state[name][tuple(map(slice, value.shape))] = value
    new.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)


def train(overrides: list[str]) -> int:
    """Run verl's trainer with the stand-in engine and its rank on the GPU."""
    from verl_profiler.rehearsal import assets

    tools = str(assets.FUNCTION_TOOLS), str(assets.TOOL_CONFIG)
    widened(assets.trained_model(assets.default_cache(), *tools, 0), OUT / "model")
    words = ["verl_profiler", "rehearse", "--engine", "standin", "--ranks", "1", "--steps", "3"]
    words += ["--output", str(OUT / "run"), f"actor_rollout_ref.model.path={OUT / 'model'}"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"VERL_PLATFORM": "nvidia", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", *words, *OVERRIDES.split(), *overrides]
    return subprocess.run(command, check=False, env=environment).returncode


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print the table; 1 if something does not hold, 2 without CUDA."""
    global torch, OUT
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--collect", type=Path, metavar="DIR")
    parser.add_argument("--wheels", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="DIR")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="for the trainer")
    chosen = parser.parse_args(arguments)
    pip = [sys.executable, "-m", "pip"]
    if chosen.collect is not None:
        package, folder = str(Path(__file__).parents[1]), str(chosen.collect)
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, package, *NEEDED], check=True)
        return 0
    if chosen.wheels is not None:
        site, wheels = tempfile.mkdtemp(), map(str, chosen.wheels.glob("*.whl"))
        offline = ["install", "-q", "--no-index", "--no-deps", "-t", site]
        subprocess.run([*pip, *offline, *wheels], check=True)
        sys.path.insert(0, site)
    try:
        import torch as installed
    except ImportError:
        sys.exit(f"gpu_check needs torch with CUDA, not installed for {sys.executable}")
    torch = installed
    if not torch.cuda.is_available():
        sys.exit("gpu_check needs a GPU: torch.cuda.is_available() is false here")
    OUT = chosen.out.absolute()
    OUT.mkdir(parents=True, exist_ok=True)
    if chosen.training:
        return train(chosen.overrides)
    for check in [value for name, value in globals().items() if name.startswith("check_")]:
        try:
            check()
        except Exception as error:  # noqa: BLE001  the other checks go on
            row(check.__name__, repr(error)[:300], False)
    name, driver = smi("name,driver_version")
    print(f"{name}, driver {driver}, torch {torch.__version__}")
    print("\n".join(f"{verdict:14}{claim}: {measured}" for claim, measured, verdict in ROWS))
    return int(any(verdict == "DOES NOT HOLD" for _, _, verdict in ROWS))


if __name__ == "__main__":
    sys.exit(main())
