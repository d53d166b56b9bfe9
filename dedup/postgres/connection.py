"""Connections: opened at first use, kept between batches, never shared by two users at once; and the connection that a handler gets.

Promises that no password is printed, and that a connection of another process (after a fork) is never used.

A handler can do everything that psycopg can do inside a transaction, but it cannot end the transaction. Promises to notice a transaction
that a handler has ended, or that the server has aborted, whatever the handler did with the error. The server refuses a COMMIT in any form
(sql/postgres: refuse_commit); no SQL text is parsed. Called by the store and the transaction.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus

from checkpoint.errors import HandlerError
from checkpoint.postgres.connection import Connection, connecting, ends_transaction, settings
from dedup.postgres import charset, wire

ENDED = (
    "The handler ended the transaction (COMMIT or ROLLBACK through tx.connection). Nothing of this batch is committed. Leave the commit "
    "to dedup: it comes by itself, together with the checkpoint. For a part that may fail use `with tx.connection.transaction():`, which "
    "makes a savepoint."
)

_BEGIN = (
    "BEGIN through tx.connection is refused: the handler is inside a transaction already, which commits by itself, together with its "
    "checkpoint. For a part that may fail use `with tx.connection.transaction():`, which makes a savepoint."
)

_SEVERAL = "tx.connection takes one statement at a time. Call execute once for each of them. The server says: {}"


def connect(dsn: str) -> Connection:
    """A new connection in autocommit: transactions are begun and ended by statements of our own. Raises psycopg.Error."""
    connection = psycopg.connect("", **settings(dsn))
    # Each statement of a function has to see what was committed before it, whatever the database's default is.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    wire.register(connection)
    charset.teach(connection)
    _read_dates(connection)
    return connection


def _read_dates(connection: Connection) -> None:
    """The one style of dates that psycopg reads, where the database or the role has set another one."""
    if not (connection.info.parameter_status("DateStyle") or "").startswith("ISO"):
        connection.execute("set datestyle = 'ISO'")


def renew(connection: Connection) -> None:
    """Make a session that somebody else's SQL ran in as good as new, without ending it; one that refuses is closed.

    Ending it would tell others that this instance is gone.
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
        with connecting(self._dsn):
            return connect(self._dsn)

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
        if connection.info.transaction_status != TransactionStatus.IDLE or _only_reads(connection):
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)


def _only_reads(connection: Connection) -> bool:
    """Whether the session may not write, as on a standby: another connection may lead to the server that took its place."""
    return "on" in map(connection.info.parameter_status, ("in_hot_standby", "default_transaction_read_only"))


class Lease:
    """What one transaction lends to its handler: over when the handler is done."""

    def __init__(self, connection: Connection, xid: str) -> None:
        self._connection, self._xid = connection, xid
        self.adapters = AdaptersMap(connection.adapters)  # the handler's own: what it registers our statements never see
        self.used = False  # whether the session may have been changed
        self.changed = False  # the same, since our settings were set
        self.over = False
        self.ended = False  # whether the handler has ended the transaction
        self.fatal: psycopg.Error | None = None  # after which only a new transaction can go on
        self._streams: list[weakref.ref[Iterator[Any]]] = []  # a strong one would keep what the handler has let go of

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The time in which a handler runs. What it streams ends with it: a stream keeps the connection to itself."""
        self.over, self.fatal = False, None
        try:
            yield
        finally:
            self._end_streams()
            self.over = True

    def streaming(self, rows: Generator[Any, None, None]) -> Iterator[Any]:
        """The same rows, which end at the latest when the handler is done."""
        self._streams.append(weakref.ref(rows))
        return rows

    def _end_streams(self) -> None:
        for made in self._streams:
            rows: Any = made()
            if rows is not None:
                with suppress(psycopg.Error, HandlerError, ValueError):  # the session's state says what came of it
                    rows.close()
        self._streams.clear()

    def check(self) -> None:
        """Raise HandlerError once it is over, or where the handler has ended the transaction."""
        if self.over:
            raise HandlerError("The transaction of this tx.connection is over. Use it inside the handler only; ask `tx` for it each time.")
        if self._connection.info.transaction_status == TransactionStatus.IDLE:
            self.ended = True
        if self.ended:
            raise HandlerError(ENDED)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While a statement of the handler is sent: the session is looked at before and after, and what ended the transaction is kept.

        Raises HandlerError where the transaction is not the one that it was.
        """
        self.check()
        self.used = self.changed = True
        try:
            yield
        except psycopg.Error as error:
            if self._connection.closed or (error.sqlstate and ends_transaction(error)):
                self.fatal = self.fatal or error
            self._refuse_another(error)
            raise
        self.check()

    def _refuse_another(self, error: psycopg.Error) -> None:
        """Raise HandlerError where the transaction has ended although psycopg says that something failed: it may not have been that.

        Where the server itself refused the statement, the transaction is INERROR, and nobody can have begun another one.
        """
        now = self._connection.info.transaction_status
        if now == TransactionStatus.IDLE or (now == TransactionStatus.INTRANS and not self.ended and not self._is_ours()):
            self.ended = True
            raise HandlerError(ENDED) from error

    def check_answer(self, told: str | None) -> None:
        """Look at what the server says that it did. Raises HandlerError for a BEGIN, and for a ROLLBACK that began another transaction."""
        if told in ("BEGIN", "START TRANSACTION"):
            raise HandlerError(_BEGIN)
        if told == "ROLLBACK" and not self._is_ours():  # it is the answer to ROLLBACK TO SAVEPOINT, too
            self.ended = True
            raise HandlerError(ENDED)

    def _is_ours(self) -> bool:
        row = psycopg.Cursor(self._connection).execute("select pg_current_xact_id_if_assigned()::text").fetchone()
        return row == (self._xid,)


