"""The slices of a batch as transactions of tasks: who works on one, whose turn it is, and where its checkpoint has to stand.

Promises that of two tasks with one slice only one has a transaction open, and that a slice begins only where its own batch left it.
Called by the store and by the fence, inside the transaction that is open.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from checkpoint.errors import BudgetExceeded, CommitConflict
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.claims import OVER_BUDGET
from dedup.postgres import state
from dedup.process import is_alive
from dedup.store import Holder, Slice

log = logging.getLogger("dedup")

LOOK_SECONDS = 0.05
"""Between two tries to have one's turn."""

TELL_SECONDS = 10.0
"""After which a task that waits says for whom, and looks whether that one is still there."""

MARGIN_SECONDS = 10.0
"""Beyond the limit of a run of the handler, before a session that did nothing since counts as stuck."""


def enter(connection: Connection, sql: Statements, consumer: str, epoch: int, holder: Holder) -> None:
    """Put a task's process and this session on record, so that a takeover knows it; those whose sessions ended are forgotten.

    Crash: it is on record or not; on record, it counts as gone with its database session.
    """
    connection.execute(sql["forget_tasks"], {"consumer": consumer, "epoch": epoch})
    connection.execute(sql["enter_task"], {"consumer": consumer, "epoch": epoch, **vars(holder)})


def lock(connection: Connection, sql: Statements, consumer: str, consumer_id: int, claim: Slice) -> None:
    """Wait for this slice's turn. A session that holds it and is provably gone, or stuck, is ended.

    Raises:
        BudgetExceeded: another slice of this attempt was over the budget.
    """
    where = {"id": consumer_id, **claim.partition._asdict()}
    looked = time.monotonic()
    while not _has_turn(connection, sql, where):
        time.sleep(LOOK_SECONDS)
        if time.monotonic() - looked >= TELL_SECONDS:
            looked = time.monotonic()
            _look(connection, sql, consumer, where, claim)
    connection.execute(sql["lock_checkpoint"], where)
    _refuse_over_budget(connection, sql, consumer, claim)


def _has_turn(connection: Connection, sql: Statements, where: dict[str, Any]) -> bool:
    row = connection.execute(sql["lock_slice"], where).fetchone()
    return bool(row and row[0])


def _look(connection: Connection, sql: Statements, consumer: str, where: dict[str, Any], claim: Slice) -> None:
    """Say who has the slice; end a session whose process is gone, or has run its handler for longer than it can."""
    found = state.one(connection, sql, "slice_holder", **where)
    if found is None:
        return
    log.warning("%s: another task has the slice of %s: host %s, process %s", consumer, claim.partition, found["host"], found["pid"])
    gone = found["host"] is not None and is_alive(found["host"], found["pid"], found["started"]) is False
    stuck = found["idle"] is not None and math.isfinite(claim.patience) and found["idle"] > claim.patience + MARGIN_SECONDS
    if gone or stuck:
        connection.execute(sql["end_session"], {"pid": found["backend_pid"], "start": found["backend_start"]})


def _refuse_over_budget(connection: Connection, sql: Statements, consumer: str, claim: Slice) -> None:
    row = connection.execute(sql["trial"], {"consumer": consumer, "scope": OVER_BUDGET}).fetchone()
    if row is not None and row[0] == claim.attempt:
        raise BudgetExceeded(
            f"Consumer {consumer!r}: another slice of batch {claim.batch_id} is over the budget; {claim.partition} waits for it."
        )


def refuse_elsewhere(connection: Connection, sql: Statements, found: state.State, claim: Slice) -> None:
    """Raise CommitConflict unless the checkpoint stands where the plan said, or where a chunk of this very batch left it."""
    point = found.head.checkpoints.get(claim.partition)
    stands = None if point is None else point.sequence_number
    if stands == claim.expected or (stands is not None and _is_own_end(connection, sql, found, claim, stands)):
        return
    raise CommitConflict(
        f"Consumer {found.head.consumer!r}: the checkpoint of {claim.partition} stands at {stands}, the batch was planned at "
        f"{claim.expected}: somebody moved it meanwhile. Plan it again."
    )


def _is_own_end(connection: Connection, sql: Statements, found: state.State, claim: Slice, stands: int) -> bool:
    topic = (claim.partition.source, claim.partition.topic)
    asked = {
        "id": found.id,
        "topic_id": found.topics.get(topic),
        "incarnation": found.head.incarnations.get(topic, 0),
        "partition": claim.partition.partition,
        "query_id": claim.query_id,
        "batch_id": claim.batch_id,
        "last": stands,
    }
    row = connection.execute(sql["slice_end"], asked).fetchone()
    return bool(row and row[0])


def room(connection: Connection, sql: Statements, consumer: str) -> int:
    """How many connections this role could have here for tasks, those of this consumer's tasks included."""
    row = connection.execute(sql["room"], {"consumer": consumer}).fetchone()
    assert row is not None
    return int(row[0])
