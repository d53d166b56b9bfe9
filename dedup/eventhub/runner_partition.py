"""One claimed partition on its way through the runner: events in order, gathered until a batch is due. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dedup.eventhub import rows
from dedup.eventhub.order import InOrder
from dedup.pipeline.member import Assignment


@dataclass(frozen=True)
class Bounds:
    """When a batch is due: whichever comes first."""

    events: int
    size: int  # bytes of their bodies
    wait: float  # seconds since its first event came


@dataclass
class Gathered:
    """The events of one partition that are in hand and not committed, as rows: those take a tenth of the memory.

    Args:
        first: sequence number that has to come first; None: whatever comes.
    """

    assignment: Assignment
    bounds: Bounds
    first: int | None
    order: InOrder | None = None
    doubted: frozenset[tuple[int, int]] = frozenset()  # holes that were seen before: the log was read again since then
    events: list[pa.RecordBatch] = field(default_factory=list)
    count: int = 0  # of these events
    size: int = 0  # bytes of their bodies
    since: float = 0.0
    link: int = 0  # of the client, behind which the hub was last asked which one it is
    running: asyncio.Future[None] | None = None  # the batch that is in the store

    def __post_init__(self) -> None:
        self.order = None if self.first is None else InOrder(self.first)

    def add(self, events: Sequence[Any], now: float) -> None:
        """Take what came; events that came before are dropped, those that come early wait for the ones before them."""
        if not events:
            return
        came = rows.batch(events, *self.assignment.partition)
        if self.order is None:
            self.order = InOrder(int(rows.numbers(came).min()))
        self._keep(self.order.add(came, now), now)

    def skip_to(self, number: int, now: float) -> None:
        """Nothing below this position comes any more."""
        assert self.order is not None
        self._keep(self.order.skip_to(number), now)

    def hole(self, now: float) -> tuple[int, int] | None:
        """The first and the last position that are missing, once that has lasted."""
        behind = self.order.hole(now) if self.order else None
        return None if behind is None or self.order is None else (self.order.next, behind - 1)

    def due(self, now: float) -> bool:
        """Whether what is in hand is a batch."""
        if not self.events:
            return False
        if self.assignment.hold is not None and rows.numbers(self.events[-1])[-1] < self.assignment.hold:
            return False  # another process died in this batch: it has to be tried with the same rows
        full = self.count >= self.bounds.events or self.size >= self.bounds.size
        return full or now - self.since >= self.bounds.wait

    def take(self) -> pa.Table:
        """The batch; what is beyond its bound stays in hand."""
        whole = pa.Table.from_batches(self.events, rows.SCHEMA)
        batch = whole if self.assignment.hold is not None else whole.slice(0, self.bounds.events)
        self.events = whole.slice(batch.num_rows).to_batches()
        self.count, self.size = whole.num_rows - batch.num_rows, sum(map(_size, self.events))
        return batch

    def _keep(self, ready: pa.RecordBatch, now: float) -> None:
        if not len(ready):
            return
        if not self.events:
            self.since = now
        self.events.append(ready)
        self.count, self.size = self.count + len(ready), self.size + _size(ready)


def _size(events: pa.RecordBatch) -> int:
    return int(events.column("body").nbytes)
