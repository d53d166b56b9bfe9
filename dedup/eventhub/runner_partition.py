"""One claimed partition on its way through the runner: events in order, gathered until a batch is due. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from checkpoint.position import Partition
from dedup.eventhub import rows
from dedup.eventhub.order import InOrder
from dedup.joined import Share


@dataclass(frozen=True)
class Bounds:
    """When a batch is due: whichever comes first."""

    events: int
    size: int  # bytes of its events in memory
    wait: float  # seconds since its first event came


@dataclass
class Gathered:
    """The events of one partition that are in hand and not committed.

    Args:
        first: sequence number that has to come first; None: whatever comes.
    """

    share: Share
    bounds: Bounds
    first: int | None
    order: InOrder | None = None
    doubted: int | None = None  # where a hole was seen the last time; the log was read again since then
    tables: list[pa.Table] = field(default_factory=list)
    since: float = 0.0
    running: asyncio.Future[None] | None = None  # the batch that is in the store

    def __post_init__(self) -> None:
        self.order = None if self.first is None else InOrder(self.first)

    def add(self, events: Sequence[Any], now: float) -> None:
        """Take what came; events that came before are dropped, those that come early wait for the ones before them."""
        if events and self.order is None:
            self.order = InOrder(min(rows.numbers(events)))
        self._keep(self.order.add(events, now) if self.order and events else (), now)

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
        count = sum(table.num_rows for table in self.tables)
        if not count:
            return False
        if self.share.hold is not None and self.newest < self.share.hold:
            return False  # another process died in this batch: it has to be tried with the same rows
        full = count >= self.bounds.events or sum(table.nbytes for table in self.tables) >= self.bounds.size
        return full or now - self.since >= self.bounds.wait

    @property
    def newest(self) -> int:
        """Sequence number of the last event in hand."""
        return int(self.tables[-1]["sequence_number"][-1].as_py())

    def take(self) -> pa.Table:
        """The batch; what is beyond its bound stays in hand."""
        everything = pa.concat_tables(self.tables)
        batch = everything if self.share.hold is not None else everything.slice(0, self.bounds.events)
        rest = everything.slice(batch.num_rows)
        self.tables = [rest] if rest.num_rows else []
        return batch

    def _keep(self, ready: Sequence[Any], now: float) -> None:
        if not ready:
            return
        if not self.tables:
            self.since = now
        where: Partition = self.share.claim.partition
        self.tables.append(rows.table(ready, where.source, where.topic, where.partition))
