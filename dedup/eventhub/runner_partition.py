"""One claimed partition on its way through the runner: events in order, gathered until a batch is due. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dedup.eventhub import rows
from dedup.eventhub.order import InOrder
from dedup.joined import Share


@dataclass(frozen=True)
class Bounds:
    """When a batch is due: whichever comes first."""

    events: int
    size: int  # bytes of their bodies
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
    events: list[Any] = field(default_factory=list)
    size: int = 0  # bytes of their bodies
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
        if not self.events:
            return False
        if self.share.hold is not None and rows.numbers(self.events[-1:])[0] < self.share.hold:
            return False  # another process died in this batch: it has to be tried with the same rows
        full = len(self.events) >= self.bounds.events or self.size >= self.bounds.size
        return full or now - self.since >= self.bounds.wait

    def take(self) -> list[Any]:
        """The batch; what is beyond its bound stays in hand."""
        count = len(self.events) if self.share.hold is not None else self.bounds.events
        batch, self.events = self.events[:count], self.events[count:]
        self.size = _size(self.events)
        return batch

    def _keep(self, ready: Sequence[Any], now: float) -> None:
        if not self.events:
            self.since = now
        self.events += ready
        self.size += _size(ready)


def _size(events: Sequence[Any]) -> int:
    return sum(len(rows.body(event) or b"") for event in events)
