"""Messages of an outbox to Kafka topics: in order per key, with the id that they were stored with as a header.

`Topics` sends at least once. Its producer is idempotent and leaves no gaps: if the broker refuses a message, no later message of the
partition arrives before it. `TransactionalTopics` sends exactly once: one Kafka transaction holds the messages and the record that they
were sent. That record is an offset of a group of its own, with the flight's token; the next process reads it back. A mark in another
database, written after the commit, could be lost when the process dies in between. The dispatcher calls this module.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from checkpoint import given
from checkpoint.errors import DestinationUnavailable, Fenced
from dedup.core.keys import MESSAGE_ID_PROPERTIES
from dedup.core.messages import ID_HEADER, Line, Message
from dedup.core.settings import TOPICS, TRANSACTIONAL_TOPICS
from dedup.kafka.broker import Broker, settings_taken
from dedup.outbox.destination import Outcome, SendFailure
from dedup.outbox.exactly_once import Flight

log = logging.getLogger("dedup")

OWN_FAULT = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._INVALID_ARG,
    }
)
"""What a broker, or the client itself, says of a batch with a message that it will never take."""

NOT_THERE = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)
"""What is the fault of a topic, and of no message: somebody creates it, or gives us the right."""

TOPIC_SECONDS = 5.0
"""For so long a transaction waits for a topic that is not there: then messages of others go without it. A plain client waits for 30 s."""

COLLATERAL = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._FATAL, KafkaError._STATE})
"""What becomes of the others when the producer gives up: they were not tried, or nobody knows."""

SETTINGS: Mapping[str, Any] = {
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,  # how long is decided here: a message that times out by itself would leave a gap
    "partitioner": "murmur2_random",  # as Java's clients: other producers of the topic put the same key there
    "queue.buffering.max.messages": 1_000_000,
    "linger.ms": 5,
}

_Same = tuple[str, bytes | None, bytes]
"""Topic, key and body: what the client tells of a message that was not taken. It does not tell the headers."""

FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


def headers_of(message: Message) -> list[tuple[str, str | bytes | None]]:
    """Return the headers that are sent: the id, then those of the message without any other id."""
    if not message.headers:
        return [(ID_HEADER, message.id)]
    return [(ID_HEADER, message.id), *((name, value) for name, value in message.headers if name not in MESSAGE_ID_PROPERTIES)]


class Topics:
    """A Kafka cluster as the destination of messages, at least once.

    Args:
        broker: its address, or a `Broker`.
        settings: of librdkafka, if `broker` is an address.
        timeout: how long the broker may take to acknowledge the messages of one turn.
    """

    parallel: ClassVar[bool] = True

    def __init__(self, broker: Broker | str, settings: Mapping[str, Any] | None = None, *, timeout: given.Duration = 60.0) -> None:
        given.check(TOPICS, locals())
        self.broker, self.timeout = broker if isinstance(broker, Broker) else Broker(broker, settings), given.to_seconds(timeout)
        self._idle: list[_Sender] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}

    def __repr__(self) -> str:
        return f"Topics({self.broker!r})"

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send messages and wait until the broker has acknowledged them. Calls at the same time use a producer each.

        Raises:
            DestinationUnavailable: the broker has not acknowledged all of them in time.

        Crash: what was sent is sent again, with the same ids.
        """
        try:
            one = self._idle.pop()
        except IndexError:
            one = _Sender(self.broker, self.timeout)
        try:
            return one.send(messages)
        finally:
            self._idle.append(one)

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()


