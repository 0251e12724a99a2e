"""The timeline of many agent-loop workers: those that end last are in sight, the others a click away."""

import json
import re
import shutil
from datetime import datetime, timedelta

import pytest
from views.opened_report import CANVAS, SMALL

from verl_profiler.cli.report import write_report

pytestmark = pytest.mark.browser

# Copies of the first worker's events, each later than the one before.
COPIES = range(2, 22)
LATER_S = 0.1
WORKERS = 22


def copied(line, number):
    """Return an event of another worker: another request, so much later."""
    line = line | {"workid": number}
    at = datetime.fromisoformat(line["timestamp"]) + timedelta(seconds=LATER_S * number)
    line["timestamp"] = at.isoformat(timespec="microseconds")
    extra = line["extra"] = dict(line.get("extra") or {})
    for key in ("request_id", "uid"):
        if key in extra:
            extra[key] = f"{number:02}{extra[key][2:]}"
    return line


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "many_workers"
    shutil.copytree(SMALL, folder)
    header = json.loads((folder / "processes" / "worker_0.json").read_text())
    for number in COPIES:
        name = f"worker_{number}"
        made = header | {"name": name, "rank": number, "actor_name": name, "pid": 9000 + number}
        (folder / "processes" / f"{name}.json").write_text(json.dumps(made))
        for file in folder.glob("step_*/worker_0.jsonl"):
            lines = [copied(json.loads(text), number) for text in file.read_text().splitlines()]
            file.with_name(f"{name}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
    return write_report(folder)


def lanes(browser):
    """Return how many lanes the timeline has, and its line about folded ones."""
    label = browser.evaluate(f"{CANVAS}.ariaLabel")
    return int(re.search(r"(\d+) lanes", label)[1]), browser.evaluate(
        "document.querySelector('.fold').innerText.split('\\n').join(' ')"
    )


def click(browser):
    browser.evaluate("document.querySelector('.fold button').click()")
    browser.settle()


def of_worker(browser, report, number):
    """Open the report at a request of a worker, by a link; return what `lanes` does."""
    browser.open(report, fragment=f"worker=worker_{number}")
    request = browser.evaluate(
        "[...document.querySelectorAll('tbody tr')].map((row) => row.innerText.split(/\\s+/))"
        f".find((words) => words.includes('worker_{number}'))[0]"
    )
    browser.open(report, fragment=f"request={request}")
    return lanes(browser)


def test_the_workers_that_end_last_are_in_sight(browser, report):
    """Ten of them; the later a copy begins, the later it ends."""
    folded, line = of_worker(browser, report, 21)
    click(browser)
    every, unfolded = lanes(browser)

    assert line.startswith("10 of 22 workers: those that end last.")
    assert "Show all workers" in line
    assert every - folded == WORKERS - 10
    assert unfolded.startswith("All 22 workers, the last to end first.")
    click(browser)
    assert (folded, line) == lanes(browser)


def test_the_last_worker_comes_first(browser, report):
    """Its requests are the first ones that the keys select."""
    of_worker(browser, report, 20)
    browser.evaluate(
        f"for (let i = 0; i < 400; i++) {CANVAS}.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowUp'}))"
    )
    browser.settle()

    assert "request=21" in browser.evaluate("location.hash")


def test_few_workers_are_not_folded(browser, small):
    """Nor is there anything to unfold."""
    browser.open(small)

    assert browser.evaluate("document.querySelector('.fold').hidden")


def test_a_request_of_a_folded_worker_gets_its_lane(browser, report):
    """When a link names it."""
    folded, _ = of_worker(browser, report, 21)

    pinned, line = of_worker(browser, report, 2)
    assert pinned == folded + 1
    assert line.startswith("11 of 22 workers")
