"""Plots: they show what the tables say, in words and colors that hold, and nothing overlaps."""

import collections
import contextlib
import html
import re
from itertools import pairwise
from pathlib import Path

import pytest

from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

pytest.importorskip("vl_convert")

from cached_runs import REHEARSED, SMALL, cached
from chart_reading import data_in, every_channel, panels_of, title_of, words

from verl_profiler.analysis.registry import explanations
from verl_profiler.analysis.selection import warm_ups
from verl_profiler.analysis.steps import step_times
from verl_profiler.render.charts import SPEC, WIDTH, chart, name_bars, render
from verl_profiler.render.colors import PHASE_COLORS
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice, NothingToDraw
from verl_profiler.views.why_text import why

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def runs():
    """A generated run, one of the rehearsal, an asynchronous one, and TransferQueue tracing."""
    places = {
        "small": SMALL,
        "rehearsed": REHEARSED,
        "traced": DATA / "tq" / "run.tar.gz",
        "asynchronous": cached("colocate_async_run"),
    }
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(load(place)) for name, place in places.items()}


def data_of(run, name, **chosen):
    choice = Choice(run=run.labels[0], **chosen)
    return VIEWS[name].analysis(run.tables, choice), choice


def charts_of_all(runs, kind, **chosen):
    """Give each chart of a run, or of the run that has its data; None where there is nothing to draw."""
    for name, view in VIEWS.items():
        run = runs["asynchronous" if name == "staleness" else kind]
        data, choice = data_of(run, name, **chosen)
        try:
            yield name, run, view.spec(data, choice)
        except NothingToDraw:
            yield name, run, None


def test_every_chart_becomes_a_picture(runs):
    """Without a network, with all of its texts, and with few enough rows for the report page."""
    empty = set()
    for name, _, spec in charts_of_all(runs, "rehearsed"):
        if spec is None:
            empty.add(name)
            continue
        assert render(spec, "png").startswith(b"\x89PNG"), name
        svg = html.unescape(re.sub(r"<[^>]+>", "\n", render(spec, "svg").decode()))
        for text in (*spec["title"]["text"], *spec["title"]["subtitle"]):
            assert text in svg, name
        for channel, each in every_channel(spec):
            # Names are never cut; of very many, some have no room.
            if (
                channel == "y"
                and each.get("type") == "nominal"
                and len(each["scale"]["domain"]) < 30
            ):
                assert set(each["scale"]["domain"]) <= set(svg.splitlines()), name
        assert len(data_in(spec)) <= 2_000, name
        assert len(render(spec, SPEC)) < 500_000, name
    assert empty == {"memory_over_time"}


def test_one_step_is_a_chart_as_well(runs):
    """With one bar, one point, one line."""
    for name, _, spec in charts_of_all(runs, "small", steps=(2, 2)):
        assert "step 2" in spec["title"]["subtitle"][0], name
        for axis in re.findall(r"role-axis-label.*?</g>", render(spec, "svg").decode(), re.DOTALL):
            labels = re.findall(r">([^<]+)</text>", axis)
            assert len(labels) == len({*labels}), name


def test_titles_and_axes_of_all_charts(runs):
    """A number, then the run and how many; values begin at zero; the chart is its first table's."""
    wrong = []
    for name, run, spec in charts_of_all(runs, "small"):
        about = " ".join(spec["title"]["subtitle"])
        if not re.search(r"\d", title_of(spec)) and name not in (
            *("loop_suspects", "worker_phases", "step_durations"),
        ):
            wrong.append((name, title_of(spec)))
        if not about.startswith(run.labels[0]) or not re.search(r"\d", about):
            wrong.append((name, about))
        if name != next(iter(data_of(runs["small"], name)[0])):
            wrong.append((name, "first table"))
        for channel, each in every_channel(spec):
            if channel in ("x", "y") and re.search(
                r"\[|share|bytes|tokens|requests", each.get("title") or ""
            ):
                scale = each["scale"]
                if not (
                    scale.get("zero") or scale.get("type") == "log" or 0 in scale.get("domain", ())
                ):
                    wrong.append((name, each["title"]))

    assert [] == wrong


