"""Messages of an outbox to Kafka exactly once: what was sent, and that it was sent, are one Kafka transaction.

The progress is an offset of a group that nobody else uses, with the flight's token, committed in the transaction of the messages themselves
and read back by who comes after: a mark in another database, made after the commit, could be lost when the process dies in between. Called
by the dispatcher.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from checkpoint import given
from checkpoint.errors import DestinationUnavailable, Fenced
from dedup.kafka.broker import Broker
from dedup.kafka.outbox import OWN_FAULT, SETTINGS, headers_of
from dedup.outbox.destination import Failure, Outcome
from dedup.outbox.exactly_once import Flight
from dedup.settings import TRANSACTIONAL_TOPICS

log = logging.getLogger("dedup")

FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})


class TransactionalTopics:
    """A Kafka cluster that takes messages in transactions.

    Args:
        broker: its address, or a `Broker`.
        name: of the outbox: one dispatcher sends under a name, and an older one is fenced by the broker.
        timeout: seconds within which a transaction has to be done.
    """

    def __init__(self, broker: Broker | str, name: str, settings: dict[str, Any] | None = None, *, timeout: float = 60.0) -> None:
        given.check(TRANSACTIONAL_TOPICS, locals())
        self.broker, self.timeout = broker if isinstance(broker, Broker) else Broker(broker, settings), float(timeout)
        self.group = f"dedup-outbox-{name}"
        self._producer: Producer | None = None

    def connect(self) -> None:
        """Become the one that sends under this name; whoever was it before is fenced, and its open transaction is over.

        Raises:
            DestinationUnavailable: the broker does not answer.
        """
        if self._producer is not None:
            return
        own = {n: v for n, v in SETTINGS.items() if n not in ("enable.gapless.guarantee", "message.timeout.ms")}
        limits = {"transactional_id": self.group, "transaction_timeout_ms": int(self.timeout * 1000), "delivery_report_only_error": True}
        producer = Producer({**own, **self.broker.settings(**limits)}, logger=log)
        try:
            producer.init_transactions(self.timeout)
        except KafkaException as error:
            raise self._away(error) from error
        self._producer = producer

    def has(self, flight: Flight) -> bool:
        """Whether the transaction of this flight was committed. Ask after `connect`: then nobody else can commit it any more.

        The number alone would not tell: a store that was restored gives numbers again.
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
        """Send all messages of a flight and its number in one transaction. Where one cannot be sent, none is.

        Raises:
            DestinationUnavailable: whether it was committed is not known; `has` tells, after `connect`.
            Fenced: another dispatcher has connected, or the transaction was open for longer than the time-out.

        Crash: all of it, or nothing; `has` tells which.
        """
        producer, errors = self._producer, dict[int, KafkaError]()
        assert producer is not None
        try:
            producer.begin_transaction()
            refused = self._hand_over(producer, flight, errors)
            if not refused:
                self._commit(producer, flight)
                return Outcome()
            self.close()
            return Outcome(refused)
        except KafkaException as error:
            return self._ended(producer, error, errors)

    def _hand_over(self, producer: Producer, flight: Flight, errors: dict[int, KafkaError]) -> dict[int, Failure]:
        """What the client itself refuses; the first one is enough."""
        for place, message in enumerate(flight.messages):
            try:
                told = partial(_told, errors, place)
                producer.produce(message.topic, message.body, message.key, on_delivery=told, headers=headers_of(message))
            except KafkaException as error:
                if error.args[0].code() not in OWN_FAULT:
                    raise
                return {place: _failure(error.args[0])}
        return {}

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

    def _ended(self, producer: Producer, error: KafkaException, errors: dict[int, KafkaError]) -> Outcome:
        told: KafkaError = error.args[0]
        if told.code() in FENCED:
            self.close()
            raise Fenced(
                f"Another dispatcher has connected as {self.group!r}, and goes on: stop this one. Or this one was silent for longer than "
                f"{self.timeout:g} s, and the broker has given its transaction up: start it again."
            ) from error
        with suppress(KafkaException, SystemError):  # the client's way to say again that it has failed, while it tells the messages
            producer.flush(1.0)
        refused = {place: _failure(e) for place, e in errors.items() if e.code() in OWN_FAULT}
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
        """Let go of the connection; an open transaction is aborted by whoever connects next, or by its time-out."""
        if self._producer is not None:
            self._producer.purge()
        self._producer = None


def _place(flight: Flight) -> TopicPartition:
    """Where the number of a flight is kept: beside its first topic, because the broker keeps offsets of topics that are there."""
    return TopicPartition(min(message.topic for message in flight.messages), 0)


def _told(errors: dict[int, KafkaError], place: int, error: KafkaError | None, _message: Any) -> None:
    if error is not None:
        errors[place] = error


def _failure(error: KafkaError) -> Failure:
    return Failure(f"KafkaError {error.name()}", error.str(), permanent=True)
