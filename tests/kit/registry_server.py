"""A schema registry of the tests' own, in a thread: Confluent's interface and Azure's on one port, wrong on command.

The shapes of answers are those of Confluent's documentation and of the recordings that azure-schemaregistry ships as tests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AVRO = "application/json; serialization=Avro"
OTHERS = ("application/json; serialization=Json", "text/plain; charset=utf-8", "text/vnd.ms.protobuf")
"""Content types of Azure's for schemas of other kinds: JSON Schema, custom, Protobuf."""


class RegistryServer:
    """Subjects, ids and versions. `status` or `raw` is answered to everything while it is set; `login` is asked of everybody."""

    def __init__(self) -> None:
        self.ids: dict[str, dict[str, Any]] = {}
        self.subjects: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.status: int | None = None
        self.raw: bytes | None = None
        """Everything that is sent, headers included, before the connection is closed."""
        self.login: str | None = None
        self.port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def register(self, subject: str, schema: Any, **more: Any) -> int:
        """A new version of a subject of Confluent's; answers its id."""
        ident = len(self.ids) + 1
        self._add(subject, str(ident), {"schema": schema if isinstance(schema, str) else json.dumps(schema), **more})
        return ident

    def register_azure(self, subject: str, schema: Any, kind: str = AVRO) -> str:
        """A new version of group/name; answers its id."""
        ident = f"{len(self.ids) + 1:032x}"
        self._add(subject, ident, {"schema": json.dumps(schema), "kind": kind})
        return ident

    def _add(self, subject: str, ident: str, entry: dict[str, Any]) -> None:
        self.ids[ident] = entry
        self.subjects.setdefault(subject, []).append(ident)

    def start(self) -> None:
        """Answer, on the same port as before."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                if server.raw is not None:
                    self.wfile.write(server.raw)
                    return
                status, kind, body = server.answer(self.path.split("?")[0], self.headers.get("Authorization"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if kind in (AVRO, *OTHERS):
                    self.send_header("Schema-Id", self.path.partition("?")[0].rpartition("/")[2])
                if 300 <= status < 400:
                    self.send_header("Location", server.url + "/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str, login: str | None) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        if self.status is not None:
            return self.status, "text/html", b"<html>no</html>"
        if self.login is not None and login != self.login:
            return 401, "application/json", b'{"error_code":401,"message":"Unauthorized"}'
        parts = path.strip("/").split("/")
        return self._azure(parts) if parts[0].startswith("$") else self._confluent(parts)

    def _confluent(self, parts: list[str]) -> tuple[int, str, bytes]:
        match parts:
            case ["schemas", "ids", ident] if ident in self.ids:
                return _json(200, self.ids[ident])
            case ["schemas", "ids", _]:
                return _json(404, {"error_code": 40403, "message": "Schema not found"})
            case ["subjects", subject, "versions", version] if subject in self.subjects:
                idents = self.subjects[subject]
                number = len(idents) if version == "latest" else int(version)
                return _json(200, {"subject": subject, "version": number, "id": 0, **self.ids[idents[number - 1]]})
            case ["subjects", _, "versions", _]:
                return _json(404, {"error_code": 40401, "message": "Subject not found."})
        return _json(404, {"error_code": 404, "message": "HTTP 404 Not Found"})

    def _azure(self, parts: list[str]) -> tuple[int, str, bytes]:
        match parts:
            case ["$schemaGroups", "$schemas", ident] if ident in self.ids:
                return 200, self.ids[ident]["kind"], self.ids[ident]["schema"].encode()
            case ["$schemaGroups", group, "schemas", name, "versions", *rest] if f"{group}/{name}" in self.subjects:
                idents = self.subjects[f"{group}/{name}"]
                if not rest:
                    return _json(200, {"Value": list(range(1, len(idents) + 1))})
                entry = self.ids[idents[int(rest[0]) - 1]]
                return 200, entry["kind"], entry["schema"].encode()
        return _json(404, {"error": {"code": "ItemNotFound", "message": "Schema does not exist."}})


def _json(status: int, told: Any) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(told).encode()


@contextmanager
def running_registry() -> Iterator[RegistryServer]:
    """An empty registry."""
    server = RegistryServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