def test_a_long_name_has_several_lines():
    """None of its letters is cut, and its bar keeps half of the picture."""
    name = f"worker_0: {'verl.module.' * 15}call"
    spec = chart("1", "a run", name_bars([name, "other"], [("", [1, 2], "#0072B2")], "time"))
    svg = render(spec, "svg").decode()
    written = "".join(re.findall(r">([^<>]+)</", svg))

    assert name.replace(" ", "") in written.replace(" ", "")
    assert float(re.search(r'<svg[^>]*? width="([\d.]+)"', svg)[1]) < 2 * WIDTH


def test_a_long_name_breaks_between_its_words():
    """The function that is the culprit stays whole, and a name that fits has one line."""
    who = "worker_1: _verl_function_tools__tmp_recipe_after_tools_py:calculate (tools.py:23)"
    short = "actor_0 (batchmeta tensordict converter): unknown cause"
    bars = name_bars([who, short], [("", [1.0, 1.0], "#000000")], "time")
    svg = html.unescape(render(chart("t", "a", bars), "svg").decode())

    assert ">worker_1: _verl_function_tools__tmp_recipe_after_tools_py:<" in svg
    assert ">calculate (tools.py:23)<" in svg
    assert f">{short}<" in svg


def test_names_of_three_lines_have_room_for_them():
    """Each line of the names lies below the one before, also between two bars."""
    who = "worker_0: transformers.tokenization_utils_tokenizers:TokenizersBackend._encode_plus "
    who += "(tokenization_utils_tokenizers.py:959)"
    names = [f"{who[:7]}{number}{who[8:]}" for number in range(4)]
    bars = name_bars(names, [("", [1.0] * 4, "#000000")], "time")
    svg = render(chart("t", "a", bars), "svg").decode()
    *_, axis = re.findall(r"role-axis-label.*?</g>", svg, re.DOTALL)
    labels = re.findall(r"<text[^>]*translate\([-\d.]+,([\d.]+)\)[^>]*>(.*?)</text>", axis)
    lines = [
        float(top) + float(dy or 0)
        for top, content in labels
        for dy in [0, *re.findall(r'<tspan[^>]* dy="([\d.]+)"', content)]
    ]

    assert 4 == len(labels)
    assert 10 <= min(after - before for before, after in pairwise(sorted({*lines})))


def test_no_rows_are_no_chart():
    """An empty chart would look like an answer; the message says why there is none."""
    choice = Choice(run="empty", steps=(3, 4), validate=True)
    for view in VIEWS.values():
        with pytest.raises(NothingToDraw, match="empty, steps 3 to 4, validation: no "):
            view.spec(view.analysis(Tables.of({}), choice), choice)


def test_what_is_left_out_of_a_plot_is_named_on_it(runs):
    """Calls and how long they were are at their bars; stalls before the first step have no bar."""
    tools, stalls = (
        VIEWS[name].spec(*data_of(runs["rehearsed"], name))
        for name in ("tool_latencies", "loop_suspects")
    )

    assert "53 calls, P50 130 ms, max 853 ms" == data_in(tools, "text")[0]["text"]
    assert "Not drawn: 78 stalls before" in words(stalls)
    assert "359 ms" in title_of(stalls)
    assert "359 ms" in " ".join(row["text"] for row in data_in(stalls, "text")[:3])


def test_replays_without_gains_are_no_chart(runs):
    """A run without generate calls has nothing that a change would save."""
    data, choice = data_of(runs["traced"], "what_if")

    assert {None} == {row["expected_s"] for row in data["what_if"]}
    with pytest.raises(NothingToDraw, match="no change could be replayed"):
        VIEWS["what_if"].spec(data, choice)


def test_a_steps_bar_is_as_long_as_the_step(runs):
    """Validation after it is drawn below zero, and is no part of it."""
    data = VIEWS["step_durations"].analysis(runs["small"].tables, Choice())
    spec = VIEWS["step_durations"].spec(data, Choice())
    above, below = collections.Counter(), collections.Counter()
    durations, components = spec["vconcat"]
    for bar in data_in(durations, "part"):
        (above if bar["high"] > 0 else below)[bar["step"]] += bar["high"] - bar["low"]

    steps = step_times(runs["small"].tables)
    lengths = {row["step"]: row["duration_s"] for row in steps if row["finished"]}
    assert dict(above) == pytest.approx(lengths, rel=2e-3)
    (validated,) = [row for row in data["step_durations"] if row["testing_s"]]
    assert -below[validated["step"]] >= validated["testing_s"] * 0.999

    # The share of each component in each step, from the requests themselves.
    wanted = runs["small"].rows(
        "SELECT step, sum(engine_us) / sum(duration_us) AS engine, "
        "sum(tool_us) / sum(duration_us) AS tool "
        "FROM requests WHERE finished AND NOT validate GROUP BY step"
    )
    drawn = {(bar["step"], bar["part"]): bar["value"] for bar in data_in(components, "part")}
    for row in wanted:
        assert row["engine"] == pytest.approx(drawn[row["step"], "engine"], rel=2e-3)
        assert row["tool"] == pytest.approx(drawn[row["step"], "tool"], rel=2e-3)
    assert {row["step"] for row in wanted} <= {step for step, _ in drawn}


