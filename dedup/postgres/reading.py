"""What people and `verify` read: batch records, counts, contradictions. Read-only; not on the path of a batch."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from psycopg.rows import dict_row

from checkpoint.position import Partition
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.store import BATCHES
from dedup.wanted import Wanted

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


def _rows(connection: Connection, statement: bytes, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return list(cursor.execute(statement, parameters).fetchall())


def batches(connection: Connection, sql: Statements, consumer: str, wanted: Wanted) -> pa.Table:
    """BATCHES_KEPT in seq order."""
    place = wanted.partition._asdict() if wanted.partition else dict.fromkeys(Partition._fields)
    asked = {"after": wanted.after, "until": wanted.until, "first": wanted.first, "last": wanted.last}
    rows = _rows(connection, sql["batches"], {"consumer": consumer, **place, **asked})
    for row in rows:
        for name in _RANGES:
            bounds = zip(row.pop(f"{name}_first"), row.pop(f"{name}_last"), strict=True)
            row[name] = [{"first": first, "last": last} for first, last in bounds]
    return pa.Table.from_pylist(rows, schema=BATCHES_KEPT)


def reserved(connection: Connection, sql: Statements, keyspace: int) -> int | None:
    """How many reservations there are, where they can only be one consumer's and one keyspace's: rows do not name their consumer."""
    _, _, consumers = _one(connection, sql, "expected_reservations")
    return int(_one(connection, sql, "count_reservations")[0]) if consumers == 1 and keyspace == 0 else None


def problems(connection: Connection, sql: Statements, consumer: str) -> list[str]:
    """Contradictions in the tables; reads every reservation."""
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        checks = (sql["contradictions"], sql["restore_contradictions"], sql["order_contradictions"], sql["count_contradictions"])
        found = [str(row[0]) for check in checks for row in connection.execute(check, {"consumer": consumer})]
        kept, twice = _one(connection, sql, "count_reservations")
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
