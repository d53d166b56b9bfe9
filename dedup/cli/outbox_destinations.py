"""The options that say where messages go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import dedup
from dedup.cli.targets import find
from dedup.outbox import Call as Calling
from dedup.outbox import Destination
from dedup.outbox.store import Outbox

Kafka = Annotated[str, typer.Option("--kafka", help="To this Kafka broker: host:9092.", show_default=False)]
KafkaSettings = Annotated[
    str,
    typer.Option(
        "--kafka-settings", help="A file with settings of librdkafka, one name=value a line: logins belong there.", show_default=False
    ),
]
EventHubs = Annotated[
    str,
    typer.Option(
        "--eventhubs", metavar="VARIABLE", help="To event hubs; the namespace's connection string is in this variable.", show_default=False
    ),
]
Call = Annotated[
    str,
    typer.Option(
        "--call",
        metavar="MODULE:ATTRIBUTE",
        help="To a function that gets a list of messages, returns once they are sent, and raises where they are not.",
        show_default=False,
    ),
]


def destination_of(kafka: str, kafka_settings: str, eventhubs: str, call: str) -> Destination:
    """The one destination that is named. Raises ConfigError for none, several, or one that cannot be made."""
    if [bool(kafka), bool(eventhubs), bool(call)].count(True) != 1:
        raise dedup.ConfigError("Say where the messages go: one of --kafka host:9092, --eventhubs VARIABLE, --call module:attribute.")
    if kafka:
        from dedup.kafka import Topics

        return Topics(kafka, settings_of(kafka_settings) if kafka_settings else {})
    return _hubs(eventhubs) if eventhubs else Calling(_function(call))


def transactions_of(kafka: str, kafka_settings: str, name: str, outbox: Outbox) -> Any:
    """Kafka in transactions. Raises ConfigError for another destination, or an outbox that notes no flights."""
    if not kafka:
        raise dedup.ConfigError("Only Kafka has transactions: --exactly-once needs --kafka host:9092.")
    if not hasattr(outbox, "fly"):
        raise dedup.ConfigError("--exactly-once needs a store in PostgreSQL. On Delta messages are sent at least once, with stable ids.")
    from dedup.kafka import TransactionalTopics

    return TransactionalTopics(kafka, name, settings_of(kafka_settings) if kafka_settings else {})


def _hubs(variable: str) -> Destination:
    if "=" in variable:
        raise dedup.ConfigError("--eventhubs takes the name of a variable: a connection string among the arguments can be read by anybody.")
    if not (text := os.environ.get(variable)):
        raise dedup.ConfigError(f"The variable {variable} is not set. It has to hold the connection string.")
    from dedup.eventhub.outbox import SendingHubs
    from dedup.eventhub.settings import Connection

    return SendingHubs(Connection.of(text, hub="any"))


def _function(target: str) -> Any:
    found = find(target, "function", "shop.mail:send")
    if not callable(found):
        raise dedup.ConfigError(f"{target} is a {type(found).__name__}, not a function.")
    return found


def settings_of(file: str) -> dict[str, str]:
    """The settings of a file, without comments. Raises ConfigError where it cannot be read."""
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise dedup.ConfigError(f"The settings cannot be read: {error}.") from error
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}
