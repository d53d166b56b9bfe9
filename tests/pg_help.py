"""What the PostgreSQL tests share: keys, holders, one chunk from begin to commit."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from checkpoint.position import Partition
from dedup.postgres import PostgresStore
from dedup.process import this_process
from dedup.rows import ArrowRows
from dedup.steps import Advance, Commit, Record
from dedup.store import BATCHES, KEYS, Checkpoint, Holder, Run

WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
"""How many sessions wait for another one."""

ORDERS = Partition("broker", "orders", 0)


def holder(host: str | None = None) -> Holder:
    """A new run of this very process, or of one on a host that nobody can look into."""
    here = this_process()
    return Holder(host or here.host, here.pid, here.started, uuid.uuid4().hex)


def epoch(store: PostgresStore, consumer: str = "shop", **options: Any) -> int:
    """Take the epoch by force."""
    return store.take_epoch(consumer, holder(), takeover_after=options.pop("takeover_after", 5.0), force=True, **options).epoch


def keys(names: Iterable[object], payload: int = 7) -> pa.Table:
    """KEYS of these names, sorted as the flow sorts them."""
    found = sorted(hashlib.sha256(str(name).encode()).digest()[:16] for name in names)
    return pa.table([pa.array(found, pa.binary(16)), pa.array([payload] * len(found), pa.int64())], schema=KEYS)


def rows(**columns: Any) -> ArrowRows:
    """Rows for a sink."""
    return ArrowRows(pa.table(columns))


def record(
    first: int, last: int, *, batch_id: int = 0, chunk: int = 0, reserved: int | None = None, partition: Partition = ORDERS
) -> Record:
    """A batch record in which everything was processed."""
    count = last - first + 1
    row = {
        **partition._asdict(),
        "incarnation": 0,
        "query_id": "q",
        "batch_id": batch_id,
        "chunk": chunk,
        "seen": [{"first": first, "last": last}],
        **{name: [] for name in ("duplicates", "skipped", "late")},
        **dict.fromkeys(("redelivered", "duplicate", "skipped_rows", "dead_lettered"), 0),
        "delivered": count,
        "processed": count,
        "reserved": count if reserved is None else reserved,
    }
    return Record(pa.Table.from_pylist([row], schema=BATCHES), Run("q", batch_id, chunk), {"columns": "id"})


def finish(tx: Any, first: int, last: int, *, batch_id: int = 0, reserved: int | None = None) -> None:
    """Record, advance and commit."""
    tx.execute(record(first, last, batch_id=batch_id, reserved=reserved))
    tx.execute(Advance({ORDERS: Checkpoint(last, f"offset-{last}", None, "q")}))
    tx.execute(Commit())


def chunk(store: PostgresStore, number: int, first: int, last: int, batch_id: int = 0, consumer: str = "shop") -> int:
    """Reserve, and commit, the keys first..last; returns how many of them were known."""
    with store.begin(consumer, number) as tx:
        known = tx.reserve(keys(range(first, last + 1))).num_rows
        finish(tx, first, last, batch_id=batch_id, reserved=last - first + 1 - known)
    return known
