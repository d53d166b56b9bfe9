"""The plain runner: a Consumer on an event hub without Spark, in as many processes as you like.

Each process owns some partitions, gathers batches of them, and commits each in one transaction with its checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from azure.eventhub.aio import CheckpointStore

from checkpoint import given
from dedup.consumer import Consumer
from dedup.eventhub.lease import owners_beside
from dedup.eventhub.runner_loop import Runner, Start
from dedup.eventhub.runner_partition import Bounds
from dedup.eventhub.settings import DEFAULT_GROUP, Connection
from dedup.settings import RUNNER


def run(consumer: Consumer, connection: Connection | str, hub: str | None = None, group: str = DEFAULT_GROUP, **options: Any) -> None:
    """Run the consumer on an event hub until SIGTERM or SIGINT. Start as many processes as you like: they share the partitions.

    On either signal the batch in hand is finished, the partitions are given back, and this returns.

    Args:
        consumer: with its handler registered; handlers get Arrow tables, or events one by one.
        connection: `Connection.of(...)`, `Connection.entra(...)`, or a connection string.
        hub: name of the event hub, where a connection string names none.
        group: consumer group.
        options: as for `run_async`.

    Raises:
        ConfigError: settings that cannot work, or no such hub. SourceUnavailable: Event Hubs does not answer at the start.
        StillHeld: a Spark query runs this consumer. Fenced: one took it over.
        PositionGap, IncarnationChanged: a person has to decide; the message names the command.
        Whatever else a batch ends with after `max_outage`.

    Crash: batches that are committed are true, all others are read again by whoever claims their partitions.
    """
    asyncio.run(_until_signal(lambda stop: run_async(consumer, connection, hub, group, stop=stop, **options)))


async def run_async(
    consumer: Consumer,
    connection: Connection | str,
    hub: str | None = None,
    group: str = DEFAULT_GROUP,
    *,
    stop: asyncio.Event | None = None,
    ownership: CheckpointStore | None = None,
    start: Start = "earliest",
    max_events: int = 5_000,
    max_bytes: int = 16 * 1024 * 1024,
    max_wait: float = 0.5,
    prefetch: int = 1_000,
    balance_every: float = 10.0,
    expire_after: float = 60.0,
    **client: Any,
) -> None:
    """As `run`, inside a running event loop; signals are the caller's.

    Args:
        stop: ends it when it is set, as a signal ends `run`.
        ownership: any CheckpointStore of azure.eventhub.aio, through which processes share the partitions. Default: beside the
            consumer's state.
        start: where partitions begin that have no checkpoint yet; it counts until their first commit.
        max_events: of one batch; at most the consumer's `max_events_per_transaction`.
        max_bytes: of the bodies of one batch, about.
        max_wait: seconds that the first event of a batch waits for others.
        prefetch: events of a partition that the service sends ahead; in memory are at most twice as many, and two batches.
        balance_every: seconds between two looks at who owns what.
        expire_after: seconds after which a process that does not renew its partitions loses them.
        client: further arguments of EventHubConsumerClient.
    """
    given.check(RUNNER, locals())
    if isinstance(connection, str):
        connection = Connection.of(connection, hub, group)
    bounds = Bounds(min(max_events, consumer.max_events), max_bytes, float(max_wait))
    balancing = {"load_balancing_interval": float(balance_every), "partition_ownership_expiration_interval": float(expire_after)}
    owners = ownership or owners_beside(consumer.store, consumer.name)
    runner = Runner(consumer.job(), connection, owners, bounds, start, prefetch, {**balancing, **client})
    try:
        await runner.run(stop or asyncio.Event())
    finally:
        if ownership is None and hasattr(owners, "close"):
            await owners.close()


async def _until_signal(body: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        await body(stop)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set it, where this is the main thread."""
    loop = asyncio.get_running_loop()
    chosen = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    for number in chosen:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in chosen:
            loop.remove_signal_handler(number)
