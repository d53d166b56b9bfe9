"""`dedup.signals`: what OpenTelemetry's own SDK collects of a running consumer and of a store."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, Metric, NumberDataPoint

from checkpoint.errors import ConfigError, StoreUnavailable
from checkpoint.position import Partition
from checkpoint.start import End
from deadletter.policy import FailurePolicy
from dedup import Consumer, decode, signals
from dedup.signals.metrics import METRICS, Numbers
from dedup.signals.opentelemetry import ATTRIBUTES, BOUNDARIES, CONSUMER, OUTCOME
from dedup.signals.standing import look
from fixtures.fix_places import Place
from kit.orders import ORDER, batch, consumer, event, orders, write_orders
from kit.paths import environment

TELLING = {"messaging.operation.name", "messaging.operation.type", "messaging.system"}
"""Attributes of which there is one value for each source."""

BOUNDED = {*ATTRIBUTES.values(), OUTCOME, *TELLING}


class Sdk:
    """The SDK of a user who reads in memory."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def collect(self) -> dict[str, Metric]:
        """Name -> what was collected just now."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        assert {scope.scope.name for scope in scopes} <= {"dedup"}
        return {metric.name: metric for scope in scopes for metric in scope.metrics}


@pytest.fixture
def sdk() -> Iterator[Sdk]:
    """An SDK of the test's own."""
    made = Sdk()
    yield made
    made.provider.shutdown()


def points(metric: Metric, *attributes: str) -> dict[tuple[Any, ...], float]:
    """Values of these attributes -> number."""
    found: dict[tuple[Any, ...], float] = {}
    for point in metric.data.data_points:
        assert isinstance(point, NumberDataPoint) and point.attributes is not None
        found[tuple(point.attributes[name] for name in attributes)] = point.value
    return found


def recorded(place: Place, sdk: Sdk, **settings: Any) -> Consumer:
    """A consumer that tells the SDK of its batches and letters."""
    told = signals.recorder(sdk.provider)
    made = Consumer(
        "shop",
        place.store(),
        idempotence_key="data.id",
        decode=decode.json(ORDER),
        query="q",
        on_batch=told,
        failure=FailurePolicy(on_parked=told, max_outage=0.0),
        **settings,
    )
    made.foreach_batch(write_orders)
    return made


def test_a_running_consumer_is_counted(place: Place, sdk: Sdk) -> None:
    """Messages, rows by outcome, letters by kind and the seconds of batches add up to the reports, under the names of the conventions."""
    run = recorded(place, sdk)
    reports = [run(batch(*orders(range(3))), 0), run(batch(event(3, "p0-0", 0), event(4, "x", -1), event(5, None), *orders([2])), 1)]
    found = sdk.collect()
    assert set(found) == {"messaging.client.consumed.messages", "messaging.process.duration", "dedup.events", "dedup.letters.parked"}
    place_of = (CONSUMER, "messaging.system", "messaging.destination.name", "messaging.operation.name")
    assert points(found["messaging.client.consumed.messages"], *place_of) == {("shop", "broker", "orders", "process"): 7}
    whole = reports[0] + reports[1]
    rows = points(found["dedup.events"], CONSUMER, OUTCOME)
    assert rows == {("shop", name): count for name, count in whole.counts.items() if name != "delivered"}
    assert sum(rows.values()) == whole.delivered and rows["shop", "duplicates"] == 1
    assert points(found["dedup.letters.parked"], CONSUMER, "dedup.kind") == {("shop", "REJECTED"): 1, ("shop", "NO_KEY"): 1}
    (seconds,) = found["messaging.process.duration"].data.data_points
    assert isinstance(seconds, HistogramDataPoint) and tuple(seconds.explicit_bounds) == BOUNDARIES
    assert (seconds.count, seconds.sum) == (2, pytest.approx(sum(report.seconds for report in reports)))
    units = {name: metric.unit for name, metric in found.items()}
    assert set(units.values()) == {"{message}", "s", "{event}", "{letter}"} and units["messaging.process.duration"] == "s"


def ends(topics: Any) -> Mapping[tuple[str, int], End]:
    """A log that ends seven events later than the checkpoint."""
    return {(topic, 0): End(0, 11) for topic in topics}


class Broker:
    """What `kafka.Broker` answers where it is asked for the lag."""

    def ends(self, topics: Any) -> Mapping[tuple[str, int], End]:
        """Position behind the newest event."""
        return ends(topics)

    def newest(self, places: Any) -> Mapping[Any, Any]:
        """No times."""
        return {}


