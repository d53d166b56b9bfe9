"""The contract through Spark's own Kafka source and a real broker, on both stores."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dedup import Consumer, Takeover, decode
from dedup import kafka as dk
from dedup.pipeline.handlers import Event
from dedup.verify import verify
from kit import kafka_server
from kit.kafka_kit import Topic, eventually, order
from kit.orders import ORDER, assert_proven, ids
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def make(place: Place, servers: str) -> Consumer:
    """As docs/how-to/kafka.md says."""
    broker = dk.Broker(servers)
    consumer = Consumer(
        "shop",
        place.store(),
        source=broker.cluster_id(),
        incarnation=broker.topic_ids,
        idempotence_key="data.id",
        decode=decode.json(ORDER),
        takeover=Takeover(after=2.0),
    )
    consumer.register_log_reader(dk.log_reader(broker))

    @consumer.foreach_batch
    def load(rows: DataFrame, tx: Any) -> None:
        tx.write(rows.select("data.*"), "orders")

    return consumer


def events(spark: SparkSession, servers: str, topic: str, **options: str) -> DataFrame:
    """The topic as a stream."""
    settings = {"kafka.bootstrap.servers": servers, "subscribe": topic, "includeHeaders": "true", "kafka.isolation.level": "read_committed"}
    return spark.readStream.format("kafka").options(**{"startingOffsets": "earliest", **settings, **options}).load()


def start(stream: DataFrame, consumer: Any, checkpoint: Path, **trigger: Any) -> Any:
    """A running query."""
    return stream.writeStream.foreachBatch(consumer).option("checkpointLocation", str(checkpoint)).trigger(**trigger).start()


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_a_broker_that_dies_and_a_spark_checkpoint_that_is_lost(
    spark: SparkSession, place: Place, kafka: kafka_server.Broker, topic: Topic, tmp_path: Path
) -> None:
    """A stream goes on after the broker's SIGKILL and restart; a new Spark checkpoint begins right behind ours, new partitions included."""
    topic.send_orders(("a", 1), ("b", 2))
    query = start(events(spark, kafka.servers, topic.name), make(place, kafka.servers), tmp_path / "one", processingTime="200 milliseconds")
    try:
        eventually(lambda: ids(place.read()) == ["a", "b"])
        kafka.kill()
        kafka.start()
        topic.send_orders(("c", 3), ("a", 1))
        topic.send_transaction([order("no", 0)], commit=False)
        topic.send_orders(("d", 4), partition=1)
        eventually(lambda: ids(place.read()) == ["a", "b", "c", "d"])
    finally:
        query.stop()
    shutil.rmtree(tmp_path / "one")
    topic.grow(3)
    topic.send_orders(("e", 5))
    topic.send_orders(("f", 6), partition=2)
    again = make(place, kafka.servers)
    begin = again.starting_offsets(dk.Broker(kafka.servers), topic.name)
    query = start(events(spark, kafka.servers, topic.name, startingOffsets=begin), again, tmp_path / "two", availableNow=True)
    query.awaitTermination()
    assert ids(place.read()) == ["a", "b", "c", "d", "e", "f"]
    assert verify(place.store(), "shop").counts["redelivered"] == 0
    assert_proven(place.store())


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_a_partition_that_spark_reads_in_pieces_is_one_task_in_order(
    spark: SparkSession, place: Place, kafka: kafka_server.Broker, topic: Topic, tmp_path: Path
) -> None:
    """With minPartitions Spark cuts each of two partitions in three; a handler of events still gets each of them whole and ascending."""
    consumer, last = make(place, kafka.servers), dict[int, int]()
    consumer._handler = None

    @consumer.foreach(into="orders")
    def load(event: Event, tx: Any) -> Any:
        if event.sequence_number != last.get(event.partition, -1) + 1:
            raise ValueError(f"{event.sequence_number} after {last.get(event.partition)}")
        last[event.partition] = event.sequence_number
        return event.data

    for partition in range(2):
        topic.send_orders(*((f"p{partition}-{n}", n) for n in range(30)), partition=partition)
    settings = {"kafka.bootstrap.servers": kafka.servers, "subscribe": topic.name, "minPartitions": "6"}
    assert spark.read.format("kafka").options(**settings).load().rdd.getNumPartitions() == 6
    pieces = events(spark, kafka.servers, topic.name, minPartitions="6")
    start(pieces, consumer, tmp_path / "checkpoint", availableNow=True).awaitTermination()
    assert sorted(ids(place.read())) == sorted(f"p{partition}-{n}" for partition in range(2) for n in range(30)) and not last
    assert_proven(place.store())


@pytest.mark.full
def test_a_topic_created_again_that_spark_does_not_notice(
    spark: SparkSession, place: Place, kafka: kafka_server.Broker, topic: Topic, tmp_path: Path
) -> None:
    """Its new life is longer than the old one, so Spark goes on in the middle of it; the consumer refuses, and nothing is written."""
    topic.send_orders(("a", 1), ("b", 2))
    start(events(spark, kafka.servers, topic.name), make(place, kafka.servers), tmp_path / "one", availableNow=True).awaitTermination()
    topic.delete()
    topic.create(partitions=2)
    topic.send_orders(*((f"x{n}", n) for n in range(5)))
    query = start(events(spark, kafka.servers, topic.name), make(place, kafka.servers), tmp_path / "one", availableNow=True)
    with pytest.raises(Exception, match="was deleted and created again"):
        query.awaitTermination()
    assert ids(place.read()) == ["a", "b"]


def test_the_options_of_event_hubs_log_spark_in(spark: SparkSession, kafka: kafka_server.Broker, topic: Topic) -> None:
    """What eventhubs_options makes of a connection string is what Spark's source needs; the secret is in no plan."""
    topic.send_orders(("a", 1), ("b", 2))
    options = dk.eventhubs_options(kafka.connection_string)
    frame = spark.read.format("kafka").options(**options).option("subscribe", topic.name).load()
    assert frame.count() == 2
    assert set(frame.columns) >= {"key", "value", "headers"}
    plan = frame._jdf.queryExecution().toString()
    assert kafka_server.KEY not in plan and kafka_server.KEY not in repr(options)


def test_the_log_reader_gives_a_stream_of_spark_what_it_knows(spark: SparkSession, kafka: kafka_server.Broker, topic: Topic) -> None:
    """Where a session is active, events that are read again have the very columns, types and values of Spark's own source."""
    topic.send_orders(("a", 1), ("b", 2), ("c", 3))
    topic.send([None], key=b"k")
    own = spark.read.format("kafka").options(
        **{"kafka.bootstrap.servers": kafka.servers, "subscribe": topic.name, "includeHeaders": "true"}
    )
    ours = dk.log_reader(kafka.servers)("any", topic.name, 0, 0, 3)
    theirs = own.load()
    assert {f.name: f.dataType for f in ours.schema} == {f.name: f.dataType for f in theirs.schema}
    assert ours.select(theirs.columns).sort("offset").collect() == theirs.sort("offset").collect()
