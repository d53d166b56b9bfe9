"""`dedup consumer lag`: how far consumers are behind Kafka or Event Hubs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
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

    The table has for each partition the checkpoint, the end of the log, and the lag between them in events and in seconds. Seconds are the
    time between the event at the checkpoint and the newest event. With --fail-above the exit code is 1 if a lag is above the limit, if the
    limit is a duration and a time is not known, or if the log no longer has the positions that come next. Without NAME and
    --topic the table leaves out consumers that have no checkpoints.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    broker = ends_of(kafka, kafka_settings, eventhubs)
    if broker is None:
        raise dedup.ConfigError("Name the broker: --kafka host:9092, or --eventhubs VARIABLE.")
    heads = [opened.head(name)] if name else [head for head in map(opened.head, opened.consumers()) if _is_read(head, topic, source)]
    rows = [one for head in heads for one in lags(head, broker, topic or (), source or None)]
    if as_json:
        print_json([_row(one) for one in rows])
    else:
        print_table(COLUMNS, [_cells(one) for one in rows], empty="no consumers yet")
    found(fail_above is not None and any(_too_far(one, fail_above) for one in rows))


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
    problem = (
        f"the log no longer has {one.lost} positions"
        if one.lost
        else "the log ends before the checkpoint: was the topic created again?"
        if one.another
        else ""
    )
    seconds = None if one.seconds is None else round(one.seconds, 1)
    return [one.consumer, *one.partition, one.checkpoint, one.end.end, one.events, seconds, problem]
