"""Which broker is meant: the options that name it, and where its logins come from. No secret is ever an argument."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import dedup

Kafka = Annotated[str, typer.Option("--kafka", help="The Kafka broker: host:9092.", show_default=False)]
AnyKafka = Annotated[
    str, typer.Option("--kafka", help="The Kafka broker: host:9092.  [default: the variable DEDUP_KAFKA]", show_default=False)
]
BrokerName = Annotated[
    str, typer.Option("--source", help="The name of this broker in the state.  [default: the only one there is]", show_default=False)
]
KafkaSettings = Annotated[
    str,
    typer.Option(
        "--kafka-settings", metavar="FILE", help="Settings of librdkafka, one name=value per line. Logins belong here.", show_default=False
    ),
]
EventHubs = Annotated[
    str,
    typer.Option(
        "--eventhubs",
        metavar="VARIABLE",
        help="The Event Hubs namespace whose connection string is in this environment variable.",
        show_default=False,
    ),
]


def settings_of(file: str) -> dict[str, str]:
    """The settings of a file, without comments; none without a file. Raises ConfigError where it cannot be read."""
    if not file:
        return {}
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise dedup.ConfigError(f"The settings cannot be read: {error}.") from error
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


def kafka_address(kafka: str, settings: str, eventhubs: str) -> str:
    """The Kafka broker that is named, also by DEDUP_KAFKA; empty where none is. Raises ConfigError where both are."""
    kafka = kafka or ("" if eventhubs else os.environ.get("DEDUP_KAFKA", ""))
    if kafka and eventhubs:
        raise dedup.ConfigError("Name one broker: --kafka host:9092, or --eventhubs VARIABLE.")
    if settings and not kafka:
        raise dedup.ConfigError("--kafka-settings needs --kafka host:9092, or the variable DEDUP_KAFKA.")
    return kafka


def broker_options(kafka: str, settings: str, eventhubs: str, source: str) -> tuple[str, ...]:
    """The words of a command line that name this broker, for another command."""
    named = {"--kafka": kafka, "--kafka-settings": settings, "--eventhubs": eventhubs, "--source": source}
    return tuple(word for option, value in named.items() if value for word in (option, value))


def connection_string(variable: str) -> str:
    """What the variable holds. Raises ConfigError, without showing it, where it holds nothing."""
    if "=" in variable:
        raise dedup.ConfigError(
            "--eventhubs takes the name of an environment variable, not its value: everybody on this machine can read arguments."
        )
    if not (text := os.environ.get(variable)):
        raise dedup.ConfigError(f"The variable {variable} is not set. Put the connection string there.")
    return text
