"""The columnar view of a batch that decisions are made on: positions, keys and payload hashes, in position order.

Payload hashes are asked for when they are needed: by then the store may be looking the keys up already.

One row per delivered row. Arrays are numpy, so that fifty thousand rows cost milliseconds. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.errors import AmbiguousPosition
from checkpoint.position import Partition
from dedup.locate import Ranks, match, places
from dedup.sorting import Words, by_key, find_keys, key_bytes, key_words
from dedup.store import KEYS

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NO_KEYS = KEYS.empty_table()

KEY_ONLY = Partition("", "", -1)
"""The partition of events without positions."""

INDEX_COLUMNS = ("source", "topic", "partition", "sequence_number", "part", "_key", "_undecodable")


@dataclass(frozen=True, eq=False)
class Index:
    """Rows in position order; `order[i]` is where row i stands in the materialised batch."""

    _FIELDS: ClassVar = ("order", "place", "numbers", "parts", "high", "low", "no_key", "undecodable")

    partitions: tuple[Partition, ...]
    order: Ints
    place: Ints  # which of `partitions`
    numbers: Ints  # sequence numbers
    parts: Ints
    high: Words
    low: Words
    no_key: Bools
    undecodable: Bools
    payloads: Callable[[], Ints]  # payload hashes of the whole materialised batch

    @classmethod
    def of(cls, table: pa.Table, payloads: Callable[[], Ints]) -> Index:
        """From a table with INDEX_COLUMNS, one row per delivered row in any order; position columns must not be null.

        Args:
            payloads: the payload hashes of these rows.
        """
        partitions, place = places(table)
        numbers, parts = table["sequence_number"].to_numpy(), table["part"].to_numpy()
        high, low = key_words(table["_key"])
        # Without positions the order must still be the same each time the batch is delivered.
        order = np.lexsort((numbers, payloads(), low, high) if partitions == (KEY_ONLY,) else (parts, numbers, place))
        return cls(
            partitions,
            order,
            place[order],
            numbers[order],
            parts[order],
            high[order],
            low[order],
            table["_key"].is_null().to_numpy()[order],
            table["_undecodable"].to_numpy()[order],
            payloads,
        )

    @classmethod
    def of_keys(cls, keys: pa.Table) -> Keys:
        """A sorted set of keys to look others up in."""
        high, low = key_words(keys["key"])
        order = by_key(high, low)
        return Keys(high[order], low[order], keys["payload_hash"].to_numpy()[order])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> Index:
        """A chunk of this index."""
        if rows == slice(0, len(self)):
            return self
        return replace(self, **{f: getattr(self, f)[rows] for f in self._FIELDS})

    def only(self, rows: Ints) -> Index:
        """These rows of it."""
        return replace(self, **{f: getattr(self, f)[rows] for f in self._FIELDS})

    def positions(self, rows: Ints) -> pa.Table:
        """The columns of POSITION of these rows."""
        names = [self.partitions[at] for at in self.place[rows].tolist()]
        columns = [pa.array([n[i] for n in names], t) for i, t in enumerate((pa.string(), pa.string(), pa.int32()))]
        numbers = (pa.array(self.numbers[rows]), pa.array(self.parts[rows]))
        return pa.table(dict(zip(INDEX_COLUMNS[:5], (*columns, *numbers), strict=True)))

    def travelling(self, rows: Ints) -> Index:
        """These rows of it, for another process: without payload hashes, which are asked of the whole batch."""
        return replace(self.only(rows), order=np.arange(len(rows)), payloads=_not_here)

    @cached_property
    def payload(self) -> Ints:
        """The payload hash of each row."""
        return self.payloads()[self.order]

    def by_partition(self) -> Iterator[tuple[Partition, Ints]]:
        """Each partition that has rows, with the numbers of those rows; key-only rows belong to none."""
        yield from self._by_partition

    @cached_property
    def _by_partition(self) -> list[tuple[Partition, Ints]]:
        bounds = np.searchsorted(self.place, np.arange(len(self.partitions) + 1)).tolist()
        parts = zip(self.partitions, bounds, bounds[1:], strict=False)
        return [(p, np.arange(first, end)) for p, first, end in parts if p != KEY_ONLY and first < end]

    @cached_property
    def spans(self) -> dict[Partition, tuple[int, int]]:
        """First and last sequence number of each partition."""
        return {p: (int(self.numbers[rows[0]]), int(self.numbers[rows[-1]])) for p, rows in self.by_partition()}

    def same_event(self, a: int, b: int) -> bool:
        """Whether rows a and b have the same sequence number of the same partition."""
        return bool(self.place[a] == self.place[b] and self.numbers[a] == self.numbers[b] and self.partitions[self.place[a]] != KEY_ONLY)

    def repeated(self) -> Ints:
        """Rows whose whole position is that of the row before them."""
        if len(self) < 2 or self.partitions == (KEY_ONLY,):
            return np.zeros(0, dtype=np.int64)
        same = (np.diff(self.place) == 0) & (np.diff(self.numbers) == 0) & (np.diff(self.parts) == 0)
        return np.flatnonzero(same) + 1

    def groups(self, rows: Ints) -> tuple[Ints, Ints]:
        """For each of `rows` (ascending), the number of its key's group; and each group's first row."""
        return self._all_groups if len(rows) == len(self) else self._groups(rows)

    @cached_property
    def _all_groups(self) -> tuple[Ints, Ints]:
        return self._groups(np.arange(len(self)))

    def _groups(self, rows: Ints) -> tuple[Ints, Ints]:
        if not len(rows):
            return rows, rows
        order = by_key(self.high[rows], self.low[rows])  # rows of one key stay ascending
        ordered = rows[order]
        starts = np.ones(len(rows), dtype=bool)
        starts[1:] = (np.diff(self.high[ordered]) != 0) | (np.diff(self.low[ordered]) != 0)
        group = np.empty(len(rows), dtype=np.int64)
        group[order] = np.cumsum(starts) - 1
        return group, ordered[starts]

    def keys_of(self, rows: Ints) -> pa.Table:
        """KEYS of these rows, in their order."""
        if not len(rows):
            return _NO_KEYS
        return pa.table([key_bytes(self.high[rows], self.low[rows]), pa.array(self.payload[rows])], schema=KEYS)

    def rows_of_keys(self, keys: pa.Table) -> Ints:
        """Rows that have one of these keys."""
        at, _ = Index.of_keys(keys).find_words(self.high, self.low)
        return np.flatnonzero((at >= 0) & ~self.no_key)

    def partition_of(self, row: int) -> Partition:
        """The partition of a row."""
        return self.partitions[int(self.place[row])]

    def describe(self, row: int) -> str:
        """The row's position for a message to people."""
        part = f" part {self.parts[row]}" if self.parts[row] else ""
        return f"{self.partition_of(int(row))} {self.numbers[row]}{part}"

    def locate(self, positions: pa.Table) -> Ints:
        """For each position, the first row that has it, or -1. Columns source, topic, partition, sequence_number, part."""
        partitions, place = places(positions)
        mine = {p: i for i, p in enumerate(self.partitions)}
        place = np.array([mine.get(p, -1) for p in partitions], dtype=np.int64)[place] if len(place) else place
        wanted = (place, positions["sequence_number"].to_numpy(), positions["part"].to_numpy())
        if self._ranks is None or any(column.dtype != np.int64 for column in wanted):  # some are null: positions of no event
            return match((self.place, self.numbers, self.parts), wanted)
        return self._ranks.find(wanted)

    @cached_property
    def _ranks(self) -> Ranks | None:
        return Ranks.of((self.place, self.numbers, self.parts))


