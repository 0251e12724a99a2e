"""The report of a large run: workers by step, folded engines, requests that are loaded on demand."""

from statistics import median

import pytest
from event_files import write_lines
from views.opened_report import CANVAS, unfold
from views.test_trace_selection import STEP_S, WORKERS, line, run_of

from verl_profiler.cli import main
from verl_profiler.reading.reader import load
from verl_profiler.views import timeline_lanes, worker_heat

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


def test_the_map_is_how_late_each_worker_ends(run):
    """The latest worker first; seconds after the median one."""
    folder, truth = run
    with load(folder, cache=False) as opened:
        heat = worker_heat.worker_heat(opened.tables, None, places_of(opened))
    expected = behind(truth)
    assert heat["workers"][0] == "worker_3"
    assert heat["others"] == 0
    assert heat["columns"] == [[place, place] for place in range(STEPS)]
    for name, cells in zip(heat["workers"], heat["cells"], strict=True):
        for place, (behind_s, step) in enumerate(cells):
            assert behind_s == pytest.approx(expected[name, place + 1], abs=0.006)
            assert step == place


def test_many_workers_and_steps_keep_the_latest_of_what_they_share(run, monkeypatch):
    monkeypatch.setattr(worker_heat, "_WORKERS", 2)
    monkeypatch.setattr(worker_heat, "_COLUMNS", 2)
    folder, truth = run
    with load(folder, cache=False) as opened:
        heat = worker_heat.worker_heat(opened.tables, None, places_of(opened))
    expected = behind(truth)
    assert heat["columns"] == [[0, 3], [4, 7]]
    assert heat["others"] == WORKERS - 2
    for number, steps in enumerate(((1, 2, 3, 4), (5, 6, 7, 8))):
        late = {
            (name, step): s
            for (name, step), s in expected.items()
            if step in steps and name not in heat["workers"]
        }
        assert heat["cells"][2][number][0] == pytest.approx(max(late.values()), abs=0.006)
        assert heat["cells"][2][number][1] + 1 == max(late, key=late.get)[1]


def test_few_workers_have_no_map(run):
    with load(run[0] / "step_1" / "worker_0.jsonl", cache=False) as opened:
        assert worker_heat.worker_heat(opened.tables, None, places_of(opened)) is None


@pytest.mark.browser
def test_a_click_on_the_map_shows_the_step(browser, report):
    browser.open(report)
    unfold(browser)
    box = browser.evaluate(
        "(() => {const map = [...document.querySelectorAll('#steps .figure')]"
        ".find((each) => each.innerText.includes('worker_3'));"
        "map.scrollIntoView({block: 'center'});"
        "const cell = map.querySelectorAll('rect')[2].getBoundingClientRect();"
        "return [cell.x + cell.width / 2, cell.y + cell.height / 2]})()"
    )
    browser.click(*box)
    assert browser.evaluate("location.hash") == "#step=3"
    assert not browser.messages


@pytest.mark.browser
def test_engines_are_folded_to_the_fullest_and_workers_to_the_last_to_end(browser, run, report):
    """The last worker first; a request of a folded worker gets its lane when a link names it."""
    ends = {}
    for place, (step, request, length_s, _) in enumerate(run[1]):
        if step == 2:
            ends.setdefault(place % WORKERS, []).append((length_s, request))
    first, *_, last = sorted(ends, key=lambda worker: max(ends[worker]))

    def opened_at(worker):
        """Open the report at a request of a worker; return how many lanes there are, and what is folded."""
        browser.open(report, fragment=f"step=2&worker=worker_{worker}")
        request = browser.evaluate(
            "document.querySelector('#request-table tbody tr').ariaLabel.match(/^Request (.*), /)[1]"
        )
        browser.open(report, fragment=f"step=2&request={request}")
        return shown()

    def shown():
        lanes = browser.evaluate(f"Number(/(\\d+) lanes/.exec({CANVAS}.ariaLabel)[1])")
        text = "document.querySelector('.fold').innerText.replace(/\\s+/g, ' ')"
        return lanes, browser.evaluate(text)

    pinned, line = opened_at(first)
    assert "11 of 20 workers" in line
    folded, line = opened_at(last)
    assert folded == pinned - 1
    assert "10 of 20 workers: those that end last." in line
    assert "10 of 14 engines: the fullest" in line
    browser.evaluate(
        f"for (let i = 0; i < 400; i++) {CANVAS}.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowUp'}))"
    )
    browser.settle()
    selected = browser.evaluate("location.hash").split("request=")[1]
    assert any(request.startswith(selected) for _, request in ends[last])
    browser.evaluate("document.querySelector('.fold button').click()")
    browser.settle()
    lanes, line = shown()
    assert lanes == folded + (CARRIED - 10) + (WORKERS - 10)
    assert "All 20 workers, the last to end first" in line
    assert "the 13 fullest of 14 engines" in line
