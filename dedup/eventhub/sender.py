"""Send to an event hub for a publisher, with the producer client of azure-eventhub."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from azure.eventhub import EventData, EventDataBatch, EventHubProducerClient, TransportType
from azure.eventhub._pyamqp.types import TYPE, VALUE, AMQPTypes
from azure.eventhub.exceptions import EventDataSendError, EventHubError

from checkpoint import given
from checkpoint.errors import ConfigError, SourceUnavailable
from deadletter.redact import redact
from dedup.core.settings import HUB_SENDER
from dedup.eventhub.connection import Connection, hidden, made
from dedup.eventhub.namespace import condition, is_missing, is_refused, is_without_token, told
from dedup.eventhub.outbox import OWN_FAULT
from dedup.publishing.events import GATEWAY, Property, Stored

TOO_LARGE = "amqp:link:message-size-exceeded"

GIVE_UP = "give the event up with `dedup publisher discard`."

UNLIMITED = 2**62
"""More bytes than any event has."""


class Sender:
    """One event hub, for `Publisher(to=...)`. It connects at its first use. One thread may use it at a time.

    A Publisher refuses keys of more than `longest_key` characters where the service chooses the partition.

    Args:
        connection: `Connection.of(...)`, `Connection.entra(...)`, or a connection string.
        hub: name of the event hub, if the connection string names none.
        timeout: how long the service may take to answer a batch.
        client: further arguments of EventHubProducerClient: proxies, retries.

    Raises:
        ConfigError: no hub is named.
    """

    longest_key = 128

    def __init__(self, connection: Connection | str, hub: str | None = None, *, timeout: given.Duration = 60.0, **client: Any) -> None:
        given.check(HUB_SENDER, locals())
        self.timeout = given.to_seconds(timeout)
        self.connection = Connection.of(connection, hub) if isinstance(connection, str) else connection
        self._options, self._client, self._largest = client, list[EventHubProducerClient](), 0

    def __repr__(self) -> str:
        return f"Sender({self.connection!r})"

    @property
    def source(self) -> str:
        """The host name of the namespace."""
        return self.connection.source

    @property
    def topic(self) -> str:
        """The name of the event hub."""
        return self.connection.hub

    def partitions(self) -> int:
        """Return how many partitions the hub has. Raises SourceUnavailable, ConfigError."""
        return len(self._asked(lambda client: client.get_partition_ids()))

    def largest(self) -> int:
        """Return the largest size of an event in bytes. Raises SourceUnavailable, ConfigError."""
        self._largest = self._largest or self._asked(lambda client: client.create_batch().max_size_in_bytes)
        return self._largest

    def send(self, partition: int, events: Sequence[Stored]) -> int:
        """Send one batch of as many events as fit, with one key if the service chooses the partition. Return how many.

        If the service refuses what an event is, it refuses the batch. Then the first half of the batch is sent, and so on.

        Raises:
            SourceUnavailable: it is not known whether the service has them.
            ConfigError: the service refuses the first event for good, or all of them.

        Crash: the service has the batch, or a first part of it, once or several times, or has it not.
        """
        key = events[0].key
        some = events if partition != GATEWAY else list(takewhile(lambda event: event.key == key, events))
        return int(self._asked(lambda client: _sent(client, partition, key, some, self.timeout)))

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        while self._client:
            self._client.pop().close()

    def _asked(self, question: Any) -> Any:
        try:
            if not self._client:
                self._client.append(_producer(self.connection, self._options))
            return question(self._client[0])
        except (EventHubError, OSError) as error:
            self.close()
            raise _explained(error, self.connection) from None


def _sent(client: EventHubProducerClient, partition: int, key: str | None, events: Sequence[Stored], timeout: float) -> int:
    place: dict[str, Any] = {"partition_key": key} if partition == GATEWAY else {"partition_id": str(partition)}
    batch = client.create_batch(**place)
    count = sum(1 for _ in takewhile(lambda event: _added(batch, event), events))
    if not count:
        raise _unsendable(events[0])
    try:
        client.send_batch(batch, timeout=timeout)
    except EventDataSendError as error:
        if error.error not in OWN_FAULT:
            raise
        if count == 1:
            raise _unwanted(events[0], error) from None
        return _sent(client, partition, key, events[: count // 2], timeout)
    return count


def _added(batch: EventDataBatch, event: Stored) -> bool:
    try:
        batch.add(_as_sent(event))
    except ValueError:
        return False
    return True


def _unsendable(event: Stored) -> ConfigError:
    """Why an empty batch does not take it. The client raises ValueError for what it cannot encode, too."""
    who = _named(event)
    try:
        EventDataBatch(max_size_in_bytes=UNLIMITED).add(_as_sent(event))
    except ValueError as error:
        return ConfigError(f"{who} cannot be encoded as AMQP: {redact(str(error))} To go on, {GIVE_UP}")
    return ConfigError(f"{who} is larger than the hub takes. Raise the limit of the hub, or {GIVE_UP}")


def _unwanted(event: Stored, error: EventDataSendError) -> ConfigError:
    """Why the service does not take it: what it answers to this event alone would be its answer each time."""
    said = redact(str(error)).split("\n")[0]
    return ConfigError(f"{_named(event)} is refused by Event Hubs ({error.error}): {said} To go on, {GIVE_UP}")


def _named(event: Stored) -> str:
    return f"Event {event.sequence} of partition {event.partition} ({event.message_id})"


def _as_sent(event: Stored) -> Any:
    data: Any = EventData(event.body)
    data.message_id = event.message_id
    data.properties = {name: _typed(value) for name, value in event.named.items()}
    if event.content_type is not None:
        data.content_type = event.content_type
    return data


def _typed(value: Property) -> Any:
    """Whole numbers as AMQP's long, whatever their size: the client takes a plain one for 32 bits, and refuses a larger one."""
    return {TYPE: AMQPTypes.long, VALUE: value} if isinstance(value, int) and not isinstance(value, bool) else value


def _producer(there: Connection, options: dict[str, Any]) -> EventHubProducerClient:
    options = {**options, **({"transport_type": TransportType.AmqpOverWebsocket} if there.websocket else {})}
    client: Any = EventHubProducerClient
    try:
        if there.secret is not None:
            found: EventHubProducerClient = client.from_connection_string(there.secret, eventhub_name=there.hub, **options)
        else:
            extra = {} if there.tls else {"use_tls": False}
            found = client(there.namespace, there.hub, made(there.credential), **options, **extra)
        return found
    except ValueError as error:
        said = hidden(str(error), there)
        raise ConfigError(f"The client of Event Hubs refuses the settings of {there.hub!r} at {there.namespace}: {said}") from None


def _explained(error: Exception, there: Connection) -> SourceUnavailable | ConfigError:
    """The client's error as ours, without anything secret."""
    said, where = told(error, there), f"{there.hub!r} at {there.namespace}"
    if is_without_token(error):
        return ConfigError(f"The credential gets no token from Entra ID to send to {where}: {said}")
    if is_refused(error):
        return ConfigError(f"Event Hubs refuses to send to {where}: {said}. Check the key, or the role Azure Event Hubs Data Sender.")
    if is_missing(error):
        return ConfigError(f"There is no event hub or partition {where}: {said}")
    if TOO_LARGE.endswith(condition(error) or "?"):
        return ConfigError(f"An event is too large for {where}: {said} Give it up with `dedup publisher discard`.")
    return SourceUnavailable(f"Event Hubs could not be sent to, {where}: {said}")
