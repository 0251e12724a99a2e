"""The report in a real Chromium: it draws, zooms, finds and selects, and nothing of a run runs."""

import json
import shutil

import pytest
from views.opened_report import CANVAS, SMALL, place, set_value, text, view

from verl_profiler.cli.report import write_report
from verl_profiler.reading.reader import load
from verl_profiler.views import page_sections, report_page
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.report_page import page
from verl_profiler.views.sections import document

pytestmark = pytest.mark.browser

# Sections that only some runs have.
ABSENT = (
    "captures",
    "device-use",
    "efficiency",
    "pools",
    "cycle",
    "async_what_if",
    "staleness",
    "staleness_causes",
    "engine-load",
    "spans",
)
SECTIONS = [name for name in page_sections.SECTIONS if name not in ABSENT]
HOSTILE = {
    "script": "</script><img src=x onerror=alert(1)>",
    "quotes": "\"'`><svg onload=alert(2)>",
    "template": "{{7*7}}${7*7}",
    "control": "bell\x07tab\tend",
    "rtl": "abc\u202egnp.exe",
    "separator": "line\u2028next",
    "long": "x" * 3_000,
}


def quiet(browser, path):
    """Say whether the page asked for itself alone and wrote nothing to the console."""
    return (browser.requests, browser.messages) == ([path.resolve().as_uri()], [])


def test_it_draws_every_section_without_errors_or_requests(browser, small):
    """Nothing but the file itself is fetched, and the console stays empty."""
    browser.open(small)
    found = browser.evaluate(
        "[...document.querySelectorAll('main > section')].map((s) => [s.id, s.innerText.length])"
    )

    assert SECTIONS == [name for name, _ in found]
    assert all(length > 20 for _, length in found)
    for step in ("1", "2", "-1"):
        set_value(browser, "#step", step)
    assert quiet(browser, small)


def test_a_large_page_is_unpacked_and_drawn_alike(browser, tmp_path, monkeypatch):
    """A damaged one has a warning in place of sections."""
    monkeypatch.setattr(report_page, "_PLAIN_CHARACTERS", 0)
    with load(SMALL, cache=False) as run:
        html = page(document(run), made="now")
    path = tmp_path / "large.html"
    path.write_text(html)
    browser.open(path)
    drawn = "[...document.querySelectorAll('main > section')].map((s) => s.id)"

    assert SECTIONS == browser.evaluate(drawn)
    assert quiet(browser, path)
    path.write_text(html.replace("data-packed>H4s", "data-packed>AAAA"))
    browser.open(path)
    assert "cannot unpack" in text(browser, "#warning")
    assert [] == browser.evaluate(drawn)


def test_the_section_of_a_view_follows_the_step(browser, small):
    """Its question, and a row per step and component."""
    browser.open(small)
    rows = "document.querySelectorAll('#rewards tbody tr').length"
    every = browser.evaluate(rows)
    set_value(browser, "#step", "1")

    assert 0 < browser.evaluate(rows) < every
    assert VIEWS["reward_times"].question in text(browser, "#rewards")
    set_value(browser, "#step", "-1")


def test_keys_zoom_pan_and_return(browser, small):
    """The timeline can be used without a mouse."""
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    home = view(browser)
    browser.press("+", "+")
    zoomed = view(browser)
    browser.press("ArrowRight")
    panned = view(browser)
    browser.press("Home")

    assert zoomed[1] - zoomed[0] == pytest.approx((home[1] - home[0]) * 0.6)
    assert panned[0] > zoomed[0]
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert home == view(browser)
    browser.press("-", "-")
    assert home == view(browser)


def test_the_wheel_zooms_once_the_timeline_has_the_focus(browser, small):
    """Before that, it scrolls the page as everywhere else."""
    browser.open(small)
    left, top, width, height = place(browser, ".lane-canvas")
    x, y = left + width / 2, max(top, 60) + 40
    home = view(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    browser.settle()
    assert home == view(browser)

    left, top, width, _ = place(browser, ".lane-canvas")
    browser.evaluate(f"{CANVAS}.focus({{preventScroll: true}})")
    browser.mouse("mouseWheel", left + width / 2, max(top, 60) + 40, deltaX=0, deltaY=-240)
    browser.settle()
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] < (home[1] - home[0]) * 0.9


