"""The aio client of azure-eventhub with which the runner receives. It counts links, and reports each link that cannot be opened.

This module reads private fields of the client, because it has no public ones for either.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from azure.eventhub import TransportType
from azure.eventhub.aio import EventHubConsumerClient
from azure.eventhub.exceptions import AuthenticationError

from dedup.eventhub.connection import Connection, made
from dedup.eventhub.reader import pause_after

UNAUTHORIZED = b"amqp:unauthorized-access"


class Client(EventHubConsumerClient):
    """A client that counts the links that it opens. Behind each new link the hub may be another one of the same name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.links: Counter[str] = Counter()
        """Partition -> links so far."""

    def _create_consumer(self, consumer_group: str, partition_id: str, *args: Any, **options: Any) -> Any:
        consumer: Any = super()._create_consumer(consumer_group, partition_id, *args, **options)
        opens = consumer._create_handler

        def counted(*auth: Any) -> None:
            self.links[partition_id] += 1
            opens(*auth)

        consumer._create_handler = counted
        consumer._open = Reported(consumer)
        return consumer


class Reported:
    """Opens the link of a consumer. An error goes the way of an error of an open link: the client tries again, and then calls `on_error`.

    The client by itself takes an error of a link that is not open for the end of the consumer. It tells nobody, and opens the next one at
    once, for ever.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer, self._opens, self._failed = consumer, consumer._open, 0

    async def __call__(self) -> None:
        """Open the link if it is not open. Wait after an error, longer each time, and raise it."""
        try:
            await self._opens()
        except Exception as error:
            await asyncio.sleep(pause_after(self._failed))
            self._failed += 1
            self._consumer.running = True  # by this the client tells an error from an end
            if getattr(error, "condition", None) == UNAUTHORIZED:  # its token is new, so another one would be refused, too
                raise AuthenticationError(str(error), error) from error  # type: ignore[arg-type]  # as the client makes its own
            raise
        self._failed = 0


def aio_client(there: Connection, **options: Any) -> Client:
    """Make a client with these options of its own. Raises ValueError for wrong settings."""
    options |= {"transport_type": TransportType.AmqpOverWebsocket} if there.websocket else {}
    if there.secret is not None:
        client = Client.from_connection_string(there.secret, there.group, eventhub_name=there.hub, **options)
        assert isinstance(client, Client)
        return client
    extra = {} if there.tls else {"use_tls": False}
    credential: Any = Waited(made(there.credential))
    return Client(there.namespace, there.hub, there.group, credential, **options, **extra)


class Waited:
    """A token credential for the aio client. It calls the plain credential in a thread, so that the event loop does not wait."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        """Return the token of the plain credential."""
        return await asyncio.to_thread(self._credential.get_token, *scopes, **options)

    async def close(self) -> None:
        """Do nothing: the credential belongs to the caller."""
