"""The report page for keyboards and screen readers: axe-core's rules, tab stops, motion."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

# `make lint` installs it there.
AXE = Path(sys.prefix) / "page-checks/node_modules/axe-core/axe.min.js"
BARS = "[...document.querySelectorAll('#steps .pick[aria-pressed]')]"


@pytest.fixture(scope="module")
def axe():
    if not AXE.exists():
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"axe-core is not at {AXE}: `make lint` installs it")
    return AXE.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_violation(browser, small, axe, theme, width):
    """Names, roles, landmarks and contrast, with a step, a slice and a filter chosen."""
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.call("Emulation.setEmulatedMedia", features=media)
    try:
        browser.open(small, width=width, fragment="step=1&tool=search")
        browser.evaluate(
            "document.querySelector('#icicle .pick').dispatchEvent(new Event('click'))"
        )
        browser.evaluate("document.querySelector('.lane-canvas').focus()")
        for key in ("ArrowDown", "."):
            browser.press(key)
        browser.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        browser.evaluate(f"{axe};0")
        found = browser.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations"
            ".map((rule) => [rule.id, rule.nodes.map((node) => node.html)]))"
        )
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])

    assert [] == found


def test_the_steps_are_one_tab_stop(browser, small):
    """Arrow keys move within them, and the tab key leaves and comes back to the same one."""
    browser.open(small)
    stops = f"{BARS}.map((bar) => bar.tabIndex)"
    focused = f"{BARS}.indexOf(document.activeElement)"
    assert [0, -1] == browser.evaluate(stops)
    browser.evaluate(f"{BARS}[0].focus()")
    browser.press("ArrowRight")
    assert 1 == browser.evaluate(focused)
    assert [-1, 0] == browser.evaluate(stops)
    browser.press("ArrowDown")
    assert 1 == browser.evaluate(focused)
    browser.press("Enter", "\r")

    assert "2" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")
    assert 1 == browser.evaluate(focused)
    assert [-1, 0] == browser.evaluate(stops)
    assert "true" == browser.evaluate("document.activeElement.ariaPressed")
    assert "Showing step 2" == browser.evaluate("document.getElementById('status').textContent")
    assert "none" != browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")


@pytest.mark.parametrize(("motion", "behavior"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_nothing_moves_for_those_who_do_not_want_it(browser, small, motion, behavior):
    """The way to the breakdown is a jump for them."""
    media = [{"name": "prefers-reduced-motion", "value": motion}]
    browser.call("Emulation.setEmulatedMedia", features=media)
    try:
        browser.open(small)
        browser.evaluate(
            "Element.prototype.scrollIntoView = (how) => { window.scrolled = how.behavior; }"
        )
        browser.evaluate("document.querySelector('#picked button').click()")
        assert behavior == browser.evaluate("window.scrolled")
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])
