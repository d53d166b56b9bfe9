"""The positions that one consumer has seen: the newer ones in memory, the older ones in its ledger until a batch comes near them.

A topic with transactions has a hole at each of their markers, which never becomes an event (KIP-98), so its positions are many short
ranges. They are kept exactly: an event whose position was never delivered may still come. Where a partition has more than MOST_RANGES, the
next decision leaves them to the ledger, as a row of its own (STRETCH), and every process forgets them but for their ends.

Promises that an answer is that of all batch records since the last reset, and that memory, a summary and a start cost as much as the newer
ones. Called by the consumer's state.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import pyarrow as pa

from checkpoint.position import FIRST, GrowingRanges, Partition, Ranges
from dedup.delta.ledger import BATCH, STRETCH, SUMMARY, LogRow

MOST_RANGES = 10_000
"""Ranges of a partition that stay in memory: 160 kB there, and a quarter of a megabyte of each summary."""

LOADED = 64
"""Stretches that a process keeps after it has read them."""

_ORDER = {SUMMARY: 0, STRETCH: 1, BATCH: 2}
"""Of the rows of one decision: what it leaves to the ledger are the positions before its own."""


class PartitionLife(NamedTuple):
    """Where positions count: a partition, in one life of its topic."""

    partition: Partition
    life: int


class Stretch(NamedTuple):
    """Positions between two that are all in one row of the ledger."""

    first: int
    last: int
    seq: int  # of the decision with the row


@dataclass
class KnownPositions:
    """What a process knows of one place."""

    recent: GrowingRanges = field(default_factory=GrowingRanges)
    older: list[Stretch] = field(default_factory=list)  # ascending in seq
    reach: int = FIRST  # the last position of them: what lies behind it asks none

    def leave(self, stretch: Stretch) -> None:
        """All that is known until now is in this row of the ledger, too."""
        if not self.older or self.older[-1].seq < stretch.seq:  # else the summary has told of it
            self.older.append(stretch)
            self.reach = max(self.reach, stretch.last)
            self.recent = GrowingRanges()


class SeenPositions:
    """All of them since the last reset.

    Args:
        load: gives the positions of a stretch; raises StoreUnavailable or StoreRestored.
    """

    def __init__(self, load: Callable[[PartitionLife, Stretch], Ranges]) -> None:
        self._load = lru_cache(LOADED)(load)
        self.known = defaultdict[PartitionLife, KnownPositions](KnownPositions)

    def within(self, place: PartitionLife, first: int, last: int) -> Ranges:
        """Those from first to last, both included. Reads the stretches that are touched."""
        known = self.known.get(place) or KnownPositions()
        near = [one for one in known.older if one.first <= last and one.last >= first] if first <= known.reach else []
        found = reduce(or_, (self._load(place, stretch) for stretch in near), Ranges())
        return found & Ranges.of([(first, last)]) | known.recent.within(first, last)

    def take_in(self, rows: pa.Table, summary: int) -> None:
        """Take in rows of the log since the last reset, but for headers.

        Args:
            rows: columns `seq`, `kind`, `source`, `topic`, `partition`, `doc`, of all decisions after those that are known; where none is
                known, from the newest summary on.
            summary: the decision with that summary.
        """
        fresh = not self.known
        for row in sorted(rows.to_pylist(), key=lambda row: (row["seq"], _ORDER[row["kind"]])):
            if row["kind"] == SUMMARY:
                if fresh and row["seq"] == summary:
                    self._begin_with(json.loads(row["doc"]))
                continue
            doc = json.loads(row["doc"])
            known = self.known[PartitionLife(Partition(row["source"], row["topic"], row["partition"]), doc["incarnation"])]
            if row["kind"] == BATCH:
                known.recent.add(doc["seen"])
            else:
                known.leave(Stretch(doc["seen"][0][0], doc["seen"][-1][1], row["seq"]))

    def _begin_with(self, summary: list[Any]) -> None:
        for source, topic, partition, life, pairs, stretches in summary:
            older = [Stretch(*stretch) for stretch in stretches]
            known = KnownPositions(older=older, reach=max((stretch.last for stretch in older), default=FIRST))
            known.recent.add(pairs)
            self.known[PartitionLife(Partition(source, topic, partition), life)] = known

    def rows(self, seq: int, *, summary: bool) -> Iterator[LogRow]:
        """What the decision `seq` writes down: positions that it leaves to the ledger, and perhaps a summary of those that stay."""
        told = []
        for place, known in self.known.items():
            stretches = known.older
            if leaves := known.recent.ranges > MOST_RANGES:
                pairs = known.recent.whole()
                yield (STRETCH, *place.partition, _json({"incarnation": place.life, "seen": pairs.pairs}))
                stretches = [*stretches, Stretch(int(pairs.firsts[0]), int(pairs.lasts[-1]), seq)]
            if summary:
                told.append([*place.partition, place.life, [] if leaves else known.recent.whole().pairs, stretches])
        if summary:
            yield SUMMARY, None, None, None, _json(told)


def positions_of(rows: pa.Table, place: PartitionLife, stretch: Stretch) -> Ranges | None:
    """Those of a stretch, from rows of the log; None where they are not there."""
    for row in rows.to_pylist():
        if row["seq"] == stretch.seq and row["kind"] == STRETCH and (row["source"], row["topic"], row["partition"]) == place.partition:
            doc: Mapping[str, Any] = json.loads(row["doc"])
            if doc["incarnation"] == place.life:
                return Ranges.of(doc["seen"])
    return None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
