"""Messages of an outbox to Kafka topics, at least once: in order per key, with the id that they were stored with as a header.

The producer is idempotent and leaves no gaps: nothing behind a message that the broker refuses arrives before it. Called by the dispatcher.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from confluent_kafka import KafkaError, KafkaException, Producer

from checkpoint import given
from checkpoint.errors import DestinationUnavailable
from dedup.kafka.broker import Broker
from dedup.keys import MESSAGE_ID_PROPERTIES
from dedup.outbox.destination import Failure, Outcome
from dedup.outbox.message import ID_HEADER, Message
from dedup.outbox.store import Line
from dedup.settings import TOPICS

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


def headers_of(message: Message) -> list[tuple[str, str | bytes | None]]:
    """The headers as they are sent: the id, and the message's own without any other id."""
    if not message.headers:
        return [(ID_HEADER, message.id)]
    return [(ID_HEADER, message.id), *((name, value) for name, value in message.headers if name not in MESSAGE_ID_PROPERTIES)]


class Topics:
    """A Kafka cluster as a destination.

    Args:
        broker: its address, or a `Broker`.
        settings: of librdkafka, where an address is given.
        timeout: seconds within which the messages of one turn have to be acknowledged.
    """

    parallel: ClassVar[bool] = True

    def __init__(self, broker: Broker | str, settings: Mapping[str, Any] | None = None, *, timeout: float = 60.0) -> None:
        given.check(TOPICS, locals())
        self.broker, self.timeout = broker if isinstance(broker, Broker) else Broker(broker, settings), float(timeout)
        self._idle: list[_Sender] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": []}

    def __repr__(self) -> str:
        return f"Topics({self.broker!r})"

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send these and wait for the broker; turns that are sent at once have a producer each.

        Raises:
            DestinationUnavailable: it has not acknowledged all of them in time.

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
        """Let go of the connections."""
        while self._idle:
            self._idle.pop().close()


class _Sender:
    """A producer, for one turn at a time."""

    def __init__(self, broker: Broker, timeout: float) -> None:
        self.broker, self.timeout = broker, timeout
        self._producer: Producer | None = None
        self._refused: list[tuple[_Same, KafkaError]] = []  # of the producer at hand

    def send(self, messages: Sequence[Message]) -> Outcome:
        """As `Topics.send`."""
        outcome = Outcome()
        self._hand_over(messages, outcome)
        self._wait()
        errors = self._errors(messages)
        suspects = sorted(place for place, error in errors.items() if error.code() in OWN_FAULT)
        if any(error.code() in COLLATERAL or error.fatal() for error in errors.values()) or suspects:
            self._drop()
        for place, error in errors.items():
            if error.code() in COLLATERAL:
                outcome.unsent.add(place)
            elif place not in suspects:
                outcome.failed[place] = _failure(error)
        # A broker refuses batches: which of their messages it meant is found by sending each of them alone.
        self._one_by_one(messages, suspects, outcome)
        return outcome

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
                    raise DestinationUnavailable(f"Kafka at {self.broker.servers} takes no messages: {told.str()}.") from error
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
        while not _served(producer):
            if time.monotonic() > until:
                raise self._away()

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
            self._producer = Producer(own, logger=log)
        return self._producer

    def _away(self) -> DestinationUnavailable:
        self._drop()
        return DestinationUnavailable(f"Kafka at {self.broker.servers} has not acknowledged all messages within {self.timeout:g} s.")

    def _drop(self) -> None:
        """Forget the producer: what it still has in flight arrives as copies of what is sent again."""
        if self._producer is not None:
            self._producer.purge()
            _served(self._producer)
        self._producer = None

    def close(self) -> None:
        """Let go of the connection."""
        self._drop()


def _served(producer: Producer) -> bool:
    """Whether all of its messages are acknowledged or have failed, after waiting a moment for that."""
    try:
        return producer.flush(0.2) == 0
    except KafkaException as error:
        told: KafkaError = error.args[0]
        if not told.fatal():
            raise
    producer.purge()  # what is behind a refused message will not be sent by this producer
    try:
        producer.flush(1.0)
    except KafkaException as error:  # it says again that it has given up
        log.debug("%s", error)
    return len(producer) == 0


def _told(refused: list[tuple[_Same, KafkaError]], error: KafkaError | None, message: Any) -> None:
    """One function for all messages: one for each would cost more than sending them."""
    if error is not None:
        refused.append(((message.topic(), message.key(), message.value() or b""), error))


def _failure(error: KafkaError) -> Failure:
    return Failure(f"KafkaError {error.name()}", error.str(), permanent=error.code() in OWN_FAULT)
