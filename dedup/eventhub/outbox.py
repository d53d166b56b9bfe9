"""Send messages of an outbox to event hubs over AMQP, at least once: in order per key, with the stored id as the message id.

AMQP has no idempotent producer. The client's own retries, and a lost acknowledgement, send duplicates with the same id. The dispatcher
calls this module.

`partition_of` computes the hash with which the service spreads keys, Jenkins' lookup3. So dedup agrees with senders that leave the choice
to the service. Microsoft's clients for .NET, Java and Rust compute the same numbers; their authors took the code from the service.
azure-eventhub's own buffered producer differs from them if the hash is negative. Source: Azure/azure-sdk-for-net, pull request 25081, and
its PartitionResolverTests, read 2026-11-22.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from azure.eventhub import EventData, EventHubProducerClient, TransportType
from azure.eventhub.exceptions import EventDataSendError, EventHubError

from checkpoint.errors import ConfigError, DestinationUnavailable
from dedup.core.keys import MESSAGE_ID_PROPERTIES
from dedup.core.messages import Line, Message
from dedup.eventhub.connection import Connection, hidden, made
from dedup.outbox.destination import Outcome, SendFailure

Place = tuple[int, Message]

KEY = b"x-opt-partition-key"
"""The annotation that says which key an event has. The service keeps it, also where it does not choose the partition."""

OWN_FAULT = frozenset({"argument-error", "argument-out-of-range", "invalid-field", "decode-error", "link:message-size-exceeded"})
"""Conditions, without what stands before the colon, that are about what an event is. All others are about the service.

Source: https://learn.microsoft.com/en-us/java/api/com.azure.core.amqp.exception.amqperrorcondition, read 2026-11; and
azure-eventhub 5.15, `_constants.py` and `_pyamqp/error.py`, which do not try these again.
"""

LOOK_SECONDS = 60.0
"""How long the number of a hub's partitions is believed."""

_BITS = 0xFFFFFFFF
_WORDS = struct.Struct("<III")


class SendingHubs:
    """The event hubs of a namespace as the destination of messages. The topic of a message is the name of its hub.

    Args:
        connection: the namespace. Its hub and its consumer group do not matter.
        options: of the producer clients.
    """

    def __init__(self, connection: Connection, **options: Any) -> None:
        self.connection, self._options = connection, options
        self._clients: dict[str, EventHubProducerClient] = {}
        self._partitions: dict[str, tuple[list[str], float]] = {}  # of each hub, and until when that is believed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "_partitions": {}}

    def __repr__(self) -> str:
        return f"SendingHubs({self.connection!r})"

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send messages by partition and wait for each batch. A batch has all waiting keys of its partition, each in its order.

        A hub that takes no message does not hold back other hubs, and none of its messages counts as failed.

        Raises:
            DestinationUnavailable: no batch was acknowledged. What was sent is sent again, with the same ids.

        Crash: as that.
        """
        outcome, topics = Outcome(), defaultdict[str, list[Place]](list)
        for place in enumerate(messages):
            topics[place[1].topic].append(place)
        sent, away = set[int](), dict[str, Exception]()
        for topic, places in topics.items():
            try:
                for partition, some in self._spread(topic, places).items():
                    self._send_to(topic, partition, some, outcome, sent)
            except (EventHubError, OSError) as error:
                self._forget(topic)
                away[topic] = error
        if away and not sent:
            raise DestinationUnavailable(self._said(*next(iter(away.items()))))
        for topic, why in away.items():
            self._leave(topic, why, topics[topic], sent, outcome)
        return outcome

    def _leave(self, topic: str, error: Exception, places: Sequence[Place], sent: set[int], outcome: Outcome) -> None:
        """Messages of a hub that did not take all of them wait; where it took none, it is away."""
        outcome.unsent.update(place for place, _ in places if place not in sent and place not in outcome.failed)
        if sent.isdisjoint(place for place, _ in places):
            outcome.away[topic] = self._said(topic, error)

    def _spread(self, topic: str, places: Sequence[Place]) -> dict[str | None, list[Place]]:
        """Partition -> its messages, ascending; None: those without a key, which the service spreads."""
        found, partitions = defaultdict[str | None, list[Place]](list), self._partitions_of(topic)
        for place in places:
            key = place[1].key
            found[None if key is None else partitions[partition_of(key_text(key), len(partitions))]].append(place)
        return found

    def _partitions_of(self, topic: str) -> list[str]:
        known, until = self._partitions.get(topic, ([], 0.0))
        if time.monotonic() < until:
            return known
        found = list(self._client(topic).get_partition_ids())
        if known and found != known:
            self._clients.pop(topic).close()  # the client keeps to those that it has seen first
        self._partitions[topic] = found, time.monotonic() + LOOK_SECONDS
        return found

    def _said(self, topic: str, error: Exception) -> str:
        told = hidden(str(error), self.connection).split("\n")[0]
        return f"Event hub {topic!r} at {self.connection.namespace} has not taken the messages: {type(error).__name__}: {told}."

    def _send_to(self, topic: str, partition: str | None, left: Sequence[Place], outcome: Outcome, sent: set[int]) -> None:
        """Batch after batch, so that none arrives before an earlier one; behind what no batch can hold nothing of its key is sent."""
        client, stopped = self._client(topic), set[Line]()
        while left:
            batch = client.create_batch(partition_id=partition)
            inside, left = _fill(batch, left, stopped, outcome)
            if inside and _refused(client, batch) is not None:
                self._one_by_one(partition, inside, stopped, outcome, sent)
            else:
                sent.update(place for place, _ in inside)

    def _one_by_one(self, partition: str | None, places: Sequence[Place], stopped: set[Line], outcome: Outcome, sent: set[int]) -> None:
        """The service refuses whole batches: which of their messages it means is found by sending each of them alone."""
        for place, message in places:
            if message.line in stopped:
                outcome.unsent.add(place)
                continue
            client = self._client(message.topic)
            batch = client.create_batch(partition_id=partition)
            batch.add(event_of(message))
            if (error := _refused(client, batch)) is None:
                sent.add(place)
            else:
                told = hidden(str(error), self.connection)
                outcome.failed[place] = SendFailure(f"{type(error).__name__} {error.error}", told, permanent=False, alone=True)
                if message.line is not None:
                    stopped.add(message.line)

    def _client(self, topic: str) -> EventHubProducerClient:
        if topic not in self._clients:
            self._clients[topic] = self._new_client(topic)
        return self._clients[topic]

    def _new_client(self, topic: str) -> EventHubProducerClient:
        there = self.connection
        options: dict[str, Any] = dict(self._options)
        options |= {"transport_type": TransportType.AmqpOverWebsocket} if there.websocket else {}
        try:
            if there.secret is not None:
                return EventHubProducerClient.from_connection_string(there.secret, eventhub_name=topic, **options)
            options |= {} if there.tls else {"use_tls": False}
            return EventHubProducerClient(there.namespace, topic, made(there.credential), **options)
        except ValueError as error:
            raise ConfigError(f"The client of Event Hubs refuses the settings of {topic!r} at {there.namespace}: {error}") from None

    def _forget(self, topic: str) -> None:
        """Ask for its partitions, and connect, anew."""
        self._partitions.pop(topic, None)
        if client := self._clients.pop(topic, None):
            client.close()

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._partitions.clear()


def key_text(key: bytes) -> str:
    """Return the key as text, because keys of AMQP are text: as UTF-8, or in hex if it is not UTF-8."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.hex()


