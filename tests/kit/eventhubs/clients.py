"""The unmodified azure-eventhub client, sync and aio, in the few ways in which tests use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from azure.eventhub import EventData, EventHubConsumerClient, EventHubProducerClient
from azure.eventhub.aio import EventHubConsumerClient as AioConsumer
from azure.eventhub.aio import EventHubProducerClient as AioProducer

SECONDS = 30.0
"""How long a test waits before it fails."""


def send(connection: str, hub: str, bodies: Sequence[bytes], partition: str | None = None, key: str | None = None, **options: Any) -> None:
    """One batch."""
    with EventHubProducerClient.from_connection_string(connection, eventhub_name=hub, **options) as client:
        batch = client.create_batch(partition_id=partition, partition_key=key)
        for body in bodies:
            batch.add(EventData(body))
        client.send_batch(batch)


def receive(
    connection: str, hub: str, partition: str, count: int, group: str = "$Default", retry_total: int = 3, **options: Any
) -> list[Any]:
    """The first `count` events that come. Raises what the client reports, or TimeoutError."""
    client = EventHubConsumerClient.from_connection_string(
        connection, group, eventhub_name=hub, retry_total=retry_total, retry_backoff_factor=0.05
    )
    got, errors, done = list[Any](), list[Exception](), threading.Event()

    def on_batch(context: Any, events: list[Any]) -> None:
        got.extend(events)
        if len(got) >= count:
            done.set()

    def on_error(context: Any, error: Exception) -> None:
        errors.append(error)
        done.set()

    run = {"on_event_batch": on_batch, "on_error": on_error, "partition_id": partition, "starting_position": "-1", **options}
    thread = threading.Thread(target=client.receive_batch, kwargs=run, daemon=True)
    thread.start()
    ended = done.wait(SECONDS)
    client.close()
    thread.join(SECONDS)
    if errors:
        raise errors[0]
    if not ended:
        raise TimeoutError(f"{len(got)} of {count} events came")
    return got[:count]


def send_aio(connection: str, hub: str, bodies: Sequence[bytes], partition: str) -> None:
    """One batch, by the aio client."""

    async def run() -> None:
        async with AioProducer.from_connection_string(connection, eventhub_name=hub) as client:
            batch = await client.create_batch(partition_id=partition)
            for body in bodies:
                batch.add(EventData(body))
            await client.send_batch(batch)

    asyncio.run(run())


def receive_aio(connection: str, hub: str, partition: str, count: int) -> list[Any]:
    """The first `count` events that come, by the aio client."""
    got = list[Any]()

    async def run() -> None:
        done = asyncio.Event()

        async def on_batch(context: Any, events: list[Any]) -> None:
            got.extend(events)
            if len(got) >= count:
                done.set()

        async with AioConsumer.from_connection_string(connection, "$Default", eventhub_name=hub) as client:
            task = asyncio.create_task(client.receive_batch(on_batch, partition_id=partition, starting_position="-1"))
            await asyncio.wait_for(done.wait(), SECONDS)
        task.cancel()  # it would go on until the next look at who owns what

    asyncio.run(run())
    return got[:count]


def bodies(events: Sequence[Any]) -> list[bytes]:
    """Whole bodies."""
    return [b"".join(event.body) for event in events]


def numbers(events: Sequence[Any]) -> list[int]:
    """Sequence numbers."""
    return [event.sequence_number for event in events]
