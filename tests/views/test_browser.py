"""The report in a real Chromium: it draws, zooms, finds and selects, and nothing of a run runs."""

import re

import pytest
from cached_runs import REHEARSED, cached
from event_files import ended, write_lines
from views.opened_report import CANVAS, SMALL, drag, opened, place, set_value, text, tips, view

from verl_profiler.cli import main
from verl_profiler.cli.report import write_report
from verl_profiler.reading.reader import load
from verl_profiler.views.report_page import page
from verl_profiler.views.sections import document

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def gathered():
    """What the page of the small run shows."""
    with load(SMALL, cache=False) as run:
        return document(run)


@pytest.fixture(scope="module")
def sections(gathered):
    """Names of its sections."""
    return [each["name"] for each in gathered["sections"]]


def quiet(browser, path):
    """Say whether the page asked for itself alone and wrote nothing to the console."""
    return (browser.requests, browser.messages) == ([path.resolve().as_uri()], [])


SHOWN = "[...document.querySelectorAll('main section')].map((s) => [s.id, s.innerText.length])"


def test_the_first_screen_is_the_answer(browser, gathered, sections, tmp_path):
    """Headline, where a mean step goes, findings with their fix to copy, and the timeline; the rest is folded.

    What the findings point to follows the timeline; what is folded is made when it is opened.
    """
    fix = ["a.b='x y'", "c=<2>"]
    first_one, *others = gathered["findings"]
    data = {**gathered, "findings": [{**first_one, "overrides": fix}, *others]}
    path = tmp_path / "report.html"
    path.write_text(page(data, made="now"))
    browser.open(path, width=1280, height=1000)
    bottom = "document.getElementById('timeline').getBoundingClientRect().top"
    assert browser.evaluate(bottom) < 1000
    bar = "[...document.querySelectorAll('#mean-step .block')].map((s) => s.clientWidth)"
    widths, shares = (
        browser.evaluate(bar),
        browser.evaluate(
            "[...document.querySelectorAll('#mean-step li')]"
            ".map((li) => parseFloat(li.innerText.match(/([\\d.]+) %/)[1]))"
        ),
    )
    assert sum(shares) == pytest.approx(100, abs=1)
    parts = [width / sum(widths) * 100 for width in widths]
    assert parts == pytest.approx(shares, abs=1)
    assert "Where a mean step goes: " in text(browser, "#mean-step h2")
    first = "document.querySelector('.findings li')"
    assert "The trainer noticed rollout completion" in browser.evaluate(f"{first}.innerText")
    browser.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    left, top, wide, high = place(browser, ".findings li button")
    browser.click(left + wide / 2, top + high / 2)
    browser.wait(f"{first}.querySelector('button').textContent === 'Copied'")
    copied = browser.evaluate("navigator.clipboard.readText()")
    assert (
        copied == " ".join(fix) == browser.evaluate(f"{first}.querySelector('p code').textContent")
    )

    made = [name for name, length in browser.evaluate(SHOWN) if length]
    pointed = browser.evaluate(
        "[...document.querySelectorAll('.findings ol:not([start]) > li')]"
        ".map((li) => li.querySelector('a').hash.slice(1))"
    )
    assert made == list(dict.fromkeys(["requests", *pointed]))
    assert len(made) < len(sections) / 2
    assert quiet(browser, path)


def test_it_draws_every_section_without_errors_or_requests(browser, small, sections, tmp_path):
    """Nothing but the file itself is fetched, and the console stays empty; also when it is printed."""
    opened(browser, small)
    cells = browser.evaluate("[...document.querySelectorAll('td')].map((td) => td.textContent)")
    odd = re.compile(r"undefined|NaN|\[object|\d,\d{3},\d{3},\d{3}")
    assert not [cell for cell in cells if odd.search(cell)]
    browser.evaluate("document.querySelectorAll('button.more').forEach((more) => more.click())")
    empty = browser.evaluate(
        "[...document.querySelectorAll('.topic table')].flatMap((table) => "
        "[...table.tHead.rows[0].cells].filter((head) => [...table.tBodies[0].rows]"
        ".every((row) => ['-', 'false'].includes(row.cells[head.cellIndex].textContent))))"
        ".map((head) => head.textContent)"
    )
    assert [] == empty
    found = browser.evaluate(SHOWN)

    assert sorted(sections) == sorted(name for name, _ in found)
    assert all(length > 20 for _, length in found)
    for step in ("1", "2", "-1"):
        set_value(browser, "#step", step)
    browser.open(small)
    browser.pdf(tmp_path / "r.pdf")
    browser.settle()
    # Charts that were never in view are printed as well.
    charts = "[...document.querySelectorAll('.vega')].map((box) => Boolean(box.firstChild))"
    assert {True} == {*browser.evaluate(charts)}
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")
    # What was folded is printed, and folded again.
    assert len(browser.evaluate(f"{SHOWN}.filter(([, length]) => length)")) < len(sections)
    assert browser.evaluate("document.querySelector('.topic section').firstChild !== null")
    assert "light" == browser.evaluate("document.documentElement.dataset.theme")
    assert quiet(browser, small)