@dataclass(frozen=True, eq=False)
class Keys:
    """Sorted keys with their payload hashes."""

    high: Words
    low: Words
    payload: Ints

    def find(self, keys: pa.Table) -> tuple[Ints, Ints]:
        """For each key, where it stands here or -1, and its payload hash here (0 where it is not)."""
        return self.find_words(*key_words(keys["key"]))

    def find_words(self, high: Words, low: Words) -> tuple[Ints, Ints]:
        """The same for the two halves of keys."""
        place, found = find_keys(self.high, self.low, high, low)
        payload = np.zeros(len(high), dtype=np.int64)
        payload[found] = self.payload[place[found]]
        return np.where(found, place, -1), payload


def _not_here() -> Ints:
    raise NotImplementedError("payload hashes stay where the batch is")


def first_of_each_key(index: Index, chosen: Bools) -> Ints:
    """The first of the chosen rows of each key, sorted by key."""
    return index.groups(np.flatnonzero(chosen))[1]


def check_repeats(index: Index, repeats: Ints, content: pa.Table) -> None:
    """Raise AmbiguousPosition where a position occurs twice with different contents; the same content is a redelivery.

    Args:
        repeats: from `index.repeated()`.
        content: the whole rows of `repeats` and of the row before each, interleaved: before, repeat, before, repeat ...
    """
    for i, row in enumerate(repeats):
        pair = content.slice(2 * i, 2).to_pylist()
        if repr(pair[0]) != repr(pair[1]):
            raise AmbiguousPosition(
                f"Position {index.describe(int(row))} occurs twice in one batch with different contents. "
                f"If one event was exploded into several rows, name the column that numbers them: Consumer(..., part='column')."
            )
