"""Which event hub, and as whom; and what can go wrong when it is read, beside checkpoint.errors.

A connection pickles with its secret, because executors connect with it, and never shows it. Called by everything in this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from azure.eventhub import EventHubConsumerClient, TransportType, parse_connection_string

from checkpoint import given
from checkpoint.errors import ConfigError, SourceUnavailable
from checkpoint.install import needs
from dedup.core.settings import CONNECTION

DEFAULT_GROUP = "$Default"


@dataclass(frozen=True)
class Connection:
    """An event hub and a consumer group of it.

    Made by `Connection.of` from a connection string, or by `Connection.entra` for Entra ID.
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
        """From a connection string of a namespace or of a hub (EntityPath).

        Raises:
            ConfigError: it cannot be read, or names no hub and `hub` is not given.
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
        """With Entra ID.

        Args:
            namespace: its host name, "name.servicebus.windows.net".
            hub: name of the event hub.
            group: consumer group.
            credential: a token credential; or the name of a class of azure-identity; or "module:function", which makes one. Names travel to
                executors, where the credential is then made.
            websocket: AMQP over WebSockets, port 443.
            tls: False only for an emulator.
        """
        return cls(namespace.rstrip("/"), hub, group, None, credential, websocket, tls)

    @property
    def source(self) -> str:
        """What tells this namespace's hubs from those of another: its host name."""
        return self.namespace.split(":")[0].lower()

    def client(self, **options: Any) -> EventHubConsumerClient:
        """A new client of azure-eventhub; `options` are its own.

        Raises:
            ConfigError: the settings do not make one.
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
    """The token credential that a name stands for; anything else as it is.

    Raises:
        ConfigError: there is none of that name, or azure-identity is missing.
    """
    if not isinstance(credential, str):
        return credential
    module, _, name = credential.rpartition(":")
    try:
        return getattr(importlib.import_module(module or "azure.identity"), name)()
    except ModuleNotFoundError as error:
        raise ConfigError(needs(f"Credential {credential!r}", error.name, "entra")) from None
    except AttributeError:
        raise ConfigError(f"There is no credential {credential!r}: name a class of azure.identity or 'module:function'.") from None


def hidden(text: str, connection: Connection) -> str:
    """The text without any part of the connection's secret."""
    for part in (connection.secret or "").split(";"):
        name, _, value = part.partition("=")
        if name.strip().lower() in ("sharedaccesskey", "sharedaccesssignature") and value:
            text = text.replace(value, "***")
    return text


def options_of(given: Mapping[str, str]) -> Mapping[str, str]:
    """Options of Spark, whose names are without case."""
    return {name.lower(): value for name, value in given.items()}


class ReceiverStolen(SourceUnavailable):
    """Another receiver of the same consumer group took this partition. Stop one of the two, or give each a consumer group of its own."""
