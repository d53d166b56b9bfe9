"""Who may commit: taking an epoch or sharing it, the fence at the begin of each transaction, signs of life, claims and slices.

An epoch is taken at once where the holder is provably gone, else after a silence. Promises:

* after an epoch was taken, no transaction of an older one is open or can commit; the same for a partition and its older claimants.
* a transaction that begins can commit only under the epoch and the claim that it was begun with, and its commit is durable.
* a heartbeat never fails the batch: a beat that cannot be written is logged, and tried again at the next one. It has a connection and a
  thread of its own.
* of two tasks with one slice only one has a transaction open, and a slice begins only where its own batch left it.

Called by the store and by the transaction.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from checkpoint.errors import (
    BudgetExceeded,
    CommitConflict,
    ConfigError,
    Fenced,
    PartitionLost,
    StillHeld,
    StoreError,
    StoreRestored,
    command,
)
from checkpoint.head import OVER_BUDGET, Claim, Holder, SliceClaim
from checkpoint.holders import is_alive
from checkpoint.position import Partition
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from dedup.postgres import state
from dedup.postgres.commit import Attempt
from dedup.postgres.connection import connect
from dedup.postgres.state import one, refuse_deleted, refuse_restored

LOCK_SECONDS = 1.0
"""How long a takeover waits for an open batch of the older epoch before it ends that session."""

GIVE_UP_SECONDS = 30.0

Enter = Callable[[dict[str, Any]], int | None]
"""Puts this process on record under a shared epoch; None where that is over."""

log = logging.getLogger("dedup")

LOOK_SECONDS = 0.05
"""Between two tries to have one's turn."""

TELL_SECONDS = 10.0
"""After which a task that waits says for whom, and looks whether that one is still there."""

MARGIN_SECONDS = 10.0
"""Beyond the limit of a run of the handler, before a session that did nothing since counts as stuck."""


@dataclass(frozen=True)
class TakeoverWait:
    """How to wait for a live or unknowable holder."""

    takeover_after: float  # seconds without a sign of life
    force: bool
    on_wait: Callable[[float, str], None]  # seconds left, who


def take_epoch(connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: TakeoverWait) -> int:
    """Raise the epoch for `holder`; returns it.

    Raises:
        StillHeld: the holder goes on showing life, or its session cannot be ended.
        StoreRestored: tables of the state were restored. Refused: the consumer is being deleted.

    Crash: the epoch is raised or not; raised, the new holder is on record and the next instance judges it like any other.
    """
    return acquire(connection, sql, consumer, holder, patience)


def acquire(
    connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: TakeoverWait, enter: Enter | None = None
) -> int:
    """Take the epoch as `take_epoch` does, or with `enter` become one of the processes that share it.

    Crash: the epoch is raised, or this process is on record; or nothing has changed.
    """
    connection.execute(sql["ensure_consumer"], {"consumer": consumer})
    until = time.monotonic() + GIVE_UP_SECONDS
    while True:
        row = _wait(connection, sql, consumer, holder, patience, sharing=enter is not None)
        refuse_deleted(consumer, row["deleted_by"])
        refuse_restored(consumer, row["restored"])
        epoch = enter(row) if enter and row["joint"] else _raise_epoch(connection, sql, consumer, row, holder, enter)
        if epoch is not None:
            return epoch
        if time.monotonic() >= until:
            raise StillHeld(
                f"Consumer {consumer!r}: a session that is not the recorded instance keeps the consumer's row locked. "
                f"Look for an old transaction in pg_stat_activity, and end it with pg_terminate_backend."
            )


def _wait(
    connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: TakeoverWait, *, sharing: bool
) -> dict[str, Any]:
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
                f"Consumer {consumer!r} is run by {_who(row)}, which is alive. Stop it first. "
                f"If it must not go on, take over by force: Consumer(..., takeover=Takeover(now=True))."
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


