"""The contract through Structured Streaming: real queries, real checkpoints, both stores."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoint.errors import ConfigError, SinkMismatch, StoreUnavailable
from dedup import Columns, Consumer, ReprocessOptions, Selection, decode, replay
from dedup.core.rows import frame_of
from dedup.decode.prepare import Prepare
from dedup.reprocessing.from_log import fill
from fixtures.variants import of_which
from kit.grouped import grouped
from kit.orders import ORDER, assert_proven, batch, ids, letters, orders
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KAFKA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"


class Topic:
    """A folder of JSON files that a stream reads as a Kafka source's rows, one file a batch."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.files = spark, folder / "topic", 0
        self.folder.mkdir()

    def append(self, *orders: tuple[int, str | None, int]) -> None:
        """One more batch of (offset, id, amount)."""
        rows = [json.dumps({"offset": n, "value": json.dumps({"id": i, "amount": a})}) for n, i, a in orders]
        made = self.folder / f".{self.files:04}.json"
        made.write_text("\n".join(rows))
        os.utime(made, (2_000_000_000 + self.files,) * 2)  # Spark reads files in the order of their times, in milliseconds
        made.rename(self.folder / made.name[1:])
        self.files += 1

    def stream(self) -> DataFrame:
        """Rows as Spark's Kafka source has them."""
        raw = self.spark.readStream.schema("offset bigint, value string").option("maxFilesPerTrigger", 1).json(str(self.folder))
        return raw.selectExpr(
            "cast(null as binary) key",
            "cast(value as binary) value",
            "'orders' topic",
            "0 partition",
            "offset",
            "timestamp'2026-01-01' timestamp",
            "0 timestampType",
        )


def make(place: Place, **settings: Any) -> Consumer:
    """A consumer whose handler rejects by SQL and writes `data.*`."""
    consumer = Consumer(
        "shop", place.store(), **grouped(**{"idempotence_key": "data.id", "decode": decode.json(ORDER), "takeover_after": 2.0, **settings})
    )

    @consumer.foreach_batch
    def load(rows: DataFrame, tx: Any) -> None:
        good = tx.reject(rows, "data.amount < 0", "negative amount")
        tx.write(good.select("data.*"), "orders")

    return consumer


def run(stream: DataFrame, consumer: Any, checkpoint: Path) -> None:
    """Everything that is there, then stop."""
    query = stream.writeStream.foreachBatch(consumer).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()


