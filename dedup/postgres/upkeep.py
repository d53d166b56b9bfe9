"""The upkeep of tables of reservations that somebody calls for, beside batches that go on: rotation, purge, packing and dropping.

It goes in steps, each a transaction of its own. A step that open transactions are in the way of is tried again for a while; then it is left
to the next call. The steps are functions of the database (sql/postgres/0002_reservations.sql, 0009_packed_reservations.sql).
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import psycopg

from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from dedup.core.retention import PurgeBound, Upkept, purge_messages
from dedup.postgres import stored_filter
from dedup.postgres.key_filter import about
from dedup.postgres.outbox import PgOutbox
from dedup.postgres.state import call, value
from dedup.postgres.tending import TABLES

log = logging.getLogger("dedup")

PATIENCE = 10.0
"""Seconds for which a step waits for open transactions before it leaves tables to the next call."""

PACKED_AT_ONCE = 1_000_000
"""Keys of one step of packing: a second or some of the server, which holds back vacuum for so long."""

REST = 3.0
"""Pause after a step, times what the step took: batches beside it have the server, and its disk, for three quarters of the time."""

_AGAIN = 0.2
"""Seconds between two looks at whether open transactions have ended that may ask a table."""


def pack(connection: Connection, sql: Statements, patience: float, portion: int, rest: float) -> int:
    """Pack all tables that take no new keys; returns how many were packed.

    Args:
        rest: pause after each step, times what the step took.

    Crash: each key is in the rows or in the pages that are asked, and the next call goes on with the step that was not committed.
    """
    count, until, pause = 0, time.monotonic() + patience, _Rest(rest)
    while (done := call(connection, sql["pack"], portion=portion)) is not None:
        count += done == "dropped"
        if done != "waiting":
            pause()
            until = time.monotonic() + patience
        elif time.monotonic() >= until:
            log.info("A table of reservations is not packed yet, because open transactions may ask it: the next packing goes on.")
            break
        else:
            time.sleep(_AGAIN)
            pause.worked = time.monotonic()
    _keep_filters(connection, sql, patience, pause)
    return count


class _Rest:
    """Called after each step: sleeps for so many times as long as it has taken."""

    def __init__(self, times: float) -> None:
        self._times, self.worked = times, time.monotonic()

    def __call__(self) -> None:
        time.sleep(self._times * (time.monotonic() - self.worked))
        self.worked = time.monotonic()


def _keep_filters(connection: Connection, sql: Statements, patience: float, pause: _Rest) -> None:
    """Store a filter beside each packed table that has none.

    Crash: a table without one is asked, and the next packing makes it.
    """
    for (number,) in connection.execute(sql["without_filter"], {}).fetchall():
        try:
            bloom = stored_filter.make(connection, sql, number, about(connection, sql, (), (number,)), pause)
        except psycopg.errors.UndefinedTable:
            continue  # purged since
        until = time.monotonic() + patience
        while stored_filter.keep(connection, sql, number, bloom) == "waiting":
            if time.monotonic() >= until:
                log.info("The filter of packed table %d is not stored, because somebody else packs: the next packing stores it.", number)
                return
            time.sleep(_AGAIN)


def drop_purged(connection: Connection, sql: Statements, patience: float) -> None:
    """Drop the tables that were given up.

    Crash: nobody asks those that are left, and the next purge drops them.
    """
    until = time.monotonic() + patience
    while left := value(connection, sql["purged_left"]):
        if call(connection, sql["drop_purged"]) is not None:
            continue
        if time.monotonic() >= until:
            log.warning("%d tables of reservations are purged, but open transactions may ask them: the next purge drops them", left)
            return
        time.sleep(_AGAIN)


class Upkeeps:
    """The part of the store that people and schedulers call. Each step is a transaction of its own."""

    _sql: Statements

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

    def outbox(self, consumer: str) -> PgOutbox:
        """The messages that this consumer has published."""
        raise NotImplementedError

    def consumers(self) -> list[str]:
        """Names, sorted."""
        raise NotImplementedError

    def rotate_reservations(self) -> str:
        """Begin a new table of reservations; returns its name. Waits for no batch, and none waits for it.

        While batches are open that began before the last rotation, nothing is begun: the name is that of the newest table.

        Crash: the new table is there and current, or not there at all. The old one is closed by whoever commits next.
        """
        with self._connection("Rotating reservations") as connection:
            name = call(connection, self._sql["rotate"])
            call(connection, self._sql["close_reservations"])
        return str(name)

    def pack_reservations(self, *, patience: float = PATIENCE, portion: int = PACKED_AT_ONCE, rest: float = 0.0) -> int:
        """Pack the tables of reservations that take no new ones: 27 to 31 bytes for a key in place of 94. Returns how many were packed.

        Works in steps, each a transaction of its own. Neither a batch nor a letter waits for them; they wait for open transactions.

        Args:
            patience: seconds to wait for open transactions.
            portion: keys that are packed in one step. A large table is packed in 16 steps at most, each of which reads all of it.
            rest: pause after each step, times what the step took: batches beside it are disturbed less. `upkeep` gives 3.

        Crash: each key is in the rows or in the pages that are asked, and the next call goes on with the step that was not committed.
        """
        with self._connection("Packing reservations") as connection:
            return pack(connection, self._sql, patience, portion, rest)

    def purge_bounds(self, before: dt.datetime) -> list[PurgeBound]:
        """For each consumer that has decided anything, up to where a purge with this time goes at most.

        That is the time itself, or as long before the time of the log that the consumer has reached as it is before now.
        """
        with self._connection("Reading how far consumers are") as connection:
            return [PurgeBound(*row) for row in connection.execute(self._sql["purge_bounds"], {"before": before}).fetchall()]

    def purge_reservations(self, before: dt.datetime, *, although_behind: Collection[str] = (), patience: float = PATIENCE) -> int:
        """Give the tables of reservations up that were closed before that time; returns how many. Keys held by letters stay held.

        Tables have the reservations of all consumers. So the earliest of `purge_bounds` counts, if it is before that time; the log says so.
        No batch waits for a purge. A table is dropped when no transaction is open that began before; the next purge drops what is left.

        Args:
            although_behind: consumers that count as having read everything.
            patience: seconds to wait for open transactions.

        Crash: they are given up, all of them, or none is. Merging records and dropping tables is done by the next purge where it was not.
        """
        for told in self._kept(before, although_behind):
            log.warning("Purging reservations: %s", told)
        return self._purge(before, although_behind, patience)

    def _kept(self, before: dt.datetime, although_behind: Collection[str]) -> tuple[str, ...]:
        """Why a purge keeps more than was asked for."""
        bounds = [bound.told(before) for bound in self.purge_bounds(before) if bound.consumer not in although_behind]
        return tuple(filter(None, bounds))

    def _purge(self, before: dt.datetime, although_behind: Collection[str], patience: float) -> int:
        with self._connection("Purging reservations") as connection:
            count = call(connection, self._sql["purge"], before=before, although_behind=list(although_behind))
            for (name,) in connection.execute(self._sql["consumers"], {}).fetchall():
                call(connection, self._sql["merge_batches"], consumer=name)
            drop_purged(connection, self._sql, patience)
        return int(count)

    def upkeep(self, retention: dt.timedelta, *, although_behind: Collection[str] = (), dry_run: bool = False) -> list[Upkept]:
        """Forget reservations and sent messages that are older than that: rotate, purge, merge and drop, pack, and purge the outboxes.

        For a scheduler, so often as it likes. Neither it nor any batch waits. A new table is begun once in a thirtieth of the retention;
        less often the longer a consumer that is behind keeps old tables, because each one costs every batch two locks.
        The retention goes back from the server's time, whatever the clock here says.

        Args:
            although_behind: consumers that count as having read everything.
            dry_run: say what would be done.

        Crash: each step is a transaction of its own, and the next upkeep goes on.
        """
        before: dt.datetime = self._asked("ago", age=retention)
        told = self._kept(before, although_behind)
        if dry_run:
            count, packed = (self._asked(name, before=before, although_behind=list(although_behind)) for name in ("purgeable", "packable"))
        else:
            if self._asked("rotation_due", retention=retention, tables=TABLES):
                self.rotate_reservations()
            count, packed = self._purge(before, although_behind, PATIENCE), self.pack_reservations(rest=REST)
        done = [Upkept("tables of reservations", "", count, told), Upkept("packed tables", "", packed)]
        return [*done, *purge_messages(self, before, dry_run=dry_run)]

    def _asked(self, name: str, **parameters: object) -> Any:
        with self._connection("Looking at the tables of reservations") as connection:
            return value(connection, self._sql[name], **parameters)