def test_a_store_is_observed(place: Place, sdk: Sdk) -> None:
    """Each metric of `dedup metrics` is there under its other name, with the same numbers; of time stamps there is the age."""
    consumer(place.store())(batch(*orders(range(3)), event(3, "bad", -1)), 0)
    signals.observe(place.store(), provider=sdk.provider)
    found, values = sdk.collect(), Numbers(place.store()).values()
    assert points(found["dedup.up"]) == {(): 1.0}
    for name, metric in METRICS.items():
        told = {tuple(labels.values()): number for labels, number in values[name]}
        if not told:
            assert metric.otel not in found or not found[metric.otel].data.data_points
            continue
        one = found[metric.otel]
        assert one.unit == metric.unit and type(one.data).__name__ == ("Sum" if metric.grows else "Gauge")
        expected = {labels: time.time() - number for labels, number in told.items()} if metric.age else told
        assert points(one, *(ATTRIBUTES[label] for label in ("consumer", *metric.labels))) == pytest.approx(expected, abs=60)
    assert points(found["dedup.letters.open"], "dedup.kind")["REJECTED",] == 1
    assert 0 <= points(found["dedup.letters.oldest.age"], CONSUMER)["shop",] < 60


def test_all_open_letters_are_counted(place: Place) -> None:
    """Also those of many kinds of errors, with the oldest one, which may be the only one of its kind."""
    run = consumer(place.store(), budget=None)
    run._handler = None
    words = ["".join(pair) for pair in product("abcdefghijk", repeat=2)]

    @run.foreach(on="driver")
    def refuse(event: Any, tx: Any) -> None:
        tx.dead_letter(event, f"word {words[event.data['amount']]}")

    run(batch(*orders(range(len(words)))), 0)
    found = look(place.store(), "shop")
    assert found.letters == {"REJECTED": len(words)} and found.damage is None


def test_letters_behind_others_are_counted_apart(place: Place, dedup: Any) -> None:
    """A flood in one sequence is one open letter and many that wait behind it: metrics and status have both numbers."""
    run = consumer(place.store(), budget=None, sequence_key="partition")
    run(batch(*(event(n, f"bad {n}", -1) for n in range(5))), 0)
    found = look(place.store(), "shop")
    assert (found.letters, found.blocked) == ({"REJECTED": 1}, {"REJECTED": 4})
    values = Numbers(place.store()).values()
    assert ({"consumer": "shop", "kind": "REJECTED"}, 4.0) in values["dedup_blocked_letters"]
    (shown,) = json.loads(dedup("status --json", place)[1])
    assert (shown["open_letters"], shown["blocked_letters"]) == (1, 4)


def test_the_lag_is_observed_where_a_broker_is_named(place: Place, sdk: Sdk) -> None:
    """By topic and partition, as the conventions name them."""
    consumer(place.store())(batch(*orders(range(4))), 0)
    signals.observe(place.store(), "shop", broker=Broker(), provider=sdk.provider)  # type: ignore[arg-type]
    where = (CONSUMER, "dedup.source", "messaging.destination.name", "messaging.destination.partition.id")
    assert points(sdk.collect()["dedup.lag"], *where) == {("shop", "broker", "orders", "0"): 7}


def test_a_consumer_whose_topic_is_gone_has_its_other_numbers(place: Place) -> None:
    """Only its lag is missing, and why is told; the damage of `dedup metrics` is that of the tables."""

    class Without:
        """A broker that has no topic."""

        def ends(self, topics: Any) -> Any:
            """Nothing."""
            raise ConfigError(f"There is no topic {topics[0]}.")

    consumer(place.store())(batch(*orders(range(4))), 0)
    told: list[Exception] = []
    found = Numbers(place.store(), broker=Without(), tell=told.append).values()
    assert found["dedup_lag_events"] == [] and list(map(str, told)) == ["There is no topic orders."]
    assert [number for _, number in found["dedup_checkpoint"]] == [3] and [number for _, number in found["dedup_damage"]] == [0]


