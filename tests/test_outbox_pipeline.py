"""Kafka to Kafka: consume, handle, publish, dispatch, consume again, with kills on all sides; each once, in order per key."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child, Nursery
from fix_postgres import run
from kafka_kit import Topic, flush

KEYS = 50

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_500)]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    """Makes processes that may be killed."""
    one = Nursery(tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize(("events", "kills"), [(10_000, 9), pytest.param(100_000, 30, marks=pytest.mark.slow)])
def test_through_the_outbox_each_message_once_and_in_order(
    postgres: str, topic: Topic, nursery: Nursery, tmp_path: Path, events: int, kills: int
) -> None:
    """Two consumers and two dispatchers are killed at random: at the end each event is in the last table once, in its key's order."""
    out = Topic(topic.servers, f"{topic.name}-out")
    out.create(partitions=2)
    for table in ("first", "last"):
        run(postgres, f"create table {table} (at bigint generated always as identity, k text, n bigint)")
    producer = topic.producer(**{"queue.buffering.max.messages": 1_000_000, "partitioner": "murmur2_random"})
    for n in range(events):
        producer.produce(topic.name, b"%d" % n, b"k%d" % (n % KEYS))
    flush(producer)
    until, dice = tmp_path / "until", random.Random(events)
    common = {"module": "outbox_pipeline", "dsn": postgres, "servers": topic.servers, "until": str(until)}
    tasks = [
        {**common, "do": "consume", "name": "first", "topic": topic.name, "out": out.name},
        {**common, "do": "consume", "name": "last", "topic": out.name},
        {**common, "do": "dispatch"},
        {**common, "do": "dispatch"},
    ]
    living: list[Child] = [nursery.start(task) for task in tasks]
    for _ in range(kills):
        time.sleep(0.3 + dice.random())
        victim = dice.randrange(len(tasks))
        if not living[victim].ended:
            living[victim].send(signal.SIGKILL)
        living[victim].wait()
        living[victim] = nursery.start(tasks[victim])
    patience = time.monotonic() + 900
    while run(postgres, "select count(distinct n) from last")[0][0] < events:
        for child in living:
            child.require_running()
        assert time.monotonic() < patience, "it did not come to an end"
        time.sleep(0.2)
    time.sleep(1)  # a copy that is still on its way would come now
    until.touch()
    for child in living:
        child.finish()
    for table in ("first", "last"):
        assert run(postgres, f"select count(*), count(distinct n), min(n), max(n) from {table}") == [(events, events, 0, events - 1)]
    wrong = "select count(*) from (select n < lag(n) over (partition by k order by at) as back from last) x where back"
    assert run(postgres, wrong) == [(0,)]
    sent = "select count(*) filter (where state = 1), count(*), count(distinct id) from dedup.outbox_message"
    assert run(postgres, sent) == [(events,) * 3]
