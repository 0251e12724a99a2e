"""The page, pictures and timelines of a run whose every name is hostile: they parse, nothing runs."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from cached_runs import SMALL
from hostile_names import hostile_run
from views.chromium import Chromium

from verl_profiler.cli import main
from verl_profiler.cli.report import write_report

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
def test_nothing_of_a_name_runs_in_a_browser(reports):
    """No script, request, or exception; every section is drawn."""
    browser = Chromium()
    try:
        shown = []
        for path in reports:
            browser.open(path)
            shown.append(browser.evaluate("document.querySelectorAll('section').length"))
        scripts = browser.evaluate("document.scripts.length")
        urls = [url for url in browser.requests if not url.startswith("file:")]
    finally:
        browser.close()

    assert [] == browser.messages
    assert [] == urls
    # Events with other names than the profiler's are spans of a user, which have a section.
    assert shown[0] == shown[1] + 1 > 5
    assert scripts <= 3


def test_every_picture_is_xml(run, tmp_path):
    """SVG has no characters for what a terminal obeys."""
    out = tmp_path / "plots"

    assert 0 == main(["plot", "all", str(run), "--format", "svg", "--out", str(out)])
    pictures = sorted(out.iterdir())
    assert len(pictures) > 20
    named = 0
    for path in pictures:
        text = path.read_text(encoding="utf-8")
        assert not NO_XML.search(text), path.name
        tree = ET.fromstring(text)
        assert [] == [each for each in tree.iter() if each.tag.endswith("script")]
        named += "x1b" in text
    assert named > 5
