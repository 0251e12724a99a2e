"""Lines as the tracing writes them, and as the fork of the guide did, for tests of their readers."""

import re
from datetime import datetime, timezone

WALL_S = 1_769_500_000

# The environment that prints all of them.
ON = {"TQ_TRACE_ENABLED": "1", "TQ_TRACE_DETAIL_ENABLED": "1", "VERL_LOGGING_LEVEL": "INFO"}


class Writer:
    """Writes the lines of calls, each behind the prefixes that it has in a console log.

    Args:
        process: Ray's prefix; empty for none.
        fork: The shapes of the fork: no ids, no status, the order of its fields.
        zero_s: What the process's own clock shows at `WALL_S`.
        sampled: Every N-th call is traced.
    """

    def __init__(self, process="AgentLoopWorker pid=7", *, fork=False, zero_s=100.0, sampled=1):
        self.process = process
        self.fork = fork
        self.zero_s = zero_s
        self.sampled = sampled
        self.lines = []
        self.calls = 0

    def say(self, at_s, text):
        """Add a line."""
        moment = datetime.fromtimestamp(WALL_S + at_s, timezone.utc)
        prefix = f"\x1b[36m({self.process})\x1b[0m " if self.process else ""
        wall = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}"
        self.lines.append((at_s, f"{prefix}INFO:{wall}:{text}"))

    def call(
        self,
        begin_s,
        parts,
        *,
        func="generate",
        trace_id="N/A",
        mb=None,
        step=None,
        status="ok",
        ends=True,
    ):
        """Write a call; `parts` are the stages and their lengths in seconds, one after the other."""
        self.calls += 1
        tail = "" if self.fork else f" | call=c{self.calls}"
        more = "" if self.sampled == 1 else f" | sampled={self.sampled}"
        more += "" if step is None else f" | step={step}"
        ended = tail + ("" if self.fork else f" | status={status}") + more
        head = f"trace_id={trace_id} | func={func} | "
        at, spent = begin_s, dict.fromkeys(("get", "compute", "put"), 0.0)

        def trace(moment, stage, fields="", tail=tail + more):
            stamp = f"timestamp={self.zero_s + moment:.6f}"
            self.say(moment, f"[TQ-TRACE] {head}stage={stage} | {fields}{stamp}{tail}")

        def detail(moment, name, fields, tail):
            stamp = f"timestamp={self.zero_s + moment:.6f}"
            who = f"trace_id={trace_id} | "
            if self.fork and "PUT" in name:
                who += f"func={func} | pid=7 | "
            if not self.fork:
                tail = f" | func={func} | pid=7{tail}"
            self.say(moment, f"[TQ-DETAIL] {who}stage={name} | {fields}{stamp}{tail}")

        stamp = f"timestamp={self.zero_s + at:.6f}"
        self.say(at, f"[TQ-TRACE] {head}pid=7 | stage=FUNCTION_START | {stamp}{tail}{more}")
        for stage, length in parts:
            name = stage.upper()
            trace(at, f"{name}_START", "batch_size=32 | " if stage == "get" else "")
            moved = mb is not None and stage != "compute"
            own = tail + (f".{len(self.lines)}" if tail else "")
            if moved:
                size = f"data_size_mb={mb:.2f} | " if stage == "put" else ""
                shape = "torch.Size([32])" if stage == "put" else "32"
                fields = f"batch_size={shape} | {size}"
                detail(at, f"TQ_CLIENT_{name}_START", fields, own + more)
            at += length
            spent[stage] += length
            if moved:
                speed = f"throughput_mbps={mb / length:.2f} | "
                facts = speed if stage == "put" else f"data_size_mb={mb:.2f} | "
                detail(
                    at,
                    f"TQ_CLIENT_{name}_END",
                    f"duration={length:.6f}s | {facts}",
                    own + ended[len(tail) :],
                )
            trace(at, f"{name}_END", f"duration={length:.6f}s | ", ended)
        if ends:
            total = at - begin_s
            shares = "".join(
                f"{stage}_ratio={100 * length / total:.2f}% | " for stage, length in spent.items()
            )
            trace(at, "FUNCTION_END", f"total_duration={total:.6f}s | {shares}", ended)
        return at

    def text(self):
        """Return the log."""
        return log_of(self)


def log_of(*writers):
    """Return the log of several processes, in the order of time."""
    lines = sorted(
        ((at, place, line) for w in writers for place, (at, line) in enumerate(w.lines)),
        key=lambda each: each[:2],
    )
    return "".join(f"{line}\n" for _, _, line in lines)


# Ray prints a worker's line and its end apart: two lines may stand in one.
_LINE = re.compile(
    r"\[(TQ-TRACE|TQ-DETAIL)\] (trace_id=.*?)(?=\x1b|\(\w+ pid=|INFO:\d{4}-|\[TQ-|$)", re.MULTILINE
)


def traced_lines(text):
    """Return the tracing's lines in what a command printed, as dicts."""
    return [
        {"mark": mark, **dict(field.split("=", 1) for field in fields.strip().split(" | "))}
        for mark, fields in _LINE.findall(text)
    ]


def of(lines, **wanted):
    """Return those of the lines with these fields; None for: without the field."""
    return [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]