def session_of(connection: Connection) -> dict[str, int]:
    """The number of the session as the client was told it: a pooler tells one of its own, so that nobody looks for that session."""
    return {"session": connection.info.backend_pid}


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
                connection.execute(sql["register_session"], {"consumer": consumer, "epoch": taken[0], **session_of(connection)})
            if taken is not None and enter is not None:
                enter({"epoch": taken[0]})
    except psycopg.errors.LockNotAvailable:
        for blocker in row["members"] or [row, *members(connection, sql, row["id"])]:  # members of a single instance are its tasks
            end_session(connection, sql, consumer, blocker)
        return None
    return int(taken[0]) if taken else None


def end_session(connection: Connection, sql: Statements, consumer: str, row: dict[str, Any]) -> None:
    """End the database session on record, which blocks us. Raises StillHeld where this role may not.

    Crash: the session is ended or not; its open transaction is rolled back with it.
    """
    try:
        connection.execute(sql["end_session"], {"pid": row["backend_pid"], "start": row["backend_start"]})
    except psycopg.errors.InsufficientPrivilege as error:
        raise StillHeld(
            f"Consumer {consumer!r}: the open transaction of {_who(row)} (PostgreSQL session {row['backend_pid']}) blocks the takeover, "
            f"and this role may not end it. Use the same role, GRANT pg_signal_backend, or end it by hand: "
            f"SELECT pg_terminate_backend({row['backend_pid']});"
        ) from error


def begin_fenced(
    connection: Connection, sql: Statements, consumer: str, epoch: int, claim: Claim | None
) -> tuple[state.ConsumerState, Attempt]:
    """Open the transaction, fence it, lock the checkpoints, read the head. Raises Fenced, ConfigError, psycopg.Error.

    Crash: nothing of it is true, and its locks end with the session.
    """
    attempt = open_guarded(connection, sql)
    row = fence(connection, sql, consumer, epoch)
    state.refuse_restored(consumer, row["restored"])
    if claim is None:
        connection.execute(sql["lock_checkpoints"], {"id": row["id"]})
    elif isinstance(claim, SliceClaim):
        lock(connection, sql, consumer, row["id"], claim)
    else:
        _lock_claimed(connection, sql, consumer, row["id"], claim)
    found = state.read(connection, sql, consumer)
    assert found is not None
    found.claim = claim
    if isinstance(claim, SliceClaim):
        refuse_elsewhere(connection, sql, found, claim)
    return found, attempt


def fence(connection: Connection, sql: Statements, consumer: str, epoch: int) -> dict[str, Any]:
    """Share-lock the consumer's row to the end of the transaction; returns it.

    Raises:
        Fenced: a newer epoch was taken, or the consumer was deleted, whether there is a new one of that name or not.
        StoreRestored: the tables know less than we do.
    """
    row = one(connection, sql, "fence", consumer=consumer)
    if row is None or row["epoch"] != epoch:
        refuse_of_deleted(consumer, epoch, one(connection, sql, "last_deletion", consumer=consumer))
    check_epoch(consumer, epoch, row)
    assert row is not None
    return row


def refuse_of_deleted(consumer: str, epoch: int, deletion: Mapping[str, Any] | None) -> None:
    """Raise Fenced where this epoch is one of a consumer that was deleted, or is being deleted."""
    if deletion is not None and deletion["epoch"] > epoch:
        raise Fenced(f"Consumer {consumer!r} of epoch {epoch} was deleted, by {deletion['deleted_by']}. Stop this instance.")


def open_guarded(connection: Connection, sql: Statements) -> Attempt:
    """Begin a transaction that nobody can commit but who knows the id of the attempt. Raises ConfigError, psycopg.Error.

    Crash: nothing of it is true.
    """
    connection.execute(b"begin isolation level read committed, read write;" + own_settings(sql))
    number = uuid.uuid4()
    facts = state.one(connection, sql, "transaction_facts", token=number)
    assert facts is not None
    refuse_lazy_commit(facts["synchronous_commit"])
    _refuse_no_triggers(facts["replication_role"])
    return Attempt(number, facts["xid"], facts["backend_pid"], facts["backend_start"], facts["phase"])


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


