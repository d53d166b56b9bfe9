"""The public API as users write it. `make lint` checks its types with mypy and pyright; nothing here runs.

Each function is one way of use that a type checker has to accept without casts and without comments that silence it.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from dedup import (
    Budget,
    BudgetExceeded,
    CheckpointError,
    Columns,
    ConfigError,
    Consumer,
    DeadLetters,
    DedupError,
    DeltaStore,
    Encrypt,
    ErrorClass,
    Event,
    FailurePolicy,
    Fenced,
    Limits,
    PostgresStore,
    Report,
    ReprocessOptions,
    Retry,
    Selection,
    StoreRestored,
    Takeover,
    Tx,
    decode,
    eventhub,
    kafka,
    replay,
    reprocess,
)
from dedup.outbox import Call
from dedup.publishing import OutgoingEvent, Publisher

log = logging.getLogger(__name__)


class ShopClosed(Exception):
    """An error of the user's."""


def schemas() -> None:
    """Each form of a schema."""
    decode.json(StructType([StructField("id", StringType(), False)]))
    decode.json("id STRING NOT NULL, amount DECIMAL(10, 2)")
    decode.json(pa.schema([("id", pa.string())]))
    decode.json({"type": "object", "properties": {"id": {"type": "string"}}})
    decode.avro({"type": "record", "name": "order", "fields": [{"name": "id", "type": "string"}]})
    decode.confluent_avro("https://schemas.example.com", subject="orders-value")


def with_few_settings(store: PostgresStore | DeltaStore) -> Consumer:
    """As in the first example of the README."""
    return Consumer("orders", store=store, idempotence_key="data.id", decode=decode.json("id STRING"))


def with_all_settings(broker: kafka.Broker) -> Consumer:
    """Every keyword, durations as timedelta and as seconds."""
    return Consumer(
        "orders",
        DeltaStore("/lake/dedup", tables={"orders": "/lake/orders"}),
        idempotence_key=["data.id", "data.line"],
        payload="data.amount",
        key_scope="consumer",
        null_key="position",
        on_key_conflict="duplicate",
        decode=lambda body: body.cast("string"),
        positions=Columns(topic="topic", partition="partition", sequence_number="offset"),
        source=broker.cluster_id(),
        incarnation=broker.topic_ids,
        part="line",
        sequence_key="data.customer",
        query="orders",
        on_batch=lambda report: log.info("%s: %d processed", report.consumer, report.processed),
        failure=FailurePolicy(
            retry=Retry(attempts=3, first=dt.timedelta(milliseconds=100), longest=5, total=dt.timedelta(seconds=30)),
            budget=Budget(rejected=((1000, 0.2),)),
            bisect=False,
            errors=[(ShopClosed, ErrorClass.SYSTEMIC), (lambda error: "quota" in str(error), ErrorClass.TRANSIENT)],
            handler_timeout=dt.timedelta(minutes=5),
            max_outage=math.inf,
            on_parked=lambda group: log.warning("%s: %d %s", group.consumer, group.letters, group.kind),
            letters_to="orders-dead",
            redact=Encrypt(lambda: ["MDEyMzQ1Njc4OWFiY2RlZg=="], texts="keep"),
        ),
        takeover=Takeover(after=dt.timedelta(minutes=1), now=True),
        limits=Limits(
            max_events_per_transaction=50_000,
            max_body=1_000_000,
            scratch="/mnt/scratch",
            collect=False,
            retention=dt.timedelta(days=30),
            reprocess_within=7 * 86_400,
        ),
    )


def handlers_of_batches(consumer: Consumer) -> None:
    """Decorated with parentheses and without; on Spark and on Arrow."""

    @consumer.foreach_batch
    def load(rows: DataFrame, tx: Tx) -> None:
        good = tx.reject(rows, "data.amount < 0", "negative amount")
        rest: DataFrame = tx.reject(good, F.col("data.id").isNull(), "no id")
        tx.write(rest.select("data.*"), "orders")
        tx.merge(rest.select("data.id"), "latest", keys="id")
        tx.publish(rest, "mails", key="data.id")

    @consumer.foreach_batch()
    def load_arrow(rows: pa.Table, tx: Tx) -> None:
        tx.write(rows, "orders")


