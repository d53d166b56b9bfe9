"""The process: one port for AMQP, one for orders of tests (a JSON document per line and direction)."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

from kit.eventhubs.connection import Connection
from kit.eventhubs.hub import Hub, Partition, now
from kit.eventhubs.messages import ANNOTATIONS, APPLICATION, DATA, PROPERTIES, read, section
from kit.eventhubs.service import Service


class Orders:
    """What tests may order; each public method is an order."""

    def __init__(self, service: Service, end: Callable[[], None]) -> None:
        self._service, self._end = service, end
        self._connections: set[Connection] = set()

    def replace(self, hub: str, more: int) -> int:
        """Another hub of that name with events just like those of the old one, and more; readers see a broken connection, and no hint.

        Gives its created-at (ms).
        """
        self.reset(hub)
        logs = [dataclasses.replace(log, readers=[]) for log in self._partitions(hub, None)]
        for log in self._partitions(hub, None):
            log.readers = []
        created = self.create(hub, len(logs))
        self._service.hub(hub).partitions[:] = logs
        for number in range(len(logs)):
            self.fill(hub, number, more)
        return created

    def create(self, hub: str, partitions: int = 1, groups: list[str] | None = None) -> int:
        """A new, empty hub; one of that name goes, with its readers, as when it is deleted. Gives its created-at (ms)."""
        old = self._service.hubs.get(hub.lower())
        made = Hub.new(hub, partitions, groups or [])
        if old is not None:
            made.created = max(made.created, old.created + 1_000)
            for link in list(old.readers()):
                link.end("amqp:not-found", f"The messaging entity '{hub}' could not be found.")
        self._service.hubs[hub.lower()] = made
        return made.created

    def grow(self, hub: str, partitions: int) -> None:
        """More partitions."""
        here = self._service.hub(hub).partitions
        here += [Partition() for _ in range(partitions - len(here))]

    def fill(self, hub: str, partition: int, count: int, size: int = 0, ids: bool = False, enqueued: int | None = None) -> int:
        """Events made here: body {"n": sequence number}, padded to `size` bytes. Gives the next sequence number."""
        log = self._partition(hub, partition)
        for number in range(log.next, log.next + count):
            properties = section(PROPERTIES, [f"{partition}-{number}", *[None] * 12]) if ids else b""
            log.append(properties + section(DATA, f'{{"n": {number}}}'.encode().ljust(size)), enqueued=enqueued)
        self._wake(log)
        return log.next

    def put(self, hub: str, partition: int, bodies: list[str], properties: dict[str, Any] | None = None) -> int:
        """Events with these bodies (base64) and properties. Gives the next sequence number."""
        log = self._partition(hub, partition)
        head = section(APPLICATION, properties) if properties else b""
        for body in bodies:
            log.append(head + section(DATA, base64.b64decode(body)))
        self._wake(log)
        return log.next

    def expire(self, hub: str, partition: int, before: int) -> None:
        """Retention takes everything below this sequence number."""
        self._partition(hub, partition).expire(before)

    def hole(self, hub: str, partition: int, first: int, last: int) -> None:
        """These events are never handed out, as after compaction."""
        log = self._partition(hub, partition)
        for number in range(first, last + 1):
            log.events[number - log.first] = None

    def detach(self, hub: str, partition: int | None = None, condition: str = "amqp:link:detach-forced") -> int:
        """End the readers' links; their connections stay. Gives how many."""
        return self._each_reader(hub, partition, lambda link: link.end(condition, "The link is closed by the service."))

    def reset(self, hub: str, partition: int | None = None, after: int | None = None) -> int:
        """Break the readers' connections: at once, or inside the transfer that comes after so many deliveries."""
        if after is None:
            return self._each_reader(hub, partition, lambda link: link.connection.break_off())
        for log in self._partitions(hub, partition):
            self._service.faults.resets[id(log)] = after
        return 0

    def again(self, hub: str, partition: int, count: int) -> None:
        """After its next deliveries the reader gets the last `count` events a second time."""
        self._service.faults.again[id(self._partition(hub, partition))] = count

    def steal(self, hub: str, partition: int, level: int, group: str = "$default") -> int:
        """A receiver of this owner level comes and stays (`release` ends it). Gives how many readers it ended."""
        log = self._partition(hub, partition)
        log.taken[group.lower()] = level
        links = [link for link in log.readers if link.group == group.lower()]
        for link in links:
            self._service.steal(link, level)
        return len(links)

    def release(self, hub: str, partition: int, group: str = "$default") -> None:
        """The receiver that `steal` made is gone."""
        self._partition(hub, partition).taken.pop(group.lower(), None)

    def throttle(self, what: str, count: int) -> None:
        """The next `count` of "send", "receive" or "manage" are refused as the service does when it is busy."""
        self._service.faults.throttle[what] = count

    def lose_answers(self, count: int) -> None:
        """The next sends are kept, and the connection breaks before the client is told: it will send them again."""
        self._service.faults.lost_answers = count

    def drop_sends(self, count: int) -> None:
        """The next sends are not kept, and the connection breaks."""
        self._service.faults.dropped_sends = count

    def refuse(self, text: str) -> None:
        """Sends that have this text in them are refused, as the service refuses an event that is none, batches as a whole."""
        self._service.faults.refused = text.encode()

    def stay_silent(self, count: int) -> None:
        """The next sends are kept, and the client is never told."""
        self._service.faults.silent_sends = count

    def kept(self, hub: str, partition: int) -> list[dict[str, Any]]:
        """What the partition holds, in order: message id, key, body (base64) and properties of each event."""
        return [_shown(raw) for raw in self._partition(hub, partition).events if raw is not None]

    def slow(self, bytes_per_second: float | None) -> None:
        """Every link carries so much. None: as fast as it can."""
        self._service.faults.slow = bytes_per_second

    def deny(self, what: str) -> None:
        """From now on tokens are refused, as after a key was rotated ("token"), or links, as after a role was revoked ("link")."""
        self._service.faults.denied = what

    def calm(self) -> None:
        """No more faults."""
        self._service.faults.__init__()  # type: ignore[misc]

    def stats(self) -> dict[str, Any]:
        """What was done since the start, and where readers are now."""
        readers = {f"{hub.name}/{n}": len(p.readers) for hub in self._service.hubs.values() for n, p in enumerate(hub.partitions)}
        heard = {"selectors": self._service.selectors, "refusals": self._service.refusals}
        return {**self._service.counts, "connections": len(self._connections), "reading": readers, **heard}

    def stop(self) -> None:
        """End the process."""
        self._end()

    def _partition(self, hub: str, partition: int) -> Partition:
        return self._service.hub(hub).partitions[partition]

    def _partitions(self, hub: str, partition: int | None) -> list[Partition]:
        every = self._service.hub(hub).partitions
        return every if partition is None else [every[partition]]

    def _each_reader(self, hub: str, partition: int | None, act: Callable[[Any], None]) -> int:
        links = [link for log in self._partitions(hub, partition) for link in list(log.readers)]
        for link in links:
            act(link)
        return len(links)

    def _wake(self, log: Partition) -> None:
        for link in log.readers:
            link.wake.set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer orders until the other side goes."""
        while line := await reader.readline():
            order = json.loads(line)
            try:
                answer = {"ok": getattr(self, order.pop("do"))(**order)}
            except Exception as error:  # noqa: BLE001 - the test is told
                answer = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client of the service."""
        connection = Connection(self._service, reader, writer)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


