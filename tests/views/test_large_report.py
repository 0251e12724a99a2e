"""The report of a large run: workers by step, and the order of lanes."""

from statistics import median

import pytest
from chart_reading import data_in, every_channel, panels_of, words
from event_files import write_lines
from views.opened_report import CANVAS, unfold
from views.test_trace_selection import STEP_S, WORKERS, line, run_of

from verl_profiler.cli import main
from verl_profiler.reading.reader import load
from verl_profiler.views import timeline_lanes
from verl_profiler.views.questions import VIEWS, workers
from verl_profiler.views.view import Choice

ENGINES = 14
# Engines that the page has at most, the fullest.
CARRIED = 13
STEPS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the directory and (step, id, duration, failed) of each request; of worker 3, long ones."""
    folder = tmp_path_factory.mktemp("large") / "run"
    count = iter(range(10**9))

    def length_s(dice):
        late = next(count) % WORKERS == 3
        return dice.uniform(10, 60) + (25 if late else 0)

    truth = run_of(folder, STEPS, length_s)
    for step in range(1, STEPS + 1):
        begin_s = (step - 1) * STEP_S
        # The engine's number is how many requests it has at once.
        for engine in range(ENGINES):
            times = ("engine_request", begin_s + 1, begin_s + 9, step, engine)
            calls = [f"{step}-{engine}-{number}" for number in range(engine + 1)]
            lines = [line(*times, engine_request_id=each) for each in calls]
            write_lines(folder, **{f"engine_{engine}": lines})
    return folder, truth


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "large run.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline_lanes, "_ENGINES", CARRIED)
        assert main(["report", str(run[0]), "-o", str(out), "--no-cache"]) == 0
    return out


def behind(truth):
    """Return by worker and step how long after the median worker it ended."""
    ends = {}
    for place, (step, _, length_s, _) in enumerate(truth):
        key = step, place % WORKERS
        ends[key] = max(ends.get(key, 0), length_s)
    return {
        (f"worker_{worker}", step): end - median(ends[step, each] for each in range(WORKERS))
        for (step, worker), end in ends.items()
    }


def places_of(opened):
    rows = opened.rows("SELECT run, step FROM steps ORDER BY step")
    return {(row["run"], row["step"]): place for place, row in enumerate(rows)}


def map_of(folder):
    """Return the cells of the map of rollouts by worker and step, and its names from the top."""
    view, choice = VIEWS["worker_phases"], Choice(run="r")
    with load(folder, cache=False) as opened:
        spec = view.spec(view.analysis(opened.tables, choice), choice)
    rollout = next(each for each in panels_of(spec) if "rollout" in str(each.get("title", spec)))
    cells = {(row["process"], row["step"]): row for row in data_in(rollout, "later")}
    domains = [each["scale"]["domain"] for name, each in every_channel(rollout) if name == "y"]
    return cells, domains[0], words(spec)


def test_the_map_is_how_late_each_worker_ends(run):
    """The latest worker first; later than the first of the step."""
    folder, truth = run
    cells, order, _ = map_of(folder)
    expected = behind(truth)
    assert order[0] == "worker_3"
    assert cells.keys() == expected.keys()
    scale = 1000 if max(row["later"] for row in cells.values()) > 100 else 1
    for (name, step), cell in cells.items():
        first = min(by for (_, each), by in expected.items() if each == step)
        assert cell["later"] == pytest.approx(
            (expected[name, step] - first) * scale, abs=0.006 * scale
        )


def test_many_workers_and_steps_keep_the_latest_of_what_they_share(run, monkeypatch):
    monkeypatch.setattr(workers, "_ROWS", 2)
    monkeypatch.setattr(workers, "_COLUMNS", 2)
    cells, order, said = map_of(run[0])
    monkeypatch.undo()
    whole, every, _ = map_of(run[0])

    assert order == every[:2]
    assert f"the 2 latest of {WORKERS}; the latest of 4 steps in a column" in said
    assert 4 == len(cells)
    for (name, _), cell in cells.items():
        shared = [
            whole[name, each]["later"]
            for each in range(round(cell["from"] + 0.5), round(cell["to"] + 0.5))
        ]
        assert cell["later"] == max(shared)


@pytest.mark.browser
def test_a_click_on_the_map_shows_the_step(browser, report):
    browser.open(report)
    unfold(browser)
    chart = "document.querySelector('#workers .vega')"
    browser.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    browser.wait(f"{chart}.dataset.drawn")
    browser.settle()
    x, y, width = browser.evaluate(
        f"(() => {{const box = {chart}.querySelector('canvas').getBoundingClientRect();"
        "return [box.x, box.y, box.width]})()"
    )
    # The third of eight columns, right of the names, in the first row.
    browser.click(x + 70 + (width - 80) * 2.6 / 8.2, y + 40)
    assert browser.evaluate("location.hash") == "#step=3"
    assert not browser.messages


@pytest.mark.browser
def test_engines_are_the_fullest_and_the_last_worker_to_end_is_first(browser, run, report):
    ends = {}
    for place, (step, request, length_s, _) in enumerate(run[1]):
        if step == 2:
            ends.setdefault(place % WORKERS, []).append((length_s, request))
    last = max(ends, key=lambda worker: max(ends[worker]))
    browser.open(report, fragment="step=2")
    lanes = browser.evaluate(f"Number(/(\\d+) lanes/.exec({CANVAS}.ariaLabel)[1])")
    # And the trainer.
    assert lanes == CARRIED + WORKERS + 1
    browser.evaluate(
        f"for (let i = 0; i < 400; i++) {CANVAS}.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowUp'}))"
    )
    browser.settle()
    selected = browser.evaluate("location.hash").split("request=")[1]
    assert any(request.startswith(selected) for _, request in ends[last])
