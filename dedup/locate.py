"""Which partitions a batch has, and where positions stand in it: by search in one ascending number per row, else by sorting both.

Pure. Called by index.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.position import Partition

Ints = npt.NDArray[np.int64]

FEW = 100
"""Rows up to which a loop in Python is quicker than to call for columns."""

_PARTITION = ("source", "topic", "partition")

Columns = tuple[Ints, Ints, Ints]
"""Which partition (-1: none of the batch), sequence number and part of each row."""


class Range(NamedTuple):
    """The values of a column."""

    first: int
    last: int

    @classmethod
    def of(cls, column: Ints) -> Range:
        """Of a column that is not empty."""
        return cls(int(column.min()), int(column.max()))

    @property
    def size(self) -> int:
        """How many values there could be."""
        return self.last - self.first + 1

    def holds(self, column: Ints) -> npt.NDArray[np.bool_]:
        """Whether each value is one of them."""
        return (column >= self.first) & (column <= self.last)


class Ranks(NamedTuple):
    """Rows in position order, the position of each as one number."""

    numbers: Range
    parts: Range
    rows: Ints  # ascending

    @classmethod
    def of(cls, rows: Columns) -> Ranks | None:
        """None where there are no rows, where they are not in order, or where a position does not fit into a number."""
        place, numbers, parts = rows
        if not len(place):
            return None
        ranges = Range.of(numbers), Range.of(parts)
        if (int(place.max()) + 1) * ranges[0].size * ranges[1].size >= 1 << 62:
            return None
        ranks = _as_one(rows, *ranges)
        return cls(*ranges, ranks) if bool((ranks[1:] >= ranks[:-1]).all()) else None

    def find(self, wanted: Columns) -> Ints:
        """As `match`."""
        place, numbers, parts = wanted
        possible = (place >= 0) & self.numbers.holds(numbers) & self.parts.holds(parts)
        asked = np.where(possible, _as_one(wanted, self.numbers, self.parts), -1)
        at = np.searchsorted(self.rows, asked)
        return np.where(self.rows[np.minimum(at, len(self.rows) - 1)] == asked, at, -1)


def _as_one(rows: Columns, numbers: Range, parts: Range) -> Ints:
    place, number, part = rows
    return (place * numbers.size + (number - numbers.first)) * parts.size + (part - parts.first)


def match(rows: Columns, wanted: Columns) -> Ints:
    """For each position that is wanted the first row that has it, or -1."""
    columns = [np.concatenate(pair) for pair in zip(rows, wanted, strict=True)]
    asked = np.arange(len(columns[0])) >= len(rows[0])
    order = np.lexsort((np.arange(len(asked)), columns[2], columns[1], columns[0]))
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = np.any([np.diff(c[order]) != 0 for c in columns], axis=0)
    leader = order[np.flatnonzero(starts)][np.cumsum(starts) - 1]
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.where(leader < len(rows[0]), leader, -1)
    return found[asked]


def places(table: pa.Table) -> tuple[tuple[Partition, ...], Ints]:
    """The distinct partitions, sorted, and for each row which of them it belongs to. Columns source, topic, partition."""
    few = table.num_rows <= FEW and not any(table[name].null_count for name in _PARTITION)
    return _places_of_few(table) if few else _places_of_many(table)


def _places_of_few(table: pa.Table) -> tuple[tuple[Partition, ...], Ints]:
    rows = list(zip(*(table[name].to_pylist() for name in _PARTITION), strict=True))
    partitions = tuple(sorted(Partition(*row) for row in set(rows)))
    rank: dict[tuple[object, ...], int] = {partition: i for i, partition in enumerate(partitions)}
    return partitions, np.array([rank[row] for row in rows], dtype=np.int64)


def _places_of_many(table: pa.Table) -> tuple[tuple[Partition, ...], Ints]:
    codes: list[Ints] = []
    values: list[list[object]] = []
    for name in _PARTITION:
        encoded = table[name].combine_chunks().dictionary_encode()
        codes.append(encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64))
        values.append(encoded.dictionary.to_pylist())
    combined = (codes[0] * max(len(values[1]), 1) + codes[1]) * max(len(values[2]), 1) + codes[2]
    encoded = pa.array(combined).dictionary_encode()
    place = encoded.indices.to_numpy().astype(np.int64)
    names = [_name(values, code) for code in encoded.dictionary.to_pylist()]
    rank = sorted(range(len(names)), key=lambda i: names[i])
    back = np.empty(len(names), dtype=np.int64)
    back[rank] = np.arange(len(names))
    return tuple(names[i] for i in rank), back[place] if len(place) else np.zeros(0, dtype=np.int64)


def _name(values: list[list[object]], code: int) -> Partition:
    code, partition = divmod(code, max(len(values[2]), 1))
    source, topic = divmod(code, max(len(values[1]), 1))
    return Partition(str(values[0][source]), str(values[1][topic]), int(str(values[2][partition])))
