"""The plot command: files where it says, refusals that name what exists, numbers on demand."""

import argparse
import csv
import io
import json
from pathlib import Path

import pytest
from cached_runs import REHEARSED, SMALL
from commands import command

from verl_profiler.cli import plot
from verl_profiler.cli.options import declare
from verl_profiler.errors import ReadingError
from verl_profiler.views.questions import VIEWS

pytest.importorskip("vl_convert")


run = command(plot)


@pytest.mark.parametrize(("name", "begin"), [("a.png", b"\x89PNG"), ("a.svg", b"<svg")])
def test_a_plot_is_written_where_it_says(name, begin, tmp_path, capsys):
    """The format is that of the name."""
    path = tmp_path / "deep" / name

    assert 0 == run("slowest_requests", SMALL, "--out", path)
    assert path.read_bytes().startswith(begin)
    printed = capsys.readouterr()
    assert f"Wrote {path}\n" == printed.out
    assert f"Created the folder {path.parent}\n" == printed.err


def test_a_specification_is_written_to_be_restyled(tmp_path, capsys):
    """The chart of the picture, with its data and its title, for any editor of Vega-Lite."""
    path = tmp_path / "slowest.vl.json"

    assert 0 == run("slowest_requests", SMALL, "--spec", "--out", path)
    spec = json.loads(path.read_text())
    assert spec["$schema"].endswith("/vega-lite/v6.json")
    assert "The slowest request took " in spec["title"]["text"][0]
    assert 0 == run("slowest_requests", SMALL, "--spec", "--out", tmp_path)
    assert path.read_text() == (tmp_path / "slowest_requests.vl.json").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run("slowest_requests", SMALL, "--spec", "--format", "svg", "--out", tmp_path / "x")
    assert "not allowed with argument --spec" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_each_run_has_its_own_slowest_requests(capsys):
    """Those of one are all faster than the 20 slowest of the other."""
    tutorial = Path(__file__).parents[2] / "examples" / "tutorial"
    assert 0 == run(
        "slowest_requests", tutorial / "before.tar.gz", tutorial / "after.tar.gz", "--json"
    )
    rows = json.loads(capsys.readouterr().out)["plots"]["slowest_requests"]["slowest_requests"]
    before, after = (
        [row["duration_s"] for row in rows if row["run"] == name] for name in ("before", "after")
    )

    assert (20, 20) == (len(before), len(after))
    assert max(before) < min(after)


def test_without_out_it_is_named_after_the_plot(tmp_path, monkeypatch):
    """In the working directory, visible."""
    monkeypatch.chdir(tmp_path)

    assert 0 == run("turn_times", SMALL, "--format", "svg")
    assert ["turn_times.svg"] == [path.name for path in tmp_path.iterdir()]


