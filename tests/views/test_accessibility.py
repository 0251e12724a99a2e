"""The report page for keyboards and screen readers: axe-core's rules, tab stops, motion."""

import os
import sys
from pathlib import Path

import pytest
from views.opened_report import opened

pytestmark = pytest.mark.browser

# `make lint` installs it there.
AXE = Path(sys.prefix) / "page-checks/node_modules/axe-core/axe.min.js"


@pytest.fixture(scope="module")
def axe():
    if not AXE.exists():
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"axe-core is not at {AXE}: `make lint` installs it")
    return AXE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1440, "light")])
def test_axe_finds_no_violation(browser, small, axe, theme, width):
    """Names, roles, landmarks and contrast, with a step and a request chosen."""
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.call("Emulation.setEmulatedMedia", features=media)
    try:
        opened(browser, small, width=width, fragment="step=1")
        browser.evaluate("document.querySelector('.lane-canvas').focus()")
        browser.press("ArrowDown")
        browser.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        browser.evaluate(f"{axe};0")
        found = browser.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations"
            ".map((rule) => [rule.id, rule.nodes.map((node) => node.html)]))"
        )
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])

    assert [] == found


def test_a_row_is_chosen_by_the_keyboard(browser, small):
    """Its name is a button, which keeps the focus; so do headings, which sort."""
    browser.open(small)
    for table in ("#steps", "#request-table"):
        browser.evaluate("location.hash = 'steps'")
        names = f"[...document.querySelectorAll('{table} tbody button')]"
        browser.evaluate(f"{names}[1].focus()")
        browser.press("Enter", "\r")
        browser.settle()
        assert browser.evaluate(f"document.activeElement === {names}[1]")
        chosen = f"{names}.map((name) => name.closest('tr').ariaCurrent === 'true')"
        assert [1] == [at for at, each in enumerate(browser.evaluate(chosen)) if each]
    browser.evaluate("document.querySelector('#request-table thead button').focus()")
    browser.press("Enter", "\r")
    head = "document.activeElement.closest('th').ariaSort"
    assert "ascending" == browser.evaluate(head)
