"""Gathering captures: named by role, rank and step, and what is missing is said with its cause."""

import gzip
import json

import pytest

from verl_profiler import collecting, fetching
from verl_profiler.cli import main
from verl_profiler.collecting import account, collect
from verl_profiler.errors import ReadingError


@pytest.fixture
def run(tmp_path):
    """A run directory with a journal and a place for the tools; returns functions to fill them."""
    home = tmp_path / "nsight"
    (home / "raw").mkdir(parents=True)
    (home / "journal").mkdir()
    return tmp_path


def journal(run, *steps, role="actor", rank=0, pid=11, ended=True, tool="nsys", silent=False):
    lines = []
    for number, step in enumerate(steps, 1):
        line = {
            "capture": number,
            "role": role,
            "rank": rank,
            "host": "h1",
            "pid": pid,
            "step": step,
            "task": None,
            "tool": tool,
            "silent": silent,
        }
        lines.append({**line, "begin_ns": number * 1000})
        if ended or number < len(steps):
            lines.append({**line, "end_ns": number * 1000 + 500})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "nsight" / "journal" / f"{role}_h1_{pid}.jsonl").write_text(text)


def report(run, name, content=b"report"):
    (run / "nsight" / "raw" / name).write_bytes(content)


def files(run):
    return sorted(path.name for path in (run / "nsight").glob("*.*"))


def test_reports_are_named_by_role_rank_and_step(run):
    """nsys only counts them; the journal says which step the k-th one is of."""
    journal(run, 2, 5)
    report(run, "actor_h1_11.1.nsys-rep")
    report(run, "actor_h1_11.2.nsys-rep")
    found = collect(run)

    assert [
        "actor_0.step2.json",
        "actor_0.step2.nsys-rep",
        "actor_0.step5.json",
        "actor_0.step5.nsys-rep",
        "captures.json",
    ] == files(run)
    assert [(2, "actor_0.step2.nsys-rep", ""), (5, "actor_0.step5.nsys-rep", "")] == [
        (capture.step, capture.file, capture.problem) for capture in found
    ]
    said = json.loads((run / "nsight" / "actor_0.step5.json").read_text())
    assert ("h1", 11, 5, 2000, 2500, 6) == tuple(
        said[key] for key in ("host", "pid", "step", "begin_ns", "end_ns", "size_bytes")
    )


def test_collecting_again_changes_nothing(run):
    """After the run did it, or on each node of a run without a shared disk."""
    journal(run, 2)
    report(run, "actor_h1_11.nsys-rep")
    first = collect(run)
    before = {path: path.read_bytes() for path in (run / "nsight").glob("*.*")}

    assert first == collect(run)
    assert before == {path: path.read_bytes() for path in (run / "nsight").glob("*.*")}


def test_several_captures_of_a_step_are_numbered(run):
    """With one capture per task."""
    journal(run, 2, 2)
    report(run, "actor_h1_11.1.nsys-rep")
    report(run, "actor_h1_11.2.nsys-rep")
    collect(run)

    assert {"actor_0.step2.nsys-rep", "actor_0.step2.2.nsys-rep"} <= set(files(run))


def test_a_process_without_a_rank_is_named_by_host_and_pid(run):
    """TransferQueue's actors."""
    journal(run, 2, role="tq_storage", rank=None)
    report(run, "tq_storage_h1_11.nsys-rep")

    assert "tq_storage_h1_11.step2.nsys-rep" == collect(run)[0].file


@pytest.mark.parametrize(
    ("facts", "raw", "cause"),
    [
        ({"ended": False}, [], "died in step 2"),
        ({"silent": True}, [], "record no range together"),
        ({}, [], "nsys wrote nothing"),
        ({}, ["actor_h1_11.qdstrm"], "still writing"),
        ({}, ["actor_h1_11.1.nsys-rep"], ""),
    ],
)
def test_what_is_missing_has_a_cause(run, facts, raw, cause):
    """So that the next run has it."""
    journal(run, 2, **facts)
    for name in raw:
        report(run, name)
    (found,) = collect(run)

    assert (cause == "") == (found.problem == "")
    assert cause in found.problem


def test_a_count_that_was_too_small_is_recognized(run):
    """nsys ended after the first capture, and said nothing."""
    journal(run, 2, 5)
    report(run, "actor_h1_11.nsys-rep")

    assert ["", True] == [
        capture.problem and "capture-range-end" in capture.problem for capture in collect(run)
    ]


def test_an_empty_report_is_named(run):
    """A full disk leaves one."""
    journal(run, 2)
    report(run, "actor_h1_11.nsys-rep", b"")

    assert "empty" in collect(run)[0].problem


def test_traces_of_verls_own_torch_profiler_are_placed_by_their_names(run):
    """Workers write them themselves, without a journal."""
    name = "actor_train_step3_rank1-of-2_dp1_pid77_20261121170000000.json.gz"
    report(run, name)
    (found,) = collect(run)

    assert ("actor_1.step3.json.gz", "actor", 1, 3, 77, "") == (
        found.file,
        found.role,
        found.rank,
        found.step,
        found.pid,
        found.problem,
    )