def test_dragging_pans(browser, small):
    """What was under the pointer stays under it."""
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    for _ in range(3):
        browser.press("+", "+")
    before = view(browser)
    left, top, width, _ = place(browser, ".lane-canvas")
    x, y = left + width / 2, max(top, 60) + 60
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    browser.settle()
    after = view(browser)

    assert after[0] < before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_letters_zoom_and_pan_as_in_other_trace_viewers(browser, small):
    """W and S zoom, A and D pan, in either case."""
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    home = view(browser)
    browser.press("w", "w")
    zoomed = view(browser)
    browser.press("D", "D")
    panned = view(browser)
    browser.press("a", "a")

    assert zoomed[1] - zoomed[0] == pytest.approx((home[1] - home[0]) * 0.6)
    assert panned[0] > zoomed[0]
    assert zoomed == pytest.approx(view(browser))
    browser.press("s", "s")
    assert home == pytest.approx(view(browser))


def test_a_drag_with_shift_measures_and_zooms(browser, small):
    """The length is shown meanwhile, and the stretch fills the timeline afterwards."""
    browser.open(small)
    left, top, width, _ = place(browser, ".lane-canvas")
    before = view(browser)
    x, y = left + width / 2, max(top, 60) + 60
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1, modifiers=8)
    browser.mouse("mouseMoved", x + 100, y, button="left", buttons=1, modifiers=8)
    shown = browser.evaluate(
        "[document.querySelector('.ruler').hidden, document.querySelector('.ruler').textContent]"
    )
    browser.mouse("mouseReleased", x + 100, y, button="left", clickCount=1, modifiers=8)
    browser.settle()
    after = view(browser)

    assert shown[0] is False
    length = after[1] - after[0]
    number, unit = shown[1].split()
    assert length == pytest.approx(float(number) * {"s": 1, "ms": 1e-3}[unit], rel=0.01)
    assert before[0] < after[0] < after[1] < before[1]
    assert browser.evaluate("document.querySelector('.ruler').hidden")


def test_a_link_leads_to_a_step_and_a_request(browser, small):
    """What is selected is in the address, and survives a reload."""
    browser.open(small)
    assert browser.evaluate("location.hash") == ""
    browser.evaluate(f"{CANVAS}.focus()")
    browser.press("ArrowDown")
    picked = browser.evaluate("location.hash")
    request = picked.split("request=")[1]
    set_value(browser, "#step", "2")
    second = browser.evaluate("location.hash")
    assert "step=2" in second

    browser.open(small, fragment=f"step=1&request={request[:8]}")
    for arrive in (lambda: None, browser.reload):
        arrive()
        assert request in text(browser, "#panel h3")
        assert "1" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")
        assert browser.evaluate("document.getElementById('absent').hidden")


def test_a_link_to_what_the_report_does_not_have_says_so(browser, small):
    """It would show all steps without a word."""
    browser.open(small, fragment="step=99&request=zzz")

    expected = "This report does not have step 99 or request zzz. Showing all steps."
    assert expected == text(browser, "#absent")
    browser.evaluate("location.hash = 'step=1'")
    browser.wait("document.getElementById('absent').hidden")


def test_the_search_finds_who_called_a_tool(browser, small):
    """By the tool's name."""
    calls = [
        json.loads(line)
        for path in sorted(SMALL.glob("step_*/worker_*.jsonl"))
        for line in path.read_text().splitlines()
        if '"tool_call"' in line
    ]
    callers = {
        (call["step"], call["extra"]["request_id"])
        for call in calls
        if call["extra"]["tool"] == "search"
    }
    browser.open(small)
    browser.evaluate(
        "(() => { const box = document.getElementById('search'); box.value = 'search'; "
        "box.dispatchEvent(new Event('input')); })()"
    )
    browser.settle()

    assert text(browser, "#found").startswith(f"{len(callers)} match")


def test_the_timeline_is_the_second_thing_on_the_page(browser, small):
    """After the steps, and first in its section."""
    browser.open(small)
    order = browser.evaluate(
        "[...document.querySelectorAll('#steps, #timeline, #path, #parts-of-requests')].map(e => e.id)"
    )

    assert order == ["steps", "timeline", "parts-of-requests", "path"]