def event_of(message: Message) -> EventData:
    """Return the event that is sent. AMQP has no null body, so it becomes an empty one."""
    event = EventData(message.body or b"")
    event.message_id = message.id
    event.properties = {name: value for name, value in message.headers if name not in MESSAGE_ID_PROPERTIES}
    if message.key is not None:
        event.raw_amqp_message.annotations = {KEY: key_text(message.key)}
    return event


def _refused(client: EventHubProducerClient, batch: Any) -> EventHubError | None:
    """Send the batch; what the service said where it refuses it for the fault of an event. Raises everything else."""
    try:
        client.send_batch(batch)
    except EventDataSendError as error:
        if error.error not in OWN_FAULT:
            raise
        return error
    return None


def _fill(batch: Any, places: Sequence[Place], stopped: set[Line], outcome: Outcome) -> tuple[list[Place], Sequence[Place]]:
    """Put as many as fit into the batch; returns these and those after them. What does not even fit alone has failed, and stops its key."""
    inside: list[Place] = []
    for count, (place, message) in enumerate(places):
        if message.line in stopped:
            outcome.unsent.add(place)
            continue
        try:
            batch.add(event_of(message))
        except ValueError:
            if inside:
                return inside, places[count:]
            outcome.failed[place] = _too_large(message)
            if message.line is not None:
                stopped.add(message.line)
        else:
            inside.append((place, message))
    return inside, ()


def _too_large(message: Message) -> SendFailure:
    return SendFailure("TooLarge", f"{len(message.body or b'')} bytes are more than {message.topic!r} takes", permanent=True)


@lru_cache(65_536)
def partition_of(key: str, partitions: int) -> int:
    """Return the number of the key's partition."""
    return abs(hash_code(key)) % partitions


def hash_code(key: str) -> int:
    """Return the hash of a key as a signed 16-bit number."""
    data = key.encode()
    a = b = c = (0xDEADBEEF + len(data)) & _BITS
    last = max(0, len(data) - 1) // 12 * 12
    for at in range(0, last, 12):
        a, b, c = _mixed(*_added((a, b, c), data[at : at + 12]))
    if data:
        a, b, c = _final(*_added((a, b, c), data[last:]))
    code = (b ^ c) & 0xFFFF
    return code - 0x10000 if code & 0x8000 else code


def _added(state: tuple[int, int, int], piece: bytes) -> tuple[int, ...]:
    return tuple(have + word & _BITS for have, word in zip(state, _WORDS.unpack(piece.ljust(12, b"\0")), strict=True))


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (4, 6, 8, 16, 19, 4):
        a, b, c = b, c + b & _BITS, (a - c & _BITS) ^ _rotated(c, turn)
    return a, b, c


def _final(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c, a, b = a, b, (c ^ b) - _rotated(b, turn) & _BITS
    return c, a, b  # seven turns of three


def _rotated(word: int, turn: int) -> int:
    return (word << turn | word >> 32 - turn) & _BITS
