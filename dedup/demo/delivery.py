"""The flights as a topic, delivered the way brokers do, and the log of what was delivered and why.

Every fault is drawn from the seed: producers that send a flight twice, bodies cut off or garbled, bodies without their id, sequence
numbers that were never used, partitions that go back after a rebalance. Promises: the same seed and flights give the same files, byte
for byte. Called by main.py before the stream starts, and by the tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dedup.demo import flights

SOURCE, TOPIC, PARTITIONS = "nycflights13", "flights", 4

COPIED = 0.01
"""Share of the flights that a producer sends again, at a new sequence number and half of the time in another partition."""
COPY_LAG = 3_000
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

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Delivery:
    """The topic and how it was delivered."""

    topic: pa.Table
    """One row per event, in the order of sending: flight (row of the CSV), copy (bool), damage, partition, sequence_number."""
    log: pa.Table
    """One row per delivery, in order: file, event (row of `topic`), redelivered (bool)."""

    @property
    def files(self) -> int:
        """How many files, numbered from 0."""
        return int(pc.max(self.log["file"]).as_py()) + 1

    @property
    def delivered(self) -> int:
        """Deliveries, redeliveries included: the rows of all files."""
        return int(self.log.num_rows)

    @property
    def redelivered(self) -> int:
        """Deliveries of a position that an earlier file has already."""
        return int(pc.sum(self.log["redelivered"]).as_py() or 0)

    @property
    def duplicates(self) -> int:
        """Events that say again, at a position of their own, what an earlier event said."""
        return int(pc.sum(self.topic["copy"]).as_py() or 0)

    def decided(self, checkpoints: dict[int, int]) -> int:
        """How many events stand at or below these checkpoints (partition -> sequence number)."""
        partition, number = (self.topic[c].to_numpy() for c in ("partition", "sequence_number"))
        return int(sum(((partition == p) & (number <= last)).sum() for p, last in checkpoints.items()))


def plan(count: int, seed: int, files: int) -> Delivery:
    """Draw how `count` flights are sent and delivered in `files` files of about the same size. Pure."""
    rng = np.random.default_rng(seed)
    topic = _topic(rng, count)
    return Delivery(topic, _log(rng, topic["partition"].to_numpy(), files))


def _topic(rng: np.random.Generator, count: int) -> pa.Table:
    damage = rng.choice(4, size=count, p=[1 - CUT_OFF - GARBLED - KEYLESS, CUT_OFF, GARBLED, KEYLESS])
    copied = np.flatnonzero((rng.random(count) < COPIED) & (damage == INTACT))
    flight = np.r_[np.arange(count), copied]
    sent = np.r_[np.arange(count, dtype=float), copied + rng.exponential(COPY_LAG, len(copied))]
    partition = rng.integers(0, PARTITIONS, count)
    elsewhere = np.where(rng.random(len(copied)) < 0.5, partition[copied], rng.integers(0, PARTITIONS, len(copied)))
    order = np.argsort(sent, kind="stable")
    partition = np.r_[partition, elsewhere][order]
    columns = {
        "flight": flight[order],
        "copy": (np.arange(len(flight)) >= count)[order],
        "damage": damage[flight][order].astype(np.int8),
        "partition": partition.astype(np.int32),
        "sequence_number": _numbers(rng, partition),
    }
    return pa.table(columns)


def _numbers(rng: np.random.Generator, partition: Ints) -> Ints:
    """Ascending sequence numbers in each partition, from a different first one, with some left unused."""
    steps = 1 + np.where(rng.random(len(partition)) < UNUSED, rng.integers(1, 4, len(partition)), 0)
    numbers = np.zeros(len(partition), dtype=np.int64)
    for p in range(PARTITIONS):
        rows = np.flatnonzero(partition == p)
        numbers[rows] = 1_000 * p + np.cumsum(steps[rows])
    return numbers


def _log(rng: np.random.Generator, partition: Ints, files: int) -> pa.Table:
    cuts = np.linspace(0, len(partition), files + 1).astype(int)
    parts: list[tuple[int, Ints, bool]] = []
    for file in range(files):
        for p in range(PARTITIONS):
            back = int(rng.integers(1, max(2, (cuts[1] - cuts[0]) // PARTITIONS // 2)))
            if rng.random() < REBALANCED and (before := np.flatnonzero(partition[: cuts[file]] == p)[-back:]).size:
                parts.append((file, before, True))
        parts.append((file, np.arange(cuts[file], cuts[file + 1]), False))
    return pa.table(
        {
            "file": np.concatenate([np.full(len(rows), file, np.int32) for file, rows, _ in parts]),
            "event": np.concatenate([rows for _, rows, _ in parts]),
            "redelivered": np.concatenate([np.full(len(rows), again) for _, rows, again in parts]),
        }
    )


def write(delivery: Delivery, table: pa.Table, folder: Path) -> None:
    """Write the files of the landing folder, one second of modification time apart: Spark's file source reads in that order.

    Crash: files are missing or incomplete; nothing reads them yet. Start again in an empty folder.
    """
    folder.mkdir(parents=True)
    events = envelope(delivery.topic, table)
    file, event = (delivery.log[c].to_numpy() for c in ("file", "event"))
    bounds = np.searchsorted(file, np.arange(delivery.files + 1))
    for number in range(delivery.files):
        path = folder / f"{number:05}.parquet"
        pq.write_table(events.take(pa.array(event[bounds[number] : bounds[number + 1]])), path)
        os.utime(path, (_FIRST_FILE + number, _FIRST_FILE + number))


def envelope(topic: pa.Table, table: pa.Table) -> pa.Table:
    """ENVELOPE, one row per event of `topic`, with the bodies as they were sent."""
    count, flight = topic.num_rows, topic["flight"]
    empty = pa.array([[("sender", b"demo")]] * 1, ENVELOPE.field("properties").type)
    columns = {
        "source": pa.repeat(SOURCE, count),
        "topic": pa.repeat(TOPIC, count),
        "partition": topic["partition"],
        "sequence_number": topic["sequence_number"],
        "offset": pc.binary_join_element_wise("@", topic["sequence_number"].cast(pa.string()), ""),
        "enqueued_time": pa.array(_FIRST_EVENT + np.arange(count) * np.timedelta64(10, "ms")),
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
