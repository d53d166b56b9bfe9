"""A TCP proxy before PostgreSQL that swallows the server's answer to COMMIT: the commit happens, the client never hears of it.

It can also fall silent, or refuse connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

COMMIT_MESSAGE = b"Q\0\0\0\x0bcommit\0"
_PIECE = 65_536


class Proxy:
    """Listens on `port`; forwards to the server until `cut_at` bytes pass from the client, then breaks the connection."""

    def __init__(self, server_port: int) -> None:
        self._server_port, self._listener = server_port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.armed = False
        self.trigger = COMMIT_MESSAGE  # what it cuts at, once, when armed
        self.skip = 0  # how many pieces with the trigger pass before that
        self.deliver = True  # whether the COMMIT itself still reaches the server
        self.hold = False  # whether the server goes on believing in the client, as behind a network that just went dark
        self._held: list[socket.socket] = []
        self.cut = threading.Event()
        self.refuse = False  # whether later connections are refused
        self._passing = threading.Event()
        self._passing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more connections."""
        for server in self._held:
            server.close()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """For the block nothing passes and no connection ends: what a client sees of a server that was stopped, or of a dark network."""
        self._passing.clear()
        try:
            yield
        finally:
            self._passing.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self.refuse:
                        raise ConnectionRefusedError
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except ConnectionError:
                    client.close()
                    continue
                cutting, answered = threading.Event(), threading.Event()
                for source, target, watch in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=(source, target, watch, cutting, answered), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, watch: bool, cutting: threading.Event, answered: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                self._passing.wait()
                if not watch and cutting.is_set():
                    answered.set()
                if watch and self._is_due(piece):
                    cutting.set()
                    self._cut(source, target, piece, answered)
                    if self.hold:
                        self._held.append(target)
                        return
                    break
                target.sendall(piece)
        if not watch:
            answered.set()  # there will be none
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # close alone would wait for the thread that reads from it
            end.close()

    def _is_due(self, piece: bytes) -> bool:
        if not self.armed or self.trigger not in piece:
            return False
        self.skip -= 1
        self.armed = self.skip >= 0
        return not self.armed

    def _cut(self, client: socket.socket, server: socket.socket, piece: bytes, answered: threading.Event) -> None:
        client.shutdown(socket.SHUT_RDWR)
        if self.deliver:
            server.sendall(piece)
            answered.wait(10)  # read by the thread that reads from the server, and nobody hears of it: the commit is done
        self.cut.set()


@contextlib.contextmanager
def proxied(server_port: int) -> Iterator[Proxy]:
    """A proxy for the length of the block."""
    proxy = Proxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition; fail after that many seconds."""
    pause, waited = threading.Event(), 0.0
    while not condition():
        assert waited < seconds, "it never happened"
        pause.wait(0.02)
        waited += 0.02
