"""Become the one copy of a consumer that may commit: at once where the holder is provably gone, else after a silence.

Promises that after it returns, no transaction of an older epoch is open or can commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from checkpoint.errors import StillHeld, StoreError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres.state import one, refuse_restored
from dedup.process import is_alive
from dedup.store import Holder

LOCK_SECONDS = 1.0
"""How long a takeover waits for an open batch of the older epoch before it ends that session."""

GIVE_UP_SECONDS = 30.0


Enter = Callable[[dict[str, Any]], int | None]
"""Puts this process on record under a shared epoch; None where that is over."""


@dataclass(frozen=True)
class Patience:
    """How to wait for a live or unknowable holder."""

    takeover_after: float  # seconds without a sign of life
    force: bool
    on_wait: Callable[[float, str], None]  # seconds left, who


def take(connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: Patience) -> int:
    """Raise the epoch for `holder`; returns it.

    Raises:
        StillHeld: the holder goes on showing life, or its session cannot be ended.
        StoreRestored: tables of the state were restored.

    Crash: the epoch is raised or not; raised, the new holder is on record and the next copy judges it like any other.
    """
    return acquire(connection, sql, consumer, holder, patience)


def acquire(connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: Patience, enter: Enter | None = None) -> int:
    """`take`, or with `enter` become one of those who share an epoch."""
    connection.execute(sql["ensure_consumer"], {"consumer": consumer})
    until = time.monotonic() + GIVE_UP_SECONDS
    while True:
        row = _wait(connection, sql, consumer, holder, patience, sharing=enter is not None)
        refuse_restored(consumer, row["restored"])
        epoch = enter(row) if enter and row["joint"] else _raise_epoch(connection, sql, consumer, row, holder, enter)
        if epoch is not None:
            return epoch
        if time.monotonic() >= until:
            raise StillHeld(
                f"Consumer {consumer!r}: another session keeps the consumer's row locked and is not the one on record. "
                f"Look for an old transaction in pg_stat_activity, and end it with pg_terminate_backend."
            )


def _wait(connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: Patience, *, sharing: bool) -> dict[str, Any]:
    """Until nothing speaks against a takeover, or against entering; returns the row that was judged."""
    row = _read(connection, sql, consumer)
    started = changed = time.monotonic()
    alive = False
    while not (patience.force or _is_free(row, holder) or (sharing and row["joint"])):
        now = time.monotonic()
        left = changed + patience.takeover_after - now
        if left <= 0:
            break
        if alive and now - started >= 2 * patience.takeover_after:
            raise StillHeld(
                f"Consumer {consumer!r} is run by {_who(row)}, which shows life. Stop it first. "
                f"If it must not go on, take over by force: Consumer(..., takeover=True)."
            )
        patience.on_wait(left, _who(row))
        time.sleep(min(1.0, left, max(patience.takeover_after / 10, 0.01)))
        newer = _read(connection, sql, consumer)
        if _signs(newer) != _signs(row):
            changed, alive = time.monotonic(), True
        row = newer
    return row


def _read(connection: Connection, sql: Statements, consumer: str) -> dict[str, Any]:
    row = one(connection, sql, "holder", consumer=consumer)
    if row is None:
        raise StoreError(f"Consumer {consumer!r} was removed while its epoch was taken. Start again.")
    return {**row, "members": members(connection, sql, row["id"]) if row["joint"] else []}


def members(connection: Connection, sql: Statements, consumer_id: int) -> list[dict[str, Any]]:
    """The processes that share the epoch."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(sql["members"], {"id": consumer_id}).fetchall()


def _signs(row: dict[str, Any]) -> tuple[int, ...]:
    return row["epoch"], row["seq"], row["beats"], *(member["beats"] for member in row["members"])


def _who(row: dict[str, Any]) -> str:
    return "; ".join(f"host {one['host']}, process {one['pid']}" for one in row["members"] or [row])


def _is_free(row: dict[str, Any], holder: Holder) -> bool:
    """Whether nobody holds it or shares it, or only who is gone."""
    return all(_is_gone(one, holder) for one in (row["members"] if row["joint"] else [row]))


def _is_gone(row: dict[str, Any], holder: Holder) -> bool:
    """Nobody, this very process, or one that is provably gone: its session ended, or its process on this host did."""
    ours = (row["host"], row["pid"], row["started"]) == (holder.host, holder.pid, holder.started)
    if row["host"] is None or ours or row["backend_gone"]:
        return True
    return is_alive(row["host"], row["pid"], row["started"]) is False


def _raise_epoch(
    connection: Connection, sql: Statements, consumer: str, row: dict[str, Any], holder: Holder, enter: Enter | None
) -> int | None:
    """The new epoch; None where somebody else was faster or a session that blocks us had to be ended: judge again."""
    new = {"joint": enter is not None, **vars(holder)}
    try:
        with connection.transaction():
            connection.execute(sql["set_local"], {"name": "lock_timeout", "value": f"{int(LOCK_SECONDS * 1000)}ms"})
            taken = connection.execute(sql["take_epoch"], {"id": row["id"], "epoch": row["epoch"], **new}).fetchone()
            if taken is not None:
                connection.execute(sql["drop_members"], {"id": row["id"], "epoch": taken[0]})
                connection.execute(sql["register_session"], {"consumer": consumer, "epoch": taken[0]})
            if taken is not None and enter is not None:
                enter({"epoch": taken[0]})
    except psycopg.errors.LockNotAvailable:
        for blocker in row["members"] or [row, *members(connection, sql, row["id"])]:  # members of a single copy are its tasks
            end_session(connection, sql, consumer, blocker)
        return None
    return int(taken[0]) if taken else None


def end_session(connection: Connection, sql: Statements, consumer: str, row: dict[str, Any]) -> None:
    """End the database session on record, which blocks us. Raises StillHeld where this role may not."""
    try:
        connection.execute(sql["end_session"], {"pid": row["backend_pid"], "start": row["backend_start"]})
    except psycopg.errors.InsufficientPrivilege as error:
        raise StillHeld(
            f"Consumer {consumer!r}: the open transaction of {_who(row)} (PostgreSQL session {row['backend_pid']}) blocks the takeover, "
            f"and this role may not end it. Use the same role, GRANT pg_signal_backend, or end it by hand: "
            f"SELECT pg_terminate_backend({row['backend_pid']});"
        ) from error
