"""A Bloom filter of known keys in the consumer's memory: the database is asked only about keys that may be known.

A key that the filter does not know need not be looked up, because the filter holds:
* every key of the closed tables of reservations, which take no new ones, and every key that a letter holds. They are read while one table
  is current, and count only for that table in that database: an older copy of the database, put in its place, may hold keys that were
  purged or freed since. Where two tables take reservations the same holds for both together.
* most keys that were reserved since then, because this process added them. Such a key is in the current table, or in the closing one, where
  the unique index judges the COPY. If the filter lacks it, the COPY fails, keys are then reserved one by one, and the filter is read anew.

A filter that holds too many keys only asks too often. It is never stored. A thread of its own reads it, once the keys that were looked up
without it have cost about as much as reading it will. Called by keys.py.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psycopg

from checkpoint.errors import StoreError
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements, quoted
from dedup.core.bloom import Bloom, memory
from dedup.core.keys import Words
from dedup.postgres.wire import HALVES, Keys

log = logging.getLogger("dedup")

FEW = 4_096
"""Keys of a transaction up to which the database is asked for all of them: a filter would gain nothing."""

_PAGES = 8_192
"""Of a table that are read at once: about a million keys, 16 MB."""

_ROOM = 1 << 20
"""Keys that come after those that were read."""

_CHEAPER = 4
"""So much less a key costs to read than to look up, or more."""


class Current(NamedTuple):
    """The table that takes new reservations."""

    id: int
    closing: int | None  # the one that takes them as well, since open transactions may write it alone
    made: str  # when, by which transaction, and when the server was started: an older copy of the database has another


class Tables(NamedTuple):
    """Where reservations are: numbers of tables, the newest first."""

    current: Current
    asked: tuple[int, ...]  # rows, the current ones among them
    packed: tuple[tuple[int, int], ...]  # pages, and their `page_shift`


class KnownFilter:
    """What one store knows of reserved keys. Used by several threads.

    Args:
        fresh: gives a connection of its own.
        memory: bytes at most; 0: no filter.
    """

    def __init__(self, fresh: Callable[[], AbstractContextManager[Connection]], sql: Statements, memory: int) -> None:
        self._fresh, self._sql, self._memory = fresh, sql, memory
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._whole: tuple[Current, Bloom] | None = None
        self._growing: tuple[Current, Bloom] | None = None  # being read
        self._reader: threading.Thread | None = None
        self._asked = 0  # keys that were looked up without a filter
        self._due = 0  # as many as have to be for the next look at whether to read
        self._patience = 1
        self._closed = threading.Event()

    def may_know(self, current: Current, keys: Keys) -> npt.NDArray[np.bool_] | None:
        """For each key whether it may be known; None where there is no filter for this table, read in the same transaction."""
        if len(keys) <= FEW or not self._memory:
            return None
        with self._mine():
            if self._whole is not None and self._whole[0] == current and not self._whole[1].crowded:
                return self._whole[1].may_have(*words_of(keys))
            self._asked += len(keys)
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

    def _mine(self) -> threading.Lock:
        """The lock. A forked child begins anew: in its parent somebody may have held it, and who reads is there."""
        if self._pid != os.getpid():
            self._begin_anew()
        return self._lock

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
        current = tables_now(connection, self._sql).current
        keys = self._about(connection)
        capacity = 2 * keys + _ROOM
        worth = keys * self._patience // _CHEAPER
        if self._asked < worth or memory(capacity) > self._memory:
            self._due = max(self._due, worth)
            return
        bloom = Bloom(capacity)
        with self._lock:
            self._growing = (current, bloom)
        for some in self._keys(connection):
            with self._lock:
                bloom.add(*words_of(some))
        # Asked without the lock: a statement may have to wait for a batch, and the batch would wait for the lock.
        if not self._closed.is_set() and tables_now(connection, self._sql).current == current:
            with self._lock:
                self._whole, self._asked, self._due = (current, bloom), 0, 0

    def _about(self, connection: Connection) -> int:
        schema = quoted(self._sql.schema)
        tables = {"rows": f"{schema}.reservation", "pages": f"{schema}.reservation_page"}
        row = connection.execute(self._sql["reservations_about"], tables).fetchone()
        return int(row[0]) if row is not None else 0

    def _keys(self, connection: Connection) -> Iterator[Keys]:
        """All reserved keys, then all that letters hold: what a purge drops in between is free, or a letter holds it."""
        for name, packed in connection.execute(self._sql["reservation_tables"], {}).fetchall():
            keys_of = self._of_pages if packed else self._of_table
            yield from keys_of(connection, f"{quoted(self._sql.schema)}.{quoted(name)}")
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

    def _of_pages(self, connection: Connection, table: str) -> Iterator[Keys]:
        """The keys of one packed table."""
        statement, after = self._sql.of("packed_keys", table), -1
        while not self._closed.is_set():
            with connection.cursor(binary=True) as cursor:
                keys, after = cursor.execute(statement, {"after": after, "pages": _PAGES}).fetchone() or (b"", None)
            if after is None:
                return
            yield np.frombuffer(bytes(keys), dtype="V16")

    def _now(self, connection: Connection, table: str) -> tuple[int, int]:
        """File and pages. Raises psycopg.Error where the table is gone, also while this is asked."""
        node, pages = connection.execute(self._sql["table_now"], {"table": table}).fetchone() or (None, None)
        if node is None or pages is None:
            raise psycopg.OperationalError(f"{table} was dropped")
        return node, pages


def tables_now(connection: Connection, sql: Statements, phase: int = 2**31 - 1) -> Tables:
    """The tables as they are now. What they are good for a transaction it may rely on to its end.

    Args:
        phase: with those that were given up in a later phase than this one.
    """
    row = connection.execute(sql["current_reservations"], {"phase": phase}).fetchone()
    assert row is not None
    number, closing, asked, packed, shifts, made = row
    return Tables(Current(number, closing, made), tuple(asked), tuple(zip(packed, shifts, strict=True)))


def _binary(connection: Connection, statement: bytes, values: dict[str, str]) -> Keys:
    with connection.cursor(binary=True) as cursor:
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return np.frombuffer(bytes(row[0]), dtype="V16")


def words_of(keys: Keys) -> tuple[Words, Words]:
    """The halves of keys, as numbers."""
    halves = keys.view(HALVES)
    return halves["high"].astype(np.uint64), halves["low"].astype(np.uint64)
