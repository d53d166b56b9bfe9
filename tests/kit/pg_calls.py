"""A TCP proxy before PostgreSQL that counts what is asked of the server and makes one of these calls fail, in one of three ways.

A call is what the client sends before it waits for an answer: the start of a session, a statement, the first rows of a COPY, its end.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Literal

Way = Literal["cut", "lost", "error"]
"""The connection breaks before the call; after it, so that the answer is lost; or the server answers that its disk is full."""

ANSWER_SECONDS = 20.0
_FULL = b"do $$ begin raise exception 'no space left on device' using errcode = '53100'; end $$\0"
_DONE = b"ZGE"
"""Ready for the next call; ready for rows; an error."""


class Calls:
    """Listens on `port`. The call number `at` of all connections together, from 1, fails in this `way`; the others pass."""

    def __init__(self, server_port: int) -> None:
        self._server_port, self._listener = server_port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.seen, self.at, self.way, self.failed = 0, 0, "cut", ""
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, at: int, way: Way) -> None:
        """Count anew."""
        self.seen, self.at, self.way, self.failed = 0, at, way, ""

    def close(self) -> None:
        """No more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def is_due(self, call: bytes) -> bool:
        """Count a call; whether this is the one."""
        with self._lock:
            self.seen += 1
            due = self.seen == self.at
            if due:
                self.failed = call[:60].decode("ascii", "replace")
            return due

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each call waits for the one before to be acknowledged
                threading.Thread(target=_Session(self, client, server).run, daemon=True).start()


class _Session:
    """One connection."""

    def __init__(self, calls: Calls, client: socket.socket, server: socket.socket) -> None:
        self._calls, self._client, self._server = calls, client, server
        self._answered, self._deaf = threading.Event(), False
        self._copying = ""  # "simple" or "extended", between the first rows of a COPY and its end

    def run(self) -> None:
        """Until one side closes, or the call that fails."""
        threading.Thread(target=self._answers, daemon=True).start()
        with contextlib.suppress(OSError, EOFError):
            self._requests()
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _requests(self) -> None:
        start = _exactly(self._client, 4)
        call = start + _exactly(self._client, struct.unpack("!i", start)[0] - 4)
        while True:
            if self._calls.is_due(call):
                if self._fail(call):
                    return
            else:
                self._server.sendall(call)
            call = self._next()

    def _next(self) -> bytes:
        """Messages up to the next one that the server answers."""
        call, simple = b"", True
        while True:
            kind, message = _message(self._client)
            call += message
            simple = simple and kind != b"P"
            if kind == b"d" and not self._copying:
                self._copying = "simple" if self._simple_copy else "extended"
                return call
            if kind in b"QS" or (kind == b"c" and self._copying == "simple"):
                self._copying, self._simple_copy = "", kind == b"Q"
                return call

    _simple_copy = False

    def _fail(self, call: bytes) -> bool:
        """Whether that ended the connection."""
        way = self._calls.way
        if way == "error" and call[0] != 0:
            self._server.sendall(self._refused(call))
            return False
        if way == "lost":
            self._deaf = True
            self._answered.clear()
            self._server.sendall(call)
            if call[:1] != b"d":
                self._answered.wait(ANSWER_SECONDS)
        return True

    def _refused(self, call: bytes) -> bytes:
        """What makes the server answer with an error where it would have answered this call."""
        if call[:1] in b"dc":
            copy_fail = b"f" + struct.pack("!i", 4 + 5) + b"full\0"
            return copy_fail + (call[-5:] if call.endswith(b"S\0\0\0\4") else b"")
        return b"Q" + struct.pack("!i", 4 + len(_FULL)) + _FULL

    def _answers(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                kind, message = _message(self._server)
                if not self._deaf:
                    self._client.sendall(message)
                if kind in _DONE:
                    self._answered.set()
        self._answered.set()
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)


def _message(source: socket.socket) -> tuple[bytes, bytes]:
    head = _exactly(source, 5)
    return head[:1], head + _exactly(source, struct.unpack("!i", head[1:])[0] - 4)


def _exactly(source: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = source.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found


@contextlib.contextmanager
def counted(server_port: int) -> Iterator[Calls]:
    """A proxy for the length of the block."""
    calls = Calls(server_port)
    try:
        yield calls
    finally:
        calls.close()