def handlers_of_events(consumer: Consumer) -> None:
    """One row, several, or none; plain and asynchronous; and of Arrow tables."""

    @consumer.foreach("orders")
    def one(event: Event, tx: Tx) -> dict[str, Any] | None:
        if event.body is None:
            return None
        return {"id": event.data["id"], "partition": event.partition, "at": event.enqueued_time}

    @consumer.foreach("orders", on="driver", concurrency=32)
    async def several(event: Event, tx: Tx) -> list[dict[str, Any]]:
        return [{"id": event.data["id"]}]

    @consumer.foreach
    def no_row(event: Event, tx: Tx) -> None:
        tx.publish([{"key": "a", "body": event.body}], "mails")

    @consumer.foreach_arrow("orders", connections=16)
    def tables(table: pa.Table, tx: Tx) -> pa.Table:
        return table


def registrations(consumer: Consumer, broker: kafka.Broker) -> None:
    """What reads the log again, what takes effects back, where messages go."""

    @consumer.register_log_reader
    def read(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
        return pa.table({})

    @consumer.compensate
    def take_back(rows: pa.Table, tx: Tx) -> None:
        tx.write(rows, "cancelled")

    consumer.register_log_reader(kafka.log_reader(broker))
    consumer.dispatch_to(kafka.Topics(broker, timeout=dt.timedelta(seconds=30)), timeout=10)
    consumer.dispatch_to(Call(lambda messages: None))


def running(consumer: Consumer, stream: DataFrame, broker: kafka.Broker) -> None:
    """As a stream, and by hand."""
    consumer.check(stream)
    offsets: str = consumer.starting_offsets(broker, "orders", new="latest")
    stream.writeStream.foreachBatch(consumer).option("startingOffsets", offsets).start()
    consumer.run(stream.writeStream.option("checkpointLocation", "/lake/spark"))


def in_a_notebook(consumer: Consumer, frame: DataFrame) -> Iterator[int]:
    """Rows of no stream, and what became of them."""
    for rows in (frame, pa.table({}), [{"topic": "orders", "body": b"{}"}]):
        report: Report = consumer.process(rows)
        yield report.delivered - report.redelivered
        latest: list[int] = list(report.checkpoints.values())
        log.info("%s: %.1f s, %s", report.batch_id, report.seconds, latest)


def errors(consumer: Consumer, batch: DataFrame) -> str:
    """Told apart by what to do next."""
    try:
        consumer(batch, 7)
    except Fenced:
        return "stop"
    except (StoreRestored, CheckpointError) as wrong:
        return f"a person decides: {wrong}"
    except (ConfigError, BudgetExceeded, DedupError) as wrong:
        return str(wrong)
    return "done"


def by_a_person(consumer: Consumer, store: PostgresStore) -> int:
    """Dead letters, again."""
    options = ReprocessOptions(by="ann", reason="fixed in 1.3", rate=10)
    done = reprocess(Selection("orders", limit=100), consumer, options=options)
    replay(Selection("orders", "kafka", "orders", 0, first=1, last=5), consumer, options=options)
    letters: pa.Table = DeadLetters(store).select(Selection("orders"))
    left: int = letters.num_rows
    return left + done.reprocessed


def others(connection: eventhub.Connection, consumer: Consumer, store: PostgresStore) -> Column:
    """A plain runner, a publisher."""
    eventhub.run(consumer, connection, max_wait=dt.timedelta(milliseconds=500), expire_after=60)
    sender = eventhub.Sender(connection, timeout=dt.timedelta(seconds=5))
    with Publisher("shop", store, sender, max_outage=dt.timedelta(minutes=1), resend_within=86_400) as publisher:
        publisher.publish_once("12345", OutgoingEvent(b"{}", key="ann"))
    return F.lit(1)
