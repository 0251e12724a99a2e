"""The list of the runs of a folder, in the terminal, as JSON and as a page with links."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
from cached_runs import REHEARSED, SMALL, copied

from verl_profiler.cli import main, runs

LISTED = functools.cache(runs.listed)
PACKED = Path(__file__).parents[1] / "data" / "one_step_off_run.tar.gz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs at different depths, an archive, a run without events, and a folder of something else."""
    path = tmp_path_factory.mktemp("runs") / "logs"
    for run, name in ((REHEARSED, "verl/second"), (SMALL, "first run")):
        copied(run, path / name)
    shutil.copy(PACKED, path / "off.tar.gz")
    (path / "starting").mkdir()
    (path / "starting" / "run.json").write_text('{"format": 1}')
    (path / "notes").mkdir()
    (path / "notes" / "a.txt").write_text("nothing")
    return path


@pytest.fixture
def listed_once(monkeypatch):
    """To list the runs takes seconds; tests of the list share it."""
    monkeypatch.setattr(runs, "listed", LISTED)


def printed(capsys, *words):
    assert 0 == main(["runs", *map(str, words)])
    return capsys.readouterr().out


@pytest.mark.usefixtures("listed_once")
def test_each_run_has_a_line_newest_first_with_what_its_summary_has(folder, capsys):
    """Of the same figures; what could not be read is in the list, too."""
    rows = json.loads(printed(capsys, folder, "--json"))["runs"]

    assert ["off.tar.gz", "verl/second", "first run", "starting"] == [row["run"] for row in rows]
    main(["summary", str(REHEARSED), "--json"])
    summary = json.loads(capsys.readouterr().out)
    head, first = summary["headline"][0], summary["findings"][0]
    row = rows[1]
    for name in ("steps", "step_mean_s", "useful_share"):
        assert row[name] == pytest.approx(head[name])
    assert (first["message"], first["recoverable_s"]) == (row["finding"], row["recoverable_s"])
    assert ("2026-11-21 04:11", "1 × 2 devices") == (row["launched"], row["devices"])
    assert "no step has finished" == rows[3]["problem"]
    lines = printed(capsys, folder).splitlines()
    assert 5 == len(lines)
    assert re.search(r"verl/second .*2 +20\.6 s +66 % +≤ 2\.12 s: Validation takes", lines[2])


@pytest.mark.usefixtures("listed_once")
def test_it_is_sorted_and_filtered(folder, capsys, monkeypatch):
    """What has no value comes last, whatever the order; a narrow terminal has findings below their runs."""

    def names(*options):
        return [
            row["run"] for row in json.loads(printed(capsys, folder, "--json", *options))["runs"]
        ]

    assert ["first run", "off.tar.gz", "verl/second", "starting"] == names("--sort", "step")
    assert ["verl/second", "first run", "off.tar.gz", "starting"] == names("--sort", "useful")
    assert ["off.tar.gz"] == names("--only", "OFF.tar")
    assert 1 == main(["runs", str(folder), "--only", "no such text"])
    assert "none of 4 runs has 'no such text'" in capsys.readouterr().err
    assert " starting " in printed(capsys, folder / "starting")
    for missing in ("nowhere", "off.tar.gz"):
        assert 2 == main(["runs", str(folder / missing)])
        assert f"{folder / missing} cannot be read: N" in capsys.readouterr().err
    assert 2 == main(["runs", str(folder / "notes")])
    assert "holds no runs" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    lines = printed(capsys, folder).splitlines()
    assert max(map(len, lines)) <= 100
    assert re.search(r"verl/second .*2 +20\.6 s +66 %$", lines[4])
    assert lines[5].startswith("    ≤ 2.12 s: Validation takes")
    monkeypatch.setenv("COLUMNS", "64")
    lines = printed(capsys, folder).splitlines()
    assert max(map(len, lines)) <= 64
    assert re.search(r"verl/second +2 +20\.6 s +66 %$", lines[4])


def test_its_page_links_to_a_report_of_each_run(folder, tmp_path, capsys):
    """Reports are written where there are none; those that are there stay, other files too."""
    for name in ("verl/second", "first run"):
        (folder / name / "report.html").unlink(missing_ok=True)
    foreign = folder / "first run" / "report.html"
    foreign.write_text("not ours")
    page = tmp_path / "list.html"

    assert 0 == main(["report", str(folder), "--out", str(page)])
    text = page.read_text()
    links = re.findall(r'<a href="([^"]+)"><bdi>(.+?)</bdi></a>', text)
    assert ["off.tar.gz", "verl/second"] == [name for _, name in links]
    for address, _ in links:
        assert "verl-profiler report" in (page.parent / address).read_text()[:2000]
    assert "not ours" == foreign.read_text()
    assert "would be overwritten" in text
    written = (folder / "verl" / "second" / "report.html").stat().st_mtime_ns
    assert 0 == main(["report", str(folder), "--out", str(page)])
    assert written == (folder / "verl" / "second" / "report.html").stat().st_mtime_ns
    capsys.readouterr()
