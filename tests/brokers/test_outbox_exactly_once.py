"""Dispatch in Kafka transactions: readers of committed messages see each of them once, whatever dies and whenever it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from checkpoint.errors import ConfigError, DestinationUnavailable, Fenced
from checkpoint.holders import take_epoch
from deadletter.store import Commit
from dedup.core.messages import MESSAGES, Asked, Chosen, Message, Messages, lanes, random_ids
from dedup.kafka import TransactionalTopics
from dedup.outbox import Call, Dispatcher, ExactlyOnce, Outcome, State
from dedup.outbox.exactly_once import Flight
from dedup.postgres import PostgresStore
from kit.kafka_kit import Topic, eventually, received
from kit.pg_run import run

NAME = "shop"


def fill(dsn: str, topic: str, bodies: list[bytes], keys: int = 5) -> None:
    """Messages in the outbox."""
    store = PostgresStore(dsn)
    column = pa.array([b"k%d" % (n % keys) for n in range(len(bodies))])
    nothing = pa.nulls(len(bodies), MESSAGES.field("headers").type)
    rows = pa.table([random_ids(len(bodies)), column, pa.array(bodies), nothing, lanes(topic, column)], schema=MESSAGES)
    epoch = take_epoch(store, NAME, uuid.uuid4().hex, 0.1, force=True).epoch
    with store.begin(NAME, epoch) as transaction:
        transaction.enqueue(Messages(topic, rows, derived=False))
        transaction.execute(Commit())
    store.close()


def dispatcher(dsn: str, servers: str, group: str, **options: Any) -> ExactlyOnce:
    return ExactlyOnce(PostgresStore(dsn).outbox(NAME), TransactionalTopics(servers, group, timeout=20.0), **options)


def states(dsn: str) -> Counter[str]:
    return Counter(e.state.name for e in PostgresStore(dsn).outbox(NAME).entries(Chosen(limit=None)))


def die_at(step: str, nth: int, dsn: str, servers: str, group: str) -> None:
    """In a process of its own: dispatch, and die right before the n-th of a step."""
    left = [nth]

    def on_step(name: str) -> None:
        left[0] -= name == step
        if name == step and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    dispatcher(dsn, servers, group, limit=20, on_step=on_step).once()


FENCED = 7
"""Exit code."""


def stop_before_commit(dsn: str, servers: str, group: str) -> None:
    """In a process of its own: send a flight, and sleep with its transaction open."""
    broker = TransactionalTopics(servers, group, timeout=5.0)
    commit = broker._commit

    def stop(producer: Any, flight: Flight) -> None:
        producer.flush(5.0)
        os.kill(os.getpid(), signal.SIGSTOP)
        commit(producer, flight)

    broker._commit = stop  # type: ignore[method-assign]
    try:
        ExactlyOnce(PostgresStore(dsn).outbox(NAME), broker).once()
    except Fenced as error:
        os._exit(FENCED if "more than 5 s" in str(error) else 1)


@pytest.mark.crash
def test_killed_at_any_step_each_message_is_committed_once(postgres: str, topic: Topic) -> None:
    """Dead before, between and after the two commits, again and again: no message is missing, none is there twice, keys are in order."""
    fill(postgres, topic.name, [b"%d" % n for n in range(120)])
    spawn = multiprocessing.get_context("spawn")
    for step, nth in (("send", 1), ("sent", 1), ("sent", 2), ("marked", 1)):
        process = spawn.Process(target=die_at, args=(step, nth, postgres, topic.servers, topic.name))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, step
    done = dispatcher(postgres, topic.servers, topic.name).once()
    assert 0 < done.sent < 120 and states(postgres) == {"SENT": 120}
    got = received(topic)
    assert sorted(int(m.value()) for m in got) == list(range(120))
    for key in (b"k0", b"k1", b"k2", b"k3", b"k4"):
        numbers = [int(m.value()) for m in got if m.key() == key]
        assert numbers == sorted(numbers)


def test_a_dispatcher_that_begins_before_its_consumer_waits_for_it(postgres: str, topic: Topic) -> None:
    """Nothing is there to send, and that is no error."""
    PostgresStore(postgres).migrate()
    early = dispatcher(postgres, topic.servers, topic.name)
    assert early.once().sent == 0
    fill(postgres, topic.name, [b"1"])
    assert early.once().sent == 1


def test_a_dispatcher_that_was_overtaken_sends_nothing(postgres: str, topic: Topic) -> None:
    """It had noted its flight and slept; another one has sent it: when it wakes up the broker refuses it, and nothing is doubled."""
    fill(postgres, topic.name, [b"%d" % n for n in range(10)])
    sleeper = dispatcher(postgres, topic.servers, topic.name)

    def meanwhile(step: str) -> None:
        if step == "send":
            assert dispatcher(postgres, topic.servers, topic.name).once().sent == 10

    sleeper._on_step = meanwhile
    with pytest.raises(Fenced):
        sleeper.once()
    assert len(received(topic)) == 10 and states(postgres) == {"SENT": 10}


def test_a_flight_of_a_restored_database_is_not_taken_for_one_that_had_its_number(postgres: str, topic: Topic) -> None:
    """The broker remembers more flights than the database, which gives their numbers again: a flight that was not sent is sent."""
    fill(postgres, topic.name, [b"%d" % n for n in range(30)])
    assert dispatcher(postgres, topic.servers, topic.name, limit=10).once().sent == 30
    run(postgres, "update dedup.outbox_flight set flight = 1")  # as an older copy has it
    fill(postgres, topic.name, [b"%d" % n for n in range(30, 40)])

    def die(step: str) -> None:
        if step == "send":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        dispatcher(postgres, topic.servers, topic.name, limit=10, on_step=die).once()
    assert states(postgres) == {"SENT": 30, "FLYING": 10}
    assert dispatcher(postgres, topic.servers, topic.name).once().sent == 10
    assert sorted(int(m.value()) for m in received(topic)) == list(range(40))


@pytest.mark.full
@pytest.mark.parametrize("name", ["absent", pytest.param("zero", marks=pytest.mark.full)])
def test_a_topic_that_does_not_exist_holds_back_no_other(postgres: str, topic: Topic, name: str) -> None:
    """Its messages wait, none is dead, and those of other topics go; once it is created it gets its own, each of them once."""
    missing = Topic(topic.servers, f"{name}-{uuid.uuid4().hex[:8]}")
    for each in (topic, missing):
        fill(postgres, each.name, [b"%d" % n for n in range(10)])
    one = dispatcher(postgres, topic.servers, topic.name)
    with pytest.raises(DestinationUnavailable, match=missing.name):
        one.once()
    assert len(received(topic)) == 10 and states(postgres) == {"SENT": 10, "WAITING": 10}
    missing.create(partitions=2)
    assert one.once().sent == 10 and sorted(int(m.value()) for m in received(missing)) == list(range(10))
    assert len(received(topic)) == 10 and states(postgres) == {"SENT": 20}


@pytest.mark.full
def test_a_message_that_no_transaction_can_hold_is_found(kafka: Any, postgres: str) -> None:
    """The broker refuses the batch: flights get smaller until the message is alone; it is dead, holds back its key, the others are sent."""
    topic = Topic(kafka.servers, f"small-{uuid.uuid4().hex[:8]}")
    topic.create(partitions=1, max_message_bytes="2000")
    fill(postgres, topic.name, [b"x" * (5000 if n == 7 else 3) for n in range(20)])
    done = dispatcher(postgres, topic.servers, topic.name).once()
    assert (done.dead, states(postgres)) == (1, {"SENT": 17, "DEAD": 1, "BEHIND": 2})
    assert len(received(topic, 1)) == 17


@pytest.mark.full
def test_a_dispatcher_that_was_paused_for_too_long_doubles_nothing(postgres: str, topic: Topic) -> None:
    """Stopped right before its commit until the broker has given its transaction up: it says so, and whoever comes next sends."""
    fill(postgres, topic.name, [b"%d" % n for n in range(20)])
    process = multiprocessing.get_context("spawn").Process(target=stop_before_commit, args=(postgres, topic.servers, topic.name))
    process.start()
    eventually(lambda: any(topic.ends(p)[1] for p in range(2)))  # it has sent, and sleeps
    eventually(lambda: all(topic.ends(p, "read_committed") == topic.ends(p) for p in range(2)))  # aborted by the broker
    os.kill(process.pid or 0, signal.SIGCONT)
    process.join(120)
    assert process.exitcode == FENCED and states(postgres) == {"FLYING": 20} and not received(topic)
    assert dispatcher(postgres, topic.servers, topic.name).once().sent == 20
    assert sorted(int(m.value()) for m in received(topic)) == list(range(20)) and states(postgres) == {"SENT": 20}


def test_a_flight_that_is_noted_while_a_plain_dispatcher_takes_is_seen(postgres: str, topic: Topic) -> None:
    """It has looked for flights, then one begins with the first message of a key: the second one is not sent before it."""
    fill(postgres, topic.name, [b"%d" % n for n in range(10)], keys=1)
    outbox, got = PostgresStore(postgres).outbox(NAME), list[Any]()
    first = outbox._first

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        assert PostgresStore(postgres).outbox(NAME).fly(Asked(limit=1))
        return first(*arguments, **options)

    outbox._first = meanwhile  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="--exactly-once --once"):
        Dispatcher(outbox, Call(got.extend), workers=1).once()
    assert not got


def test_the_two_ways_of_sending_do_not_mix(postgres: str, topic: Topic) -> None:
    """While a transaction is not settled a plain dispatcher refuses to send, and names the command; lag counts what flies."""
    fill(postgres, topic.name, [b"1", b"2"])
    outbox = PostgresStore(postgres).outbox(NAME)
    one = ExactlyOnce(outbox, TransactionalTopics(topic.servers, topic.name))
    one._on_step = lambda step: (_ for _ in ()).throw(KeyboardInterrupt) if step == "send" else None
    with pytest.raises(KeyboardInterrupt):
        one.once()
    with pytest.raises(ConfigError, match="--exactly-once --once"):
        Dispatcher(outbox, Call(lambda messages: None)).once()
    assert outbox.lag().waiting == 2 and [e.state for e in outbox.entries(Chosen())] == [State.FLYING] * 2
    assert outbox.discard([e.number for e in outbox.entries(Chosen())]) == 0
    assert dispatcher(postgres, topic.servers, topic.name).once().sent == 2 and len(received(topic)) == 2


class FullQueue:
    """A producer whose queue has room for one message, and gets room again when it is polled."""

    def __init__(self, *, room: bool) -> None:
        self.free, self.room, self.taken = 1, room, list[bytes]()

    def begin_transaction(self) -> None: ...

    def produce(self, topic: str, body: bytes, *_: Any, **__: Any) -> None:
        if not self.free:
            raise BufferError
        self.free -= 1
        self.taken.append(body)

    def poll(self, seconds: float) -> None:
        self.free += self.room

    def flush(self, seconds: float) -> None: ...

    def purge(self) -> None: ...


def of_full_queue(*, room: bool) -> tuple[TransactionalTopics, FullQueue]:
    """A broker that has taken what the client's queue has."""
    broker, producer = TransactionalTopics("127.0.0.1:1", NAME, timeout=1.0), FullQueue(room=room)
    broker._producer, broker._commit = producer, lambda producer, flight: None  # type: ignore[assignment, method-assign]
    return broker, producer


