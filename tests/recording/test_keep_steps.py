"""`profiler.events.keep_steps`: which steps' files are deleted, what is left of them, what readers state."""

import gzip
import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from verl_profiler.cli import main
from verl_profiler.events.vocabulary import steps_of_folder
from verl_profiler.reading import convert, discovery, reader
from verl_profiler.reading.distribute import distribute
from verl_profiler.reading.executors import Inline
from verl_profiler.reading.pruned_notes import ranges
from verl_profiler.reading.reader import load
from verl_profiler.recording import retention
from verl_profiler.recording.clock import now
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.recorder import Recorder
from verl_profiler.recording.step_choice import StepChoice
from verl_profiler.recording.worker_config import KeepSteps

MS = 1_000_000
STEPS = 300
# Three times as long as the others.
SLOW = (40, 133, 222)
KEEP = KeepSteps(first=3, last=10, slow=3)
KEPT = {0, 1, 2, 3, *SLOW, *range(STEPS - 9, STEPS + 1)}


class Training:
    """A trainer's recorder and an agent-loop worker's; times are what the test states."""

    def __init__(self, worker_config, keep=KEEP, **changes):
        events = msgspec.structs.replace(
            worker_config.events, flush_interval_s=60, announce=False, keep_steps=keep, **changes
        )
        config = msgspec.structs.replace(worker_config, events=events)
        self.directory = Path(config.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.trainer = Recorder(config, lambda: Identity("trainer", 0))
        self.worker = Recorder(config, lambda: Identity("agent_loop", 0))
        self.at = now()
        self.offered = Counter()

    def record(self, recorder, event, length_ms, extra, step, at=None):
        end = self.at if at is None else at
        begin = None if length_ms is None else end - length_ms * MS
        recorder.append((event, begin, end, extra, step))
        self.offered[step] += 1

    def step(self, step, requests=4, length_ms=100):
        """Record a step with requests of two generate calls of 5 tokens each."""
        for number in range(requests):
            at = self.at + (number + 2) * MS
            sample = {"sample": number, "session": 0}
            about = {"request_id": f"{step:016x}{number:016x}"}
            self.record(self.worker, "request_start", None, sample, step, at)
            for turn in range(2):
                extra = {**about, "turn": turn, "response_tokens": 5}
                self.record(self.worker, "engine_call", 1, extra, step, at)
            extra = {**about, **sample, "turns": 2, "prompt_tokens": 7, "response_tokens": 13}
            self.record(self.worker, "request", 2, extra, step, at)
        self.at += length_ms * MS
        self.record(self.trainer, "tq_get", 1, {"rows": 3}, step)
        self.record(self.trainer, "gen", length_ms // 2, None, step)
        self.record(self.trainer, "metrics", None, {"metrics": {"score": step}}, step)
        self.record(self.trainer, "step", length_ms, None, step)
        self.flush()

    def flush(self):
        self.worker._writer._write_out()
        self.trainer._writer._write_out()

    def run(self, steps=STEPS, slow=SLOW):
        self.record(self.trainer, "init", 5, None, 0)
        for step in range(1, steps + 1):
            self.step(step, length_ms=300 if step in slow else 100)
        self.close()
        return self

    def close(self):
        self.flush()
        self.worker.close("exit")
        self.trainer.close("exit")


def steps_on_disk(directory, name="*"):
    found = set()
    for path in directory.glob(f"step_*/{name}.jsonl*"):
        first, last = steps_of_folder(path.parent.name)
        found |= {*range(first, last + 1)}
    return found


def pruned_lines(directory, name):
    texts = (directory / "pruned" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(text) for text in texts]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """300 steps with files kept of 16, and a copy of the same training with all files."""
    from verl_profiler.recording.clock import take_anchor
    from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

    folder = tmp_path_factory.mktemp("kept")

    def config(name):
        directory = str(folder / name)
        return WorkerConfig(directory, directory, EventSettings(), take_anchor())

    whole = Training(config("whole"), keep=None).run()
    return Training(config("pruned")).run(), whole


def test_the_first_the_last_and_the_slowest_steps_are_kept(recorded):
    """In every process, and nothing else; step 0 has the start."""
    training, _ = recorded
    assert KEPT == steps_on_disk(training.directory, "trainer_0")
    assert KEPT - {0} == steps_on_disk(training.directory, "worker_0")
    folders = {path.name for path in training.directory.glob("step_*")}
    assert {f"step_{step}" for step in KEPT} == folders


def test_what_is_left_of_a_step_adds_up_to_it(recorded):
    training, _ = recorded
    lines = {line["step"]: line for line in pruned_lines(training.directory, "worker_0")}

    assert sorted({*range(1, STEPS + 1)} - KEPT) == sorted(lines)
    line = lines[17]
    assert "step_pruned" == line["event"]
    # Of the recorder itself.
    own, _ = line["extra"]["totals"].pop("profiler_cost")
    (size,) = line["extra"].pop("files").items()
    # 16 lines of about 150 bytes, and the recorder's own.
    assert ".jsonl" == size[0]
    assert 16 * 100 < size[1] < 16 * 200 + own * 400
    assert {
        "lines": 16 + own,
        "requests": {
            "finished": 4,
            "turns": 8,
            "prompt_tokens": 28,
            "response_tokens": 52,
            "generated_tokens": 40,
            "tool_tokens": 12,
        },
        "totals": {"engine_call": [8, 0.008], "request": [4, 0.008], "request_start": [4, 0.0]},
    } == line["extra"]


def test_the_trainers_timers_and_metrics_stay_line_by_line(recorded):
    training, whole = recorded
    left = [line for line in pruned_lines(training.directory, "trainer_0") if line["step"] == 17]
    before = [json.loads(text) for text in (whole.directory / "step_17/trainer_0.jsonl").open()]

    assert ["gen", "metrics", "step", "step_pruned"] == [line["event"] for line in left]
    for event in ("gen", "metrics", "step"):
        (here,) = (line for line in left if line["event"] == event)
        (there,) = (line for line in before if line["event"] == event)
        assert there.keys() == here.keys()
        assert (there.get("duration_sec"), there.get("extra")) == (
            here.get("duration_sec"),
            here.get("extra"),
        )


def test_steps_have_the_same_durations_requests_and_tokens(recorded):
    """All 300 of them, as if nothing had been deleted."""
    query = (
        "SELECT step, finished, duration_us, phases_us, requests, unfinished_requests, "
        "validation_requests, generated_tokens, tool_tokens FROM steps WHERE step > 0 ORDER BY step"
    )
    rows = []
    for training in recorded:
        with load(training.directory, cache=False) as run:
            rows.append(run.rows(query))
    assert STEPS == len(rows[0])
    assert rows[1] == rows[0]
    assert 40 == rows[0][16]["generated_tokens"]


def test_tasks_read_it_as_one_process_does(recorded, tmp_path):
    """Several groups of files, and of steps: nothing is left to convert, and the answers are the same."""
    training, _ = recorded
    run = tmp_path / "run"
    shutil.copytree(training.directory, run, ignore=shutil.ignore_patterns(".cache"))
    assert distribute([run], Inline()).shards > 2
    before = sorted(path.name for path in run.glob(".cache/*/part-*"))
    query = "SELECT * EXCLUDE (run) FROM steps ORDER BY step"
    with load(run) as tasks, load(training.directory, cache=False) as alone:
        assert alone.rows(query) == tasks.rows(query)
    assert before == sorted(path.name for path in run.glob(".cache/*/part-*"))


def test_readers_state_which_steps_were_deleted_and_miss_nothing(recorded):
    training, whole = recorded
    with load(training.directory, cache=False) as run:
        assert ["run.json is missing, so the launch is unknown"] == run.problems
        (note,) = run.notes
    assert f"deleted the event files of {STEPS - len(KEPT) + 1} of {STEPS} steps (4-39" in note
    assert "4-39, 41-132, 134-221, 223-290" in note
    with load(whole.directory, cache=False) as run:
        assert [] == run.notes


def test_summary_marks_that_percentiles_are_of_the_kept_steps(recorded, capsys):
    """Four requests in each step, and only in the kept ones are they still there."""
    lines = []
    for training in recorded:
        assert 0 == main(["summary", str(training.directory)])
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("requests ")]
        lines.append(line.split(":")[0].split(maxsplit=1)[1])

    kept = len(KEPT - {0})
    assert [f"{4 * kept} of {4 * STEPS:,} (of kept steps)", f"{4 * STEPS:,}"] == lines


def test_diff_compares_phases_of_all_steps_and_all_else_of_the_kept_ones(recorded, capsys):
    """And states it: a run with all files, and the same with few, have the same metrics."""
    training, whole = recorded
    arguments = [str(whole.directory), str(training.directory)]
    assert 0 == main(["diff", *arguments, "--warmup", "0", "--json"])
    document = json.loads(capsys.readouterr().out)
    kept = KEPT - {0}
    assert [[], sorted({*range(1, STEPS + 1)} - kept)] == [
        run["pruned"] for run in document["runs"]
    ]
    same = {row["metric"]: row for row in document["metrics"]}
    for metric in ("step.mean", "gen.mean", "requests.mean", "engine_call.count", "request.p50"):
        assert same[metric]["a"] == pytest.approx(same[metric]["b"]), metric
    assert 0 == main(["diff", *arguments, "--warmup", "0"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"B: the event files of {STEPS - len(kept)} of {STEPS} steps were deleted" in text


def test_every_event_is_accounted_for(recorded):
    training, _ = recorded
    for recorder, name in ((training.trainer, "trainer_0"), (training.worker, "worker_0")):
        account = recorder.account()
        header = json.loads((training.directory / "processes" / f"{name}.json").read_text())
        files = [*training.directory.glob(f"step_*/{name}.jsonl")]
        files.append(training.directory / "pruned" / f"{name}.jsonl")
        left = sum(len(file.read_bytes().splitlines()) for file in files)
        assert 0 == account["waiting"] == account["dropped"]
        assert header["written_events"] == account["events"]
        assert left == header["written_events"] - header["pruned_events"]
        assert header["pruned_events"] > 0
    offered = sum(training.offered.values())
    accounts = [training.trainer.account(), training.worker.account()]
    assert offered == sum(each["events"] - each["own_events"] for each in accounts)


def test_several_steps_in_a_file_and_compression(worker_config):
    """Whole files are kept: those with the first and last steps, and that with the slowest one."""
    training = Training(worker_config, steps_per_file=10, compress=True)
    for step in range(1, STEPS + 1):
        training.step(step, requests=40, length_ms=300 if step == 133 else 100)
    training.close()

    kept = {*range(10), *range(130, 140), *range(290, 310)}
    assert kept == steps_on_disk(training.directory, "worker_0")
    assert kept == steps_on_disk(training.directory, "trainer_0")
    packed = training.directory / "step_130-139" / "worker_0.jsonl.gz"
    lines = gzip.decompress(packed.read_bytes()).splitlines()
    assert 10 * 160 == sum(b'"profiler_cost"' not in line for line in lines)
    with load(training.directory, cache=False) as run:
        rows = run.rows("SELECT step, requests, generated_tokens FROM steps ORDER BY step")
        assert ["run.json is missing, so the launch is unknown"] == run.problems
    assert [(step, 40, 400) for step in range(1, STEPS + 1)] == [(*row.values(),) for row in rows]


def test_a_budget_gets_the_bytes_back(worker_config):
    """What 300 steps write is several times the budget, of which the kept steps take a part."""
    keep = KeepSteps(first=3, last=10, slow=3)
    training = Training(worker_config, keep, max_gb=0.001)
    for step in range(1, STEPS + 1):
        training.step(step, requests=20)
    training.close()

    account = training.worker.account()
    assert 3_000_000 < account["bytes"]
    assert (0, 0) == (account["dropped"], account["sampled_out"])
    header = json.loads((training.directory / "processes" / "worker_0.json").read_text())
    files = [*training.directory.glob("step_*/worker_0.jsonl")]
    files.append(training.directory / "pruned" / "worker_0.jsonl")
    assert sum(file.stat().st_size for file in files) == header["budget"]["used_bytes"]


def test_the_end_of_a_process_does_not_wait_for_large_files(worker_config, monkeypatch):
    """They stay, and are complete."""
    monkeypatch.setattr(retention, "_LAST_BYTES", 0)
    training = Training(worker_config)
    for step in range(1, 40):
        (training.directory / "retention.json").unlink(missing_ok=True)
        training.step(step)
    training.worker.close("exit")
    assert {*range(1, 40)} == steps_on_disk(training.directory, "worker_0")
    assert not (training.directory / "pruned" / "worker_0.jsonl").exists()
    training.trainer.close("exit")


def test_sampled_details_count_as_often_as_they_stand_for(worker_config):
    training = Training(worker_config, detail_share=0.25, detail_slowest=1)
    for step in range(1, 31):
        training.step(step, requests=40)
    training.close()

    calls = [line["extra"] for line in pruned_lines(training.directory, "worker_0")]
    assert {40} == {extra["requests"]["finished"] for extra in calls}
    # Exact, from the requests' own lines.
    assert {400} == {extra["requests"]["generated_tokens"] for extra in calls}
    mean = sum(extra["totals"]["engine_call"][0] for extra in calls) / len(calls)
    assert 80 == pytest.approx(mean, rel=0.1)
    assert all(extra["lines"] < 160 for extra in calls)


def test_files_of_others_are_not_touched(worker_config):
    """Of a process that was started again, and those that a user put there."""
    training = Training(worker_config)
    folder = training.directory / "step_20"
    folder.mkdir()
    (folder / "worker_0-2.jsonl").write_text("")
    (folder / "notes.txt").write_text("mine")
    training.run(slow=())

    assert ["notes.txt", "worker_0-2.jsonl"] == sorted(path.name for path in folder.iterdir())


def test_a_process_that_is_not_the_trainer_decides_nothing(worker_config):
    """Without the trainer's file, as on another node's disk, all stays."""
    training = Training(worker_config)
    for step in range(1, 40):
        training.step(step)
        (training.directory / "retention.json").unlink(missing_ok=True)
        training.worker._writer._write_out()
    training.worker.close("exit")
    training.trainer.close("exit")

    assert {*range(1, 40)} == steps_on_disk(training.directory, "worker_0")


def test_where_a_disk_refuses_to_delete_files_stay(worker_config, monkeypatch, capsys):
    """It is reported once, and nothing is counted twice."""
    training = Training(worker_config)

    def refuse(path, **_named):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    training.run(steps=40, slow=())
    monkeypatch.undo()

    printed = capsys.readouterr().err
    assert 2 == printed.count("(not-pruned)")
    assert {*range(41)} == steps_on_disk(training.directory)
    with load(training.directory, cache=False) as run:
        rows = run.rows("SELECT requests FROM steps WHERE step > 0")
        # What it adds up to was written before.
        assert [True] == ["of 1 of 40 steps (7)" in note for note in run.notes]
    assert [4] * 40 == [row["requests"] for row in rows]


def test_late_lines_of_a_pruned_step_are_added(worker_config):
    training = Training(worker_config)
    for step in range(1, 30):
        training.step(step)
    training.step(15, requests=1)
    for step in range(30, 40):
        training.step(step)
    training.close()

    assert 15 not in steps_on_disk(training.directory)
    with load(training.directory, cache=False) as run:
        (row,) = run.rows("SELECT requests, generated_tokens FROM steps WHERE step = 15")
    assert {"requests": 5, "generated_tokens": 50} == row


def copies_at_each_deletion(directory, folder, monkeypatch):
    """Return copies of a run as a kill would leave it before and after each deletion, as they are made."""
    copies = []
    unlink = Path.unlink

    def copy():
        if directory.is_dir():
            copies.append(shutil.copytree(directory, folder / str(len(copies))))

    def killed_around(path, **named):
        copy()
        unlink(path, **named)
        copy()

    monkeypatch.setattr(Path, "unlink", killed_around)
    return copies


@pytest.mark.parametrize("changes", [{}, {"steps_per_file": 3}])
def test_a_kill_while_files_are_deleted_loses_and_doubles_nothing(
    worker_config, tmp_path, monkeypatch, changes
):
    training = Training(worker_config, **changes)
    for step in range(1, 21):
        training.step(step)
    copies = copies_at_each_deletion(training.directory, tmp_path / "copies", monkeypatch)
    training.step(21)
    training.step(22)
    monkeypatch.undo()

    assert copies
    for copy in copies:
        with load(copy, cache=False) as run:
            rows = run.rows(
                "SELECT requests, generated_tokens, round(duration_us / 1e5) AS tenths "
                "FROM steps WHERE step BETWEEN 1 AND 20"
            )
            problems = [each for each in run.problems if "run.json" not in each]
        assert [{"requests": 4, "generated_tokens": 40, "tenths": 1}] * 20 == rows
        assert [] == problems
    training.close()


def test_a_reader_in_tasks_leaves_out_files_that_are_about_to_be_deleted(
    worker_config, tmp_path, monkeypatch
):
    training = Training(worker_config)
    for step in range(1, 21):
        training.step(step)
    copies = copies_at_each_deletion(training.directory, tmp_path / "copies", monkeypatch)
    training.step(21)
    monkeypatch.undo()
    training.close()

    distribute([copies[0]], Inline())
    with load(copies[0]) as run:
        rows = run.rows("SELECT requests FROM steps WHERE step BETWEEN 1 AND 20")
    assert [{"requests": 4}] * 20 == rows


def test_totals_that_wait_for_the_disk_keep_the_files(worker_config, monkeypatch):
    """Also lines that come meanwhile are counted once."""
    training = Training(worker_config)
    for step in range(1, 21):
        training.step(step)
    writer = training.worker._writer
    append = writer.files.append

    def refuse(path, lines, *, owned=True):
        if path.parent.name == "pruned":
            writer.files._keep(path, lines, owned)
        else:
            append(path, lines, owned=owned)

    monkeypatch.setattr(writer.files, "append", refuse)
    before = steps_on_disk(training.directory, "worker_0")
    training.step(21)
    assert before | {21} == steps_on_disk(training.directory, "worker_0")
    (waiting,) = writer._retention._summed
    monkeypatch.undo()
    # A late line, which is written before the files are looked at again.
    late = int(waiting.path.parent.name.removeprefix("step_"))
    training.step(late, requests=1)
    for step in range(22, 30):
        training.step(step)
    training.close()

    assert late not in steps_on_disk(training.directory, "worker_0")
    with load(training.directory, cache=False) as run:
        rows = run.rows("SELECT requests FROM steps WHERE step BETWEEN 1 AND 29 ORDER BY step")
        problems = [each for each in run.problems if "run.json" not in each]
    assert [5 if step == late else 4 for step in range(1, 30)] == [row["requests"] for row in rows]
    assert [] == problems


def test_a_reader_beside_a_run_that_prunes_gets_every_step_once(worker_config):
    """Whatever is deleted while it reads: no error, no missing file, and all requests of all steps.

    But for steps whose files are deleted, and whose totals are about to be written: the next look has them.
    """
    training = Training(worker_config)
    enough = threading.Event()

    def write():
        step = 20
        while not enough.is_set():
            step += 1
            training.step(step)

    for step in range(1, 21):
        training.step(step)
    thread = threading.Thread(target=write)
    thread.start()
    found = []
    try:
        for look in range(3):
            with load(training.directory, cache=look % 2 == 0) as run:
                rows = run.rows("SELECT step, requests FROM steps WHERE finished ORDER BY step")
                # The newest one may have been listed while it was written.
                del rows[-1]
                problems = [
                    text
                    for text in run.problems
                    if any(word in text for word in ("cannot be read", "gone", "missing"))
                    and "run.json" not in text
                ]
            found.append((rows, problems))
    finally:
        enough.set()
        thread.join()
        training.close()
    for rows, problems in found:
        assert [] == problems
        assert [*range(1, len(rows) + 1)] == [row["step"] for row in rows]
        assert {row["requests"] for row in rows} <= {0, 4}
        # As many as one flush deletes.
        assert sum(row["requests"] == 0 for row in rows) <= 8
    assert len(found[-1][0]) > 20
    with load(training.directory, cache=False) as run:
        assert {4} == {
            row["requests"] for row in run.rows("SELECT requests FROM steps WHERE step > 0")
        }


@pytest.mark.parametrize(
    ("module", "function"), [(reader, "processes"), (discovery, "_pruned_files")]
)
@pytest.mark.parametrize("before", [12, 30])
def test_what_is_pruned_after_it_was_listed_is_taken_from_what_is_left(
    worker_config, monkeypatch, module, function, before
):
    """Also where nothing had been pruned at all until then; what was read is not counted twice."""
    training = Training(worker_config)
    for step in range(1, before + 1):
        training.step(step)
    original = getattr(module, function)

    def later(source, *others):
        for step in range(before + 1, before + 16):
            training.step(step)
        return original(source, *others)

    monkeypatch.setattr(module, function, later)
    with load(training.directory, cache=False) as run:
        # What was pruned before it could be listed is there, too.
        among = f"step <= {before}"
        rows = run.rows(f"SELECT step, requests, generated_tokens FROM steps WHERE {among}")
        problems = run.problems
        steps = run.rows(
            f"SELECT DISTINCT step FROM event_fields WHERE event = 'step_pruned' AND {among}"
        )
    training.close()

    assert [(step, 4, 40) for step in range(1, before + 1)] == sorted(
        tuple(row.values()) for row in rows
    )
    assert ["run.json is missing, so the launch is unknown"] == problems
    # Those after the first 3: of the others the files are read.
    assert before - 10 < len(steps) < before


def counted_once(training, monkeypatch, module, function, changed):
    """Read with a function of the reader replaced; all steps have 4 requests."""
    monkeypatch.setattr(module, function, changed)
    with load(training.directory, cache=False) as run:
        rows = run.rows("SELECT step, requests FROM steps WHERE step BETWEEN 1 AND 30")
    training.close()
    assert dict.fromkeys(range(1, 31), 4) == {row["step"]: row["requests"] for row in rows}


def test_what_is_left_of_a_step_that_was_read_is_not_taken_when_it_comes_later(
    worker_config, monkeypatch
):
    """Lines that are appended to `pruned/` between its listing and its reading, with the files read by then."""
    training = Training(worker_config)
    for step in range(1, 31):
        training.step(step)
    original = convert.as_listed

    def then_grows(*arguments):
        listed = original(*arguments)
        for step in range(31, 46):
            training.step(step)
        return listed

    counted_once(training, monkeypatch, convert, "as_listed", then_grows)


def test_a_file_that_was_still_written_when_it_was_listed_is_not_read_beside_its_totals(
    worker_config, monkeypatch
):
    """It has more bytes by then; its process was killed before it could delete it."""
    training = Training(worker_config)
    monkeypatch.setattr(retention.Retention, "delete", lambda _: None)
    for step in range(1, 31):
        training.step(step)
    original = discovery.event_files

    def a_line_less(*arguments):
        return [replace(each, size_bytes=each.size_bytes - 1) for each in original(*arguments)]

    counted_once(training, monkeypatch, discovery, "event_files", a_line_less)


def test_what_is_compressed_after_it_was_listed_is_read(worker_config, monkeypatch):
    training = Training(worker_config, keep=None, compress=True)
    for step in range(1, 7):
        training.step(step, requests=40)
    listed = reader.processes

    def later(source):
        for step in range(7, 13):
            training.step(step, requests=40)
        return listed(source)

    monkeypatch.setattr(reader, "processes", later)
    with load(training.directory, cache=False) as run:
        rows = run.rows("SELECT step, requests FROM steps WHERE finished")
        problems = run.problems
    training.close()

    assert [(step, 40) for step in range(1, 7)] == sorted(tuple(row.values()) for row in rows)
    assert ["run.json is missing, so the launch is unknown"] == problems


def choice(durations, keep, steps_per_file=1, captured=(), alarmed=(), first=1):
    """Return the folders that are kept of steps with these durations."""
    chooser = StepChoice(keep, steps_per_file, captured)
    decision = None
    for step, duration_s in enumerate(durations, first):
        if step in alarmed:
            chooser.alarmed(step)
        decision = chooser.ended(step, duration_s) or decision
    return decision


def test_slow_is_relative_to_the_steps_around():
    """Responses become longer during training: the last ones are not the slowest for that."""
    durations = [10 + step / 10 for step in range(200)]
    durations[49] = 30.0
    found = choice(durations, KeepSteps(first=0, last=10, slow=1))

    assert 190 == found["until"]
    assert ["step_0", "step_50"] == found["kept"]


def test_a_step_in_which_the_trainer_was_stuck_counts_as_slowest():
    durations = [10.0] * 100
    durations[29] = 12.0
    keep = KeepSteps(first=0, last=10, slow=1)
    assert ["step_0", "step_30"] == choice(durations, keep)["kept"]
    assert ["step_0", "step_60"] == choice(durations, keep, alarmed=(60,))["kept"]


def test_the_alarm_of_a_stuck_phase_keeps_its_step(worker_config):
    training = Training(worker_config, KeepSteps(first=0, last=10, slow=1))
    for step in range(1, 40):
        if step == 15:
            training.trainer.keep_step(step)
        training.step(step, length_ms=150 if step == 20 else 100)
    training.close()

    assert 15 in steps_on_disk(training.directory, "worker_0")
    assert 20 not in steps_on_disk(training.directory, "worker_0")


def test_captured_steps_are_kept():
    found = choice([10.0] * 100, KeepSteps(first=0, last=10, slow=0), captured=(7, 33))
    assert ["step_0", "step_7", "step_33"] == found["kept"]


def test_the_first_steps_of_a_resumed_training_are_those_after_its_checkpoint():
    found = choice([10.0] * 100, KeepSteps(first=2, last=10, slow=0), first=501)
    # What was recorded before the first step, such as its validation, is in the checkpoint's step.
    assert ["step_0", "step_500", "step_501", "step_502"] == found["kept"]


def test_asynchronous_training_prunes_nothing(worker_config, capsys):
    training = Training(worker_config)
    for step in range(1, 40):
        training.record(
            training.trainer, "sample_consumed", None, {"consumed_step": step + 1}, step
        )
        training.step(step)
    training.close()

    assert {*range(1, 40)} == steps_on_disk(training.directory)
    assert 1 == capsys.readouterr().err.count("training is asynchronous")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([4], "4"),
        ([1, 2, 3, 7, 9, 10], "1-3, 7, 9-10"),
        ([*range(1, 20, 2)], "1, 3, 5, 7, and 6 more ranges"),
    ],
)
def test_ranges(numbers, text):
    assert text == ranges(numbers)
