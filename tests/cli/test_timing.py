"""The timing command: five pictures, the original's summary, numbers, and nothing of anyone's lost."""

import csv
import gzip
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from commands import command
from console_logs import FORMS, log

from verl_profiler.cli import main, timing
from verl_profiler.errors import ReadingError

vl_convert = pytest.importorskip("vl_convert")

ROOT = Path(__file__).parents[2]
FORM = FORMS["verl-0.6-agent-loop"]
NAMES = {
    "step_timing_breakdown.png",
    "per_token_timing.png",
    "throughput.png",
    "component_comparison.png",
    "generation_timing.png",
}


run = command(timing)


@pytest.fixture
def real_pictures():
    """Each takes half a second."""


@pytest.fixture(autouse=True)
def _drawn_at_once(request, monkeypatch):
    """In the place of a picture, its header and the checksum of its specification."""

    def draw(text, scale):
        return b"\x89PNG" + bytes(29) + zlib.crc32(text.encode()).to_bytes(4, "big")

    if "real_pictures" not in request.fixturenames:
        monkeypatch.setattr(vl_convert, "vegalite_to_png", draw)


@pytest.fixture
def demo(tmp_path):
    """A log of four steps."""
    path = tmp_path / "verl_demo.log"
    path.write_text(log(FORM, range(1, 5)))
    return path


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_pictures_lie_in_plot_beside_the_log(demo, capsys, real_pictures):
    """Where the original put them, under its names; what was written is said in its words."""
    assert 0 == run(demo)
    out = capsys.readouterr().out

    assert {f"plot/{name}" for name in NAMES} | {"verl_demo.log"} == files(demo.parent)
    assert all((demo.parent / "plot" / name).read_bytes().startswith(b"\x89PNG") for name in NAMES)
    assert f"Parsing log file: {demo}\n" in out
    assert f"Output directory: {demo.parent / 'plot'}\n" in out
    assert {f"Saved: {demo.parent / 'plot' / name}" for name in NAMES} <= set(out.splitlines())
    assert f"All plots saved to: {demo.parent / 'plot'}\n" in out


def test_the_summary_has_the_original_s_form(demo, capsys):
    """Scripts that read it go on."""
    run(demo)
    out = capsys.readouterr().out

    assert (
        f"{'=' * 70}\nTIMING SUMMARY STATISTICS\n{'=' * 70}\n\ntiming_s/step:\n  Mean:   4" in out
    )
    blocks = re.findall(
        r"^(\S+):.*\n  Mean:   ([\d.]+)\n  Std:    ([\d.]+)\n  Min:    ([\d.]+)\n"
        r"  Max:    ([\d.]+)\n  Median: ([\d.]+)\n",
        out,
        re.MULTILINE,
    )
    assert ["timing_s/step", "timing_s/start_profile", "timing_s/gen"] == [
        block[0] for block in blocks[:3]
    ]
    assert ["perf/time_per_step", "perf/throughput", "tokens_per_s"] == [
        block[0] for block in blocks[-3:]
    ]
    for _, mean, _, low, high, median in blocks:
        assert float(low) <= float(mean) <= float(high)
        assert float(low) <= float(median) <= float(high)
    assert "perf/throughput: (tokens/s per GPU)\n" in out
    # The mean of a timer here and the one in its picture are of different steps.
    assert "These are of all steps; means in the figures are without step 1.\n" in out
    assert "timing_s/testing: (outside the step)\n" in out


def test_running_again_gives_the_same_bytes_until_the_log_grew(demo):
    """The usual way of using it: look, wait, look again."""

    def pictures():
        assert 0 == run(demo)
        return {name: (demo.parent / "plot" / name).read_bytes() for name in NAMES}

    before = pictures()
    assert before == pictures()
    demo.write_text(log(FORM, range(1, 8)))
    assert not {*before.values()} & {*pictures().values()}


