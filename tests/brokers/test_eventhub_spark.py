"""`format("eventhubs")` in real Spark: what a batch holds is what was planned, in streams and batch reads, and no secret is shown."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dedup.eventhub import register
from dedup.eventhub.source import EARLIEST
from fixtures.fix_eventhubs import MakeHub
from kit.eventhubs.control import Double
from kit.eventhubs.service import KEY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Batches = list[list[tuple[int, int]]]
"""For each batch of a stream, (partition, sequence number) of its events."""


@pytest.fixture
def options(eventhubs: Double, new_hub: MakeHub, spark: SparkSession) -> dict[str, str]:
    """Of a new hub with two partitions."""
    register(spark)
    return {"connectionString": eventhubs.connection_string, "eventHubName": new_hub(partitions=2, groups=("other",))}


def load(spark: SparkSession, options: dict[str, str], **more: str) -> DataFrame:
    """A batch read."""
    return spark.read.format("eventhubs").options(**options, **more).load()


def places(frame: DataFrame) -> list[tuple[int, int]]:
    """Where its events stand."""
    return sorted((row.partition, row.sequence_number) for row in frame.select("partition", "sequence_number").collect())


def stream(spark: SparkSession, options: dict[str, str], checkpoint: Path, **more: str) -> Batches:
    """All batches up to what is there now, in the order in which their rows come. Raises what ended the query."""
    found: Batches = []

    def each(frame: DataFrame, number: int) -> None:
        found.append([(row.partition, row.sequence_number) for row in frame.select("partition", "sequence_number").collect()])

    frame = spark.readStream.format("eventhubs").options(**options, **more).load()
    writer = frame.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = writer.start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return found


def flat(batches: Batches) -> list[tuple[int, int]]:
    """All of them."""
    return [place for batch in batches for place in batch]


@pytest.mark.full
def test_a_batch_read_holds_what_was_asked_for(eventhubs: Double, spark: SparkSession, options: dict[str, str]) -> None:
    """Everything by default; positions bound it, the start included and the end not; times begin it; rows are the envelope's."""
    hub, begin = options["eventHubName"], dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for minute in range(6):
        eventhubs.fill(hub, 0, 1, ids=True, enqueued=int((begin + dt.timedelta(minutes=minute)).timestamp() * 1000))
    eventhubs.put(hub, 1, [b"body"], {"kind": "test"})
    rows = load(spark, options).collect()
    assert sorted((row.partition, row.sequence_number) for row in rows) == [*((0, n) for n in range(6)), (1, 0)]
    some = json.dumps({hub: {"0": 2, "1": EARLIEST}})
    assert places(load(spark, options, startingPositions=some, endingPositions=json.dumps({hub: {"0": 4, "1": 0}}))) == [(0, 2), (0, 3)]
    assert places(load(spark, options, startingTime="2026-01-01T00:03:30+00:00")) == [(0, 4), (0, 5), (1, 0)]
    (row,) = (row for row in rows if row.partition == 1)
    assert (row.source, row.topic, bytes(row.body), row.key) == ("127.0.0.1", hub, b"body", None)
    assert [(pair.key, bytes(pair.value)) for pair in row.properties] == [("kind", b"test")]


@pytest.mark.full
def test_a_stream_goes_on_where_it_stood_through_faults(
    eventhubs: Double, spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    """Fair batches in order; a second run reads what is new; connections break, events come twice, the service is busy: each event once."""
    hub = options["eventHubName"]
    eventhubs.fill(hub, 0, 100, size=200)
    eventhubs.fill(hub, 1, 250, size=200)
    eventhubs.order("reset", hub=hub, after=70)
    first = stream(spark, options, tmp_path / "spark", maxEventsPerTrigger="180")
    assert [len(batch) for batch in first] == [180, 170]
    assert all([n for p, n in batch if p == part] == sorted(n for p, n in batch if p == part) for batch in first for part in (0, 1))
    eventhubs.fill(hub, 1, 50)
    eventhubs.order("again", hub=hub, partition=1, count=20)
    for what in ("receive", "manage"):
        eventhubs.order("throttle", what=what, count=2)
    assert stream(spark, options, tmp_path / "spark", maxEventsPerTrigger="180") == [[(1, number) for number in range(250, 300)]]
    assert sorted(flat(first)) == [*((0, n) for n in range(100)), *((1, n) for n in range(250))]


@pytest.mark.full
def test_what_cannot_be_read_ends_the_query_with_a_reason(
    eventhubs: Double, spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    """Retention and a higher owner level are told as such; a reader of another consumer group is not disturbed."""
    hub = options["eventHubName"]
    eventhubs.fill(hub, 0, 10)
    stream(spark, options, tmp_path / "spark")
    eventhubs.fill(hub, 0, 10)
    eventhubs.order("expire", hub=hub, partition=0, before=15)
    with pytest.raises(Exception, match=r"PositionsMissing: .*\(retention\): partition 0: 10-14"):
        stream(spark, options, tmp_path / "spark")
    options |= {"failOnDataLoss": "false"}
    eventhubs.order("steal", hub=hub, partition=0, level=5)
    with pytest.raises(Exception, match=r"ReceiverStolen: .*partition 0.*give each a consumer group of its own"):
        stream(spark, options, tmp_path / "spark")
    assert len(flat(stream(spark, options, tmp_path / "two", consumerGroup="other"))) == 5


SHOWS = """
import json, sys
from dedup.eventhub import register
from dedup.spark.session import local_session

options, folder = json.loads(sys.argv[1]), sys.argv[2]
spark = local_session("secrets", **{"spark.eventLog.enabled": "true", "spark.eventLog.dir": folder, "spark.log.level": "INFO"})
register(spark)
print(spark.read.format("eventhubs").options(**options).load()._jdf.queryExecution().toString())
spark.read.format("eventhubs").options(**options).load().explain("extended")
frame = spark.readStream.format("eventhubs").options(**options).load()
query = frame.writeStream.format("noop").option("checkpointLocation", folder + "/spark").trigger(availableNow=True).start()
query.awaitTermination()
query.explain(True)
print(query.lastProgress, query.status, query._jsq.toString(), frame._jdf.toString())
for wrong in ({"eventHubName": "nowhere"}, {"startingPositions": "nonsense"}, {"connectionString": options["connectionString"] + "AAAA"}):
    try:
        spark.read.format("eventhubs").options(**{**options, **wrong}).load().collect()
    except Exception as error:
        print(type(error), error, repr(error))
spark.createDataFrame([(1,)], "a int").createOrReplaceTempView("one")
spark.read.format("eventhubs").options(**options).load().createOrReplaceTempView("events")
spark.sql("EXPLAIN FORMATTED SELECT count(*) FROM events").show(truncate=False)
spark.stop()
print("ended well")
"""


@pytest.mark.full
@pytest.mark.spark
def test_no_secret_is_shown_anywhere(eventhubs: Double, new_hub: MakeHub, tmp_path: Path) -> None:
    """Not in plans, progress, exceptions, Spark's log at INFO, its event log, or its checkpoint: all of them are searched."""
    hub = new_hub(partitions=2)
    eventhubs.fill(hub, 0, 10)
    given = {"connectionString": eventhubs.connection_string, "eventHubName": hub}
    command = [sys.executable, "-c", SHOWS, json.dumps(given), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "ended well" in done.stdout, done.stderr[-3000:]
    written = {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert any("offsets" in name for name in written) and len(written) > 5
    shown = [done.stdout.encode(), done.stderr.encode(), *written.values()]
    assert not [text[max(0, text.find(KEY.encode()) - 300) :][:400] for text in shown if KEY.encode() in text]
