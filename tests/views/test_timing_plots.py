"""The pictures of a console log: gaps stay gaps, counts are no seconds, special steps are marked."""

import collections
import re
import statistics

import pytest

pytest.importorskip("vl_convert")

from chart_reading import data_in, every_channel, panels_of, title_of, words
from console_logs import FORMS, log

from verl_profiler.reading.formats.console_steps import logged_runs
from verl_profiler.render.charts import render
from verl_profiler.views.timing_figures import PICTURES


def run_of(text, folder):
    path = folder / "verl_demo.log"
    path.write_text(text)
    (run,) = logged_runs([path], [])
    return run


@pytest.fixture
def run(tmp_path):
    """Eight steps with validation and checkpoints outside of them."""
    return run_of(log(FORMS["verl-0.6-agent-loop"], range(1, 9)), tmp_path)


def drawn(name, run):
    return PICTURES[name](run)


@pytest.mark.parametrize("form", FORMS)
def test_every_picture_is_drawn_of_every_version(form, tmp_path):
    """With its title, and the log's name below it; also of the first step alone."""
    run = run_of(log(FORMS[form], range(1, 9)), tmp_path)
    one = run_of(log(FORMS[form], range(1, 2)), tmp_path)
    for name in PICTURES:
        spec = drawn(name, run)
        shown = words(spec)
        assert render(spec, "png").startswith(b"\x89PNG")
        assert "verl_demo: 8 steps, 1 to 8" in shown
        assert "prompt_length" not in shown
        assert "topk_ratio" not in shown
        assert "1 step, 1 to 1" in words(drawn(name, one))


def test_the_stack_is_as_high_as_the_step(run):
    """All timers inside and the rest; those outside are pale on top."""
    spec = drawn("step_timing_breakdown", run)
    heights, outsides = collections.Counter(), collections.Counter()
    for bar in data_in(spec, "part"):
        into = outsides if bar["part"].endswith(", outside") else heights
        into[bar["step"]] += bar["value"]
    (scale,) = [each["scale"] for _, each in every_channel(spec) if each.get("field") == "part"]
    codes = zip(scale["domain"], scale["range"], strict=True)

    for line in run.lines:
        assert heights[line.step] == pytest.approx(line.values["timing_s/step"], rel=1e-5)
        outside = sum(
            line.values.get(f"timing_s/{name}", 0.0)
            for name in ("testing", "save_checkpoint", "start_profile", "stop_profile")
        )
        assert outsides[line.step] == pytest.approx(outside, rel=1e-5)
    assert {name for name, code in codes if code.endswith("66")} == {
        name for name in scale["domain"] if name.endswith(", outside")
    }


def test_a_timer_that_moved_out_of_the_step_is_drawn_at_both_places(tmp_path):
    """verl was upgraded before training was resumed."""
    text = "".join(
        f"(T pid={pid}) step:{step} - timing_s/gen:5.0 - timing_s/step:{step_s} - timing_s/testing:3.0\n"
        for pid, step, step_s in ((1, 1, 8.0), (1, 2, 8.0), (2, 3, 5.0), (2, 4, 5.0))
    )
    spec = drawn("step_timing_breakdown", run_of(text, tmp_path))
    tops = collections.Counter()
    for bar in data_in(spec, "part"):
        tops[bar["step"]] = max(tops[bar["step"]], bar["high"])

    assert {1: 8.0, 2: 8.0, 3: 8.0, 4: 8.0} == tops
    assert {"testing", "testing, outside"} <= set(words(spec).splitlines())
    assert "training resumed at step 3" in words(spec)


def test_the_title_names_what_takes_long_outside_the_step(tmp_path):
    """The largest area of the picture is no part of the step's mean."""
    text = "".join(
        f"step:{step} - timing_s/gen:4.0 - timing_s/step:8.0 - timing_s/param_sync:{sync_s}\n"
        for step, sync_s in ((1, 0.0), (2, 30.0), (3, 30.0), (4, 0.0), (5, 30.0))
    )

    assert title_of(drawn("step_timing_breakdown", run_of(text, tmp_path))) == (
        "A step takes 8.00 s (mean, without step 1); 50 % of the time is gen; "
        "param_sync, outside the step, takes 22.5 s on average"
    )


