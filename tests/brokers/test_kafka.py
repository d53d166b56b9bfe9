"""The contract on a real Kafka topic, without Spark: real retries, transactions, compaction, retention, and a topic created again.

Batches are what the log reader gives; no test here starts a JVM beside the broker's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint import changes
from checkpoint.errors import IncarnationChanged, LettersUnread, PositionGap, PositionsMissing
from checkpoint.position import Partition, Ranges
from deadletter.selection import Selection
from dedup import ReprocessOptions, kafka, replay, reprocess
from dedup.consumer import Consumer
from dedup.verify import verify
from kit import kafka_server
from kit.kafka_kit import Topic, compacted, flush, order
from kit.kafka_proxy import proxied
from kit.orders import assert_proven, consumer, flatten, ids, letters
from kit.places import Place


def reading(place: Place, servers: str, **settings: Any) -> Consumer:
    """The consumer of the contract suite, which can read this broker's log again."""
    broker = kafka.Broker(servers)
    made = consumer(place.store(), source=broker.cluster_id(), incarnation=broker.topic_ids, **settings)
    made.register_log_reader(kafka.log_reader(broker, arrow=True))
    return made


def stream(run: Consumer, topic: Topic, batch: int = 0, size: int = 7, first: int = 0) -> None:
    """Everything that partition 0 has from `first` on, in batches of some positions."""
    reader, end = kafka.log_reader(topic.servers), topic.ends()[1]
    for start in range(max(first, topic.ends()[0]), end, size):
        run(reader.read(topic.name, 0, start, min(start + size, end) - 1), batch)
        batch += 1


def absent(place: Place) -> Ranges:
    """What verify says was never delivered."""
    report = verify(place.store(), "shop")
    assert report.ok, report.contradictions
    return report.partitions[0].absent


@pytest.mark.parametrize("idempotent", [pytest.param(True, marks=pytest.mark.full), False])
def test_retries_of_a_real_producer(place: Place, kafka: kafka_server.Broker, topic: Topic, idempotent: bool) -> None:
    """Answers are lost: a producer that is not idempotent writes its messages twice, at new positions, and each has its effect once."""
    with proxied(kafka) as proxy:
        settings = {"bootstrap.servers": proxy.servers, "enable.idempotence": idempotent, "retry.backoff.ms": 10}
        producer = topic.producer(**settings)
        for number in range(40):
            if number in (5, 20):
                flush(producer)
                proxy.arm()
            producer.produce(topic.name, order(f"k{number}", number), partition=0)
        flush(producer)
        assert proxy.lost == 2
    written = topic.ends()[1]
    assert (written == 40) if idempotent else (written > 40)
    run = reading(place, kafka.servers)
    stream(run, topic)
    assert sorted(ids(place.read())) == sorted(f"k{n}" for n in range(40))
    assert verify(place.store(), "shop").counts["duplicate"] == written - 40
    assert_proven(place.store())


def test_aborted_transactions_leave_gaps_that_are_no_losses(place: Place, kafka: kafka_server.Broker, topic: Topic) -> None:
    """Aborted messages and markers are absent positions: verify agrees, and reading the log again neither finds nor misses them."""
    topic.send_orders(("a", 1))
    topic.send_transaction([order("no", 1), order("no", 2)], commit=False)
    topic.send_transaction([order("b", 2)], commit=True)
    topic.send_orders(("c", 3))
    run = reading(place, kafka.servers)
    stream(run, topic, size=2)
    assert ids(place.read()) == ["a", "b", "c"]
    assert absent(place) == Ranges.of([(1, 3), (5, 5)])
    done = reprocess(Selection("shop", topic=topic.name), run, from_log=True)
    assert (done.absent, done.filled.delivered, done.lost) == (4, 0, 0)
    assert ids(place.read()) == ["a", "b", "c"]


def test_a_new_query_may_begin_behind_markers(place: Place, kafka: kafka_server.Broker, topic: Topic) -> None:
    """Right behind the checkpoint there may be nothing but an aborted transaction: no gap, says the log. An event there is one."""
    topic.send_orders(("a", 1))
    stream(reading(place, kafka.servers, query="one"), topic)
    topic.send_transaction([order("no", 1)], commit=False)
    topic.send_orders(("b", 2), ("c", 3))
    rows = log_of(kafka).read(topic.name, 0, 0, 4)
    with pytest.raises(PositionGap, match="0 1-3"):
        reading(place, kafka.servers, query="two")(rows.slice(2), 0)
    blind = reading(place, kafka.servers, query="two")
    blind.read_log = None
    with pytest.raises(PositionGap, match="0 1-2"):
        blind(rows.slice(1), 0)
    assert reading(place, kafka.servers, query="two")(rows.slice(1), 0).processed == 2
    topic.send_orders(("lost", 1), ("d", 4), ("e", 5))
    topic.delete_records(0, before=6)
    with pytest.raises(PositionGap, match=r"/0 5\. Start"):
        reading(place, kafka.servers, query="three")(rows.slice(1).set_column(4, "offset", pa.array([6, 7])), 0)
    assert ids(place.read()) == ["a", "b", "c"]


