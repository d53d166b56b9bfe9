"""`dedup metrics`: what `dedup status` shows, as Prometheus reads it. The labels are bounded: consumers, topics, partitions, kinds.

The names end in the unit, as the naming rules of Prometheus ask for; examples/prometheus has alarms and a dashboard that use them.
"""

from __future__ import annotations

import datetime as dt
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dedup
from checkpoint.errors import SourceUnavailable, StoreUnavailable
from checkpoint.install import needs
from checkpoint.start import Ends
from deadletter.letter import Kind
from dedup.cli import lines
from dedup.cli.brokers import EventHubs, KafkaSettings
from dedup.cli.lag import Kafka, Source, ends_of
from dedup.cli.options import AnyName
from dedup.cli.show import AsJson, print_json
from dedup.cli.status import Activity, Standing, look
from dedup.core.store import Store
from dedup.urls import StoreUrl, check_consumer, open_store

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Serve the metrics here, until stopped. Without it they are printed once.",
        show_default=False,
    ),
]

Value = tuple[Sequence[str], float]
"""Values of the labels, and the number."""

Read = Callable[[Standing], Iterator[Value]]


def register(app: typer.Typer) -> None:
    """Add `dedup metrics`."""
    app.command("metrics", epilog="Example: dedup metrics --listen 127.0.0.1:9464 --store postgresql://localhost/shop")(metrics)


