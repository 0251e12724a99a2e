"""Gathering captures: reports are named by role, rank and step; missing ones have a cause."""

import gzip
import json
import os
import shutil
import stat

import msgspec
import pytest
from picked import picked

from verl_profiler import plugin
from verl_profiler.capture import tools
from verl_profiler.capture.gather import collect
from verl_profiler.capture.plan import Plan, umask
from verl_profiler.cli import main
from verl_profiler.environ import SETTINGS, UNDER_NSYS
from verl_profiler.errors import ReadingError
from verl_profiler.instrumentation import placing
from verl_profiler.reading.formats.nsys_export import take_captures
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.recording import recorder


@pytest.fixture
def run(tmp_path):
    """A run directory with a journal and a place for the tools; returns functions to fill them."""
    home = tmp_path / "nsight"
    (home / "raw").mkdir(parents=True)
    (home / "journal").mkdir()
    return tmp_path


def journal(run, *steps, role="actor", rank=0, pid=11, ended=True, tool="nsys"):
    lines = []
    for number, step in enumerate(steps, 1):
        line = {"capture": number, "role": role, "rank": rank, "host": "h1", "pid": pid}
        line |= {"step": step, "task": None, "tool": tool}
        lines.append({**line, "begin_ns": number * 1000})
        if ended or number < len(steps):
            lines.append({**line, "end_ns": number * 1000 + 500})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "nsight" / "journal" / f"{role}_h1_{pid}.jsonl").write_text(text)


def report(run, name, content=b"report"):
    (run / "nsight" / "raw" / name).write_bytes(content)


def test_reports_are_named_by_role_rank_and_step(run):
    """nsys only numbers them; the journal has the step of the k-th one, and may have no rank."""
    journal(run, 2, 5, 5)
    journal(run, 2, role="tq_storage", rank=None, pid=12)
    for number in (1, 2, 3):
        report(run, f"actor_h1_11.{number}.nsys-rep")
    report(run, "tq_storage_h1_12.nsys-rep")
    found = collect(run)

    names = ["actor_0.step2", "actor_0.step5.2", "actor_0.step5", "tq_storage_h1_12.step2"]
    expected = [f"{name}.{end}" for name in names for end in ("json", "nsys-rep")]
    before = {path: path.read_bytes() for path in (run / "nsight").glob("*.*")}
    assert {*expected, "captures.json"} == {path.name for path in before}
    assert {(2, names[0]), (5, names[1]), (5, names[2]), (2, names[3])} == {
        (capture.step, capture.file.removesuffix(".nsys-rep")) for capture in found
    }
    assert {""} == {capture.problem for capture in found}
    metadata = json.loads((run / "nsight" / "actor_0.step5.json").read_text())
    assert ("h1", 11, 5, 2000, 2500, 6) == picked(
        metadata, "host pid step begin_ns end_ns size_bytes"
    )
    # Again, after the run did it, or on each node of a run without a shared disk.
    assert found == collect(run)
    assert before == {path: path.read_bytes() for path in (run / "nsight").glob("*.*")}


@pytest.mark.parametrize(
    ("facts", "raw", "causes"),
    [
        ({"ended": False}, {}, ["died in step 2"]),
        ({}, {}, ["nsys wrote nothing"]),
        ({}, {"actor_h1_11.qdstrm": b"report"}, ["still writing"]),
        ({}, {"actor_h1_11.1.nsys-rep": b"report"}, [""]),
        # A full disk leaves one.
        ({}, {"actor_h1_11.nsys-rep": b""}, ["empty"]),
        # nsys ended after the first capture, without any message: a count that was too small.
        ({"steps": (2, 5)}, {"actor_h1_11.nsys-rep": b"report"}, ["", "capture-range-end"]),
        # For example of a process that only passes messages on.
        (
            {"tool": "torch"},
            {
                "actor_h1_11.1.json.gz": gzip.compress(
                    b'{"traceEvents": [{"ph": "X", "cat": "Trace"}]}'
                )
            },
            ["ran no operation of torch"],
        ),
    ],
)
def test_what_is_missing_has_a_cause(run, facts, raw, causes):
    """So that the next run has it."""
    facts = dict(facts)
    journal(run, *facts.pop("steps", (2,)), **facts)
    for name, content in raw.items():
        report(run, name, content)

    for capture, cause in zip(collect(run), causes, strict=True):
        assert (cause == "") == (capture.problem == "")
        assert cause in capture.problem


