"""What a decision leaves in our own tables besides letters: the batch record, checkpoints.

Executes the steps of dedup/store.py inside the open transaction; decides nothing.
"""

from __future__ import annotations

import uuid
from typing import Any

from psycopg.types.json import Jsonb

from checkpoint.errors import BudgetExceeded, CommitConflict
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres.state import State, checkpoint_row, one, topic_id
from dedup.steps import Advance, Record
from dedup.store import Head

_RANGES = ("seen", "duplicates", "skipped", "late")
_COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")


def bump(connection: Connection, sql: Statements, state: State, attempt: uuid.UUID) -> int:
    """Count one more decision; returns its number.

    Crash: undone with the transaction.
    """
    row = connection.execute(sql["bump"], {"id": state.id, "attempt": attempt}).fetchone()
    assert row is not None
    return int(row[0])


def record(connection: Connection, sql: Statements, state: State, step: Record, seq: int, attempt: uuid.UUID) -> None:
    """Keep the batch record.

    Crash: undone with the transaction.
    """
    if step.stream:
        run = {"query_id": step.run.query_id, "batch_id": step.run.batch_id, "batch_ended": step.run.ends}
        run["settings"] = Jsonb(dict(step.settings))
        _judge(connection, sql, state, step)
        shared = {"joined": state.claim is not None, "scope": state.claim.scope if state.claim else "", "tried": step.tried}
        connection.execute(sql["record"], {"id": state.id, **run, **shared, **_spent(step, state.head)})
    made_by = {"id": state.id, "generation": state.head.generation, "epoch": state.head.epoch, "seq": seq, "attempt": attempt}
    rows = [{**made_by, **_batch_row(connection, sql, state, row)} for row in step.batches.to_pylist()]
    if rows:
        with connection.cursor() as cursor:
            cursor.executemany(sql["add_batch"], rows)


def _spent(step: Record, head: Head) -> dict[str, Any]:
    """The budget's state relative to the head that the batch has read: others may have moved it since."""
    return {
        "decided": step.decided - head.decided,
        "failures": [f - head.decided for f in step.failures if f > head.decided],
        "forget": max(set(head.failures) - set(step.failures), default=-1),
    }


def _judge(connection: Connection, sql: Statements, state: State, step: Record) -> None:
    """Count the failures of this chunk behind those that others have committed meanwhile. Raises BudgetExceeded."""
    spent = _spent(step, state.head)
    if state.claim is None or step.budget is None or not spent["failures"]:
        return
    now = one(connection, sql, "budget_now", id=state.id)
    assert now is not None
    decided, failures = now["decided"], [*now["failures"], *(now["decided"] + f for f in spent["failures"])]
    excess = step.budget.excess(decided, failures, range(decided + 1, decided + 1 + spent["decided"]), now["lifted"])
    if excess:
        window, failed, allowed = excess
        raise BudgetExceeded(
            f"Consumer {state.head.consumer!r}: with those of other partitions {failed} of {window} events in a row fail, {allowed} may: a "
            f"bug or an outage, not bad events. None of this chunk was parked. Repair the cause; or, if these events are known to be bad, "
            f"`dedup budget lift {state.head.consumer} --events {10 * window}`."
        )


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
