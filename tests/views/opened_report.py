"""The report of the small run in a browser: read what it shows, and change its controls."""

import json
from pathlib import Path

SMALL = Path(__file__).parent.parent / "data" / "small_run"
CANVAS = "document.querySelector('.lane-canvas')"


def unfold(browser):
    """Open every topic, as its heading does, and wait until its sections are made."""
    browser.evaluate(
        "document.querySelectorAll('details.topic:not([open]) > summary').forEach((s) => s.click())"
    )
    browser.wait(
        "[...document.querySelectorAll('main > section, .topic section')].every((s) => s.firstChild)"
    )
    browser.settle()


def opened(browser, report, **more):
    """Open a report with every topic unfolded."""
    browser.open(report, **more)
    unfold(browser)


def view(browser):
    """Return the seconds that the timeline shows, first and last."""
    shown = browser.evaluate(f"[{CANVAS}.dataset.from, {CANVAS}.dataset.to]")
    return [float(each) for each in shown]


def text(browser, selector):
    """Return the visible text of an element."""
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def place(browser, selector):
    """Bring an element into the middle of the window; return its left, top, width and height."""
    found = f"document.querySelector({json.dumps(selector)})"
    browser.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
    browser.settle()
    return browser.evaluate(
        f"(() => {{ const box = {found}.getBoundingClientRect(); "
        "return [box.left, box.top, box.width, box.height]; })()"
    )


def set_value(browser, selector, value):
    """Give a control a value, or check or uncheck it, as a user would."""
    browser.evaluate(
        f"(() => {{ const control = document.querySelector({json.dumps(selector)}); "
        f"control[control.type === 'checkbox' ? 'checked' : 'value'] = {json.dumps(value)}; "
        "control.dispatchEvent(new Event('change')); })()"
    )
    browser.settle()


def drag(browser, x, y, by):
    """Drag to the right from a point."""
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + by, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + by, y, button="left", clickCount=1)
    browser.settle()


def tips(browser, across=3):
    """Return the lines of each tip of the timeline and where it is: the pointer moves over all of it.

    What is narrower than `across` pixels may be missed; the lowest rows, of few requests, have 11 pixels.
    """
    found = browser.evaluate(
        f"""(() => {{
            const [box, tip] = [{CANVAS}.getBoundingClientRect(), document.getElementById('tip')];
            const found = new Map();
            for (let y = 6; y < box.height; y += 10) for (let x = 100; x < box.width; x += {across}) {{
                const [clientX, clientY] = [box.left + x, box.top + y];
                {CANVAS}.dispatchEvent(new PointerEvent('pointermove', {{clientX, clientY}}));
                const lines = [...tip.children].map((each) => each.textContent);
                if (!tip.hidden) found.set(lines.join('\\n'), [lines, {{x: clientX, y: clientY}}]);
            }}
            return [...found.values()];
        }})()"""
    )
    return [tuple(each) for each in found]
