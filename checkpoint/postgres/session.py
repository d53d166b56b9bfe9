"""One connection for calls of one statement each: opened when first needed, opened again when it broke, for threads and for asyncio.

Promises that a call ends within the store's limit, whatever the server, the network and other sessions do, and that a call behind a locked
row lets others use the connection meanwhile. A call is repeated after a lost connection and behind a lock; every call that comes here may
be (see checkpoint/processors.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, dict_row

from checkpoint import given
from checkpoint.errors import SchemaOutdated, StoreError, StoreUnavailable
from checkpoint.postgres import sql
from checkpoint.postgres.connection import (
    READ_ONLY,
    AsyncLimited,
    Limited,
    NoAnswer,
    checked,
    checked_schema,
    connecting,
    is_lost,
    redacted,
    settings,
    text_of,
    translate,
)
from checkpoint.postgres.sql import Statements
from checkpoint.processors import Answer, ProcessorCall

TIMEOUT = 10.0
"""Seconds for a call, if nothing else is said. With azure's defaults two rounds of renewal stay far below the interval of expiration."""
TRIES = 2
"""How often a call is sent when connections break."""
LOCK, PAUSE = 0.25, 0.05
"""Seconds: how long a statement waits for a lock while others wait for the connection, and how long it lets them have it then."""

_PREFIX = "set transaction isolation level read committed; set local lock_timeout = {}; set local statement_timeout = {};"
"""Sent with each statement in one message, which is one transaction: nothing depends on the defaults of the session."""
_BUSY = ("55P03", "40")
"""A lock that was not given in time, a deadlock: nothing was done, and the next try may pass."""

_Connection = TypeVar("_Connection", psycopg.Connection[DictRow], psycopg.AsyncConnection[DictRow])


PLACE: given.Settings = {"timeout": given.duration("10.0", above=0, most=3600)}
"""What the checkpoint stores take beside a database and a schema."""


class Place:
    """A database, a schema in it, whether its tables may be made, and how long a call may take."""

    def __init__(self, dsn: str, schema: str, auto_migrate: bool, timeout: given.Duration) -> None:
        given.check(PLACE, locals())
        self.dsn, self.schema, self.auto_migrate = checked(dsn), checked_schema(schema), auto_migrate
        self.timeout, self.sql = given.to_seconds(timeout), Statements(schema)
        parts = conninfo_to_dict(self.dsn)  # of the checked DSN: an error of psycopg's would show the password
        self._servers = len(str(parts.get("host") or parts.get("hostaddr") or "").split(","))

    def settings(self, until: float) -> dict[str, Any]:
        """For psycopg's connect: one server after the other, all within the time that is left (2 s each are the least that it can)."""
        share, kept = int((until - time.monotonic()) / self._servers), settings(self.dsn)
        given = int(float(kept["connect_timeout"]))
        return {**kept, "connect_timeout": str(max(2, min(share, given if given > 0 else share)))}

    def check(self, until: float) -> float:
        """Make sure that the tables are those of this library; a migration takes what it takes. Returns until when the call may go on.

        Raises:
            StoreUnavailable: nobody answers.
            SchemaOutdated: the tables are missing or old, and may not be changed.
            StateTooNew: a newer library made them.
            ConfigError: the server is too old.
        """
        with connecting(self.dsn):
            connection: Limited[Any] = Limited.connect("", **self.settings(until))
        with connection:
            connection.until = until
            try:
                sql.ensure(connection, self.schema, auto=False)
            except SchemaOutdated:
                if not self.auto_migrate:
                    raise
                connection.until = float("inf")
                sql.ensure(connection, self.schema, auto=True)
                return time.monotonic() + self.timeout
        return until

    def message(self, call: ProcessorCall[Any], until: float) -> bytes:
        """What is sent for a call: the transaction's settings, and the statement."""
        left = max(1, int((until - time.monotonic()) * 1000))
        return _PREFIX.format(int(LOCK * 1000), left).encode() + b"\n" + self.sql[call.statement]

    def failed(self, error: Exception, call: ProcessorCall[Any]) -> StoreError:
        """Our error for the driver's, or for a turn that did not come."""
        if isinstance(error, NoAnswer):
            return StoreUnavailable(f"{call.doing}: no answer within {self.timeout:g} s. Whether it was done is not known; do it again.")
        if not isinstance(error, psycopg.Error):
            return StoreUnavailable(
                f"{call.doing}: other calls of this store took the whole {self.timeout:g} s. Nothing was done; try again."
            )
        if is_lost(error):
            return StoreUnavailable(f"{call.doing}: {text_of(error).rstrip('?')}. Whether it was done is not known; do it again.")
        if error.sqlstate == READ_ONLY:
            return StoreUnavailable(f"{call.doing}: {text_of(error)}. The next call connects again; let the DSN lead to the primary.")
        if is_busy(error):
            return StoreUnavailable(f"{call.doing}: {text_of(error)}, for {self.timeout:g} s. Nothing of it was done; try again.")
        return translate(error, call.doing)

    def __str__(self) -> str:
        return f"{redacted(self.dsn)!r}, schema={self.schema!r}"