def _refuse_no_triggers(role: str) -> None:
    """Raise ConfigError where no trigger fires: nothing would guard the commit, and no letter would be counted."""
    if role == "replica":
        raise ConfigError(
            "session_replication_role is replica: triggers do not fire then, neither yours nor those that guard commits and count letters. "
            "Run: ALTER ROLE ... RESET session_replication_role (or on the database, or take it out of the DSN's options)."
        )


def check_epoch(consumer: str, epoch: int, row: Mapping[str, Any] | None) -> None:
    """Raise Fenced where a newer epoch was taken, StoreRestored where the table knows less than we do."""
    if row is None or row["epoch"] < epoch:
        known = "no such consumer" if row is None else f"epoch {row['epoch']}"
        raise StoreRestored(
            f"Consumer {consumer!r}: this instance holds epoch {epoch}, the tables know {known}: they were restored or re-created. "
            f"Find out what is missing, run {command('consumer', 'accept-restore', consumer)}, and start this instance again."
        )
    if row["epoch"] > epoch:
        raise Fenced(
            f"Consumer {consumer!r}: epoch {epoch} of this instance was taken over by epoch {row['epoch']} "
            f"(host {row['host']}, process {row['pid']}) at {row['taken_at']:%Y-%m-%d %H:%M:%S %Z}. Stop this instance."
        )


