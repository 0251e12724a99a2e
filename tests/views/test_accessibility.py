"""The report page for keyboards and screen readers: axe-core's rules, tab stops, motion."""

import os
import sys
from pathlib import Path

import pytest
from views.opened_report import unfold

pytestmark = pytest.mark.browser

# `make lint` installs it there.
AXE = Path(sys.prefix) / "page-checks/node_modules/axe-core/axe.min.js"


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
        unfold(browser)
        browser.evaluate("document.querySelector('#icicle .block').click()")
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


def test_a_table_is_one_tab_stop(browser, small):
    """Its headings and rows together; arrow keys, Home and End move within them."""
    browser.open(small)
    unfold(browser)
    browser.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    stops = browser.evaluate(
        "[...document.querySelectorAll('.table')].map((table) => "
        "[...table.querySelectorAll('*')].filter((n) => n.tabIndex >= 0 && n.className !== 'more').length)"
    )
    assert {1} == {*stops}
    rows = "[...document.querySelectorAll('#request-table tbody tr')]"
    heads = "[...document.querySelectorAll('#request-table thead button')]"
    focused = f"[{rows}.indexOf(document.activeElement), {heads}.indexOf(document.activeElement)]"
    count = browser.evaluate(f"{rows}.length")
    assert count > 3

    browser.evaluate("document.querySelector('#request-table [tabindex=\"0\"]').focus()")
    chosen = browser.evaluate(f"{rows}.findIndex((row) => row.ariaSelected === 'true')")
    assert [chosen, -1] == browser.evaluate(focused)
    places = [count - 1, count - 2, 0, 1, 0]
    for key, place in zip(("End", "ArrowUp", "Home", "ArrowDown", "ArrowUp"), places, strict=True):
        browser.press(key)
        assert [place, -1] == browser.evaluate(focused), key
    places = [0, 1, 0, 0]
    for key, place in zip(("ArrowUp", "ArrowRight", "ArrowLeft", "Home"), places, strict=True):
        browser.press(key)
        assert [-1, place] == browser.evaluate(focused), key
    browser.press("Enter", "\r")
    assert [-1, 0] == browser.evaluate(focused)
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    browser.press("Enter", "\r")
    assert [1, -1] == browser.evaluate(focused)
    assert ["true"] == browser.evaluate(
        f"{rows}.map((row) => row.ariaSelected).filter((each) => each !== 'false')"
    )
    assert 1 == browser.evaluate(f"[...{rows}, ...{heads}].filter((n) => n.tabIndex === 0).length")