def is_busy(error: psycopg.Error) -> bool:
    """Whether another session was in the way, so that nothing was done."""
    return bool(error.sqlstate and error.sqlstate.startswith(_BUSY))


class _Patience:
    """How long one call goes on: once more after a lost connection, any number of times behind a lock, all within its limit."""

    def __init__(self, place: Place) -> None:
        self.until, self._tries = time.monotonic() + place.timeout, TRIES

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def goes_on(self, error: psycopg.Error) -> bool:
        """Whether to try again after that."""
        if is_busy(error):
            return self.left > 2 * LOCK
        self._tries -= 1
        return (is_lost(error) or error.sqlstate == READ_ONLY) and self._tries > 0 and self.left > 0


@dataclass
class _Lane(Generic[_Connection]):
    """A connection, if there is one, and who of its users has the turn."""

    turn: Any  # threading.Lock or asyncio.Lock
    kept: list[_Connection] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)

    def usable(self) -> _Connection | None:
        """The connection, if it can take a statement; a task that was cancelled may have left it in the middle of one."""
        if self.kept and self.kept[0].pgconn.transaction_status != TransactionStatus.IDLE:
            self.drop()
        return self.kept[0] if self.kept else None

    def drop(self) -> None:
        """Let go of the connection; in a forked child it is the parent's."""
        while self.kept:
            connection = self.kept.pop()
            if self.pid == os.getpid():
                connection.pgconn.finish()

    def drop_after(self, error: psycopg.Error) -> None:
        """Let go of a connection on which this went wrong, unless only a lock was in the way."""
        if not is_busy(error):
            self.drop()


def _let_go(lanes: Iterable[_Lane[Any]]) -> None:
    """What becomes of the connections of a store that nobody closed."""
    for lane in lanes:
        lane.drop()


class Session:
    """For threads: one statement at a time."""

    def __init__(self, place: Place) -> None:
        self.place, self._checked = place, False
        self._lanes = [_Lane[psycopg.Connection[DictRow]](threading.Lock())]
        weakref.finalize(self, _let_go, self._lanes)

    @property
    def _lane(self) -> _Lane[psycopg.Connection[DictRow]]:
        if self._lanes[0].pid != os.getpid():  # a forked child: the connection belongs to the parent, and so does whoever holds the lock
            self._lanes[0] = _Lane(threading.Lock())
        return self._lanes[0]

    def ask(self, call: ProcessorCall[Answer]) -> Answer:
        """The answer to a call. Raises StoreError, within the place's limit.

        Crash: a call is one transaction; it is done or not.
        """
        patience = _Patience(self.place)
        while True:
            try:
                with self._turn(patience) as lane:
                    return self._once(lane, call, patience.until)
            except (psycopg.Error, TimeoutError) as error:
                if isinstance(error, TimeoutError) or not patience.goes_on(error):
                    raise self.place.failed(error, call) from error
                if is_busy(error):
                    time.sleep(PAUSE)  # others have the turn meanwhile

    @contextmanager
    def _turn(self, patience: _Patience) -> Iterator[_Lane[psycopg.Connection[DictRow]]]:
        lane = self._lane
        if not lane.turn.acquire(timeout=patience.left):
            raise TimeoutError
        try:
            yield lane
        except psycopg.Error as error:
            lane.drop_after(error)
            raise
        finally:
            lane.turn.release()

    def _once(self, lane: _Lane[psycopg.Connection[DictRow]], call: ProcessorCall[Answer], until: float) -> Answer:
        if not self._checked:
            until = self.place.check(until)
            self._checked = True
        cursor = psycopg.ClientCursor(self._connected(lane, until))
        cursor.execute(self.place.message(call, until), call.parameters)
        while cursor.nextset():
            pass
        return call.read(cursor.fetchall())

    def _connected(self, lane: _Lane[psycopg.Connection[DictRow]], until: float) -> psycopg.Connection[DictRow]:
        connection = lane.usable()
        if connection is None:
            connection = Limited.connect("", row_factory=dict_row, **self.place.settings(until))
            lane.kept.append(connection)
        connection.until = until  # type: ignore[attr-defined]
        return connection

    def close(self) -> None:
        """Let go of the connection; the next call opens another."""
        lane = self._lane
        with lane.turn:
            lane.drop()


