"""Work on tables of reservations that goes in steps, each a transaction of its own, beside batches that go on: packing and dropping.

A step that open transactions are in the way of is tried again for a while; then it is left to the next call. The steps are functions of the
database (sql/postgres/0002_reservations.sql, 0009_packed_reservations.sql). Called by store.py.
"""

from __future__ import annotations

import logging
import time

import psycopg

from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from dedup.postgres import stored_filter
from dedup.postgres.key_filter import about
from dedup.postgres.state import call, value

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
