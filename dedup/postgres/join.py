"""Processes that share one epoch: entering it, leaving it, and claiming partitions.

Promises that a partition's older claimant cannot commit once a claim has returned, and that none of its transactions is open then.
Called by the store.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from checkpoint.errors import StillHeld
from checkpoint.position import Partition
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres import state
from dedup.postgres.epoch import LOCK_SECONDS, Patience, acquire, end_session
from dedup.postgres.fence import check_epoch
from dedup.process import is_alive
from dedup.store import Holder


def join(connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: Patience) -> int:
    """Enter the epoch that is shared, or take a new one that is; returns it.

    Raises:
        StillHeld: somebody who does not share it goes on showing life.

    Crash: this process is on record or not; on record, it counts as gone with its database session.
    """
    return acquire(connection, sql, consumer, holder, patience, lambda row: enter(connection, sql, consumer, row["epoch"], holder))


def enter(connection: Connection, sql: Statements, consumer: str, epoch: int, holder: Holder) -> int | None:
    """Put a process and this session on record under a shared epoch; None where that is over.

    Crash: it is on record or not.
    """
    row = connection.execute(sql["enter"], {"consumer": consumer, "epoch": epoch, **vars(holder)}).fetchone()
    return int(row[0]) if row else None


def claim(connection: Connection, sql: Statements, consumer: str, epoch: int, run_id: str, partition: Partition, seconds: float) -> int:
    """Raise the number of a partition; returns it.

    A batch of the older claimant that is open is waited for as long as that process shows life; after `seconds` without, or where it is
    provably gone, its session is ended.

    Raises:
        Fenced: a newer epoch was taken. StillHeld: the older claimant's batch takes longer than twice `seconds`; try again later.

    Crash: the number is raised or not; raised, the partition waits for the next claim.
    """
    started = quiet_since = time.monotonic()
    signs: Any = None
    while (number := _try(connection, sql, consumer, epoch, run_id, partition)) is None:
        found = _claimant(connection, sql, consumer, partition)
        if found is None:
            continue
        now = time.monotonic()
        if (found["run_id"], found["beats"]) != signs:
            signs, quiet_since = (found["run_id"], found["beats"]), now
        if now - quiet_since >= seconds or is_alive(found["host"], found["pid"], found["started"]) is False:
            end_session(connection, sql, consumer, found)
        elif now - started >= 2 * seconds:
            raise StillHeld(
                f"Partition {partition} of consumer {consumer!r}: a batch of host {found['host']}, process {found['pid']} is open and that "
                f"process shows life. The partition is left to it; claim it again later."
            )
    return number


def _try(connection: Connection, sql: Statements, consumer: str, epoch: int, run_id: str, partition: Partition) -> int | None:
    """The new number; None where the older claimant's batch is open."""
    try:
        with connection.transaction():
            row = state.one(connection, sql, "fence", consumer=consumer)
            check_epoch(consumer, epoch, row)
            found = state.read(connection, sql, consumer)
            assert found is not None
            topic = state.topic_id(connection, sql, found, (partition.source, partition.topic))
            connection.execute(sql["set_local"], {"name": "lock_timeout", "value": f"{int(LOCK_SECONDS * 1000)}ms"})
            asked = {"id": found.id, "topic_id": topic, "partition": partition.partition, "run_id": run_id}
            taken = connection.execute(sql["claim"], asked).fetchone()
    except psycopg.errors.LockNotAvailable:
        return None
    assert taken is not None
    return int(taken[0])


def _claimant(connection: Connection, sql: Statements, consumer: str, partition: Partition) -> dict[str, Any] | None:
    """Who claimed the partition last; None where that process has left."""
    found = state.one(connection, sql, "epoch_now", consumer=consumer)
    row = state.one(connection, sql, "claimant", id=found["id"], **partition._asdict()) if found else None
    return row if row and row["run_id"] is not None else None