def test_the_axis_of_steps_begins_at_zero_where_next_to_nothing_lies_between_them(runs):
    """Some 10 ms between steps of 12 s would leave a strip of the picture empty."""
    data, choice = data_of(runs["asynchronous"], "step_durations")
    between = [row["between_other_s"] or 0 for row in data["step_durations"]]
    durations, _ = VIEWS["step_durations"].spec(data, choice)["vconcat"]

    assert 0 < sum(between) < 0.005 * sum(row["step_s"] for row in data["step_durations"])
    assert all(0 <= bar["low"] < bar["high"] for bar in data_in(durations, "part"))
    assert "Below zero" not in words(VIEWS["step_durations"].spec(data, choice))
    assert "Below zero" in words(
        VIEWS["step_durations"].spec(*data_of(runs["small"], "step_durations"))
    )


@pytest.mark.parametrize(
    ("spans", "title"),
    [
        # In the original logger's files waiting is a phase, the longest of the fastest worker.
        (
            {"async_generate": (9.0, 2.0), "barrier_wait": (1.0, 9.0)},
            "worker_0 was the slowest at async_generate",
        ),
        ({"rollout": (3.0, 3.0)}, "All processes of a role were done at the same time"),
    ],
)
def test_only_who_others_wait_for_is_called_slow(spans, title):
    """Not who waits longest at the barrier, and nobody for a difference of nothing."""
    own = {"run": "r", "step": 1, "role": "agent_loop"}
    rows = [
        {**own, "phase": phase, "name": f"worker_{number}", "duration_s": duration_s}
        | {"waited_s": 0.0, "slowest": False}
        for phase, both in spans.items()
        for number, duration_s in enumerate(both)
    ]
    balance = [
        {**own, "phase": phase, "processes": 2, "waited_s": abs(both[0] - both[1])}
        | {"slowest": f"worker_{both.index(max(both))}"}
        for phase, both in spans.items()
    ]
    data = {"worker_phases": rows, "worker_balance": balance}

    assert title_of(VIEWS["worker_phases"].spec(data, Choice(run="r"))).startswith(title)


def test_nobody_is_called_slow_who_was_the_slowest_in_one_of_many_steps():
    """Of 64 workers another one is last in each step: the first by name is no culprit."""
    own = {"run": "r", "role": "agent_loop", "phase": "rollout"}
    rows = [
        {**own, "step": step, "name": f"worker_{worker}", "duration_s": 3.0 - waited_s}
        | {"waited_s": waited_s, "slowest": not waited_s}
        for step in range(1, 6)
        for worker, waited_s in ((7 * step, 0.0), (0, 2.0))
    ]
    balance = [
        {**own, "step": step, "processes": 64, "waited_s": 12.0, "slowest": f"worker_{7 * step}"}
        for step in range(1, 6)
    ]
    spec = VIEWS["worker_phases"].spec(
        {"worker_phases": rows, "worker_balance": balance}, Choice(run="r")
    )

    assert title_of(spec) == (
        "Another worker was the slowest at rollout in each of 5 steps; the 63 others together "
        "waited 12.0 s per step for the slowest"
    )


def test_a_role_that_does_next_to_nothing_in_a_step_has_no_panel():
    """Engines that release memory for 8 µs, beside workers of 25 s and ranks of 6 s."""
    rows = [
        {"run": "r", "step": 3, "role": role, "name": f"{role}_{number}", "phase": phase}
        | {"duration_s": length_s - waited_s * number, "waited_s": waited_s * number}
        | {"slowest": not number}
        for role, phase, length_s, waited_s in (
            ("agent_loop", "rollout", 25.0, 5.7),
            ("actor", "update_actor", 6.0, 0.016),
            ("engine", "memory_release", 8e-6, 1e-6),
        )
        for number in range(2)
    ]
    data = {"worker_phases": rows, "worker_balance": []}
    spec = VIEWS["worker_phases"].spec(data, Choice(run="r", steps=(3, 3)))

    assert ["agent_loop", "actor"] == [panel["title"] for panel in panels_of(spec)]


