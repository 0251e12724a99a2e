"""Hand a trace to the Perfetto UI: a page on the loopback address posts it to the UI's window.

The protocol is Perfetto's (https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui): the
page opens the UI, sends it PING until PONG comes, then posts the trace's bytes.
"""

from __future__ import annotations

import http.server
import json
import secrets
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Server"]

_PAGE = Path(__file__).parents[1] / "render" / "page"
_PATIENCE_S = 600.0


class Server:
    """Serves one trace to this machine's browser, under an address that cannot be guessed.

    Args:
        trace: The file to hand over.
        title: What the UI calls it.
        ui: The Perfetto UI's address.
        port: The port; 0 for any that is free.

    Raises:
        ReadingError: The port cannot be used.
    """

    def __init__(self, trace: Path, title: str, ui: str, port: int = 0) -> None:
        self._taken = threading.Event()
        secret = secrets.token_urlsafe(16)
        info = json.dumps({"ui": ui, "title": title}).encode()
        taken = self._taken

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self._is_meant():
                    self.send_error(404)
                elif self.path == f"/{secret}/":
                    page = (_PAGE / "hand_over.html").read_bytes()
                    self._answer("text/html; charset=utf-8", page)
                elif self.path == f"/{secret}/hand_over.js":
                    script = (_PAGE / "hand_over.js").read_bytes()
                    self._answer("text/javascript; charset=utf-8", script)
                elif self.path == f"/{secret}/info":
                    self._answer("application/json", info)
                elif self.path == f"/{secret}/trace":
                    self._head("application/octet-stream", trace.stat().st_size)
                    with trace.open("rb") as file:
                        shutil.copyfileobj(file, self.wfile, 1 << 20)
                else:
                    self.send_error(404)

            def do_POST(self) -> None:
                if self._is_meant() and self.path == f"/{secret}/taken":
                    self._answer("text/plain", b"")
                    taken.set()
                else:
                    self.send_error(404)

            def _is_meant(self) -> bool:
                # A name that someone else resolves to the loopback address is none of ours.
                host = (self.headers.get("Host") or "").rpartition(":")[0]
                return host in ("127.0.0.1", "localhost")

            def _answer(self, kind: str, content: bytes) -> None:
                self._head(kind, len(content))
                self.wfile.write(content)

            def _head(self, kind: str, size: int) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(size))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Stay quiet: the terminal is the command's."""

        try:
            self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ReadingError(
                f"port {port} cannot be used: {error}.\nOmit --port to use a free one",
                "port-in-use",
            ) from error
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}/{secret}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until the UI has the trace; return False if it has not after `patience_s`."""
        return self._taken.wait(patience_s)
