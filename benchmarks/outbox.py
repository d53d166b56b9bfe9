"""The outbox: the same batch with a message for each order and without any; and dispatch to Kafka beside a bare producer.

Both are on PostgreSQL. The bare producer sends the same bytes from memory with the same settings, and remembers nothing.
Called by run.py.
"""

from __future__ import annotations

import sys
import time
import uuid
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from benchmarks import postgres
from benchmarks.events import Topic, land
from benchmarks.ours import SINK, consumer, load
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, contest
from dedup.core.messages import MESSAGES, Messages, lanes, random_ids
from dedup.outbox import Dispatcher
from dedup.postgres import PostgresStore

KEYS, SIZE = 1_000, 200


def load_and_publish(orders: Any, tx: Any) -> None:
    """Append all orders to a sink, and send each of them on."""
    tx.write(orders.select("data.*"), SINK)
    columns = ("source", "topic", "partition", "sequence_number", "part", "key", "body")
    tx.publish(orders.select(*columns), "out", key="key", order="part")


def load_and_keep(orders: Any, tx: Any) -> None:
    """The floor: the keys and bodies of the same messages, as rows of a table without any index that nobody could send from."""
    tx.write(orders.select("data.*"), SINK)
    tx.write(orders.select("key", "body"), "public.kept")


def compare_commits(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Batches with a message for each order, with its bytes in a plain table, and without, in databases of their own. Verified."""
    from benchmarks.run import database

    sizes, topic = _longer(sizes), Topic()
    land([topic.batch(sizes.events) for _ in range(sizes.batches)], folder / "topic")
    with database(dsn) as other, database(dsn) as third, ExitStack() as stack:
        places = dict(zip(("with an outbox", "without", "plain rows"), (dsn, other, third), strict=True))
        for place in places.values():
            postgres.create_sinks(place)
        with psycopg.connect(third) as connection:
            connection.execute("CREATE TABLE kept (key bytea, body bytea)")
        stores = {name: stack.enter_context(closing(PostgresStore(place))) for name, place in places.items()}
        handlers = {"with an outbox": load_and_publish, "without": load, "plain rows": load_and_keep}
        ways = {name: consumer(store, handlers[name]) for name, store in stores.items()}
        taken = contest(spark, folder / "topic", ways, sizes.warm)
        stored = stores["with an outbox"].outbox("benchmark").lag().waiting
        for place in places.values():
            postgres.verify(place, SINK, topic.facts, once=True)
    assert stored == topic.facts.orders, f"{stored} messages of {topic.facts.orders} orders"
    measures = [
        throughput("outbox/commit_path", taken["with an outbox"], taken["without"], sizes.events),
        throughput("outbox/commit_path_floor", taken["plain rows"], taken["without"], sizes.events),
    ]
    return measures, {f"outbox, {name}": seconds for name, seconds in taken.items()}


def _longer(sizes: Sizes) -> Sizes:
    """Three times as many batches, of which twice as many count: the JVM compiles for long."""
    batches = 3 * sizes.batches
    return replace(sizes, batches=batches, warm=batches - 2 * (sizes.batches - sizes.warm))


def compare_dispatch(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """A dispatcher over a full outbox beside a bare producer, in turns, each into a topic of its own. Verified by counting."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from kit import kafka_kit
    from kit.kafka_server import running_broker

    seconds: Seconds = {"outbox dispatch": [], "bare producer": []}
    bodies = [b"%012d" % n + b"x" * (SIZE - 12) for n in range(sizes.events)]
    with running_broker() as broker, closing(PostgresStore(dsn)) as store:
        store.migrate()
        for number in range(sizes.rounds):
            for name in sorted(seconds, reverse=bool(number % 2)):
                topic = kafka_kit.Topic(broker.servers, f"bench-{uuid.uuid4().hex[:8]}")
                topic.create(partitions=4)
                send = _bare(broker.servers) if name == "bare producer" else _dispatched(store, broker.servers, topic.name, bodies)
                begun = time.perf_counter()
                send(topic.name, bodies)
                seconds[name].append(time.perf_counter() - begun)
                arrived = sum(topic.ends(p)[1] for p in range(4))
                assert arrived == len(bodies), f"{name}: {arrived} of {len(bodies)} messages"
    mine, bare = (taken[1:] for taken in seconds.values())
    return [throughput("outbox/dispatch_vs_producer", mine, bare, len(bodies))], {name: taken[1:] for name, taken in seconds.items()}


def _bare(servers: str) -> Any:
    """What one writes without an outbox."""
    from confluent_kafka import Producer

    from dedup.kafka.outbox import SETTINGS

    def send(topic: str, bodies: list[bytes]) -> None:
        """Produce the bodies with a bare producer, and wait until all are acknowledged."""
        producer = Producer({**SETTINGS, "bootstrap.servers": servers, "log_level": 0})
        for number, body in enumerate(bodies):
            producer.produce(topic, body, b"%d" % (number % KEYS), headers=[("message-id", b"%d" % number)])
        assert producer.flush(60) == 0

    return send


def _dispatched(store: PostgresStore, servers: str, topic: str, bodies: list[bytes]) -> Any:
    """An outbox of its own, filled; what is timed is its dispatch, from the first look to the last mark."""
    from dedup.kafka import Topics

    name = f"bench-{topic}"
    fill(store, name, topic, bodies)
    destination = Topics(servers)

    def send(_topic: str, _bodies: list[bytes]) -> None:
        """Dispatch the messages that the outbox holds."""
        done = Dispatcher(store.outbox(name), destination).once()
        assert done.sent == len(bodies), done
        destination.close()

    return send


def fill(store: PostgresStore, name: str, topic: str, bodies: list[bytes]) -> None:
    """Put messages into the outbox of a new consumer, as a batch does."""
    from checkpoint.holders import take_epoch
    from deadletter.store import Commit

    keys = pa.array([b"%d" % (n % KEYS) for n in range(len(bodies))])
    rows = [random_ids(len(bodies)), keys, pa.array(bodies), pa.nulls(len(bodies), MESSAGES.field("headers").type), lanes(topic, keys)]
    epoch = take_epoch(store, name, "run", 1.0, force=True).epoch
    with store.begin(name, epoch) as transaction:
        transaction.enqueue(Messages(topic, pa.table(rows, schema=MESSAGES), derived=False))
        transaction.execute(Commit())