def test_traces_of_sglangs_schedulers_are_placed_by_the_time_in_their_names(run):
    """With profile_discrete verl lets them trace themselves, into folders of the replicas."""
    journal(run, 2, 5, role="trainer", tool="torch")
    path = run / "nsight" / "raw" / "agent_loop_rollout_replica_1"
    path.mkdir()
    # The second capture of the journal is open from 2000 ns to 2500 ns.
    (path / "0.000002100-TP-0.trace.json.gz").write_bytes(b"t" * 5000)
    found = [capture for capture in collect(run) if capture.role == "engine"]

    assert [("engine_1.step5.json.gz", "scheduler TP-0", "")] == [
        (each.file, each.task, each.problem) for each in found
    ]
    assert found == [capture for capture in collect(run) if capture.role == "engine"]


def test_a_trace_without_operations_is_named(run):
    """For example of a process that only passes messages on."""
    journal(run, 2, tool="torch")
    frame = gzip.compress(b'{"traceEvents": [{"ph": "X", "cat": "Trace"}]}')
    report(run, "actor_h1_11.1.json.gz", frame)

    assert "ran no operation of torch" in collect(run)[0].problem


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


def test_a_report_that_nobody_wrote_down_is_not_lost(run):
    """Its process died before its first line, or the journal is on another machine."""
    report(run, "engine_h1_9.1.nsys-rep")
    (found,) = collect(run)

    assert "no process wrote down" in found.problem
    assert (run / "nsight" / "raw" / "engine_h1_9.1.nsys-rep").exists()


def test_a_torn_journal_line_costs_only_itself(run):
    """A killed process may leave half a line."""
    journal(run, 2)
    report(run, "actor_h1_11.nsys-rep")
    path = run / "nsight" / "journal" / "actor_h1_11.jsonl"
    path.write_text(path.read_text() + '{"capture": 2, "begi')

    assert 1 == len(collect(run))


def test_a_run_without_captures_is_said_so(tmp_path):
    """And how to make some."""
    with pytest.raises(ReadingError) as caught:
        collect(tmp_path)

    assert "no-captures" == caught.value.slug


def test_the_account_is_for_people(run):
    """How many there are, and a line per missing one."""
    journal(run, 2, 5)
    report(run, "actor_h1_11.nsys-rep")
    lines = account(collect(run))

    assert "1 of 2 captures gathered, 0.0 MB" == lines[0]
    assert lines[1].startswith("WARNING actor_0 step 5: ")


def test_the_command_ends_with_1_where_something_is_missing(run, capsys):
    """So that a script notices."""
    journal(run, 2, 5)
    report(run, "actor_h1_11.nsys-rep")

    assert 1 == main(["collect", str(run)])
    printed = capsys.readouterr().out
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


def test_a_report_that_somebody_writes_is_waited_for_and_named(run):
    """Half a report must not be taken for one, nor its capture for one without a report."""
    journal(run, 2)
    with (run / "nsight" / "raw" / "actor_h1_11.1.nsys-rep").open("w"):
        (found,) = collect(run)

        assert "still writing" in found.problem
    assert "actor_0.step2.nsys-rep" == collect(run)[0].file


def test_what_comes_while_it_waits_is_taken(run, monkeypatch):
    """A report of another node whose nsys was still writing at the first look."""
    monkeypatch.setattr(collecting, "_AGAIN_S", 0.01)
    journal(run, 2)
    looks = []

    def fetch():
        looks.append(1)
        if len(looks) == 3:
            report(run, "actor_h1_11.1.nsys-rep")

    (found,) = collect(run, patience_s=60, fetch=fetch)

    assert ("actor_0.step2.nsys-rep", 3) == (found.file, len(looks))


def test_what_was_placed_does_not_come_again(run, monkeypatch):
    """It has another name here; its first name is written down with it."""
    journal(run, 2)
    report(run, "actor_h1_11.1.nsys-rep")
    collect(run)
    asked = {}
    monkeypatch.setattr(fetching, "fetch_from_nodes", lambda folders: asked.update(folders) or [])
    fetch = collecting.Fetch(run)
    fetch()

    assert {"actor_h1_11.1.nsys-rep": 6} == asked[run / "nsight" / "raw"]
    assert {"actor_h1_11.1.nsys-rep", "actor_h1_11.jsonl"} == set(asked[run / "nsight" / "journal"])
    assert [] == fetch.account()


def test_files_of_another_node_come_whole_or_not_at_all(tmp_path, monkeypatch):
    """In pieces; one that breaks off has no name that a later collection would take for done."""
    monkeypatch.setattr(fetching, "_CHUNK", 4)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "a.nsys-rep").write_bytes(b"0123456789")
    (there / "b.nsys-rep").write_bytes(b"")
    (there / "c.nsys-rep").write_bytes(b"known")
    (there / "d.nsys-rep").write_bytes(b"grown")
    with (there / "e.nsys-rep").open("w"):
        pieces = list(fetching._read_files(str(there), "mark", {"c.nsys-rep": 5, "d.nsys-rep": 2}))
    # A piece of an earlier try must not become part of the file.
    fetching._write_files(here, pieces[:2])
    assert ["a.nsys-rep.part"] == [path.name for path in here.iterdir()]
    fetching._write_files(here, pieces)

    assert {"a.nsys-rep": b"0123456789", "b.nsys-rep": b"", "d.nsys-rep": b"grown"} == {
        path.name: path.read_bytes() for path in here.iterdir()
    }


def test_one_disk_of_two_nodes_is_noticed(tmp_path):
    """Files would else be copied over themselves."""
    (tmp_path / "a.nsys-rep").touch()
    (tmp_path / "mark").touch()

    assert [] == list(fetching._read_files(str(tmp_path), "mark", {}))