class HandlerCursor(psycopg.Cursor[Any]):
    """A psycopg cursor that refuses everything once the handler is done, and keeps what ended the transaction."""

    def __init__(self, connection: Connection, lease: Lease, **options: Any) -> None:
        super().__init__(connection, **options)
        self._lease, self._copies = lease, False
        self._adapters = AdaptersMap(lease.adapters)

    @property
    def connection(self) -> Any:
        """The handler's view of the connection."""
        return self._conn if self._copies else HandlerConnection(self._conn, self._lease)

    def _execute_send(self, query: Any, *, force_extended: bool = False, binary: bool | None = None) -> None:
        """Always by the extended protocol: there the server takes one statement at a time, so that nothing can hide behind another one."""
        super()._execute_send(query, force_extended=True, binary=binary)

    def execute(self, query: Any, params: Any = None, **options: Any) -> HandlerCursor:
        """Psycopg's execute, of one statement."""
        with self._lease.sending(), _one_statement():
            super().execute(query, params, **options)
        self._lease.check_answer(self.statusmessage)
        return self

    def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
        """Psycopg's executemany."""
        with self._lease.sending(), _one_statement():
            super().executemany(query, params_seq, **options)
        self._lease.check_answer(self.statusmessage)

    def stream(self, query: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        """Psycopg's stream. It ends with the handler."""
        return self._lease.streaming(self._streamed(query, params, **options))

    def _streamed(self, query: Any, params: Any, **options: Any) -> Generator[Any, None, None]:
        with self._lease.sending(), _one_statement():
            yield from super().stream(query, params, **options)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **options: Any) -> Iterator[psycopg.Copy]:
        """Psycopg's copy."""
        with self._lease.sending(), self._psycopg_copy(statement, params, **options) as copy:
            yield copy

    @contextmanager
    def _psycopg_copy(self, statement: Any, params: Any, **options: Any) -> Iterator[psycopg.Copy]:
        self._copies = True  # psycopg's Copy asks the cursor for psycopg's connection
        try:
            with super().copy(statement, params, **options) as copy:
                self._copies = False
                yield copy
        finally:
            self._copies = False


@contextmanager
def _one_statement() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.SyntaxError as error:
        if error.diag.source_function != "exec_parse_message":  # the message comes in any language
            raise
        raise HandlerError(_SEVERAL.format(error.diag.message_primary)) from error


class Savepoint(psycopg.Transaction):
    """Psycopg's savepoint, which does not hand out the connection itself."""

    def __init__(self, connection: Connection, lease: Lease, name: str | None) -> None:
        super().__init__(connection, name)
        self._lease = lease

    @property
    def connection(self) -> Any:
        """The handler's view of the connection."""
        return HandlerConnection(self._conn, self._lease)


class HandlerConnection:
    """What `tx.connection` is: execute, cursor, transaction (a savepoint), info and adapters of the psycopg connection."""

    __slots__ = ("_connection", "_lease")

    def __init__(self, connection: Connection, lease: Lease) -> None:
        lease.check()
        self._connection, self._lease = connection, lease

    def execute(self, query: Any, params: Any = None, **options: Any) -> HandlerCursor:
        """Run one statement inside the transaction; returns the cursor.

        Raises HandlerError for what begins or ends a transaction, for several statements, and once the handler is done; psycopg's errors.
        """
        return self.cursor().execute(query, params, **options)

    def cursor(self, **options: Any) -> HandlerCursor:
        """A cursor inside the transaction; options as psycopg's `row_factory`."""
        return HandlerCursor(self._connection, self._lease, **options)

    @contextmanager
    def transaction(self, savepoint_name: str | None = None) -> Iterator[Savepoint]:
        """A savepoint: what the block wrote vanishes if it raises."""
        with self._lease.sending(), Savepoint(self._connection, self._lease, savepoint_name) as savepoint:
            yield savepoint

    @property
    def info(self) -> psycopg.ConnectionInfo:
        """Psycopg's connection info."""
        return self._connection.info

    @property
    def pgconn(self) -> Any:
        """Psycopg's own way to libpq, for its adapters: leave it to them."""
        return self._connection.pgconn

    @property
    def adapters(self) -> AdaptersMap:
        """The handler's own adapters map; what is registered holds for its statements, to the end of the batch."""
        self._lease.check()
        return self._lease.adapters

    def __getattr__(self, name: str) -> Any:
        if name in ("commit", "rollback", "close", "autocommit", "set_autocommit", "set_isolation_level", "tpc_begin", "tpc_commit"):
            raise HandlerError(f"tx.connection.{name} is refused: the transaction commits by itself, together with its checkpoint.")
        raise AttributeError(f"tx.connection has no {name!r}: it offers execute, cursor, transaction, info and adapters")
