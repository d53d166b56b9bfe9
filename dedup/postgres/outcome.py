"""A commit whose answer was lost: ask the tables what became of it, once its database session is known to be done.

Promises to say "not committed" only when that can no longer change.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from checkpoint.errors import CommitUnknown, StoreError, StoreUnavailable
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres.state import State

READ_BACK_SECONDS = 15.0
"""How long to go on asking: a server that restarts after a crash is back within it, unless it has much to recover."""

ASK_SECONDS = 2.0
"""How long a transaction may go on before its session is ended."""

PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Attempt:
    """One transaction: what tells it from every other one."""

    id: uuid.UUID
    xid: str
    backend_pid: int
    backend_start: dt.datetime


Ask = Callable[[Any, Statements, State, Attempt], bool]
"""Whether an attempt was committed, once that cannot change any more."""


def settle(store: Any, sql: Statements, state: State, attempt: Attempt, error: psycopg.Error, ask: Ask | None = None) -> None:
    """Return if the attempt was committed after all.

    Raises:
        StoreUnavailable: it was not, and never will be.
        CommitUnknown: the server could not be asked; running the batch again is safe either way.
    """
    until = time.monotonic() + READ_BACK_SECONDS
    while True:
        try:
            committed = (ask or ask_tables)(store, sql, state, attempt)
            break
        except (StoreError, psycopg.Error) as failed:
            if time.monotonic() >= until:
                raise CommitUnknown(
                    f"Consumer {state.head.consumer!r}: the connection broke during the commit, and the server does not answer. "
                    f"Either outcome is safe: run the batch again."
                ) from failed
            time.sleep(PAUSE_SECONDS)
    if not committed:
        raise StoreUnavailable(
            f"Consumer {state.head.consumer!r}: the connection broke before the commit. Nothing of it is true; run it again."
        ) from error


def ask_tables(store: Any, sql: Statements, state: State, attempt: Attempt) -> bool:
    """By what a decision leaves in our tables. Raises psycopg.Error."""
    with store.fresh() as connection:
        _wait_for_end(connection, sql, state, attempt)
        row = connection.execute(sql["committed_attempt"], {"id": state.id, "attempt": attempt.id}).fetchone()
    return bool(row and row[0])


def _wait_for_end(connection: Connection, sql: Statements, state: State, attempt: Attempt) -> None:
    """Until the session of the attempt holds the row no longer; a session that does not end by itself is ended."""
    for last in (False, True):
        try:
            with connection.transaction():
                connection.execute(sql["set_local"], {"name": "lock_timeout", "value": "2s"})
                connection.execute(sql["lock_progress"], {"id": state.id})
            return
        except psycopg.errors.LockNotAvailable:
            if last:
                raise
            connection.execute(sql["end_session"], {"pid": attempt.backend_pid, "start": attempt.backend_start})


def ask_server(store: Any, sql: Statements, state: State, attempt: Attempt) -> bool:
    """By the server's own record of its transactions, for one that leaves no number. Raises psycopg.Error."""
    until = time.monotonic() + ASK_SECONDS
    with store.fresh() as connection:
        while (status := _status(connection, sql, attempt)) == "in progress":
            if time.monotonic() >= until + READ_BACK_SECONDS:
                raise StoreUnavailable("The session of the lost commit cannot be ended from here.")
            if time.monotonic() >= until:
                connection.execute(sql["end_session"], {"pid": attempt.backend_pid, "start": attempt.backend_start})
            time.sleep(PAUSE_SECONDS)
    return status == "committed"


def _status(connection: Connection, sql: Statements, attempt: Attempt) -> str | None:
    row = connection.execute(sql["transaction_status"], {"xid": attempt.xid}).fetchone()
    return None if row is None else row[0]