def test_traces_without_a_journal_are_placed_by_their_names(run):
    """verl's own torch profiler writes step and rank into them, SGLang's schedulers the time."""
    report(run, "actor_train_step3_rank1-of-2_dp1_pid77_20261121170000000.json.gz")
    journal(run, 2, 5, role="trainer", tool="torch")
    path = run / "nsight" / "raw" / "agent_loop_rollout_replica_1"
    path.mkdir()
    # The second capture of the journal is open from 2000 ns to 2500 ns.
    (path / "0.000002100-TP-0.trace.json.gz").write_bytes(b"t" * 5000)

    for _ in range(2):
        found = {capture.role: capture for capture in collect(run)}
        actor, engine = found["actor"], found["engine"]
        assert ("actor_1.step3.json.gz", 1, 3, 77, "") == (
            *(actor.file, actor.rank, actor.step, actor.pid, actor.problem),
        )
        assert ("engine_1.step5.json.gz", "scheduler TP-0", "") == (
            *(engine.file, engine.task, engine.problem),
        )


def test_a_later_collection_replaces_nothing(run):
    """Traces that come after the first one get the next number; foreign files are left alone."""
    name = "actor_{}_step3_rank1-of-2_pid77_2026112117000000{}.json.gz"
    report(run, name.format("update", 1), b"first")
    collect(run)
    (run / "nsight" / "notes.json").write_text("[1]")
    report(run, name.format("log-prob", 2), b"second")
    found = collect(run)

    assert {"actor_1.step3.json.gz", "actor_1.step3.2.json.gz"} == {each.file for each in found}
    assert b"first" == (run / "nsight" / "actor_1.step3.json.gz").read_bytes()