@pytest.mark.parametrize("name", ["component_comparison", "throughput", "per_token_timing"])
def test_a_missing_step_breaks_the_line(name, tmp_path):
    """The original closed the gap and shifted everything behind it."""
    text = log(FORMS["verl-0.3-ppo"], range(1, 9))
    run = run_of(
        "".join(f"{each}\n" for each in text.splitlines() if "step:4 -" not in each), tmp_path
    )
    spec = drawn(name, run)
    first = data_in(spec, "line")[0]["line"]
    points = [
        (row["step"], row["value"])
        for row in data_in(panels_of(spec)[0], "line")
        if row["line"] == first
    ]

    assert [1, 2, 3, 5, 6, 7, 8] == [step for step, value in points if value is not None]
    assert [3.5] == [step for step, value in points if value is None]
    assert "7 steps, 1 to 8, 1 in between are not in the log" in words(spec)


def test_of_many_steps_neighbors_share_a_bar(tmp_path):
    """1,500 steps with gen of 1, 2 and 3 s in turn: 250 bars of 2 s, and as many points of the line."""
    text = "".join(
        f"step:{step} - timing_s/gen:{1 + step % 3}.0 - timing_s/step:{1 + step % 3}.0\n"
        for step in range(1, 1501)
    )
    spec = drawn("step_timing_breakdown", run_of(text, tmp_path))
    bars = [row for row in data_in(spec, "part") if row["part"] == "gen"]

    assert [2.0] * 250 == [bar["high"] for bar in bars]
    assert (0.5, 6.5) == pytest.approx((bars[0]["from"], bars[0]["to"]))
    assert 250 == len([row for row in data_in(spec, "value") if "step" in row])
    assert "time, mean of 6 steps each" in words(spec)


def test_the_throughput_is_named_per_gpu_and_the_job_s_stands_beside_it(run):
    """verl's perf/throughput is divided by the GPUs, which its name does not say."""
    shown = words(drawn("throughput", run))

    assert "perf/throughput [tokens/s per GPU]" in shown
    assert "tokens/s of the job" in shown
    assert ", 8 GPUs" in shown
    assert "mean " in shown
    assert "median " in shown


def test_throughput_has_a_line_at_the_mean(run):
    """Of the tokens per second, and of the time per step; both axes begin at 0."""
    spec = drawn("throughput", run)
    tokens, times = ([row["mean"] for row in data_in(each, "mean")] for each in panels_of(spec))

    _, *values = (line.values["perf/throughput"] for line in run.lines)
    assert [statistics.fmean(values)] == pytest.approx(tokens, rel=1e-5)
    assert 1 == len(times)
    assert "Broken lines: the mean, without step 1." in words(spec)


def test_a_pass_of_some_steps_is_not_what_components_are_compared_by(tmp_path):
    """Validation takes the longest, and only every fourth step has one."""
    run = run_of(log(FORMS["verl-0.3-ppo"], range(1, 9)), tmp_path)

    assert title_of(drawn("component_comparison", run)).startswith("update_actor takes ")


def test_times_per_token_begin_at_zero(tmp_path):
    """Also where they differ by a factor of 500, and where verl 0.3 rounds adv to 0.000."""
    text = log(FORMS["verl-0.3-ppo"], range(1, 9))
    small = re.sub(r"(timing_per_token_ms/adv:)[\d.]+", r"\g<1>0.0001", text)
    zero = small.replace("adv:0.0001", "adv:0.000", 3)
    spec = drawn("per_token_timing", run_of(zero, tmp_path))
    (scale,) = [each["scale"] for name, each in every_channel(spec) if name == "y"]

    assert {"zero": True} == scale
    assert 3 == [row["value"] for row in data_in(spec, "line")].count(0)