def test_a_click_on_a_bar_selects_its_request(browser, small):
    """Its breakdown and its row in the table follow."""
    browser.open(small)
    first = text(browser, "#panel h3")
    left, top, _, height = place(browser, ".lane-canvas")
    seen = set()
    for row in range(45, int(height) - 20, 6):
        browser.click(left + 160, top + row)
        seen.add(text(browser, "#panel h3"))

    assert first in seen
    assert len(seen) > 2
    chosen = text(browser, "#request-table tr[aria-selected=true] th")
    assert text(browser, "#panel h3").startswith(chosen)
    assert text(browser, "#picked").startswith(chosen)


def test_arrow_keys_walk_through_the_requests(browser, small):
    """Each press selects another one, and a screen reader hears which."""
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    seen = [text(browser, "#panel h3")]
    for key in ("ArrowUp", "ArrowUp", "ArrowDown"):
        browser.press(key)
        seen.append(text(browser, "#panel h3"))

    assert seen[1] == seen[3]
    assert len(set(seen)) >= 2
    spoken = browser.evaluate("document.getElementById('status').textContent")
    assert seen[-1].split(":")[0] in spoken


def test_the_search_finds_a_request_in_any_step(browser, small):
    """Also while another step is shown; a search without a match says so."""
    with load(SMALL, cache=False) as run:
        wanted = run.rows(
            "SELECT request_id FROM requests WHERE step = 1 ORDER BY request_id LIMIT 1"
        )[0]["request_id"]
    browser.open(small)
    set_value(browser, "#step", "2")
    browser.evaluate("document.getElementById('search').focus()")
    browser.call("Input.insertText", text=wanted[:20].upper())
    browser.settle()

    assert wanted == text(browser, "#request-table tbody th")
    assert text(browser, "#found").startswith("1 match in all steps")
    assert text(browser, "#panel h3").startswith(wanted)
    assert "search" == browser.evaluate("document.activeElement.id")
    browser.evaluate("document.getElementById('search').focus()")
    browser.call("Input.insertText", text="no such request")
    browser.settle()
    assert "No listed request matches." == text(browser, "#request-table")


def test_sections_contradict_neither_the_findings_nor_themselves(browser, tmp_path):
    """The longest stall is one during a step, what-if gains are the long-run ones, no column is empty."""
    shutil.unpack_archive(SMALL.parent / "rehearsal_run.tar.gz", tmp_path)
    browser.open(write_report(tmp_path / "rehearsal_run"))

    assert "Longest during a step: engine_0, 359 ms in step 1." in text(browser, "#lags")
    first = browser.evaluate(
        "[...[...document.querySelectorAll('#path table')]"
        ".find((table) => table.caption.textContent === 'Replays').tBodies[0].rows[0].cells]"
        ".map((cell) => cell.innerText)"
    )
    assert ["notify the trainer when samples are ready", "1.42 s", "6.9 %", "1.42 s"] == first[:4]
    empty = browser.evaluate(
        "['routes', 'rewards', 'weights'].flatMap((id) => [...document.querySelectorAll(`#${id} table`)])"
        ".flatMap((table) => [...table.tHead.rows[0].cells].filter((head) => "
        "[...table.tBodies[0].rows].every((row) => row.cells[head.cellIndex].innerText === '-')))"
        ".map((head) => head.innerText)"
    )
    assert [] == empty


def test_on_a_phone_a_request_is_its_first_digits_and_its_time(browser, small):
    """The whole id would fill the screen; the panel below has it."""
    browser.open(small, width=390)
    wide = browser.evaluate(
        "document.querySelector('#request-table tbody th').getBoundingClientRect().width"
    )

    assert wide < 130


def test_a_column_sorts_both_ways(browser, small):
    """A click sorts, another turns it around, and the order is announced."""
    browser.open(small)
    head = "#request-table thead th:nth-child(5)"
    column = (
        "[...document.querySelectorAll('#request-table tbody tr')]"
        ".map((row) => row.children[4].innerText)"
    )
    most_first = browser.evaluate(column)
    assert "descending" == browser.evaluate(f"document.querySelector('{head}').ariaSort")
    browser.evaluate(f"document.querySelector('{head} button').click()")

    assert "ascending" == browser.evaluate(f"document.querySelector('{head}').ariaSort")
    assert most_first != browser.evaluate(column)


