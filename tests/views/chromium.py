"""A headless Chromium, driven over its debugging pipe: pages as a reader of a report sees them."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# Chromium wants its two pipes as descriptors 3 and 4.
_EXEC = (
    "import os, sys; r, w = (os.dup2(int(n), 100 + i) for i, n in enumerate(sys.argv[1:3])); "
    "os.dup2(r, 3); os.dup2(w, 4); os.close(r); os.close(w); os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path is not None:
            return path
    return None


class Chromium:
    """One browser with one page.  Without a Chromium, the test is skipped; in CI it fails.

    Attributes:
        requests: URLs that the page asked for.
        messages: What it wrote to the console, exceptions and violated policies included.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        path = find()
        if path is None and os.environ.get("CI"):
            pytest.fail(
                "no Chromium is installed, and with CI set the browser tests must run.\n"
                "Install Debian's package chromium, as .ci/run does"
            )
        if path is None:
            pytest.skip("no Chromium is installed")
        self.requests: list[str] = []
        self.messages: list[str] = []
        self._timeout_s = timeout_s
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _EXEC, str(to_read), str(from_write), path, *FLAGS),
                *("--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"),
            ],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        self._write_fd, self._read_fd = to_write, from_read
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol; return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_s
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, width: int = 1280, height: int = 900, fragment: str = "") -> None:
        """Open a file and wait until the report is drawn."""
        address = path.resolve().as_uri() + (f"#{fragment}" if fragment else "")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.messages.clear()
        self.call("Page.navigate", url="about:blank")
        self.wait("document.URL === 'about:blank'")
        self.requests.clear()
        self.call("Page.navigate", url=address)
        self.wait(
            f"document.URL.split('#')[0] === {json.dumps(path.resolve().as_uri())} "
            "&& document.documentElement && document.documentElement.dataset.ready === 'true'"
        )
        self.settle()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        return self._evaluate(expression, awaited=True)

    def _evaluate(self, expression: str, awaited: bool) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=awaited
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def reload(self) -> None:
        """Reload the report and wait until it is drawn again."""
        self.evaluate("window.loadedBefore = true")
        self.call("Page.reload")
        # Until the new document is there, the old one answers, which is complete as well.
        self.wait("!window.loadedBefore && document.documentElement?.dataset.ready === 'true'")
        self.settle()

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + self._timeout_s
        # A promise that is awaited while the page is replaced is an error of the protocol.
        while not self._evaluate(f"Boolean({expression})", awaited=False):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.messages}"

    def settle(self) -> None:
        """Wait until what was changed is drawn."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "requestAnimationFrame(done))))"
        )

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            pressed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **pressed)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event at a point of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        answer = self.call("Page.captureScreenshot", format="png", **more)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """Print the page."""
        answer = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser and remove its profile."""
        for descriptor in (self._write_fd, self._read_fd):
            os.close(descriptor)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_fd], [], [], deadline - time.monotonic())
            assert ready, "Chromium did not answer"
            received = os.read(self._read_fd, 1 << 20)
            assert received, "Chromium has ended"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            values = [
                str(each.get("value", each.get("description"))) for each in parameters["args"]
            ]
            self.messages.append(f"{parameters['type']}: {' '.join(values)}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.messages.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
