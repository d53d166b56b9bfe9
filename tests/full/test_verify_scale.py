"""`verify` over a hundred million positions, in bounded memory. The records are generated; that they are right is another test's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from checkpoint.head import Checkpoint, Run
from checkpoint.records import BATCHES as RECORD
from checkpoint.records import RecordFilter
from deadletter.store import Commit
from dedup.core.steps import Advance, Record
from dedup.delta import DeltaStore
from kit import delta_kit as kit
from kit.orders import batch, consumer, orders
from kit.pg_run import run
from kit.places import PostgresPlace

BATCHES, PARTITIONS, WIDTH, GAP = 10_000, 4, 2_500, 100
"""Each batch sees 2,500 positions of each of four partitions, with a hole after every 100, as transaction markers leave them."""

RECORDS = f"""
insert into dedup.batch
select c.id, 0, t.id, 0, p, 'q', b, 0, 1, b, null, b * {WIDTH}::bigint, (b + 1) * {WIDTH}::bigint - 2, seen.r, '{{}}', '{{}}', '{{}}',
    {WIDTH - WIDTH // GAP}, 0, {WIDTH - WIDTH // GAP}, 0, 0, 0, 0, now()
from dedup.consumer c join dedup.topic t on t.consumer_id = c.id, generate_series(1, %s) b, generate_series(0, {PARTITIONS - 1}) p
cross join lateral (
    select range_agg(int8range(b * {WIDTH}::bigint + n * {GAP}, b * {WIDTH}::bigint + n * {GAP} + {GAP} - 1)) as r
    from generate_series(0, {WIDTH // GAP - 1}) n
) seen
"""

CHILD = """
import json, resource, sys, time
from dedup import DeltaStore, PostgresStore
from dedup.verify import verify
store = (DeltaStore if sys.argv[1].startswith("/") else PostgresStore)(sys.argv[1])
began = time.monotonic()
report = verify(store, "shop")
full = time.monotonic() - began
again = verify(store, "shop", report.proof)
told = {"ok": report.ok and again.ok, "full": full, "again": time.monotonic() - began - full, "contradictions": report.contradictions[:3]}
told["seen"] = sum(len(p.seen) for p in report.partitions)
told["ranges"] = sum(len(p.seen.items) for p in report.partitions)
print(json.dumps({**told, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
"""


def generated(postgres: str, batches: int) -> PostgresPlace:
    """A consumer with so many batches that never ran."""
    place = PostgresPlace(postgres)
    place.create_sink()
    run_ = consumer(place.store())
    for partition in range(PARTITIONS):
        run_(batch(*orders(range(3), partition=partition)), partition)
    run(postgres, "delete from dedup.batch; truncate dedup.reservation cascade; truncate only dedup.reservation_000001")
    run(postgres, RECORDS % batches)
    run(
        postgres,
        f"update dedup.progress set seq = {batches}, written_by = pg_current_xact_id(), recorded = null, reserved = null; "
        f"update dedup.checkpoint set sequence_number = {(batches + 1) * WIDTH - 2}",
    )
    return place


def decided(where: Path, batches: int, width: int) -> None:
    """A ledger with so many decisions, each about `width` positions of each partition, with the same holes. No sink."""
    store, n = DeltaStore(str(where)), width - width // GAP
    epoch = kit.epoch(store)
    for number in range(batches):
        starts = range(number * width, (number + 1) * width, GAP)
        seen = [{"first": first, "last": first + GAP - 2} for first in starts]
        row = {f.name: [] if pa.types.is_list(f.type) else 0 for f in RECORD}
        row |= {"source": "broker", "topic": "orders", "query_id": "q", "batch_id": number, "seen": seen, "delivered": n, "processed": n}
        records = pa.Table.from_pylist([{**row, "partition": p} for p in range(PARTITIONS)], schema=RECORD)
        with store.begin(kit.NAME, epoch) as tx:
            tx.execute(Record(records, Run("q", number, durable=True), {"key": "id"}))
            tx.execute(Advance({kit.partition(p): Checkpoint(seen[-1]["last"], query_id="q") for p in range(PARTITIONS)}))
            tx.execute(Commit())
    store.close()


def measured(where: str) -> dict[str, float]:
    """What a process of its own found, and what it took."""
    done = subprocess.run([sys.executable, "-c", CHILD, where], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_ten_thousand_ranges_are_proven(postgres: str) -> None:
    """The generated records add up: each position once, a hole after every hundred."""
    place = generated(postgres, 100)
    told = measured(postgres)
    assert told["ok"] and told["seen"] == 100 * PARTITIONS * (WIDTH - WIDTH // GAP), told
    assert told["ranges"] == 100 * PARTITIONS * WIDTH // GAP
    assert place.store().batches("shop", RecordFilter(after=50, until=52)).num_rows == 2 * PARTITIONS


def test_a_hundred_million_positions_are_proven_in_bounded_memory(postgres: str) -> None:
    """A million ranges in forty thousand records; the process stays below two gigabytes, and a second proof reads next to nothing."""
    generated(postgres, BATCHES)
    told = measured(postgres)
    print(told)
    assert told["ok"] and told["seen"] == BATCHES * PARTITIONS * (WIDTH - WIDTH // GAP), told
    assert told["megabytes"] < 2_000, told


@pytest.mark.delta
def test_ten_thousand_ranges_are_proven_on_delta(tmp_path: Path) -> None:
    """The same positions in the records of a ledger."""
    decided(tmp_path / "state", 10, 25_000)
    told = measured(str(tmp_path / "state"))
    assert told["ok"] and told["seen"] == 10 * PARTITIONS * (25_000 - 25_000 // GAP), told
    assert told["ranges"] == 10 * PARTITIONS * 25_000 // GAP


@pytest.mark.delta
def test_a_hundred_million_positions_are_proven_in_bounded_memory_on_delta(tmp_path: Path) -> None:
    """A million ranges in the records of a thousand decisions; a second proof reads next to nothing."""
    decided(tmp_path / "state", 1_000, 25_000)
    told = measured(str(tmp_path / "state"))
    print(told)
    assert told["ok"] and told["seen"] == 1_000 * PARTITIONS * (25_000 - 25_000 // GAP), told
    assert told["megabytes"] < 2_000, told
