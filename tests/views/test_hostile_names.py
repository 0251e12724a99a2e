"""The page, pictures and timelines of a run whose every name is hostile: they parse, nothing runs."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from cached_runs import SMALL
from hostile_names import hostile_run
from views.opened_report import opened, place

from verl_profiler.cli import main
from verl_profiler.cli.report import write_report
from verl_profiler.views.questions import VIEWS

# What a page needs from Unicode to be read as it is written, and XML 1.0 allows.
NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hostile_run(tmp_path_factory.mktemp("hostile"), start="r")


@pytest.fixture(scope="module")
def reports(run, tmp_path_factory):
    """The report of the hostile run, and of the same run with harmless names."""
    folder = tmp_path_factory.mktemp("reports")
    return [
        write_report(run, folder / "hostile.html"),
        write_report(SMALL, folder / "harmless.html"),
    ]


class Elements(HTMLParser):
    """Tags with their attributes' names, in the order of the page; what scripts hold apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, *sorted(name for name, _ in attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        self.open = self.open[-1:]


def test_names_add_no_element_and_no_attribute_to_the_page(reports):
    """They are in JSON and in text; the page of the same run with other names has the same tags."""
    hostile, harmless = (Elements(path.read_text(encoding="utf-8")) for path in reports)
    kinds = [{each for each in page.tags if each[0] != "/"} for page in (hostile, harmless)]

    assert kinds[0] == kinds[1]
    counts = [
        {
            tag: page.tags.count(tag)
            for tag in page.tags
            if tag[0] in ("script", "style", "meta", "img")
        }
        for page in (hostile, harmless)
    ]
    assert counts[0] == counts[1]
    assert "owned" in reports[0].read_text(encoding="utf-8")


@pytest.mark.browser
def test_nothing_of_a_name_runs_in_a_browser(browser, reports):
    """No script, request, or exception; every section is drawn, and what cannot be seen is escaped."""
    shown, requested = [], []
    for path in reports:
        opened(browser, path)
        browser.evaluate("document.querySelectorAll('#request-table tbody tr')[1].click()")
        left, top, width, _ = place(browser, ".lane-canvas")
        browser.mouse("mouseMoved", left + width / 2, top + 20)
        browser.settle()
        assert browser.evaluate("document.querySelectorAll('section').length") > 5
        shown.append(browser.evaluate("document.getElementById('own_spans') !== null"))
        requested += [url for url in browser.requests if not url.startswith("file:")]
        assert [] == browser.messages
        words = browser.evaluate("document.querySelector('main').innerText")
        assert not set("\x1b\x9b\u202e\u2066\u2028") & set(words)
        if path == reports[0]:
            assert "\\u202e" in words
            assert "<script>alert(1)</script>" in words

    assert [] == requested
    # Events with other names than the profiler's are spans of a user, which have a section.
    assert [True, False] == shown
    # Data, Vega as text, the script of the page, and Vega once it is loaded.
    assert browser.evaluate("document.scripts.length") <= 4
    assert 0 == browser.evaluate("document.querySelectorAll('img, b, body svg[onload]').length")


def test_every_picture_is_xml(run, tmp_path, capsys):
    """SVG has no characters for what a terminal obeys; plots that have nothing to draw say so."""
    out = tmp_path / "plots"

    assert 0 == main(["plot", "all", str(run), "--format", "svg", "--out", str(out)])
    pictures = sorted(out.iterdir())
    assert 15 == len(pictures)
    (line,) = (x for x in capsys.readouterr().err.splitlines() if "nothing to draw for " in x)
    absent = line.partition(" for ")[2].partition(";")[0].split(", ")
    assert set(VIEWS) == {picture.stem for picture in pictures} | set(absent)
    named = 0
    for path in pictures:
        text = path.read_text(encoding="utf-8")
        assert not NO_XML.search(text), path.name
        tree = ET.fromstring(text)
        assert [] == [each for each in tree.iter() if each.tag.endswith("script")]
        named += "x1b" in text
    assert named > 5
