"""The head of a consumer: read from its tables, and replaced by a person's decision; and what people and `verify` read.

Called by the transaction (under its fence), the store (without locks) and `dedup consumer ...` (amend). Batch records, counts and
contradictions are read-only, and not on the path of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from checkpoint.errors import ConfigError, StoreRestored, command
from checkpoint.head import Checkpoint, Claim, Head, Spent, Topic
from checkpoint.position import Partition
from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import Statements
from checkpoint.records import BATCHES, RecordFilter
from deadletter import policy
from dedup.core.deletion import being_deleted

_NOT_PLAIN = frozenset({"settings", "floors", "passed", "checkpoints", "incarnations", "incarnation_ids", "spent"})

BATCHES_KEPT = pa.schema(
    [
        *BATCHES,
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Batch records as they are read back."""

_RANGES = ("seen", "duplicates", "skipped", "late")


@dataclass
class ConsumerState:
    """A head with the numbers that its rows have in the tables."""

    id: int
    head: Head
    topics: dict[Topic, int] = field(default_factory=dict)
    claim: Claim | None = None  # under which the transaction is open, where the epoch is shared
    deleted_by: str | None = None  # who has decided that it is deleted, and when
    spent: Mapping[str, Spent] = field(default_factory=dict)  # of the budget, as the commits before this one left it: known from `bump` on