def test_a_large_page_is_unpacked_and_drawn_alike(browser, gathered, sections, tmp_path):
    """A damaged one has a warning in place of sections."""
    html = page(gathered, made="now", plain_characters=0)
    path = tmp_path / "large.html"
    path.write_text(html)
    opened(browser, path)

    assert sorted(sections) == sorted(name for name, _ in browser.evaluate(SHOWN))
    assert quiet(browser, path)
    path.write_text(html.replace("data-packed>H4s", "data-packed>AAAA"))
    browser.open(path)
    assert "cannot unpack" in text(browser, "#warning")
    assert [] == browser.evaluate(SHOWN)


def test_keys_zoom_pan_and_return(browser, small):
    """The timeline can be used without a mouse; letters are those of other trace viewers, in either case."""
    keys = ("+", "D", "ArrowLeft", "-")
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    views = [view(browser)]
    for key in keys:
        browser.press(key, key if len(key) == 1 else "")
        views.append(view(browser))
    home, zoomed, panned, back, out = views

    assert zoomed[1] - zoomed[0] == pytest.approx((home[1] - home[0]) * 0.6)
    assert panned[0] > zoomed[0]
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert zoomed == pytest.approx(back)
    assert home == pytest.approx(out)
    browser.press(keys[0], keys[0])
    browser.press("Home")
    assert home == view(browser)


def test_a_stall_is_a_band_over_the_lane_that_it_stops(browser, small):
    """A tip on the bars below it names the stall first, and a click selects the bar all the same."""
    browser.open(small, fragment="step=2")
    stalled = [
        lines
        for lines, _ in tips(browser, 12)
        if lines[0].startswith("Event loop stalled for 1.50 s")
    ]
    assert stalled
    assert any(len(lines) > 3 for lines in stalled), "the bar below has its own lines"


def test_dragging_pans(browser, small):
    """What was under the pointer stays under it."""
    browser.open(small)
    browser.evaluate(f"{CANVAS}.focus()")
    for _ in range(3):
        browser.press("+", "+")
    before = view(browser)
    left, top, width, _ = place(browser, ".lane-canvas")
    x, y = left + width / 2, max(top, 60) + 60
    drag(browser, x, y, 100)
    after = view(browser)
    assert after[0] < before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_a_link_leads_to_a_step_and_a_request(browser, small):
    """What is selected is in the address, and survives a reload; what the report lacks is named."""
    browser.open(small)
    assert browser.evaluate("location.hash") == ""
    browser.evaluate(f"{CANVAS}.focus()")
    browser.press("ArrowDown")
    request = browser.evaluate("location.hash").split("request=")[1]
    set_value(browser, "#step", "2")
    assert "step=2" in browser.evaluate("location.hash")

    browser.open(small, fragment=f"step=1&request={request[:8]}")
    for arrive in (lambda: None, browser.reload):
        arrive()
        assert request in text(browser, "#panel h3")
        assert "1" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")
        assert browser.evaluate("document.getElementById('absent').hidden")

    browser.open(small, fragment="step=99&request=zzz&view=zoom")
    expected = "This report does not have step 99 or request zzz or view zoom. Showing all steps."
    assert expected == text(browser, "#absent")
    browser.evaluate("location.hash = 'step=1'")
    browser.wait("document.getElementById('absent').hidden")


