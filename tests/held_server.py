"""A server in between that stops in the middle of what a client sends, as a slow or lost network does."""

import contextlib
import socket
import threading

__all__ = ["HeldServer"]


class HeldServer:
    """Passes bytes on to a server on loopback, until `hold`.

    Args:
        port: The server's.

    Attributes:
        port: Where this one listens.
        held: Set once a client has sent something that was not passed on.
    """

    def __init__(self, port):
        self._to = port
        self._limit = None
        self._free = threading.Event()
        self.held = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def hold(self, after):
        """Stop any connection that sends more than so many bytes from now on."""
        self._limit = after

    def close(self):
        """Stop listening, and drop what was held."""
        self._free.set()
        self._listening.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, target, sent):
        passed, limit = 0, None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if sent and self._limit is not None:
                    if limit is None:
                        passed, limit = 0, self._limit
                    passed += len(data)
                    if passed > limit:
                        target.sendall(data[: max(len(data) - passed + limit, 0)])
                        self.held.set()
                        self._free.wait()
                        break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