def one(connection: Connection, sql: Statements, name: str, **parameters: Any) -> dict[str, Any] | None:
    """The first row of a named statement by column name; None where there is none."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(sql[name], parameters).fetchone()


def value(connection: Connection, statement: bytes, **parameters: object) -> Any:
    """The one value that a statement returns."""
    row = connection.execute(statement, parameters).fetchone()
    assert row is not None
    return row[0]


def call(connection: Connection, statement: bytes, **parameters: object) -> Any:
    """The one value that a function of ours returns, in a transaction of its own.

    Outside one the database's default would decide what the function sees: with the one snapshot of a serializable call it would miss what
    was committed while it waited for a lock.

    Crash: all that the function does is done, or nothing.
    """
    with connection.transaction():
        return value(connection, statement, **parameters)


def refuse_restored(consumer: str, what: str | None) -> None:
    """Raise StoreRestored where tables of the state were restored, all of them or some."""
    if what is not None:
        raise StoreRestored(
            f"Consumer {consumer!r}: tables of its state were restored, or loaded from a copy: {what}. Events that were decided since that "
            f"copy would be taken for new. Bring state and sinks to one moment, then run "
            f"{command('consumer', 'accept-restore', consumer)}; "
            f"docs/how-to/postgres.md says how (Restores and moves)."
        )


def refuse_deleted(consumer: str, by: str | None) -> None:
    """Raise Refused where the consumer is being deleted, by somebody at some time."""
    if by is not None:
        raise being_deleted(consumer, by)


def existing(connection: Connection, sql: Statements, consumer: str) -> ConsumerState:
    """As `read`. Raises ConfigError where there is no such consumer."""
    found = read(connection, sql, consumer)
    if found is None:
        raise ConfigError(f"There is no consumer {consumer!r} here. `dedup consumer list` shows the names.")
    return found


def read(connection: Connection, sql: Statements, consumer: str) -> ConsumerState | None:
    """The state now; None for a consumer nobody has created.

    Each statement has a snapshot of its own. The checkpoints come first: a batch that commits afterwards has moved one, so that whoever
    goes on with what is read here, which is partly newer, fails at `advance`.
    """
    points, floors, passed = _checkpoints(connection, sql, consumer)
    row = one(connection, sql, "head", consumer=consumer)
    if row is None:
        return None
    topics = connection.execute(sql["topics"], {"id": row["id"]}).fetchall()
    head = Head(
        consumer=consumer,
        seq=row["seq"],
        epoch=row["epoch"],
        generation=row["generation"],
        keyspace=row["keyspace"],
        settings=row["settings"],
        query_id=row["query_id"],
        batch_id=row["batch_id"],
        batch_ended=row["batch_ended"],
        gap_accepted=row["gap_accepted"],
        spent=policy.from_json(row["spent"]),
        floors=floors,
        checkpoints=points,
        passed=passed,
        incarnations={(source, topic): life for _, source, topic, life, _ in topics if life},
        incarnation_ids={(source, topic): told for _, source, topic, _, told in topics if told is not None},
    )
    known = {(source, topic): number for number, source, topic, *_ in topics}
    return ConsumerState(row["id"], head, known, deleted_by=row["deleted_by"])


def _checkpoints(
    connection: Connection, sql: Statements, consumer: str
) -> tuple[dict[Partition, Checkpoint], dict[Partition, int], dict[Partition, int]]:
    points, floors, passed = {}, {}, {}
    for source, topic, partition, *point, floor, behind in connection.execute(sql["checkpoints"], {"consumer": consumer}):
        where = Partition(source, topic, partition)
        points[where] = Checkpoint(*point)
        if floor is not None:
            floors[where] = floor
        if behind is not None:
            passed[where] = behind
    return points, floors, passed


def topic_id(connection: Connection, sql: Statements, state: ConsumerState, topic: Topic) -> int:
    """The number of a topic, made known if it is new.

    Crash: undone with the transaction.
    """
    if topic not in state.topics:
        life = state.head.incarnations.get(topic, 0)
        connection.execute(sql["add_topic"], {"id": state.id, "source": topic[0], "topic": topic[1], "incarnation": life})
        rows = connection.execute(sql["topics"], {"id": state.id}).fetchall()
        state.topics.update({(source, name): number for number, source, name, *_ in rows})
    return state.topics[topic]


def amend(connection: Connection, sql: Statements, consumer: str, change: Callable[[Head], Head], by: str, reason: str) -> Head:
    """Replace the head inside the transaction that is open on `connection`; returns the new one.

    Raises:
        ConfigError: there is no such consumer. Refused: it is being deleted.
        StoreRestored: the tables were restored, and the change does not begin a new generation.

    Crash: undone with the transaction.
    """
    locked = one(connection, sql, "lock_consumer", consumer=consumer)
    state = existing(connection, sql, consumer)
    assert locked is not None
    refuse_deleted(consumer, state.deleted_by)  # read after the lock was granted: a deletion may have held it
    old, new = state.head, change(state.head)
    anew = new.generation != old.generation
    if not anew:
        refuse_restored(consumer, locked["restored"])
    connection.execute(sql["amend_consumer"], {"id": state.id, "generation": new.generation, "keyspace": new.keyspace})
    settings = None if new.settings is None else Jsonb(dict(new.settings))
    last = {name: getattr(new, name) for name in ("query_id", "batch_id", "gap_accepted")}
    spent = Jsonb(policy.to_json(new.spent))
    connection.execute(sql["amend_progress"], {"id": state.id, "settings": settings, "spent": spent, "anew": anew, **last})
    _put_topics(connection, sql, state, new)
    _put_checkpoints(connection, sql, state, new)
    told = {"before": Jsonb(_plain(old)), "after": Jsonb(_plain(new))}
    connection.execute(sql["add_action"], {"id": state.id, "by": by, "reason": reason, **told})
    after = read(connection, sql, consumer)
    assert after is not None
    return after.head


def _put_topics(connection: Connection, sql: Statements, state: ConsumerState, new: Head) -> None:
    for topic in {*state.topics, *new.incarnations}:
        life = new.incarnations.get(topic, 0)
        named = {"id": state.id, "source": topic[0], "topic": topic[1]}
        connection.execute(sql["add_topic"], {**named, "incarnation": life})
        connection.execute(sql["set_incarnation_id"], {**named, "told": new.incarnation_ids.get(topic)})


def _put_checkpoints(connection: Connection, sql: Statements, state: ConsumerState, new: Head) -> None:
    connection.execute(sql["drop_checkpoints"], {"id": state.id})
    known = dataclasses.replace(state, head=new, topics=dict(state.topics))
    for where, point in new.checkpoints.items():
        number = topic_id(connection, sql, known, (where.source, where.topic))
        row = {**checkpoint_row(where, point), "passed": new.passed.get(where)}
        connection.execute(sql["put_checkpoint"], {"id": state.id, "topic_id": number, **row})
        floor = new.floors.get(where)  # without one the keyspace is new, or the incarnation: old floors are those of the ones before
        if floor is not None and floor != state.head.floors.get(where):
            named = {"id": state.id, "topic_id": number, "partition": where.partition, "floor": floor}
            connection.execute(sql["put_floor"], named)


def checkpoint_row(where: Partition, point: Checkpoint) -> dict[str, Any]:
    """A checkpoint as the statements' parameters."""
    return {
        "partition": where.partition,
        "sequence_number": point.sequence_number,
        "offset": point.offset,
        "enqueued_time": point.enqueued_time,
        "query_id": point.query_id,
        "log_time": point.log_time,
    }


