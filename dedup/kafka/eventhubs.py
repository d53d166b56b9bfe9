"""The Kafka endpoint of Event Hubs: the options that Spark's Kafka source and our own clients need, from a connection string or an app
registration. Nothing here prints a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from checkpoint.errors import ConfigError
from dedup.kafka.broker import Broker

PORT, EMULATOR_PORT = 9093, 9092

AUTHORITY = "https://login.microsoftonline.com"

SECRET = re.compile(r"jaas|password|secret", re.IGNORECASE)
"""Options whose values are not shown."""

WAITS = {"kafka.request.timeout.ms": "60000", "kafka.session.timeout.ms": "30000"}
"""Of Spark's client; what Event Hubs asks for, whose answers take longer than a Kafka broker's."""

_LOGIN = "org.apache.kafka.common.security"


class Options(dict[str, str]):
    """Options for `spark.readStream.format("kafka").options(**...)`; secrets are not shown."""

    def __repr__(self) -> str:
        return repr({name: "***" if SECRET.search(name) else value for name, value in self.items()})

    __str__ = __repr__


@dataclass(frozen=True)
class EventHubs:
    """A namespace of Event Hubs, read through its Kafka endpoint. Make one with `connection_string` or `entra`.

    Its topics are event hubs. A Kafka offset is the event's sequence number, so a consumer with `source=hubs.host` continues where it
    stopped over AMQP. The Basic tier has no such endpoint.
    """

    host: str  # NAMESPACE.servicebus.windows.net
    hub: str | None = None  # the hub that the connection string names
    port: int = PORT
    tls: bool = True  # False only for Microsoft's emulator
    _spark: Options = field(default_factory=Options, repr=False)
    _client: Options = field(default_factory=Options, repr=False)

    @classmethod
    def connection_string(cls, text: str) -> EventHubs:
        """Make it from the connection string of a namespace or hub (`Endpoint=sb://...`), or of Microsoft's emulator.

        Raises:
            ConfigError: the text is no connection string. The message does not repeat the text.
        """
        parts = dict(part.split("=", 1) for part in text.strip().split(";") if "=" in part)
        host = re.match(r"(?:sb|amqps?)://([^/:]+)(?::(\d+))?", parts.get("Endpoint", ""))
        if host is None or not {"SharedAccessKeyName", "SharedAccessKey"} <= set(parts):
            raise ConfigError(
                "This is not a connection string of Event Hubs. One looks like this: Endpoint=sb://NAMESPACE.servicebus.windows.net/;"
                "SharedAccessKeyName=...;SharedAccessKey=..."
            )
        jaas = f'{_LOGIN}.plain.PlainLoginModule required username="$ConnectionString" password={_quoted(text.strip())};'
        spark = {"kafka.sasl.mechanism": "PLAIN", "kafka.sasl.jaas.config": jaas}
        client = {"sasl.mechanism": "PLAIN", "sasl.username": "$ConnectionString", "sasl.password": text.strip()}
        if parts.get("UseDevelopmentEmulator", "").lower() == "true":
            return cls(host[1].lower(), parts.get("EntityPath"), int(host[2] or EMULATOR_PORT), False, Options(spark), Options(client))
        return cls(host[1].lower(), parts.get("EntityPath"), _spark=Options(spark), _client=Options(client))

    @classmethod
    def entra(cls, host: str, tenant: str, client_id: str, client_secret: str, *, authority: str = AUTHORITY) -> EventHubs:
        """Make it from an app registration of Microsoft Entra ID. The app needs the role "Azure Event Hubs Data Receiver".

        Args:
            host: NAMESPACE.servicebus.windows.net
            authority: the address that gives the tokens; national clouds have their own.
        """
        token, scope = f"{authority}/{tenant}/oauth2/v2.0/token", f"https://{host}/.default"
        login = f"clientId={_quoted(client_id)} clientSecret={_quoted(client_secret)} scope={_quoted(scope)}"
        spark = {
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "kafka.sasl.jaas.config": f"{_LOGIN}.oauthbearer.OAuthBearerLoginModule required {login};",
            "kafka.sasl.login.callback.handler.class": f"{_LOGIN}.oauthbearer.OAuthBearerLoginCallbackHandler",
            "kafka.sasl.oauthbearer.token.endpoint.url": token,
        }
        client = {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": client_id,
            "sasl.oauthbearer.client.secret": client_secret,
            "sasl.oauthbearer.scope": scope,
            "sasl.oauthbearer.token.endpoint.url": token,
        }
        return cls(host.lower(), _spark=Options(spark), _client=Options(client))

    @property
    def servers(self) -> str:
        """The address of the Kafka endpoint, as host:port."""
        return f"{self.host}:{self.port}"

    @property
    def _protocol(self) -> str:
        return "SASL_SSL" if self.tls else "SASL_PLAINTEXT"

    @property
    def options(self) -> Options:
        """The options of Spark's Kafka source: `spark.readStream.format("kafka").options(**hubs.options)`."""
        hub = {"subscribe": self.hub} if self.hub else {}
        where = {"kafka.bootstrap.servers": self.servers, "kafka.security.protocol": self._protocol, "includeHeaders": "true"}
        return Options({**where, **hub, **self._spark, **WAITS})

    def broker(self) -> Broker:
        """Return the namespace as a `Broker`, for start positions, for the lag and for reading the log again."""
        return Broker(self.servers, {"security.protocol": self._protocol, **self._client})


def eventhubs_options(connection_string: str) -> Options:
    """Return the options that Spark's Kafka source needs to read this namespace or hub. Raises ConfigError for a wrong string."""
    return EventHubs.connection_string(connection_string).options


def _quoted(value: str) -> str:
    """As a value in a JAAS line."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