def test_choosing_a_step_shows_it_everywhere(browser, small):
    """In the chart, by the list, and back to all."""
    browser.open(small)
    whole = text(browser, "#tools")
    assert "Mean per step over 2 replayed steps" in text(browser, "#path")
    browser.evaluate(
        "document.querySelectorAll('#steps .pick')[0].dispatchEvent(new Event('click'))"
    )
    browser.settle()

    assert "1" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")
    assert "in step 1" in text(browser, "#tools")
    assert "step 1" in text(browser, "#rollout")
    assert "replay error" in text(browser, "#path")
    assert "Mean per step" not in text(browser, "#path")
    assert text(browser, "#panel .facts").startswith("step 1 · ")
    assert "step 1" == browser.evaluate("document.getElementById('scene').selectedOptions[0].text")
    set_value(browser, "#step", "-1")
    assert whole == text(browser, "#tools")


def test_dark_and_light_by_preference_and_by_button(browser, small):
    """The canvas follows the rest of the page."""
    paper = "getComputedStyle(document.body).backgroundColor"
    pixel = (
        f"(() => {{ const canvas = {CANVAS}; return [...canvas.getContext('2d')"
        ".getImageData(12, 5, 60, 12).data].filter((v, i) => i % 4 === 0).reduce((a, b) => Math.max(a, b)); })()"
    )
    browser.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    try:
        browser.open(small)
        dark = browser.evaluate(paper)
        bright_ink = browser.evaluate(pixel)
        browser.evaluate("document.getElementById('theme').click()")
        browser.settle()
        light = browser.evaluate(paper)
        dark_ink = browser.evaluate(pixel)
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])

    assert "rgb(255, 255, 255)" == light
    assert dark != light
    assert bright_ink > 150 > dark_ink


def test_it_prints(browser, small, tmp_path):
    """The PDF has pages, and the window is as before."""
    browser.open(small)
    browser.pdf(tmp_path / "r.pdf")
    browser.settle()

    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
    assert None is browser.evaluate("document.documentElement.dataset.theme ?? null")
    assert quiet(browser, small)


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_width_makes_the_page_scroll_sideways(browser, small, width):
    """Tables scroll by themselves, and the charts fit."""
    browser.open(small, width=width)

    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert min(width, 1180) - 60 <= browser.evaluate(f"{CANVAS}.clientWidth") <= width


def test_every_control_has_a_name_and_every_table_heads(browser, small):
    """A screen reader can say what each of them is."""
    browser.open(small)
    nameless = browser.evaluate(
        "[...document.querySelectorAll('button, select, input, canvas[tabindex], svg[role=img]')]"
        ".filter((n) => !(n.textContent.trim() || n.ariaLabel || n.labels?.length)).map((n) => n.outerHTML)"
    )
    headless = browser.evaluate(
        "[...document.querySelectorAll('table')].filter((t) => !t.caption.textContent || "
        "[...t.tHead.rows[0].cells].some((c) => c.scope !== 'col') || "
        "[...t.tBodies[0].rows].some((r) => r.cells[0].scope !== 'row')).length"
    )

    assert [] == nameless
    assert 0 == headless


