"""What a decision leaves in our own tables besides letters: the batch record, checkpoints.

Executes the steps of dedup/store.py inside the open transaction; decides nothing.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from checkpoint.errors import CommitConflict
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from deadletter import budget
from deadletter.budget import Spent
from deadletter.letter import Kind
from dedup import budgets
from dedup.postgres.state import State, checkpoint_row, topic_id
from dedup.steps import Advance, Record

_RANGES = ("seen", "duplicates", "skipped", "late")
_COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")


@dataclass(frozen=True)
class Left:
    """What a decision leaves elsewhere: it is looked for before the next one, to tell tables that were restored."""

    recorded: bool = False  # batch records
    reserved: bytes | None = None  # a key
    reserved_in: int | None = None  # number of the table of reservations that has it


def bump(connection: Connection, sql: Statements, state: State, attempt: uuid.UUID, left: Left) -> int:
    """Count one more decision; returns its number, and keeps what is used of the budget in `state`.

    Never inside a savepoint: the row tells its transaction from its own xmin.

    Crash: undone with the transaction.
    """
    made_by = {"attempt": attempt, "epoch": state.head.epoch, "generation": state.head.generation}
    reserved = left.reserved and uuid.UUID(bytes=left.reserved)
    told = {"recorded": left.recorded, "reserved": reserved, "reserved_in": left.reserved_in}
    row = connection.execute(sql["bump"], {"id": state.id, **made_by, **told}).fetchone()
    assert row is not None
    state.spent = budget.from_json(row[1])
    return int(row[0])


def record(connection: Connection, sql: Statements, state: State, step: Record, seq: int, attempt: uuid.UUID) -> None:
    """Keep the batch record.

    Crash: undone with the transaction.
    """
    if step.stream:
        run: dict[str, Any] = {"query_id": step.run.query_id, "batch_id": step.run.batch_id, "batch_ended": step.run.ends}
        run |= {"settings": Jsonb(dict(step.settings)), "spent": Jsonb(budget.to_json(_spend(state, step)))}
        shared = {"joined": state.claim is not None, "scope": state.claim.scope if state.claim else "", "tried": step.tried}
        connection.execute(sql["record"], {"id": state.id, **run, **shared})
    made_by = {"id": state.id, "generation": state.head.generation, "epoch": state.head.epoch, "seq": seq, "attempt": attempt}
    rows = [{**made_by, **_batch_row(connection, sql, state, row)} for row in step.batches.to_pylist()]
    if rows:
        with connection.cursor() as cursor:
            cursor.executemany(sql["add_batch"], rows)


def _spend(state: State, step: Record) -> dict[Kind, Spent]:
    """What is used after this chunk. Others may have used some since the batch read the head: then raises BudgetExceeded."""
    if state.claim is not None:
        budgets.require(state.head.consumer, step.budget, state.spent, step.used, "with those of other partitions ", "chunk")
    return (step.budget or budget.Budget()).spend(state.spent, step.used)


def _batch_row(connection: Connection, sql: Statements, state: State, row: dict[str, Any]) -> dict[str, Any]:
    plain = {name: row[name] for name in ("incarnation", "partition", "query_id", "batch_id", "chunk", *_COUNTS)}
    ranges = {name: "{" + ",".join(f"[{r['first']},{r['last']}]" for r in row[name]) + "}" for name in _RANGES}
    return {"topic_id": topic_id(connection, sql, state, (row["source"], row["topic"])), **plain, **ranges}


def advance(connection: Connection, sql: Statements, state: State, step: Advance) -> None:
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
