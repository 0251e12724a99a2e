"""Slices and icicle of the report's timeline, in a real Chromium."""

import re

import pytest
from reading_back import lines_with_files
from views.opened_report import CANVAS, SMALL, opened, place, text, tips

pytestmark = pytest.mark.browser


def recorded(request, event):
    return [
        line
        for line in lines_with_files(SMALL, "worker_*")
        if (line["event"], line["extra"].get("request_id")) == (event, request)
    ]


def test_every_slice_under_the_pointer_is_one_of_its_request(browser, small):
    """With tokens and parts of each engine call; a phase of the trainer has its own lines."""
    browser.open(small, fragment="step=1")
    request = text(browser, "#panel h3").split(":")[0]
    every = [lines for lines, _ in tips(browser)]
    seen = ["\n".join(lines) for lines in every if request in lines]

    assert {"engine_call", "gen"} <= {lines[0] for lines in every}
    calls = recorded(request, "engine_call")
    assert len(calls) > 1
    for extra in (event["extra"] for event in calls):
        (tip,) = (each for each in seen if f"turn {extra['turn']}\n" in each and "queue" in each)
        assert re.search(rf"\b{extra['response_tokens']} generated token", tip)
        assert all(f"{part} " in tip for part in ("queue", "prefill", "decode"))
    named = {event["extra"]["tool"] for event in recorded(request, "tool_call")}
    assert named
    assert all(any(each.startswith(f"tool {name}") for each in seen) for name in named)


def test_a_tap_names_a_slice_and_selects_its_request(browser, small):
    browser.open(small, fragment="step=1")
    place(browser, ".frame")
    lines, point = next(
        (lines, at)
        for lines, at in tips(browser, 12)
        if lines[0] == "engine_call"
        and browser.evaluate(f"document.elementFromPoint({at['x']}, {at['y']}) === {CANVAS}")
    )
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        browser.settle()
        tapped = text(browser, "#tip").splitlines()
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)

    assert tapped == lines
    request = text(browser, "#panel h3").split(":")[0]
    assert request in lines
    assert f"request={request}" in browser.evaluate("location.hash")


def test_the_icicle_adds_up(browser, small):
    """Bars on a level are as wide as the bar above them, in one step and in all."""
    bars = (
        "[...document.querySelectorAll('#icicle .block')].map((each) => [each.ariaLabel, "
        "each.offsetTop, each.getBoundingClientRect().width])"
    )
    for fragment in ("", "step=2"):
        opened(browser, small, fragment=fragment)
        drawn = browser.evaluate(bars)
        levels = {}
        for _, y, width in drawn:
            levels[y] = levels.get(y, 0) + width
        step, phases, components, _ = (levels[y] for y in sorted(levels))
        (gen,) = (width for label, _, width in drawn if label.startswith("gen "))
        # Bars of less than half a pixel are not drawn.
        assert phases == pytest.approx(step, abs=2)
        assert components == pytest.approx(gen, abs=2)
