"""What docs/how-to/lake.md shows is what runs: Delta tables, their change feed and files as sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dedup.verify import verify
from kit.orders import letters
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.delta]

TEXT = (ROOT / "docs/how-to/lake.md").read_text()
RAW, ROWS, FEED, FILES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(spark: SparkSession, snippet: str, lake: Path, checkpoint: str = "spark") -> Any:
    """The snippet's consumer, once its stream has read all that there is."""
    names: dict[str, Any] = {"spark": spark}
    exec(snippet.replace("/lake/spark", f"/lake/{checkpoint}").replace("/lake", str(lake)), names)
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    return names["consumer"]


def create(spark: SparkSession, lake: Path, name: str, columns: str, properties: str = "") -> str:
    """An empty table; how SQL calls it."""
    table = f"delta.`{lake / name}`"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING delta" + (f" TBLPROPERTIES ({properties})" if properties else ""))
    return table


def found(spark: SparkSession, table: str) -> list[tuple[Any, ...]]:
    """Its rows, by the first column."""
    return sorted(map(tuple, spark.sql(f"SELECT * FROM {table}").collect()))


def events(spark: SparkSession, *given: tuple[int, str]) -> DataFrame:
    """Raw events, with the columns of Spark's Kafka source."""
    rows = [("orders", 0, offset, json.dumps({"id": id, "amount": 1.5})) for offset, id in given]
    named = spark.createDataFrame(rows, "topic string, partition int, offset long, value string")
    more = ["CAST(NULL AS binary) AS key", "CAST(value AS binary) AS value", "timestamp'2026-01-01' AS timestamp", "0 AS timestampType"]
    return named.selectExpr("topic", "partition", "offset", *more)


def test_raw_events_keep_their_positions(spark: SparkSession, tmp_path: Path) -> None:
    """Each event has one effect after a restart, an OPTIMIZE and the loss of Spark's checkpoint, and the positions of Kafka prove it."""
    sink, bronze = create(spark, tmp_path, "orders", "id string, amount decimal(12,2)"), str(tmp_path / "bronze")
    events(spark, (0, "a"), (1, "b"), (2, "a")).write.format("delta").save(bronze)
    run(spark, RAW, tmp_path)
    events(spark, (3, "c"), (4, "b")).write.format("delta").mode("append").save(bronze)
    spark.sql(f"OPTIMIZE delta.`{bronze}`")
    consumer = run(spark, RAW, tmp_path)
    assert sum(consumer.store.batches("silver")["redelivered"].to_pylist()) == 0
    run(spark, RAW, tmp_path, "another")
    assert [row[0] for row in found(spark, sink)] == ["a", "b", "c"]
    assert sum(consumer.store.batches("silver")["redelivered"].to_pylist()) == 5
    assert {str(part): at.sequence_number for part, at in consumer.store.head("silver").checkpoints.items()} == {"kafka-west/orders/0": 4}
    assert verify(consumer.store, "silver").ok


def test_rows_without_positions_come_once_with_all_their_digits(spark: SparkSession, tmp_path: Path) -> None:
    """What is landed twice, and a stream that begins anew, change nothing; all digits are as they were; NaN is a letter each time."""
    columns = "id string, amount decimal(12,2), rate double, at timestamp"
    sink, bronze = create(spark, tmp_path, "payments", columns), create(spark, tmp_path, "bronze", columns)
    late = "('a', 1234567890.12, 0.1D, timestamp'2026-03-29 01:30:00.123456')"
    for _ in range(2):
        spark.sql(f"INSERT INTO {bronze} VALUES {late}, ('b', NULL, NULL, timestamp'1969-12-31 23:59:59.999999')")
    rows = found(spark, bronze)
    spark.sql(f"INSERT INTO {bronze} VALUES ('c', 1.00, double('NaN'), NULL)")
    for streams, checkpoint in enumerate(("spark", "another"), 1):
        consumer = run(spark, ROWS, tmp_path, checkpoint)
        assert found(spark, sink) == sorted(set(rows))
        assert [letter["kind"] for letter in letters(consumer.store, consumer="payments")] == ["UNDECODABLE"] * streams


@pytest.mark.full
def test_a_change_feed_is_merged(spark: SparkSession, tmp_path: Path) -> None:
    """Inserts, updates and deletes of the table are those of the sink, also when they are all read again."""
    sink = create(spark, tmp_path, "balances", "id string, amount bigint, version bigint")
    table = create(spark, tmp_path, "accounts", "id string, amount bigint", "'delta.enableChangeDataFeed' = 'true'")
    spark.sql(f"INSERT INTO {table} VALUES ('a', 1), ('b', 2), ('c', 3)")
    spark.sql(f"UPDATE {table} SET amount = 5 WHERE id = 'a'")
    run(spark, FEED, tmp_path)
    spark.sql(f"DELETE FROM {table} WHERE id = 'b'")
    for checkpoint in ("spark", "another"):
        run(spark, FEED, tmp_path, checkpoint)
        assert [row[:2] for row in found(spark, sink)] == found(spark, table) == [("a", 5), ("c", 3)]


@pytest.mark.full
def test_lines_of_files_come_once(spark: SparkSession, tmp_path: Path) -> None:
    """A line that comes again in another file is a duplicate, and one that is no JSON is a letter. `text` stands for Auto Loader."""
    sink, landing = create(spark, tmp_path, "orders", "id string, amount decimal(12,2)"), tmp_path / "landing"
    landing.mkdir()
    snippet = FILES.replace('format("cloudFiles").option("cloudFiles.format", "text")', 'format("text")')
    assert snippet != FILES
    for name in ("1.json", "2.json"):
        (landing / name).write_text('{"id": "a", "amount": 1.5}\nno JSON\n')
        consumer = run(spark, snippet, tmp_path)
    assert [row[0] for row in found(spark, sink)] == ["a"]
    assert {(letter["kind"], bytes(letter["body"])) for letter in letters(consumer.store, consumer="landed")} == {
        ("UNDECODABLE", b"no JSON")
    }
