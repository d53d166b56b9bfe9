"""Events for the measures of scale, quickly made: orders of 200 bytes without duplicates, spread over any number of partitions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from benchmarks.events import KAFKA, Facts

BODY = 200
"""Bytes of each body."""

_NOTE, _PLACED = 100, "2026-01-01T00:00:00Z"


class Orders:
    """Orders one after another; `facts` is what a sink must hold of them.

    Args:
        partitions: each batch has events of all of them, where it has so many.
    """

    def __init__(self, partitions: int) -> None:
        self.partitions, self.facts = partitions, Facts()
        self._offsets = np.zeros(partitions, dtype=np.int64)
        self._draw = np.random.default_rng(7)

    def batch(self, events: int) -> pa.Table:
        """The next ones, in the columns of Spark's Kafka source."""
        counts = np.full(self.partitions, events // self.partitions)
        counts[: events % self.partitions] += 1
        offsets = np.concatenate([np.arange(at, at + count) for at, count in zip(self._offsets, counts, strict=True)])
        self._offsets += counts
        first = self.facts.orders
        self.facts += Facts(events, events, sum(range(first, first + events)))
        columns = {
            "key": pa.nulls(events, pa.binary()),
            "value": self._bodies(first, events),
            "topic": pa.array(["orders"] * events),
            "partition": np.repeat(np.arange(self.partitions, dtype=np.int32), counts),
            "offset": offsets,
            "timestamp": pa.nulls(events, pa.timestamp("us", "UTC")),
            "timestampType": np.zeros(events, np.int32),
        }
        return pa.table([pa.array(columns[f.name]) for f in KAFKA], schema=KAFKA)

    def _bodies(self, first: int, events: int) -> pa.Array:
        ids = self._draw.bytes(16 * events).hex()
        letters = self._draw.integers(ord("a"), ord("z") + 1, _NOTE * events, dtype=np.uint8).tobytes().decode()
        heads = (
            f'{{"order_id":"{ids[32 * n : 32 * n + 32]}","customer":{first + n},"amount":{n / 100},"placed_at":"{_PLACED}","note":"'
            for n in range(events)
        )
        notes = (letters[_NOTE * n : _NOTE * (n + 1)] for n in range(events))
        return pa.array([f'{(head + note)[: BODY - 2]:x<{BODY - 2}}"}}'.encode() for head, note in zip(heads, notes, strict=True)])