def test_a_link_opens_what_is_folded(browser, small):
    """A section or a view, by address and by the list at the side; the step stays."""
    at_top = "Math.abs(document.getElementById('%s').getBoundingClientRect().top) < 200"
    for fragment in ("view=tool_latencies", "tool_latencies"):
        browser.open(small, fragment=fragment)
        assert "sandbox takes 55 % of all tool time" in text(browser, "#tool_latencies")
        assert browser.evaluate(at_top % "tool_latencies")
    browser.open(small, fragment="step=2")
    browser.evaluate("document.querySelector('#links a[href=\"#topic-rollout\"]').click()")
    browser.settle()
    assert "2" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")
    assert "sandbox" in text(browser, "#tool_latencies")
    assert browser.evaluate(at_top % "topic-rollout")
    assert browser.evaluate("location.hash") == "#step=2&view=topic-rollout"
    browser.reload()
    assert "2" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")


def test_choosing_a_step_shows_it_everywhere(browser, small):
    """In the chart, by the list, and back to all."""
    opened(browser, small)
    whole = text(browser, "#tool_latencies")
    every = browser.evaluate(
        "[...document.querySelectorAll('#request_times tbody tr')].map((row) => row.textContent)"
    )
    set_value(browser, "#step", "1")

    assert "1" == browser.evaluate("document.getElementById('step').selectedOptions[0].text")
    tools = (
        "[...document.querySelectorAll('#request_times tbody tr')].map((row) => row.textContent)"
    )
    shown = browser.evaluate(tools)
    assert shown
    assert shown != every
    assert text(browser, "#panel .facts").startswith("step 1 · ")
    assert "step 1" == browser.evaluate("document.getElementById('scene').selectedOptions[0].text")
    set_value(browser, "#step", "-1")
    assert whole == text(browser, "#tool_latencies")


def test_no_name_makes_the_page_wider_than_a_phone(browser, tmp_path):
    """Of a tool or a process, in a finding, its evidence, a table or the difference of two runs."""
    long = "verl_function_tools__" + "x" * 80
    runs = []
    for name in ("before", "after"):
        lines = [
            each
            for step in range(1, 5)
            for at in (10 * step,)
            for each in (
                ended("tool_call", at + 6, 5.0, step=step, request_id="a", turn=0, tool=long),
                ended("event_loop_lag", at + 5.5, 4.0, step=step, during=f"{long}:calculate"),
                ended("request", at + 7, 7.0, step=step, request_id="a"),
            )
        ]
        trainer = [
            ended(event, 10 * step + 8, 8.0, step=step)
            for step in range(1, 5)
            for event in ("gen", "step")
        ]
        runs.append(write_lines(tmp_path / name, worker_0=lines, trainer_0=trainer))
    out = tmp_path / "both.html"
    assert 0 == main(["report", *map(str, runs), "-o", str(out)])
    opened(browser, out, width=390)
    browser.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    browser.settle()

    assert long in text(browser, ".findings")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390


def test_an_asynchronous_and_a_synchronous_run_fit_a_phone(browser, tmp_path):
    """Their difference has wide tables, and their steps have long names."""
    runs = [cached("fully_async_run"), REHEARSED]
    out = tmp_path / "both.html"
    assert 0 == main(["report", *map(str, runs), "-o", str(out)])
    browser.open(out, width=390)

    assert browser.evaluate("document.querySelector('#difference table').offsetWidth") > 390
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    heights = (
        "[...document.querySelectorAll('#request-table tbody tr')].map((row) => row.offsetHeight)"
    )
    assert max(browser.evaluate(heights)) < 36


@pytest.mark.parametrize("width", [360, 1600])
def test_no_width_makes_the_page_scroll_sideways(browser, small, width):
    """Tables scroll by themselves, and the charts fit; on a phone a request is its first digits."""
    opened(browser, small, width=width)

    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert min(width, 800) - 60 <= browser.evaluate(f"{CANVAS}.clientWidth") <= width
    cell = "document.querySelector('#request-table tbody th')"
    assert (browser.evaluate(f"{cell}.getBoundingClientRect().width") < 130) == (width < 400)


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
    lines = [
        ended(name, 10, length, **({"request_id": request, "turn": 0} if request else {}))
        for name, length, request in events
    ]
    write_lines(tmp_path / "run", trainer_0=lines)
    out = write_report(tmp_path / "run")
    opened(browser, out)
    empty = browser.evaluate(
        "[...document.querySelectorAll('main section')].filter((s) => s.children.length < 2).length"
    )
    shown = browser.evaluate("document.body.innerText")

    assert 0 == empty
    assert "no tool call was recorded there." in shown
    assert not {"undefined", "NaN", "[object"} & set(shown.split())
    assert quiet(browser, out)


