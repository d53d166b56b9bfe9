"""Messages of an outbox to event hubs over AMQP, at least once: in order per key, with the stored id as the message id.

AMQP has no idempotent producer: the client's own retries, and an acknowledgement that was lost, send copies with the same id.
Called by the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from azure.eventhub import EventData, EventHubProducerClient, TransportType
from azure.eventhub.exceptions import EventHubError

from checkpoint.errors import ConfigError, DestinationUnavailable
from dedup.eventhub.settings import Connection, hidden, made
from dedup.keys import MESSAGE_ID_PROPERTIES
from dedup.outbox.destination import Failure, Outcome
from dedup.outbox.message import Message

Place = tuple[int, Message]


class SendingHubs:
    """The event hubs of a namespace as a destination: a message's topic is the name of its hub.

    Args:
        connection: how the namespace is reached; its hub and consumer group do not matter.
        options: of the producer clients.
    """

    def __init__(self, connection: Connection, **options: Any) -> None:
        self.connection, self._options = connection, options
        self._clients: dict[str, EventHubProducerClient] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    def __repr__(self) -> str:
        return f"SendingHubs({self.connection!r})"

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send these, key by key, and wait for each batch.

        Raises:
            DestinationUnavailable: a batch was not acknowledged. What was sent is sent again, with the same ids.

        Crash: as that.
        """
        outcome, placed = Outcome(), sorted(enumerate(messages), key=lambda p: (p[1].topic, p[1].key is not None, p[1].key or b""))
        for (topic, key), group in groupby(placed, key=lambda p: (p[1].topic, p[1].key)):
            try:
                self._send_line(topic, key, list(group), outcome)
            except (EventHubError, OSError) as error:
                self.close()
                raise DestinationUnavailable(self._said(topic, error)) from None
        return outcome

    def _said(self, topic: str, error: Exception) -> str:
        told = hidden(str(error), self.connection).split("\n")[0]
        return f"Event hub {topic!r} at {self.connection.namespace} has not taken the messages: {type(error).__name__}: {told}."

    def _send_line(self, topic: str, key: bytes | None, places: list[Place], outcome: Outcome) -> None:
        """Messages of one key, in their order; behind one that no batch can hold nothing of its key is sent."""
        client, left = self._client(topic), places
        while left:
            batch = client.create_batch(partition_key=partition_key(key))
            taken = _fill(batch, left)
            if not taken:
                place, message = left[0]
                outcome.failed[place] = Failure(
                    "TooLarge", f"{len(message.body or b'')} bytes are more than {topic!r} takes", permanent=True
                )
                taken = 1
                if key is not None:
                    outcome.unsent.update(p for p, _ in left[1:])
                    return
            else:
                client.send_batch(batch)
            left = left[taken:]

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
            raise ConfigError(f"The settings of {topic!r} at {there.namespace} make no client: {error}") from None

    def close(self) -> None:
        """Let go of connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def partition_key(key: bytes | None) -> str | None:
    """The key as text, which is what AMQP has: UTF-8, and hex where it is none."""
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key.hex()


def event_of(message: Message) -> EventData:
    """The event as it is sent. A null body has no counterpart in AMQP: it is sent as no bytes."""
    event = EventData(message.body or b"")
    event.message_id = message.id
    event.properties = {name: value for name, value in message.headers if name not in MESSAGE_ID_PROPERTIES}
    return event


def _fill(batch: Any, places: list[Place]) -> int:
    """Put as many as fit into the batch; returns how many."""
    for count, (_, message) in enumerate(places):
        try:
            batch.add(event_of(message))
        except ValueError:  # it is full
            return count
    return len(places)