def test_positions_that_retention_took_are_named(place: Place, kafka: kafka_server.Broker, topic: Topic) -> None:
    """What is lost is told from what is still there and from what never was: by position, before anything runs past it."""
    topic.send_orders(*((f"k{n}", n) for n in range(4)))
    run = reading(place, kafka.servers, query="one")
    stream(run, topic)
    topic.send_orders(*((f"k{n}", n) for n in range(4, 8)))
    topic.send_transaction([order("no", 1)], commit=False)
    topic.send_orders(("last", 1))
    topic.delete_records(0, before=6)
    broker = kafka_broker(kafka)
    with pytest.raises(PositionGap, match=rf"{topic.name}/0 4-5.*accept-gap shop"):
        run.starting_offsets(broker, topic.name)
    place.store().amend("shop", changes.accept_gap, by="test", reason="known loss")
    assert json.loads(run.starting_offsets(broker, topic.name)) == {topic.name: {"0": 6, "1": -2}}
    late = reading(place, kafka.servers, query="two")
    stream(late, topic, first=10)
    asked = Selection("shop", topic=topic.name)
    with pytest.raises(PositionsMissing, match=r"4-5\]? are not in the log"):
        reprocess(asked, late, from_log=True)
    done = reprocess(asked, late, from_log=True, options=ReprocessOptions("test", skip_missing=True))
    assert (done.lost, done.filled.processed) == (2, 2)
    assert sorted(ids(place.read())) == ["k0", "k1", "k2", "k3", "k6", "k7", "last"]
    assert_proven(place.store())


def kafka_broker(server: kafka_server.Broker) -> kafka.Broker:
    """As the library asks it."""
    return kafka.Broker(server.servers)


def test_what_was_compacted_is_absent(place: Place, kafka: kafka_server.Broker, topic: Topic) -> None:
    """A stream over a compacted topic jumps over what is gone, and the proof shows the gap as never delivered."""
    topic.delete()
    other = compacted(topic, [order(f"k{n}", n) for n in range(5)])
    other.send([order("z", 1)], key=b"z")
    run = reading(place, kafka.servers)
    run(log_of(kafka).read(other.name, 0, 0, other.ends()[1] - 1), 0)
    assert {"k0", "k4", "z"} == set(ids(place.read()))
    assert Ranges.of([(1, 3)]) & absent(place) == Ranges.of([(1, 3)])
    done = reprocess(Selection("shop", topic=other.name), run, from_log=True)
    assert (done.absent >= 3, done.filled.delivered, done.lost) == (True, 0, 0)


def log_of(server: kafka_server.Broker) -> kafka.LogReader:
    """Reads this broker."""
    return kafka.log_reader(server.servers)


def test_a_topic_that_is_created_again_begins_a_new_life(place: Place, kafka: kafka_server.Broker, topic: Topic) -> None:
    """Grown past the old checkpoint, nothing but the broker's id tells it: refused by batch, start and reading again, until accepted."""
    broker = kafka_broker(kafka)
    topic.send_orders(*((f"k{n}", n) for n in range(3)), ("bad", -1))
    run = reading(place, kafka.servers, max_body=1)
    stream(run, topic)
    topic.delete()
    topic.create(partitions=1)
    topic.send_orders(*((f"x{n}", n) for n in range(6)))
    again = reading(place, kafka.servers, query="two", max_body=1)
    for refused in (
        lambda: again(log_of(kafka).read(topic.name, 0, 4, 5), 0),
        lambda: again.check(log_of(kafka).read(topic.name, 0, 0, 0)),
        lambda: again.starting_offsets(broker, topic.name),
        lambda: reprocess(Selection("shop"), again),
        lambda: replay(Selection("shop", topic=topic.name), again, accept_double=True),
    ):
        with pytest.raises((IncarnationChanged, LettersUnread), match="accept-incarnation shop"):
            refused()
    source = broker.cluster_id()
    place.store().amend("shop", lambda head: changes.accept_incarnation(head, source, topic.name), by="test", reason="re-created")
    assert json.loads(again.starting_offsets(broker, topic.name)) == {topic.name: {"0": -2}}
    stream(again, topic)
    assert ids(place.read()) == ["k0", "k1", "k2", *(f"x{n}" for n in range(6))]
    assert_proven(place.store())


def test_positions_are_replayed_and_large_bodies_reprocessed_from_the_log(
    place: Place, kafka: kafka_server.Broker, topic: Topic, tmp_path: Path
) -> None:
    """A registered dk.log_reader(...) is all that replay, and letters which keep only the beginning of their bodies, need."""
    place.create_merge_sink("balances")
    topic.send_orders(("a", 1), ("b", -2), ("c", 3))
    run = reading(place, kafka.servers, max_body=5)
    run._handler = lambda rows, tx: tx.merge(flatten(tx.reject(rows, negative(rows), "negative")), "balances", keys="id")
    stream(run, topic)
    (letter,) = letters(place.store())
    assert letter["body_size"] > 5 and letter["kind"] == "TOO_LARGE"
    run._handler = lambda rows, tx: tx.merge(doubled(rows), "balances", keys="id")
    assert reprocess(Selection("shop"), run).reprocessed == 1
    assert replay(Selection("shop", topic=topic.name), run).replayed == 2
    assert place.read("balances") == [{"id": "a", "amount": 2}, {"id": "b", "amount": -4}, {"id": "c", "amount": 6}]
    assert_proven(place.store())


def negative(rows: Any) -> Any:
    """Which orders are."""
    import pyarrow.compute as pc

    return pc.less(pc.struct_field(rows["data"], "amount"), 0)


def doubled(rows: Any) -> Any:
    """The orders with twice their amounts."""
    import pyarrow.compute as pc

    flat = flatten(rows)
    return flat.set_column(1, "amount", pc.multiply(flat["amount"], 2))


def test_the_cluster_names_the_source(place: Place, kafka: kafka_server.Broker, topic: Topic) -> None:
    """Checkpoints stand under the cluster's id, so that two clusters with a topic of one name do not meet."""
    topic.send_orders(("a", 1))
    stream(reading(place, kafka.servers), topic)
    assert list(place.store().head("shop").checkpoints) == [Partition(kafka_broker(kafka).cluster_id(), topic.name, 0)]
