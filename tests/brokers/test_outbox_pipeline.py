"""Consume, handle, publish, dispatch, consume again, with kills on all sides and lost answers; each once, in order per key."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dedup.demo import supervise
from dedup.outbox import Message
from fixtures.fix_eventhubs import MakeHub
from kit import kafka_server
from kit.children import Child, Nursery
from kit.eventhubs.control import Double
from kit.kafka_kit import Topic, flush, received
from kit.kafka_proxy import proxied
from kit.pg_run import run

KEYS = 50

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3_600)]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    """Makes processes that may be killed."""
    one = Nursery(tmp_path)
    yield one
    one.close()


class Fleet:
    """Processes that are killed and begun again. Some of the time something else is broken, too.

    Args:
        kills: how many there will be.
        harm: what may be broken beside the processes.
    """

    def __init__(
        self, nursery: Nursery, tasks: Sequence[dict[str, Any]], seed: int, kills: int, harm: Sequence[Callable[[], object]] = ()
    ) -> None:
        self._nursery, self._tasks, self._dice, self._most, self._harm = nursery, tasks, random.Random(seed), kills, harm
        self._living: list[Child] = [nursery.start(task) for task in tasks]
        self.kills, self._next = 0, time.monotonic()

    def disturb(self, done: float) -> None:
        """Kill one of them where it is time for that: kills are spread over the work, of which this part is done."""
        for child in self._living:
            child.require_running()
        if time.monotonic() < self._next or self.kills >= min(self._most, 1 + self._most * done):
            return
        self._next = time.monotonic() + 0.3 + self._dice.random()
        self.kills += 1
        victim = self._dice.randrange(len(self._tasks))
        self._living[victim].send(signal.SIGKILL)
        self._living[victim].wait()
        self._living[victim] = self._nursery.start(self._tasks[victim])
        if self._harm:
            self._dice.choice(self._harm)()

    def wait(self, dsn: str, events: int) -> None:
        """Until the last table has every event, disturbing them meanwhile."""
        patience, done = time.monotonic() + 3_000, 0
        while self.kills < self._most or done < events:
            done = run(dsn, "select count(distinct n) from last")[0][0]
            self.disturb(done / events)
            assert time.monotonic() < patience, "it did not come to an end"
            time.sleep(0.1)
        time.sleep(1)  # a duplicate that is still on its way would come now

    def end(self, until: Path) -> None:
        """All of them end well."""
        until.touch()
        for child, task in zip(self._living, self._tasks, strict=True):
            if task["do"] == "run":
                child.send(signal.SIGTERM)
            child.finish()


def create_tables(dsn: str) -> None:
    """Where the two consumers write; the order of arrival is kept."""
    for table in ("first", "last"):
        run(dsn, f"create table {table} (at bigint generated always as identity, k text, n bigint)")


def check(dsn: str, events: int, ordered: Sequence[str] = ("first", "last")) -> None:
    """Each event is in both tables once, those of a key in order; each message is marked as sent and has its own id."""
    for table in ("first", "last"):
        assert run(dsn, f"select count(*), count(distinct n), min(n), max(n) from {table}") == [(events, events, 0, events - 1)]
    for table in ordered:
        wrong = f"select count(*) from (select n < lag(n) over (partition by k order by at) as back from {table}) x where back"
        assert run(dsn, wrong) == [(0,)], table
    sent = "select count(*) filter (where state = 1), count(*), count(distinct id) from dedup.outbox_message"
    assert run(dsn, sent) == [(events,) * 3]


def fill(topic: Topic, events: int) -> None:
    """Numbers, over some keys, those of a key in order: a producer that is not idempotent may change it where it tries again."""
    settings = {"queue.buffering.max.messages": 1_000_000, "partitioner": "murmur2_random", "enable.idempotence": True}
    producer = topic.producer(**settings)
    for n in range(events):
        producer.produce(topic.name, b"%d" % n, b"k%d" % (n % KEYS))
    flush(producer)


def fill_hub(double: Double, hub: str, events: int) -> None:
    """The same, in a hub."""
    from dedup.eventhub import Connection, SendingHubs

    with_keys = SendingHubs(Connection.of(double.connection_string, hub="any"))
    assert not with_keys.send([Message(n, hub, b"k%d" % (n % KEYS), f"in-{n}", b"%d" % n) for n in range(events)]).failed
    with_keys.close()


def behind(topic: Topic) -> Topic:
    """A topic for what comes out."""
    out = Topic(topic.servers, f"{topic.name}-out")
    out.create(partitions=2)
    return out


@pytest.mark.full
@pytest.mark.parametrize(
    ("events", "kills", "exactly_once"),
    [
        (10_000, 9, False),
        (6_000, 9, True),
        pytest.param(100_000, 30, False, marks=pytest.mark.full),
        pytest.param(100_000, 30, True, marks=pytest.mark.full),
    ],
)
def test_through_the_outbox_each_message_once_and_in_order(
    postgres: str, topic: Topic, nursery: Nursery, tmp_path: Path, events: int, kills: int, exactly_once: bool
) -> None:
    """Two consumers and the dispatchers are killed at random: at the end each event is in the last table once, in its key's order.

    Exactly once, where there is one dispatcher: each message is once in the topic already, for who reads what is committed.
    """
    out, until = behind(topic), tmp_path / "until"
    create_tables(postgres)
    fill(topic, events)
    common = {"module": "kit.outbox_pipeline", "dsn": postgres, "servers": topic.servers, "until": str(until)}
    first = {**common, "do": "consume", "name": "first", "topic": topic.name, "out": out.name}
    last = {**common, "do": "consume", "name": "last", "topic": out.name}
    dispatcher = {**common, "do": "dispatch", "exactly_once": exactly_once}
    fleet = Fleet(nursery, [first, last, *[dispatcher] * (1 if exactly_once else 2)], seed=events, kills=kills)
    fleet.wait(postgres, events)
    fleet.end(until)
    check(postgres, events)
    if exactly_once:
        assert sorted(int(m.value()) for m in received(out)) == list(range(events))


@pytest.mark.full
@pytest.mark.parametrize(("events", "kills"), [(4_000, 6), pytest.param(100_000, 30, marks=pytest.mark.full)])
def test_from_hub_to_hub_each_message_once_and_in_order(
    postgres: str, eventhubs: Double, new_hub: MakeHub, nursery: Nursery, tmp_path: Path, events: int, kills: int
) -> None:
    """Runners on both sides and two dispatchers are killed; the hubs lose answers, refuse, break connections and repeat events."""
    came, out, until = new_hub(partitions=4), new_hub(partitions=4), tmp_path / "until"
    create_tables(postgres)
    fill_hub(eventhubs, came, events)
    common = {"module": "kit.outbox_pipeline", "dsn": postgres, "hubs": eventhubs.connection_string, "until": str(until), "batch": 500}
    first = {**common, "do": "run", "name": "first", "topic": came, "out": out}
    last = {**common, "do": "run", "name": "last", "topic": out}
    dispatcher = {**common, "do": "dispatch"}
    harm: list[Callable[[], object]] = [
        lambda: eventhubs.order("lose_answers", count=2),
        lambda: eventhubs.order("drop_sends", count=1),
        lambda: eventhubs.order("throttle", what="send", count=2),
        lambda: eventhubs.order("reset", hub=out),
        lambda: eventhubs.order("again", hub=came, partition=1, count=200),
    ]
    fleet = Fleet(nursery, [first, first, last, last, dispatcher, dispatcher], seed=events, kills=kills, harm=harm)
    fleet.wait(postgres, events)
    fleet.end(until)
    check(postgres, events)


@pytest.mark.full
def test_a_hub_that_grows_meanwhile_loses_and_doubles_nothing(
    postgres: str, eventhubs: Double, new_hub: MakeHub, nursery: Nursery, tmp_path: Path
) -> None:
    """Two dispatchers, which see it at different times, and both runners are killed: each event once at the end. Keys change partitions."""
    events, kills = 1_500, 6
    came, out, until = new_hub(partitions=2), new_hub(partitions=2), tmp_path / "until"
    create_tables(postgres)
    fill_hub(eventhubs, came, events)
    common = {"module": "kit.outbox_pipeline", "dsn": postgres, "hubs": eventhubs.connection_string, "until": str(until), "batch": 40}
    first = {**common, "do": "run", "name": "first", "topic": came, "out": out}
    last = {**common, "do": "run", "name": "last", "topic": out, "look": 2.0}
    slow, quick = ({**common, "do": "dispatch", "look": look} for look in (5.0, 0.2))
    sizes = [8, 3]

    def harm() -> None:
        eventhubs.order("lose_answers", count=2)
        if sizes:
            eventhubs.order("grow", hub=out, partitions=sizes.pop())

    fleet = Fleet(nursery, [first, last, slow, quick], seed=5, kills=kills, harm=[harm])
    fleet.wait(postgres, events)
    fleet.end(until)
    check(postgres, events, ordered=("first",))
    filled = sum(map(bool, eventhubs.kept(out, 8)))
    assert filled > 5, filled


@pytest.mark.full
@pytest.mark.parametrize(("events", "batch", "kills"), [(2_000, 250, 1), pytest.param(100_000, 5_000, 3, marks=pytest.mark.full)])
def test_from_kafka_to_kafka_through_spark_each_message_once_and_in_order(
    postgres: str, kafka: kafka_server.Broker, topic: Topic, nursery: Nursery, tmp_path: Path, events: int, batch: int, kills: int
) -> None:
    """A Spark query is killed with all its processes, so are two dispatchers and the next consumer; the broker's answers are lost."""
    out, until = behind(topic), tmp_path / "until"
    create_tables(postgres)
    fill(topic, events)
    query = {"dsn": postgres, "servers": topic.servers, "topic": topic.name, "out": out.name, "batch": batch}
    query["checkpoint"] = str(tmp_path / "spark")
    command = [sys.executable, "-m", "kit.outbox_pipeline", json.dumps(query)]
    with proxied(kafka) as proxy:
        common = {"module": "kit.outbox_pipeline", "dsn": postgres, "until": str(until)}
        last = {**common, "do": "consume", "name": "last", "topic": out.name, "servers": topic.servers}
        dispatcher = {**common, "do": "dispatch", "servers": proxy.servers}
        fleet = Fleet(nursery, [last, dispatcher, dispatcher], seed=events, kills=6 * kills, harm=[proxy.arm])

        def decided() -> int:
            done = int(run(postgres, "select count(*) from first")[0][0])
            fleet.disturb(done / events)
            return done

        done = supervise.run(command, tmp_path / "log", supervise.moments(events, events, kills), decided)
        fleet.wait(postgres, events)
        fleet.end(until)
        assert done.kills == kills and proxy.lost
    check(postgres, events)