class AsyncSession:
    """For asyncio: one statement at a time. Each event loop has a connection of its own."""

    def __init__(self, place: Place) -> None:
        self.place, self._checked = place, False
        self._lanes = dict[asyncio.AbstractEventLoop, _Lane[psycopg.AsyncConnection[DictRow]]]()
        weakref.finalize(self, _let_go, self._lanes.values())

    @property
    def _lane(self) -> _Lane[psycopg.AsyncConnection[DictRow]]:
        for over in [loop for loop in list(self._lanes) if loop.is_closed()]:
            _let_go([lane for lane in [self._lanes.pop(over, None)] if lane])  # another thread's loop may have been quicker
        loop = asyncio.get_running_loop()
        if loop not in self._lanes or self._lanes[loop].pid != os.getpid():
            self._lanes[loop] = _Lane(asyncio.Lock())
        return self._lanes[loop]

    async def ask(self, call: ProcessorCall[Answer]) -> Answer:
        """The answer to a call. Raises StoreError, within the place's limit.

        Crash: a call is one transaction; it is done or not. The same when the task is cancelled.
        """
        patience = _Patience(self.place)
        while True:
            try:
                async with self._turn(patience) as lane:
                    return await self._once(lane, call, patience.until)
            except (psycopg.Error, TimeoutError) as error:
                if isinstance(error, TimeoutError) or not patience.goes_on(error):
                    raise self.place.failed(error, call) from error
                if is_busy(error):
                    await asyncio.sleep(PAUSE)  # others have the turn meanwhile

    @asynccontextmanager
    async def _turn(self, patience: _Patience) -> AsyncIterator[_Lane[psycopg.AsyncConnection[DictRow]]]:
        lane = self._lane
        async with asyncio.timeout(patience.left):
            await lane.turn.acquire()
        try:
            yield lane
        except psycopg.Error as error:
            lane.drop_after(error)
            raise
        finally:
            lane.turn.release()

    async def _once(self, lane: _Lane[psycopg.AsyncConnection[DictRow]], call: ProcessorCall[Answer], until: float) -> Answer:
        if not self._checked:
            until = await asyncio.to_thread(self.place.check, until)
            self._checked = True
        cursor = psycopg.AsyncClientCursor(await self._connected(lane, until))
        await cursor.execute(self.place.message(call, until), call.parameters)
        while cursor.nextset():
            pass
        return call.read(await cursor.fetchall())

    async def _connected(self, lane: _Lane[psycopg.AsyncConnection[DictRow]], until: float) -> psycopg.AsyncConnection[DictRow]:
        connection = lane.usable()
        if connection is None:
            connection = await AsyncLimited.connect("", row_factory=dict_row, **self.place.settings(until))
            lane.kept.append(connection)
        connection.until = until  # type: ignore[attr-defined]
        return connection

    async def close(self) -> None:
        """Let go of the connection; the next call opens another."""
        lane = self._lane
        async with lane.turn:
            lane.drop()
