"""Plots: they show what the tables say, in words and colors that hold, and nothing overlaps."""

import collections
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text

from verl_profiler.analysis.steps import step_times
from verl_profiler.render import colors
from verl_profiler.render.figure import save, settings
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.step_text import _other_lines
from verl_profiler.views.view import Choice, NothingToDraw

DATA = Path(__file__).parent.parent / "data"
HOSTILE = "$\\frac{1}{0}$ <b>\x1b[31m\u202e工具 " + "long " * 20


def with_more_lines(folder, files, event, more):
    """Copy the generated run, with what `more` makes of the files' lines of an event, file by file."""
    shutil.copytree(DATA / "small_run", folder, ignore=shutil.ignore_patterns(".cache"))
    for path in folder.glob(f"step_*/{files}"):
        lines = path.read_text().splitlines()
        own = [json.loads(line) for line in lines if f'"event":"{event}"' in line]
        path.write_text("\n".join([*lines, *map(json.dumps, more(own))]) + "\n")
    return folder


def own_spans(turns):
    """Give spans of a user's own in turns."""
    for number, turn in enumerate(turns):
        for name in ("database_lookup", "rerank") if number % 3 else ("rerank",):
            yield {**turn, "event": name, "duration_sec": 0.01 * (number + 1)}


def loads(requests):
    """Give a reading of an engine's load where each of its requests ends."""
    for number, request in enumerate(requests):
        load = {
            "running_requests": len(requests) - number,
            "waiting_requests": max(3 - number, 0),
            "running_limit": 4,
            "kv_used_tokens": 900 // (number + 1),
            "kv_capacity_tokens": 1000,
        }
        del request["duration_sec"]
        yield {**request, "event": "engine_state", "extra": load}


