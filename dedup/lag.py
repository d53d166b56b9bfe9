"""How far a consumer is behind its log: per partition where it stands, where the log ends, and what lies between. Pure.

Called by `dedup lag`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from checkpoint.errors import ConfigError
from checkpoint.position import Partition
from dedup.starting import Place
from dedup.store import Head


@dataclass(frozen=True)
class End:
    """What a broker says of one partition now."""

    first: int  # first position that can still be had
    end: int  # position after the last
    newest: dt.datetime | None = None  # when the newest event came, aware; None where that is not known


class Ends(Protocol):
    """A broker that is asked for all partitions of these topics."""

    def ends(self, topics: Sequence[str]) -> Mapping[Place, End]:
        """(topic, partition) -> its ends."""


@dataclass(frozen=True)
class Lag:
    """One partition of a consumer."""

    consumer: str
    partition: Partition
    checkpoint: int | None  # None: nothing was decided yet
    end: End
    decided: dt.datetime | None = None  # when the event at the checkpoint came

    @property
    def events(self) -> int:
        """Positions that can still be had and are not decided. Those that never become events (markers, compaction) are among them."""
        return max(0, self.end.end - max(self.end.first, self._next))

    @property
    def lost(self) -> int:
        """Positions behind the checkpoint that retention took before they were decided."""
        return max(0, min(self.end.first, self.end.end) - self._next) if self.checkpoint is not None else 0

    @property
    def another(self) -> bool:
        """The log ends before the checkpoint: it is not the log that was read."""
        return self._next > self.end.end

    @property
    def seconds(self) -> float | None:
        """Between the event at the checkpoint and the newest one; 0 where all is decided; None where a time is not known."""
        if self.checkpoint is not None and not self.events:
            return 0.0
        if self.decided is None or self.end.newest is None:
            return None
        return max(0.0, (self.end.newest - self.decided).total_seconds())

    @property
    def _next(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint + 1


def lags(head: Head, broker: Ends, topics: Sequence[str] = (), source: str | None = None) -> list[Lag]:
    """All partitions that the broker has of these topics, in order.

    Args:
        topics: by default those that the consumer has read from this source.
        source: what the state calls this broker; may be left out where it knows only one.

    Raises:
        ConfigError: several sources are known and none is named; or there is no topic to ask for.
        SourceUnavailable: the broker does not answer.
    """
    where = source or _only_source(head)
    asked = tuple(topics) or tuple(sorted({p.topic for p in head.checkpoints if p.source == where}))
    if not asked:
        raise ConfigError(f"Consumer {head.consumer!r} has read no topic of {where!r} yet. Name the topics to ask for with --topic.")
    found = []
    for (topic, partition), end in sorted(broker.ends(asked).items()):
        place = Partition(where, topic, partition)
        point = head.checkpoints.get(place)
        number, decided = (point.sequence_number, point.enqueued_time) if point else (None, None)
        found.append(Lag(head.consumer, place, number, end, decided))
    return found


def _only_source(head: Head) -> str:
    known = sorted({p.source for p in head.checkpoints if p.source})
    if len(known) > 1:
        raise ConfigError(f"Consumer {head.consumer!r} reads from {', '.join(known)}. Say with --source which of them is asked.")
    return known[0] if known else "kafka"
