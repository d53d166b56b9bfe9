"""An outbox that is dispatched to a real Kafka broker: ids, order, what the broker refuses, and what comes back to a consumer."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError

from checkpoint.errors import ConfigError, DestinationUnavailable
from dedup.kafka import Broker, Topics, log_reader
from dedup.kafka.outbox import _Sender
from dedup.outbox import Message, Outcome
from kit.kafka_kit import Topic, received


def messages(topic: Topic, *bodies: bytes, keys: int = 3) -> list[Message]:
    return [Message(n, topic.name, b"k%d" % (n % keys), f"id-{n}", body) for n, body in enumerate(bodies)]


def test_messages_carry_their_id_and_keep_the_order_of_their_key(topic: Topic) -> None:
    """What arrives has the key, the body, the headers and the stored id, in the order of the outbox, on the partition of Java's clients."""
    destination = Topics(topic.servers)
    one = Message(99, topic.name, b"k0", "first", b"", (("message-id", b"of another"), ("a", None)))
    outcome = destination.send([one, *messages(topic, *(b"%d" % n for n in range(300)))])
    assert not outcome.failed and not outcome.unsent
    got = received(topic)
    assert len(got) == 301
    for key in (b"k0", b"k1", b"k2"):
        bodies = [int(m.value()) for m in got if m.key() == key and m.value()]
        assert bodies == sorted(bodies) and len({m.partition() for m in got if m.key() == key}) == 1
    first = next(m for m in got if m.value() in (b"", None))
    assert first.headers() == [("message-id", b"first"), ("a", None)]
    read = log_reader(topic.servers)("", topic.name, got[0].partition(), 0, 0)
    rows = read if isinstance(read, pa.Table) else read.toArrow()  # of Spark, where a test before this one has started it
    assert rows["headers"][0].as_py()[0]["key"] == "message-id"


@pytest.mark.full
def test_a_message_that_is_too_large_for_the_topic_is_found_among_many(kafka: Any) -> None:
    """The broker refuses whole batches; only the message that it meant has failed, and nothing behind it in its key was sent."""
    topic = Topic(kafka.servers, f"small-{uuid.uuid4().hex[:8]}")
    topic.create(partitions=1, max_message_bytes="2000")
    bodies = [b"x" * (5000 if n == 7 else 10) for n in range(30)]
    destination, todo = Topics(topic.servers, {"linger.ms": 100}), messages(topic, *bodies)
    outcome = destination.send(todo)
    assert list(outcome.failed) == [7] and outcome.failed[7].permanent
    got = [m.headers()[0][1].decode() for m in received(topic, 1)]
    behind = [m.id for m in todo if m.key == todo[7].key and m.number > 7]
    assert not set(behind) & set(got)
    left = [m for place, m in enumerate(todo) if place in outcome.unsent and m.id not in behind]
    assert not destination.send(left).failed
    got = [m.headers()[0][1].decode() for m in received(topic, 1)]
    assert sorted(set(got)) == sorted(m.id for m in todo if m.number != 7 and m.id not in behind)
    for key in (b"k0", b"k1", b"k2"):
        mine = [m.id for m in todo if m.key == key]
        first = list(dict.fromkeys(i for i in got if i in mine))
        assert first == [i for i in mine if i in first]


def test_a_message_that_the_client_itself_refuses_fails_alone(topic: Topic) -> None:
    """Above message.max.bytes the message fails, those behind it in its key wait, the others are sent."""
    outcome = Topics(topic.servers).send(messages(topic, b"a", b"x" * 2_000_000, b"c", b"d", b"e", b"f"))
    assert list(outcome.failed) == [1] and outcome.unsent == {4}
    assert sorted(m.value() for m in received(topic)) == [b"a", b"c", b"d", b"f"]


def test_of_messages_that_look_the_same_none_counts_as_sent_where_one_was_refused() -> None:
    """The client tells topic, key and body of a refused message, not its id: another one with all three might be meant."""
    sender = _Sender(Broker("127.0.0.1:1"), 1.0)
    sender._refused = [(("t", b"k", b"same"), KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))]
    todo = [Message(n, "t", b"k", f"id-{n}", body) for n, body in enumerate([b"same", b"other", b"same"])]
    assert set(sender._errors(todo)) == {0, 2}


def test_a_broker_that_is_away_is_nobodys_fault() -> None:
    """No message is given up while nobody answers."""
    with pytest.raises(DestinationUnavailable):
        Topics("127.0.0.1:1", timeout=1.0).send([Message(0, "t", None, "id", b"")])


def test_what_waits_for_a_topic_is_sent_once_when_it_exists(kafka: Any) -> None:
    """A topic that is not there holds back no other one, none of its messages has failed, and nothing of that counts once it is there."""
    late, there = (Topic(kafka.servers, f"{name}-{uuid.uuid4().hex[:8]}") for name in ("late", "there"))
    there.create(partitions=1)
    out = Topics(kafka.servers, {"topic.metadata.propagation.max.ms": 500})
    todo = [Message(n, (late, there)[n % 2].name, b"k", f"id-{n}", b"same") for n in range(6)]
    outcome = out.send(todo)
    assert not outcome.failed and outcome.unsent == {0, 2, 4} and list(outcome.away) == [late.name]
    late.create(partitions=1)
    left = [todo[place] for place in sorted(outcome.unsent)]
    until = time.monotonic() + 30
    while (outcome := out.send(left)).away and time.monotonic() < until:
        assert not outcome.failed
    assert outcome == Outcome()
    out.close()
    assert [m.headers()[0][1] for m in received(late, 1)] == [b"id-0", b"id-2", b"id-4"]
    assert [m.headers()[0][1] for m in received(there, 1)] == [b"id-1", b"id-3", b"id-5"]


@pytest.mark.parametrize("settings", [{"bogus.setting": "1"}, {"acks": 1}])
def test_settings_that_the_client_refuses_are_an_error_of_the_configuration(settings: dict[str, Any]) -> None:
    """Not of the broker, which a dispatcher would wait for, and no exception of the driver."""
    with pytest.raises(ConfigError, match="librdkafka does not take these settings"):
        Topics("127.0.0.1:1", settings).send([Message(0, "t", None, "id", b"")])