def test_the_command_has_nothing_to_do_for_a_run_that_requested_none(tmp_path, capsys):
    """A healthy run: status 0, and a line; what is no run is refused."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "other").mkdir()

    assert 0 == main(["collect", str(tmp_path / "run")])
    said = "This run has no captures (trainer.profile_steps requests them); nothing to gather.\n"
    assert said == capsys.readouterr().out
    assert 0 == main(["collect", "--json", str(tmp_path / "run")])
    assert [] == json.loads(capsys.readouterr().out)
    assert 2 == main(["collect", str(tmp_path / "other")])
    assert "(no-captures)" in capsys.readouterr().err


def test_the_command_counts_captures_and_lists_missing_ones(run, capsys):
    """Its status is then 1, so that a script notices."""
    journal(run, 2, 5)
    report(run, "actor_h1_11.nsys-rep")

    assert 1 == main(["collect", str(run)])
    printed = capsys.readouterr().out
    assert "1 of 2 captures gathered, 6 B" in printed
    assert "WARNING actor_0 step 5: " in printed
    assert "actor_0.step2.nsys-rep" in printed
    assert "(capture-missing)" in printed


def test_a_folder_on_the_nodes_is_found_by_run_json(run, tmp_path):
    """`profiler.nsight.directory` of that launch, relative to where it was launched."""
    journal(run, 2)
    raw = tmp_path / "scratch" / run.name
    raw.mkdir(parents=True)
    (raw / "actor_h1_11.nsys-rep").write_bytes(b"report")
    launch = {"cwd": str(tmp_path), "settings": {"nsight": {"directory": "scratch"}}}
    (run / "run.json").write_text(json.dumps(launch))

    assert "actor_0.step2.nsys-rep" == collect(run)[0].file


def test_a_report_that_is_being_written_stays_in_its_place(run):
    """Half a report must not be gathered."""
    journal(run, 2)
    with (run / "nsight" / "raw" / "actor_h1_11.1.nsys-rep").open("w"):
        (found,) = collect(run)

        assert "still writing" in found.problem
    assert "actor_0.step2.nsys-rep" == collect(run)[0].file


def test_what_comes_while_it_waits_is_taken(run):
    """A report of another node whose nsys was still writing at the first poll."""
    journal(run, 2)
    polls = []

    def fetch(_left_s):
        polls.append(1)
        if len(polls) == 3:
            report(run, "actor_h1_11.1.nsys-rep")
        return False

    (found,) = collect(run, patience_s=60, fetch=fetch, poll_s=0.01)

    assert ("actor_0.step2.nsys-rep", 3) == (found.file, len(polls))


def _odd(**facts):
    line = {"capture": 1, "role": "actor", "rank": 0, "host": "h1", "pid": 9, "step": 3}
    return json.dumps({**line, "begin_ns": 1, **facts}) + "\n"


def test_lines_left_out_of_a_journal_are_a_problem_of_the_run(run, capsys):
    """Their captures are not silently fewer; once per journal, in the command and in the reader."""
    journal(run, 2)
    report(run, "actor_h1_11.nsys-rep")
    odd = _odd(role="../../escaped") + _odd(host="a/b") + _odd(step="soon")
    (run / "nsight/journal/odd.jsonl").write_text(odd + '{"capture": 2, "begi')

    assert 1 == main(["collect", str(run)])
    printed = capsys.readouterr().out
    assert "1 of 2 captures gathered" in printed
    assert "3 lines of journal/odd.jsonl left out" in printed
    assert not list(run.parent.rglob("escaped*"))
    problems = take_captures(Tables.of(), [("small", run)])
    assert [1] == [problem.count("3 lines of journal/odd.jsonl") for problem in problems]


def test_a_run_that_cannot_be_written_is_a_message(run):
    """No traceback; the reports stay where they are."""
    journal(run, 2)
    report(run, "actor_h1_11.1.nsys-rep")
    (run / "nsight" / "captures.json").mkdir()
    with pytest.raises(ReadingError, match="not-collected"):
        collect(run)


def test_reports_follow_the_umask(run):
    """nsys writes them without one."""
    journal(run, 2)
    report(run, "actor_h1_11.1.nsys-rep")
    (run / "nsight/raw/actor_h1_11.1.nsys-rep").chmod(0o666)
    before = os.umask(0o027)
    try:
        collect(run)
    finally:
        os.umask(before)

    home = run / "nsight"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir() if path.is_file()}
    assert {0o640} == modes


def test_a_process_that_nsys_started_has_the_drivers_umask(monkeypatch, worker_config):
    """nsys takes it away, and every file of the process would be writable for everybody."""
    plan = Plan("nsys", (1,), False, "/raw", "/journal", {}, umask=0o027)
    worker_config = msgspec.structs.replace(worker_config, capture_plan=plan.encode())
    monkeypatch.setenv(SETTINGS, worker_config.encode())
    before = os.umask(0)
    found = []
    try:
        for under_nsys in ("0", "1"):
            monkeypatch.setenv(UNDER_NSYS, under_nsys)
            plugin.activate("driver")
            recorder.stop()
            placing.uninstall()
            found.append(umask())
    finally:
        os.umask(before)

    assert [0, 0o027] == found


def test_without_nsys_the_command_that_exports_is_in_the_message(tmp_path, monkeypatch):
    """To be run on another machine."""
    report = tmp_path / "a.nsys-rep"
    report.touch()
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    with pytest.raises(ReadingError, match="no-nsys") as caught:
        tools.get("nsys").export(report)
    assert f"nsys export --type sqlite -o {tmp_path / 'a.sqlite'} {report}" in str(caught.value)
