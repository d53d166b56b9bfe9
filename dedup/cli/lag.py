"""`dedup consumer lag`: how far consumers are behind Kafka or Event Hubs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

import dedup
from checkpoint.head import Head
from checkpoint.start import Ends, Lag, lags
from dedup.cli.brokers import AnyKafka, BrokerName, EventHubs, KafkaSettings, connection_string, kafka_address, settings_of
from dedup.cli.exits import found
from dedup.cli.options import AnyName, FailAbove, Topics, above
from dedup.cli.show import AsJson, print_json, print_table
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = ["consumer", "source", "topic", "partition", "checkpoint", "end", "events", "seconds", "problem"]

KEYS = ["consumer", "source", "topic", "partition", "checkpoint", "first", "end", "events", "seconds", "checkpoint_time", "newest_time"]
KEYS += ["lost", "another_log", "problem"]
"""Of a row in JSON."""


def register(commands: typer.Typer) -> None:
    """Add `dedup consumer lag`."""
    commands.command(epilog="Example: dedup consumer lag orders --kafka localhost:9092 --store postgresql://localhost/shop")(lag)


def lag(
    name: AnyName = "",
    kafka: AnyKafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    topic: Topics = None,
    source: BrokerName = "",
    fail_above: FailAbove = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show how far consumers are behind the broker.

    The table has for each partition the checkpoint, the end of the log, and the lag between them in events and in seconds. Seconds are
    the time between the event at the checkpoint and the newest event. With --fail-above the exit code is 1 if a lag is above the limit,
    if the limit is a duration and a time is not known, or if the log no longer has the positions that come next. Without NAME and --topic
    the table leaves out consumers that have no checkpoints. A consumer whose topic the broker has no more is a row with the problem then,
    and the exit code is 1.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    broker = ends_of(kafka, kafka_settings, eventhubs)
    if broker is None:
        raise dedup.ConfigError("Name the broker: --kafka host:9092, or --eventhubs VARIABLE.")
    heads = [opened.head(name)] if name else [head for head in map(opened.head, opened.consumers()) if _is_read(head, topic, source)]
    one_by_one = not (name or topic)  # else the call is wrong where the broker cannot say
    rows = [one for head in heads for one in _lags(head, broker, topic or (), source or None, one_by_one)]
    if as_json:
        print_json([_row(one) for one in rows])
    else:
        print_table(COLUMNS, [_cells(one) for one in rows], empty="no consumers yet")
    found(any(isinstance(one, Unknown) or (fail_above is not None and _too_far(one, fail_above)) for one in rows))


@dataclass(frozen=True)
class Unknown:
    """A consumer whose lag the broker cannot say."""

    consumer: str
    problem: str


def _lags(head: Head, broker: Ends, topics: Sequence[str], source: str | None, one_by_one: bool) -> Sequence[Lag | Unknown]:
    """Of one consumer. Raises ConfigError where the broker cannot say and not each consumer is looked at for itself."""
    try:
        return lags(head, broker, topics, source)
    except dedup.ConfigError as error:
        if not one_by_one:
            raise
        return [Unknown(head.consumer, str(error))]


def _is_read(head: Head, topic: Sequence[str] | None, source: str) -> bool:
    """Whether this consumer has read something, or may read these topics; where a broker is named, of that one."""
    sources = {partition.source for partition in head.checkpoints}
    return source in sources if source and sources else bool(sources or topic)


def _too_far(one: Lag, limit: int | dt.timedelta) -> bool:
    return bool(one.lost or one.another) or above(one.events, one.seconds, limit)


def ends_of(kafka: str, settings: str, eventhubs: str) -> Ends | None:
    """The broker that is named; None where none is. Raises ConfigError for two."""
    if kafka := kafka_address(kafka, settings, eventhubs):
        from dedup.kafka import Broker

        return Broker(kafka, settings_of(settings))
    if not eventhubs:
        return None
    from dedup.eventhub.namespace import Hubs

    return Hubs(connection_string(eventhubs))


def _row(one: Lag | Unknown) -> dict[str, Any]:
    if isinstance(one, Unknown):
        return {"consumer": one.consumer, **dict.fromkeys(KEYS[1:-1]), "problem": one.problem}
    row = [*one.partition, one.checkpoint, one.end.first, one.end.end, one.events, one.seconds, one.decided, one.end.newest]
    return dict(zip(KEYS, [one.consumer, *row, one.lost, one.another, _problem(one)], strict=True))


def _cells(one: Lag | Unknown) -> list[Any]:
    row = _row(one)
    seconds = None if row["seconds"] is None else round(row["seconds"], 1)
    return [seconds if column == "seconds" else row[column] for column in COLUMNS]


def _problem(one: Lag) -> str | None:
    if one.lost:
        return f"the log no longer has {one.lost} positions"
    return "the log ends before the checkpoint: was the topic created again?" if one.another else None
