"""`dedup lag`: how far consumers are behind Kafka or Event Hubs."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

import dedup
from checkpoint.start import Ends, Lag, lags
from dedup.cli.outbox import settings_of
from dedup.cli.show import AsJson, print_json, print_table
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = ["consumer", "source", "topic", "partition", "checkpoint", "end", "events", "seconds", "what is wrong"]

Kafka = Annotated[
    str, typer.Option("--kafka", envvar="DEDUP_KAFKA", show_envvar=True, help="Ask this Kafka broker: host:9092.", show_default=False)
]
KafkaSettings = Annotated[
    str,
    typer.Option(
        "--kafka-settings", help="A file with settings of librdkafka, one name=value a line: logins belong there.", show_default=False
    ),
]
EventHubs = Annotated[
    str,
    typer.Option("--eventhubs", metavar="VARIABLE", help="Ask Event Hubs; the connection string is in this variable.", show_default=False),
]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="May be repeated.  [default: those that were read]", show_default=False)]
Source = Annotated[str, typer.Option("--source", help="What the state calls this broker.  [default: the only one]", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add `dedup lag`."""
    app.command(epilog="Example: dedup lag orders --kafka localhost:9092 --store postgresql://localhost/shop")(lag)


def lag(
    name: Annotated[str, typer.Argument(help="The consumer's name; all of them where none is given.", show_default=False)] = "",
    kafka: Kafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    topic: Topics = None,
    source: Source = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Per partition: checkpoint, end of the log, and the lag between them in events and in time.

    Seconds are those between the event at the checkpoint and the newest one in the log.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    broker = _broker(kafka, kafka_settings, eventhubs)
    found = [
        one for each in ([name] if name else opened.consumers()) for one in lags(opened.head(each), broker, topic or (), source or None)
    ]
    if as_json:
        print_json([_row(one) for one in found])
        return
    print_table(COLUMNS, [_cells(one) for one in found], empty="no consumers yet")


def _broker(kafka: str, settings: str, eventhubs: str) -> Ends:
    if bool(kafka) == bool(eventhubs):
        raise dedup.ConfigError("Say who is asked: --kafka host:9092, or --eventhubs VARIABLE.")
    if kafka:
        from dedup.kafka import Broker

        return Broker(kafka, settings_of(settings) if settings else {})
    if "=" in eventhubs:
        raise dedup.ConfigError("--eventhubs takes the name of a variable: a connection string among the arguments can be read by anybody.")
    if not (text := os.environ.get(eventhubs)):
        raise dedup.ConfigError(f"The variable {eventhubs} is not set. It has to hold the connection string.")
    from dedup.eventhub.namespace import Hubs

    return Hubs(text)


def _row(one: Lag) -> dict[str, Any]:
    return {
        "consumer": one.consumer,
        **one.partition._asdict(),
        "checkpoint": one.checkpoint,
        "first": one.end.first,
        "end": one.end.end,
        "events": one.events,
        "seconds": one.seconds,
        "checkpoint_time": one.decided,
        "newest_time": one.end.newest,
        "lost": one.lost,
        "another_log": one.another,
    }


def _cells(one: Lag) -> list[Any]:
    wrong = (
        f"retention took {one.lost} positions"
        if one.lost
        else "the log ends before the checkpoint: was it re-created?"
        if one.another
        else ""
    )
    seconds = None if one.seconds is None else f"{one.seconds:.1f}"
    return [one.consumer, *one.partition, one.checkpoint, one.end.end, one.events, seconds, wrong]
