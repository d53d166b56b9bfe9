"""What the PostgreSQL tests share: keys, holders, one chunk from begin to commit."""

from __future__ import annotations

import datetime as dt
import hashlib
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import psycopg
import pyarrow as pa

from checkpoint.head import Checkpoint, Holder, Run
from checkpoint.holders import this_process
from checkpoint.position import Partition
from checkpoint.records import BATCHES
from deadletter.letter import HISTORY, LETTERS, letter_id
from deadletter.store import KEYS, Change, Commit, Park
from dedup.core.rows import ArrowRows
from dedup.core.steps import Advance, Record
from dedup.postgres import PostgresStore
from kit import pg_server

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


def purge_all(store: Any, **options: Any) -> int:
    """Give up all closed tables, however far the consumers are in their logs."""
    later = dt.datetime(2999, 1, 1, tzinfo=dt.UTC)
    return int(store.purge_reservations(later, although_behind=store.consumers(), **options))


def keys(names: Iterable[object], payload: int = 7) -> pa.Table:
    """KEYS of these names, sorted as the pipeline sorts them."""
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


FAILED_AT = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def letter(number: int, *, consumer: str = "shop", sequence: str | None = None, key: bool = True, **columns: Any) -> dict[str, Any]:
    """A letter at position `number` of ORDERS, as planning makes it."""
    place = {**ORDERS._asdict(), "incarnation": 0, "sequence_number": number, "part": 0}
    row = {
        "id": letter_id(consumer, 0, *place.values()),
        "consumer": consumer,
        "generation": 0,
        **place,
        "key": keys([number])["key"][0].as_py() if key else None,
        "holds_key": key,
        "idempotence_key": f"order-{number}",
        "payload_hash": 7,
        "body": b'{"id": %d}' % number,
        "kind": "REJECTED",
        "reason": "negative amount",
        "fingerprint": "f" * 16,
        "attempts": 1,
        "first_failed_at": FAILED_AT,
        "last_failed_at": FAILED_AT,
        "status": "OPEN",
        "sequence_key": sequence,
        "sequence": sequence_of(sequence) if sequence else None,
        "blocked_by": None,
    }
    return {**row, **columns}


def letters_of(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """LETTERS of these rows."""
    return pa.Table.from_pylist(list(rows), schema=LETTERS)


def chain(numbers: Iterable[int], sequence: str, **columns: Any) -> list[dict[str, Any]]:
    """Letters of one sequence, each blocked by the one before it."""
    found: list[dict[str, Any]] = []
    for number in numbers:
        before = {"status": "BLOCKED", "blocked_by": found[-1]["id"]} if found else {}
        found.append(letter(number, sequence=sequence, **before, **columns))
    return found


def park(
    store: PostgresStore, rows: Iterable[dict[str, Any]], history: Iterable[dict[str, Any]] = (), *, reserve: bool = True
) -> list[str]:
    """Reserve the keys of these letters and park them, without a batch; returns their ids."""
    table = letters_of(rows)
    with store.begin_letters(table["consumer"][0].as_py()) as tx:
        held = [k for k in table["key"].to_pylist() if k is not None] if reserve else []
        wanted = sorted(set(held))
        tx.reserve(pa.table([pa.array(wanted, pa.binary(16)), pa.array([7] * len(wanted), pa.int64())], schema=KEYS))
        tx.execute(Park(table, history_of(history)))
        tx.execute(Commit())
    return list(table["id"].to_pylist())


def history_of(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """HISTORY of these rows."""
    return pa.Table.from_pylist([{"at": FAILED_AT, "action": "FAILED", "reserved": 0, **row} for row in rows], schema=HISTORY)


def change(
    store: PostgresStore, ids: Iterable[str], *, history: Iterable[dict[str, Any]] = (), consumer: str = "shop", **columns: Any
) -> int:
    """Lock these letters and set the same columns of all of them; returns how many could be locked."""
    with store.begin_letters(consumer) as tx:
        locked = tx.lock(list(ids))
        tx.execute(changing(locked["id"].to_pylist(), history=history, **columns))
        tx.execute(Commit())
    return int(locked.num_rows)


def changing(ids: list[str], *, history: Iterable[dict[str, Any]] = (), **columns: Any) -> Change:
    """The step that sets the same columns of all of these letters."""
    schema = pa.schema([LETTERS.field("id"), *(LETTERS.field(name) for name in columns)])
    return Change(pa.Table.from_pylist([{"id": i, **columns} for i in ids], schema=schema), history_of(history))


def sequence_of(name: str) -> bytes:
    """The hash of a sequence key, as `letter` makes it."""
    return hashlib.sha256(name.encode()).digest()[:16]


def every_table(dsn: str) -> list[str]:
    """Of the state."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "select tablename from pg_tables where schemaname = 'dedup' and tablename <> 'schema_version'"
        ).fetchall()
    return [f"dedup.{name}" for (name,) in found]


class Copy:
    """The rows of some tables as they are now: what a dump of their data holds."""

    def __init__(self, dsn: str, tables: Iterable[str]) -> None:
        self.dsn, self.rows = dsn, dict[str, bytes]()
        with psycopg.connect(dsn) as connection:
            for table in tables:
                with connection.cursor().copy(f"copy {table} to stdout (format binary)".encode()) as rows:
                    self.rows[table] = b"".join(rows)

    def load(self) -> None:
        """In place of what is there now, without triggers and foreign keys, as `pg_restore --data-only --disable-triggers`."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute("set session_replication_role = replica")
            for table, rows in self.rows.items():
                connection.execute(f"delete from only {table}".encode())
                with connection.cursor().copy(f"copy {table} from stdin (format binary)".encode()) as into:
                    into.write(rows)


def keep_copy(server: pg_server.Server) -> Callable[[], None]:
    """Copy the database as it is now; returns what fails over to that copy."""
    older = server.data.with_name("older")
    server.stop()
    shutil.rmtree(older, ignore_errors=True)
    subprocess.run(["cp", "-a", str(server.data), str(older)], check=True)
    server.start()

    def fail_over() -> None:
        server.kill()
        server.data = older
        server.start()

    return fail_over