class _Sender:
    """A producer, for one turn at a time."""

    def __init__(self, broker: Broker, timeout: float) -> None:
        self.broker, self.timeout = broker, timeout
        self._producer: Producer | None = None
        self._refused: list[tuple[_Same, KafkaError]] = []  # of the producer at hand, in this turn
        self._gave_up: KafkaError | None = None  # why it did

    def send(self, messages: Sequence[Message]) -> Outcome:
        """As `Topics.send`."""
        outcome = Outcome()
        self._refused.clear()
        self._gave_up = None
        self._hand_over(messages, outcome)
        self._wait()
        errors = self._errors(messages)
        if errors:
            self._drop()  # one that has given up sends nothing more, and does not say so to each message
        self._refuse_outage(messages, errors)
        suspects = sorted(place for place, error in errors.items() if error.code() in OWN_FAULT)
        self._judge(messages, errors, outcome)
        # A broker refuses batches: which of their messages it meant is found by sending each of them alone.
        self._one_by_one(messages, suspects, outcome)
        return outcome

    def _refuse_outage(self, messages: Sequence[Message], errors: Mapping[int, KafkaError]) -> None:
        """Raise DestinationUnavailable where the producer gave up by no message's fault: a login without rights, for instance."""
        if errors and len(errors) == len(messages) and all(error.code() in COLLATERAL for error in errors.values()):
            why = self._gave_up or next(iter(errors.values()))
            raise DestinationUnavailable(f"Kafka at {self.broker.servers} takes no messages: {why.str()}.")

    def _judge(self, messages: Sequence[Message], errors: Mapping[int, KafkaError], outcome: Outcome) -> None:
        """What is plain: a topic that is not there is away; of each key the first message has failed."""
        stopped = {messages[place].line for place in outcome.failed} - {None}
        for place, error in sorted(errors.items()):
            message = messages[place]
            if error.code() in NOT_THERE:
                outcome.away[message.topic] = f"KafkaError {error.name()}: {error.str()}."
                outcome.unsent.add(place)
            elif error.code() in COLLATERAL or message.line in stopped:
                outcome.unsent.add(place)
            elif error.code() not in OWN_FAULT:
                outcome.failed[place] = _failure(error)
                stopped |= {message.line} - {None}

    def _hand_over(self, messages: Sequence[Message], outcome: Outcome) -> None:
        produce, stopped = self._connected().produce, set[Line]()
        for place, message in enumerate(messages):
            if stopped and message.line in stopped:
                outcome.unsent.add(place)
                continue
            try:
                produce(message.topic, message.body, message.key, headers=headers_of(message))
            except BufferError:
                self._produce(message)
            except KafkaException as error:
                told: KafkaError = error.args[0]
                if told.code() not in OWN_FAULT:
                    self._drop()
                    raise DestinationUnavailable(f"Kafka at {self.broker.servers} does not take messages: {told.str()}.") from error
                outcome.failed[place] = _failure(told)
                if message.line is not None:
                    stopped.add(message.line)

    def _produce(self, message: Message) -> None:
        """As soon as there is room."""
        producer, until = self._connected(), time.monotonic() + self.timeout
        while True:
            try:
                return producer.produce(message.topic, message.body, message.key, headers=headers_of(message))
            except BufferError:
                if time.monotonic() > until:
                    raise self._away() from None
                producer.poll(0.1)

    def _errors(self, messages: Sequence[Message]) -> dict[int, KafkaError]:
        """Place of each message that was not taken -> why. Of messages that look the same none counts as sent if one was not."""
        if not self._refused:
            return {}
        places = defaultdict[_Same, list[int]](list)
        for place, message in enumerate(messages):
            places[(message.topic, message.key, message.body or b"")].append(place)
        return {place: error for same, error in self._refused for place in places[same]}

    def _wait(self) -> None:
        """Until each message is acknowledged or known to have failed."""
        assert self._producer is not None
        producer, until = self._producer, time.monotonic() + self.timeout
        while not self._is_served(producer):
            if time.monotonic() > until:
                raise self._away()

    def _is_served(self, producer: Producer) -> bool:
        """Whether all of its messages are acknowledged or have failed, after waiting a moment for that."""
        try:
            return producer.flush(0.2) == 0
        except KafkaException as error:
            told: KafkaError = error.args[0]
            if not told.fatal():
                raise
            self._gave_up = told
        return _purged(producer)

    def _one_by_one(self, messages: Sequence[Message], suspects: Sequence[int], outcome: Outcome) -> None:
        stopped = {messages[place].line for place in (*outcome.failed, *outcome.unsent)} - {None}
        for place in suspects:
            message = messages[place]
            if message.line in stopped and any(p < place and messages[p].line == message.line for p in (*outcome.failed, *outcome.unsent)):
                outcome.unsent.add(place)
                continue
            self._refused.clear()
            self._produce(message)
            self._wait()
            if self._refused:
                outcome.failed[place] = _failure(self._refused[0][1])
                self._drop()
                stopped.add(message.line)

    def _connected(self) -> Producer:
        if self._producer is None:
            self._refused = []
            own = {**SETTINGS, **self.broker.settings(delivery_report_only_error=True), "on_delivery": partial(_told, self._refused)}
            with settings_taken():
                self._producer = Producer(own, logger=log)
        return self._producer

    def _away(self) -> DestinationUnavailable:
        self._drop()
        return DestinationUnavailable(f"Kafka at {self.broker.servers} has not acknowledged all messages within {self.timeout:g} s.")

    def _drop(self) -> None:
        """Forget the producer: what it still has in flight arrives as duplicates of what is sent again."""
        if self._producer is not None:
            _purged(self._producer)
        self._producer = None

    def close(self) -> None:
        """Let go of the connection."""
        self._drop()


