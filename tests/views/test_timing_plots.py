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
from verl_profiler.views.view import NothingToDraw


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


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("form", FORMS)
def test_every_picture_is_drawn_of_every_version(name, form, tmp_path):
    """With its title, and the log's name below it."""
    run = run_of(log(FORMS[form], range(1, 9)), tmp_path)
    shown = words(drawn(name, run))

    assert "verl_demo: 8 steps, 1 to 8" in shown
    assert "prompt_length" not in shown
    assert "topk_ratio" not in shown


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


def test_every_phase_has_its_own_color(run):
    """The one that it has in every other picture and page."""
    (axes,) = drawn("step_timing_breakdown", run).axes
    shown = {to_hex(bar.get_facecolor()) for bar in axes.patches}

    for phase in ("gen", "ref", "old_log_prob", "update_actor", "testing", "save_checkpoint"):
        assert PHASE_COLORS[phase].lower() in shown


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


def test_steps_keep_their_numbers(tmp_path):
    """A log that begins at step 101 is drawn from 101 on."""
    run = run_of(log(FORMS["verl-0.3-ppo"], range(101, 109)), tmp_path)
    line = line_of(drawn("component_comparison", run).axes[0], PHASE_COLORS["gen"])

    assert list(range(101, 109)) == list(line.get_xdata())


def test_validation_checkpoints_and_resumption_are_marked(tmp_path):
    """They explain steps that are longer than others."""
    form = FORMS["verl-0.6-agent-loop"]
    run = run_of(log(form, range(1, 7)) + log(form, range(4, 9), seed=1), tmp_path)
    axes = drawn("component_comparison", run).axes[0]
    marks = {
        line.get_marker(): list(line.get_xdata())
        for line in axes.lines
        if line.get_marker() in "vs"
    }

    assert {"v": [4, 8], "s": [3, 6]} == marks
    assert {"validation", "checkpoint", "training resumed"} <= set(words(axes.figure).splitlines())


def test_the_throughput_is_named_per_gpu_and_the_job_s_stands_beside_it(run):
    """verl's perf/throughput is divided by the GPUs, which its name does not say."""
    figure = drawn("throughput", run)
    shown = words(figure)

    assert "perf/throughput [tokens/s per GPU]" in shown
    assert "tokens/s of the job" in shown
    assert ", 8 GPUs" in shown
    assert "mean " in shown
    assert "median " in shown


def test_many_steps_are_drawn_as_areas(tmp_path):
    """Thousands of bars take long and show nothing; the heights are the same."""
    run = run_of(log(FORMS["verl-0.5-grpo"], range(1, 1202)), tmp_path)
    (axes,) = drawn("step_timing_breakdown", run).axes
    top = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())

    assert not axes.patches
    assert top == pytest.approx(max(line.values["timing_s/step"] for line in run.lines), rel=1e-6)


def test_what_is_inside_gen_is_drawn_broken(run):
    """It is no addition to gen; counts are not drawn at all."""
    axes = drawn("generation_timing", run).axes[0]
    solid = [
        line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 2
    ]

    assert 2 == len(solid)
    assert "agent_loop/slowest/generate_sequences: mean" in words(axes.figure)


def test_a_picture_without_numbers_says_what_is_missing(tmp_path):
    """And is not drawn empty."""
    run = run_of("step:1 - timing_s/step:1.5\n", tmp_path)

    with pytest.raises(NothingToDraw, match="timing_per_token_ms"):
        PICTURES["per_token_timing"].figure(run)


def test_one_step_is_drawn(tmp_path):
    """The first look at a run that has just begun."""
    run = run_of(log(FORMS["verl-0.7-megatron"], range(1, 2)), tmp_path)
    for name in PICTURES:
        assert "1 step, 1 to 1" in words(drawn(name, run))
