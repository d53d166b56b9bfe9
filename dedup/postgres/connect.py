"""Connections: opened when first needed, kept between batches, never shared by two users at once.

Promises that nothing here prints a password, and that a connection of another process (after a fork) is never used.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.pq import TransactionStatus

from checkpoint.postgres.dsn import Connection, settings
from checkpoint.postgres.errors import translate
from dedup.postgres import arrays, charset


def connect(dsn: str) -> Connection:
    """A new connection in autocommit: transactions are begun and ended by statements of our own. Raises psycopg.Error."""
    connection = psycopg.connect("", **settings(dsn))
    arrays.register(connection)
    charset.teach(connection)
    _read_dates(connection)
    return connection


def _read_dates(connection: Connection) -> None:
    """The one style of dates that psycopg reads, where the database or the role has set another one."""
    if not (connection.info.parameter_status("DateStyle") or "").startswith("ISO"):
        connection.execute("set datestyle = 'ISO'")


def renew(connection: Connection) -> None:
    """Make a session that somebody else's SQL ran in as good as new, without ending it; one that refuses is closed.

    Ending it would tell others that this copy is gone.
    """
    try:
        connection.execute("discard all")
        _read_dates(connection)
    except psycopg.Error:
        connection.close()


def _close_all(connections: list[Connection], pid: int) -> None:
    if pid == os.getpid():  # in a forked child they belong to the parent
        for connection in connections:
            connection.close()


class Pool:
    """The idle connections of one store in one process."""

    def __init__(self, dsn: str) -> None:
        self._dsn, self._lock = dsn, threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._idle: list[Connection] = []
        self._pid = os.getpid()
        # A store that nobody closed must not keep its sessions; the finalizer, unlike __del__, comes before the connections' own.
        weakref.finalize(self, _close_all, self._idle, self._pid)

    @contextmanager
    def borrow(self) -> Iterator[Connection]:
        """A connection outside any transaction, given back at the end; a broken one is dropped. Raises StoreUnavailable."""
        connection = self._take_living() or self.open()
        try:
            yield connection
        finally:
            self._give_back(connection)

    def open(self) -> Connection:
        """A connection that is not the pool's."""
        try:
            return connect(self._dsn)
        except psycopg.Error as error:
            raise translate(error, "Connecting to PostgreSQL") from error

    @contextmanager
    def fresh(self) -> Iterator[Connection]:
        """A connection that is not the pool's, closed at the end. Raises StoreUnavailable."""
        connection = self.open()
        try:
            yield connection
        finally:
            connection.close()

    def drop_idle(self) -> None:
        """Close what is idle: after one connection turned out to be dead, the others probably are, too."""
        while connection := self._take():
            connection.close()

    close = drop_idle

    def _take_living(self) -> Connection | None:
        """An idle connection that the server has not closed since it was used last."""
        connection = self._take()
        if connection is None:
            return None
        try:
            connection.execute("")
        except psycopg.Error:
            connection.close()
            self.drop_idle()
            return None
        return connection

    def _take(self) -> Connection | None:
        with self._lock:
            if self._pid != os.getpid():  # a forked child: these belong to the parent
                self._begin_anew()
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)
