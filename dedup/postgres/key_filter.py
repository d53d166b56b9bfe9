"""What a consumer's memory knows of reserved keys: the database is asked only about keys that may be known, where they may be.

A key need not be looked up
* in a packed table whose stored filter does not have it (stored_filter.py). These filters are loaded when they are first needed.
* in the tables of rows, and among the keys that letters hold, if the filter of rows rules it out. That filter holds
  - every key of the closed tables of rows, which take no new ones, of packed tables without a stored filter, and every key that a letter
    holds. They are read while one table is current, and count only for that table in that database: an older copy of the database, put in
    its place, may hold keys that were purged or freed since. Where two tables take reservations the same holds for both together. What a
    letter begins to hold later was reserved before: in one of these tables, or in a packed one. The stored filter of that one is kept as
    long, for a purge may drop the table. Tables that a purge gave up and that are not dropped yet count, too: the transaction of a letter
    that began before, and is still open, relies on them.
  - most keys that were reserved since then, because this process added them. Such a key is in the current table, or in the closing one,
    where the unique index judges the COPY. If the filter lacks it, the COPY fails, keys are then reserved one by one, and the filter is
    read anew.

A filter that holds too many keys only asks too often. A thread of its own reads the filter of rows, once the keys that were looked up
without it have cost about as much as reading it will. Called by keys.py.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psycopg

from checkpoint.errors import StoreError
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements, quoted
from dedup.core.bloom import Bloom, Placed, memory, placed
from dedup.postgres.state import value
from dedup.postgres.stored_filter import StoredFilters, keys_in_pages, words_of
from dedup.postgres.wire import Keys

log = logging.getLogger("dedup")

FEW = 4_096
"""Keys of a transaction up to which the database is asked for all of them: a filter would gain nothing."""

_PAGES = 8_192
"""Of a table that are read at once: about a million keys, 16 MB."""

_ROOM = 1 << 20
"""Keys that come after those that were read."""

_CHEAPER = 4
"""So much less a key costs to read than to look up, or more."""

_LOADED = 2_000
"""Bytes of stored filters that are loaded for each look-up in one table that was made without them: it takes as long as loading some 500,
and far longer where its index is on disk."""

_STORED = 0.75
"""Of the memory is for stored filters at most."""

_ROW, _PACKED = 52, 27
"""Bytes of a key in a table of rows, and of pages, without indexes."""


class Current(NamedTuple):
    """The table that takes new reservations."""

    id: int
    closing: int | None  # the one that takes them as well, since open transactions may write it alone
    made: str  # when, by which transaction, and when the server was started: an older copy of the database has another


class Packed(NamedTuple):
    """A packed table."""

    number: int
    shift: int  # its `page_shift`
    made: str | None = None  # names its stored filter


class Tables(NamedTuple):
    """Where reservations are: numbers of tables, the newest first."""

    current: Current
    asked: tuple[int, ...]  # rows, the current ones among them
    packed: tuple[Packed, ...]


class Maybe(NamedTuple):
    """Where keys may be known."""

    rows: npt.NDArray[np.bool_] | None  # in tables of rows, packed ones that are not in `pages`, or held by letters; None: all may be
    pages: dict[int, npt.NDArray[np.bool_]]  # number of a packed table -> in it


class Whole(NamedTuple):
    """The filter of rows."""

    current: Current
    bloom: Bloom
    beside: dict[int, Bloom]  # packed tables that it was not read of -> their stored filters


class KnownFilter:
    """What one store knows of reserved keys. Used by several threads.

    Args:
        fresh: gives a connection of its own.
        memory: bytes at most; 0: no filter.
        reads: whether the filter of rows is read.
    """

    def __init__(self, fresh: Callable[[], AbstractContextManager[Connection]], sql: Statements, memory: int, reads: bool = True) -> None:
        self._fresh, self._sql, self._memory, self._reads = fresh, sql, memory, reads
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid, self._lock, self._loading = os.getpid(), threading.Lock(), threading.Lock()
        self._stored = StoredFilters(self._sql, int(self._memory * _STORED), halves=2 if self._reads else 1)
        self._unloaded = 0  # keys that were looked up without stored filters
        self._worth: int | None = None  # as many as loading them costs; None: not known
        self._least = 0  # as many as have to be for the next try
        self._whole: Whole | None = None
        self._growing: tuple[Current, Bloom] | None = None  # being read
        self._reader: threading.Thread | None = None
        self._asked = 0  # keys that were looked up without a filter
        self._due = 0  # as many as have to be for the next look at whether to read
        self._patience = 1
        self._closed = threading.Event()

    def may_know(self, connection: Connection, tables: Tables, keys: Keys) -> Maybe:
        """Where each of these keys may be known, with tables that were read in the transaction of this connection."""
        if not self._memory:
            return Maybe(None, {})
        self._load(connection, tables, len(keys))
        where = placed(*words_of(keys))
        found = {p.number: bloom for p in tables.packed if (bloom := self._stored.get(p.made)) is not None}
        return Maybe(self._in_rows(tables, found, where), {number: bloom.may_have_placed(where) for number, bloom in found.items()})

    def _load(self, connection: Connection, tables: Tables, count: int) -> None:
        """Load the stored filters where that is worth it. A batch does without them if that fails: then later, after twice as many keys."""
        names = [p.made for p in tables.packed]
        if not self._stored.lacks(names):
            return
        self._unloaded += count
        if self._worth is None:
            self._worth = self._stored.about(connection, names) // (_LOADED * len(names))
        if self._unloaded <= max(self._worth, self._least):
            return
        with self._mine(loading=True):  # another thread may have loaded them meanwhile
            try:
                if self._stored.lacks(names):
                    _in_passing(connection, self._sql, lambda: self._stored.load(connection, names))
                self._unloaded, self._worth, self._least = 0, None, 0
            except psycopg.Error as error:
                if connection.broken:
                    raise
                log.warning("The filters of packed tables are not loaded (%s): the tables are asked", type(error).__name__)
                self._least = 2 * self._unloaded

    def _in_rows(self, tables: Tables, found: dict[int, Bloom], keys: tuple[Placed, Placed]) -> npt.NDArray[np.bool_] | None:
        """For each key whether it may be in tables of rows, in packed ones without a filter, or held by a letter; None: not known."""
        count = len(keys[0].mixed)
        if count <= FEW or not self._reads:
            return None
        with self._mine():
            whole = self._whole
            if whole is not None and whole.current == tables.current and not whole.bloom.crowded:
                gone = [bloom for number, bloom in whole.beside.items() if number not in found]
                found_in: npt.NDArray[np.bool_] = np.logical_or.reduce([bloom.may_have_placed(keys) for bloom in (whole.bloom, *gone)])
                return found_in
            self._asked += count
            if self._asked >= self._due:
                self._read_beside()
        return None

    def add(self, current: Current, keys: Keys) -> None:
        """These are being reserved in the current table."""
        with self._mine():
            for found in (self._whole, self._growing):
                if found is not None and found[0] == current:
                    found[1].add(*words_of(keys))

    def surprised(self) -> None:
        """A key was reserved that the filter did not know: others write, too. Look keys up again for a while, each time longer."""
        with self._mine():
            self._whole, self._asked, self._due = None, 0, 0
            self._patience *= 2

    def close(self) -> None:
        """Stop reading, soon."""
        self._closed.set()

    def _mine(self, loading: bool = False) -> threading.Lock:
        """The lock, or that of who loads. A forked child begins anew: in its parent somebody may have held it, and who reads is there."""
        if self._pid != os.getpid():
            self._begin_anew()
        return self._loading if loading else self._lock

    def _read_beside(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            self._closed.clear()
            self._reader = threading.Thread(target=self._read_if_due, name="dedup known keys", daemon=True)
            self._reader.start()

    def _read_if_due(self) -> None:
        self._due = 2 * self._asked  # a reading that fails, or is too large, is not tried again with each batch
        try:
            with self._fresh() as connection:
                self._read(connection)
        except (psycopg.Error, StoreError) as error:
            log.debug("known keys were not read: %s", type(error).__name__)
        finally:
            self._growing = None

    def _read(self, connection: Connection) -> None:
        tables = tables_now(connection, self._sql, phase=0)  # also what a purge gave up: transactions that began before ask it
        self._stored.load(connection, [p.made for p in tables.packed])
        beside = {p.number: bloom for p in tables.packed if (bloom := self._stored.get(p.made)) is not None}
        packed = [p.number for p in tables.packed if p.number not in beside]
        bloom = self._room(about(connection, self._sql, tables.asked, packed))
        if bloom is None:
            return
        self._fill(tables.current, bloom, self._keys(connection, tables.asked, packed))
        # Asked without the lock: a statement may have to wait for a batch, and the batch would wait for the lock.
        if not self._closed.is_set() and tables_now(connection, self._sql).current == tables.current:
            with self._lock:
                self._whole, self._asked, self._due = Whole(tables.current, bloom, beside), 0, 0

    def _room(self, keys: int) -> Bloom | None:
        """A filter for so many keys and for those that come; None where it is too large, or not worth its reading."""
        capacity = 2 * keys + _ROOM
        worth = keys * self._patience // _CHEAPER
        if self._asked < worth or memory(capacity) > self._memory - self._stored.nbytes:
            self._due = max(self._due, worth)
            return None
        return Bloom(capacity)

    def _fill(self, current: Current, bloom: Bloom, keys: Iterable[Keys]) -> None:
        with self._lock:
            self._growing = (current, bloom)
        for some in keys:
            with self._lock:
                bloom.add(*words_of(some))

    def _keys(self, connection: Connection, rows: Iterable[int], packed: Iterable[int]) -> Iterator[Keys]:
        """The keys of these tables, then all that letters hold: what a purge drops in between is free, or a letter holds it.

        Also those of the parent of the tables of rows, in case that somebody has put keys there by hand.
        """
        schema = quoted(self._sql.schema)
        for table in (f"{schema}.reservation", *(f"{schema}.reservation_{number:06d}" for number in rows)):
            yield from self._of_table(connection, table)
        for number in packed:
            yield from itertools.takewhile(lambda _: not self._closed.is_set(), keys_in_pages(connection, self._sql, number))
        yield _binary(connection, self._sql["held_keys"], {})

    def _of_table(self, connection: Connection, table: str) -> Iterator[Keys]:
        """The keys of one table, which must not be rewritten meanwhile (VACUUM FULL would move rows to pages that were read)."""
        node, pages = self._now(connection, table)
        statement = self._sql.of("keys_of_pages", table)
        for first in range(0, pages + 1, _PAGES):
            last = first + _PAGES if first + _PAGES <= pages else 2**32 - 2
            if self._closed.is_set():
                return
            yield _binary(connection, statement, {"first": f"({first},0)", "last": f"({last},0)"})
        if self._now(connection, table)[0] != node:
            raise psycopg.OperationalError(f"{table} was rewritten while it was read")

    def _now(self, connection: Connection, table: str) -> tuple[int, int]:
        """File and pages. Raises psycopg.Error where the table is gone, also while this is asked."""
        node, pages = connection.execute(self._sql["table_now"], {"table": table}).fetchone() or (None, None)
        if node is None or pages is None:
            raise psycopg.OperationalError(f"{table} was dropped")
        return node, pages


def _in_passing(connection: Connection, sql: Statements, act: Callable[[], object]) -> None:
    """Do this inside an open transaction, which goes on if it fails. It hardly waits for a lock: who has it may wait for this transaction.

    Raises psycopg.Error.
    """
    with connection.transaction():
        before = value(connection, sql["lock_timeout"])
        connection.execute(sql["set_local"], {"name": "lock_timeout", "value": "50ms"})
        act()
        connection.execute(sql["set_local"], {"name": "lock_timeout", "value": before})


def tables_now(connection: Connection, sql: Statements, phase: int = 2**31 - 1) -> Tables:
    """The tables as they are now. What they are good for a transaction it may rely on to its end.

    Args:
        phase: with those that were given up in a later phase than this one.
    """
    row = connection.execute(sql["current_reservations"], {"phase": phase}).fetchone()
    assert row is not None
    number, closing, asked, packed, shifts, filters, made = row
    return Tables(Current(number, closing, made), tuple(asked), tuple(map(Packed, packed, shifts, filters)))


def about(connection: Connection, sql: Statements, rows: Collection[int], packed: Collection[int]) -> int:
    """How many keys these tables have, estimated by their size."""
    schema = quoted(sql.schema)
    names = [f"{schema}.reservation_{n:06d}" for n in rows] + [f"{schema}.reservation_page_{n:06d}" for n in packed]
    widths = [_ROW] * len(rows) + [_PACKED] * len(packed)
    return int(value(connection, sql["reservations_about"], tables=names, widths=widths))


def _binary(connection: Connection, statement: bytes, values: dict[str, str]) -> Keys:
    with connection.cursor(binary=True) as cursor:
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return np.frombuffer(bytes(row[0]), dtype="V16")