def test_without_requests_nothing_offers_to_find_one(browser, tmp_path):
    """The trainer's phases are drawn; a search of no requests would look like a fault of the page."""
    write_lines(tmp_path / "run", trainer_0=[ended("gen", 10, 2.0), ended("step", 10, 3.0)])
    out = write_report(tmp_path / "run")
    browser.open(out)

    assert "No requests were recorded; the other processes are drawn." in text(browser, "#requests")
    assert not browser.evaluate("Boolean(document.querySelector('#search, #request-table'))")
    assert any("gen" in line for lines, _ in tips(browser) for line in lines)
    assert quiet(browser, out)


# Notes every text of a chart with where it begins and ends, and how wide the chart is.
WRITTEN = """(() => {
    window.written = [];
    const pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
    pen.fillText = function (text, x, y) {
        const {a, b, e} = this.getTransform(), wide = this.measureText(text).width;
        const left = x - ({center: wide / 2, right: wide, end: wide}[this.textAlign] ?? 0);
        if (!b && this.canvas.closest('.vega'))
            window.written.push([text, a * left + e, a * (left + wide) + e, this.canvas.width]);
        write.apply(this, arguments);
    };
})()"""


CHARTS = "[...document.querySelectorAll('.vega')]"


def cut_texts(browser):
    """Draw every chart; return how many texts they have, and those that are cut."""
    browser.evaluate(WRITTEN)
    for number in range(browser.evaluate(f"{CHARTS}.length")):
        browser.evaluate(f"{CHARTS}[{number}].scrollIntoView({{block: 'center'}})")
        browser.wait(f"{CHARTS}[{number}].dataset.drawn")
    browser.settle()
    written = browser.evaluate("window.written")
    return len(written), [
        each for each in written if each[1] < -1 or each[2] > each[3] + 1 or "…" in each[0]
    ]


def test_the_charts_of_a_log_have_whole_texts_on_a_phone(browser, tmp_path):
    """Legends name each timer with its mean."""
    for log in sorted((SMALL.parent / "console_logs").glob("*.log")):
        out = tmp_path / f"{log.stem}.html"
        assert 0 == main(["report", str(log), "--out", str(out)])
        browser.open(out, width=390)
        texts, cut = cut_texts(browser)
        assert (texts > 50, cut) == (True, []), log.name


def test_the_end_of_an_axis_is_whole(browser, tmp_path):
    """Half of the label of the last tick lies beyond the axis, in a chart as wide as its box."""
    run = SMALL.parent.parent.parent / "examples" / "tutorial" / "before.tar.gz"
    out = tmp_path / "report.html"
    assert 0 == main(["report", str(run), "--out", str(out)])
    opened(browser, out, width=1280)
    texts, cut = cut_texts(browser)

    assert (texts > 200, cut) == (True, [])


@pytest.mark.parametrize("width", [390, 700, 1280])
def test_a_chart_is_drawn_when_it_comes_into_view(browser, small, width):
    """As wide as its box, with whole texts, in light and dark; with its title, notes and table."""
    opened(browser, small, width=width)
    charts = CHARTS
    drawn = f"{charts}.map((box) => Boolean(box.querySelector('canvas')))"
    count = len(browser.evaluate(drawn))
    assert not browser.evaluate(drawn)[-1]
    texts, cut = cut_texts(browser)
    wide = browser.evaluate(
        f"{charts}.map((box) => [box.querySelector('canvas').offsetWidth, box.clientWidth])"
    )
    assert [pair for pair in wide if pair[0] > pair[1] + 1] == []
    assert (texts > 200, cut) == (True, [])
    picture = f"{charts}[0].querySelector('canvas').toDataURL()"
    light = browser.evaluate(picture)
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait(f"{charts}[0].dataset.drawn?.endsWith('true')")
    assert light != browser.evaluate(picture)

    assert count > 8
    title = "[...document.querySelectorAll('figure.view h3')].map((each) => each.innerText)"
    assert (
        "24 % of the critical path is polling, 20 % update_actor; <0.1 % is unattributed"
        in browser.evaluate(title)
    )
    assert not browser.messages


