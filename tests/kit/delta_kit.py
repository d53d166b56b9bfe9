"""Drives a DeltaStore through its transaction interface with a handful of rows: the protocol without the pipeline around it."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from checkpoint.head import Checkpoint, Head, Holder, Run
from checkpoint.holders import this_process
from checkpoint.position import Partition, Ranges
from checkpoint.records import BATCHES
from deadletter.letter import LETTERS, letter_id
from deadletter.store import KEYS, Commit, Note, Park
from dedup.core.rows import ArrowRows
from dedup.core.steps import Advance, Record
from dedup.delta import DeltaStore, key_files

SINK = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string())])
NAME = "shop"


class Event(NamedTuple):
    """One event: its key is a number."""

    partition: int
    position: int
    key: int


class Outcome(NamedTuple):
    """Keys, by what became of them."""

    written: list[int]
    parked: list[int]
    duplicates: list[int]


def key_bytes(key: int) -> bytes:
    """What stands for the canonical encoding."""
    return hashlib.sha256(str(key).encode()).digest()[:16]


def create(uri: str, schema: pa.Schema = SINK, **options: Any) -> None:
    """An empty sink."""
    DeltaTable.create(uri, schema, **options)


def epoch(store: DeltaStore, run_id: str = "run", **options: Any) -> int:
    """Take the epoch as this process."""
    process = this_process()
    return store.take_epoch(NAME, Holder(*process, run_id), **{"takeover_after": 0.2, **options}).epoch


def partition(number: int) -> Partition:
    """The partitions of the one topic."""
    return Partition("broker", "orders", number)


def events(keys: Iterable[int], start: int = 0, number: int = 0) -> list[Event]:
    """Consecutive events of one partition."""
    return [Event(number, start + i, key) for i, key in enumerate(keys)]


def process(
    store: DeltaStore,
    epoch_: int,
    batch: Sequence[Event],
    batch_id: int = 0,
    *,
    sinks: Sequence[str] = ("orders",),
    reject: Callable[[int], bool] = lambda key: False,
    text: str = "",
) -> Outcome:
    """One chunk through the store: redeliveries, reserve, write, park, note, record, advance, commit."""
    with store.begin(NAME, epoch_) as tx:
        spans = {partition(p): _span(batch, p) for p in sorted({e.partition for e in batch})}
        seen = tx.seen(spans)
        fresh = [e for e in batch if not _known(seen, e)]
        distinct = list(dict.fromkeys(e.key for e in fresh))
        asked = pa.table([pa.array([key_bytes(k) for k in distinct], pa.binary(16)), pa.array(distinct, pa.int64())], schema=KEYS)
        known = set(tx.reserve(asked)["payload_hash"].to_pylist())
        new = [k for k in distinct if k not in known]
        bad = [k for k in new if reject(k)]
        good = [k for k in new if k not in bad]
        rows = pa.table({"id": pa.array(good, pa.int64()), "text": pa.array([text] * len(good), pa.string())}, schema=SINK)
        for sink in sinks:
            assert tx.write(sink, ArrowRows(rows)) == len(good)
        duplicates = [e.key for e in fresh if e.key in known] + _repeats(fresh, known)
        if bad:
            tx.execute(Park(letters(tx.head, [next(e for e in fresh if e.key == k) for k in bad])))
        if duplicates:
            tx.execute(Note(_duplicates(duplicates)))
        tx.execute(Record(records(tx.head, batch, fresh, len(new), batch_id), Run("q", batch_id, durable=True), {"key": "id"}))
        tx.execute(Advance({p: Checkpoint(last, query_id="q") for p, (_, last) in spans.items()}))
        tx.execute(Commit())
    return Outcome(good, bad, duplicates)


def _known(seen: Any, e: Event) -> bool:
    ranges = seen.get(partition(e.partition))
    return bool(ranges) and any(r.first <= e.position <= r.last for r in ranges.items)


def _span(batch: Sequence[Event], number: int) -> tuple[int, int]:
    positions = [e.position for e in batch if e.partition == number]
    return min(positions), max(positions)


def _repeats(fresh: Sequence[Event], known: set[int]) -> list[int]:
    met: set[int] = set()
    found = []
    for e in fresh:
        if e.key in met and e.key not in known:
            found.append(e.key)
        met.add(e.key)
    return found


def _duplicates(keys: list[int]) -> pa.Table:
    distinct = sorted(set(keys))
    return pa.table(
        {"key": pa.array([key_bytes(k) for k in distinct], pa.binary(16)), "count": pa.array([keys.count(k) for k in distinct], pa.int64())}
    )


def records(head: Head, batch: Sequence[Event], fresh: Sequence[Event], reserved: int, batch_id: int) -> pa.Table:
    """BATCHES, one row per partition."""
    rows = []
    for number in sorted({e.partition for e in batch}):
        positions = [e.position for e in fresh if e.partition == number]
        row: dict[str, Any] = {f.name: [] if pa.types.is_list(f.type) else 0 for f in BATCHES}
        row |= {"source": "broker", "topic": "orders", "partition": number, "query_id": "q", "batch_id": batch_id}
        row |= {
            "seen": [r._asdict() for r in Ranges.of_numbers(positions).items],
            "delivered": len(batch),
            "reserved": 0 if rows else reserved,
        }
        rows.append(row)
    return pa.Table.from_pylist(rows or [_empty(batch_id)], schema=BATCHES)


def _empty(batch_id: int) -> dict[str, Any]:
    row: dict[str, Any] = {f.name: [] if pa.types.is_list(f.type) else 0 for f in BATCHES}
    return row | {"source": "", "topic": "", "partition": -1, "query_id": "q", "batch_id": batch_id}


def letters(head: Head, parked: Sequence[Event], kind: str = "REJECTED", holds: bool = True) -> pa.Table:
    """LETTERS for these events."""
    now = dt.datetime.now(dt.UTC)
    rows = [
        {
            "id": letter_id(head.consumer, head.generation, "broker", "orders", 0, e.partition, e.position, 0),
            "consumer": head.consumer,
            "generation": head.generation,
            "source": "broker",
            "topic": "orders",
            "incarnation": 0,
            "partition": e.partition,
            "sequence_number": e.position,
            "part": 0,
            "key": key_bytes(e.key) if holds else None,
            "holds_key": holds,
            "payload_hash": e.key,
            "body": str(e.key).encode(),
            "kind": kind,
            "reason": "no good",
            "fingerprint": "f",
            "attempts": 1,
            "first_failed_at": now,
            "last_failed_at": now,
            "status": "OPEN",
        }
        for e in parked
    ]
    return pa.Table.from_pylist(rows, schema=LETTERS)


def pages_of(count: int) -> Any:
    """Pages of so few keys, and few of them at once: a file has many."""
    page = np.dtype([(name, (of.subdtype or (of, ()))[0], count) for name, (of, _) in (key_files.PAGE.fields or {}).items()])
    return mock.patch.multiple(key_files, PAGE_KEYS=count, PAGE=page, AT_ONCE=2)


def ids(uri: str) -> list[int]:
    """What a sink shows, sorted."""
    found: list[int] = DeltaTable(uri).to_pyarrow_table()["id"].to_pylist()
    return sorted(found)


def open_store(folder: Path, *, sinks: Sequence[str] = ("orders", "audit", "late"), **options: Any) -> DeltaStore:
    """The store as a new process opens it.

    Args:
        sinks: names that it knows; the tables lie beside the store.
    """
    return DeltaStore(str(folder / "state"), tables={name: str(folder / name) for name in sinks}, **options)


def show(folder: Path, name: str = "orders") -> list[int]:
    """What a sink beside the store shows."""
    return ids(str(folder / name))


def ledger(folder: Path) -> DeltaTable:
    """The ledger's table."""
    return DeltaTable(str(folder / "state" / "ledger" / NAME))


def die_before_publishing(store: DeltaStore, number: int, batch: list[Event], batch_id: int = 0, **options: Any) -> None:
    """Decide a batch and stop before any sink shows it."""

    class Died(Exception):
        pass

    def on_step(name: str) -> None:
        if name == "publish":
            raise Died

    before, store.on_step = store.on_step, on_step
    with pytest.raises(Died):
        process(store, number, batch, batch_id, **options)
    store.on_step = before
