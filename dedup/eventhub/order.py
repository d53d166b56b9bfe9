"""Puts what a client hands over into the order of its sequence numbers. Pure.

The client repeats events after a reconnect, and its keep-alive thread can hand one over a moment too late; neither may cost an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dedup.eventhub.rows import numbers

PATIENCE = 2.0
"""Seconds that an event may come later than one behind it."""

MOST_EARLY = 50_000
"""Events kept while one before them is missing; more and the wait is over."""


class InOrder:
    """Gives each event once, in order, from `first` on."""

    def __init__(self, first: int) -> None:
        self.next = first
        """Sequence number of the next event that is given."""
        self._early: dict[int, tuple[Any, float]] = {}

    def add(self, events: Sequence[Any], now: float) -> Sequence[Any]:
        """Take what came at `now` (seconds); give what is in order now."""
        found = numbers(events)
        if not self._early and found == list(range(self.next, self.next + len(found))):
            self.next += len(found)
            return events
        for number, event in zip(found, events, strict=True):
            if number >= self.next:
                self._early.setdefault(number, (event, now))
        return self._ready()

    def hole(self, now: float, patience: float = PATIENCE) -> int | None:
        """Sequence number of the first event behind a gap, once the gap has lasted; None where there is none to give up on."""
        if not self._early:
            return None
        first = min(self._early)
        return first if len(self._early) > MOST_EARLY or now - self._early[first][1] >= patience else None

    def skip_to(self, number: int) -> Sequence[Any]:
        """Give up on what is missing below this number; give what is in order then."""
        self.next = max(self.next, number)
        return self._ready()

    def _ready(self) -> list[Any]:
        ready = []
        while self.next in self._early:
            ready.append(self._early.pop(self.next)[0])
            self.next += 1
        return ready
