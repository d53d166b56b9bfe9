"""The filters that are stored beside packed tables of reservations: which of these keys a table may have, without asking it.

Whoever packs a table makes its filter of the pages. They only lose keys from then on, so a filter has each key that is there. It has a
random name, which a copy of the database keeps: a process that has loaded it may use it wherever a table names it. A process loads filters
when it first looks for many keys, halves them until they fit into its memory, and asks a table whose filter it does not have.
Called by key_filter.py and upkeep.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import psycopg

from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements, quoted
from dedup.core.bloom import Bloom, fold, memory
from dedup.core.keys import Words
from dedup.postgres.state import value
from dedup.postgres.wire import HALVES, Keys

log = logging.getLogger("dedup")

KIND = "bloom 1"
"""How `Bloom` places keys. Whoever changes that gives it another name: a process that does not know a kind asks the pages."""

LARGEST = 256 * 2**20
"""Bytes of the filter of one table. With more than 64 million keys in it, it says more often that a key may be there."""

_LESS = 10 / 11
"""Of the usual capacity: with pages that are half full, which take the most bytes, a key takes 35 bytes at most with its filter."""

_PART, _AT_ONCE = 2**20, 16
"""Bytes of a part, and how many parts are read at once."""

_PAGES = 8_192
"""Of a packed table that are read at once: some 200,000 keys, 4 MB."""


class StoredFilter(NamedTuple):
    """What is told of a filter."""

    made: str
    number: int
    kind: str
    keys: int
    words: int  # of a half
    parts: int

    @property
    def nbytes(self) -> int:
        """Of both halves."""
        return 16 * self.words


class StoredFilters:
    """Those that one process has loaded. Used by several threads: what is loaded takes the place of what was there as a whole.

    Args:
        memory: bytes of all of them.
    """

    def __init__(self, sql: Statements, memory: int) -> None:
        self._sql, self._memory = sql, memory
        self._loaded: dict[str, Bloom] = {}
        self._unusable: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Of memory that they take."""
        return sum(bloom.nbytes for bloom in self._loaded.values())

    def get(self, made: str | None) -> Bloom | None:
        """The filter of that name, if it is loaded."""
        return self._loaded.get(made or "")

    def lacks(self, made: Iterable[str | None]) -> bool:
        """Whether one of these filters is neither loaded nor unusable."""
        return bool({name for name in made if name} - self._loaded.keys() - self._unusable)

    def about(self, connection: Connection, made: Iterable[str | None]) -> int:
        """How many keys these filters have."""
        return sum(told.keys for told in self._told(connection, made))

    def load(self, connection: Connection, made: Iterable[str | None]) -> None:
        """Load these filters, and forget all others. Raises psycopg.Error."""
        told = self._told(connection, made)
        times = self._times(told)
        loaded = {one.made: bloom for one in told if (bloom := self._one(connection, one, times[one.made])) is not None}
        before, self._unusable = self._unusable, frozenset(one.made for one in told if one.made not in loaded)
        self._loaded = loaded
        if more := self._unusable - before:
            log.warning("%d filters of packed reservations cannot be used: the tables themselves are asked", len(more))

    def _told(self, connection: Connection, made: Iterable[str | None]) -> list[StoredFilter]:
        rows = connection.execute(self._sql["filters"], {"made": sorted({name for name in made if name})}).fetchall()
        return [StoredFilter(*row) for row in rows]

    def _times(self, told: list[StoredFilter]) -> dict[str, int]:
        """How often each of them is halved, the largest first, until all fit."""
        times = {one.made: 0 for one in told}
        size = {one.made: one.nbytes for one in told}
        while sum(size.values()) > self._memory and max(size.values()) > 64:
            largest = max(size.values())
            for name in (name for name, nbytes in size.items() if nbytes == largest):
                size[name], times[name] = size[name] // 2, times[name] + 1
        return times

    def _one(self, connection: Connection, told: StoredFilter, times: int) -> Bloom | None:
        """The filter, halved so many times; None where it cannot be used."""
        there = self._loaded.get(told.made)
        if there is not None and (more := times - _halved(told, there)) >= 0:
            return there.folded(more)
        if told.kind != KIND:
            return None
        halves = np.concatenate([np.zeros(0, "<u8"), *self._parts(connection, told, times)]).astype(np.uint64)
        whole = 2 * told.words >> times
        return Bloom(told.keys, (halves[: whole // 2], halves[whole // 2 :])) if len(halves) == whole else None

    def _parts(self, connection: Connection, told: StoredFilter, times: int) -> Iterator[Words]:
        """The words of its parts, halved. Fewer than it has where it is gone, or was damaged."""
        width = 2 * told.words // told.parts
        for first in range(0, told.parts, _AT_ONCE):
            with connection.cursor(binary=True) as cursor:
                asked = {"made": told.made, "first": first, "last": first + _AT_ONCE}
                found = [np.frombuffer(bytes(part), "<u8") for (part,) in cursor.execute(self._sql["filter_parts"], asked)]
            yield from (fold(words, min(times, width.bit_length() - 1)) for words in found if len(words) == width)


def _halved(told: StoredFilter, bloom: Bloom) -> int:
    return told.words.bit_length() - len(bloom.words[0]).bit_length()


def keys_in_pages(connection: Connection, sql: Statements, number: int, after: int = -1) -> Iterator[Keys]:
    """The keys of a packed table, some pages at a time. Raises psycopg.Error, also where the table was dropped.

    Args:
        after: the pages behind that one alone.
    """
    statement = sql.of("packed_keys", f"{quoted(sql.schema)}.reservation_page_{number:06d}")
    while True:
        with connection.cursor(binary=True) as cursor:
            keys, last = cursor.execute(statement, {"after": after, "pages": _PAGES}).fetchone() or (b"", None)
        if last is None:
            return
        after = last
        yield np.frombuffer(bytes(keys), dtype="V16")


def words_of(keys: Keys) -> tuple[Words, Words]:
    """The halves of keys, as numbers."""
    halves = keys.view(HALVES)
    return halves["high"].astype(np.uint64), halves["low"].astype(np.uint64)


def make(connection: Connection, sql: Statements, number: int, about: int) -> Bloom:
    """A filter of the keys of this packed table. Raises psycopg.Error.

    Args:
        about: how many keys that are.
    """
    capacity = max(1, int(about * _LESS))
    while memory(capacity) > LARGEST:
        capacity //= 2
    bloom = Bloom(capacity)
    for some in keys_in_pages(connection, sql, number):
        bloom.add(*words_of(some))
    return bloom


def keep(connection: Connection, sql: Statements, number: int, bloom: Bloom) -> str:
    """Store the filter of this packed table; returns "begun", "waiting" or "not wanted", as the database's `keep_filter` does.

    Crash: all of it is stored, or nothing.
    """
    words = len(bloom.words[0])
    width = min(_PART // 8, words)
    with connection.transaction():
        asked = {"number": number, "kind": KIND, "keys": bloom.size, "words": words, "parts": 2 * words // width}
        done = str(value(connection, sql["keep_filter"], **asked))
        halves = np.concatenate(bloom.words).astype("<u8")
        for part in range(2 * words // width if done == "begun" else 0):
            content = halves[part * width : (part + 1) * width].tobytes()
            connection.execute(sql["keep_filter_part"], {"number": number, "part": part, "content": content})
    return done


def problems(connection: Connection, sql: Statements) -> list[str]:
    """Filters that lack keys of their tables. Asks for some keys of each, from a place that is another one each time."""
    tables = connection.execute(sql["filtered"], {}).fetchall()
    lack = [number for made, number, last in tables if _lacks_some(connection, sql, made, number, _some_page(last))]
    return [f"the filter of packed table {number} lacks keys that are in it: delete its row of reservation_filter" for number in lack]


def _some_page(last: int) -> int:
    return random.randint(-1, max(0, last - _PAGES))


def _lacks_some(connection: Connection, sql: Statements, made: str, number: int, after: int) -> bool:
    filters = StoredFilters(sql, LARGEST)
    filters.load(connection, [made])
    bloom = filters.get(made)
    try:
        some = next(keys_in_pages(connection, sql, number, after), np.zeros(0, "V16"))
    except psycopg.errors.UndefinedTable:
        return False  # purged since
    return bloom is not None and not bloom.may_have(*words_of(some)).all()
