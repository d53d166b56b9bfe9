"""The connection as a handler gets it: everything psycopg can do inside the transaction, nothing that ends it.

A statement that would end the transaction is refused before it is sent: what had been written so far would be committed
without its checkpoint, or lost with the events counted as done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql as composable

from checkpoint.errors import HandlerError
from checkpoint.postgres.dsn import Connection

_FORBIDDEN = frozenset({"begin", "start", "commit", "end", "rollback", "abort", "prepare"})
_NOISE = re.compile(
    r"""--[^\n]*|/\*.*?\*/|\$(\w*)\$.*?\$\1\$|[eE]'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|"(?:[^"]|"")*\"""",
    re.DOTALL,
)
_TO_SAVEPOINT = re.compile(r"rollback\s+(work\s+|transaction\s+)?to\b", re.IGNORECASE)
_PREPARE_STATEMENT = re.compile(r"prepare\s+(?!transaction\b)", re.IGNORECASE)


def check(text: str) -> None:
    """Raise HandlerError for a statement that would begin or end a transaction, also as one of several in one text."""
    for statement in _NOISE.sub(" ", text).split(";"):
        statement = re.sub(r"^\W+", "", statement)
        word = re.match(r"[a-z]+", statement, re.IGNORECASE)
        if word is None or word[0].lower() not in _FORBIDDEN:
            continue
        if _TO_SAVEPOINT.match(statement) or _PREPARE_STATEMENT.match(statement):
            continue
        raise HandlerError(
            f"{word[0].upper()} through tx.connection is refused: the transaction commits by itself, together with its checkpoint. "
            f"For a part that may fail use `with tx.connection.transaction():`, which makes a savepoint."
        )


def _text(query: Any, connection: Connection) -> str:
    if isinstance(query, composable.Composable):
        return query.as_string(connection)
    return query.decode("utf-8", "replace") if isinstance(query, bytes) else str(query)


class Lease:
    """What one transaction lends to its handler: over when the handler is done."""

    def __init__(self) -> None:
        self.used = False  # whether the session may have been changed
        self.adapted = False  # whether the connection's adapters may have been changed
        self.over = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The time in which a handler runs."""
        self.over = False
        try:
            yield
        finally:
            self.over = True

    def check(self) -> None:
        """Raise HandlerError once it is over."""
        if self.over:
            raise HandlerError("The transaction of this tx.connection is over. Use it inside the handler only; ask `tx` for it each time.")


class HandlerCursor(psycopg.Cursor[Any]):
    """A psycopg cursor that refuses transaction control, and everything once the handler is done."""

    def __init__(self, connection: Connection, lease: Lease, **options: Any) -> None:
        super().__init__(connection, **options)
        self._lease = lease

    def _check(self, query: Any) -> None:
        self._lease.check()
        check(_text(query, self._conn))

    def execute(self, query: Any, params: Any = None, **options: Any) -> HandlerCursor:
        """Psycopg's execute."""
        self._check(query)
        return super().execute(query, params, **options)

    def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
        """Psycopg's executemany."""
        self._check(query)
        super().executemany(query, params_seq, **options)

    def stream(self, query: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        """Psycopg's stream."""
        self._check(query)
        return super().stream(query, params, **options)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **options: Any) -> Iterator[psycopg.Copy]:
        """Psycopg's copy."""
        self._check(statement)
        with super().copy(statement, params, **options) as copy:
            yield copy


class HandlerConnection:
    """What `tx.connection` is: execute, cursor, transaction (a savepoint), info and adapters of the psycopg connection."""

    __slots__ = ("_connection", "_lease")

    def __init__(self, connection: Connection, lease: Lease) -> None:
        lease.check()
        self._connection, self._lease = connection, lease
        lease.used = True

    def execute(self, query: Any, params: Any = None, **options: Any) -> HandlerCursor:
        """Run a statement inside the transaction; returns the cursor.

        Raises HandlerError for transaction control and once the handler is done, and psycopg's errors.
        """
        return self.cursor().execute(query, params, **options)

    def cursor(self, **options: Any) -> HandlerCursor:
        """A cursor inside the transaction; options as psycopg's `row_factory`."""
        return HandlerCursor(self._connection, self._lease, **options)

    @contextmanager
    def transaction(self, savepoint_name: str | None = None) -> Iterator[psycopg.Transaction]:
        """A savepoint: what the block wrote vanishes if it raises."""
        self._lease.check()
        with self._connection.transaction(savepoint_name) as savepoint:
            yield savepoint

    @property
    def info(self) -> psycopg.ConnectionInfo:
        """Psycopg's connection info."""
        return self._connection.info

    @property
    def adapters(self) -> Any:
        """Psycopg's adapters map; what is registered holds to the end of the batch."""
        self._lease.check()
        self._lease.adapted = True
        return self._connection.adapters

    def __getattr__(self, name: str) -> Any:
        if name in ("commit", "rollback", "close", "autocommit", "set_autocommit", "set_isolation_level", "tpc_begin", "tpc_commit"):
            raise HandlerError(f"tx.connection.{name} is refused: the transaction commits by itself, together with its checkpoint.")
        raise AttributeError(f"tx.connection has no {name!r}: it offers execute, cursor, transaction, info and adapters")
