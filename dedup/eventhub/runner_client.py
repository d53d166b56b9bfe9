"""The aio client of azure-eventhub for the same connection settings as everywhere else."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from azure.eventhub import TransportType
from azure.eventhub.aio import EventHubConsumerClient

from dedup.eventhub.settings import Connection, made


class Client(EventHubConsumerClient):
    """Counts the links that it opens, again after each that broke: behind every one the hub may be another one of the same name.

    The client tells nobody of them, so this looks inside it. Where it does not find what it knows, the count stays at zero.
    """

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
        return consumer


def aio_client(there: Connection, **options: Any) -> Client:
    """A new client; `options` are its own. Raises ValueError where the settings make none."""
    options |= {"transport_type": TransportType.AmqpOverWebsocket} if there.websocket else {}
    if there.secret is not None:
        client = Client.from_connection_string(there.secret, there.group, eventhub_name=there.hub, **options)
        assert isinstance(client, Client)
        return client
    extra = {} if there.tls else {"use_tls": False}
    credential: Any = Waited(made(there.credential))
    return Client(there.namespace, there.hub, there.group, credential, **options, **extra)


class Waited:
    """A token credential for the aio client, which asks in its loop: the plain one answers in a thread."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        """As the plain one."""
        return await asyncio.to_thread(self._credential.get_token, *scopes, **options)

    async def close(self) -> None:
        """It is the caller's."""
