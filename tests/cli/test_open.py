"""The open command: the report in the browser, and the timeline in a Perfetto UI."""

import argparse
import http.server
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from views.chromium import Chromium

from verl_profiler.cli import main
from verl_profiler.cli import open as open_command
from verl_profiler.errors import ReadingError
from verl_profiler.exports.hand_over import Server

SMALL = Path(__file__).parent.parent / "data" / "small_run"

# A stand-in for the Perfetto UI, which cannot be fetched here: it answers PING as that does, and
# sends what it was given to the server that it came from.
FAKE_UI = b"""<!DOCTYPE html><script>
window.addEventListener("message", (event) => {
  if (event.data === "PING") window.opener.postMessage("PONG", "*");
  if (event.data.perfetto) {
    const title = encodeURIComponent(event.data.perfetto.title);
    fetch("/given?" + title, {method: "POST", body: event.data.perfetto.buffer});
  }
});
</script>"""


class FakeUi(http.server.BaseHTTPRequestHandler):
    given = ()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(FAKE_UI)

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        FakeUi.given = [*FakeUi.given, (self.path, self.rfile.read(size))]
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def ui():
    FakeUi.given = ()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeUi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def arguments(*words):
    parser = argparse.ArgumentParser()
    open_command.add_arguments(parser)
    return parser.parse_args([*map(str, words)])


def status_of(address, host=None, method="GET"):
    request = urllib.request.Request(address, method=method, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.browser
def test_the_perfetto_ui_gets_the_very_bytes(tmp_path, ui):
    """Through a real browser, and the command is told when it has them."""
    trace = tmp_path / "timeline.pftrace"
    content = bytes(range(256)) * 5_000
    trace.write_bytes(content)
    browser = Chromium()
    try:
        with Server(trace, "my run & co", ui) as server:
            browser.call("Page.navigate", url=server.address)
            if not server.wait(5):
                # The new tab was blocked: a person presses the button.
                browser.wait("!document.getElementById('open').hidden")
                browser.call(
                    "Runtime.evaluate",
                    expression="document.getElementById('open').click()",
                    userGesture=True,
                )
            assert server.wait(20)
            deadline = time.monotonic() + 20
            while not FakeUi.given and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        browser.close()

    ((path, got),) = FakeUi.given
    assert "/given?my%20run%20%26%20co" == path
    assert content == got


def test_only_this_machine_and_who_has_the_address_get_it(tmp_path):
    """Not a guess, not another name for the loopback address, not a write."""
    trace = tmp_path / "t"
    trace.write_bytes(b"x")
    with Server(trace, "t", "https://ui.perfetto.dev") as server:
        parts = urlsplit(server.address)
        root = f"http://127.0.0.1:{parts.port}"

        assert "127.0.0.1" == parts.hostname
        assert [200] * 4 == [
            status_of(server.address + name) for name in ("", "hand_over.js", "info", "trace")
        ]
        assert [404, 404] == [status_of(root + name) for name in ("/", "/trace")]
        assert 404 == status_of(f"{server.address}trace", host=f"evil.example:{parts.port}")
        assert 404 == status_of(f"{server.address}trace", method="POST")
        assert not server.wait(0)
        assert 200 == status_of(f"{server.address}taken", method="POST")
        assert server.wait(10)
    with pytest.raises(urllib.error.URLError):
        status_of(server.address)


def test_the_command_hands_over_what_export_writes(tmp_path, capsys, monkeypatch):
    """And leaves nothing behind, in the run or in the temporary folder."""
    from verl_profiler.cli.export import write_timeline

    run = tmp_path / "my-run"
    shutil.copytree(SMALL, run, ignore=shutil.ignore_patterns(".cache"))
    before = sorted(run.rglob("*"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    got = []

    def browse(address):
        with urllib.request.urlopen(f"{address}trace", timeout=10) as answer:
            got.append(answer.read())
        assert 200 == status_of(f"{address}taken", method="POST")
        return True

    monkeypatch.setattr(open_command, "_shown", browse)
    assert 0 == open_command.run(arguments("--perfetto", run, "--no-cache"))
    write_timeline([run], tmp_path / "expected", None, cache=False)

    assert [(tmp_path / "expected").read_bytes()] == got
    assert "has loaded the timeline of my-run" in capsys.readouterr().out
    assert before == sorted(run.rglob("*"))
    assert [] == list((tmp_path / "scratch").iterdir())


def test_the_report_is_written_and_opened_again(tmp_path, capsys, monkeypatch):
    """A second time, too; where there is no browser, its path is enough."""
    run = tmp_path / "my-run"
    shutil.copytree(SMALL, run, ignore=shutil.ignore_patterns(".cache"))
    opened = []
    monkeypatch.setattr(open_command, "_shown", lambda address: opened.append(address) or True)

    assert 0 == open_command.run(arguments(run))
    assert 0 == open_command.run(arguments(run))
    assert [(run / "report.html").as_uri()] * 2 == opened
    assert "Open that file" not in capsys.readouterr().out
    monkeypatch.setattr(open_command, "_shown", lambda _: False)
    assert 0 == open_command.run(arguments(run))
    assert "Open that file in a browser" in capsys.readouterr().out

    (run / "report.html").write_text("mine")
    with pytest.raises(ReadingError, match="exists and was not replaced"):
        open_command.run(arguments(run))
    assert "mine" == (run / "report.html").read_text()


@pytest.mark.parametrize("ui", ["ui.perfetto.dev", "file:///etc/passwd", ""])
def test_what_is_no_address_is_refused(ui, tmp_path):
    """Before anything is read."""
    with pytest.raises(ReadingError, match="not a web address"):
        open_command.run(arguments("--perfetto", tmp_path / "none", "--ui", ui))


def test_a_terminal_without_a_display_starts_no_browser(monkeypatch):
    """Python would start a text browser there, which takes the terminal."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser was started"))
    monkeypatch.setattr("sys.platform", "linux")

    assert open_command._shown("http://127.0.0.1/") is False


def test_an_unknown_command_gets_a_suggestion(capsys):
    """With the list of all."""
    assert 2 == main(["sumary", "logs/my-run"])
    first, second = capsys.readouterr().err.splitlines()
    assert "there is no command 'sumary'; did you mean summary?" in first
    assert second.startswith("Commands: summary, why, report, open")
