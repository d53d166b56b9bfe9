"""Messages of an outbox to Kafka topics, at least once: in order per key, with the id that they were stored with as a header.

The producer is idempotent and leaves no gaps: nothing behind a message that the broker refuses arrives before it. Called by the dispatcher.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from checkpoint.errors import DestinationUnavailable
from dedup.kafka.broker import Broker
from dedup.keys import MESSAGE_ID_PROPERTIES
from dedup.outbox.destination import Failure, Outcome
from dedup.outbox.message import ID_HEADER, Message
from dedup.outbox.store import Line

log = logging.getLogger("dedup")

OWN_FAULT = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
    }
)
"""What a broker says of a batch with a message that it will never take."""

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


def headers_of(message: Message) -> list[tuple[str, str | bytes | None]]:
    """The headers as they are sent: the id, and the message's own without any other id."""
    own: list[tuple[str, str | bytes | None]] = (
        [(name, value) for name, value in message.headers if name not in MESSAGE_ID_PROPERTIES] if message.headers else []
    )
    return [(ID_HEADER, message.id.encode()), *own]


class Topics:
    """A Kafka cluster as a destination.

    Args:
        broker: its address, or a `Broker`.
        settings: of librdkafka, where an address is given.
        timeout: seconds within which the messages of one turn have to be acknowledged.
    """

    def __init__(self, broker: Broker | str, settings: Mapping[str, Any] | None = None, *, timeout: float = 60.0) -> None:
        self.broker, self.timeout = broker if isinstance(broker, Broker) else Broker(broker, settings), timeout
        self._producer: Producer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_producer": None}

    def __repr__(self) -> str:
        return f"Topics({self.broker!r})"

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send these and wait for the broker.

        Raises:
            DestinationUnavailable: it has not acknowledged all of them in time.

        Crash: what was sent is sent again, with the same ids.
        """
        outcome, errors = Outcome(), dict[int, KafkaError]()
        self._hand_over(messages, outcome, errors)
        self._wait()
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

    def _hand_over(self, messages: Sequence[Message], outcome: Outcome, errors: dict[int, KafkaError]) -> None:
        producer, stopped = self._connected(), set[Line]()
        for place, message in enumerate(messages):
            if message.line in stopped:
                outcome.unsent.add(place)
                continue
            try:
                self._produce(producer, message, partial(_told, errors, place))
            except KafkaException as error:
                told: KafkaError = error.args[0]
                if told.code() not in OWN_FAULT:
                    raise DestinationUnavailable(f"Kafka at {self.broker.servers} takes no messages: {told.str()}.") from error
                outcome.failed[place] = _failure(told)
                if message.line is not None:
                    stopped.add(message.line)

    def _produce(self, producer: Producer, message: Message, told: Any) -> None:
        until = time.monotonic() + self.timeout
        while True:
            try:
                return producer.produce(message.topic, message.body, message.key, on_delivery=told, headers=headers_of(message))
            except BufferError:
                if time.monotonic() > until:
                    raise self._away() from None
                producer.poll(0.1)

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
            message, errors = messages[place], dict[int, KafkaError]()
            if message.line in stopped and any(p < place and messages[p].line == message.line for p in (*outcome.failed, *outcome.unsent)):
                outcome.unsent.add(place)
                continue
            self._produce(self._connected(), message, partial(_told, errors, place))
            self._wait()
            if errors:
                self._drop()
                outcome.failed[place] = _failure(errors[place])
                stopped.add(message.line)

    def _connected(self) -> Producer:
        if self._producer is None:
            own = {**SETTINGS, **self.broker.settings(delivery_report_only_error=True)}
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


def _told(errors: dict[int, KafkaError], place: int, error: KafkaError | None, _message: Any) -> None:
    if error is not None:
        errors[place] = error


def _failure(error: KafkaError) -> Failure:
    return Failure(f"KafkaError {error.name()}", error.str(), permanent=error.code() in OWN_FAULT)
