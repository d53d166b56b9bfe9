"""Delta: ours beside Spark's append, its append with transaction ids, and MERGE by key into a large table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from benchmarks.events import ORDER, Facts, Topic, decoded, land
from benchmarks.ours import SINK, consumer, fill
from benchmarks.report import Measure, throughput
from benchmarks.reserved import reserve
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup import Limits
from dedup.delta import DeltaStore

FILLING = 100_000
"""Keys in each of the files that a large table begins with."""

MADE = 1_000_000
"""The same, for the largest ones."""


def compare_appends(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Ours, append and append with transaction ids, all beginning empty. Verified; and the seconds of every batch."""
    topic = Topic(duplicates=sizes.duplicates)
    land([topic.batch(sizes.events) for _ in range(sizes.batches)], folder / "topic")
    paths = create_tables(folder, "append", "append_txn")
    ways = {"append": append(paths["append"], txn=False), "append_txn": append(paths["append_txn"], txn=True)}
    taken = _contest(spark, folder, ways, sizes.warm)
    verify(folder / SINK, topic.facts, once=True)
    for path in paths.values():
        verify(path, topic.facts, once=False)
    measures = [throughput(f"delta/{name}", taken["ours"], taken[name], sizes.events) for name in ways]
    return measures, {f"delta/{name}": seconds for name, seconds in taken.items()}


def compare_large(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Ours, also with rows left in the tasks, and a plain append, ten times as many events a batch, a third of the batches. Verified."""
    topic, apart = Topic(), folder / "in_tasks"
    land((topic.batch(sizes.large) for _ in range(max(sizes.batches // 3, 2))), folder / "topic")
    path = create_tables(folder, "append")["append"]
    create_tables(apart)
    with closing(store(apart)) as left:
        ways = {"append": append(path, txn=False), "in_tasks": consumer(left, limits=Limits(collect=False))}
        taken = _contest(spark, folder, ways, max(sizes.warm // 3, 1))
    for mine in (folder, apart):
        verify(mine / SINK, topic.facts, once=True)
    verify(path, topic.facts, once=False)
    names = {"delta/append_500k": "ours", "delta/append_500k_in_tasks": "in_tasks"}
    measures = [throughput(name, taken[way], taken["append"], sizes.large) for name, way in names.items()]
    return measures, {f"delta/append_500k, {name}": seconds for name, seconds in taken.items()}


def compare_merge(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Ours and MERGE, both beginning with a table of 1 M orders, ours with as many reservations. Verified, as above."""
    topic = Topic()
    paths = create_tables(folder, "merge")
    _fill(folder, paths["merge"], topic, sizes.keys)
    land([topic.batch(sizes.events) for _ in range(sizes.batches)], folder / "topic")
    taken = _contest(spark, folder, {"merge": merge(paths["merge"])}, sizes.warm)
    verify(folder / SINK, topic.facts, once=True)
    verify(paths["merge"], topic.facts, once=True)
    measure = throughput("delta/merge_1m", taken["ours"], taken["merge"], sizes.events)
    return [measure], {f"delta/merge_1m, {name}": seconds for name, seconds in taken.items()}


def compare_merge_many(spark: Any, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Ours and MERGE with 10 M keys on both sides, a third of the batches. Verified, as above."""
    topic = Topic()
    land((topic.batch(sizes.events) for _ in range(max(sizes.batches // 3, 2))), folder / "topic")
    path = create_tables(folder, "merge")["merge"]
    there = make_orders(spark, [path, folder / SINK], sizes.many)
    with closing(store(folder)) as ours:
        reserve(ours, sizes.many)
        taken = contest(spark, folder / "topic", {"ours": consumer(ours), "merge": merge(path)}, max(sizes.warm // 3, 1))
    for table in (path, folder / SINK):
        verify(table, topic.facts + there, once=True)
    measure = throughput("delta/merge_10m", taken["ours"], taken["merge"], sizes.events)
    return [measure], {f"delta/merge_10m, {name}": seconds for name, seconds in taken.items()}


def make_orders(spark: Any, tables: list[Path], count: int) -> Facts:
    """Put so many orders that no event has into each of these tables, by tasks; returns what they are."""
    made = spark.range(0, count, 1, -(-count // MADE)).selectExpr(
        "md5(cast(id as string)) AS order_id",
        "id % 1000000 AS customer",
        "id / 100D AS amount",
        "timestampadd(SECOND, id % 2000000, timestamp'2026-01-01 00:00:00') AS placed_at",
        "repeat(md5(cast(-id as string)), 2) AS note",
    )
    for path in tables:
        made.write.format("delta").mode("append").save(str(path))
    return made_facts(count)


def made_facts(count: int) -> Facts:
    """What is true of so many orders that were made: their customers are numbers below a million, one after another."""
    whole, rest = divmod(count, 1_000_000)
    return Facts(count, count, whole * 499_999_500_000 + rest * (rest - 1) // 2)


def verify(path: Path | str, expected: Facts, *, once: bool) -> None:
    """Raise AssertionError unless the table holds exactly the input, each order once or as often as it was delivered."""
    found = DeltaTable(str(path)).to_pyarrow_table(columns=["order_id", "customer"])
    orders = found.group_by("order_id").aggregate([("customer", "max")])
    facts = Facts(found.num_rows, orders.num_rows, pc.sum(orders["customer_max"]).as_py())
    wanted = Facts(expected.orders if once else expected.rows, expected.orders, expected.customers)
    assert facts == wanted, f"{path}: {facts}, expected {wanted}"


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
    duplicates, topic.duplicates = topic.duplicates, 0.0
    with closing(store(folder)) as ours:
        fill(ours, (pa.concat_tables(topic.batch(min(FILLING, keys - n))) for n in range(0, keys, FILLING)))
    topic.duplicates = duplicates
    for part in DeltaTable(str(folder / SINK)).to_pyarrow_dataset().to_batches():  # one file after another
        write_deltalake(str(merged), pa.table(part), mode="append")


def append(path: Path, *, txn: bool) -> Callable[[Any, int], None]:
    """An append as Spark does it, with a transaction id or without."""

    def run(batch: Any, batch_id: int) -> None:
        """Append the batch."""
        options = {"txnAppId": "benchmark", "txnVersion": str(batch_id)} if txn else {}
        decoded(batch).write.format("delta").options(**options).mode("append").save(str(path))

    return run


def merge(path: Path) -> Callable[[Any, int], None]:
    """MERGE by key, as one writes it."""

    def insert_new(batch: Any, batch_id: int) -> None:
        """Insert the rows whose key the table does not have."""
        from delta.tables import DeltaTable as SparkDeltaTable

        new = decoded(batch).dropDuplicates(["order_id"])
        table = SparkDeltaTable.forPath(batch.sparkSession, str(path))
        table.alias("t").merge(new.alias("n"), "t.order_id = n.order_id").whenNotMatchedInsertAll().execute()

    return insert_new
