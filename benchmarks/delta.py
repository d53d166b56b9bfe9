"""Delta: ours beside Spark's append, its append with transaction ids, and MERGE by key into a large table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.events import ORDER, Facts, Topic, decoded, land
from benchmarks.ours import SINK, consumer, fill
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup.delta import DeltaStore

FILLING = 100_000
"""Keys in each of the files that a large table begins with."""


def compare_appends(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Ours, append and append with transaction ids, all beginning empty. Verified; and the seconds of every batch."""
    topic = Topic()
    land([topic.batch(sizes.events) for _ in range(sizes.batches)], folder / "topic")
    paths = create_tables(folder, "append", "append_txn")
    ways = {"append": _append(paths["append"], txn=False), "append_txn": _append(paths["append_txn"], txn=True)}
    taken = _contest(spark, folder, ways, sizes.warm)
    verify(folder / SINK, topic.facts, once=True)
    for path in paths.values():
        verify(path, topic.facts, once=False)
    measures = [throughput(f"delta/{name}", taken["ours"], taken[name], sizes.events) for name in ways]
    return measures, {f"delta/{name}": seconds for name, seconds in taken.items()}


def compare_merge(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Ours and MERGE, both beginning with a table of 1 M orders, ours with as many reservations. Verified, as above."""
    topic = Topic()
    paths = create_tables(folder, "merge")
    _fill(folder, paths["merge"], topic, sizes.keys)
    land([topic.batch(sizes.events) for _ in range(sizes.batches)], folder / "topic")
    taken = _contest(spark, folder, {"merge": _merge(paths["merge"])}, sizes.warm)
    verify(folder / SINK, topic.facts, once=True)
    verify(paths["merge"], topic.facts, once=True)
    measure = throughput("delta/merge_1m", taken["ours"], taken["merge"], sizes.events)
    return [measure], {f"delta/merge_1m, {name}": seconds for name, seconds in taken.items()}


def verify(path: Path, expected: Facts, *, once: bool) -> None:
    """Raise AssertionError unless the table holds exactly the input, each order once or as often as it was delivered."""
    found = DeltaTable(str(path)).to_pyarrow_table(columns=["order_id", "customer"])
    orders = found.group_by("order_id").aggregate([("customer", "max")])
    facts = Facts(found.num_rows, orders.num_rows, sum(orders["customer_max"].to_pylist()))
    wanted = Facts(expected.orders if once else expected.rows, expected.orders, expected.customers)
    assert facts == wanted, f"{path.name}: {facts}, expected {wanted}"


def create_tables(folder: Path, *names: str) -> dict[str, Path]:
    """Our sink and the tables of other ways, empty."""
    for name in (SINK, *names):
        DeltaTable.create(str(folder / name), schema=ORDER)
    return {name: folder / name for name in names}


def store(folder: Path) -> DeltaStore:
    """The store of a measure, with its sink."""
    return DeltaStore(str(folder / "state"), tables={SINK: str(folder / SINK)})


def _contest(spark: Any, folder: Path, ways: dict[str, Way], warm: int) -> Seconds:
    with closing(store(folder)) as ours:
        return contest(spark, folder / "topic", {"ours": consumer(ours), **ways}, warm)


def _fill(folder: Path, merged: Path, topic: Topic, keys: int) -> None:
    copies, topic.copies = topic.copies, 0.0
    with closing(store(folder)) as ours:
        fill(ours, (pa.concat_tables(topic.batch(min(FILLING, keys - n))) for n in range(0, keys, FILLING)))
    topic.copies = copies
    for part in DeltaTable(str(folder / SINK)).to_pyarrow_dataset().to_batches():  # one file after another
        write_deltalake(str(merged), pa.table(part), mode="append")


def _append(path: Path, *, txn: bool) -> Callable[[Any, int], None]:
    def append(batch: Any, batch_id: int) -> None:
        options = {"txnAppId": "benchmark", "txnVersion": str(batch_id)} if txn else {}
        decoded(batch).write.format("delta").options(**options).mode("append").save(str(path))

    return append


def _merge(path: Path) -> Callable[[Any, int], None]:
    def merge(batch: Any, batch_id: int) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable

        new = decoded(batch).dropDuplicates(["order_id"])
        table = SparkDeltaTable.forPath(batch.sparkSession, str(path))
        table.alias("t").merge(new.alias("n"), "t.order_id = n.order_id").whenNotMatchedInsertAll().execute()

    return merge