def test_a_flight_that_is_larger_than_the_clients_queue_waits_for_room() -> None:
    """Where there is little memory a flight goes through the queue piece by piece; if nothing moves, it is an outage."""
    flight = Flight(1, [Message(n, "t", None, f"id{n}", b"%d" % n) for n in range(3)], fresh=True)
    broker, producer = of_full_queue(room=True)
    assert broker.send(flight) == Outcome() and producer.taken == [b"0", b"1", b"2"]
    broker, producer = of_full_queue(room=False)
    with pytest.raises(DestinationUnavailable, match="has not done a transaction"):
        broker.send(flight)


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_a_transaction_that_a_topic_is_refused_for_is_no_outage(code: int) -> None:
    """Where the broker does not say which topic, no message of the flight is at fault, and nothing of it was sent."""
    broker, _ = of_full_queue(room=True)

    def refuse(producer: Any, flight: Flight) -> None:
        raise KafkaException(KafkaError(code))

    broker._commit = refuse  # type: ignore[method-assign]
    outcome = broker.send(Flight(1, [Message(n, f"t{n}", None, f"id{n}", b"") for n in range(2)], fresh=True))
    assert sorted(outcome.failed) == [0, 1] and not any(failure.permanent for failure in outcome.failed.values())
    assert broker._producer is None
