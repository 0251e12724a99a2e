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
        self._threads = []
        self._connections = [self._listening]
        self._start(self._serve)

    def hold(self, after):
        """Stop any connection that sends more than so many bytes from now on."""
        self._limit = after

    def close(self):
        """Stop listening, drop what was held, and leave no thread behind."""
        self._free.set()
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in list(self._threads):
            thread.join(10)

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._connections += (client, server)
                for ends in ((client, server, True), (server, client, False)):
                    self._start(self._pass, *ends)

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