def test_who_was_last_in_the_only_step_of_a_phase_is_named_with_it():
    """Of three steps one wakes engines: no other worker was the slowest in `each of 1 steps`."""
    own = {"run": "r", "role": "engine", "phase": "memory_release", "step": 1}
    rows = [
        {**own, "name": f"engine_{number}", "duration_s": 3.0 - number, "waited_s": float(number)}
        | {"slowest": not number}
        for number in range(2)
    ]
    rows += [
        {**row, "step": step, "phase": "other", "waited_s": 0.0} for row in rows for step in (2, 3)
    ]
    balance = [{**own, "processes": 2, "waited_s": 1.0, "slowest": "engine_0"}]
    data = {"worker_phases": rows, "worker_balance": balance}

    assert title_of(VIEWS["worker_phases"].spec(data, Choice(run="r"))) == (
        "engine_0 was the slowest at memory_release of step 1: the other waited 1.00 s for it"
    )


def test_a_stall_that_is_small_beside_another_of_its_kind_has_no_bar():
    """Twenty bars that nobody can see hide the one that matters; they are counted."""
    rows = [
        {"run": "r", "step": 1, "name": f"worker_{number}", "role": "agent_loop", "loop": "main"}
        | {"lags": 1, "during": None, "code": None, "by_design": False, "requests": 0}
        | {"total_s": held_s, "max_s": held_s}
        for number, held_s in enumerate([60.0, 3.0, *[0.1] * 30])
    ]
    rows.append(rows[2] | {"name": "actor_0", "role": "buffer"})
    spec = VIEWS["loop_suspects"].spec({"loop_suspects": rows}, Choice())

    assert [
        "worker_0: unknown cause",
        "worker_1: unknown cause",
        "actor_0: unknown cause",
    ] == [row["at"] for row in data_in(spec, "text")]
    assert "3 of 33 process and call pairs" in words(spec)


def test_bars_of_two_event_loops_of_a_process_name_the_loops():
    """With the same call: a number behind the second does not distinguish them."""
    rows = [
        {"run": "r", "step": 1, "name": "worker_0", "role": "agent_loop", "loop": loop, "lags": 1}
        | {"during": None, "code": None, "by_design": False, "total_s": 1.0, "max_s": 1.0}
        | {"requests": 0}
        for loop in ("main", "tools")
    ]
    spec = VIEWS["loop_suspects"].spec({"loop_suspects": rows}, Choice())

    assert {"worker_0 (main): unknown cause", "worker_0 (tools): unknown cause"} == {
        row["at"] for row in data_in(spec, "text")
    }


def test_the_heat_map_has_the_latest_worker_on_top_and_gaps_where_nothing_was_recorded():
    """Worker 17 of 64 is 2 s later than the others in 60 of 100 steps, and absent in step 50."""
    late = {step: 2.0 if step % 5 else 0.0 for step in range(1, 101)}
    own = {"run": "r", "role": "agent_loop", "phase": "rollout"}
    rows = [
        {**own, "step": step, "name": f"worker_{number}", "slowest": False}
        | {"duration_s": 10 + late_s, "waited_s": late[step] - late_s}
        for step in late
        for number in range(64)
        for late_s in [late[step] if number == 17 else 0.0]
        if (step, number) != (50, 17)
    ]
    balance = [
        {**own, "step": step, "processes": 64, "slowest": "worker_17", "waited_s": 63 * late[step]}
        for step in late
    ]
    data = {"worker_phases": rows, "worker_balance": balance}
    spec = VIEWS["worker_phases"].spec(data, Choice(run="r"))
    cells = data_in(spec, "later")

    assert "worker_17 was the slowest at rollout in 100 of 100 steps; the 63 others" in title_of(
        spec
    )
    assert 6399 == len(cells)
    assert 50 not in {cell["step"] for cell in cells if cell["process"] == "worker_17"}
    assert {2.0} == {
        cell["later"] for cell in cells if cell["process"] == "worker_17" and cell["step"] % 5
    }
    (order,) = {
        tuple(each["scale"]["domain"])
        for _, each in every_channel(spec)
        if each.get("field") == "process"
    }
    assert ("worker_17", "worker_0", "worker_1") == order[:3]
    assert render(spec, "png").startswith(b"\x89PNG")


