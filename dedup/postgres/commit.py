"""Record a decision in our tables, and find out what became of a commit whose answer was lost.

Besides letters a decision leaves the batch record and checkpoints: the steps of dedup/core/steps.py, executed inside the open transaction.
Promises to say "not committed" only when that can no longer change, which is once the lost commit's database session has ended. Called by
the transaction.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from checkpoint.errors import CommitConflict, CommitUnknown, StoreError, StoreUnavailable
from checkpoint.head import Spent
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from deadletter import policy
from dedup.core import decision
from dedup.core.steps import Advance, Record
from dedup.postgres.state import ConsumerState, checkpoint_row, topic_id

READ_BACK_SECONDS = 15.0
"""How long to go on asking: a server that restarts after a crash is back within it, unless it has much to recover."""

ASK_SECONDS = 2.0
"""How long a transaction may go on before its session is ended."""

PAUSE_SECONDS = 0.2

_RANGES = ("seen", "duplicates", "skipped", "late")
_COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")


@dataclass(frozen=True)
class Attempt:
    """One transaction: what tells it from every other one."""

    id: uuid.UUID
    xid: str
    backend_pid: int
    backend_start: dt.datetime
    phase: int  # of the tables of reservations, before floors were read


Ask = Callable[[Any, Statements, ConsumerState, Attempt], bool]
"""Whether an attempt was committed, once that cannot change any more."""


def resolve_unknown_commit(
    store: Any, sql: Statements, state: ConsumerState, attempt: Attempt, error: psycopg.Error, ask: Ask | None = None
) -> None:
    """Find out what became of a commit whose answer was lost. Returns if the attempt was committed.

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
            f"Consumer {state.head.consumer!r}: the connection broke before the commit. Nothing was committed; run the batch again."
        ) from error


def ask_tables(store: Any, sql: Statements, state: ConsumerState, attempt: Attempt) -> bool:
    """By what a decision leaves in our tables. Raises psycopg.Error."""
    with store.fresh() as connection:
        _wait_for_end(connection, sql, state, attempt)
        row = connection.execute(sql["committed_attempt"], {"id": state.id, "attempt": attempt.id}).fetchone()
    return bool(row and row[0])


def _wait_for_end(connection: Connection, sql: Statements, state: ConsumerState, attempt: Attempt) -> None:
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
            connection.execute(sql["end_transaction"], {"pid": attempt.backend_pid, "start": attempt.backend_start, "xid": attempt.xid})


def ask_server(store: Any, sql: Statements, state: ConsumerState, attempt: Attempt) -> bool:
    """By the server's own record of its transactions, for one that leaves no number. Raises psycopg.Error."""
    until = time.monotonic() + ASK_SECONDS
    with store.fresh() as connection:
        while (status := _status(connection, sql, attempt)) == "in progress":
            if time.monotonic() >= until + READ_BACK_SECONDS:
                raise StoreUnavailable("The session of the lost commit cannot be ended from here.")
            if time.monotonic() >= until:
                connection.execute(sql["end_transaction"], {"pid": attempt.backend_pid, "start": attempt.backend_start, "xid": attempt.xid})
            time.sleep(PAUSE_SECONDS)
    return status == "committed"


def _status(connection: Connection, sql: Statements, attempt: Attempt) -> str | None:
    row = connection.execute(sql["transaction_status"], {"xid": attempt.xid}).fetchone()
    return None if row is None else row[0]


@dataclass(frozen=True)
class Left:
    """What a decision leaves elsewhere: it is looked for before the next one, to tell tables that were restored."""

    recorded: bool = False  # batch records
    reserved: bytes | None = None  # a key
    reserved_in: int | None = None  # number of the table of reservations that has it


def bump(connection: Connection, sql: Statements, state: ConsumerState, attempt: uuid.UUID, left: Left) -> int:
    """Count one more decision; returns its number, and keeps what is used of the budget in `state`.

    Never inside a savepoint: the row tells its transaction from its own xmin.

    Crash: undone with the transaction.
    """
    made_by = {"attempt": attempt, "epoch": state.head.epoch, "generation": state.head.generation}
    reserved = left.reserved and uuid.UUID(bytes=left.reserved)
    told = {"recorded": left.recorded, "reserved": reserved, "reserved_in": left.reserved_in}
    row = connection.execute(sql["bump"], {"id": state.id, **made_by, **told}).fetchone()
    assert row is not None
    state.spent = policy.from_json(row[1])
    return int(row[0])


def record(connection: Connection, sql: Statements, state: ConsumerState, step: Record, seq: int, attempt: uuid.UUID) -> None:
    """Keep the batch record.

    Crash: undone with the transaction.
    """
    if step.stream:
        run: dict[str, Any] = {"query_id": step.run.query_id, "batch_id": step.run.batch_id, "batch_ended": step.run.ends}
        run |= {"settings": Jsonb(dict(step.settings)), "spent": Jsonb(policy.to_json(_spend(state, step)))}
        shared = {"joined": state.claim is not None, "scope": state.claim.scope if state.claim else "", "tried": step.tried}
        connection.execute(sql["record"], {"id": state.id, **run, **shared})
    made_by = {"id": state.id, "generation": state.head.generation, "epoch": state.head.epoch, "seq": seq, "attempt": attempt}
    rows = [{**made_by, **_batch_row(connection, sql, state, row)} for row in step.batches.to_pylist()]
    if rows:
        with connection.cursor() as cursor:
            cursor.executemany(sql["add_batch"], rows)


def _spend(state: ConsumerState, step: Record) -> dict[str, Spent]:
    """What is used after this chunk. Others may have used some since the batch read the head: then raises BudgetExceeded."""
    if state.claim is not None:
        decision.require(state.head.consumer, step.budget, state.spent, step.used, "with those of other partitions ", "chunk")
    return (step.budget or policy.Budget()).spend(state.spent, step.used)


def _batch_row(connection: Connection, sql: Statements, state: ConsumerState, row: dict[str, Any]) -> dict[str, Any]:
    plain = {name: row[name] for name in ("incarnation", "partition", "query_id", "batch_id", "chunk", *_COUNTS)}
    ranges = {name: "{" + ",".join(f"[{r['first']},{r['last']}]" for r in row[name]) + "}" for name in _RANGES}
    return {"topic_id": topic_id(connection, sql, state, (row["source"], row["topic"])), **plain, **ranges}


def advance(connection: Connection, sql: Statements, state: ConsumerState, step: Advance) -> None:
    """Set the checkpoints, each only if it stands where the head says. Raises CommitConflict if one does not.

    Crash: undone with the transaction.
    """
    for topic, told in sorted(step.incarnation_ids.items()):
        named = {"topic_id": topic_id(connection, sql, state, topic), "told": told}
        if connection.execute(sql["learn_incarnation_id"], named).fetchone() is None:
            raise CommitConflict(f"Consumer {state.head.consumer!r}: topic {topic[1]!r} got another id while the batch ran. Plan it again.")
    for where in sorted(step.checkpoints):
        before = state.head.checkpoints.get(where)
        expected = {"expected": before.sequence_number if before else None}
        number = topic_id(connection, sql, state, (where.source, where.topic))
        row = checkpoint_row(where, step.checkpoints[where])
        if connection.execute(sql["advance"], {"id": state.id, "topic_id": number, **row, **expected}).fetchone() is None:
            raise CommitConflict(f"Consumer {state.head.consumer!r}: the checkpoint of {where} changed while the batch ran. Plan it again.")