def measured(updates):
    """Give two readings of devices and a batch where each update ends."""
    for number, update in enumerate(updates):
        batch = {"tokens": 1000 + 50 * number, "sequences": 8}
        yield {**update, "event": "train_batch", "extra": batch}
        flops = {"compute_s": 0.5, "tflops": 300.0 - number, "promised_tflops": 989.0, "ranks": 1}
        del update["duration_sec"]
        yield {**update, "event": "batch_flops", "extra": {**batch, **flops}}
        for device in (0, 1):
            reading = {"device": device, "utilization": 90 - 40 * device, "power_w": 500}
            yield {**update, "event": "device", "extra": {**reading, "used_bytes": 7 << 30}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A generated run, one of the rehearsal, an asynchronous one, TransferQueue tracing, and own spans."""
    own = with_more_lines(
        tmp_path_factory.mktemp("own") / "spanned_run", "worker_0.jsonl", "turn", own_spans
    )
    read = with_more_lines(
        tmp_path_factory.mktemp("loads") / "loaded_run", "engine_*.jsonl", "engine_request", loads
    )
    sampled = with_more_lines(
        tmp_path_factory.mktemp("devices") / "sampled_run",
        "trainer_0.jsonl",
        "update_actor",
        measured,
    )
    with (
        load(sampled, cache=False) as devices,
        load(own, cache=False) as spanned,
        load(read, cache=False) as loaded,
        load(DATA / "small_run", cache=False) as small,
        load(DATA / "rehearsal_run.tar.gz", cache=False) as rehearsed,
        load(DATA / "tq" / "run.tar.gz", cache=False) as traced,
        load(DATA / "colocate_async_run.tar.gz", cache=False) as asynchronous,
    ):
        yield {
            "small": small,
            "rehearsed": rehearsed,
            "traced": traced,
            "spanned": spanned,
            "loaded": loaded,
            "devices": devices,
            "asynchronous": asynchronous,
        }
        FIGURES.clear()


def data_of(run, name, **chosen):
    choice = Choice(run=run.labels[0], **chosen)
    return VIEWS[name].analysis(run.tables, choice), choice


# Plots that only some runs have data for.
ONLY = {
    "tq_functions": "traced",
    "own_spans": "spanned",
    "critical_cycle": "asynchronous",
    "asynchronous_what_if": "asynchronous",
    "staleness": "asynchronous",
    "staleness_causes": "asynchronous",
    "pools_over_time": "asynchronous",
    "engine_load": "loaded",
    "device_use": "devices",
    "phase_efficiency": "devices",
}
FIGURES = {}


def drawn(run, name, **chosen):
    """Return the figure of a run, drawn once."""
    key = run.labels[0], name, repr(chosen)
    if key not in FIGURES:
        data, choice = data_of(run, name, **chosen)
        FIGURES[key] = VIEWS[name].figure(data, choice)
    return FIGURES[key]


def texts(figure):
    """Return what can be read, with its place in pixels."""
    canvas = FigureCanvasAgg(figure)
    with settings():
        canvas.draw()
    renderer = canvas.get_renderer()
    ticks = {}
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                shown = low - 1e-9 <= tick.get_loc() <= high + 1e-9
                ticks[tick.label1], ticks[tick.label2] = shown, False
            ticks[axis.get_offset_text()] = True
    found = []
    for text in figure.findobj(Text):
        hidden = text.axes is not None and not text.axes.get_visible()
        if not text.get_text().strip() or not text.get_visible() or hidden:
            continue
        if ticks.get(text, True):
            found.append((text.get_text(), text.get_window_extent(renderer)))
    return found


def overlapping(figure):
    """Return pairs of texts that cover each other by more than a sliver."""
    pairs = []
    for (one, a), (two, b) in itertools.combinations(texts(figure), 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        if width > 1.5 and height > 2.5:
            pairs.append((one, two))
    return pairs


@pytest.mark.parametrize("run", ["small", "rehearsed"])
@pytest.mark.parametrize("name", VIEWS)
def test_nothing_overlaps_and_nothing_is_cut_off(name, run, runs):
    """Every label can be read."""
    try:
        figure = drawn(runs[ONLY.get(name, run)], name)
    except NothingToDraw:
        assert (name, run) in (
            ("memory_phases", "rehearsed"),
            ("memory_over_time", "rehearsed"),
        )
        return

    width, height = figure.canvas.get_width_height()
    found = texts(figure)

    assert [] == overlapping(figure)
    outside = [
        text
        for text, box in found
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    assert [] == outside


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "asynchronous_what_if"])
def test_one_step_draws_as_well(name, runs):
    """With one bar, one point, one line."""
    figure = drawn(runs[ONLY.get(name, "small")], name, steps=(2, 2))

    assert [] == overlapping(figure)
    assert "step 2" in figure.texts[1].get_text() or name == "validation_times"


def test_one_step_of_an_asynchronous_run_is_no_cycle(runs):
    """The reason is the run's."""
    with pytest.raises(NothingToDraw, match="fewer than 3 finished steps"):
        drawn(runs["asynchronous"], "asynchronous_what_if", steps=(2, 2))


@pytest.mark.parametrize("name", VIEWS)
def test_a_title_says_a_number_and_the_line_below_how_many(name, runs):
    """The finding first; then the run, the steps and the count."""
    figure = drawn(runs[ONLY.get(name, "small")], name)

    title, about = figure.texts[0].get_text(), figure.texts[1].get_text()
    assert re.search(r"\d", title) or name in ("loop_suspects", "worker_phases", "step_durations")
    assert about.startswith(runs[ONLY.get(name, "small")].labels[0])
    assert re.search(r"\d", about)


@pytest.mark.parametrize("name", VIEWS)
def test_values_begin_at_zero(name, runs):
    """Linear axes of values do not exaggerate; steps, rewards and places are no values."""
    figure = drawn(runs[ONLY.get(name, "small")], name)

    for axes in figure.axes:
        for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
            label = axis.get_label_text()
            if scale == "linear" and re.search(r"\[|share|bytes|tokens|requests", label):
                low = min(axis.get_view_interval())
                assert low <= 0 or label.startswith("later by"), (label, low)


@pytest.mark.parametrize("name", VIEWS)
def test_no_rows_are_no_chart(name):
    """An empty chart would look like an answer; the message says why there is none."""
    choice = Choice(run="empty", steps=(3, 4), validate=True)
    data = VIEWS[name].analysis(Tables.of({}), choice)

    with pytest.raises(NothingToDraw, match="empty, steps 3 to 4, validation: no "):
        VIEWS[name].figure(data, choice)


@pytest.mark.parametrize("name", VIEWS)
def test_a_plot_is_named_after_its_first_table(name, runs):
    """The same name in the list, in the numbers and on the file."""
    data, _ = data_of(runs["small"], name)

    assert name == next(iter(data))


@pytest.mark.parametrize("name", VIEWS)
def test_an_asynchronous_run_is_drawn_or_has_nothing_to_draw(name, runs):
    """Analyses of synchronous training have no rows there, others have."""
    try:
        figure = drawn(runs["asynchronous"], name)
    except NothingToDraw:
        return

    assert [] == overlapping(figure)


def test_a_hundred_steps_of_the_critical_path_are_groups_and_the_longest_by_name():
    """A bar per step would be a pixel or two, and none could be told from its neighbor."""
    rows = [
        {"run": "r", "step": step, "category": category, "duration_s": duration_s}
        for step in range(1, 101)
        for category, duration_s in (
            ("decode", 2.0),
            ("tool", 9.0 if step == 57 else 1.0),
            ("polling", 4.5 if step == 71 else 0.5),
        )
    ]
    with settings():
        figure = VIEWS["critical_path"].figure({"critical_path": rows}, Choice(run="r"))
        FigureCanvasAgg(figure).draw()

    above, below = figure.axes
    # Three categories, of which each has a bar per group.
    assert 25 * 3 == len(above.patches)
    assert 11.5 == pytest.approx(max(patch.get_x() + patch.get_width() for patch in below.patches))
    # 57 is in the group of 57 to 60: (11.5 + 3 x 3.5) / 4.
    assert (11.5 + 3 * 3.5) / 4 == pytest.approx(
        max(patch.get_y() + patch.get_height() for patch in above.patches)
    )
    assert ["1–4", "97–100"] == [
        label.get_text() for label in (above.get_xticklabels()[0], above.get_xticklabels()[-1])
    ]
    assert ["step 57", "step 71"] == [label.get_text() for label in below.get_yticklabels()[:2]]
    assert ["  11.5 s; tool +7.92 s", "  7.50 s; polling +3.96 s"] == [
        text.get_text() for text in below.texts[:2]
    ]
    assert [] == overlapping(figure)


def test_phases_with_little_waiting_are_named_and_those_without_are_left_out():
    """A panel of its own scale would show 40 ms as dark as 4 s."""

    def rows_of(waits):
        phases, balance = [], []
        for (role, phase), waited_s in waits.items():
            for step in (1, 2):
                same = {"run": "r", "step": step, "role": role, "phase": phase}
                for name, own_s in ((f"{role}_0", waited_s), (f"{role}_1", 0.0)):
                    phases.append(
                        {**same, "name": name, "duration_s": 5 - own_s, "waited_s": own_s}
                    )
                balance.append(
                    {**same, "processes": 2, "slowest": f"{role}_1", "waited_s": waited_s}
                )
        return {"worker_phases": phases, "worker_balance": balance}

    waits = {("agent_loop", "rollout"): 4.0, ("actor", "update_actor"): 0.04}
    with settings():
        figure = VIEWS["worker_phases"].figure(
            rows_of({**waits, ("actor", "update_weights"): 0.0}), Choice(run="r")
        )
    shown = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    notes = " ".join(text.get_text() for text in figure.texts)

    assert ["rollout of agent_loop: how much later than the first to finish"] == [
        title for title in shown if title
    ]
    assert "Not drawn, less waiting: update_actor of actor (40 ms per step)." in notes
    assert "update_weights" not in notes
    with pytest.raises(NothingToDraw, match="no process waited for another"):
        VIEWS["worker_phases"].figure(rows_of(dict.fromkeys(waits, 0.0)), Choice(run="r"))


def test_a_percentile_that_is_not_known_has_no_panel_and_no_legend(runs):
    """An empty panel from 0 to 1 looks like a measurement."""
    figure = drawn(runs["rehearsed"], "reward_times")
    tools = drawn(runs["rehearsed"], "tool_latencies")

    assert all(axes.lines for axes in figure.axes)
    assert any("Not drawn: P99" in text.get_text() for text in figure.texts)
    legend = tools.axes[-1].get_legend()
    assert ["P50", "P80", "P95", "max"] == [text.get_text() for text in legend.get_texts()]


def test_stalls_before_the_first_step_are_counted_only(runs):
    """The longest bar and the title are of stalls during steps, and those where requests wait come first."""
    figure = drawn(runs["rehearsed"], "loop_suspects")
    (axes,) = figure.axes
    (title, *_), notes = figure.texts, [text.get_text() for text in figure.texts]

    assert "359 ms" in title.get_text()
    assert any("Not drawn: 78 stalls before the first step." in note for note in notes)
    assert "359 ms" in " ".join(text.get_text() for text in axes.texts[:3])


def test_replays_without_gains_are_no_chart(runs):
    """A run without generate calls has nothing that a change would save."""
    data, choice = data_of(runs["traced"], "what_if")

    assert {None} == {row["expected_s"] for row in data["what_if"]}
    with pytest.raises(NothingToDraw, match="no change could be replayed"):
        VIEWS["what_if"].figure(data, choice)


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_the_same_numbers_give_the_same_file(form, tmp_path, runs):
    """Files can be compared and cached."""
    data, choice = data_of(runs["small"], "rollout_tail")
    for name in ("a", "b"):
        save(VIEWS["rollout_tail"].figure(data, choice), tmp_path / name, form)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_part_has_the_same_color_in_every_plot(runs):
    """By name, over all plots that show parts of requests or phases of steps."""
    seen = {}
    for name in ("slowest_requests", "turn_times", "engine_parts", "step_durations"):
        figure = drawn(runs[ONLY.get(name, "small")], name)
        for axes in figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            for handle, label in zip(handles, labels, strict=True):
                if label in colors.PART_COLORS or label in colors.PHASE_COLORS:
                    code = to_hex(handle.patches[0].get_facecolor()).upper()
                    seen.setdefault(label, set()).add(code)

    assert {"queue", "prefill", "decode", "outside", "tool", "other"} <= set(seen)
    for label, codes in seen.items():
        known = colors.PART_COLORS.get(label) or colors.PHASE_COLORS[label]
        assert {known.upper()} == codes, label


def test_a_steps_bar_is_as_long_as_the_step(runs):
    """Validation after it is drawn below zero, and is no part of it."""
    data = VIEWS["step_durations"].analysis(runs["small"].tables, Choice())
    figure = VIEWS["step_durations"].figure(data, Choice())
    above, below = {}, {}
    for bars in figure.axes[0].containers:
        for bar in bars.patches:
            side = above if bar.get_height() >= 0 else below
            step = round(bar.get_x() + bar.get_width() / 2)
            side[step] = side.get(step, 0) + bar.get_height()

    steps = step_times(runs["small"].tables)
    lengths = {row["step"]: row["duration_s"] for row in steps if row["finished"]}
    assert above == pytest.approx(lengths, rel=2e-3)
    (validated,) = [row for row in data["step_durations"] if row["testing_s"]]
    assert -below[validated["step"]] >= validated["testing_s"] * 0.999


def test_the_shares_of_each_step_are_stacked_up_to_the_whole(runs):
    """The same shares as in the table, one color for each event."""
    figure = drawn(runs["small"], "exclusive_times")
    data, _ = data_of(runs["small"], "exclusive_times")
    (axes,) = [
        each
        for bars, each in itertools.pairwise(figure.axes)
        if bars.get_title("left").startswith("requests: ")
    ]
    rows = [row for row in data["exclusive_times"] if row["scope"] == "requests"]
    stacks = axes.containers
    shown = {
        (stack.get_label(), round(bar.get_x() + bar.get_width() / 2)): bar.get_height()
        for stack in stacks
        for bar in stack
    }

    tops = collections.Counter()
    for (_, step), height in shown.items():
        tops[step] += height
    assert dict(tops) == pytest.approx({row["step"]: 1.0 for row in rows})
    listed = {(row["event"], row["step"]): row["share"] for row in rows}
    named = {key: height for key, height in shown.items() if key in listed}
    assert named == pytest.approx({key: listed[key] for key in named})
    assert len(named) >= 2 * len(tops)
    assert len({to_hex(stack[0].get_facecolor()) for stack in stacks}) == len(stacks)


def test_hostile_names_are_only_text(tmp_path):
    """No formula, no escape, no control character; long ones are shortened."""
    tables = Tables.of(
        {
            "tool_calls": [
                {
                    "run": "r",
                    "step": 1,
                    "name": "worker_0",
                    "validate": False,
                    "request_id": "q",
                    "tool": f"{HOSTILE}{number}" if number else "$x$",
                    "begin_us": 0,
                    "duration_us": 1_000_000 + number,
                }
                for number in range(3)
            ],
            "requests": [],
        }
    )
    choice = Choice(run=HOSTILE)
    plot = VIEWS["tool_latencies"]

    figure = plot.figure(plot.analysis(tables, choice), choice)
    save(figure, tmp_path / "tools.svg", "svg")

    svg = (tmp_path / "tools.svg").read_text(encoding="utf-8")
    assert "\x1b" not in svg
    assert "<b>" not in svg
    assert "$x$" in svg
    assert [] == overlapping(figure)


def test_the_slowest_are_drawn_from_the_top(runs):
    """As long as the request, with its id, in the order of the table."""
    data, choice = data_of(runs["small"], "slowest_requests", count=5)
    figure = VIEWS["slowest_requests"].figure(data, choice)

    rows = data["slowest_requests"]
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert [row["request_id"][:8] for row in rows] == [name[:8] for name in names]
    assert axes.yaxis_inverted()
    length = max(patch.get_x() + patch.get_width() for patch in axes.patches)
    assert length == pytest.approx(rows[0]["duration_s"])


def test_merged_points_are_said_on_the_figure():
    """A curve with fewer points than requests says so; one with all of them says nothing."""
    plot = VIEWS["request_duration_cdf"]

    def notes(count):
        tables = Tables.of(
            {
                "requests": [
                    {
                        "run": "r",
                        "step": 1,
                        "name": "worker_0",
                        "validate": False,
                        "finished": True,
                        "duration_us": 1000 + number,
                    }
                    for number in range(count)
                ]
            }
        )
        choice = Choice(run="r")
        figure = plot.figure(plot.analysis(tables, choice), choice)
        return " ".join(text.get_text() for text in figure.texts)

    assert "points for 3,000 requests" in notes(3000)
    assert "points for" not in notes(1000)


def workers_title(events):
    """Return the title of worker_phases for spans of rollout workers, in seconds."""
    rows = [
        {"run": "r", "step": 1, "role": "agent_loop", "waited_s": 0.0, "slowest": False, **event}
        for event in events
    ]
    phases = {row["phase"] for row in rows}
    balance = [
        {
            "run": "r",
            "step": 1,
            "role": "agent_loop",
            "phase": phase,
            "processes": len(same),
            "slowest": max(same, key=lambda row: row["duration_s"])["name"],
            "waited_s": sum(max(r["duration_s"] for r in same) - r["duration_s"] for r in same),
        }
        for phase in sorted(phases)
        for same in [[row for row in rows if row["phase"] == phase]]
    ]
    data = {"worker_phases": rows, "worker_balance": balance}
    return VIEWS["worker_phases"].figure(data, Choice(run="r")).texts[0].get_text()


def test_who_waits_longest_at_the_barrier_is_not_called_the_slowest():
    """In the original logger's files waiting is a phase, the longest of the fastest worker."""
    events = [
        {"name": f"worker_{number}", "phase": phase, "duration_s": duration_s}
        for number, both in enumerate(((9.0, 1.0), (2.0, 9.0)))
        for phase, duration_s in zip(("async_generate", "barrier_wait"), both, strict=True)
    ]

    title = workers_title(events)

    assert title.startswith("worker_0 was the slowest at async_generate")


def test_nobody_is_called_slow_when_all_are_done_at_once():
    """A title names no one for a difference of nothing."""
    events = [
        {"name": f"worker_{number}", "phase": "rollout", "duration_s": 3.0} for number in (0, 1)
    ]

    assert workers_title(events).startswith("All processes of a role were done at the same time")


def test_the_plot_and_the_summary_name_the_same_loop():
    """The one in which requests wait, though another process's stood still for longer."""
    short, long = (
        {"run": "r", "step": 1, "name": name, "role": role, "loop": "main", "lags": 1}
        | {"during": None, "by_design": False, "total_s": held, "max_s": held, "requests": 0}
        for name, role, held in (("worker_0", "agent_loop", 1.0), ("replay_0", "buffer", 3.0))
    )
    figure = VIEWS["loop_suspects"].figure({"loop_suspects": [long, short]}, Choice())
    tables = collections.defaultdict(list, loop_lags=[long, short])
    row = {"run": "r", "step": 1}

    (text,) = [line for line in _other_lines(row, tables, {"recorded": {}}) if "stalled" in line]

    assert any("event loop of worker_0" in each.get_text() for each in figure.findobj(Text))
    assert "worker_0 stalled" in text


def test_small_transfers_are_not_graded(runs):
    """Of a few kilobytes each, the rate is that of the call, not of the network."""
    figure = drawn(runs["rehearsed"], "tq_over_time")
    title = next(text.get_text() for text in figure.texts if text.get_text())

    assert re.match(r"Transfers of \d+\.\d KiB on average are too small to grade", title)


@pytest.mark.parametrize(
    ("capacity", "flagged"), [(80 << 30, True), (200 << 30, False), (None, False)]
)
def test_memory_above_the_capacity_is_drawn_and_flagged(capacity, flagged):
    """A reading outside the axes would be an empty plot without a reason."""
    reading = {"run": "r", "name": "actor_0", "role": "actor", "step": 1, "readings": 1, "moves": 0}
    host = {"rss_bytes": 1e9, "host_used_bytes": None, "total_bytes": capacity}
    rows = [
        {**reading, **host, "begin_s": float(at), "used_bytes": (90 << 30) + at} for at in range(3)
    ]

    figure = VIEWS["memory_over_time"].figure(
        {"memory_over_time": rows, "phase_spans": []}, Choice(run="r")
    )

    title = figure.texts[0].get_text()
    assert flagged == ("above its capacity of 80.0 GiB" in " ".join(title.split()))
    axes = figure.axes[0]
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert {"40 GiB", "80 GiB"} <= {*ticks}
    low, high = axes.get_ylim()
    assert all(low <= value <= high for value in axes.get_lines()[0].get_ydata())