def metrics(
    name: AnyName = "",
    kafka: Kafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    source: Source = "",
    listen: Listen = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Give Prometheus the numbers of `dedup status`.

    With --listen the command serves them under /metrics; each request reads the store anew. Without it they are printed once, as the
    textfile collector of the node exporter takes them. With a broker there is the lag, too.
    """
    opened = open_store(store)
    if name:
        check_consumer(opened, name)
    collector = Collector(opened, name, ends_of(kafka, kafka_settings, eventhubs), source)
    if listen:
        _serve(listen, collector)
    elif as_json:
        print_json({name: [{"labels": labels, "value": value} for labels, value in found] for name, found in collector.values().items()})
    else:
        typer.echo(_text(collector), nl=False)


class Collector:
    """Reads the store at each request. What cannot be read now is left out, and `dedup_up` is 0."""

    def __init__(self, store: Store, name: str = "", broker: Ends | None = None, source: str = "") -> None:
        self._store, self._name, self._broker, self._source = store, name, broker, source
        self._reading = threading.Lock()  # a store is for one reader at a time; requests come in threads

    def values(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Name of the metric -> labels and values."""
        with self._reading:
            try:
                names = [self._name] if self._name else self._store.consumers()
                looked = [look(self._store, name, self._broker, self._source) for name in names]
            except (StoreUnavailable, SourceUnavailable) as error:
                lines.note(f"dedup: {error}", error=error)
                return {"dedup_up": [({}, 0.0)]}
        return {"dedup_up": [({}, 1.0)], **{name: list(_read(looked, *METRICS[name][1:])) for name in METRICS}}

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for."""
        from prometheus_client.core import GaugeMetricFamily

        for name, found in self.values().items():
            about, labels, _ = METRICS.get(name, ("Whether the store, and the broker, could be read.", (), None))
            family = GaugeMetricFamily(name, about, labels=["consumer", *labels] if name in METRICS else [])
            for values, number in found:
                family.add_metric(list(values.values()), number)
            yield family


def _read(looked: Sequence[Standing], labels: tuple[str, ...], read: Read) -> Iterator[tuple[dict[str, str], float]]:
    for one in looked:
        for values, number in read(one):
            yield dict(zip(("consumer", *labels), (one.head.consumer, *values), strict=True)), float(number)


def _plain(get: Callable[[Standing], float | None]) -> Read:
    """One number without labels; none where it is not known."""

    def read(one: Standing) -> Iterator[Value]:
        if (number := get(one)) is not None:
            yield (), number

    return read


def _seconds(moment: dt.datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _states(one: Standing) -> Iterator[Value]:
    for activity in Activity:
        yield (activity,), float(one.activity is activity)


def _checkpoints(one: Standing) -> Iterator[Value]:
    for partition, point in one.head.checkpoints.items():
        yield tuple(map(str, partition)), point.sequence_number


def _lag_events(one: Standing) -> Iterator[Value]:
    for lag in one.lags or ():
        yield tuple(map(str, lag.partition)), lag.events


def _lag_seconds(one: Standing) -> Iterator[Value]:
    for lag in one.lags or ():
        if lag.seconds is not None:
            yield tuple(map(str, lag.partition)), lag.seconds


def _letters(one: Standing) -> Iterator[Value]:
    for kind in Kind:
        yield (kind,), one.letters.get(kind, 0)


def _outbox(one: Standing) -> Iterator[Value]:
    yield from ((("waiting",), one.outbox.waiting), (("behind",), one.outbox.behind), (("dead",), one.outbox.dead))


_PLACE = ("source", "topic", "partition")

METRICS: Mapping[str, tuple[str, tuple[str, ...], Read]] = {
    "dedup_state": ("Whether the consumer is in this state: the one that is has 1.", ("state",), _states),
    "dedup_decisions": ("Decisions that were committed; it only grows.", (), _plain(lambda one: one.head.seq)),
    "dedup_epoch": ("How often an instance took the consumer over.", (), _plain(lambda one: one.head.epoch)),
    "dedup_last_commit_timestamp_seconds": (
        "When a batch was committed last.",
        (),
        _plain(lambda one: _seconds(one.last_commit)),
    ),
    "dedup_checkpoint": ("The last position that is decided.", _PLACE, _checkpoints),
    "dedup_lag_events": ("Positions up to the end of the log that are not decided.", _PLACE, _lag_events),
    "dedup_lag_seconds": ("Time between the event at the checkpoint and the newest one.", _PLACE, _lag_seconds),
    "dedup_open_letters": ("Dead letters that wait for a person.", ("kind",), _letters),
    "dedup_oldest_letter_timestamp_seconds": (
        "When the oldest open dead letter failed first.",
        (),
        _plain(lambda one: _seconds(one.oldest)),
    ),
    "dedup_outbox_messages": ("Messages that are not sent: waiting, behind a dead one, or dead.", ("state",), _outbox),
    "dedup_oldest_message_timestamp_seconds": (
        "When the oldest message that is not sent was stored.",
        (),
        _plain(lambda one: _seconds(one.outbox.oldest)),
    ),
    "dedup_oldest_reservation_timestamp_seconds": (
        "When the oldest reservations were made that no purge has dropped.",
        (),
        _plain(lambda one: _seconds(one.reserved_since)),
    ),
    "dedup_damage": (
        "Tables that were restored, a publication that is stuck, partitions that the log lost positions of: what `dedup status` warns of.",
        (),
        _plain(lambda one: bool(one.damage) + sum(bool(lag.lost or lag.another) for lag in one.lags or ())),
    ),
}
"""Name -> help, labels beside `consumer`, and what reads the values."""


def _text(collector: Collector) -> str:
    registry = _registry(collector)
    from prometheus_client import generate_latest

    return generate_latest(registry).decode()


def _registry(collector: Collector) -> CollectorRegistry:
    """One that has nothing but this. Raises ConfigError where prometheus-client is missing."""
    try:
        from prometheus_client.registry import CollectorRegistry
    except ImportError as error:
        raise dedup.ConfigError(needs("`dedup metrics`", "prometheus-client", "metrics")) from error
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _serve(listen: str, collector: Collector) -> None:
    """Until SIGINT or SIGTERM. Raises ConfigError for an address that cannot be listened on."""
    registry = _registry(collector)
    from prometheus_client import start_http_server

    host, _, port = listen.rpartition(":")
    if not port.isdecimal():
        raise dedup.ConfigError(f"--listen {listen} is not HOST:PORT, as in 127.0.0.1:9464.")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, OverflowError) as error:
        raise dedup.ConfigError(f"Nothing can listen on {listen}: {error}.") from error
    lines.note(f"Metrics are at http://{host or '127.0.0.1'}:{server.server_port}/metrics", logging.INFO)
    stop.wait()
    server.shutdown()
    thread.join()
