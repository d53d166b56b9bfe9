"""Puts what a client hands over into the order of its sequence numbers. Pure.

The client repeats events after a reconnect, and its keep-alive thread can hand one over a moment too late; neither may cost an event.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dedup.eventhub.rows import NONE, SCHEMA, numbers

PATIENCE = 2.0
"""Seconds that an event may come later than one behind it."""

MOST_EARLY = 50_000
"""Events kept while one before them is missing; more and the wait is over."""


class InOrder:
    """Gives each event once, in order, from `first` on. Events are rows of rows.SCHEMA."""

    def __init__(self, first: int) -> None:
        self.next = first
        """Sequence number of the next event that is given."""
        self._early: dict[int, tuple[pa.RecordBatch, float]] = {}  # one row each

    def add(self, events: pa.RecordBatch, now: float) -> pa.RecordBatch:
        """Take what came at `now` (seconds); give what is in order now."""
        found = numbers(events)
        if not self._early and np.array_equal(found, np.arange(self.next, self.next + len(found))):
            self.next += len(found)
            return events
        for row in np.flatnonzero(found >= self.next).tolist():
            self._early.setdefault(int(found[row]), (events.slice(row, 1), now))
        return self._ready()

    def hole(self, now: float, patience: float = PATIENCE) -> int | None:
        """Sequence number of the first event behind a gap, once the gap has lasted; None where there is none to give up on."""
        if not self._early:
            return None
        first = min(self._early)
        return first if len(self._early) > MOST_EARLY or now - self._early[first][1] >= patience else None

    def skip_to(self, number: int) -> pa.RecordBatch:
        """Give up on what is missing below this number; give what is in order then."""
        self.next = max(self.next, number)
        return self._ready()

    def _ready(self) -> pa.RecordBatch:
        ready: list[pa.RecordBatch] = []
        while self.next in self._early:
            ready.append(self._early.pop(self.next)[0])
            self.next += 1
        return pa.Table.from_batches(ready, SCHEMA).combine_chunks().to_batches()[0] if ready else NONE