@pytest.mark.parametrize("whose", ["anyone's file", "another log's picture"])
def test_what_is_not_a_picture_of_this_log_is_not_replaced(whose, demo, tmp_path):
    """Nothing is written at all, and --force says that it may be."""
    place = demo.parent / "plot/throughput.png"
    place.parent.mkdir()
    if whose == "anyone's file":
        place.write_bytes(b"\x89PNG mine")
    else:
        other = tmp_path / "other.log"
        other.write_text(log(FORM, range(1, 3)))
        run(other)
    before, names = place.read_bytes(), files(demo.parent)

    with pytest.raises(
        ReadingError, match=r"was not written by this command.*\nAdd --force"
    ) as error:
        run(demo)
    assert "output-exists" == error.value.slug
    assert (before, names) == (place.read_bytes(), files(demo.parent))
    assert 0 == run(demo, "--force")
    assert before != place.read_bytes()


def test_several_runs_get_a_folder_each(tmp_path, capsys):
    """None replaces another's pictures, whether they are in one file or in several."""
    one, two = tmp_path / "a.log", tmp_path / "b.log"
    one.write_text(log(FORM, range(1, 3)) + log(FORM, range(1, 4), seed=1))
    two.write_text(log(FORM, range(1, 3), seed=2))

    assert 0 == run(one, two)
    assert {f"plot/{label}/{name}" for label in ("a-1", "a-2", "b") for name in NAMES} < files(
        tmp_path
    )
    assert ["Run a-1", "Run a-2", "Run b"] == re.findall(
        r"^Run .*$", capsys.readouterr().out, re.MULTILINE
    )


def test_compressed_and_resumed_logs_are_one_run(tmp_path, capsys):
    """The pictures lie beside the first."""
    first, second = tmp_path / "a.log.gz", tmp_path / "b.log"
    first.write_bytes(gzip.compress(log(FORM, range(1, 5)).encode()))
    second.write_text(log(FORM, range(4, 8), seed=1))

    assert 0 == run(first, second)
    out = capsys.readouterr().out
    assert "Steps 1 to 7: 7 in the log, 1 with validation, 2 with a checkpoint\n" in out
    assert "training resumes at step 4; what was logged earlier for step 4 was repeated" in out
    assert {f"plot/{name}" for name in NAMES} < files(tmp_path)


@pytest.mark.parametrize("how", ["-", "<(…)"])
def test_a_pipe_is_a_log_for_every_command_that_takes_logs(
    demo, tmp_path, monkeypatch, capsys, how
):
    """`zcat old.log.gz | verl-profiler timing -`; a pipe is read once, a log several times."""
    monkeypatch.chdir(tmp_path)

    def printed(*words):
        end, other = os.pipe()
        os.write(other, demo.read_bytes())
        os.close(other)
        with os.fdopen(end) as pipe:
            monkeypatch.setattr("sys.stdin", pipe)
            piped = "-" if how == "-" else f"/dev/fd/{end}"
            assert 0 == main([piped if word == "LOG" else word for word in words])
        return capsys.readouterr().out

    assert f"Output directory: {tmp_path / 'plot'}\n" in printed("timing", "LOG")
    assert {f"plot/{name}" for name in NAMES} < files(tmp_path)
    for name in ("summary", "why"):
        text = printed(name, "LOG")
        assert 0 == main([name, str(demo)])
        assert text.split()[1:] == capsys.readouterr().out.split()[1:]
    assert ": 0 s (0 %), not significant" in printed("diff", "LOG", str(demo))
    assert "Wrote stdin-report.html" in printed("report", "LOG")


def test_json_has_every_number_and_what_is_known_about_it(demo, capsys):
    """Nothing is drawn."""
    assert 0 == run(demo, "--json")
    content = json.loads(capsys.readouterr().out)
    (logged,) = content["runs"]

    assert {"verl_demo.log"} == files(demo.parent)
    assert (1, "verl_demo", [1]) == (content["format"], logged["label"], logged["launches_begin"])
    assert [1, 2, 3, 4] == [row["step"] for row in logged["logged_steps"]]
    assert [8] * 4 == [row["gpus"] for row in logged["logged_steps"]]
    assert "timing_s/agent_loop/slowest/prompt_length" in logged["metrics"][0]
    assert {"logged_phases", "generation_times", "per_token_times", "metric_summary"} < set(logged)


