"""The positions one partition has seen, as arrays that grow at the end.

A log with transaction markers leaves a gap per transaction, so the ranges of a partition can be many; batches come almost always
in order. Adding such a batch costs its own size, not the history's. Called by the consumer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from checkpoint.position import Range, Ranges

I64 = npt.NDArray[np.int64]


class Seen:
    """Sorted, disjoint, non-adjacent closed ranges of one partition."""

    def __init__(self) -> None:
        self._firsts: I64 = np.empty(16, dtype=np.int64)
        self._lasts: I64 = np.empty(16, dtype=np.int64)
        self._size = 0

    def add(self, pairs: Iterable[Sequence[int]]) -> None:
        """Take in closed ranges, in any order, overlapping or not."""
        new = Ranges.of(pairs).items
        if not new:
            return
        if self._size and new[0].first <= self._lasts[self._size - 1]:
            self._replace(self._all() | Ranges(new))
            return
        if self._size and new[0].first == self._lasts[self._size - 1] + 1:
            self._lasts[self._size - 1] = new[0].last
            new = new[1:]
        self._append(new)

    def within(self, first: int, last: int) -> Ranges:
        """What was seen of the positions from first to last, both included."""
        low = int(np.searchsorted(self._lasts[: self._size], first, "left"))
        high = int(np.searchsorted(self._firsts[: self._size], last, "right"))
        return Ranges(
            tuple(Range(max(first, int(self._firsts[i])), min(last, int(self._lasts[i]))) for i in range(low, high)),
        )

    def pairs(self) -> list[list[int]]:
        """All ranges, as values that JSON can hold."""
        stacked: list[list[int]] = np.stack([self._firsts[: self._size], self._lasts[: self._size]], axis=1).tolist()
        return stacked

    def _all(self) -> Ranges:
        return Ranges(tuple(Range(int(a), int(b)) for a, b in self.pairs()))

    def _append(self, new: Sequence[Range]) -> None:
        need = self._size + len(new)
        if need > len(self._firsts):
            room = np.empty(max(need, 2 * len(self._firsts)) - len(self._firsts), dtype=np.int64)
            self._firsts, self._lasts = np.r_[self._firsts, room], np.r_[self._lasts, room]
        for i, item in enumerate(new, self._size):
            self._firsts[i], self._lasts[i] = item
        self._size = need

    def _replace(self, ranges: Ranges) -> None:
        self._size = 0
        self._append(ranges.items)
