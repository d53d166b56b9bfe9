"""Positions and the ranges they form: where in the log an event stands, and which positions were seen.

Ranges are closed on both ends, sorted, disjoint and never adjacent, so that two equal sets are equal values.
Called by the planning code, both stores and `verify`. Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FIRST, LAST = -(2**63), 2**63 - 1
"""The smallest and the largest sequence number: both stores keep them in 64 bits."""

KAFKA_SOURCE = "kafka"
"""The source of its events where none is named."""


class Partition(NamedTuple):
    """One partition of one topic of one source; sorts in that order."""

    source: str
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.source}/{self.topic}/{self.partition}"


class Range(NamedTuple):
    """Sequence numbers `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Ranges:
    """A set of sequence numbers as sorted, disjoint, non-adjacent closed ranges: two arrays, and every operation over all of them at once.

    A log with transaction markers leaves a gap for each transaction, so that the ranges of a partition can be many: 16 bytes each.

    Attributes:
        firsts, lasts: the first and the last number of each range. They are not to be changed.
    """

    def __init__(self, firsts: npt.ArrayLike = (), lasts: npt.ArrayLike = ()) -> None:
        """Of ranges that are sorted, disjoint and non-adjacent already; `of` takes any."""
        self.firsts, self.lasts = np.asarray(firsts, dtype=np.int64), np.asarray(lasts, dtype=np.int64)

    @classmethod
    def of(cls, pairs: Iterable[Sequence[int]]) -> Ranges:
        """The union of closed `(first, last)` pairs in any order, overlapping or not. Raises ValueError where first > last."""
        both = np.array([(first, last) for first, last in pairs], dtype=np.int64).reshape(-1, 2)
        return cls.of_columns(both[:, 0], both[:, 1])

    @classmethod
    def of_columns(cls, firsts: Ints, lasts: Ints) -> Ranges:
        """The same of two columns."""
        if not len(firsts):
            return cls()
        if (wrong := np.flatnonzero(firsts > lasts)).size:
            raise ValueError(f"range {firsts[wrong[0]]}-{lasts[wrong[0]]} ends before it starts")
        order = np.argsort(firsts, kind="stable")
        firsts, reach = firsts[order], np.maximum.accumulate(lasts[order])
        starts = np.flatnonzero(np.r_[True, (firsts[1:] > reach[:-1]) & (firsts[1:] - 1 > reach[:-1])])
        return cls(firsts[starts], reach[np.r_[starts[1:] - 1, len(reach) - 1]])

    @classmethod
    def of_numbers(cls, numbers: npt.ArrayLike) -> Ranges:
        """The set of the given sequence numbers; order and repeats do not matter."""
        array = np.asarray(numbers, dtype=np.int64)
        if not len(array):
            return cls()
        step = np.diff(array)
        if not (step > 0).all():  # the usual case is sorted
            array = np.unique(array)
            step = np.diff(array)
        cut = np.flatnonzero(step != 1)
        return cls(array[np.r_[0, cut + 1]], array[np.r_[cut, len(array) - 1]])

    @property
    def items(self) -> tuple[Range, ...]:
        """The ranges as values."""
        return tuple(map(Range, self.firsts.tolist(), self.lasts.tolist()))

    @property
    def pairs(self) -> list[list[int]]:
        """The same for JSON: first and last of each."""
        both: list[list[int]] = np.column_stack((self.firsts, self.lasts)).tolist()
        return both

    def __bool__(self) -> bool:
        return len(self.firsts) > 0

    def __len__(self) -> int:
        """How many sequence numbers are in the set."""
        return int((self.lasts - self.firsts).sum()) + len(self.firsts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranges):
            return NotImplemented
        return np.array_equal(self.firsts, other.firsts) and np.array_equal(self.lasts, other.lasts)

    def __hash__(self) -> int:
        return hash((self.firsts.tobytes(), self.lasts.tobytes()))

    def __or__(self, other: Ranges) -> Ranges:
        if not other or not self:
            return self if self else other
        return Ranges.of_columns(np.r_[self.firsts, other.firsts], np.r_[self.lasts, other.lasts])

    def __and__(self, other: Ranges) -> Ranges:
        low = np.searchsorted(other.lasts, self.firsts, "left")
        counts = np.searchsorted(other.firsts, self.lasts, "right") - low  # of the others that share a number with each of ours
        mine = np.repeat(np.arange(len(counts)), counts)
        theirs = np.arange(len(mine)) + np.repeat(low - np.r_[0, np.cumsum(counts)[:-1]], counts) if len(mine) else mine
        return Ranges(np.maximum(self.firsts[mine], other.firsts[theirs]), np.minimum(self.lasts[mine], other.lasts[theirs]))

    def __sub__(self, other: Ranges) -> Ranges:
        if not other or not self:
            return self
        firsts, lasts = np.r_[FIRST, other.lasts[other.lasts < LAST] + 1], other.firsts[other.firsts > FIRST] - 1
        if other.firsts[0] == FIRST:
            firsts = firsts[1:]
        return self & Ranges(firsts, np.r_[lasts, LAST][: len(firsts)])

    def touched(self, firsts: Ints, lasts: Ints) -> Bools:
        """Which of these closed ranges share a number with ours."""
        at = np.searchsorted(self.lasts, firsts, "left")  # the first of ours that does not end before
        found = np.zeros(len(firsts), dtype=bool)
        inside = at < len(self.firsts)
        found[inside] = self.firsts[at[inside]] <= lasts[inside]
        return found

    def at_most(self, count: int) -> Ranges:
        """So many ranges, at least one, that hold all of these numbers and few others: the narrowest gaps are closed."""
        if len(self.firsts) <= count:
            return self
        gaps = (self.firsts[1:] - self.lasts[:-1]).astype(np.uint64)  # which a signed number may not hold
        cuts = np.sort(np.argsort(gaps)[len(gaps) - count + 1 :])
        return Ranges(self.firsts[np.append(0, cuts + 1)], self.lasts[np.append(cuts, -1)])

    def contains(self, numbers: Ints) -> Bools:
        """For each number, whether it is in the set; O(n log ranges)."""
        return self.touched(numbers, numbers)

    def gaps(self, until: int) -> Ranges:
        """What lies between the first range and `until` and in none of them."""
        return Ranges.of([(int(self.firsts[0]), until)]) - self if self and until >= self.firsts[0] else Ranges()

    def __repr__(self) -> str:
        return f"Ranges({self})"

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.items)) + "]"


class GrowingRanges:
    """A set of numbers that mostly grows at its end: adding costs the size of what is added, not of what is there."""

    def __init__(self) -> None:
        self._pieces: list[Ranges] = []  # each more than twice as long as the next

    def add(self, pairs: Iterable[Sequence[int]]) -> None:
        """Take in closed ranges, in any order, overlapping or not."""
        self._pieces.append(Ranges.of(pairs))
        while len(self._pieces) > 1 and len(self._pieces[-2].firsts) <= 2 * len(self._pieces[-1].firsts):
            last = self._pieces.pop()
            self._pieces[-1] |= last

    @property
    def ranges(self) -> int:
        """How many ranges it holds: those of `whole`, and of overlaps more."""
        return sum(len(piece.firsts) for piece in self._pieces)

    def within(self, first: int, last: int) -> Ranges:
        """What is there of the numbers from first to last, both included."""
        window = Ranges([max(first, FIRST)], [min(last, LAST)])
        return reduce(or_, (window & piece for piece in self._pieces), Ranges())

    def whole(self) -> Ranges:
        """All of it."""
        return reduce(or_, self._pieces, Ranges())


def overlapping(firsts: Ints, lasts: Ints) -> bool:
    """Whether any two of these closed ranges share a number."""
    order = np.argsort(firsts, kind="stable")
    return bool((firsts[order][1:] <= np.maximum.accumulate(lasts[order])[:-1]).any())


KEY_ONLY = Partition("", "", -1)
"""The partition of events without positions."""
