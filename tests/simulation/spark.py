"""Spark's own directory of a query, as far as the order of deliveries depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simulation.log import Log

Places = list[tuple[int, int]]


@dataclass
class SparkCheckpoint:
    """Planned and finished batches of one query id; what is planned is delivered again until it is finished."""

    query_id: str
    log: Log
    begin: tuple[int, ...]  # of each partition of the log
    planned: list[list[tuple[int, int]]] = field(default_factory=list)  # per batch and partition: [from, to) in the log
    finished: int = 0

    @property
    def passed(self) -> Iterator[tuple[int, int]]:
        """The positions before its first batch."""
        return (e.at for part, begin in zip(self.log.partitions, self.begin, strict=True) for e in part[:begin])

    def plan(self, batch: int, coin: Callable[..., float]) -> bool:
        """Plan the next batch: of each partition up to three events, of some nothing; False where there is nothing left.

        Args:
            coin: how much of a partition, from 0 to 1, by query, batch and partition.
        """
        parts, ends = self.log.partitions, self._ends(batch)
        late = self._late(batch - 1)
        if self._reached(ends) and not late:
            return False
        more = [(a, len(part), coin(self.query_id, batch, part[0].partition)) for a, part in zip(ends, parts, strict=True)]
        planned = [(a, min(length, a + int(much * 4))) for a, length, much in more]
        if not late and planned == [(a, a) for a in ends]:  # of the others nothing is asked
            planned = [(a, min(length, a + 1)) for a, length, _ in more]
        self.planned.append(planned)
        return True

    def batch(self, batch: int) -> Places:
        """The positions of a planned batch; those that come late come one batch after their neighbours."""
        slices = zip(self.log.partitions, self.planned[batch], strict=True)
        return [*self._late(batch - 1), *(e.at for part, (a, b) in slices for e in part[a:b] if not e.held)]

    @property
    def at_the_end(self) -> bool:
        """Whether all of the log is finished."""
        return self._reached(self._ends(self.finished))

    def _ends(self, batch: int) -> tuple[int, ...]:
        return tuple(b for _, b in self.planned[batch - 1]) if batch else self.begin

    def _reached(self, ends: tuple[int, ...]) -> bool:
        return all(end >= len(part) for end, part in zip(ends, self.log.partitions, strict=True))

    def _late(self, batch: int) -> Places:
        slices = zip(self.log.partitions, self.planned[batch], strict=True) if batch >= 0 else ()
        return [e.at for part, (a, b) in slices for e in part[a:b] if e.held]
