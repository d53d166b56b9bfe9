"""Where a stream begins that has lost its own checkpoint, and how far a consumer is behind its log.

A stream begins right after our checkpoint, wherever there is one. The lag of a partition is what lies between the checkpoint and the end
of the log. Pure but for what the log is asked. Called by the consumer, by the sources of this project, by `dedup consumer lag` and by
mirrors into consumer groups.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from checkpoint import guards
from checkpoint.errors import ConfigError, IncarnationChanged, PositionGap, command
from checkpoint.head import Head, Run
from checkpoint.position import KAFKA_SOURCE, Partition

New = Literal["earliest", "latest"]

Place = tuple[str, int]
"""(topic, partition)"""

Start = int | New
"""A position, or an end of the log."""


class Log(Protocol):
    """What a broker says of the ends of its partitions."""

    def spans(self, topics: Sequence[str]) -> Mapping[Place, tuple[int, int]]:
        """(topic, partition) -> (first position that can still be had, position after the last), of all their partitions."""


def source_of(consumer: Any) -> str:
    """The name under which this consumer keeps the events of Spark's Kafka source."""
    return consumer.source or KAFKA_SOURCE


def positions(head: Head, source: str, log: Log, topics: Sequence[str], new: New = "earliest") -> dict[Place, Start]:
    """The first position that each partition of these topics has to deliver.

    Args:
        new: where partitions begin that have no checkpoint. Those that are added later begin at their first position with any source.

    Raises:
        ConfigError: no topic is named. PositionGap: retention has passed a checkpoint, and nobody has accepted the gap.
        IncarnationChanged: a partition ends below its checkpoint.
    """
    if not topics:
        raise ConfigError("Name the topics that the stream subscribes to.")
    spans = log.spans(topics)
    known = {(p.topic, p.partition): point.sequence_number + 1 for p, point in head.checkpoints.items() if p.source == source}
    _refuse_lost_ends(head, source, spans, known)
    gaps = [
        f"{Partition(source, *place)} {known[place]}-{first - 1}" for place, (first, _) in spans.items() if known.get(place, first) < first
    ]
    if gaps and not head.gap_accepted:
        raise PositionGap(
            f"Consumer {head.consumer!r}: retention has passed the checkpoint, and the broker has deleted these positions: "
            f"{', '.join(gaps)}. "
            f"Run {command('consumer', 'accept-gap', head.consumer)} to go on without them."
        )
    return {place: max(known[place], first) if place in known else new for place, (first, _) in spans.items()}


def without_absent(head: Head, run: Run, firsts: Mapping[Partition, int], read_log: Any) -> dict[Partition, int]:
    """The first positions of a batch, moved down to the checkpoint where the log says that nothing lies between.

    A query that begins right behind the checkpoint delivers its first event later where transaction markers, aborted messages or compaction
    come first. By positions alone that looks like events left out; a log reader with an attribute `absent` tells.
    """
    absent = getattr(read_log, "absent", None)
    gaps = guards.gaps(head, run, firsts) if absent is not None else {}
    return {**firsts, **{p: span.first for p, span in gaps.items() if absent and absent(*p, span.first, span.last)}}


def _refuse_lost_ends(head: Head, source: str, spans: Mapping[Place, tuple[int, int]], known: Mapping[Place, int]) -> None:
    short = [place for place, (_, end) in spans.items() if known.get(place, 0) > end]
    if not short:
        return
    told = ", ".join(f"{Partition(source, *place)} ends before {spans[place][1]}, our checkpoint is {known[place] - 1}" for place in short)
    raise IncarnationChanged(
        f"Consumer {head.consumer!r}: {told}. Either this is another broker, or the log lost its end, or topic {short[0][0]!r} was deleted "
        f"and created again: then {command('consumer', 'accept-incarnation', head.consumer, '--source', source, '--topic', short[0][0])}."
    )


def spark_json(starts: Mapping[Place, Start]) -> str:
    """As `startingOffsets` of Spark's Kafka source takes it: every partition is named, -2 is the earliest and -1 the latest."""
    ends = {"earliest": -2, "latest": -1}
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), start in sorted(starts.items()):
        found.setdefault(topic, {})[str(partition)] = start if isinstance(start, int) else ends[start]
    return json.dumps(found)


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
        ConfigError: several sources are known and none is named; the one that is named is none of them; or there is no topic to ask for.
        SourceUnavailable: the broker does not answer.
    """
    where = _source(head, source)
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


def next_positions(head: Head, topics: Sequence[str] = (), source: str | None = None) -> dict[Place, int]:
    """Where a consumer goes on in each (topic, partition): the position behind its checkpoint.

    Args:
        topics: by default those that the consumer has read from this source.
        source: what the state calls this broker; may be left out where it knows only one.

    Raises:
        ConfigError: several sources are known and none is named; or the one that is named is none of them.
    """
    where = _source(head, source)
    known = {(p.topic, p.partition): point.sequence_number + 1 for p, point in head.checkpoints.items() if p.source == where}
    return {place: position for place, position in known.items() if not topics or place[0] in topics}


def _source(head: Head, named: str | None) -> str:
    known = sorted({p.source for p in head.checkpoints if p.source})
    if named and known and named not in known:
        raise ConfigError(f"Consumer {head.consumer!r} reads nothing from {named!r}. It reads from {', '.join(known)}.")
    if named:
        return named
    if len(known) > 1:
        raise ConfigError(f"Consumer {head.consumer!r} reads from {', '.join(known)}. Name one of them with --source.")
    return known[0] if known else "kafka"
