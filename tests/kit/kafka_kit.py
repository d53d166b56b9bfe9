"""What tests do with a Kafka topic: create and delete it, produce to it, in transactions or not."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

PATIENCE = 90.0
"""Seconds for anything that the broker does in a moment."""

QUIET = {"log_level": 0}


@dataclass(frozen=True)
class Topic:
    """One topic of one broker."""

    servers: str
    name: str

    @cached_property
    def admin(self) -> AdminClient:
        """The client; an answer comes only while it lives."""
        return AdminClient({"bootstrap.servers": self.servers, **QUIET})

    def create(self, partitions: int = 1, **config: str) -> None:
        """Create it, and wait until it can be written to. Dots of setting names are underscores here."""
        wanted = NewTopic(self.name, partitions, 1, config={key.replace("_", "."): value for key, value in config.items()})
        eventually(lambda: self._created(wanted))
        eventually(lambda: len(self._partitions()) == partitions and all(p.leader for p in self._partitions()))

    def _created(self, wanted: NewTopic) -> bool:
        try:
            self.admin.create_topics([wanted])[self.name].result(PATIENCE)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR:
                raise
            return False  # on a busy machine the only broker may be late with its heartbeat, and counts as gone until the next
        return True

    def _partitions(self) -> Sequence[Any]:
        try:
            found = self.admin.describe_topics(TopicCollection([self.name]))[self.name].result(PATIENCE)
        except KafkaException:
            return ()
        return tuple(found.partitions)

    def grow(self, partitions: int) -> None:
        """Add partitions."""
        self.admin.create_partitions([NewPartitions(self.name, partitions)])[self.name].result(PATIENCE)
        eventually(lambda: len(self._partitions()) == partitions)

    def delete(self) -> None:
        """Delete it, and wait until it is gone."""
        self.admin.delete_topics([self.name])[self.name].result(PATIENCE)
        eventually(lambda: not self._partitions())

    def delete_records(self, partition: int, before: int) -> None:
        """Let retention pass: positions below `before` are gone."""
        place = TopicPartition(self.name, partition, before)
        self.admin.delete_records([place])[place].result(PATIENCE)

    def producer(self, **config: Any) -> Producer:
        """A new producer."""
        return Producer({"bootstrap.servers": self.servers, "linger.ms": 5, **QUIET, **config})

    def send(self, bodies: Iterable[bytes | str | None], partition: int = 0, key: bytes | None = None, **config: Any) -> None:
        """Produce these, in order, and wait until the broker has them."""
        producer, refused = self.producer(**config), list[Any]()
        for body in bodies:
            told = {"on_delivery": lambda error, _: refused.append(error) if error else None}
            producer.produce(self.name, body, key, partition, headers=[("origin", b"test")], **told)
        flush(producer)
        assert not refused, refused[0]

    def send_messages(self, *messages: tuple[str, str], partition: int = 0) -> None:
        """Produce these (message id, body), with the id in the header."""
        producer = self.producer()
        for message_id, body in messages:
            producer.produce(self.name, body, partition=partition, headers=[("message-id", message_id.encode())])
        flush(producer)

    def send_orders(self, *orders: tuple[str, int], partition: int = 0) -> None:
        """Produce orders (id, amount) as JSON."""
        self.send([order(*one) for one in orders], partition)

    def send_transaction(self, bodies: Iterable[str], *, commit: bool, partition: int = 0) -> None:
        """Produce these in a transaction that is committed or aborted."""
        producer = self.producer(**{"transactional.id": f"{self.name}-{time.monotonic_ns()}"})
        producer.init_transactions(PATIENCE)
        producer.begin_transaction()
        for body in bodies:
            producer.produce(self.name, body, partition=partition)
        flush(producer)
        if commit:
            producer.commit_transaction(PATIENCE)
        else:
            producer.abort_transaction(PATIENCE)
        eventually(lambda: self.ends(partition, "read_committed") == self.ends(partition))  # its marker is written behind our back

    def offsets(self, last: int) -> list[int]:
        """Positions up to `last` that partition 0 still has."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "tests", "enable.partition.eof": True, **QUIET})
        found: list[int] = []
        try:
            consumer.assign([TopicPartition(self.name, 0, 0)])
            while (message := consumer.poll(PATIENCE)) is not None and message.error() is None and (message.offset() or 0) <= last:
                found.append(message.offset() or 0)
        finally:
            consumer.close()
        return found

    def ends(self, partition: int = 0, isolation: str = "read_uncommitted") -> tuple[int, int]:
        """(first position, position after the last)."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "tests", "isolation.level": isolation, **QUIET})
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(self.name, partition), PATIENCE)
        finally:
            consumer.close()
        return int(low), int(high)


def compacted(topic: Topic, bodies: Sequence[str]) -> Topic:
    """Another topic, with these messages in partition 0, of which compaction has left the first and the last."""
    other = Topic(topic.servers, f"{topic.name}-compacted")
    other.create(cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01", max_compaction_lag_ms="100")
    other.send(bodies[:1], key=b"first")
    other.send(bodies[1:], key=b"k")
    last = len(bodies) - 1

    def gone() -> bool:
        other.send([bodies[last]], key=uuid.uuid4().bytes)  # a new message closes the old segment
        return other.offsets(last) == [0, last]

    eventually(gone)
    return other


def order(id: str, amount: int) -> str:
    """The body of one order."""
    return json.dumps({"id": id, "amount": amount})


def flush(producer: Producer) -> None:
    """Wait until all is delivered."""
    left = producer.flush(PATIENCE)
    assert not left, f"{left} messages were not delivered"


def eventually(holds: Any) -> None:
    """Wait until it holds; fail after PATIENCE."""
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.05)


def received(topic: Topic, partitions: int = 2, isolation: str = "read_committed") -> list[Any]:
    """All messages, partition by partition."""
    client = Consumer(
        {"bootstrap.servers": topic.servers, "group.id": "tests", "isolation.level": isolation, "enable.partition.eof": True, **QUIET}
    )
    found, left = [], partitions
    client.assign([TopicPartition(topic.name, p, 0) for p in range(partitions)])
    while left:
        message = client.poll(PATIENCE)
        assert message is not None
        if message.error() is not None:
            left -= 1
        else:
            found.append(message)
    client.close()
    return found
