"""The tests' side: start the double in a process of its own, tell it what to do, know how to connect to it."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kit.eventhubs.service import KEY, KEY_NAME, TOKEN
from kit.paths import environment

START_SECONDS = 30.0
ORDER_SECONDS = 180.0


class Double:
    """A running double. Orders that are not spelled out here (`detach`, `reset`, `steal`, ...) are those of server.Orders."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kit.eventhubs"]
        self.process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.port = ports["amqp"]
        self._lock = threading.Lock()
        self._socket = socket.create_connection(("127.0.0.1", ports["orders"]), ORDER_SECONDS)
        self._lines = self._socket.makefile("rwb")

    @property
    def host(self) -> str:
        """Host and port, as in the connection string."""
        return f"127.0.0.1:{self.port}"

    @property
    def connection_string(self) -> str:
        """What `from_connection_string` takes; the last part turns TLS off."""
        return f"Endpoint=sb://{self.host};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY};UseDevelopmentEmulator=true"

    @property
    def token(self) -> str:
        """The one bearer token it knows."""
        return TOKEN

    def order(self, do: str, **arguments: Any) -> Any:
        """Raises RuntimeError with what the double says."""
        with self._lock:
            self._lines.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._lines.flush()
            answer = json.loads(self._lines.readline() or '{"error": "the double is gone"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def create(self, hub: str, partitions: int = 1, groups: Sequence[str] = ()) -> int:
        """A new hub; gives its created-at in milliseconds."""
        return int(self.order("create", hub=hub, partitions=partitions, groups=list(groups)))

    def fill(self, hub: str, partition: int, count: int, size: int = 0, ids: bool = False, enqueued: int | None = None) -> int:
        """Events with the body {"n": sequence number}; gives the next sequence number."""
        return int(self.order("fill", hub=hub, partition=partition, count=count, size=size, ids=ids, enqueued=enqueued))

    def put(self, hub: str, partition: int, bodies: Sequence[bytes], properties: dict[str, Any] | None = None) -> int:
        """Events with these bodies; gives the next sequence number."""
        encoded = [base64.b64encode(body).decode() for body in bodies]
        return int(self.order("put", hub=hub, partition=partition, bodies=encoded, properties=properties))

    def kept(self, hub: str, partitions: int) -> list[list[dict[str, Any]]]:
        """Of each partition what it holds: `id`, `key`, `body` (bytes) and `properties` of each event."""
        found = [self.order("kept", hub=hub, partition=number) for number in range(partitions)]
        return [[{**event, "body": base64.b64decode(event["body"])} for event in events] for events in found]

    def stats(self) -> dict[str, Any]:
        """Counts since the start."""
        return dict(self.order("stats"))

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError, ValueError):
            self._lines.close()
            self._socket.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.terminate()
        self.process.wait(START_SECONDS)


@contextlib.contextmanager
def running_double() -> Iterator[Double]:
    """A double for the length of the block."""
    double = Double()
    try:
        yield double
    finally:
        double.stop()