def _plain(head: Head) -> Mapping[str, Any]:
    """A head as JSON."""
    return {
        **{f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.name not in _NOT_PLAIN},
        "settings": None if head.settings is None else dict(head.settings),
        "budget": {str(kind): {"decided": one.decided, "lifted": one.lifted} for kind, one in head.spent.items()},
        "floors": {str(p): number for p, number in head.floors.items()},
        "passed": {str(p): number for p, number in head.passed.items()},
        "checkpoints": {str(p): point.sequence_number for p, point in head.checkpoints.items()},
        "incarnations": {"/".join(topic): life for topic, life in head.incarnations.items()},
        "incarnation_ids": {"/".join(topic): told for topic, told in head.incarnation_ids.items()},
    }


def _rows(connection: Connection, statement: bytes, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return list(cursor.execute(statement, parameters).fetchall())


def batches(connection: Connection, sql: Statements, consumer: str, record_filter: RecordFilter) -> pa.Table:
    """BATCHES_KEPT in seq order."""
    place = record_filter.partition._asdict() if record_filter.partition else dict.fromkeys(Partition._fields)
    asked = {"after": record_filter.after, "until": record_filter.until, "first": record_filter.first, "last": record_filter.last}
    rows = _rows(connection, sql["batches"], {"consumer": consumer, **place, **asked})
    for row in rows:
        for name in _RANGES:
            bounds = zip(row.pop(f"{name}_first"), row.pop(f"{name}_last"), strict=True)
            row[name] = [{"first": first, "last": last} for first, last in bounds]
    return pa.Table.from_pylist(rows, schema=BATCHES_KEPT)


def reserved(connection: Connection, sql: Statements, keyspace: int) -> int | None:
    """How many reservations there are, where they can only be one consumer's and one keyspace's: rows do not name their consumer."""
    _, _, consumers = _one(connection, sql, "expected_reservations")
    return _counted(connection, sql)[0] if consumers == 1 and keyspace == 0 else None


def _counted(connection: Connection, sql: Statements) -> tuple[int, int]:
    """Keys that are reserved, and those of them that are in tables which never took reservations at one time."""
    kept, twice = _one(connection, sql, "count_reservations")
    return kept, twice


def problems(connection: Connection, sql: Statements, consumer: str) -> list[str]:
    """Contradictions in the tables; reads every reservation. Of a consumer that is being deleted, that alone."""
    known = read(connection, sql, consumer)
    if known is not None and known.deleted_by is not None:
        return [str(being_deleted(consumer, known.deleted_by))]
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        connection.execute(sql["lock_reservations"], {})
        checks = (sql["contradictions"], sql["restore_contradictions"], sql["order_contradictions"], sql["count_contradictions"])
        found = [str(row[0]) for check in checks for row in connection.execute(check, {"consumer": consumer})]
        kept, twice = _counted(connection, sql)
        expected, purged, _ = _one(connection, sql, "expected_reservations")
    if twice:
        found.append(f"{twice} keys are reserved in more than one table of reservations")
    if kept != expected and not purged:
        found.append(f"{kept} reservations are kept, the batch records of all consumers tell of {expected}")
    return found


def _one(connection: Connection, sql: Statements, name: str) -> tuple[Any, ...]:
    row = connection.execute(sql[name], {}).fetchone()
    assert row is not None
    return row
