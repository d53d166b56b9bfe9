"""The columns of a batch that decisions are made on: positions, keys and payload hashes, in position order.

The index has one row per delivered row, as numpy arrays: fifty thousand rows take milliseconds. Payload hashes are computed when they are
needed, while the store looks the keys up. Positions are found in a batch by binary search where one ascending number per row allows it,
else by sorting both sides. Pure. Called by all code that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.errors import AmbiguousPosition
from checkpoint.position import KEY_ONLY, Bools, Ints, Partition
from deadletter.store import KEYS
from dedup.core.keys import Words, by_key, find_keys, key_bytes, key_words
from dedup.core.rows import FEW, with_equal_nan

_NO_KEYS = KEYS.empty_table()

INDEX_COLUMNS = ("source", "topic", "partition", "sequence_number", "part", "_key", "_undecodable")

_PARTITION = ("source", "topic", "partition")

Columns = tuple[Ints, Ints, Ints]
"""Which partition (-1: none of the batch), sequence number and part of each row."""


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
        """Make an index from a table with INDEX_COLUMNS, one row per delivered row in any order; position columns must not be null.

        Args:
            payloads: the payload hashes of these rows.
        """
        partitions, place = places(table)
        numbers, parts = table["sequence_number"].to_numpy(), table["part"].to_numpy()
        high, low = key_words(table["_key"])
        # Without positions the order must still be the same each time the batch is delivered.
        order = np.lexsort((numbers, payloads(), low, high)) if partitions == (KEY_ONLY,) else _by_position(place, numbers, parts)
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
        """The index of these rows."""
        return replace(self, **{f: getattr(self, f)[rows] for f in self._FIELDS})

    def arrived(self, rows: Ints) -> Ints:
        """These rows as they came: without positions they stand by their keys, so that each delivery is cut and tried in the same way."""
        return rows if self.partitions != (KEY_ONLY,) else rows[np.argsort(self.arrival(rows), kind="stable")]

    def arrival(self, rows: Ints) -> Ints:
        """A number for each of these rows, the lower the earlier it came."""
        return rows if self.partitions != (KEY_ONLY,) else self.numbers[rows]

    def positions(self, rows: Ints) -> pa.Table:
        """The columns of POSITION of these rows."""
        names = [self.partitions[at] for at in self.place[rows].tolist()]
        columns = [pa.array([n[i] for n in names], t) for i, t in enumerate((pa.string(), pa.string(), pa.int32()))]
        numbers = (pa.array(self.numbers[rows]), pa.array(self.parts[rows]))
        return pa.table(dict(zip(INDEX_COLUMNS[:5], (*columns, *numbers), strict=True)))

    def travelling(self, rows: Ints) -> Index:
        """The index of these rows, for another process: without payload hashes, which are computed for a whole batch."""
        return replace(self.only(rows), order=np.arange(len(rows)), payloads=not_here)

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
        """For each position, the first row that has it, or -1, as where a column is null.

        Columns source, topic, partition, sequence_number, part.
        """
        of_events = _all_valid(positions, _PARTITION)
        if of_events.all():
            return self._locate(positions)
        found = np.full(len(of_events), -1, dtype=np.int64)
        found[of_events] = self._locate(positions.filter(pa.array(of_events)))
        return found

    def _locate(self, positions: pa.Table) -> Ints:
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


def _by_position(place: Ints, numbers: Ints, parts: Ints) -> Ints:
    """As a stable sort of all three; rows that come in order, as most do, need none."""
    if ((place[1:] > place[:-1]) | ((place[1:] == place[:-1]) & (numbers[1:] > numbers[:-1]))).all():
        return np.arange(len(place))
    return np.lexsort((parts, numbers, place))


def not_here() -> Ints:
    """The payload hashes of rows in another process than their batch. Raises NotImplementedError."""
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
    before, again = (content.take(pa.array(np.arange(first, 2 * len(repeats), 2))) for first in (0, 1))
    if before.equals(again):
        return
    before, again = with_equal_nan(before), with_equal_nan(again)
    if not before.equals(again):
        row = next(row for i, row in enumerate(repeats) if not before.slice(i, 1).equals(again.slice(i, 1)))
        raise AmbiguousPosition(
            f"Position {index.describe(int(row))} occurs twice in one batch with different contents. "
            f"If one event was exploded into several rows, name the column that numbers them: Consumer(..., part='column')."
        )


class ValueRange(NamedTuple):
    """The values of a column."""

    first: int
    last: int

    @classmethod
    def of(cls, column: Ints) -> ValueRange:
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

    numbers: ValueRange
    parts: ValueRange
    rows: Ints  # ascending

    @classmethod
    def of(cls, rows: Columns) -> Ranks | None:
        """None where there are no rows, where they are not in order, or where a position does not fit into a number."""
        place, numbers, parts = rows
        if not len(place):
            return None
        ranges = ValueRange.of(numbers), ValueRange.of(parts)
        if (int(place.max()) + 1) * ranges[0].size * ranges[1].size >= 1 << 62:
            return None
        ranks = _as_one(rows, *ranges)
        return cls(*ranges, ranks) if bool((ranks[1:] >= ranks[:-1]).all()) else None

    def find(self, wanted: Columns) -> Ints:
        """Find positions as `match` does."""
        place, numbers, parts = wanted
        possible = (place >= 0) & self.numbers.holds(numbers) & self.parts.holds(parts)
        asked = np.where(possible, _as_one(wanted, self.numbers, self.parts), -1)
        at = np.searchsorted(self.rows, asked)
        return np.where(self.rows[np.minimum(at, len(self.rows) - 1)] == asked, at, -1)


def _as_one(rows: Columns, numbers: ValueRange, parts: ValueRange) -> Ints:
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


def _all_valid(table: pa.Table, names: Sequence[str]) -> Bools:
    """Which rows have a value in each of these columns."""
    valid = np.ones(table.num_rows, dtype=bool)
    for name in names:
        if table[name].null_count:
            valid &= table[name].is_valid().to_numpy()
    return valid


def _places_of_few(table: pa.Table) -> tuple[tuple[Partition, ...], Ints]:
    rows = list(zip(*(table[name].to_pylist() for name in _PARTITION), strict=True))
    partitions = tuple(sorted(Partition(*row) for row in set(rows)))
    rank: dict[tuple[object, ...], int] = {partition: i for i, partition in enumerate(partitions)}
    return partitions, np.array([rank[row] for row in rows], dtype=np.int64)


def _places_of_many(table: pa.Table) -> tuple[tuple[Partition, ...], Ints]:
    codes: list[Ints] = []
    values: list[list[Any]] = []
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


def _name(values: list[list[Any]], code: int) -> Partition:
    code, partition = divmod(code, max(len(values[2]), 1))
    source, topic = divmod(code, max(len(values[1]), 1))
    return Partition(values[0][source], values[1][topic], values[2][partition])
