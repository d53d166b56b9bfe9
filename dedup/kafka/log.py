"""Reading a range of a Kafka topic again, by position: what `consumer.register_log_reader` needs for replay, `--from-log` and large bodies.

A read returns each event of the range once, if the log still has it and a stream would get it, and nothing else. Positions without an
event (transaction markers, aborted messages, what compaction removed) are left out.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from checkpoint import given
from checkpoint.errors import IncarnationChanged
from dedup.core.log import AnyLogReader
from dedup.core.settings import KAFKA_LOG
from dedup.kafka.broker import Broker, settings_taken

MANY = 5_000
"""Messages taken from the client at once."""

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
        pa.field("headers", HEADERS),
    ]
)
"""The columns of Spark's Kafka source."""

_TYPES = {1: 0, 2: 1}
"""librdkafka's kinds of timestamp -> those of Spark: when it was made, when it was appended."""

MOST = 2**63 // 1000
"""Milliseconds beyond which a column of microseconds holds no time. Producers may claim any, such as nanoseconds."""


class LogReader(AnyLogReader):
    """What `log_reader` returns: call it with source, topic, partition, first and last position.

    Its rows have the columns of Spark's Kafka source.
    """

    def __init__(self, broker: Broker, isolation: str, headers: bool, arrow: bool = False) -> None:
        self.broker, self.arrow = broker, arrow
        self._isolation, self._headers = isolation, headers

    def __repr__(self) -> str:
        return f"log_reader({self.broker!r})"

    def read(self, topic: str, partition: int, first: int, last: int) -> pa.Table:
        """Return what a call returns, always as an Arrow table. Raises IncarnationChanged, SourceUnavailable."""
        with self._consumer() as consumer:
            kept, end = self._ends(consumer, topic, partition)
            if last >= end:
                raise IncarnationChanged(
                    f"{topic}/{partition} at {self.broker.servers} ends before position {end}; {first}-{last} was asked for. "
                    "It was deleted and created again, or lost its end, or a transaction is open there, or this is another broker."
                )
            consumer.assign([TopicPartition(topic, partition, max(first, kept))])
            found = list(self._messages(consumer, last))
        return _table(found, self._headers)

    def first_kept(self, source: str, topic: str, partition: int) -> int:
        """Return the first position that the log still has. Events below it are lost; positions that are missing above it hold no event."""
        with self._consumer() as consumer:
            return self._ends(consumer, topic, partition)[0]

    def absent(self, source: str, topic: str, partition: int, first: int, last: int) -> bool:
        """Return whether the log holds no event at these positions although retention has deleted none of them."""
        with self._consumer() as consumer:
            kept, end = self._ends(consumer, topic, partition)
            if kept > first or last >= end:
                return False
            consumer.assign([TopicPartition(topic, partition, first)])
            return next(self._messages(consumer, last), None) is None

    def _ends(self, consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
        try:
            kept, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), self.broker.timeout)
        except KafkaException as error:
            raise self.broker.unavailable(error.args[0].str()) from error
        return int(kept), int(end)

    @contextmanager
    def _consumer(self) -> Iterator[Consumer]:
        settings = self.broker.settings(
            group_id=f"dedup-{uuid.uuid4().hex}",  # a name is asked for; nothing is ever committed under it
            enable_auto_commit=False,
            enable_auto_offset_store=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
            isolation_level=self._isolation,
            queued_max_messages_kbytes=16_384,
        )
        with settings_taken():
            consumer = Consumer(settings)
        try:
            yield consumer
        finally:
            consumer.close()

    def _messages(self, consumer: Consumer, last: int) -> Iterator[Message]:
        """The messages up to `last`; the end of the log, or of what is committed, ends them as well."""
        while True:
            waited = consumer.poll(self.broker.timeout)
            if waited is None:
                raise self.broker.unavailable(f"no message within {self.broker.timeout:g} s")
            for message in (waited, *consumer.consume(MANY, 0)):
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise self.broker.unavailable(error.str())
                offset = message.offset() or 0
                if error is None and offset <= last:
                    yield message
                if error is not None or offset >= last:
                    return


def log_reader(
    broker: Broker | str,
    settings: Mapping[str, Any] | None = None,
    *,
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
    headers: bool = True,
    arrow: bool = False,
) -> LogReader:
    """Make the function that reads a range of a topic again: `consumer.register_log_reader(kafka.log_reader("host:9092"))`.

    Args:
        broker: its address, or a `Broker`.
        settings: of librdkafka, if `broker` is an address.
        isolation: the `kafka.isolation.level` of the stream. With another one aborted messages are read as events.
        headers: whether the stream has headers (`includeHeaders`).
        arrow: return Arrow tables also if a Spark session is active, for handlers that take them.
    """
    given.check(KAFKA_LOG, locals())
    return LogReader(broker if isinstance(broker, Broker) else Broker(broker, settings), isolation, headers, arrow)


def _table(messages: list[Message], headers: bool) -> pa.Table:
    stamps = [m.timestamp() for m in messages]
    times = [at * 1000 if kind and abs(at) < MOST else None for kind, at in stamps]
    columns = {
        "key": [m.key() for m in messages],
        "value": [m.value() for m in messages],
        "topic": [m.topic() for m in messages],
        "partition": [m.partition() for m in messages],
        "offset": [m.offset() for m in messages],
        "timestamp": pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        "timestampType": [_TYPES.get(kind, -1) for kind, _ in stamps],
        "headers": [_pairs(m) for m in messages],
    }
    table = pa.table([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)
    return table if headers else table.drop_columns(["headers"])


def _pairs(message: Message) -> list[dict[str, Any]] | None:
    headers: Any = message.headers()
    return [{"key": key, "value": value} for key, value in headers] if headers else None
