"""The options of `format("eventhubs")`, read once, on the driver."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint.errors import ConfigError
from dedup.eventhub.positions import EARLIEST, Ends, parsed
from dedup.eventhub.reader import Receive
from dedup.eventhub.settings import DEFAULT_GROUP, Connection

NAMES = (
    "connectionString",
    "fullyQualifiedNamespace",
    "credential",
    "eventHubName",
    "consumerGroup",
    "transport",
    "useDevelopmentEmulator",
    "startingPositions",
    "startingTime",
    "endingPositions",
    "maxEventsPerTrigger",
    "failOnDataLoss",
    "ownerLevel",
    "prefetch",
    "receiveTimeout",
)
"""Every option there is; case does not matter."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    connection: Connection
    stream: Receive
    batch: Receive
    start: int | Ends
    start_time: dt.datetime | None
    end: int | Ends
    limit: int | None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """Raises ConfigError for an option that is unknown, missing or makes no sense."""
        said = {name.lower(): value for name, value in given.items()}
        if unknown := set(said) - {name.lower() for name in NAMES}:
            raise ConfigError(f"Unknown options: {', '.join(sorted(unknown))}. There are: {', '.join(NAMES)}.")
        connection = _connection(said)
        lossless = _word(said, "failOnDataLoss", "true", ("true", "false")) == "true"
        prefetch, timeout = _number(said, "prefetch", 1000, least=1), float(_number(said, "receiveTimeout", 60, least=1))
        of_stream, of_batch = _levels(said)
        return cls(
            connection,
            Receive(prefetch, timeout, of_stream, lossless),
            Receive(prefetch, timeout, of_batch, lossless),
            parsed(said.get("startingpositions", "earliest"), connection.hub, "startingPositions"),
            _time(said),
            _end(said, connection.hub),
            _number(said, "maxEventsPerTrigger", 0, least=1) or None,
        )


def _connection(said: Mapping[str, str]) -> Connection:
    group = said.get("consumergroup", DEFAULT_GROUP)
    websocket = _word(said, "transport", "amqp", ("amqp", "websocket")) == "websocket"
    if "connectionstring" in said:
        return Connection.of(said["connectionstring"], said.get("eventhubname"), group, websocket=websocket)
    if "fullyqualifiednamespace" not in said or "eventhubname" not in said:
        raise ConfigError(
            "Give connectionString (and eventHubName, where it has no EntityPath), or fullyQualifiedNamespace and eventHubName."
        )
    credential = said.get("credential", "DefaultAzureCredential")
    tls = _word(said, "useDevelopmentEmulator", "false", ("true", "false")) == "false"
    namespace, hub = said["fullyqualifiednamespace"], said["eventhubname"]
    return Connection.entra(namespace, hub, group, credential=credential, websocket=websocket, tls=tls)


def _levels(said: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Of a stream and of a batch read."""
    text = said.get("ownerlevel", "default").lower()
    if text == "default":
        return 0, None
    level = None if text == "none" else _number(said, "ownerLevel", 0, least=0)
    return level, level


def _end(said: Mapping[str, str], hub: str) -> int | Ends:
    end = parsed(said.get("endingpositions", "latest"), hub, "endingPositions")
    if end == EARLIEST or (not isinstance(end, int) and EARLIEST in end.values()):
        raise ConfigError("endingPositions cannot be earliest.")
    return end


def _time(said: Mapping[str, str]) -> dt.datetime | None:
    if "startingtime" not in said:
        return None
    if "startingpositions" in said:
        raise ConfigError("Give startingPositions or startingTime, not both.")
    try:
        found = dt.datetime.fromisoformat(said["startingtime"])
    except ValueError:
        raise ConfigError(f"startingTime is a time such as 2026-01-31T12:00:00+00:00, not {said['startingtime']!r}.") from None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def _word(said: Mapping[str, str], name: str, default: str, words: tuple[str, ...]) -> str:
    word = said.get(name.lower(), default).lower()
    if word not in words:
        raise ConfigError(f"{name} is {' or '.join(words)}, not {word!r}.")
    return word


def _number(said: Mapping[str, str], name: str, default: int, least: int) -> int:
    if name.lower() not in said:
        return default
    text = said[name.lower()]
    if not text.strip().isdigit() or int(text) < least:
        raise ConfigError(f"{name} is a whole number from {least} on, not {text!r}.")
    return int(text)
