"""The aio client of azure-eventhub for the same connection settings as everywhere else."""

from __future__ import annotations

import asyncio
from typing import Any

from azure.eventhub import TransportType
from azure.eventhub.aio import EventHubConsumerClient

from dedup.eventhub.settings import Connection, made


def aio_client(there: Connection, **options: Any) -> EventHubConsumerClient:
    """A new client; `options` are its own. Raises ValueError where the settings make none."""
    options |= {"transport_type": TransportType.AmqpOverWebsocket} if there.websocket else {}
    if there.secret is not None:
        return EventHubConsumerClient.from_connection_string(there.secret, there.group, eventhub_name=there.hub, **options)
    extra = {} if there.tls else {"use_tls": False}
    credential: Any = Waited(made(there.credential))
    return EventHubConsumerClient(there.namespace, there.hub, there.group, credential, **options, **extra)


class Waited:
    """A token credential for the aio client, which asks in its loop: the plain one answers in a thread."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        """As the plain one."""
        return await asyncio.to_thread(self._credential.get_token, *scopes, **options)

    async def close(self) -> None:
        """It is the caller's."""