def test_in_the_dark_the_larger_of_two_shades_stands_out(browser, tmp_path):
    """Samples of step 1 are current, those of steps 2 and 3 one version behind; on paper those are darker."""
    out = tmp_path / "report.html"
    run = cached("sglang_separate_async_run")
    assert 0 == main(["report", str(run), "--out", str(out)])
    browser.open(out, fragment="view=staleness")
    chart = "document.querySelector('#staleness .vega')"
    pixels = f"""[0.22, 0.55, 0.88].map((part) => {{
        const canvas = {chart}.querySelector('canvas');
        const at = [Math.round(canvas.width * part), Math.round(canvas.height * 0.4), 1, 1];
        return [...canvas.getContext('2d').getImageData(...at).data].reduce((a, b) => a + b);
    }})"""
    brightness = {}
    for theme in ("false", "true"):
        if browser.evaluate(
            f"String(document.documentElement.dataset.theme === 'dark') !== '{theme}'"
        ):
            browser.evaluate("document.getElementById('theme').click()")
        browser.wait(f"{chart}.dataset.drawn?.endsWith('{theme}')")
        brightness[theme] = browser.evaluate(pixels)

    first, second, third = brightness["false"]
    assert first > second == third
    first, second, third = brightness["true"]
    assert first < second == third


def test_a_click_in_a_chart_shows_its_step(browser, small):
    opened(browser, small)
    chart = "document.querySelector('#step_durations .vega')"
    browser.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    browser.wait(f"{chart}.dataset.drawn")
    browser.settle()
    x, y, width = browser.evaluate(
        f"(() => {{const box = {chart}.querySelector('canvas').getBoundingClientRect();"
        "return [box.x, box.y, box.width]})()"
    )
    # The first of two bars, right of the axis.
    browser.click(x + 60 + (width - 70) * 0.27, y + 150)
    assert browser.evaluate("location.hash") == "#step=1"
    assert not browser.messages


def test_of_many_workers_the_last_to_end_is_first(browser, tmp_path):
    workers = {
        f"worker_{number}": [
            ended("request", 30, 1 + (5 * number) % 14, rank=number, request_id=f"q{number:02}")
        ]
        for number in range(14)
    }
    last = [ended("request", 60, 2, rank=14, request_id="last")]
    browser.open(write_report(write_lines(tmp_path / "run", **workers, worker_14=last)))
    browser.evaluate(f"{CANVAS}.focus()")
    for _ in range(15):
        browser.press("ArrowUp")

    assert text(browser, "#panel h3").startswith("last: 2.00 s")


def test_the_times_of_an_engine_end_when_its_request_does(browser, tmp_path):
    """What its server does before the scheduler's queue is not the engine's."""
    same = {"request_id": "q", "engine_request_id": "e"}
    worker = [ended("request", 10, 10, **same), ended("engine_call", 10, 10, turn=0, **same)]
    times = {"queue_s": 0.5, "prefill_s": 0.5, "decode_s": 3.0}
    engine = [ended("engine_request", 9, 8, engine_request_id="e", **times)]
    browser.open(write_report(write_lines(tmp_path / "run", worker_0=worker, engine_0=engine)))
    browser.evaluate(f"{CANVAS}.focus()")
    browser.press("ArrowDown")
    parts = browser.evaluate(
        "[...document.querySelectorAll('#panel .rows .block .block')]"
        ".map((part) => [part.style.left, part.style.width])"
    )

    assert [["50%", "5%"], ["55%", "5%"], ["60%", "30%"]] == parts


def test_enter_opens_the_first_request_that_the_search_finds(browser, small):
    """Its panel comes into view, and it is selected in the timeline and in the address."""
    browser.open(small)
    browser.evaluate("document.getElementById('search').focus()")
    browser.call("Input.insertText", text="search")
    browser.settle()
    wanted = browser.evaluate(
        "document.querySelector('#request-table tbody button').ariaLabel.match(/^Request (.*), /)[1]"
    )
    browser.press("Enter", "\r")

    assert text(browser, "#panel h3").startswith(wanted)
    assert f"request={wanted}" in browser.evaluate("location.hash")
    browser.wait(
        "((box) => box.top < innerHeight && box.bottom > 0)"
        "(document.getElementById('panel').getBoundingClientRect())"
    )