def test_nothing_to_draw_is_no_chart(tmp_path, capsys):
    """Status 1, the reason, and no file."""
    path = tmp_path / "a.png"

    assert 1 == run("memory_over_time", REHEARSED, "--out", path)
    assert "no memory was read there" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "slug", "said"),
    [
        (["slowest_request"], "no-such-plot", "did you mean slowest_requests?"),
        (["zzz"], "no-such-plot", "verl-profiler plot --list shows all of them"),
        (["rollout_tail"], "no-such-plot", "verl-profiler report logs/my-run shows it"),
        (["throughput"], "no-such-plot", "verl-profiler timing train.log draws it"),
        ([], "no-such-plot", "plot --list"),
        (["slowest_requests", SMALL, "--steps", "7:9"], "no-such-step", "it has 0 to 2"),
        (
            ["slowest_requests", SMALL, "--worker", "9"],
            "no-such-worker",
            "it has worker_0, worker_1",
        ),
        (["step_durations", SMALL, "--worker", "1"], "option-not-heeded", "These do: "),
        (["slowest_requests"], "no-run", "verl-profiler plot slowest_requests"),
        (["all", SMALL, "--out", "a.png"], "output-format", "Name a folder"),
        (["slowest_requests", SMALL, "--out", "a.pdf"], "output-format", ".png or .svg"),
        (
            ["slowest_requests", SMALL, "--out", "a.png", "--format", "svg"],
            "output-format",
            "contradict",
        ),
        (["all", SMALL, "--csv"], "output-format", "Name the plot; --json has all tables"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(arguments, slug, said, monkeypatch, tmp_path):
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ReadingError) as caught:
        run(*arguments)

    assert (2, slug) == (caught.value.exit_code, caught.value.slug)
    assert said in str(caught.value)
    assert [] == list(tmp_path.iterdir())


def test_the_numbers_are_those_of_the_plot(capsys):
    """As JSON with every table, and as CSV with the plot's own."""
    assert 0 == run("step_durations", SMALL, "--json")
    content = json.loads(capsys.readouterr().out)
    assert 0 == run("step_durations", SMALL, "--csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    table = content["plots"]["step_durations"]["step_durations"]
    assert [1, 2] == [row["step"] for row in table]
    assert [row["gen_s"] for row in table] == [float(row["gen_s"]) for row in rows]
    assert ["small_run"] == content["runs"]


def test_numbers_go_to_files_as_well(tmp_path, capsys):
    """Named after the plot in a folder, or as they are named."""
    (tmp_path / "folder").mkdir()
    assert 0 == run("step_durations", SMALL, "--csv", "--out", tmp_path / "folder")
    assert 0 == run("step_durations", SMALL, "--json", "--out", tmp_path / "folder")
    assert 0 == run("step_durations", SMALL, "--csv", "--out", tmp_path / "one.csv")
    assert 0 == run("step_durations", SMALL, "--json", "--out", tmp_path / "one.json")
    capsys.readouterr()

    assert (tmp_path / "one.csv").read_text() == (
        tmp_path / "folder/step_durations.csv"
    ).read_text()
    assert (tmp_path / "one.json").read_text() == (
        tmp_path / "folder/step_durations.json"
    ).read_text()


def test_selections_reach_the_numbers(capsys):
    """One worker, one step, validation."""
    assert 0 == run(
        "request_duration_cdf", SMALL, "--json", "--steps", "2", "--worker", "1", "--validate"
    )
    content = json.loads(capsys.readouterr().out)

    sheets = content["plots"]["request_duration_cdf"]
    assert {2, None} == {row["step"] for row in sheets["request_duration_cdf"]}
    assert (1, True, [2, 2]) == (content["worker"], content["validate"], content["steps"])


def test_two_runs_give_a_file_each(tmp_path, capsys):
    """Named after them."""
    assert 0 == run("step_durations", SMALL, REHEARSED, "--out", tmp_path)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert 2 == len(names)
    assert all(name.endswith("-step_durations.png") for name in names)
    assert 2 == capsys.readouterr().out.count("Wrote ")


def test_the_list_says_what_each_plot_answers(capsys):
    """One question each."""
    assert 0 == run("--list")

    lines = capsys.readouterr().out.splitlines()
    assert len(VIEWS) == len(lines)
    assert all(line.endswith("?") for line in lines)


def test_a_plot_is_drawn_again_over_its_own_file_and_over_no_other(tmp_path, capsys):
    """A specification may have been edited since it was written."""
    for name in ("a.png", "a.svg"):
        assert 0 == run("slowest_requests", SMALL, "--out", tmp_path / name)
        first = (tmp_path / name).read_bytes()
        assert 0 == run("slowest_requests", SMALL, "--out", tmp_path / name)
        assert first == (tmp_path / name).read_bytes()
    assert 0 == run("slowest_requests", SMALL, "--spec", "--out", tmp_path / "a.vl.json")
    (tmp_path / "b.png").write_bytes(b"\x89PNG of somebody else")
    for options in (["--spec", "--out", tmp_path / "a.vl.json"], ["--out", tmp_path / "b.png"]):
        with pytest.raises(ReadingError, match="would be overwritten"):
            run("slowest_requests", SMALL, *options)
    capsys.readouterr()


def test_the_examples_of_plots_are_commands():
    """Each has only options that there are, and that its plot takes."""
    parser = argparse.ArgumentParser()
    declare(parser, plot.ARGUMENTS)
    for name, view in VIEWS.items():
        args = parser.parse_args([name, "RUN", *view.example.split()])
        assert {"worker"} & view.takes or args.worker is None
        assert "validate" in view.takes or not args.validate
