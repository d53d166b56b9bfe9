"""Reads ranges of one partition: every event of the range, once, in order, nothing beyond it, and never waits for ever.

A link that breaks is opened again at the next sequence number. What does not come although it should is an error that names it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from checkpoint import given
from checkpoint.errors import IncarnationChanged, PositionsMissing, SourceUnavailable
from dedup.eventhub.errors import ReceiverStolen
from dedup.eventhub.namespace import Namespace, condition, explained
from dedup.eventhub.order import InOrder
from dedup.eventhub.receiver import Broken, Receiver, backoff
from dedup.eventhub.rows import NONE, numbers
from dedup.eventhub.settings import Connection
from dedup.settings import RECEIVE

log = logging.getLogger("dedup")

STOLEN, NO_SUCH_POSITION = "link:stolen", "argument-error"
POLL = 0.25
"""Seconds between two looks at what is missing."""


@dataclass(frozen=True)
class Receive:
    """How a partition is received."""

    prefetch: int = 1000
    """Events that the service sends ahead, and the most in one batch. Memory: three times as many, and 32 MB that wait."""
    timeout: float = 60.0
    """Seconds without an event that should be there, after which reading is given up."""
    level: int | None = None
    """Owner level: the service ends receivers of a lower or the same one in the same consumer group. None reads beside others."""
    fail_on_data_loss: bool = True
    """False: positions that are not in the log any more are left out, with a warning."""

    def __post_init__(self) -> None:
        given.settle(RECEIVE, self)


class PartitionReader:
    """Reads one range after another; the link stays open between ranges that follow each other. Used by one thread at a time."""

    def __init__(self, connection: Connection, partition: int, options: Receive) -> None:
        self.connection, self.partition, self.options = connection, partition, options
        self._namespace = Namespace(connection)
        self._receiver: Receiver | None = None
        self._order = InOrder(0)
        self._rest = NONE  # in order, beyond the range that was read
        self._proven = False  # the hub behind this link is the one whose positions are read
        self._fresh = True  # nothing in order came since the link was opened
        self._kept = False  # the link is from a range before; while it was idle, others might take the partition
        self._attempt, self._trouble = 0, "the link is open and silent"

    @property
    def next(self) -> int | None:
        """The sequence number with which it can go on at once; None where it would have to open a link."""
        if self._receiver is None or self._receiver.broken:
            return None
        return int(numbers(self._rest)[0]) if len(self._rest) else self._order.next

    def read(self, first: int, last: int, created: str | None = None) -> Iterator[pa.RecordBatch]:
        """The events from `first` to `last`, both included, in pieces: rows of rows.SCHEMA.

        Args:
            first: sequence number.
            last: sequence number.
            created: when the hub was created whose positions these are; None does not check.

        Raises:
            PositionsMissing: some are not in the log any more.
            IncarnationChanged: the hub was created anew, or ends before `last`.
            ReceiverStolen: another receiver of the consumer group took over.
            SourceUnavailable: nothing came for `timeout` seconds.
            ConfigError: the service refuses.
        """
        self._kept = self.next == first
        if not self._kept:
            self._open(first)
        events, progress = self._rest, time.monotonic()
        while True:
            piece, self._rest = _split(events, last)
            if len(events):
                progress = time.monotonic()
            if len(piece):
                yield piece
            if len(self._rest) or self._order.next > last:
                return
            events = self._more(last, created, progress)

    def close(self) -> None:
        """End the link."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._rest = None, NONE

    def _open(self, first: int) -> None:
        self.close()
        self._order, self._fresh, self._proven = InOrder(first), True, False
        self._receiver = Receiver(self.connection, self.partition, first, self.options.prefetch, self.options.level)

    def _more(self, last: int, created: str | None, progress: float) -> pa.RecordBatch:
        """What is next in order; nothing, where one has to look again."""
        assert self._receiver is not None
        try:
            events = self._receiver.get(POLL)
            if events is not None:
                self._prove(created)
        except Broken as broken:
            self._again(broken.error, created)
            events = None
        now = time.monotonic()
        if events is not None and len(ready := self._order.add(events, now)):
            self._fresh, self._attempt, self._trouble = False, 0, "the link is open and silent"
            return ready
        behind = self._order.hole(now)
        if behind is not None:
            return self._gap(min(behind, last + 1))
        if now - progress > self.options.timeout:
            return self._silence(last, created)
        return NONE

    def _prove(self, created: str | None) -> None:
        """Asked once events of a link came, so that the answer is about them: another hub of the same name has numbers like these."""
        if self._proven or created is None:
            return
        try:
            self._namespace.check(created)
        except SourceUnavailable as away:
            raise Broken(away) from away  # what came is asked for again
        self._proven = True

    def _again(self, error: Exception, created: str | None) -> None:
        """Open the link again where it broke, unless that cannot help."""
        self.close()
        if condition(error) == STOLEN and not self._kept:
            raise ReceiverStolen(
                f"{self._here}: another receiver of consumer group {self.connection.group!r} has this partition (our owner level: "
                f"{self.options.level}). Stop one of the two, or give each a consumer group of its own."
            )
        if condition(error) == NO_SUCH_POSITION:
            self._ends_early(created)
        known = error if isinstance(error, SourceUnavailable) else explained(error, self.connection, f", partition {self.partition}")
        if not isinstance(known, SourceUnavailable):
            raise known
        self._trouble = str(known)
        log.warning("%s: %s; opening the link again", self._here, known)
        backoff(self._attempt)
        self._attempt, self._kept = self._attempt + 1, False
        self._open(self._order.next)

    def _gap(self, behind: int) -> pa.RecordBatch:
        """Events came, but not the next one. A link that was just opened for it tells the truth."""
        if self.options.fail_on_data_loss and not self._fresh:
            self._open(self._order.next)
            return NONE
        return self._lost(behind - 1)

    def _silence(self, last: int, created: str | None) -> pa.RecordBatch:
        if created is not None:
            self._namespace.check(created)
        span = self._namespace.span(self.partition)
        if span.first > self._order.next:
            return self._lost(min(span.first - 1, last))
        if span.end <= last:
            self._ends_early(created)
        self.close()
        raise SourceUnavailable(
            f"{self._here}: no event came for {self.options.timeout:g} seconds, but the log goes on to {span.end - 1}: {self._trouble}. "
            "Nothing was decided; run it again."
        )

    def _lost(self, upto: int) -> pa.RecordBatch:
        """Positions up to this one are not in the log any more."""
        what = f"positions {self._order.next}-{upto} are not in the log any more (retention or compaction)"
        if self.options.fail_on_data_loss:
            where = self._here
            self.close()
            raise PositionsMissing(
                f"{where}: {what}. To go on without them, once the loss is understood: failOnDataLoss=false, which leaves them out."
            )
        log.warning("%s: %s; going on without them", self._here, what)
        return self._order.skip_to(upto + 1)

    def _ends_early(self, created: str | None) -> None:
        where = self._here
        self.close()
        if created is not None:
            self._namespace.check(created)
        raise IncarnationChanged(
            f"{where}: the log ends before this position. The hub was deleted and created again, or this is another one."
        )

    @property
    def _here(self) -> str:
        return f"{self.connection.source}/{self.connection.hub}, partition {self.partition}, position {self._order.next}"


def _split(events: pa.RecordBatch, last: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Those up to this position, and the rest."""
    count = int(np.searchsorted(numbers(events), last, side="right"))
    return (events, NONE) if count == len(events) else (events.slice(0, count), events.slice(count))
