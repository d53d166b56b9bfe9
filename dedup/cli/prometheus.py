"""`dedup metrics`: what `dedup status` shows, as Prometheus reads it. The labels are bounded: consumers, topics, partitions, kinds.

The names end in the unit, as the naming rules of Prometheus ask for; examples/prometheus has alarms and a dashboard that use them.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dedup
from checkpoint.install import needs
from checkpoint.start import Ends
from dedup.cli import lines
from dedup.cli.brokers import AnyKafka, BrokerName, EventHubs, KafkaSettings
from dedup.cli.lag import ends_of
from dedup.cli.options import AnyName
from dedup.cli.show import AsJson, print_json
from dedup.core.store import Store
from dedup.signals.metrics import ABOUT_UP, METRICS, Numbers
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


def register(app: typer.Typer) -> None:
    """Add `dedup metrics`."""
    app.command("metrics", epilog="Example: dedup metrics --listen 127.0.0.1:9464 --store postgresql://localhost/shop")(metrics)


def metrics(
    name: AnyName = "",
    kafka: AnyKafka = "",
    kafka_settings: KafkaSettings = "",
    eventhubs: EventHubs = "",
    source: BrokerName = "",
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


class Collector(Numbers):
    """The numbers of a store as prometheus_client asks for them."""

    def __init__(self, store: Store, name: str = "", broker: Ends | None = None, source: str = "") -> None:
        super().__init__(store, name, broker, source, tell=lambda error: lines.note(f"dedup: {error}", error=error))

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for."""
        from prometheus_client.core import GaugeMetricFamily

        for name, found in self.values().items():
            metric = METRICS.get(name)
            about, labels = (metric.about, ["consumer", *metric.labels]) if metric else (ABOUT_UP, [])
            family = GaugeMetricFamily(name, about, labels=labels)
            for values, number in found:
                family.add_metric(list(values.values()), number)
            yield family


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