def test_csv_has_a_line_per_step(demo, tmp_path, capsys):
    """For a spreadsheet: what a step lacks is empty."""
    out = tmp_path / "steps.csv"

    assert 0 == run(demo, "--csv", "--out", out)
    assert f"Wrote {out}\n" == capsys.readouterr().out
    rows = list(csv.DictReader(out.open()))
    assert ["1", "2", "3", "4"] == [row["step"] for row in rows]
    assert ["", "", "", "True"] == [row["timing_s/testing"] and row["validated"] for row in rows]
    with pytest.raises(ReadingError, match="would be overwritten"):
        run(demo, "--csv", "--out", out)


def test_only_the_chosen_steps_are_shown(demo, capsys):
    """Both ends included."""
    assert 0 == run(demo, "--json", "--steps", "2:3")
    (logged,) = json.loads(capsys.readouterr().out)["runs"]
    assert [2, 3] == [row["step"] for row in logged["logged_steps"]]


def test_a_log_without_timers_is_nothing_to_plot(tmp_path, capsys):
    """With what was found instead, and no folder."""
    path = tmp_path / "sft.log"
    path.write_text("step:1 - train/loss:0.5\n")

    assert 1 == run(path)
    assert "nothing to plot:\n" in capsys.readouterr().err
    assert {"sft.log"} == files(tmp_path)


@pytest.mark.parametrize(
    ("words", "slug"),
    [(["missing.log"], "log-unreadable"), (["LOG", "--steps", "9"], "no-such-step")],
)
def test_what_cannot_be_done_is_refused(words, slug, demo):
    """Before anything is written."""
    with pytest.raises(ReadingError, match=r"No such file|is not in the log") as error:
        run(*(demo if word == "LOG" else word for word in words))

    assert (2, slug) == (error.value.exit_code, error.value.slug)


def test_what_could_not_be_read_is_said_at_the_end(demo, capsys):
    """The log of a killed job ends in the middle."""
    demo.write_text(demo.read_text() + "step:5 - timing_s/gen:20.1 - timing_s/upd")
    run(demo)

    assert "Data-quality warnings\n  - " in (out := capsys.readouterr().out)
    assert "step 5 is truncated at 'timing_s/upd'" in out


def test_pictures_that_the_log_has_no_numbers_for_are_named(tmp_path, capsys):
    """A fork that prints a few timers only."""
    path = tmp_path / "fork.log"
    path.write_text("step:1 - timing_s/step:2.0 - timing_s/update_actor:1.0\n")

    assert 0 == run(path)
    out = capsys.readouterr().out
    assert (
        f"Not drawn: {tmp_path / 'plot/per_token_timing.png'}: the log has no timing_per_token"
        in out
    )
    assert (
        f"Not drawn: {tmp_path / 'plot/generation_timing.png'}: the log has no timer of gen" in out
    )


def test_the_original_script_s_name_still_works(demo):
    """`python plot_timing_metrics.py LOG`."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples/plot_timing_metrics.py", demo],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip

    assert (0, f"Created the folder {demo.parent / 'plot'}\n") == (done.returncode, done.stderr)
    assert {f"plot/{name}" for name in NAMES} < files(demo.parent)
    assert "timing_s/step:\n  Mean:   " in done.stdout


def test_specifications_are_written_to_be_restyled(demo, capsys):
    """Instead of the figures, under the same names; one can be changed and drawn again."""
    assert 0 == run(demo, "--spec")
    assert {"verl_demo.log", *(f"plot/{name[:-4]}.vl.json" for name in NAMES)} == files(demo.parent)

    spec = json.loads((demo.parent / "plot/throughput.vl.json").read_text())
    assert "tokens/s per GPU" in spec["title"]["text"][0]
    spec["title"]["text"] = "Throughput of the new reward"
    assert "Throughput of the new reward" in vl_convert.vegalite_to_svg(spec)
    capsys.readouterr()
