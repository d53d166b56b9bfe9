"""The input of all measures: order events as Spark's Kafka source has them, with duplicates as producers make them.

Made from a seed, so that every run measures the same bytes. Called by the other modules.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PARTITIONS = 4

ORDER = pa.schema(
    [
        pa.field("order_id", pa.string()),
        pa.field("customer", pa.int64()),
        pa.field("amount", pa.float64()),
        pa.field("placed_at", pa.timestamp("us", "UTC")),
        pa.field("note", pa.string()),
    ]
)
"""What a body decodes to."""

ORDER_DDL = "order_id string, customer bigint, amount double, placed_at timestamp, note string"
"""The same, for Spark."""

KAFKA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("timestampType", pa.int32()),
    ]
)

KAFKA_DDL = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"

_START = 1_767_225_600_000_000  # 2026-01-01, microseconds


@dataclass(frozen=True)
class Facts:
    """What a sink must hold: `rows` without deduplication, `orders` with; `customers` is the sum of that column over `orders`."""

    rows: int = 0
    orders: int = 0
    customers: int = 0

    def __add__(self, more: Facts) -> Facts:
        return Facts(self.rows + more.rows, self.orders + more.orders, self.customers + more.customers)


@dataclass
class Topic:
    """A topic of PARTITIONS partitions that grows batch by batch; every order has its id as message key.

    Args:
        body: bytes of each body.
        duplicates: share of events that are duplicates with a new offset: half of the same batch, half of the one before.
        across: a duplicate lies in another partition than its first event, as where producers send round-robin.
    """

    body: int = 200
    duplicates: float = 0.01
    seed: int = 7
    across: bool = False
    facts: Facts = field(default=Facts(), init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._letters = "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz     ", k=65_536))
        self._offsets = [0] * PARTITIONS
        self._before: list[list[tuple[str, str]]] = [[] for _ in range(PARTITIONS)]

    def batch(self, events: int) -> list[pa.Table]:
        """The next events, one table a partition."""
        sizes = [events // PARTITIONS + (p < events % PARTITIONS) for p in range(PARTITIONS)]
        return [self._partition(p, size) for p, size in enumerate(sizes)]

    def _partition(self, partition: int, size: int) -> pa.Table:
        repeated = round(size * self.duplicates) if size > 1 else 0
        new = [self._order() for _ in range(size - repeated)]
        older = self._before[partition] or new
        same = new
        if self.across:  # the partition before this one: of this batch, and of the one before where this is the first
            older = same = self._before[partition - 1] or new
        again = [self._random.choice(older if i % 2 else same) for i in range(repeated)]
        self._before[partition] = new
        start = self._offsets[partition]
        self._offsets[partition] += size
        orders = [*new, *again]
        self._random.shuffle(orders)
        columns = {
            "key": [order.encode() for order, _ in orders],
            "value": [body.encode() for _, body in orders],
            "topic": ["orders"] * size,
            "partition": [partition] * size,
            "offset": range(start, start + size),
            "timestamp": [_START + 1000 * n for n in range(start, start + size)],
            "timestampType": [0] * size,
        }
        self.facts = Facts(self.facts.rows + size, self.facts.orders + len(new), self.facts.customers)
        return pa.table([pa.array(columns[f.name], f.type) for f in KAFKA], schema=KAFKA)

    def _order(self) -> tuple[str, str]:
        draw, number = self._random, self.facts.orders
        order, customer = str(uuid.UUID(int=draw.getrandbits(128), version=4)), draw.randrange(1_000_000)
        self.facts = Facts(self.facts.rows, number, self.facts.customers + customer)
        at = f"2026-01-{1 + number % 28:02}T{number % 24:02}:{number % 60:02}:{draw.randrange(60):02}.{draw.randrange(1000):03}Z"
        known = f'{{"order_id":"{order}","customer":{customer},"amount":{draw.randrange(10_000_000) / 100},"placed_at":"{at}","note":"'
        cut = draw.randrange(len(self._letters) - self.body)
        return order, f'{known}{self._letters[cut : cut + self.body - len(known) - 2]}"}}'


def land(batches: Iterable[list[pa.Table]], folder: Path, first: int = 0) -> None:
    """Write batches as files that a stream takes PARTITIONS at a time, in order of their times of change."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, tables in enumerate(batches, first):
        for partition, table in enumerate(tables):
            path = folder / f"{number:06}-{partition}.parquet"
            pq.write_table(table, path.with_suffix(".tmp"))
            at = 1_767_225_600 + PARTITIONS * number + partition
            os.utime(path.with_suffix(".tmp"), (at, at))
            path.with_suffix(".tmp").rename(path)


def decoded(batch: Any) -> Any:
    """The rows that all other ways write: the body as plain Spark decodes it."""
    from pyspark.sql import functions as F

    return batch.select(F.from_json(F.col("value").cast("string"), ORDER_DDL).alias("data")).select("data.*")
