"""The report as data and as a file: true numbers, nothing fetched, nothing of a run as markup."""

import base64
import functools
import gc
import hashlib
import json
import re
import shutil
from datetime import datetime
from html import unescape

import msgspec
import pytest
from cached_runs import SMALL, cached
from chart_reading import words
from commands import command
from event_files import ended, write_lines
from hypothesis import given
from hypothesis import strategies as st
from reading_back import lines_with_files

from verl_profiler.analysis.timelines import Bounds
from verl_profiler.cli import main, report
from verl_profiler.errors import ReadingError
from verl_profiler.launch.settings import Settings
from verl_profiler.reading.reader import load
from verl_profiler.render.html import script_json
from verl_profiler.views.report_page import page
from verl_profiler.views.sections import document
from verl_profiler.views.timelines import timelines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(["</script>", "<!--", "]]>", "\u2028", "&lt;"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


def rows(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


@functools.cache
def of(path, steps=None):
    with load(path) as run:
        return document(run, steps)


def test_what_a_run_has_not_by_design_is_no_note():
    """A synchronous run has no stale samples, and an asynchronous one no critical path: nothing is lacking."""
    notes = {
        name: " ".join(note for each in of(path)["sections"] for note in each["notes"])
        for name, path in (("small", SMALL), ("fully_async", cached("fully_async_run")))
    }

    assert "asynchronous training" not in notes["small"]
    assert "synchronous training" not in notes["fully_async"]
    assert "no generate call with its engine's part was recorded" in notes["fully_async"]


def event(name, begin_s, length_s, **more):
    return ended(name, begin_s + length_s, length_s, **more)


run_command = command(report)


@given(JSON)
def test_any_json_stands_inside_a_script_and_reads_back(value):
    """No text can end the data block or start a comment in it."""
    text = script_json(value)

    assert value == json.loads(text)
    assert not set("<>&\u2028\u2029") & set(text)
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json({"x": float("nan")})


def test_the_file_names_no_address_and_only_its_own_script_may_run():
    """Nothing to fetch, and the policy would not let it."""
    html = page(of(SMALL), made="now")
    outside = re.sub(r'(?s)<script type="application/json".*?</script>', "", html)

    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.]*\.[a-z]{2,}", outside))
    assert set() == addresses
    assert not re.search(r"@import|url\([^#]|<link rel=.stylesheet|<script src|<iframe", outside)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src &#39;none&#39;" in policy
    for tag in ("script", "style"):
        inline = re.findall(rf"(?s)<{tag}>(.*?)</{tag}>", html)
        digest = base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode()
        assert 1 == len(inline)
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy


def test_a_small_run_is_shown_whole():
    """Every request is there, with its spans inside it."""
    data = of(SMALL)
    drawn = data["timelines"]
    requests = rows(drawn["requests"])
    with load(SMALL) as run:
        expected = run.rows("SELECT count(*) AS requests FROM requests")[0]["requests"]

    assert expected == drawn["of"] == len(requests) == len(drawn["requests"]["spans"])
    assert all(request["scene"] is not None for request in requests)
    for request, spans in zip(requests, drawn["requests"]["spans"], strict=True):
        assert spans
        assert len(spans) % 4 == 0
        for begin, length in zip(spans[2::4], spans[3::4], strict=True):
            assert 0 <= begin
            assert begin + length <= request["length"] + 1
    assert len(page(data, made="now")) < 3_000_000


def test_the_parts_of_a_mean_step_add_up_to_the_time_from_step_to_step():
    """By hand from the lines of the trainer: both steps, and what follows each until the next or the last timer."""
    timers = sorted(
        (datetime.fromisoformat(line["timestamp"]).timestamp(), line["duration_sec"], line["event"])
        for line in lines_with_files(SMALL, "trainer_0")
        if "duration_sec" in line
    )
    (first, first_s, _), (second, second_s, _) = (each for each in timers if each[2] == "step")
    last, *_ = timers[-1]
    (step,) = of(SMALL)["mean_step"]

    gaps_s = (second - second_s - first) + (last - second)
    assert step["whole_s"] == pytest.approx((first_s + second_s + gaps_s) / 2, abs=0.01)
    assert step["whole_s"] == pytest.approx(sum(length for _, length, *_ in step["parts"]))
    asynchronous = of(cached("separate_async_run"))
    (bar,) = asynchronous["mean_step"]
    assert {"training", "weight_sync"} <= {name for name, *_ in bar["parts"]}
    assert bar["whole_s"] == pytest.approx(asynchronous["findings"][0]["step_s"])


def test_a_large_run_is_sampled_and_says_so():
    """The slowest of each step stay, and the counts of all are there."""
    bounds = Bounds(scenes=1, small_scenes=1, requests=2, slowest=1, each=1, other_steps_requests=1)
    with load(SMALL) as run:
        steps = run.rows("SELECT run, step FROM steps WHERE step > 0 ORDER BY step")
        places = {(row["run"], row["step"]): place for place, row in enumerate(steps)}
        drawn = timelines(run.tables, None, places, bounds)
        slowest = run.rows(
            "SELECT request_id FROM requests WHERE finished QUALIFY row_number() OVER "
            "(PARTITION BY step, validate ORDER BY duration_us DESC) = 1"
        )
    kept = {row["request_id"] for row in rows(drawn["requests"])}

    assert 1 == len(drawn["scenes"])
    assert len(kept) < drawn["of"]
    assert {row["request_id"] for row in slowest} <= kept
    lanes = [lane for lane in drawn["scenes"][0]["lanes"] if lane["kind"] == "requests"]
    assert drawn["scenes"][0]["requests"] == sum(lane["of"] for lane in lanes)
    assert sum(lane["drawn"] for lane in lanes) < sum(lane["of"] for lane in lanes)


def called(**more):
    """Return the lines of a request with one call of an engine."""
    return [
        event("engine_call", 0, 1.0, request_id="a", turn=0, **more),
        event("request", 0, 2.0, request_id="a", sample=1, session=0),
    ]


def test_engine_times_that_were_not_reported_are_said_not_zero(tmp_path):
    """Missing is not 0, and the reader learns which setting brings it."""
    write_lines(tmp_path / "run", worker_0=called(engine_request_id="e"))
    write_lines(
        tmp_path / "run", engine_0=[event("engine_request", 0.1, 0.8, engine_request_id="e")]
    )
    (tmp_path / "run" / "run.json").write_text(
        json.dumps({"settings": {"events": {"engine_timing": False, "exclude": ["memory"]}}})
    )
    data = of(tmp_path / "run")

    (chart,) = data["views"]["request_engine_time"]["charts"]
    assert "with profiler.events.engine_timing=true" in words(chart)
    settings = dict(data["about"]["launches"][0]["settings"])
    assert '["memory"]' == settings["events.exclude"]
    (call,) = data["timelines"]["requests"]["calls"][0]
    assert [None, None, None] == [*call, None, None, None, None, None][6:9]


def test_an_engine_line_under_the_next_step_is_drawn_where_it_ran(tmp_path):
    """After a weight sync the server counts one step ahead of the step that still asks."""
    folder = write_lines(tmp_path / "run", worker_0=called(engine_request_id="e"))
    write_lines(folder, engine_0=[event("engine_request", 0.1, 0.8, step=2, engine_request_id="e")])
    (scene,) = of(folder)["timelines"]["scenes"]

    assert ["engine_0"] == [lane["name"] for lane in scene["lanes"] if lane["kind"] == "count"]


def test_a_run_without_engines_counts_the_calls_of_its_servers(tmp_path):
    """The client's view stands in for servers that were not recorded."""
    data = of(write_lines(tmp_path / "run", worker_0=called(server="s:0")))

    counted = [lane for lane in data["timelines"]["scenes"][0]["lanes"] if lane["kind"] == "count"]
    assert [("s:0", 1)] == [(lane["name"], lane["most"]) for lane in counted]
    (chart,) = data["views"]["request_engine_time"]["charts"]
    assert "what they consist of was not recorded" in words(chart)


def test_a_request_without_an_end_is_drawn_to_where_it_was_last_seen(tmp_path):
    """It has no duration, and stays in the report."""
    call = event("engine_call", 0, 1.5, request_id="a", turn=0, sample=1, session=0)
    folder = write_lines(tmp_path / "run", worker_0=[call])
    data = of(folder)
    requests = data["timelines"]["requests"]
    (request,) = rows(requests)

    assert (None, "unfinished") == (request["duration_s"], request["status"])
    assert 150_000 == request["length"]
    assert data["sentences"] == ["run: no finished steps; 1.50 s were recorded, with 1 request"]


def test_a_step_without_requests_is_drawn_with_its_phases(tmp_path):
    lines = [event("gen", 0, 2.0), event("update_actor", 2, 1.0), event("step", 0, 3.5)]
    data = of(write_lines(tmp_path / "run", trainer_0=lines))

    assert ["spans"] == [lane["kind"] for lane in data["timelines"]["scenes"][0]["lanes"]]
    assert data["sentences"] == ["run: 1 step, 3.50 s"]


def test_a_launch_that_holds_credentials_or_nothing_is_shown(tmp_path):
    """What a report shows of a command or of settings is left out there once more."""
    write_lines(tmp_path / "old", trainer_0=[event("step", 0, 1)])
    write_lines(tmp_path / "new", trainer_0=[event("step", 0, 1)])
    launch = {
        "format": 1,
        "command": ["main_ppo", "--token", "sECRet", "+a.api_key=sECRet"],
        "settings": {"memory_saver": {"environment": {"PASSWORD": "sECRet"}}},
        "cwd": "https://u:sECRet@host/x",
    }
    (tmp_path / "old" / "run.json").write_text(json.dumps(launch))
    (tmp_path / "new" / "run.json").write_text(json.dumps({"format": 1, "training": {}}))
    with load([tmp_path / "old", tmp_path / "new"], cache=False) as run:
        made = document(run, None)

    assert "sECRet" not in json.dumps(made)
    shown = [dict(launch["facts"]) for launch in made["about"]["launches"]]
    assert "<omitted> <omitted> <omitted> <omitted>" in [facts.get("command") for facts in shown]
    assert {} in shown


def test_of_the_profilers_settings_only_what_differs_from_the_default_is_shown(tmp_path):
    """And of verl's what is set; date, devices, model, batch and versions are a line below the title."""
    folder = write_lines(tmp_path / "run", trainer_0=[event("step", 0, 1)])
    settings = msgspec.to_builtins(Settings(output_dir="logs/run"))
    settings["events"] |= {"engine_timing": True, "ship_every_s": None}
    training = {"model": "/models/Qwen3-8B/", "nnodes": 2, "n_gpus_per_node": 8, "rollout_n": 4}
    launch = {
        "format": 1,
        "launched": "2026-11-21T04:11:21+00:00",
        "versions": {"verl": "0.9.1", "python": "3.11.7", "sglang": "0.5.12"},
        "settings": settings,
        "training": {**training, "train_batch_size": 64, "use_v1": None},
    }
    (folder / "run.json").write_text(json.dumps(launch))
    shown = json.loads(
        re.search(
            r'(?s)id="data">(.*?)</script>', report.write_report(folder).read_text(encoding="utf-8")
        )[1]
    )["about"]

    (own,) = shown["launches"]
    assert {"events.engine_timing": "true", "events.ship_every_s": "null"} == {
        key: text for key, text in own["settings"] if key != "output_dir"
    }
    assert "use_v1" not in dict(own["training"])
    assert [
        "2026-11-21 04:11", "2 × 8 GPUs", "Qwen3-8B", "batch 64 × 4", "verl 0.9.1, sglang 0.5.12",
    ] == shown["line"]  # fmt: skip


def test_steps_limit_every_table():
    """`--steps` leaves nothing of other steps behind."""
    data = of(SMALL, (2, 2))

    assert [2] == [row["step"] for row in rows(data["steps"])]
    views = {name: view["table"] for name, view in data["views"].items()}
    for name, table in {**data, **views}.items():
        if isinstance(table, dict) and "s" in table.get("columns", ()) and name != "steps":
            assert {row["s"] for row in rows(table)} <= {-1, 0}, name
    everything = of(SMALL)
    calls = [
        sum(row["calls"] for row in rows(each["views"]["tool_latencies"]["table"]))
        for each in (data, everything)
    ]
    assert 0 < calls[0] < calls[1]


def test_the_command_writes_once_and_replaces_when_told(tmp_path, capsys):
    """A report replaces an earlier one, and another file only with --force."""
    folder = write_lines(tmp_path / "run", trainer_0=[event("step", 0, 1.0)])
    target = folder / "report.html"

    assert 0 == run_command(folder)
    assert f"Wrote {target}\n" == capsys.readouterr().out
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert 0 == run_command(folder)
    target.write_text("mine")
    with pytest.raises(ReadingError, match="--force") as raised:
        run_command(folder)
    assert "output-exists" == raised.value.slug
    assert 0 == run_command(folder, "--force")
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert ["report.html"] == [each.name for each in folder.glob("*report*")]


def test_write_report_leaves_the_run_and_the_interpreter_as_they_were(tmp_path):
    """A report inside a run is not read as events; the garbage collector is as before."""
    folder = shutil.copytree(SMALL, tmp_path / "run", ignore=shutil.ignore_patterns(".cache"))
    before = of.__wrapped__(folder)
    collects = gc.isenabled()
    out = report.write_report(folder)

    assert out == folder / "report.html"
    assert out.stat().st_size > 50_000
    assert collects == gc.isenabled()
    assert before == of.__wrapped__(folder)


def test_a_report_of_two_runs_has_what_diff_prints(tmp_path, capsys):
    """The same sentences and cells; where they cannot be compared, the reason."""
    runs = []
    for name, length_s in (("before", 10.0), ("after", 8.0)):
        steps = [event("step", 20 * step, length_s + step / 10, step=step) for step in range(1, 6)]
        runs.append(write_lines(tmp_path / name, trainer_0=steps))
    assert 0 == main(["diff", *map(str, runs)])
    printed = capsys.readouterr().out
    out = tmp_path / "both.html"
    assert 0 == run_command(*runs, "-o", out)
    (shown,) = re.findall(r'(?s)<section id="difference".*?</section>', out.read_text())

    plain = re.sub(r"<[^>]*>", "\n", shown)
    assert "A step takes 10.4 s in A and 8.35 s in B: -2.00 s" in plain
    words = {word for word in printed.split() if str(tmp_path) not in word}
    assert {word for word in words if word not in unescape(plain)} == set()

    short = write_lines(tmp_path / "short", trainer_0=[event("gen", 1, 0.5)])
    assert 0 == run_command(runs[0], short, "-o", out)
    assert (
        "Both runs cannot be compared: short has no finished training step to compare"
        in out.read_text()
    )
    assert 0 == run_command(*runs, short, "-o", out)
    assert "shows their difference; this one is of 3" in out.read_text()
    assert 0 == run_command(runs[0], "-o", out)
    assert "difference" not in out.read_text().split("<main")[1].split("<script")[0]