@contextmanager
def beating(dsn: str, sql: Statements, consumer: str, epoch: int, every: float, run_id: str = "") -> Iterator[None]:
    """Beat every `every` seconds until the block ends. A batch that is done before the first beat shows life by its commit.

    Args:
        run_id: of the process, where the epoch is shared.
    """
    stop = threading.Event()
    said = {"consumer": consumer, "epoch": epoch, **({"run_id": run_id} if run_id else {})}
    statement = sql["beat_member" if run_id else "beat"]
    thread = threading.Thread(target=_beat, args=(stop, dsn, statement, said, every), name=f"dedup heartbeat {consumer}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)


def _beat(stop: threading.Event, dsn: str, statement: bytes, said: Mapping[str, Any], every: float) -> None:
    connection: Connection | None = None
    while not stop.wait(every):
        try:
            connection = connection or connect(dsn)
            connection.execute(statement, said)
        except psycopg.Error as error:
            known = {"consumer": said["consumer"], "epoch": said["epoch"]}  # this is a thread of its own
            log.warning("%s: could not write the heartbeat: %s", known["consumer"], type(error).__name__, extra=known)
            if connection:
                connection.close()
            connection = None
    if connection:
        connection.close()


def join_epoch(connection: Connection, sql: Statements, consumer: str, holder: Holder, patience: TakeoverWait) -> int:
    """Enter the epoch that is shared, or take a new one that is; returns it.

    Raises:
        StillHeld: somebody who does not share it goes on showing life.

    Crash: this process is on record or not; on record, it counts as gone with its database session.
    """
    return acquire(connection, sql, consumer, holder, patience, lambda row: enter_epoch(connection, sql, consumer, row["epoch"], holder))


def enter_epoch(connection: Connection, sql: Statements, consumer: str, epoch: int, holder: Holder) -> int | None:
    """Put a process and this session on record under a shared epoch; None where that is over.

    Crash: it is on record or not.
    """
    row = connection.execute(sql["enter"], {"consumer": consumer, "epoch": epoch, **vars(holder), **session_of(connection)}).fetchone()
    return int(row[0]) if row else None


def claim_partition(
    connection: Connection, sql: Statements, consumer: str, epoch: int, run_id: str, partition: Partition, seconds: float
) -> int:
    """Raise the number of a partition; returns it.

    A batch of the older claimant that is open is waited for as long as that process shows life; after `seconds` without, or where it is
    provably gone, its session is ended.

    Raises:
        Fenced: a newer epoch was taken. StillHeld: the older claimant's batch, or the lock of a session that is nobody's here, takes longer
            than twice `seconds`; try again later.

    Crash: the number is raised or not; raised, the partition waits for the next claim.
    """
    started = quiet_since = time.monotonic()
    signs: Any = None
    ended: str | None = None
    while (number := _try(connection, sql, consumer, epoch, run_id, partition)) is None:
        found, now = _claimant(connection, sql, consumer, partition), time.monotonic()
        late = now - started >= 2 * seconds
        if found is None or found["run_id"] == ended:
            if late:
                raise StillHeld(
                    f"Partition {partition} of consumer {consumer!r}: its row in partition_claim is locked by a session of PostgreSQL that "
                    "is no process on record. Look for it in pg_locks and end it; claim the partition again later."
                )
            continue
        if (found["run_id"], found["beats"]) != signs:
            signs, quiet_since = (found["run_id"], found["beats"]), now
        if now - quiet_since >= seconds or is_alive(found["host"], found["pid"], found["started"]) is False:
            end_session(connection, sql, consumer, found)
            ended = found["run_id"]
        elif late:
            raise StillHeld(
                f"Partition {partition} of consumer {consumer!r}: a batch of host {found['host']}, process {found['pid']} is open, and "
                "that process is alive. It keeps the partition; claim it again later."
            )
    return number


def _try(connection: Connection, sql: Statements, consumer: str, epoch: int, run_id: str, partition: Partition) -> int | None:
    """The new number; None where the older claimant's batch is open."""
    try:
        with connection.transaction():
            fence(connection, sql, consumer, epoch)
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


def enter_slice(connection: Connection, sql: Statements, consumer: str, epoch: int, holder: Holder) -> None:
    """Put a task's process and this session on record, so that a takeover knows it; those whose sessions ended are forgotten.

    Crash: it is on record or not; on record, it counts as gone with its database session.
    """
    connection.execute(sql["forget_tasks"], {"consumer": consumer, "epoch": epoch})
    connection.execute(sql["enter_task"], {"consumer": consumer, "epoch": epoch, **vars(holder), **session_of(connection)})


def lock(connection: Connection, sql: Statements, consumer: str, consumer_id: int, claim: SliceClaim) -> None:
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


def _look(connection: Connection, sql: Statements, consumer: str, where: dict[str, Any], claim: SliceClaim) -> None:
    """Say who has the slice; end a session whose process is gone, or has run its handler for longer than it can."""
    found = state.one(connection, sql, "slice_holder", **where)
    if found is None:
        return
    log.warning("%s: another task has the slice of %s: host %s, process %s", consumer, claim.partition, found["host"], found["pid"])
    gone = found["host"] is not None and is_alive(found["host"], found["pid"], found["started"]) is False
    stuck = found["idle"] is not None and math.isfinite(claim.patience) and found["idle"] > claim.patience + MARGIN_SECONDS
    if gone or stuck:
        connection.execute(sql["end_session"], {"pid": found["backend_pid"], "start": found["backend_start"]})


def _refuse_over_budget(connection: Connection, sql: Statements, consumer: str, claim: SliceClaim) -> None:
    row = connection.execute(sql["crash_marker"], {"consumer": consumer, "scope": OVER_BUDGET}).fetchone()
    if row is not None and row[0] == claim.attempt:
        raise BudgetExceeded(
            f"Consumer {consumer!r}: another slice of batch {claim.batch_id} is over the budget; {claim.partition} waits for it."
        )


def refuse_elsewhere(connection: Connection, sql: Statements, found: state.ConsumerState, claim: SliceClaim) -> None:
    """Raise CommitConflict unless the checkpoint stands where the plan said, or where a chunk of this very batch left it."""
    point = found.head.checkpoints.get(claim.partition)
    stands = None if point is None else point.sequence_number
    if stands == claim.expected or (stands is not None and _is_own_end(connection, sql, found, claim, stands)):
        return
    raise CommitConflict(
        f"Consumer {found.head.consumer!r}: the checkpoint of {claim.partition} stands at {stands}, the batch was planned at "
        f"{claim.expected}: somebody moved it meanwhile. Plan it again."
    )


def _is_own_end(connection: Connection, sql: Statements, found: state.ConsumerState, claim: SliceClaim, stands: int) -> bool:
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


def room_for_slices(connection: Connection, sql: Statements, consumer: str) -> int:
    """How many connections this role could have here for tasks, those of this consumer's tasks included."""
    row = connection.execute(sql["room"], {"consumer": consumer}).fetchone()
    assert row is not None
    return int(row[0])