def test_hostile_texts_appear_as_text(browser, tmp_path):
    """In tool names, request ids, samples and the folder's name; nothing runs, nothing loads."""
    folder = tmp_path / "<img src=x onerror=alert(1)>{{7*7}}"
    lines = []
    for number, (name, value) in enumerate(HOSTILE.items()):
        for kind, length, more in (
            ("engine_call", 0.5, {"server": value, "finish_reason": value}),
            ("tool_call", 0.4, {"tool": value}),
            ("request", 1.0, {"sample": value, "session": 0, "agent": value}),
        ):
            extra = {"request_id": f"{name} {value}", "turn": 0, **more}
            if kind == "request":
                del extra["turn"]
            stamp = f"2026-11-21T02:33:{20 + number:02}.{int(length * 1000):03}000+00:00"
            lines.append(
                {
                    "timestamp": stamp,
                    "event": kind,
                    "duration_sec": length,
                    "extra": extra,
                    "step": 1,
                }
            )
        lines.append({**lines[-1], "event": f"user {value}", "status": value})
    path = folder / "step_1" / "worker_<b>bold<b>.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with load(folder, cache=False) as run:
        data = document(run)
    out = tmp_path / "hostile.html"
    out.write_text(page(data, made="now"), encoding="utf-8")

    browser.open(out)
    set_value(browser, "#step", "0")
    browser.evaluate("document.querySelector('#request-table .more')?.click()")
    for row in range(len(HOSTILE)):
        browser.evaluate(f"document.querySelectorAll('#request-table tbody tr')[{row}].click()")
        browser.settle()
    left, top, width, _ = place(browser, ".lane-canvas")
    browser.mouse("mouseMoved", left + width / 2, top + 20)
    browser.settle()

    shown = browser.evaluate("document.body.textContent")
    tools = text(browser, "#tools")
    assert folder.name == text(browser, "h1")
    for name in ("script", "quotes", "template"):
        assert HOSTILE[name] in tools
    assert "bell␇tab␉end" in tools
    assert "abc\\u202egnp.exe" in tools
    assert "line\\u2028next" in tools
    assert "(3000 characters)" in shown
    assert "worker_<b>bold<b>" in shown
    assert 0 == browser.evaluate("document.querySelectorAll('img, b, body svg[onload]').length")
    assert quiet(browser, out)


@pytest.mark.parametrize(
    "events",
    [
        [("gen", 2.0, None), ("step", 3.0, None)],
        [("engine_call", 1.0, "a")],
        [("request", 1.0, "a")],
        [("memory_resume", 0.5, None)],
    ],
    ids=["a trainer alone", "a request without an end", "a request without calls", "no step"],
)
def test_runs_with_little_in_them_draw_too(browser, tmp_path, events):
    """Sections with nothing say so in words, without errors."""
    path = tmp_path / "run" / "step_1" / "trainer_0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": "2026-11-21T02:33:30.000000+00:00",
                    "event": name,
                    "duration_sec": length,
                    "extra": {"request_id": request, "turn": 0} if request else {},
                    "step": 1,
                }
            )
            + "\n"
            for name, length, request in events
        )
    )
    out = write_report(tmp_path / "run")
    browser.open(out)
    empty = browser.evaluate(
        "[...document.querySelectorAll('main > section')].filter((s) => s.children.length < 2).length"
    )
    shown = browser.evaluate("document.body.innerText")

    assert 0 == empty
    assert "No tool calls were recorded." in shown
    assert not {"undefined", "NaN", "[object"} & set(shown.split())
    assert quiet(browser, out)


def test_the_device_time_of_an_asynchronous_run_adds_up(browser, tmp_path):
    """Of both pools, in all steps and in one; there is no critical path, and the page states why."""
    shutil.unpack_archive(SMALL.parent / "separate_async_run.tar.gz", tmp_path)
    browser.open(write_report(tmp_path / "separate_async_run"))

    assert "asynchronous training" in text(browser, "#path")
    shown = text(browser, "#pools")
    assert {"trainer", "queue", "hybrid", "standalone", "version 0", "version 3"} <= {
        each.strip() for each in shown.splitlines()
    }
    assert browser.evaluate("document.querySelectorAll('#pools svg rect').length") > 100
    tails = browser.evaluate(
        "[...document.querySelectorAll('#steps .table thead th')]"
        ".filter((head) => head.innerText === 'tail')"
        ".flatMap((head) => [...head.closest('table').tBodies[0].rows]"
        ".map((row) => row.cells[head.cellIndex].innerText))"
    )
    assert {"-"} == {*tails}
    for step in ("-1", "2"):
        set_value(browser, "#step", step)
        shares = browser.evaluate(
            "[...document.querySelectorAll('#devices table')].map((table) => "
            "[...table.querySelectorAll('tbody tr')].map((row) => parseFloat(row.cells[1].innerText.replace('<', ''))))"
        )
        assert len(shares) == 2
        assert [sum(each) for each in shares] == pytest.approx([100, 100], abs=1.5)
