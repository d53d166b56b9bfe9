"""How to reach an event hub: its name and its credentials.

A pickled connection contains its secret, because executors connect with it. Its `repr` does not. All of this package uses this module.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from azure.eventhub import EventHubConsumerClient, TransportType, parse_connection_string

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.install import needs
from dedup.core.settings import CONNECTION

DEFAULT_GROUP = "$Default"


@dataclass(frozen=True)
class Connection:
    """An event hub and one of its consumer groups.

    Make one with `Connection.of` from a connection string, or with `Connection.entra` for Entra ID.
    """

    namespace: str  # host name, with a port only where TLS is off
    hub: str
    group: str = DEFAULT_GROUP
    secret: str | None = field(default=None, repr=False)  # the connection string
    credential: Any = field(default=None, repr=False)  # a token credential, or how to make one: a name
    websocket: bool = False
    tls: bool = True

    def __post_init__(self) -> None:
        given.check(CONNECTION, vars(self))

    @classmethod
    def of(cls, connection_string: str, hub: str | None = None, group: str = DEFAULT_GROUP, *, websocket: bool = False) -> Connection:
        """Make a connection from the connection string of a namespace, or of a hub (EntityPath).

        Raises:
            ConfigError: the text is no connection string, or neither it nor `hub` names a hub.
        """
        try:
            parsed = parse_connection_string(connection_string)
        except ValueError as error:
            raise ConfigError(f"The connection string of Event Hubs cannot be read: {error}") from None
        name = hub or parsed.eventhub_name
        if not name:
            raise ConfigError(
                "The connection string names no event hub: it has no EntityPath. Give hub= (in Spark the option eventHubName)."
            )
        tls = "usedevelopmentemulator=true" not in connection_string.lower()
        return cls(parsed.fully_qualified_namespace.rstrip("/"), name, group, connection_string, websocket=websocket, tls=tls)

    @classmethod
    def entra(
        cls,
        namespace: str,
        hub: str,
        group: str = DEFAULT_GROUP,
        *,
        credential: Any = "DefaultAzureCredential",
        websocket: bool = False,
        tls: bool = True,
    ) -> Connection:
        """Make a connection that logs in with Entra ID.

        Args:
            namespace: its host name, "name.servicebus.windows.net".
            hub: name of the event hub.
            group: consumer group.
            credential: a token credential, the name of a class of azure-identity, or "module:function" for a function that makes one.
                With a name each process makes its own credential, and keeps it with its tokens.
            websocket: AMQP over WebSockets, port 443.
            tls: False only for an emulator.
        """
        return cls(namespace.rstrip("/"), hub, group, None, credential, websocket, tls)

    @property
    def source(self) -> str:
        """The `source` of events of this namespace: its host name."""
        return self.namespace.split(":")[0].lower()

    def client(self, **options: Any) -> EventHubConsumerClient:
        """Make a client of azure-eventhub with these options of its own.

        Raises:
            ConfigError: azure-eventhub refuses the settings.
        """
        options |= {"transport_type": TransportType.AmqpOverWebsocket} if self.websocket else {}
        try:
            if self.secret is not None:
                return EventHubConsumerClient.from_connection_string(self.secret, self.group, eventhub_name=self.hub, **options)
            extra = {} if self.tls else {"use_tls": False}
            return EventHubConsumerClient(self.namespace, self.hub, self.group, made(self.credential), **options, **extra)
        except ValueError as error:
            raise ConfigError(f"The client of Event Hubs refuses the settings of {self.hub!r} at {self.namespace}: {error}") from None


def made(credential: Any) -> Any:
    """Return the token credential that a name stands for. Return anything else as it is.

    Raises:
        ConfigError: no credential has that name, or azure-identity is not installed.
    """
    return _made(credential, os.getpid()) if isinstance(credential, str) else credential


@lru_cache(maxsize=64)
def _made(credential: str, process: int) -> Any:
    """One for each process: a new one would ask for a token anew, and a fork must not share the connections of its parent."""
    module, _, name = credential.rpartition(":")
    try:
        return getattr(importlib.import_module(module or "azure.identity"), name)()
    except ModuleNotFoundError as error:
        raise ConfigError(needs(f"Credential {credential!r}", error.name, "entra")) from None
    except AttributeError:
        raise ConfigError(f"There is no credential {credential!r}: name a class of azure.identity or 'module:function'.") from None


def hidden(text: str, connection: Connection) -> str:
    """Return the text without any part of the connection's secret."""
    for part in (connection.secret or "").split(";"):
        name, _, value = part.partition("=")
        if name.strip().lower() in ("sharedaccesskey", "sharedaccesssignature") and value:
            text = text.replace(value, "***")
    return text


def options_of(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return options of Spark, whose names ignore upper and lower case."""
    return {name.lower(): value for name, value in given.items()}