def test_the_band_of_durations_has_the_fastest_and_the_slowest_step():
    """Step 1 has requests of 1 to 100 s, step 2 of 2 to 200 s: half of them take 50 and 100 s."""
    tables = Tables.of(
        {
            "requests": [
                {"run": "r", "step": step, "name": "worker_0", "validate": False, "finished": True}
                | {"duration_us": step * number * 1_000_000}
                for step in (1, 2)
                for number in range(1, 101)
            ]
        }
    )
    view, choice = VIEWS["request_duration_cdf"], Choice(run="r")
    spec = view.spec(view.analysis(tables, choice), choice)

    assert {"share": 0.5, "low": 50, "high": 100} in data_in(spec, "low")
    assert "P50 67.5 s" in words(spec)


def test_of_many_readings_of_memory_the_highest_and_the_lowest_are_drawn():
    """A process that releases its memory in each step, and one that grows."""
    rows = [
        {"run": "r", "name": name, "role": name[:-2], "readings": 1, "begin_s": float(at)}
        | {"used_bytes": used << 30, "total_bytes": 80 << 30, "rss_bytes": None}
        for name in ("engine_0", "engine_1", "actor_0")
        for at in range(600)
        for used in [20 + at // 20 if name == "actor_0" else 9 if at % 10 == 5 else 61]
    ]
    spec = VIEWS["memory_over_time"].spec(
        {"memory_over_time": rows, "phase_spans": []}, Choice(run="r")
    )
    drawn = collections.defaultdict(list)
    for row in data_in(spec, "size"):
        drawn[row["process"]].append(row["size"])

    assert {9, 61} == set(drawn["engine_0"])
    assert 20 == min(drawn["actor_0"])
    assert 49 == max(drawn["actor_0"])
    assert sum(map(len, drawn.values())) <= 1_200 + 120
    assert "61.0 GiB of 80.0 GiB at its fullest, 9.0 GiB at its emptiest" in title_of(spec)


def memory_rows(used_gib, total_gib=80):
    return [
        {"run": "r", "name": f"actor_{number}", "role": "actor", "readings": 1}
        | {"begin_s": float(at), "used_bytes": used_gib << 30, "total_bytes": total_gib << 30}
        | {"rss_bytes": 1 << 30}
        for number in range(6)
        for at in range(3)
    ]


@pytest.mark.parametrize(("used_gib", "drawn"), [(61, True), (2, False)])
def test_a_capacity_that_would_press_the_lines_to_the_bottom_is_not_drawn(used_gib, drawn):
    """Of 2 GiB on a device of 80 GiB nothing could be seen; the title has both."""
    data = {"memory_over_time": memory_rows(used_gib), "phase_spans": []}
    spec = VIEWS["memory_over_time"].spec(data, Choice(run="r"))

    assert drawn == bool(data_in(spec, "capacity"))
    assert f"{used_gib}.0 GiB of 80.0 GiB" in title_of(spec)


def test_no_line_of_memory_has_the_color_of_a_phase_and_phases_are_named_once():
    """The phases are shaded behind the lines."""
    spans = [
        {"run": "r", "step": 1, "phase": phase, "begin_s": 0.5 * at, "end_s": 0.5 * at + 0.5}
        for at, phase in enumerate(["gen", "update_actor", "update_weights", "values"])
    ]
    data = {"memory_over_time": memory_rows(61), "phase_spans": spans}
    spec = VIEWS["memory_over_time"].spec(data, Choice(run="r"))
    lines = {
        code
        for name, each in every_channel(spec)
        if name == "color" and each.get("field") == "process"
        for code in each["scale"]["range"]
    }
    named = [each for _, each in every_channel(spec) if each.get("field") == "phase"]

    assert 6 == len(lines)
    assert not lines & {*PHASE_COLORS.values()}
    assert [False, True] == [bool(each["legend"]) for each in named]


def test_what_takes_long_in_the_step_that_means_leave_out_has_its_name():
    """In a first step of 33 s the next batch takes 21 s, and later a moment: it is not `1 more`."""
    lengths = {"gen": 6.0, "update_actor": 5.5, "prepare_step": 0.01}
    rows = [
        {"run": "r", "step": step, "category": category, "duration_s": length_s}
        for step in range(1, 6)
        for category, length_s in lengths.items()
    ]
    rows[2]["duration_s"] = 21.0
    rows.append({"run": "r", "step": 1, "category": "loading", "duration_s": 4.0})
    rows = [{**row, "longest_s": row["duration_s"], "longest_what": "a call"} for row in rows]
    spec = VIEWS["critical_path"].spec({"critical_path": rows}, Choice(run="r"))
    first = {row["part"]: row["value"] for row in data_in(spec, "low") if row["step"] == 1}

    assert {**lengths, "prepare_step": 21.0, "loading": 4.0} == first
    assert "52 % of the critical path is gen" in title_of(spec)


@pytest.mark.parametrize(
    ("means", "title"),
    [
        ([9.0, 1.0], "Turn 0 takes longest, 9.00 s on average; it takes 90 % of all turn time"),
        ([1.0, 1.1], "All turns take about as long, 1.10 s on average; turn 1 takes 52 % of"),
    ],
)
def test_a_turn_is_named_once(means, title):
    rows = [
        {"run": "r", "turn": turn, "turns": 10, "unfinished": 0, "mean_s": mean_s}
        | {"total_s": 10 * mean_s, "share": mean_s / sum(means), "p50_s": mean_s, "max_s": mean_s}
        | {
            f"{part}_s": mean_s
            for part in ("engine", "tool", "tool_parsing", "token_merge", "other")
        }
        for turn, mean_s in enumerate(means)
    ]

    assert title in title_of(VIEWS["turn_times"].spec({"turn_times": rows}, Choice(run="r")))


def test_of_sampled_devices_the_memory_is_theirs():
    """On an H100 (tests/data/README.md); between a process's few readings there would be a straight line."""
    view = VIEWS["memory_over_time"]
    with load(cached("h100_sglang")) as run:
        data = {each.__name__: each(run.tables) for each in view.analyses}
    spec = view.spec(data, Choice(run="h100_sglang"))
    used, resident = ({row["process"] for row in data_in(each, "size")} for each in panels_of(spec))

    assert ({"device 0"}, {"actor_0", "engine_0"}) == (used, resident)
    assert "Device 0 holds 34.6 GiB of 79.2 GiB at its fullest" in title_of(spec)


def test_the_plot_names_the_loop_where_requests_wait():
    """The one in which requests wait, though another process's stood still for longer."""
    short, long = (
        {"run": "r", "step": 1, "name": name, "role": role, "loop": "main", "lags": 1}
        | {
            "during": None,
            "code": None,
            "by_design": False,
            "total_s": held,
            "max_s": held,
            "requests": 0,
        }
        for name, role, held in (("worker_0", "agent_loop", 1.0), ("replay_0", "buffer", 3.0))
    )
    spec = VIEWS["loop_suspects"].spec({"loop_suspects": [long, short]}, Choice())

    assert "event loop of worker_0" in title_of(spec)


def test_the_plot_and_why_give_the_same_shares_of_the_critical_path():
    """Both without the first step, whose polling and length differ."""
    with load(cached("critic_run")) as run:
        data, choice = data_of(run, "critical_path")
        left_out = warm_ups(data["critical_path"])
        text = why(explanations(run.tables, None), [], left_out)
    listed = re.findall(r"^  (\w+) +[\d.]+ m?s +([\d.]+ %) ", text, re.MULTILINE)

    (first, of_first), (second, of_second) = listed[:2]

    assert left_out
    title = title_of(VIEWS["critical_path"].spec(data, choice))
    assert title.startswith(f"{of_first} of the critical path is {first}, {of_second} {second};")


def test_the_plot_and_why_have_the_same_stragglers():
    """Without the first step, in which others are late; with it where it is chosen."""
    with load(cached("critic_run")) as run:
        data, choice = data_of(run, "stragglers")
        listed = explanations(run.tables, None)
        whole, _ = data_of(run, "stragglers", steps=(1, 9))
    drawn = data_in(VIEWS["stragglers"].spec(data, choice), "text")

    assert listed["stragglers"] == data["stragglers"]
    among = len(listed["straggler_requests"])
    assert listed["straggler_requests"] == data["straggler_requests"][:among]
    assert (
        max(row["of_steps"] for row in whole["stragglers"]) == 1 + data["stragglers"][0]["of_steps"]
    )
    assert "long requests" in {row["at"] for row in drawn}
