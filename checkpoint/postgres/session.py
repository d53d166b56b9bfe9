"""One connection for calls of one statement each: opened when first needed, opened again when it broke, for threads and for asyncio.

A call is repeated once after a lost connection; every call that comes here may be (see checkpoint/processors.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Any

import psycopg
from psycopg.rows import DictRow, dict_row

from checkpoint.errors import StoreError, StoreUnavailable
from checkpoint.postgres import migrate
from checkpoint.postgres.dsn import checked, checked_schema, redacted, settings
from checkpoint.postgres.errors import is_lost, text_of, translate
from checkpoint.postgres.sqlfiles import Statements
from checkpoint.processors import Answer, Call

TRIES = 2


class Place:
    """A database, a schema in it, and whether its tables may be made."""

    def __init__(self, dsn: str, schema: str, auto_migrate: bool) -> None:
        self.dsn, self.schema, self.auto_migrate = checked(dsn), checked_schema(schema), auto_migrate
        self.sql = Statements(schema)
        # a claim must not wait for a server that is gone until TCP gives up: meanwhile the partitions of this processor expire
        self.settings = {"tcp_user_timeout": "30000", **settings(dsn)}

    def check(self) -> None:
        """Make sure that the tables are those of this library. Raises StoreUnavailable, SchemaOutdated, StateTooNew."""
        try:
            connection = psycopg.connect("", **settings(self.dsn))
        except psycopg.Error as error:
            raise translate(error, "Connecting to PostgreSQL") from error
        try:
            migrate.ensure(connection, self.schema, auto=self.auto_migrate)
        finally:
            connection.close()

    def failed(self, error: psycopg.Error, call: Call[Any]) -> StoreError:
        """Our error for the driver's."""
        if is_lost(error):
            return StoreUnavailable(f"{call.doing}: {text_of(error)}. Whether it was done is not known; do it again.")
        return translate(error, call.doing)

    def __str__(self) -> str:
        return f"{redacted(self.dsn)!r}, schema={self.schema!r}"


def _let_go(kept: list[Any], pid: int) -> None:
    """What becomes of the connection of a store that nobody closed; in a forked child it is the parent's."""
    for connection in kept if pid == os.getpid() else ():
        connection.pgconn.finish()


class Session:
    """For threads: one statement at a time."""

    def __init__(self, place: Place) -> None:
        self.place, self._lock, self._checked = place, threading.Lock(), False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid, self._kept = os.getpid(), list[psycopg.Connection[DictRow]]()
        weakref.finalize(self, _let_go, self._kept, self._pid)

    def ask(self, call: Call[Answer]) -> Answer:
        """The answer to a call. Raises StoreError.

        Crash: a call is one transaction; it is done or not.
        """
        with self._lock:
            for left in reversed(range(TRIES)):
                try:
                    return call.read(self._connected().execute(self.place.sql[call.statement], call.parameters).fetchall())
                except psycopg.Error as error:
                    if not (left and is_lost(error)):
                        raise self.place.failed(error, call) from error
                    self._drop()
        raise AssertionError  # the last try returns or raises

    def _connected(self) -> psycopg.Connection[DictRow]:
        if self._pid != os.getpid():  # a forked child: the connection belongs to the parent
            self._begin_anew()
        if not self._checked:
            self.place.check()
            self._checked = True
        if not self._kept:
            self._kept.append(psycopg.connect("", row_factory=dict_row, **self.place.settings))
        return self._kept[0]

    def _drop(self) -> None:
        while self._kept:
            self._kept.pop().close()

    def close(self) -> None:
        """Let go of the connection; the next call opens another."""
        with self._lock:
            self._drop()


class AsyncSession:
    """For asyncio: one statement at a time."""

    def __init__(self, place: Place) -> None:
        self.place, self._lock, self._checked = place, asyncio.Lock(), False
        self._kept = list[psycopg.AsyncConnection[DictRow]]()
        weakref.finalize(self, _let_go, self._kept, os.getpid())

    async def ask(self, call: Call[Answer]) -> Answer:
        """The answer to a call. Raises StoreError.

        Crash: a call is one transaction; it is done or not. The same when the task is cancelled.
        """
        async with self._lock:
            for left in reversed(range(TRIES)):
                try:
                    cursor = await (await self._connected()).execute(self.place.sql[call.statement], call.parameters)
                    return call.read(await cursor.fetchall())
                except psycopg.Error as error:
                    if not (left and is_lost(error)):
                        raise self.place.failed(error, call) from error
                    await self._drop()
        raise AssertionError  # the last try returns or raises

    async def _connected(self) -> psycopg.AsyncConnection[DictRow]:
        if not self._checked:
            await asyncio.to_thread(self.place.check)
            self._checked = True
        if not self._kept:
            self._kept.append(await psycopg.AsyncConnection.connect("", row_factory=dict_row, **self.place.settings))
        return self._kept[0]

    async def _drop(self) -> None:
        while self._kept:
            await self._kept.pop().close()

    async def close(self) -> None:
        """Let go of the connection; the next call opens another."""
        async with self._lock:
            await self._drop()
