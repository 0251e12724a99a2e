"""`profiler.events.max_gb`: the files stay within it, and what is left out is counted and reported."""

from pathlib import Path

import msgspec
import pytest
from reading_back import headers_of, lines_of

from verl_profiler.reading.reader import load
from verl_profiler.recording.byte_budget import ByteBudget, ClosedSteps
from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import Complaints
from verl_profiler.recording.details import Details
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.recorder import Recorder

MB = 1_000_000


def recorder_with(worker_config, **changes):
    events = msgspec.structs.replace(worker_config.events, **changes)
    config = msgspec.structs.replace(worker_config, events=events, flush_interval_s=60)
    return Recorder(config, lambda: Identity("agent_loop", 0))


def add_request(recorder, number, step, details=20):
    """Append a request with details; return how many events."""
    begin = now()
    name = f"{number:032x}"
    recorder.append(("request_start", None, begin, {"sample": number}, step))
    for turn in range(details):
        extra = {"request_id": name, "turn": turn}
        recorder.append(("engine_call", begin, now(), extra, step))
    recorder.append(("request", begin, now(), {"request_id": name, "turns": details}, step))
    return details + 2


def disk_bytes(directory):
    files = [*directory.glob("step_*/*.jsonl"), *directory.glob("step_*/*.jsonl.gz")]
    return sum(file.stat().st_size for file in files)


def settle(recorder):
    """Have the writer flush what waits, in this thread."""
    recorder._writer._write_out()


def test_the_budget_holds_and_everything_is_accounted_for(worker_config, capsys):
    """100 steps of 4 requests with 0.2 MB: the account, the lines, the header, the readers, the console."""
    # No file is large enough to be compressed: each step has 13 kB.
    recorder = recorder_with(worker_config, max_gb=0.001)
    recorder._writer.budget.limit_bytes = limit = MB // 5
    directory = Path(worker_config.directory)
    offered = 0
    for step in range(1, 101):
        for number in range(4):
            offered += add_request(recorder, step * 1000 + number, step)
        settle(recorder)
        assert disk_bytes(directory) <= limit
    recorder.close("exit")
    account = recorder.account()

    assert 0.8 * limit < disk_bytes(directory) <= limit
    assert account["bytes"] == disk_bytes(directory)
    assert offered + account["own_events"] == (
        account["events"] + account["dropped"] + account["sampled_out"]
    )
    assert 0 == account["waiting"]
    assert {"budget"} == set(account["dropped_by"])
    # 400 requests with 22 events each of 150 bytes are 1.3 MB.
    assert 0.5 * offered < account["sampled_out"]

    lines = lines_of(directory)
    ended = [line for line in lines if line["event"] == "request"]
    chosen = [line["extra"]["one_in"] for line in sorted(ended, key=lambda line: line["step"])]
    # By powers of two, in this order, until there are none.
    kinds = list(dict.fromkeys(chosen))
    assert (1, 0) == (kinds[0], kinds[-1])
    assert all(kind.bit_count() == 1 for kind in kinds[:-1])
    assert kinds[:-1] == sorted(kinds[:-1])
    assert len(kinds) >= 4
    # Far beyond the last detail.
    last = {
        event: max(line["step"] for line in lines if line["event"] == event)
        for event in ("engine_call", "request")
    }
    assert last["engine_call"] + 5 < last["request"]

    (header,) = headers_of(directory).values()
    assert {
        "max_bytes": limit,
        "used_bytes": disk_bytes(directory),
        "halvings": None,
        "refused": account["dropped_by"]["budget"],
    } == header["budget"]
    with load(directory, cache=False) as opened:
        problems, notes = "\n".join(opened.problems), "\n".join(opened.notes)
    assert f"worker_0 dropped {account['dropped']} events because the byte budget" in problems
    assert "none at the end" in notes
    printed = capsys.readouterr().err
    assert "profiler.events.max_gb" in printed
    assert "details are written of 1/2 of the share" in printed
    assert "(byte-budget)" in printed


def test_compressed_steps_give_bytes_back(worker_config):
    recorder = recorder_with(worker_config, max_gb=0.001)
    directory = Path(worker_config.directory)
    for step in range(1, 31):
        for number in range(40):
            add_request(recorder, step * 1000 + number, step)
        settle(recorder)
        assert disk_bytes(directory) <= MB
    recorder.close("exit")
    (header,) = headers_of(directory).values()

    assert list(directory.glob("step_*/*.jsonl.gz"))
    assert disk_bytes(directory) == header["budget"]["used_bytes"]
    assert header["counters"]["bytes"] > 1.5 * MB


@pytest.mark.parametrize(
    ("used", "halvings"),
    [(0, 0), (44, 0), (45, 1), (67, 1), (68, 2), (89, 6), (91, None), (100, None)],
)
def test_each_time_half_of_what_was_left_is_used_the_share_is_halved(used, halvings):
    """Of 100 bytes 90 are for details: half of them are 45, half of the rest 22.5."""
    details = Details(1.0, 5, 1000, 0)
    budget = ByteBudget(100, ClosedSteps(lambda _path: None, print), details, Complaints())
    budget.used_bytes = used
    budget.update()
    assert details.every == (0 if halvings is None else 2**halvings)
    assert halvings == budget.halvings


def test_within_its_budget_details_do_not_wait_for_the_end_of_their_request(worker_config):
    """A process that is killed has them on the disk, as without a budget."""
    recorder = recorder_with(worker_config, max_gb=1.0)
    recorder.append(("request_start", None, now(), {"sample": 1}, 1))
    for _ in range(3):
        recorder.append(("engine_call", now(), now(), {"request_id": "a"}, 1))
    settle(recorder)

    assert 4 == len(lines_of(worker_config.directory))
    assert 0 == recorder.account()["waiting"]
    recorder.append(("request", now(), now(), {"request_id": "a"}, 1))
    recorder.close("exit")
    (line,) = (line for line in lines_of(worker_config.directory) if line["event"] == "request")
    assert (1, 3) == (line["extra"]["one_in"], line["extra"]["engine_calls"])
