"""A proxy before object storage: it notes each request, takes its time, and breaks what it is told to break.

Plain functions, no pytest: the crash loops and the benchmarks use it, too.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

BEFORE, LOST, HANG, BUSY, SLOW_DOWN, EXPIRED, PLAIN = "before", "lost", "hang", "503", "429", "expired", "plain"
"""What may become of a request: it never arrives; it is carried out and its answer is lost; it is carried out and answered much later;
503 or 429; 403, as for credentials that expired; carried out without its condition."""

STATUS = {BUSY: 503, SLOW_DOWN: 429, EXPIRED: 403}

Rule = Callable[[str, str], str]
"""From the method and the path of a request to one of these ways, or "" for a request that nothing happens to."""


@dataclass(frozen=True)
class Request:
    """One request, by the proxy's clock in seconds."""

    method: str
    path: str
    began: float
    ended: float
    way: str


class HttpProxy:
    """What went through, and what is to be broken."""

    def __init__(self, upstream: str, delay: float, hang: float) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.delay, self.hang = delay, hang
        self.rule: Rule = lambda method, path: ""
        self.requests: list[Request] = []
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.proxy = self
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def taken(self) -> list[Request]:
        """The requests since the last call."""
        taken, self.requests = self.requests, []
        return taken


@contextlib.contextmanager
def proxied(upstream: str, *, delay: float = 0.0, hang: float = 60.0) -> Iterator[HttpProxy]:
    """A proxy before the server at this address.

    Args:
        delay: seconds that a request takes to the server, and its answer back.
        hang: seconds after which a request that hangs is cut.
    """
    proxy = HttpProxy(upstream, delay, hang)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()


def one_after_another(requests: Sequence[Request]) -> int:
    """The length of the longest chain of requests each of which began after the one before it had ended."""
    lengths: list[int] = []
    ordered = sorted(requests, key=lambda r: r.began)
    for number, request in enumerate(ordered):
        before = (lengths[k] for k in range(number) if ordered[k].ended <= request.began)
        lengths.append(1 + max(before, default=0))
    return max(lengths, default=0)


class Counted:
    """A rule that breaks the Nth request that it is asked about, and `times - 1` behind it."""

    def __init__(self, way: str, nth: int, times: int = 1, only: Callable[[str, str], bool] = lambda method, path: True) -> None:
        self._way, self._range, self._only = way, range(nth, nth + times), only
        self._seen, self._lock = 0, threading.Lock()

    @property
    def met(self) -> bool:
        """Whether it has broken one."""
        return self._seen > self._range.start

    def __call__(self, method: str, path: str) -> str:
        if not self._only(method, path):
            return ""
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
        return self._way if number in self._range else ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: HttpProxy


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, and one of ours to the server."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server_side = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=120)

    def finish(self) -> None:
        self.server_side.close()
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _pass(self) -> None:
        began, way = time.monotonic(), self.server.proxy.rule(self.command, self.path)
        body = self._body()
        try:
            self._answer(way, body)
        finally:
            self.server.proxy.requests.append(Request(self.command, self.path, began, time.monotonic(), way))

    def _answer(self, way: str, body: bytes) -> None:
        time.sleep(self.server.proxy.delay)
        if way in STATUS:
            return self._send(STATUS[way], [], _error(way))
        if way == BEFORE:
            return self._cut()
        status, headers, answer = self._ask(body, plain=way == PLAIN)
        if way == HANG:
            time.sleep(self.server.proxy.hang)
        if way in (LOST, HANG):
            return self._cut()
        time.sleep(self.server.proxy.delay)
        return self._send(status, headers, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            raise NotImplementedError("chunked requests")
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _ask(self, body: bytes, *, plain: bool) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {k: v for k, v in self.headers.items() if not (plain and k.lower() == "if-none-match")}
        self.server_side.request(self.command, self.path, body or None, headers)
        answer = self.server_side.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        skipped = {"transfer-encoding", "connection"} | ({"content-length"} if self.command != "HEAD" else set())
        for name, value in headers:
            if name.lower() not in skipped:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _error(way: str) -> bytes:
    code = {BUSY: "ServiceUnavailable", SLOW_DOWN: "SlowDown", EXPIRED: "ExpiredToken"}[way]
    return f"<?xml version='1.0' encoding='utf-8'?><Error><Code>{code}</Code><Message>told by a test</Message></Error>".encode()
