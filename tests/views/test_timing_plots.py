"""The pictures of a console log: gaps stay gaps, counts are no seconds, special steps are marked."""

import math

import pytest

pytest.importorskip("matplotlib")

from console_logs import FORMS, log
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from verl_profiler.reading.formats.console_steps import logged_runs
from verl_profiler.render.colors import PHASE_COLORS
from verl_profiler.render.figure import settings
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
    figure = PICTURES[name].figure(run)
    with settings():
        FigureCanvasAgg(figure).draw()
    return figure


def words(figure):
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
        found += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title()]
        for legend in [*axes.findobj(lambda artist: type(artist).__name__ == "Legend")]:
            found += [text.get_text() for text in legend.get_texts()]
    return "\n".join(found)


def line_of(axes, code):
    """Return the points of the first line of a color that has more than the legend's."""
    return next(
        line
        for line in axes.lines
        if to_hex(line.get_color()) == code.lower() and len(line.get_xdata()) > 2
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_picture_is_drawn_of_every_version(form, tmp_path):
    """With its title, and the log's name below it; also of the first step alone."""
    run = run_of(log(FORMS[form], range(1, 9)), tmp_path)
    one = run_of(log(FORMS[form], range(1, 2)), tmp_path)
    for name in PICTURES:
        shown = words(drawn(name, run))
        assert "verl_demo: 8 steps, 1 to 8" in shown
        assert "prompt_length" not in shown
        assert "topk_ratio" not in shown
        assert "1 step, 1 to 1" in words(drawn(name, one))


def test_the_stack_is_as_high_as_the_step(run):
    """All timers inside and the rest; those outside are hatched on top."""
    (axes,) = drawn("step_timing_breakdown", run).axes
    heights, hatched = {}, {}
    for bar in axes.patches:
        step = round(bar.get_x() + bar.get_width() / 2)
        into = hatched if bar.get_hatch() else heights
        into[step] = into.get(step, 0.0) + bar.get_height()

    for line in run.lines:
        assert heights[line.step] == pytest.approx(line.values["timing_s/step"], rel=1e-9)
        outside = sum(
            line.values.get(f"timing_s/{name}", 0.0)
            for name in ("testing", "save_checkpoint", "start_profile", "stop_profile")
        )
        assert hatched.get(line.step, 0.0) == pytest.approx(outside, rel=1e-9)


def test_a_timer_that_moved_out_of_the_step_is_drawn_at_both_places(tmp_path):
    """verl was upgraded before training was resumed."""
    text = "".join(
        f"(T pid={pid}) step:{step} - timing_s/gen:5.0 - timing_s/step:{step_s} - timing_s/testing:3.0\n"
        for pid, step, step_s in ((1, 1, 8.0), (1, 2, 8.0), (2, 3, 5.0), (2, 4, 5.0))
    )
    (axes,) = drawn("step_timing_breakdown", run_of(text, tmp_path)).axes
    tops = {}
    for bar in axes.patches:
        step = round(bar.get_x() + bar.get_width() / 2)
        tops[step] = max(tops.get(step, 0), bar.get_y() + bar.get_height())

    assert {1: 8.0, 2: 8.0, 3: 8.0, 4: 8.0} == tops
    assert {"testing", "testing, outside"} <= set(words(axes.figure).splitlines())


@pytest.mark.parametrize("name", ["component_comparison", "throughput", "per_token_timing"])
def test_a_missing_step_breaks_the_line(name, tmp_path):
    """The original closed the gap and shifted everything behind it."""
    text = log(FORMS["verl-0.3-ppo"], range(1, 9))
    run = run_of(
        "".join(f"{each}\n" for each in text.splitlines() if "step:4 -" not in each), tmp_path
    )
    axes = drawn(name, run).axes[0]
    line = line_of(axes, PHASE_COLORS["gen"])
    points = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))

    assert {1, 2, 3, 5, 6, 7, 8} == {
        step for step, value in points.items() if not math.isnan(value)
    }
    assert any(3 < step < 5 and math.isnan(value) for step, value in points.items())
    assert "7 steps, 1 to 8, 1 in between are not in the log" in words(axes.figure)


def test_the_throughput_is_named_per_gpu_and_the_job_s_stands_beside_it(run):
    """verl's perf/throughput is divided by the GPUs, which its name does not say."""
    figure = drawn("throughput", run)
    shown = words(figure)

    assert "perf/throughput [tokens/s per GPU]" in shown
    assert "tokens/s of the job" in shown
    assert ", 8 GPUs" in shown
    assert "mean " in shown
    assert "median " in shown
