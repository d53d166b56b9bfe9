"""A TCP proxy before Kafka that swallows answers to a producer: the broker has the messages, the producer does not know it, and retries."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from kit.kafka_server import Broker

PRODUCE = b"\0\0"
"""The number of the request, in bytes 4 and 5 of its frame."""

_PIECE = 65_536


class Proxy:
    """Listens where the broker sends the clients of its third port. Each time it is armed, the next answer to a producer is lost."""

    def __init__(self, broker: Broker) -> None:
        self._behind, self.servers = broker.behind_port, f"127.0.0.1:{broker.proxy_port}"
        self._listener = socket.create_server(("127.0.0.1", broker.proxy_port))
        self._armed, self.lost = 0, 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, times: int = 1) -> None:
        """Lose so many more answers."""
        with self._lock:
            self._armed += times

    def close(self) -> None:
        """No more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._behind)) as server:
            threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
            while frame := _frame(client):
                if frame[4:6] == PRODUCE and self._take():
                    client.shutdown(socket.SHUT_RDWR)
                    server.sendall(frame)
                    server.settimeout(10)
                    server.recv(1, socket.MSG_PEEK)  # it is written; nobody hears of it
                    return
                server.sendall(frame)

    def _take(self) -> bool:
        with self._lock:
            if not self._armed:
                return False
            self._armed, self.lost = self._armed - 1, self.lost + 1
            return True

    @staticmethod
    def _answers(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := server.recv(_PIECE):
                client.sendall(piece)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _frame(source: socket.socket) -> bytes:
    """The next request, whole; empty at the end."""
    head = _exactly(source, 4)
    return head + _exactly(source, int.from_bytes(head)) if head else b""


def _exactly(source: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        piece = source.recv(min(left, _PIECE))
        if not piece:
            return b""
        parts.append(piece)
        left -= len(piece)
    return b"".join(parts)


@contextlib.contextmanager
def proxied(broker: Broker) -> Iterator[Proxy]:
    """A proxy for the length of the block."""
    proxy = Proxy(broker)
    try:
        yield proxy
    finally:
        proxy.close()
