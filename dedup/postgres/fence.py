"""How a transaction begins: durable, and fenced by the epoch and, where that is shared, by the claim of its partition.

Promises that a transaction that begins can commit only under the epoch and the claim that it was begun with.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from checkpoint.advice import command
from checkpoint.errors import ConfigError, Fenced, PartitionLost, StoreRestored
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres import slices, state
from dedup.postgres.outcome import Attempt
from dedup.store import Claim, Slice


def begin(connection: Connection, sql: Statements, consumer: str, epoch: int, claim: Claim | None) -> tuple[state.State, Attempt]:
    """Open the transaction, fence it, lock the checkpoints, read the head. Raises Fenced, ConfigError, psycopg.Error."""
    attempt = open_guarded(connection, sql)
    row = state.one(connection, sql, "fence", consumer=consumer)
    check_epoch(consumer, epoch, row)
    assert row is not None
    state.refuse_restored(consumer, row["restored"])
    if claim is None:
        connection.execute(sql["lock_checkpoints"], {"id": row["id"]})
    elif isinstance(claim, Slice):
        slices.lock(connection, sql, consumer, row["id"], claim)
    else:
        _lock_claimed(connection, sql, consumer, row["id"], claim)
    found = state.read(connection, sql, consumer)
    assert found is not None
    found.claim = claim
    if isinstance(claim, Slice):
        slices.refuse_elsewhere(connection, sql, found, claim)
    return found, attempt


def open_guarded(connection: Connection, sql: Statements) -> Attempt:
    """Begin a transaction that nobody can commit but who knows the id of the attempt. Raises ConfigError, psycopg.Error.

    Crash: nothing of it is true.
    """
    connection.execute(b"begin isolation level read committed, read write;" + own_settings(sql))
    number = uuid.uuid4()
    facts = state.one(connection, sql, "transaction_facts", token=number)
    assert facts is not None
    refuse_lazy_commit(facts["synchronous_commit"])
    return Attempt(number, facts["xid"], facts["backend_pid"], facts["backend_start"])


def own_settings(sql: Statements, *, anew: bool = False) -> bytes:
    """Statements that set what our own ones depend on, to the end of the transaction.

    Args:
        anew: after a handler has had the session: what it has set, roles included, is forgotten.
    """
    return (sql["forget_settings"] + b";" if anew else b"") + sql["own_settings"]


def _lock_claimed(connection: Connection, sql: Statements, consumer: str, consumer_id: int, claim: Claim) -> None:
    """Lock what belongs to one partition. Raises PartitionLost where its number is another one."""
    where = {"id": consumer_id, **claim.partition._asdict()}
    row = connection.execute(sql["lock_claim"], where).fetchone()
    if row is None or row[0] != claim.number:
        raise PartitionLost(
            f"Consumer {consumer!r}: another process claimed partition {claim.partition} (its number is {row and row[0]}, this batch has "
            f"{claim.number}). Nothing of the batch is committed here; the other process reads it again."
        )
    connection.execute(sql["lock_checkpoint"], where)


def refuse_lazy_commit(setting: str) -> None:
    """Raise ConfigError where a commit would be reported before it is durable."""
    if setting == "off":
        raise ConfigError(
            "synchronous_commit is off: a crash of the server would lose commits that Spark believes done. "
            "Run: ALTER ROLE ... SET synchronous_commit = on (or on the database, or take it out of the DSN's options)."
        )


def check_epoch(consumer: str, epoch: int, row: Mapping[str, Any] | None) -> None:
    """Raise Fenced where a newer epoch was taken, StoreRestored where the table knows less than we do."""
    if row is None or row["epoch"] < epoch:
        known = "no such consumer" if row is None else f"epoch {row['epoch']}"
        raise StoreRestored(
            f"Consumer {consumer!r}: this copy holds epoch {epoch}, the tables know {known}: they were restored or re-created. "
            f"Find out what is missing, run {command('consumer', 'accept-restore', consumer)}, and start this copy again."
        )
    if row["epoch"] > epoch:
        raise Fenced(
            f"Consumer {consumer!r}: epoch {epoch} of this copy was taken over by epoch {row['epoch']} "
            f"(host {row['host']}, process {row['pid']}) at {row['taken_at']:%Y-%m-%d %H:%M:%S %Z}. Stop this copy."
        )
