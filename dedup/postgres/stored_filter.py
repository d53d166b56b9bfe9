"""The filters that are stored beside packed tables of reservations: which of these keys a table may have, without asking it.

Whoever packs a table makes its filter of the pages. They only lose keys from then on, so a filter has each key that is there. It has a
random name, which a copy of the database keeps: a process that has loaded it may use it wherever a table names it. A process loads filters
when it first looks for many keys, halves them until they fit into its memory, and asks a table whose filter it does not have.
Called by key_filter.py and upkeep.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
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


class StoredFilters:
    """Those that one process has loaded. Used by several threads: what is loaded takes the place of what was there as a whole.

    Args:
        memory: bytes of all of them.
        halves: 2; 1 loads the first half of each filter alone: half the bytes for a process that will not live long.
    """

    def __init__(self, sql: Statements, memory: int, halves: int = 2) -> None:
        self._sql, self._memory, self._halves = sql, memory, halves
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
        """How many bytes there are to load."""
        return sum(self._size(told) for told in self._told(connection, made) if told.made not in self._loaded)

    def load(self, connection: Connection, made: Iterable[str | None]) -> None:
        """Load these filters, and forget all others. Raises psycopg.Error."""
        told = self._told(connection, made)
        times = self._times(told)
        loaded = {one.made: bloom for one in told if (bloom := self._one(connection, one, times[one.made])) is not None}
        before, self._unusable = self._unusable, frozenset(one.made for one in told if one.made not in loaded)
        self._loaded = loaded
        if more := [one.number for one in told if one.made in self._unusable - before]:
            log.warning(
                "The filters of packed tables %s cannot be used: the tables are asked. `dedup upkeep` makes incomplete ones anew", more
            )

    def _told(self, connection: Connection, made: Iterable[str | None]) -> list[StoredFilter]:
        rows = connection.execute(self._sql["filters"], {"made": sorted({name for name in made if name})}).fetchall()
        return [StoredFilter(*row) for row in rows]

    def _size(self, told: StoredFilter) -> int:
        return 8 * told.words * self._halves

    def _times(self, told: list[StoredFilter]) -> dict[str, int]:
        """How often each of them is halved, always the largest, until all fit."""
        times = {one.made: 0 for one in told}
        size = {one.made: self._size(one) for one in told}
        while sum(size.values()) > self._memory:
            name = max(size, key=lambda made: size[made])
            if size[name] <= 16 * self._halves:
                break
            size[name], times[name] = size[name] // 2, times[name] + 1
        return times

    def _one(self, connection: Connection, told: StoredFilter, times: int) -> Bloom | None:
        """The filter, halved so many times; None where it cannot be used."""
        there = self._loaded.get(told.made)
        if there is not None and (more := times - _halved(told, there)) >= 0:
            return there.folded(more)
        if told.kind != KIND or told.words & (told.words - 1) or told.words < 2:
            return None
        words, done = np.zeros((self._halves, told.words >> times), dtype=np.uint64), 0
        flat = words.reshape(-1)
        for part in self._parts(connection, told, times):
            if done + len(part) > len(flat):
                return None
            flat[done : done + len(part)] = part
            done += len(part)
        return Bloom(told.keys, tuple(words)) if done == len(flat) else None

    def _parts(self, connection: Connection, told: StoredFilter, times: int) -> Iterator[Words]:
        """The words of its parts, halved. Fewer than it has where it is gone, or was damaged."""
        wanted, width = told.parts * self._halves // 2, 2 * told.words // told.parts
        for first in range(0, wanted, _AT_ONCE):
            with connection.cursor(binary=True) as cursor:
                asked = {"made": told.made, "first": first, "last": min(first + _AT_ONCE, wanted)}
                found = [np.frombuffer(part, "<u8") for (part,) in cursor.execute(self._sql["filter_parts"], asked)]
            yield from (fold(words, times) for words in found if len(words) == width and not width % (1 << times))


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


def make(connection: Connection, sql: Statements, number: int, about: int, pause: Callable[[], None] = lambda: None) -> Bloom:
    """A filter of the keys of this packed table. Raises psycopg.Error.

    Args:
        about: how many keys that are.
        pause: called after each portion of them.
    """
    bloom = next(parts := growing(connection, sql, number, about))
    for _ in parts:  # the same one, with more keys
        pause()
    return bloom


def growing(connection: Connection, sql: Statements, number: int, about: int) -> Iterator[Bloom]:
    """As `make`, one portion of keys after another: the filter has all keys when nothing more comes."""
    capacity = max(1, int(about * _LESS))
    while memory(capacity) > LARGEST:
        capacity //= 2
    yield (bloom := Bloom(capacity))
    for some in keys_in_pages(connection, sql, number):
        bloom.add(*words_of(some))
        yield bloom


def keep(connection: Connection, sql: Statements, number: int, bloom: Bloom) -> str:
    """Store the filter of this packed table; returns "begun", "waiting" or "not wanted", as the database's `keep_filter` does.

    Crash: all of it is stored, or nothing.
    """
    words = len(bloom.words[0])
    width = min(_PART // 8, words)
    with connection.transaction():
        asked = {"number": number, "kind": KIND, "keys": bloom.size, "words": words, "parts": 2 * words // width}
        done = str(value(connection, sql["keep_filter"], **asked))
        parts = (half[at : at + width] for half in bloom.words for at in range(0, words, width)) if done == "begun" else ()
        for part, some in enumerate(parts):
            connection.execute(sql["keep_filter_part"], {"number": number, "part": part, "content": some.astype("<u8").tobytes()})
    return done


def problems(connection: Connection, sql: Statements) -> list[str]:
    """Filters that lack parts, or keys of their tables. Asks for some keys of each, from a place that is another one each time."""
    found = []
    for made, number, last, whole in connection.execute(sql["filtered"], {}).fetchall():
        if not whole:
            found.append(f"the filter of packed table {number} lacks parts: the next `dedup upkeep` makes it anew")
        elif _lacks_some(connection, sql, made, number, random.randint(-1, max(0, last - _PAGES))):
            remedy = f"delete from {quoted(sql.schema)}.reservation_filter where generation = {number}"
            found.append(f"the filter of packed table {number} lacks keys that are in it, so duplicates may have taken effect: {remedy}")
    return found


def _lacks_some(connection: Connection, sql: Statements, made: str, number: int, after: int) -> bool:
    filters = StoredFilters(sql, LARGEST)
    filters.load(connection, [made])
    bloom = filters.get(made)
    try:
        some = next(keys_in_pages(connection, sql, number, after), np.zeros(0, "V16"))
    except psycopg.errors.UndefinedTable:
        return False  # purged since
    return bloom is not None and not bloom.may_have(*words_of(some)).all()
