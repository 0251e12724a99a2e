"""Slices, filter and icicle of the report's timeline, in a real Chromium."""

import json
import re

import pytest
from event_files import ended, write_lines
from views.opened_report import CANVAS, SMALL, place, set_value, text, unfold

from verl_profiler.cli.report import write_report

pytestmark = pytest.mark.browser


def recorded(request, event):
    return [
        line
        for path in SMALL.glob("step_*/worker_*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line["event"] == event and line["extra"].get("request_id") == request
    ]


def walk(browser):
    """Yield heading and facts of each slice of the selected request."""
    last = None
    while True:
        browser.press(".")
        now = [text(browser, f"#slice {part}") for part in ("h3", ".facts")]
        if now == last:
            return
        yield now
        last = now


def test_every_slice_of_a_request_is_one_of_its_events(browser, small):
    """In their order, with tokens and parts of each engine call."""
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    request = text(browser, "#panel h3").split(":")[0]
    seen = list(walk(browser))

    calls = sorted(recorded(request, "engine_call"), key=lambda event: event["timestamp"])
    tools = recorded(request, "tool_call")
    assert len(seen) >= len(calls) + len(tools) > 2
    engine = [facts for title, facts in seen if title == "engine_call"]
    for facts, event in zip(engine, calls, strict=True):
        extra = event["extra"]
        assert f"turn {extra['turn']}" in facts
        assert re.search(rf"\b{extra['response_tokens']} generated token", facts)
        assert all(f"{part} " in facts for part in ("queue", "prefill", "decode"))
    named = sorted(title for title, _ in seen if title.startswith("tool "))
    assert sorted(f"tool {event['extra']['tool']}" for event in tools) == named
    assert "Selected " in browser.evaluate("document.getElementById('status').textContent")


def test_hovering_and_clicking_a_slice_show_that_slice(browser, small):
    """Not only its request; a phase of the trainer, too."""
    browser.open(small, fragment="step=1")
    height = place(browser, ".lane-canvas")[3]
    pairs = set()
    for down in range(8, int(height) - 4, 14):
        for right in (170, 400):
            left, top, *_ = place(browser, ".lane-canvas")
            browser.mouse("mouseMoved", left + right, top + down)
            browser.settle()
            tip = browser.evaluate(
                "(t => t.hidden ? '' : t.innerText)(document.getElementById('tip'))"
            )
            if tip and "stalled" not in tip:
                browser.click(left + right, top + down)
                pairs.add((tip.splitlines()[0], text(browser, "#slice h3")))

    assert {("engine_call", "engine_call"), ("gen", "gen")} <= pairs
    assert {shown for shown, _ in pairs} == {chosen for _, chosen in pairs}


def listed(browser):
    """Return the ids of the requests in the table, whole."""
    return browser.evaluate(
        "[...document.querySelectorAll('#request-table tbody button')]"
        ".map((name) => name.ariaLabel.match(/^Request (.*), /)[1])"
    )


def test_the_filter_acts_on_timeline_and_table_and_survives_a_reload(browser, small):
    """Of one step, of all, and with a search; what is left is counted, and what passes nothing is named."""
    lines = [
        (path.parent.name, path.stem, line["event"], line["extra"])
        for path in SMALL.glob("step_*/worker_*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line["event"] in ("tool_call", "request") and not line["extra"].get("validate")
    ]
    every = {extra["request_id"] for *_, extra in lines}
    searching = [each for each in lines if each[3].get("tool") == "search"]
    callers = {extra["request_id"] for *_, extra in searching}
    of_step = {extra["request_id"] for step, _, _, extra in lines if step == "step_1"}
    of_one = {
        e["request_id"] for step, name, _, e in searching if (step, name) == ("step_1", "worker_1")
    }
    high = f"{CANVAS}.clientHeight"
    count = "#filter-count"
    browser.open(small, fragment="step=1")
    before = browser.evaluate(high)
    assert of_step == {*listed(browser)}
    assert "" == text(browser, count)

    set_value(browser, "#filter-tool", "search")
    assert text(browser, count).startswith(f"{len(callers & of_step)} of 8 requests")
    assert f", {len(callers & of_step)} requests" in browser.evaluate(f"{CANVAS}.ariaLabel")
    assert text(browser, "#request-table caption").endswith(", filtered")
    set_value(browser, "#filter-worker", "worker_1")
    for arrive in (lambda: None, browser.reload):
        arrive()
        assert text(browser, count).startswith(f"{len(of_one)} of 8 requests")
        assert of_one == {*listed(browser)}
        assert "tool=search&worker=worker_1" in browser.evaluate("location.hash")
        assert browser.evaluate(high) < before
    set_value(browser, "#filter-worker", "")
    set_value(browser, "#step", "-1")
    assert callers & every >= {*listed(browser)} > of_step & callers
    wanted = min(callers & of_step)
    browser.evaluate("document.getElementById('search').focus()")
    browser.call("Input.insertText", text=wanted)
    browser.settle()
    assert [wanted] == listed(browser)
    other = {name for _, name, _, e in lines if e["request_id"] != wanted}
    own = {name for _, name, _, e in lines if e["request_id"] == wanted}
    set_value(browser, "#filter-worker", min(other - own))
    assert "No listed request matches the search and the filter." == text(browser, "#request-table")
    assert text(browser, "#found").endswith("; the filter hides 1 more")

    browser.open(small, fragment="step=1&tool=search")
    browser.evaluate("document.querySelector('.filter button').click()")
    browser.settle()
    assert ("", before) == (text(browser, count), browser.evaluate(high))
    assert "tool=" not in browser.evaluate("location.hash")
    lanes = browser.evaluate(f"parseInt({CANVAS}.ariaLabel.match(/\\d+/)[0])")
    set_value(browser, "#filter-role-trainer", False)
    assert lanes - 1 == browser.evaluate(f"parseInt({CANVAS}.ariaLabel.match(/\\d+/)[0])")
    assert "1 of " in text(browser, count).split(",")[1]
    assert "hide=trainer" in browser.evaluate("location.hash")


def test_slow_requests_are_those_over_the_p95_of_their_own_step(browser, tmp_path):
    """Those of a fast step too, while a slow step's timeline is drawn; P95 is that of docs/metrics.md."""
    slow = set()
    for step, unit in ((1, 0.1), (2, 1.0)):
        # Of 24 durations 1 to 24, P95 is 1 + 0.95 * 23 = 22.85.
        durations = {f"s{step}-{number:02}": unit * number for number in range(1, 25)}
        slow |= {f"s{step}-23", f"s{step}-24"}
        lines = [
            ended("request", 60 * step, duration, step=step, request_id=name)
            for name, duration in durations.items()
        ]
        write_lines(tmp_path / "run", worker_0=lines)
    browser.open(write_report(tmp_path / "run"))
    set_value(browser, "#filter-slow", True)

    assert "over P95, 22.9 s" in text(browser, ".filter")
    assert slow == {*listed(browser)}
    set_value(browser, "#step", "0")
    assert {"s1-23", "s1-24"} == {*listed(browser)}
    assert "over P95, 2.29 s" in text(browser, ".filter")
    assert text(browser, "#filter-count").startswith("2 of 24 requests")


def test_the_icicle_adds_up(browser, small):
    """Bars on a level are as wide as the bar above them, in one step and in all."""
    bars = (
        "[...document.querySelectorAll('#icicle .block')].map((each) => [each.ariaLabel, "
        "each.offsetTop, each.getBoundingClientRect().width])"
    )
    for fragment in ("", "step=2"):
        browser.open(small, fragment=fragment)
        unfold(browser)
        drawn = browser.evaluate(bars)
        levels = {}
        for _, y, width in drawn:
            levels[y] = levels.get(y, 0) + width
        step, phases, components, _ = (levels[y] for y in sorted(levels))
        (gen,) = (width for label, _, width in drawn if label.startswith("gen "))
        # Bars of less than half a pixel are not drawn.
        assert phases == pytest.approx(step, abs=2)
        assert components == pytest.approx(gen, abs=2)
