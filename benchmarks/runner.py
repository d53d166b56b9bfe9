"""The plain runner against what people write without it: azure-eventhub's loop with the Blob checkpoint store, one checkpoint a batch.

Both read the same hub of the tests' double, gather batches of the same bounds, decode the bodies and append the rows to a table of the same
PostgreSQL. The other way knows no keys: what it reads twice it writes twice. Called by run.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from azure.eventhub.aio import CheckpointStore, EventHubConsumerClient

from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, middle
from dedup import Consumer, PostgresStore, decode
from dedup.eventhub import run_async

HUB, PARTITIONS, SIZE = "bench", 2, 200
BATCH, WAIT, PREFETCH = 5_000, 0.5, 1_000
SINK = "numbers"
Way = Callable[[], Coroutine[Any, Any, float]]


class Clock:
    """Seconds from the first batch to the last commit."""

    def __init__(self, events: int) -> None:
        self.left, self.started, self.seconds = events, 0.0, 0.0
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """A batch begins."""
        self.started = self.started or time.perf_counter()

    def committed(self, events: int) -> None:
        """So many more are in the table, and the checkpoint is behind them."""
        self.left -= events
        if self.left <= 0:
            self.seconds = time.perf_counter() - self.started
            self._loop.call_soon_threadsafe(self.done.set)


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Both ways in turns, with the double's own ceiling beside them. Raises AssertionError where rows are missing."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from kit.azurite_server import running_azurite
    from kit.eventhubs.ceiling import ceiling
    from kit.eventhubs.control import running_double

    events = sizes.events - sizes.events % min(sizes.events, PARTITIONS * BATCH)  # whole batches: neither waits for more at the end
    with running_double() as double, running_azurite() as blob:
        double.create(HUB, PARTITIONS)
        for partition in range(PARTITIONS):
            double.fill(HUB, partition, events // PARTITIONS, size=SIZE, ids=True)
        top = ceiling(double, HUB, 0, events // PARTITIONS)
        hub = double.connection_string
        ways: dict[str, Way] = {
            "runner, PostgresStore": lambda: ours(hub, dsn, events),
            "loop, Blob, same rows": lambda: theirs(hub, dsn, blob, events, writes=True),
            "loop, Blob, no rows": lambda: theirs(hub, dsn, blob, events, writes=False),
        }
        seconds: Seconds = {name: [] for name in ways}
        for number in range(sizes.rounds):
            names = list(ways)
            for name in [*names[number % 3 :], *names[: number % 3]]:
                create_sink(dsn)
                seconds[name].append(asyncio.run(ways[name]()))
                assert name.endswith("no rows") or count(dsn) == events, f"{name}: {count(dsn)} of {events}"
    mine, same, none = (taken[1:] for taken in seconds.values())
    bare = events / middle(none)
    print(f"double: {top:,.0f} events/s on one link; the loop that writes nothing: {bare:,.0f}, {bare / top:.0%} of it")
    measures = [
        throughput("eventhubs/runner_vs_blob", mine, same, events),
        throughput("eventhubs/runner_vs_blob_receive", mine, none, events),
    ]
    return measures, {name: taken[1:] for name, taken in seconds.items()}


async def ours(hub: str, dsn: str, events: int) -> float:
    """The runner with a consumer of its own, from the first event to the last."""
    clock, stop, batch = Clock(events), asyncio.Event(), [0]

    def on_step(name: str) -> None:
        """Start the clock at the first fence, and count each commit."""
        if name == "fence":
            clock.begin()
        elif name == "committed":
            clock.committed(batch[0])

    store = PostgresStore(dsn, on_step=on_step)
    consumer = Consumer(
        f"bench-{uuid.uuid4().hex}", store, idempotence_key="message_id", decode=decode.json(pa.schema([("n", pa.int64())]))
    )

    @consumer.foreach_batch
    def append(rows: pa.Table, tx: Any) -> None:
        """Write the decoded rows to the sink."""
        batch[0] = rows.num_rows
        tx.write(pa.Table.from_struct_array(rows["data"]), SINK)

    options = {"max_events": BATCH, "max_wait": WAIT, "prefetch": PREFETCH, "balance_every": 1.0}
    running = asyncio.create_task(run_async(consumer, hub, HUB, stop=stop, **options))
    await asyncio.wait({running, asyncio.create_task(clock.done.wait())}, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await running
    store.close()
    return clock.seconds


async def theirs(hub: str, dsn: str, blob: str, events: int, *, writes: bool) -> float:
    """The loop as its documentation shows it, with batches gathered as ours are."""
    from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

    container = f"bench-{uuid.uuid4().hex}"
    await _create(blob, container)
    checkpoints: CheckpointStore = BlobCheckpointStore.from_connection_string(blob, container)
    clock, hands, failed = Clock(events), dict[str, Hand](), list[Exception]()

    async def on_error(context: Any, error: Exception) -> None:
        """Keep the error, and end the run."""
        failed.append(error)
        clock.done.set()

    async def on_batch(context: Any, received: list[Any]) -> None:
        """Gather events; once a batch is due, write it and then its checkpoint."""
        hand = hands.get(context.partition_id) or hands.setdefault(context.partition_id, Hand(dsn, writes))
        hand.since = hand.since if hand.events else time.monotonic()
        hand.events += received
        if not hand.due():
            return
        clock.begin()
        await asyncio.to_thread(hand.write)
        await context.update_checkpoint(hand.events[-1])
        clock.committed(len(hand.events))
        hand.events = []

    client = EventHubConsumerClient.from_connection_string(
        hub, "$Default", eventhub_name=HUB, checkpoint_store=checkpoints, load_balancing_interval=1.0
    )
    options = {"max_batch_size": PREFETCH, "max_wait_time": WAIT, "prefetch": PREFETCH, "starting_position": "-1"}
    receiving = asyncio.create_task(client.receive_batch(on_batch, on_error=on_error, **options))
    await asyncio.wait({receiving, asyncio.create_task(clock.done.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if failed:
        raise failed[0]
    await client.close()
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await checkpoints.close()  # type: ignore[attr-defined]
    for hand in hands.values():
        hand.connection.close()
    return clock.seconds


class Hand:
    """Events of one partition that are not written yet. Appends rows by COPY, the quickest way there is from rows in Python."""

    def __init__(self, dsn: str, writes: bool) -> None:
        self.events: list[Any] = []
        self.since = time.monotonic()
        self.connection, self._writes = psycopg.connect(dsn), writes

    def due(self) -> bool:
        """As `Bounds` of the runner."""
        if not self.events:
            return False
        return len(self.events) >= BATCH or time.monotonic() - self.since >= WAIT

    def write(self) -> None:
        """One transaction."""
        if not self._writes:
            return
        with self.connection.transaction(), self.connection.cursor().copy(f"copy {SINK} (n) from stdin") as copy:
            for event in self.events:
                copy.write_row((json.loads(b"".join(event.body))["n"],))


async def _create(blob: str, container: str) -> None:
    from azure.storage.blob.aio import ContainerClient

    async with ContainerClient.from_connection_string(blob, container) as client:
        await client.create_container()


def create_sink(dsn: str) -> None:
    """An empty table."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"drop table if exists {SINK}")
        connection.execute(f"create table {SINK} (n bigint)")


def count(dsn: str) -> int:
    """Its rows."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(f"select count(*) from {SINK}").fetchone()
    assert row is not None
    return int(row[0])
