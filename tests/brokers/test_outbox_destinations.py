"""Both stores, both destinations: an answer is lost, a mark is lost, and the next consumer has each message once, in order per key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import DestinationUnavailable
from dedup import Consumer
from dedup.outbox import Dispatcher
from kit.kafka_kit import Topic
from kit.kafka_proxy import proxied
from kit.orders import assert_proven, batch, consumer, event
from kit.outgoing import outgoing, states
from kit.places import SINK, Place


class Died(Exception):
    """The process is gone."""


@dataclass(frozen=True)
class Way:
    """A destination that can lose its next answer, and what it holds, partition by partition, as the next consumer reads it."""

    name: str
    destination: Any
    lose: Callable[[], object]
    read: Callable[[], list[pa.Table]]


@pytest.fixture(params=[pytest.param("kafka", marks=pytest.mark.kafka), pytest.param("event hubs", marks=pytest.mark.full)])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """A real broker behind a proxy that swallows answers, and the double of Event Hubs."""
    made = _kafka(request) if request.param == "kafka" else _hub(request)
    yield from made


def _kafka(request: pytest.FixtureRequest) -> Iterator[Way]:
    from dedup.kafka import Broker, Topics, log_reader

    topic: Topic = request.getfixturevalue("topic")
    broker = Broker(topic.servers)

    def read() -> list[pa.Table]:
        spans = broker.spans([topic.name]).items()
        return [log_reader(broker).read(topic.name, number, begin, end - 1) for (_, number), (begin, end) in spans if begin < end]

    with proxied(request.getfixturevalue("kafka")) as proxy:
        yield Way(topic.name, Topics(proxy.servers), proxy.arm, read)
        assert proxy.lost


def _hub(request: pytest.FixtureRequest) -> Iterator[Way]:
    from dedup.eventhub import Connection, SendingHubs
    from dedup.eventhub import log_reader as eventhub_log_reader

    double, hub = request.getfixturevalue("eventhubs"), request.getfixturevalue("new_hub")(partitions=2)
    log = eventhub_log_reader(double.connection_string, hub)

    def read() -> list[pa.Table]:
        return [log.read(hub, number, 0, len(events) - 1) for number, events in enumerate(double.kept(hub, 2)) if events]

    hubs = SendingHubs(Connection.of(double.connection_string, hub="any"), retry_backoff_factor=0.05)
    yield Way(hub, hubs, lambda: double.order("lose_answers", count=1), read)


@pytest.mark.fast_on("delta")
def test_what_is_published_is_one_event_at_the_next_consumer(place: Place, way: Way) -> None:
    """Twice on the way, once in the end: ids are the same however often a message is sent."""
    run = consumer(place.store())
    run._handler = None
    run.foreach_batch(lambda rows, tx: tx.publish(outgoing(rows), way.name, key="to", order="n"))
    for number in range(2):
        run(batch(*[event(n, f"o{n:02}", n % 5) for n in range(20 * number, 20 * number + 20)]), number)
    way.lose()

    def die(step: str) -> None:
        if step == "sent":
            raise Died

    with pytest.raises((Died, DestinationUnavailable)):
        Dispatcher(place.store().outbox("shop"), way.destination, limit=1_000, workers=1, on_step=die).once()
    way.lose()
    dispatcher = Dispatcher(place.store().outbox("shop"), way.destination, limit=7)
    while states(place) != {"SENT": 40}:
        dispatcher.once()
    way.destination.close()
    came = way.read()
    assert sum(table.num_rows for table in came) > 40
    last = Consumer("last", place.store(), query="q")
    order: dict[bytes, list[str]] = {}

    @last.foreach_batch
    def write(rows: pa.Table, tx: Any) -> None:
        bodies = rows["body"].cast(pa.string())
        tx.write(pa.table([bodies, rows["key"].cast(pa.string()).cast(pa.int64())], schema=SINK), "orders")
        for key, body in zip(rows["key"].to_pylist(), bodies.to_pylist(), strict=True):
            order.setdefault(key, []).append(body)

    for number, table in enumerate(came):
        last(table, number)
    assert place.read() == [{"id": f"o{n:02}", "amount": n % 5} for n in range(40)]
    assert all(bodies == sorted(bodies) for bodies in order.values())
    assert_proven(place.store(), "last")
