"""Many closed ranges as two arrays: 16 bytes each, and every operation over all of them at once. Pure.

For what can be long: the positions of a partition with a gap for each transaction. Called by `verify`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from checkpoint.position import Range, Ranges

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Spans:
    """Sorted, disjoint, non-adjacent closed ranges."""

    firsts: Ints = field(default_factory=_none)
    lasts: Ints = field(default_factory=_none)

    @classmethod
    def of(cls, firsts: Ints, lasts: Ints) -> Spans:
        """The union of closed ranges in any order, overlapping or not."""
        if not len(firsts):
            return cls()
        order = np.argsort(firsts, kind="stable")
        firsts, reach = firsts[order], np.maximum.accumulate(lasts[order])
        starts = np.flatnonzero(np.r_[True, firsts[1:] > reach[:-1] + 1])
        return cls(firsts[starts], reach[np.r_[starts[1:] - 1, len(reach) - 1]])

    def __len__(self) -> int:
        """How many ranges."""
        return len(self.firsts)

    def __or__(self, other: Spans) -> Spans:
        return Spans.of(np.r_[self.firsts, other.firsts], np.r_[self.lasts, other.lasts])

    def touched(self, firsts: Ints, lasts: Ints) -> Bools:
        """Which of these closed ranges share a position with ours."""
        at = np.searchsorted(self.lasts, firsts, "left")  # the first of ours that does not end before
        found = np.zeros(len(firsts), dtype=bool)
        inside = at < len(self.firsts)
        found[inside] = self.firsts[at[inside]] <= lasts[inside]
        return found

    def contains(self, numbers: Ints) -> Bools:
        """For each number, whether it is in one of the ranges."""
        return self.touched(numbers, numbers)

    def gaps(self, until: int) -> Spans:
        """What lies between the first range and `until` and in none of them."""
        if not len(self.firsts):
            return Spans()
        firsts, lasts = self.lasts + 1, np.r_[self.firsts[1:] - 1, np.int64(until)]
        there = firsts <= lasts
        return Spans(firsts[there], lasts[there])

    def ranges(self) -> Ranges:
        """The same as a value."""
        return Ranges(tuple(Range(a, b) for a, b in zip(self.firsts.tolist(), self.lasts.tolist(), strict=True)))


def overlapping(firsts: Ints, lasts: Ints) -> bool:
    """Whether any two of these closed ranges share a position."""
    order = np.argsort(firsts, kind="stable")
    return bool((firsts[order][1:] <= np.maximum.accumulate(lasts[order])[:-1]).any())