def _purged(producer: Producer) -> bool:
    """Give up what it has not sent; returns whether nothing of it is in flight."""
    producer.purge()
    try:
        producer.flush(1.0)
    except KafkaException as error:  # it says again that it has given up
        log.debug("%s", error)
    return len(producer) == 0


def _told(refused: list[tuple[_Same, KafkaError]], error: KafkaError | None, message: Any) -> None:
    """One function for all messages: one for each would cost more than sending them."""
    if error is not None:
        refused.append(((message.topic(), message.key(), message.value() or b""), error))


def _failure(error: KafkaError) -> SendFailure:
    return SendFailure(f"KafkaError {error.name()}", error.str(), permanent=error.code() in OWN_FAULT)


class TransactionalTopics:
    """A Kafka cluster as the destination of messages, exactly once, in Kafka transactions.

    Args:
        broker: its address, or a `Broker`.
        name: of the outbox. One dispatcher sends under a name, and the broker fences an older one.
        timeout: how long a transaction may take.
    """

    def __init__(self, broker: Broker | str, name: str, settings: dict[str, Any] | None = None, *, timeout: given.Duration = 60.0) -> None:
        given.check(TRANSACTIONAL_TOPICS, locals())
        self.broker, self.timeout = broker if isinstance(broker, Broker) else Broker(broker, settings), given.to_seconds(timeout)
        self.group = f"dedup-outbox-{name}"
        self._producer: Producer | None = None

    def connect(self, *, anew: bool = False) -> None:
        """Become the sender of this name. The broker fences the sender before it and ends that sender's open transaction.

        Args:
            anew: also if this was the sender a while ago; somebody may have come after it.

        Raises:
            DestinationUnavailable: the broker does not answer.
        """
        if anew:
            self.close()
        if self._producer is not None:
            return
        own = {n: v for n, v in SETTINGS.items() if n not in ("enable.gapless.guarantee", "message.timeout.ms")}
        own["topic.metadata.propagation.max.ms"] = int(min(TOPIC_SECONDS, self.timeout / 2) * 1000)
        limits = {"transactional_id": self.group, "transaction_timeout_ms": int(self.timeout * 1000), "delivery_report_only_error": True}
        with settings_taken():
            producer = Producer({**own, **self.broker.settings(**limits)}, logger=log)
        try:
            producer.init_transactions(self.timeout)
        except KafkaException as error:
            raise self._away(error) from error
        self._producer = producer

    def has(self, flight: Flight) -> bool:
        """Return whether the transaction of this flight was committed. Call it after `connect`, when nobody else can commit the flight.

        It compares the flight's token, because a restored store gives a number twice.
        """
        consumer, until = self._consumer(), time.monotonic() + self.timeout
        try:
            while True:
                try:
                    (found,) = consumer.committed([_place(flight)], self.timeout)
                except KafkaException as error:  # a broker that has just begun does not know yet whose group it is
                    if time.monotonic() > until:
                        raise self._away(error) from error
                    time.sleep(0.1)
                else:
                    break
        finally:
            consumer.close()
        if found.error is not None:
            raise self._away(KafkaException(found.error))
        return bool(found.metadata == flight.token)

    def send(self, flight: Flight) -> Outcome:
        """Send all messages of a flight and its number in one transaction. If one message cannot be sent, none is.

        Failures that are not permanent are of topics that do not exist, or that this user may not use.

        Raises:
            DestinationUnavailable: it is not known whether the transaction was committed; call `connect`, then `has`.
            Fenced: another dispatcher has connected, or the transaction was open for longer than the time-out.

        Crash: all of it, or nothing; `has` tells which.
        """
        producer, errors = self._producer, dict[int, KafkaError]()
        assert producer is not None
        try:
            producer.begin_transaction()
            refused = self._hand_over(producer, flight, errors)
            if not refused:
                self._wait(producer, errors)
                self._commit(producer, flight)
                return Outcome()
            self.close()
            return Outcome(refused)
        except KafkaException as error:
            return self._ended(producer, error, errors, len(flight.messages))

    def _hand_over(self, producer: Producer, flight: Flight, errors: dict[int, KafkaError]) -> dict[int, SendFailure]:
        """What the client itself refuses; the first one is enough."""
        for place, message in enumerate(flight.messages):
            try:
                self._produce(producer, message, partial(_transaction_told, errors, place))
            except KafkaException as error:
                if error.args[0].code() not in OWN_FAULT:
                    raise
                return {place: _transaction_failure(error.args[0], permanent=True)}
        return {}

    def _produce(self, producer: Producer, message: Message, told: Callable[..., None]) -> None:
        """As soon as there is room in the client's queue. Raises KafkaException if there is none in time."""
        until = time.monotonic() + self.timeout
        while True:
            try:
                return producer.produce(message.topic, message.body, message.key, on_delivery=told, headers=headers_of(message))
            except BufferError:
                if time.monotonic() > until:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
                producer.poll(0.1)

    def _wait(self, producer: Producer, errors: dict[int, KafkaError]) -> None:
        """Until each message is acknowledged, or one has failed. A commit would look for a missing topic until all of its time is over."""
        until, late = time.monotonic() + self.timeout, False
        with suppress(KafkaException, SystemError):  # the client has failed: the commit says how
            while producer.flush(0.2) and not errors and not late:
                late = time.monotonic() > until
        gone = [error for error in errors.values() if error.code() in NOT_THERE]
        if gone or late:
            raise KafkaException(gone[0] if gone else KafkaError(KafkaError._TIMED_OUT))

    def _commit(self, producer: Producer, flight: Flight) -> None:
        consumer = self._consumer()
        try:
            until, topic = time.monotonic() + self.timeout, _place(flight).topic
            place = TopicPartition(topic, 0, flight.number, flight.token)
            producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), self.timeout)
            while True:
                try:
                    return producer.commit_transaction(max(1.0, until - time.monotonic()))
                except KafkaException as error:
                    if not error.args[0].retriable() or time.monotonic() > until:
                        raise
        finally:
            consumer.close()

    def _ended(self, producer: Producer, error: KafkaException, errors: dict[int, KafkaError], count: int) -> Outcome:
        told: KafkaError = error.args[0]
        if told.code() in FENCED:
            self.close()
            raise Fenced(
                f"The broker has fenced the dispatcher {self.group!r}. Another dispatcher of this name has started: stop this one. Or this "
                f"one sent nothing for more than {self.timeout:g} s, and the broker ended its transaction: start it again."
            ) from error
        with suppress(KafkaException, SystemError):  # the client's way to say again that it has failed, while it tells the messages
            producer.flush(1.0)
        refused = {place: _transaction_failure(e, permanent=True) for place, e in errors.items() if e.code() in OWN_FAULT}
        refused = refused or {place: _transaction_failure(e, permanent=False) for place, e in errors.items() if e.code() in NOT_THERE}
        if not refused and told.code() in NOT_THERE:  # the broker does not say which topic
            refused = dict.fromkeys(range(count), _transaction_failure(told, permanent=False))
        if refused:
            self.close()
            return Outcome(refused, set(range(max(refused) + 1)) - set(refused))
        raise self._away(error) from error

    def _consumer(self) -> Consumer:
        return Consumer(self.broker.settings(group_id=self.group, enable_auto_commit=False, isolation_level="read_committed"))

    def _away(self, error: KafkaException) -> DestinationUnavailable:
        self.close()
        return DestinationUnavailable(f"Kafka at {self.broker.servers} has not done a transaction: {error.args[0].str()}.")

    def close(self) -> None:
        """Close the connection. The next sender that connects aborts an open transaction; else its time-out does."""
        if self._producer is not None:
            self._producer.purge()
        self._producer = None


def _place(flight: Flight) -> TopicPartition:
    """Where the number of a flight is kept: beside its first topic, because the broker keeps offsets of topics that are there."""
    return TopicPartition(min(message.topic for message in flight.messages), 0)


def _transaction_told(errors: dict[int, KafkaError], place: int, error: KafkaError | None, _message: Any) -> None:
    if error is not None:
        errors[place] = error


def _transaction_failure(error: KafkaError, *, permanent: bool) -> SendFailure:
    return SendFailure(f"KafkaError {error.name()}", error.str(), permanent)
