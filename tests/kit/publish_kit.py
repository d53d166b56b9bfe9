"""What the tests of publishers share: publishers that fail fast, copies of their state, and what a consumer makes of what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
import pyarrow as pa

from checkpoint.errors import SourceUnavailable
from deadletter.selection import Selection
from dedup import Consumer, PostgresStore, Takeover
from dedup.eventhub import Sender, log_reader
from dedup.eventhub.rows import SCHEMA
from dedup.publishing import OutgoingEvent, Publisher
from dedup.publishing.events import GATEWAY, Stored
from kit.pg_run import run

TABLES = ("publish_destination", "publisher", "publisher_lane", "publisher_event", "published_id")

Copy = dict[str, bytes]


class Broker:
    """A broker of one hub in this process, in place of the double: the same faults, no network."""

    def __init__(self, most: int = 7) -> None:
        self.most = most  # events of one send
        self.logs: dict[str, list[list[Stored]]] = {}
        self.turn = 0
        self.order("calm")

    def new(self, partitions: int = 1) -> str:
        """An empty hub; gives its name."""
        return self.create(f"hub-{len(self.logs)}", partitions)

    def create(self, hub: str, partitions: int = 1) -> str:
        """An empty hub of this name; an older one is gone."""
        self.logs[hub] = [[] for _ in range(partitions)]
        return hub

    def order(self, do: str, count: int = 0, after: int = 0, **_: Any) -> None:
        """`calm`, or so many of the next sends are not kept (`drop_sends`) or not answered (`lose_answers`)."""
        self.faults, self.after = Counter({do: count}), after  # sends that go well before

    def kept(self, hub: str, partitions: int) -> list[list[dict[str, Any]]]:
        """As the double tells it."""
        return [
            [{"id": e.message_id, "key": e.key, "body": e.body, "properties": e.named} for e in self.logs[hub][number]]
            for number in range(partitions)
        ]

    def take(self, hub: str, partition: int, events: Sequence[Stored]) -> int:
        """What a sender does with it."""
        self.after -= 1
        if self.faults["drop_sends"] and self.after < 0:
            self.faults["drop_sends"] -= 1
            raise SourceUnavailable("not kept")
        self.turn += partition == GATEWAY
        self.logs[hub][partition if partition != GATEWAY else self.turn % len(self.logs[hub])] += events[: self.most]
        if self.faults["lose_answers"] and self.after < 0:
            self.faults["lose_answers"] -= 1
            raise SourceUnavailable("kept")
        return min(self.most, len(events))


class BrokerSender:
    """What sends to it."""

    source = "broker"

    def __init__(self, broker: Broker, hub: str) -> None:
        self.broker, self.topic = broker, hub

    def partitions(self) -> int:
        return len(self.broker.logs[self.topic])

    def largest(self) -> int:
        return 1_048_576

    def send(self, partition: int, events: Sequence[Stored]) -> int:
        return self.broker.take(self.topic, partition, events)

    def close(self) -> None:
        pass


def sender(double: Any, hub: str, **options: Any) -> Any:
    """To a hub of the double; the client itself tries a send twice, quickly."""
    if isinstance(double, Broker):
        return BrokerSender(double, hub)
    return Sender(double.connection_string, hub, **{"retry_backoff_factor": 0.02, "retry_total": 1, **options})


def publisher(dsn: str, double: Any, hub: str, group: str = "shop", **options: Any) -> Publisher:
    """A publisher that gives up after five seconds."""
    client = {name: options.pop(name) for name in ("timeout", "retry_total") if name in options}
    return Publisher(group, PostgresStore(dsn), sender(double, hub, **client), **{"max_outage": 5.0, **options})


def copied(dsn: str) -> Copy:
    """The state of all publishers, as a backup has it."""
    with psycopg.connect(dsn) as connection:
        found = {}
        for table in TABLES:
            with connection.cursor().copy(f"copy dedup.{table} to stdout (format binary)") as copy:
                found[table] = b"".join(copy)
        return found


def restored(dsn: str, copy: Copy) -> None:
    """Put a copy in the place of the state."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"truncate {', '.join(f'dedup.{table}' for table in TABLES)}")
        for table, data in copy.items():
            with connection.cursor().copy(f"copy dedup.{table} from stdin (format binary)") as into:
                into.write(data)


def kept(double: Any, hub: str, partitions: int = 2) -> list[bytes]:
    """The bodies that the hub holds, repetitions included, partition by partition."""
    return [event["body"] for events in double.kept(hub, partitions) for event in events]


def consumed(dsn: str, double: Any, hub: str, partitions: int = 2, name: str = "reader") -> tuple[list[str], list[str]]:
    """What a consumer with the default key makes of the whole hub: bodies in its sink, in the order of the hub, and kinds of letters."""
    store = PostgresStore(dsn)
    run(dsn, f"create table if not exists {name} (partition int, number bigint, body text)")
    consumer = Consumer(name, store, query="q", takeover=Takeover(after=0.5))

    @consumer.foreach_batch
    def write(rows: pa.Table, tx: Any) -> None:
        columns = [rows["partition"], rows["sequence_number"], rows["body"].cast(pa.string())]
        tx.write(pa.Table.from_arrays(columns, names=["partition", "number", "body"]), name)

    consumer(pa.concat_tables([_read(double, hub, number, found) for number, found in enumerate(double.kept(hub, partitions))]), 0)
    letters = [letter["kind"] for letter in store.letters(Selection(limit=None)).to_pylist()]
    bodies = [body for (body,) in run(dsn, f"select body from {name} order by partition, number")]
    store.close()
    return bodies, letters


def _read(double: Any, hub: str, partition: int, events: list[dict[str, Any]]) -> pa.Table:
    if not isinstance(double, Broker):
        return log_reader(double.connection_string, hub).read(hub, partition, 0, len(events) - 1)
    rows = [
        {"source": "broker", "topic": hub, "partition": partition, "sequence_number": n, "body": e["body"], "properties": [_message_id(e)]}
        for n, e in enumerate(events)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _message_id(event: dict[str, Any]) -> tuple[str, bytes]:
    return "message_id", event["id"].encode()


def events(first: int, last: int, **columns: Any) -> list[OutgoingEvent]:
    """Numbered events, of five keys."""
    return [OutgoingEvent(b"%d" % n, key=f"k{n % 5}", **columns) for n in range(first, last)]


def assert_ordered(bodies: list[str]) -> None:
    """Of each of the five keys."""
    for key in range(5):
        mine = [int(body) for body in bodies if int(body) % 5 == key]
        assert mine == sorted(mine)


def waiting(dsn: str) -> int:
    """Events that are stored and not confirmed."""
    return int(run(dsn, "select count(*) from dedup.publisher_event")[0][0])


def texts(bodies: Iterable[bytes]) -> list[str]:
    """As the sink has them."""
    return [body.decode() for body in bodies]