def _shown(raw: bytes) -> dict[str, Any]:
    found = read(raw, PROPERTIES, ANNOTATIONS, APPLICATION, DATA)
    head, key = found.get(PROPERTIES) or [None], (found.get(ANNOTATIONS) or {}).get("x-opt-partition-key")
    properties = {_text(name): _text(value) for name, value in (found.get(APPLICATION) or {}).items()}
    return {"id": _text(head[0]), "key": _text(key), "body": base64.b64encode(found[DATA]).decode(), "properties": properties}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


async def main() -> None:
    """Serve until told to stop, or until the starter is gone. The first line of output is {"amqp": port, "orders": port, "at": ms}."""
    ended = asyncio.Event()
    orders = Orders(Service(), ended.set)
    amqp = await asyncio.start_server(orders.serve, "127.0.0.1", 0)
    control = await asyncio.start_server(orders.converse, "127.0.0.1", 0, limit=64 * 1024 * 1024)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    ports = {"amqp": amqp.sockets[0].getsockname()[1], "orders": control.sockets[0].getsockname()[1], "at": now()}
    print(json.dumps(ports), flush=True)
    stdin = loop.run_in_executor(None, sys.stdin.read)  # ends with the starter
    await asyncio.wait([asyncio.ensure_future(ended.wait()), stdin], return_when=asyncio.FIRST_COMPLETED)
    import os

    os._exit(0)
