"""azure's own clients while the database of their checkpoints is away: receiving goes on afterwards, in every partition."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fixtures.fix_eventhubs import MakeHub
from kit import pg_server
from kit.checkpoint_kit import make
from kit.eventhubs.control import Double
from kit.pg_proxy import until
from kit.pg_run import run

pytestmark = [pytest.mark.postgres, pytest.mark.crash]

PARTITIONS = {"0", "1", "2", "3"}
OPTIONS: dict[str, Any] = {"load_balancing_interval": 0.3, "partition_ownership_expiration_interval": 60}
"""Nothing expires while a test runs: what the client owns it also tries to give back."""
SECONDS = 120


class Receiving:
    """A client at work; what it said."""

    def __init__(self, kind: str, dsn: str, connection: str, hub: str) -> None:
        self.closed = set[str]()  # partitions that it stopped reading
        self.ended, self._stop = threading.Event(), threading.Event()
        self._store, self._aio = make(kind, dsn), kind.endswith("_aio")
        self._where: dict[str, Any] = {"eventhub_name": hub, "checkpoint_store": self._store, **OPTIONS}
        self._thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """As a program ends it."""
        self._stop.set()
        self._thread.join(SECONDS)

    def _run(self, connection: str) -> None:
        if self._aio:
            asyncio.run(self._receive_aio(connection))
        else:
            self._receive(connection)

    def _receive(self, connection: str) -> None:
        from azure.eventhub import EventHubConsumerClient

        def on_batch(context: Any, events: list[Any]) -> None:
            if events:
                context.update_checkpoint()

        def on_close(context: Any, reason: Any) -> None:
            self.closed.add(context.partition_id)

        def receive() -> None:
            try:
                client.receive_batch(on_batch, on_partition_close=on_close, starting_position="-1")
            finally:
                self.ended.set()

        with EventHubConsumerClient.from_connection_string(connection, "$Default", **self._where) as client, self._store:
            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            self._stop.wait()
            client.close()
            thread.join(SECONDS)

    async def _receive_aio(self, connection: str) -> None:
        from azure.eventhub.aio import EventHubConsumerClient

        async def on_batch(context: Any, events: list[Any]) -> None:
            if events:
                await context.update_checkpoint()

        async def on_close(context: Any, reason: Any) -> None:
            self.closed.add(context.partition_id)

        async with EventHubConsumerClient.from_connection_string(connection, "$Default", **self._where) as client, self._store:
            task = asyncio.create_task(client.receive_batch(on_batch, on_partition_close=on_close, starting_position="-1"))
            task.add_done_callback(lambda _: self.ended.set())
            await asyncio.to_thread(self._stop.wait)
            await client.close()
            task.cancel()
            await asyncio.wait({task})


@contextmanager
def receiving(*where: str) -> Iterator[Receiving]:
    """A client for the length of the block."""
    client = Receiving(*where)
    try:
        yield client
    finally:
        client.stop()


@pytest.fixture
def server() -> Iterator[pg_server.Server]:
    """A server of the test's own."""
    try:
        with pg_server.running_server() as started:
            yield started
    except pg_server.NoPostgres as missing:
        pytest.skip(str(missing))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["postgres", pytest.param("postgres_aio", marks=pytest.mark.full)])
def test_an_outage_of_the_store_ends_no_receiving(kind: str, server: pg_server.Server, eventhubs: Double, new_hub: MakeHub) -> None:
    """The server stops, so that no checkpoint and no partition can be written; once it is back every partition goes on to its end."""
    hub = new_hub(partitions=len(PARTITIONS))

    def fill() -> None:
        for partition in PARTITIONS:
            eventhubs.fill(hub, int(partition), 5)

    def reached(number: int) -> bool:
        rows = run(server.dsn, "select partition_id, sequence_number from dedup.processor_checkpoint")
        return dict(rows) == dict.fromkeys(PARTITIONS, number)

    make("postgres", server.dsn).list_checkpoints("a", "b", "c")  # makes the tables
    fill()
    with receiving(kind, server.dsn, eventhubs.connection_string, hub) as client:
        until(lambda: reached(4), SECONDS)
        server.stop()
        fill()
        until(lambda: client.closed == PARTITIONS or client.ended.is_set(), SECONDS)
        server.start()
        assert not client.ended.is_set(), "the error of giving a partition back left the client"
        until(lambda: reached(9), SECONDS)
        assert not client.ended.is_set()
