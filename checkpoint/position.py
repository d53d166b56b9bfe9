"""Positions and the ranges they form: where in the log an event stands, and which positions were seen.

Ranges are closed on both ends, sorted, disjoint and never adjacent, so that two equal sets are equal values.
Called by the planning code, both stores and `verify`. Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LAST = 2**63 - 1
"""The largest sequence number: both stores keep them in 64 bits."""


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


@dataclass(frozen=True)
class Ranges:
    """A set of sequence numbers as sorted, disjoint, non-adjacent closed ranges."""

    items: tuple[Range, ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[Sequence[int]]) -> Ranges:
        """The union of closed `(first, last)` pairs in any order, overlapping or not. Raises ValueError where first > last."""
        merged: list[Range] = []
        for first, last in sorted((int(a), int(b)) for a, b in pairs):
            if first > last:
                raise ValueError(f"range {first}-{last} ends before it starts")
            if merged and first <= merged[-1].last + 1:
                merged[-1] = Range(merged[-1].first, max(merged[-1].last, last))
            else:
                merged.append(Range(first, last))
        return cls(tuple(merged))

    @classmethod
    def of_numbers(cls, numbers: npt.ArrayLike) -> Ranges:
        """The set of the given sequence numbers, vectorised; order and repeats do not matter."""
        array = np.asarray(numbers, dtype=np.int64)
        if not len(array):
            return cls()
        step = np.diff(array)
        if not (step > 0).all():  # the usual case is sorted
            array = np.unique(array)
            step = np.diff(array)
        cut = np.flatnonzero(step != 1)
        firsts, lasts = [int(array[0]), *array[cut + 1].tolist()], [*array[cut].tolist(), int(array[-1])]
        return cls(tuple(map(Range, firsts, lasts)))

    def __bool__(self) -> bool:
        return bool(self.items)

    def __len__(self) -> int:
        """How many sequence numbers are in the set."""
        return sum(r.last - r.first + 1 for r in self.items)

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.of((*self.items, *other.items))

    def __and__(self, other: Ranges) -> Ranges:
        found: list[Range] = []
        left, right = list(self.items), list(other.items)
        i = j = 0
        while i < len(left) and j < len(right):
            first, last = max(left[i].first, right[j].first), min(left[i].last, right[j].last)
            if first <= last:
                found.append(Range(first, last))
            if left[i].last < right[j].last:
                i += 1
            else:
                j += 1
        return Ranges(tuple(found))

    def __sub__(self, other: Ranges) -> Ranges:
        left: list[Range] = []
        taken, i = other.items, 0
        for first, last in self.items:
            while i < len(taken) and taken[i].last < first:
                i += 1
            j = i  # the last one that overlaps may reach into the next range, too
            while j < len(taken) and taken[j].first <= last:
                if taken[j].first > first:
                    left.append(Range(first, taken[j].first - 1))
                first = taken[j].last + 1
                j += 1
            i = max(i, j - 1)
            if first <= last:
                left.append(Range(first, last))
        return Ranges(tuple(left))

    def contains(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """For each number, whether it is in the set; O(n log ranges)."""
        if not self.items:
            return np.zeros(len(numbers), dtype=bool)
        firsts = np.array([r.first for r in self.items], dtype=np.int64)
        lasts = np.array([r.last for r in self.items], dtype=np.int64)
        at = np.searchsorted(firsts, numbers, side="right") - 1
        return (at >= 0) & (numbers <= lasts[np.maximum(at, 0)])

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.items)) + "]"
