"""Metrics through OpenTelemetry's API. Whether and where they go is the user's SDK's: without one they cost next to nothing.

Names and attributes follow the semantic conventions for messaging where these have a name
(https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics/, status Development, read 2026-11-27):

* `messaging.client.consumed.messages`, Counter, `{message}`: "Number of messages that were delivered to the application."
* `messaging.process.duration`, Histogram, `s`: "Duration of processing operation." It "SHOULD be specified with ExplicitBucketBoundaries
  of [ 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10 ]"; batches take longer, so that there are four more.

Everything else is `dedup.*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from checkpoint.position import KAFKA_SOURCE, Partition
from deadletter.parked import ParkedGroup
from dedup.pipeline.report import Report
from dedup.signals.metrics import ABOUT_UP, METRICS, UP, UP_OTEL, Collected, Metric

CONSUMED, DURATION = "messaging.client.consumed.messages", "messaging.process.duration"
EVENTS, PARKED = "dedup.events", "dedup.letters.parked"

BOUNDARIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 300, 900)
"""Seconds: of the conventions, and of batches that take minutes."""

CONSUMER, SYSTEM, TOPIC = "messaging.consumer.group.name", "messaging.system", "messaging.destination.name"

ATTRIBUTES = {
    "consumer": CONSUMER,
    "topic": TOPIC,
    "partition": "messaging.destination.partition.id",
    "source": "dedup.source",
    "state": "dedup.state",
    "kind": "dedup.kind",
}
"""Label of a metric -> attribute. There is one value for each consumer, topic, partition, state and kind."""

OUTCOME = "dedup.outcome"
"""Attribute of `dedup.events`: a count of `Report`."""

HUBS = ".servicebus.windows.net"


def _meter(provider: MeterProvider | None) -> Meter:
    return metrics.get_meter("dedup", meter_provider=provider)


class Recorder:
    """What a running consumer does, as counters and a histogram. Call it with a `Report` or a `ParkedGroup`.

    Picklable where no provider was given, as the consumer is: another process records for its own SDK.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        self._provider = provider
        meter = _meter(provider)
        self._consumed = meter.create_counter(CONSUMED, "{message}", "Number of messages that were delivered to the application.")
        self._duration = meter.create_histogram(
            DURATION, "s", "Duration of processing operation.", explicit_bucket_boundaries_advisory=BOUNDARIES
        )
        self._events = meter.create_counter(EVENTS, "{event}", "Rows of batches by what became of them.")
        self._parked = meter.create_counter(PARKED, "{letter}", "Events that became dead letters.")

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, (self._provider,)

    def __call__(self, told: Report | ParkedGroup) -> None:
        """Record it."""
        if isinstance(told, ParkedGroup):
            self._parked.add(told.letters, {CONSUMER: told.consumer, ATTRIBUTES["kind"]: told.kind.value})
        else:
            self._batch(told)

    def _batch(self, report: Report) -> None:
        about = {CONSUMER: report.consumer, "messaging.operation.name": "process", **_place(report.checkpoints)}
        self._consumed.add(report.delivered, about)
        self._duration.record(report.seconds, {**about, "messaging.operation.type": "process"})
        for outcome, rows in report.counts.items():
            if outcome != "delivered":  # their sum
                self._events.add(rows, {CONSUMER: report.consumer, OUTCOME: outcome})


def _place(checkpoints: Mapping[Partition, int]) -> dict[str, str]:
    """The system that the events came from, and the topic where there is one only: a report counts all topics together."""
    systems, topics = {_system(place.source) for place in checkpoints}, {place.topic for place in checkpoints}
    system = systems.pop() if len(systems) == 1 else "_OTHER"
    return {SYSTEM: system, **({TOPIC: topics.pop()} if len(topics) == 1 else {})}


def _system(source: str) -> str:
    """As the conventions name the two that we read; other sources have their own name."""
    return "eventhubs" if source.endswith(HUBS) else "kafka" if source == KAFKA_SOURCE else source


def observe(collected: Collected, provider: MeterProvider | None) -> None:
    """Make an instrument for each metric of a store, which is read when the SDK collects."""
    meter = _meter(provider)
    meter.create_observable_gauge(UP_OTEL, [partial(_observed, collected, UP)], "1", ABOUT_UP)
    for name, metric in METRICS.items():
        make = meter.create_observable_counter if metric.grows else meter.create_observable_gauge
        make(metric.otel, [partial(_observed, collected, name)], metric.unit, _about(metric))


def _about(metric: Metric) -> str:
    return f"Seconds since: {metric.about[0].lower()}{metric.about[1:]}" if metric.age else metric.about


def _observed(collected: Collected, name: str, options: CallbackOptions) -> Iterable[Observation]:
    for labels, number in collected.take(name):
        yield Observation(number, {ATTRIBUTES[label]: value for label, value in labels.items()})