def test_a_stream_is_written_once_through_restarts_and_a_lost_checkpoint(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """New, duplicate, bad and redelivered events over two runs of one query and one of a new query from the earliest."""
    topic = Topic(spark, tmp_path)
    topic.append((0, "a", 1), (1, "b", 2), (2, "a", 1), (3, "bad", -1), (4, None, 5))
    run(topic.stream(), make(place), tmp_path / "one")
    topic.append((5, "c", 3), (6, "b", 2))
    topic.append((7, "a", 9))
    run(topic.stream(), make(place), tmp_path / "one")
    run(topic.stream(), make(place), tmp_path / "two")
    assert ids(place.read()) == ["a", "b", "c"]
    assert Counter(x["kind"] for x in letters(place.store())) == {"REJECTED": 1, "NO_KEY": 1, "KEY_CONFLICT": 1}
    assert_proven(place.store())


def test_a_condition_that_never_answers_the_same_splits_without_loss(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """rand() in tx.reject: each event is parked or written, never both, never neither."""
    topic = Topic(spark, tmp_path)
    topic.append(*[(n, f"k{n}", 1) for n in range(1000)])
    consumer = make(place)

    def load(rows: DataFrame, tx: Any) -> None:
        tx.write(tx.reject(rows, "rand() < 0.5", "coin").select("data.*"), "orders")

    consumer._handler = load
    run(topic.stream(), consumer, tmp_path / "one")
    written, parked = set(ids(place.read())), {x["idempotence_key"] for x in letters(place.store())}
    assert not written & parked and len(written) + len(parked) == 1000
    assert 300 < len(written) < 700
    assert_proven(place.store())


def test_rejecting_many_by_a_column_and_skipping(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """Conditions as Columns; NULL does not reject; skipped events are neither written nor parked."""
    from pyspark.sql import functions as F

    topic = Topic(spark, tmp_path)
    topic.append(*[(n, f"k{n}", n) for n in range(10)])
    consumer = make(place)

    def load(rows: DataFrame, tx: Any) -> None:
        rest = tx.reject(rows, F.when(F.col("data.amount") > 7, True), "above seven")
        rest = tx.skip(rest, F.col("data.amount") < 3)
        tx.write(rest.select("data.*"), "orders")

    consumer._handler = load
    run(topic.stream(), consumer, tmp_path / "one")
    assert sorted(ids(place.read())) == [f"k{n}" for n in range(3, 8)]
    (record,) = place.store().batches("shop").to_pylist()
    assert record["skipped"] == [{"first": 0, "last": 2}] and record["dead_lettered"] == 2
    assert_proven(place.store())


def test_a_column_too_large_for_pyarrow_goes_through_scratch_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 GB in one column pyarrow takes no rows: with a larger spark.driver.maxResultSize such a batch would stop the stream for ever."""
    from dedup.spark import batch as of_spark

    table = pa.table({"value": [b"x" * 60, b"y" * 60], "offset": [1, 2]})
    answer = SimpleNamespace(toArrow=lambda: table, sparkSession=None, schema=())
    batch = of_spark.SparkBatch(answer, None)  # type: ignore[arg-type]
    assert batch.collect(answer) is table  # type: ignore[arg-type]
    monkeypatch.setattr("dedup.core.rows.LARGEST", 120)
    assert batch.collect(answer) is None  # type: ignore[arg-type]


def test_a_result_that_spark_cannot_keep_goes_through_scratch_files(caplog: pytest.LogCaptureFixture) -> None:
    """Seen with 500,000 rows and a JVM of 2 GB: the same batch would fail for ever. What is not about size is raised."""
    from dedup.spark import batch as of_spark

    def fails(words: str) -> Any:
        def raises() -> None:
            raise RuntimeError(f"Job aborted due to stage failure: Lost task 0.0 in stage 43.0 (TID 86): {words}")

        return SimpleNamespace(toArrow=raises, sparkSession=None, schema=())

    lost = fails("TaskResultLost (result lost from block manager)")
    assert of_spark.SparkBatch(lost, None).collect(lost) is None and "spark.driver.memory" in caplog.text
    other = fails("ExecutorLostFailure")
    with pytest.raises(RuntimeError, match="ExecutorLost"):
        of_spark.SparkBatch(other, None).collect(other)


def test_without_a_folder_to_share_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster collect=False is refused by `check`, before anything is taken over, where no scratch= is given."""
    from dedup.spark import batch as of_spark

    monkeypatch.setattr(of_spark, "plan", lambda *_: None)
    batch = SimpleNamespace(sparkSession=SimpleNamespace(conf=SimpleNamespace(get=lambda *_: "yarn")))
    with pytest.raises(ConfigError, match="scratch="):
        of_spark.SparkBatch(batch, None, collect=False).check(Prepare("shop"))  # type: ignore[arg-type]


PARQUET = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS", "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY"}
"""As a session may write Parquet for old readers."""


@pytest.mark.full
def test_scratch_files_hold_the_values_of_the_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever the session says about Parquet: a large batch has the microseconds and the old dates that a small one has."""
    from dedup.spark.batch import SparkBatch
    from dedup.spark.features import setting

    columns = "'s' source, 't' topic, 0 partition, 0L sequence_number, timestamp'2026-01-02 03:04:05.678901' at, date'1582-10-10' day"
    frame = spark.range(1).selectExpr(*columns.split(", "), "cast('x' as binary) body")
    seen = []
    with setting(spark, PARQUET):
        for collect in (True, False):
            with SparkBatch(frame, str(tmp_path), collect=collect).evaluate(Prepare("shop")) as rows:
                seen.append(rows.frame(np.array([0])).select("at", "day").collect())
        assert {name: spark.conf.get(name) for name in PARQUET} == PARQUET
    assert seen[0] == seen[1] and (seen[1][0]["at"].microsecond, str(seen[1][0]["day"])) == (678901, "1582-10-10")


def test_staged_rows_have_the_types_that_they_were_written_with(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever the session takes columns of Parquet files for: a time without a zone does not move, and bytes are no text."""
    from dedup.spark.delta import _staged
    from dedup.spark.features import setting

    rows = pa.table({"at": pa.array([dt.datetime(2026, 7, 1, 12)], pa.timestamp("us")), "raw": [b"x"]})
    pq.write_table(rows, tmp_path / "staged.parquet")
    settings = {"spark.sql.parquet.inferTimestampNTZ.enabled": "false", "spark.sql.parquet.binaryAsString": "true"}
    with setting(spark, {**settings, "spark.sql.session.timeZone": "Europe/Berlin"}):
        staged = _staged(spark, [str(tmp_path / "staged.parquet")])
        assert staged.dtypes == [("at", "timestamp_ntz"), ("raw", "binary")]
        assert [(row["at"].hour, bytes(row["raw"])) for row in staged.collect()] == [(12, b"x")]
        assert {name: spark.conf.get(name) for name in settings} == settings


def no_folder(tasks: Any) -> None:
    """Tasks that share none with the driver, so that Spark writes the rows as Parquet."""


@pytest.mark.full
def test_a_column_of_the_user_keeps_its_name_in_scratch_files(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with a column `_row` stays readable when it becomes too large for the driver: the stream would stop there for ever."""
    from dedup.spark.batch import SparkBatch

    monkeypatch.setattr("dedup.spark.tasks.SparkTasks.folder", no_folder)
    columns = "'s' source, 't' topic, 0 partition, id sequence_number, cast('x' as binary) body, 7 _row"
    batch = SparkBatch(spark.range(3).selectExpr(*columns.split(", ")), str(tmp_path), collect=False)
    with batch.evaluate(Prepare("shop")) as rows:
        assert sorted(rows.index["sequence_number"].to_pylist()) == [0, 1, 2]
        assert [row["_row"] for row in rows.frame(np.array([0, 1])).collect()] == [7, 7]


@pytest.mark.parametrize("rows", of_which(1, [100, 0]))
def test_rows_of_a_batch_that_stay_on_other_machines_are_missed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Where executors are elsewhere each batch is counted, and not the first one alone: a machine may join with a folder of its own."""
    from dedup.spark.batch import SparkBatch

    writer = type(spark.range(1).write)
    real = writer.parquet

    def partly(self: Any, path: str) -> None:
        real(self, path)
        for file in sorted(tmp_path.rglob("part-*.parquet"))[: 1 if rows else 0]:
            file.unlink()

    monkeypatch.setattr("dedup.spark.features.is_local", lambda session: False)
    monkeypatch.setattr("dedup.spark.tasks.SparkTasks.folder", no_folder)
    columns = "'s' source, 't' topic, 0 partition, id sequence_number, cast('x' as binary) body"
    batch = SparkBatch(spark.range(0, rows, 1, 2).selectExpr(*columns.split(", ")), str(tmp_path), collect=False)
    with batch.evaluate(Prepare("shop")) as whole:
        assert whole.index.num_rows == rows
    monkeypatch.setattr(writer, "parquet", partly)
    missed = pytest.raises(ConfigError, match=r"is not one folder .* of 100 rows that tasks wrote there, 50 are found")
    with missed if rows else nullcontext(), batch.evaluate(Prepare("shop")):
        pass
    assert not list(tmp_path.iterdir())


def test_rows_that_spark_does_not_count_are_not_taken(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may drop the event that tells their number: then nothing is decided, and no batch waits for ever."""
    from dedup.spark import batch

    monkeypatch.setattr(batch, "TOLD_WITHIN", 0.1)
    monkeypatch.setattr(type(batch.Observation()), "get", property(lambda self: {"rows": threading.Event().wait(0.5)}))
    with pytest.raises(StoreUnavailable, match="how many rows it wrote"):
        batch.write_counted(spark.range(1), str(tmp_path / "rows"))


@pytest.mark.parametrize("kept", of_which(1, [True, False]), ids=["kept", "Parquet"])
def test_a_chunk_of_files_has_its_rows_alone(
    kept: bool, spark: SparkSession, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of each chunk are the same, in their order. Of Parquet each asks for the range of its rows, which Spark passes on."""
    from dedup.spark.batch import SparkBatch

    if not kept:
        monkeypatch.setattr("dedup.spark.tasks.SparkTasks.folder", no_folder)
    columns = "'s' source, 't' topic, 0 partition, id sequence_number, cast('x' as binary) body"
    frame = spark.range(0, 400, 1, 4).selectExpr(*columns.split(", "))
    with SparkBatch(frame, str(tmp_path), collect=False).evaluate(Prepare("shop")) as rows:
        numbers = np.asarray(rows.index["sequence_number"])
        order = np.argsort(numbers)
        for chosen in (order[110:130], order[[5, 3, 390]], order[::-3], order[:0]):
            wanted = numbers[chosen].tolist()
            assert rows.content(chosen)["sequence_number"].to_pylist() == wanted
            few = rows.frame(chosen)
            assert sorted(row["sequence_number"] for row in few.collect()) == sorted(wanted)
        rows.frame(order[110:130]).explain()
    assert kept or re.search(r"PushedFilters: \[[^\]]*GreaterThanOrEqual\(_dedup_row,\d+\)", capsys.readouterr().out)


@pytest.mark.parametrize("where", ["{}", "file:{}"])
def test_scratch_folders_are_removed(where: str, spark: SparkSession, tmp_path: Path) -> None:
    """With a batch's end nothing of its rows stays, wherever the folder is and whatever Spark's default is; not even where it failed."""
    from dedup.spark.batch import scratch_folder

    with pytest.raises(OSError, match="away"), scratch_folder(spark, where.format(tmp_path)) as folder:
        assert folder.startswith("file:///")
        spark.range(3).write.parquet(folder)
        assert list(tmp_path.rglob("*.parquet"))
        raise OSError("away")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["{}", "file://{}"])
def test_a_scratch_folder_that_cannot_be_made_is_named(where: str, spark: SparkSession, tmp_path: Path) -> None:
    """The setting and the reason, before Spark is asked to write."""
    from dedup.spark.batch import scratch_folder

    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match=r"Limits\(scratch='.*file/below'\): nothing can be written there \(.*Not a directory")
    with refused, scratch_folder(spark, where.format(tmp_path / "file/below")):
        pass


@pytest.mark.full
@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("size", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_a_batch_that_stays_with_the_tasks_goes_through_scratch_files(
    size: int, spark: SparkSession, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same effect with collect=False, in several chunks or one, with a replay; no rows are asked for."""
    from dedup.spark import batch as of_spark

    monkeypatch.delattr(of_spark.SparkBatch, "collect")
    topic = Topic(spark, tmp_path)
    topic.append(*[(n, f"k{n % 90}", n % 90 - 1) for n in range(100)], (100, None, 1))
    frame = spark.read.schema("offset bigint, value string").json(str(topic.folder))
    frame = frame.selectExpr("'orders' topic", "0 partition", "offset sequence_number", "cast(value as binary) body", "'broker' source")
    for _ in range(2):
        consumer = make(place, scratch=str(tmp_path / "scratch"), query="q", max_events_per_transaction=size, collect=False)
        consumer(frame, 0)
    assert sorted(ids(place.read())) == sorted(f"k{n}" for n in range(1, 90))
    assert [(x["kind"], x["sequence_number"]) for x in letters(place.store())] == [("REJECTED", 0), ("NO_KEY", 100)]
    assert_proven(place.store())
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_what_is_read_from_the_log_stays_with_the_tasks(
    spark: SparkSession, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With collect=False positions that are filled or replayed go through scratch files, too; no rows are asked for."""
    from dedup.spark import batch as of_spark

    monkeypatch.delattr(of_spark.SparkBatch, "collect")
    rows = spark.range(30).selectExpr("'orders' topic", "0 partition", "id sequence_number", "'broker' source", "id amount")
    log = rows.selectExpr("*", """cast(to_json(struct('k' || amount as id, amount)) as binary) body""").drop("amount")
    consumer = make(place, scratch=str(tmp_path / "scratch"), query="q", collect=False)
    consumer.register_log_reader(lambda source, topic, partition, first, last: log.where(f"sequence_number between {first} and {last}"))
    consumer(log.where("sequence_number not between 10 and 19"), 0)
    options = ReprocessOptions("ann")
    assert fill(Selection(topic="orders"), consumer, options=options).ran.processed == 10
    assert replay(Selection(topic="orders", first=5, last=14), consumer, accept_double=True, options=options).replayed == 10
    assert Counter(ids(place.read())) == Counter({f"k{n}": 2 if 5 <= n <= 14 else 1 for n in range(30)})
    assert_proven(place.store())
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("collect", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_column_may_be_a_struct_that_is_null(spark: SparkSession, place: Place, tmp_path: Path, collect: bool) -> None:
    """In the input, with fields that cannot be null; and what a handler writes is such a one, or made of it."""
    from pyspark.sql import functions as F

    from dedup.spark.features import to_arrow

    some = "if(id % 2 = 0, null, named_struct('n', id)) some"
    assert to_arrow(spark.range(2).selectExpr(some))["some"].to_pylist() == [None, {"n": 1}]
    rows = spark.range(6).selectExpr("'t' topic", "0 partition", "id sequence_number", "'b' source", "cast(id as string) id", some)
    made = make(place, decode=None, idempotence_key="id", query="q", collect=collect, scratch=str(tmp_path))
    made._handler = lambda new, tx: tx.write(new.selectExpr("id", "if(id = '4', null, named_struct('m', 7L)).m amount"), "orders")
    made(rows.withColumn("body", F.lit(b"x")), 0)
    assert sorted((row["id"], row["amount"]) for row in place.read()) == [(str(n), None if n == 4 else 7) for n in range(6)]


def test_an_exploded_event_needs_part(spark: SparkSession, place: Place) -> None:
    """A frame that was exploded upstream: refused without part=, whole with it."""
    lines = spark.sql("select 't' topic, 0 partition, 7L sequence_number, 'b' source, posexplode(array('x', 'y')) as (line, id)")
    rows = lines.selectExpr("*", "cast('same' as binary) body")
    settings: dict[str, Any] = {"decode": None, "idempotence_key": "id", "query": "q"}

    def load(new: DataFrame, tx: Any) -> None:
        tx.write(new.selectExpr("id", "1L amount"), "orders")

    consumer = make(place, **settings)
    consumer._handler = load
    with pytest.raises(ConfigError, match="part="):
        consumer(rows, 0)
    consumer = make(place, part="line", **settings)
    consumer._handler = load
    consumer(rows, 0)
    assert ids(place.read()) == ["x", "y"]


def test_any_frame_is_mapped_by_columns(spark: SparkSession, place: Place) -> None:
    """Columns names what is not recognised; a missing column is one clear error before anything is written. No stream, and no batch id."""
    rows = spark.sql("select 5L n, 1 p, id, 2L amount from values ('a'), ('b') as t(id)").selectExpr(
        "n + monotonically_increasing_id() n", "p", "id", "amount"
    )
    settings: dict[str, Any] = {"decode": None, "idempotence_key": "id", "query": "q", "payload": "amount"}
    consumer = make(place, positions=Columns(topic="'files'", partition="p", sequence_number="missing"), **settings)
    with pytest.raises(ConfigError, match="missing"):
        consumer(rows, 0)
    consumer = make(place, positions=Columns(topic="'files'", partition="p", sequence_number="n"), **settings)
    consumer._handler = lambda new, tx: tx.write(new.select("id", "amount"), "orders")
    found = [consumer.process(rows.coalesce(1)) for _ in range(2)]
    assert [(report.batch_id, report.processed, report.redelivered) for report in found] == [(0, 2, 0), (1, 0, 2)]
    assert ids(place.read()) == ["a", "b"]
    assert place.store().head("shop").checkpoints.keys().__iter__().__next__().topic == "files"


@pytest.mark.full
def test_an_error_of_ours_stops_the_query_with_its_message(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """The person who reads the query's exception sees the command to go on."""
    topic = Topic(spark, tmp_path)
    topic.append((5, "a", 1))
    run(topic.stream(), make(place), tmp_path / "one")
    (topic.folder / "0000.json").unlink()
    topic.append((9, "b", 1))
    with pytest.raises(Exception, match="accept-gap shop"):
        run(topic.stream(), make(place), tmp_path / "two")
    assert ids(place.read()) == ["a"]


@pytest.mark.fast_on("delta")
def test_run_raises_the_error_of_ours_that_ended_the_query(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """The very object, caused by Spark's error, behind which its own cause stands; what a handler raises stays Spark's error."""
    from pyspark.errors import StreamingQueryException

    topic = Topic(spark, tmp_path)
    topic.append((0, "a", 1))
    writer = topic.stream().writeStream.option("checkpointLocation", str(tmp_path / "one")).trigger(availableNow=True)
    ours, cause = SinkMismatch("no such column"), LookupError("where it began")

    def fail(rows: DataFrame, tx: Any) -> None:
        raise ours from cause

    made = make(place)
    made._handler = fail
    with pytest.raises(SinkMismatch, match="no such column") as raised:
        made.run(writer)
    assert raised.value is ours and isinstance(ours.__cause__, StreamingQueryException)
    assert ours.__cause__.__cause__ is cause

    def fail_by_itself(rows: DataFrame, tx: Any) -> None:
        raise ValueError("of the handler")

    made = make(place, bisect=False)
    made._handler = fail_by_itself
    with pytest.raises(Exception, match="of the handler") as raised_outside:
        made.run(writer)
    assert isinstance(raised_outside.value, StreamingQueryException)


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_a_module_that_a_udf_lacks_parks_nothing(spark: SparkSession, place: Place) -> None:
    """In a handler of batches as in tasks: the deployment is at fault, and no event."""
    from pyspark.sql import functions as F

    spelled = F.udf(lambda name: __import__("no_such_module").spelled(name))

    def load(rows: DataFrame, tx: Any) -> None:
        tx.write(rows.select(spelled("data.id").alias("id"), "data.amount"), "orders")

    made = make(place, max_outage=0.0)
    made._handler = load
    with pytest.raises(Exception, match="No module named 'no_such_module'"):
        made(frame_of(spark, batch(*orders(range(4)))), 0)
    assert letters(place.store()) == []


def test_stateful_operators_upstream_are_refused_before_anything_is_written(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """With positions on, an aggregate or a stream-stream join is an error: at check, and in a bare foreachBatch at the first batch."""
    from pyspark.sql import functions as F

    topic = Topic(spark, tmp_path)
    topic.append((0, "a", 1))
    unique = topic.stream().dropDuplicates(["offset"])
    pairs = topic.stream().join(topic.stream().selectExpr("offset other"), F.expr("offset = other"))
    for frame in (unique, pairs):
        with pytest.raises(ConfigError, match="positions=None"):
            make(place).check(frame)
    with pytest.raises(Exception, match="positions=None"):
        run(unique, make(place), tmp_path / "one")
    assert place.store().head("shop").epoch == 0 and place.read() == []


def test_check_and_run_go_from_start_to_end(spark: SparkSession, place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """consumer.run(writer) checks, runs the query to its end and leaves nothing unpublished. Of files it asks for no ids of topics."""
    topic = Topic(spark, tmp_path)
    topic.append((0, "a", 1))
    writer = topic.stream().writeStream.option("checkpointLocation", str(tmp_path / "one")).trigger(availableNow=True)
    with pytest.raises(ConfigError, match="nothing"):
        make(place, idempotence_key="data.nothing").run(writer)
    make(place).run(writer)
    assert ids(place.read()) == ["a"]
    assert_proven(place.store())
    if hasattr(spark, "sparkContext"):
        assert "source=" in caplog.text and "incarnation=" not in caplog.text


@pytest.mark.fast_on("postgres")
def test_what_raises_in_a_dataframe_handler_is_isolated_and_reprocessed(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """Errors of Spark's own evaluation and of Python: the guilty rows are parked, the rest is written; fixed, they come as a DataFrame."""
    from pyspark.sql import functions as F

    from deadletter.selection import Selection
    from dedup.reprocessing.letters import reprocess

    topic = Topic(spark, tmp_path)
    topic.append(*[(n, f"k{n}", n) for n in range(12)])
    consumer = make(place, sequence_key="data.id", max_outage=0.0)

    def broken(rows: DataFrame, tx: Any) -> None:
        checked = F.when(F.col("data.amount") == 5, F.raise_error(F.lit("five"))).otherwise(F.col("data.amount"))
        if rows.where("data.amount = 9").count():
            raise ValueError("nine")
        tx.write(rows.select("data.id", checked.cast("bigint").alias("amount")), "orders")

    consumer._handler = broken
    run(topic.stream(), consumer, tmp_path / "one")
    parked = letters(place.store())
    assert [x["idempotence_key"] for x in parked] == ["k5", "k9"]
    assert "five" in parked[0]["error_message"] and "nine" in parked[1]["error_message"]
    assert len(place.read()) == 10
    fixed = make(place, sequence_key="data.id")
    report = reprocess(Selection(topic="orders", partition=0, first=0, last=20), fixed, spark=spark)
    assert (report.reprocessed, report.failed) == (2, 0)
    assert sorted(ids(place.read())) == sorted(f"k{n}" for n in range(12))
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
@pytest.mark.crash
def test_an_event_whose_worker_was_killed_once_is_written(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """SIGKILL of the Python worker that evaluates what a handler writes: whoever it was, no event is blamed, also not the only one."""
    topic, mark = Topic(spark, tmp_path), tmp_path / "killed"
    topic.append((0, "k0", 1))
    consumer = make(place, max_outage=0.0)

    def killing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from batches

    def handler(rows: DataFrame, tx: Any) -> None:
        flat = rows.select("data.*")
        tx.write(flat.mapInArrow(killing, flat.schema), "orders")

    consumer._handler = handler
    run(topic.stream(), consumer, tmp_path / "one")
    assert mark.exists() and letters(place.store()) == [] and ids(place.read()) == ["k0"]
    assert_proven(place.store())