def test_the_store_is_read_once_a_collection(place: Place, sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """All instruments of one collection show one reading, and the next collection shows the next one."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    store, asked = place.store(), []
    ask = store.consumers
    monkeypatch.setattr(store, "consumers", lambda: asked.append(1) or ask())
    signals.observe(store, provider=sdk.provider)
    assert points(sdk.collect()["dedup.checkpoint"], CONSUMER) == {("shop",): 2} and len(asked) == 1
    consumer(place.store())(batch(*orders(range(3, 6))), 1)
    assert points(sdk.collect()["dedup.checkpoint"], CONSUMER) == {("shop",): 5} and len(asked) == 2


def test_a_store_that_cannot_be_read_is_a_number(place: Place, sdk: Sdk, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """`dedup.up` is 0, nothing else is told, the log says why, and the next collection tries again."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    store = place.store()

    def unreachable() -> list[str]:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(store, "consumers", unreachable)
        signals.observe(store, provider=sdk.provider)
        found = sdk.collect()
    told = {name: points(metric) for name, metric in found.items() if metric.data.data_points}
    assert told == {"dedup.up": {(): 0.0}} and "no answer" in caplog.text
    assert points(sdk.collect()["dedup.up"]) == {(): 1.0}


def test_the_number_of_series_does_not_grow_with_the_events(place: Place, sdk: Sdk) -> None:
    """Keys, ids and texts of errors are no attributes: a hundred of each are as many series as one."""

    def failing(rows: Any, tx: Any) -> None:
        for place, one in enumerate(rows["data"].to_pylist()):
            tx.dead_letter(rows.slice(place, 1), f"reason {one['id']}")

    run = recorded(place, sdk)
    run._handler = None
    run.foreach_batch(failing)
    signals.observe(place.store(), provider=sdk.provider)
    counted = []
    for number, last in enumerate((2, 4, 100)):
        run(batch(*orders(range(last // 2, last))), number)
        found = sdk.collect()
        counted.append({name: len(metric.data.data_points) for name, metric in found.items()})
        attributes = {key for metric in found.values() for point in metric.data.data_points for key in point.attributes or ()}
        assert attributes <= BOUNDED
    assert counted[1] == counted[2] and points(found["dedup.letters.parked"], CONSUMER) == {("shop",): 53}


def test_a_recorder_can_be_pickled() -> None:
    """A consumer goes to Spark's tasks, or to the server of Spark Connect, as a whole; there it records for the SDK of that process."""
    assert callable(pickle.loads(pickle.dumps(signals.recorder())))


LATER = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from dedup import Report, signals
told, reader = signals.recorder(), InMemoryMetricReader()
told(Report(delivered=1, processed=1, consumer="before"))
metrics.set_meter_provider(MeterProvider([reader]))
told(Report(delivered=2, processed=2, consumer="shop"))
for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
    print(metric.name, *(point.attributes["messaging.consumer.group.name"] for point in metric.data.data_points))
"""


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.full
def test_it_uses_the_sdk_that_the_program_sets_up() -> None:
    """The global provider counts, also one that is set later; before, nothing is kept and nothing fails."""
    done = run_alone(LATER)
    assert "messaging.client.consumed.messages shop\n" in done.stdout and "before" not in done.stdout, done.stderr


@pytest.mark.full
def test_without_the_extra_it_is_one_sentence() -> None:
    """Importing needs no OpenTelemetry; using it says what to install."""
    absent = "import sys; sys.modules['opentelemetry'] = None; from dedup import signals; print('imported'); "
    for call in ("signals.recorder()", "signals.observe(None)"):
        done = run_alone(absent + call)
        assert done.stdout == "imported\n" and "needs opentelemetry-api: pip install 'dedup-spark[otel]'" in done.stderr
    loaded = run_alone("import sys; from dedup import signals; print(*{m.split('.')[0] for m in sys.modules})").stdout.split()
    assert "dedup" in loaded and not {"opentelemetry", "prometheus_client", "pyspark", "psycopg", "deltalake", "typer"} & set(loaded)


def test_systems_have_the_names_of_the_conventions() -> None:
    """Kafka and Event Hubs as the conventions name them; several topics of one report have no name."""
    from dedup.signals.opentelemetry import _place

    hub, kafka = Partition("shop.servicebus.windows.net", "orders", 0), Partition("kafka", "orders", 0)
    assert _place({hub: 1}) == {"messaging.system": "eventhubs", "messaging.destination.name": "orders"}
    assert _place({kafka: 1, Partition("kafka", "returns", 0): 1}) == {"messaging.system": "kafka"}
    assert _place({hub: 1, kafka: 1}) == {"messaging.system": "_OTHER", "messaging.destination.name": "orders"}
