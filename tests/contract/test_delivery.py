"""What brokers and Spark do to a stream, and what must come of it."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import AmbiguousPosition, ConfigError, PositionGap
from dedup import Selection, reprocess
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders, write_orders
from kit.outgoing import Receiver, dispatcher
from kit.places import Place, PostgresPlace


def test_a_batch_is_written_once_and_accounted_for(place: Place) -> None:
    """Each new event gives its row; counts, checkpoint and records agree."""
    store = place.store()
    report = consumer(store)(batch(*orders(range(5)), *orders(range(3), partition=1)), 0)
    assert (report.delivered, report.processed) == (8, 8)
    assert len(place.read()) == 8
    points = {p.partition: c.sequence_number for p, c in store.head("shop").checkpoints.items()}
    assert points == {0: 4, 1: 2}
    assert_proven(store)


def test_a_replayed_batch_changes_nothing(place: Place) -> None:
    """The same batch id again, from a new process, finds its positions recorded."""
    events = batch(*orders(range(5)), event(5, "p0-0", 0), event(6, "bad", -1), event(7, body=b"{"))
    consumer(place.store())(events, 0)
    before, store = place.read(), place.store()
    report = consumer(store)(events, 0)
    assert report.redelivered == report.delivered == 8
    assert place.read() == before
    assert len(letters(store)) == 2
    assert_proven(store)


def test_a_lost_spark_checkpoint_from_earliest_doubles_nothing(place: Place) -> None:
    """A new query that reads everything again, in other batches, gives no second effect and goes on behind the checkpoint."""
    first = consumer(place.store(), query="old")
    first(batch(*orders(range(4))), 0)
    first(batch(*orders(range(4, 8))), 1)
    second = consumer(place.store(), query="new")
    assert second(batch(*orders(range(6))), 0).redelivered == 6
    report = second(batch(*orders(range(6, 10))), 1)
    assert (report.redelivered, report.processed) == (2, 2)
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(10))
    assert_proven(place.store())


def test_a_lost_spark_checkpoint_from_latest_is_refused(place: Place) -> None:
    """A new query that begins above the checkpoint would lose what lies between: refused, and nothing is written."""
    consumer(place.store(), query="old")(batch(*orders(range(4))), 0)
    with pytest.raises(PositionGap, match=r"4-8.*accept-gap shop"):
        consumer(place.store(), query="new")(batch(*orders(range(9, 12))), 0)
    assert len(place.read()) == 4
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_new_query_that_was_all_redelivery_may_jump_like_any_other(place: Place) -> None:
    """Once a query has shown that it begins at or below the checkpoint, missing positions are the broker's, not a gap."""
    consumer(place.store(), query="old")(batch(*orders(range(4))), 0)
    second = consumer(place.store(), query="new")
    second(batch(*orders(range(4))), 0)
    assert second(batch(*orders(range(7, 9))), 1).processed == 2
    assert_proven(place.store())


def test_a_late_event_is_handled_as_new(place: Place) -> None:
    """A position below the checkpoint that no batch has seen is processed once, and counted as late."""
    store = place.store()
    run = consumer(store)
    run(batch(*orders([0, 1, 5])), 0)
    assert run(batch(*orders([1, 3, 5])), 1).processed == 1
    assert run(batch(*orders([3])), 2).redelivered == 1
    late = [r for b in store.batches("shop").to_pylist() for r in b["late"]]
    assert late == [{"first": 3, "last": 3}]
    assert len(place.read()) == 4
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_duplicate_in_one_batch_is_dropped_and_the_first_position_wins(place: Place) -> None:
    """Two positions of one key in one batch: the lower one is processed."""
    store = place.store()
    report = consumer(store)(batch(event(3, "a", 3), event(1, "a", 3), event(2, "b", 2)), 0)
    assert (report.processed, report.duplicates) == (2, 1)
    assert store.batches("shop").to_pylist()[0]["duplicates"] == [{"first": 3, "last": 3}]
    assert_proven(store)


def test_a_duplicate_in_the_next_batch_or_another_partition_is_dropped(place: Place) -> None:
    """A key counts across batches and partitions of its topic."""
    run = consumer(place.store())
    run(batch(event(0, "a")), 0)
    assert run(batch(event(1, "a"), event(0, "a", partition=1)), 1).duplicates == 2
    assert ids(place.read()) == ["a"]
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_the_same_topic_name_in_another_source_is_another_topic(place: Place) -> None:
    """By default a key counts within its source and topic."""
    report = consumer(place.store())(batch(event(0, "a"), event(0, "a", source="other"), event(0, "a", topic="returns")), 0)
    assert (report.processed, report.duplicates) == (3, 0)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_with_consumer_scope_a_key_counts_across_topics(place: Place) -> None:
    """key_scope="consumer" makes the same event in another topic a duplicate."""
    report = consumer(place.store(), key_scope="consumer")(batch(event(0, "a"), event(0, "a", source="other")), 0)
    assert (report.processed, report.duplicates) == (1, 1)


@pytest.mark.fast_on("delta")
def test_an_exploded_event_without_part_is_refused(place: Place) -> None:
    """Two different rows of one position are not a redelivery: the error names part=, and nothing is written."""
    rows = batch(event(0, "a"), event(0, "b"))
    with pytest.raises(AmbiguousPosition, match="part="):
        consumer(place.store())(rows, 0)
    assert place.read() == []


def test_an_exploded_event_with_part_gives_every_row(place: Place) -> None:
    """With part= each row has a position of its own, also when the batch is replayed."""
    rows = batch(event(0, "a"), event(0, "b"), event(1, "c"))
    rows = rows.drop_columns(["part"]).append_column("line", [[0, 1, 0]])
    for _ in range(2):
        consumer(place.store(), part="line")(rows, 0)
    assert ids(place.read()) == ["a", "b", "c"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_the_same_row_twice_in_a_batch_is_a_redelivery(place: Place) -> None:
    """One position with the same content twice is dropped, not refused."""
    report = consumer(place.store())(batch(event(0, "a"), event(0, "a"), event(1, "b")), 0)
    assert (report.processed, report.redelivered) == (2, 1)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_row_of_any_values_that_comes_twice_is_a_redelivery(place: Place) -> None:
    """A time outside the years 1 to 9999, as no object of Python has, and NaN are equal to themselves; another time is not."""
    odd = {"until": pa.array([2**58] * 3, pa.timestamp("us", "UTC")), "ratio": pa.array([math.nan] * 3)}
    rows = batch(event(0, "a"), event(0, "a"), event(1, "b"))
    for name, column in odd.items():
        rows = rows.append_column(name, column)
    report = consumer(place.store())(rows, 0)
    assert (report.processed, report.redelivered) == (2, 1)
    rows = rows.set_column(rows.column_names.index("until"), "until", pa.array([2**58, 2**58 + 1, 0], pa.timestamp("us", "UTC")))
    with pytest.raises(AmbiguousPosition):
        consumer(place.store(), name="other")(rows, 0)


@pytest.mark.fast_on("postgres")
def test_null_keys_are_parked_one_by_one(place: Place) -> None:
    """Events without a key are never one message: each becomes a letter."""
    store = place.store()
    report = consumer(store)(batch(event(0, None, 1), event(1, None, 1), event(2, "a")), 0)
    assert (report.processed, report.dead_lettered) == (1, 2)
    assert [(x["kind"], x["sequence_number"]) for x in letters(store)] == [("NO_KEY", 0), ("NO_KEY", 1)]
    assert_proven(store)


@pytest.mark.fast_on("delta")
def test_null_keys_may_fall_back_to_the_position(place: Place) -> None:
    """null_key="position": each event without a key is its own message, once."""
    rows = batch(event(0, None, 1), event(1, None, 1))
    for _ in range(2):
        run = consumer(place.store(), null_key="position")
        run._handler = lambda new, tx: tx.write([{"id": f"@{n}", "amount": 1} for n in new["sequence_number"].to_pylist()], "orders")
        run(rows, 0)
    assert ids(place.read()) == ["@0", "@1"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_an_empty_batch_is_recorded(place: Place) -> None:
    """Nothing is written, and the next batch id is not taken for a restored store."""
    store = place.store()
    run = consumer(store)
    run(batch(*orders([0])), 0)
    assert run(batch(), 1).delivered == 0
    assert store.head("shop").batch_id == 1
    run(batch(*orders([1])), 2)
    assert len(place.read()) == 2
    assert_proven(store)


@pytest.mark.fast_on("delta")
def test_a_batch_of_duplicates_only_does_not_call_the_handler(place: Place) -> None:
    """Nothing new, nothing to handle; the checkpoint still moves."""
    store = place.store()
    consumer(store)(batch(*orders(range(3))), 0)
    calls = []
    second = consumer(place.store(), name="shop")
    second._handler = lambda rows, tx: calls.append(rows)
    report = second(batch(*[event(10 + n, f"p0-{n}", n) for n in range(3)]), 1)
    assert report.duplicates == 3 and not calls
    assert [c.sequence_number for c in place.store().head("shop").checkpoints.values()] == [12]
    assert_proven(place.store())


def test_a_key_with_another_body_is_a_conflict(place: Place) -> None:
    """By default the second payload is parked as KEY_CONFLICT; its replay is a redelivery."""
    store = place.store()
    run = consumer(store)
    run(batch(event(0, "a", 1), event(1, "a", 2), event(2, "b", 1)), 0)
    run(batch(event(3, "b", 9)), 1)
    consumer(place.store(), query="again")(batch(event(0, "a", 1), event(1, "a", 2), event(2, "b", 1), event(3, "b", 9)), 0)
    assert [(x["kind"], x["sequence_number"], x["holds_key"]) for x in letters(store)] == [
        ("KEY_CONFLICT", 1, False),
        ("KEY_CONFLICT", 3, False),
    ]
    assert [r["amount"] for r in place.read()] == [1, 1]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_conflict_may_count_as_a_duplicate(place: Place) -> None:
    """on_key_conflict="duplicate": the first payload wins and the second is counted."""
    assert consumer(place.store(), on_key_conflict="duplicate")(batch(event(0, "a", 1), event(1, "a", 2)), 0).duplicates == 1


@pytest.mark.fast_on("delta")
def test_only_the_columns_of_payload_make_a_conflict(place: Place) -> None:
    """payload="data.id": another amount under the same key is an ordinary duplicate."""
    report = consumer(place.store(), payload="data.id")(batch(event(0, "a", 1), event(1, "a", 2)), 0)
    assert (report.duplicates, report.dead_lettered) == (1, 0)


@pytest.mark.fast_on("postgres")
def test_null_in_the_columns_of_payload_is_a_value(place: Place) -> None:
    """A producer that repeats an order without an amount, at another time, repeats it: before, while and after it is a dead letter."""
    sent = [event(n, body=b'{"id": "a", "amount": null, "sent": %d}' % n) for n in range(4)]

    def closed(rows: pa.Table, tx: Any) -> None:
        tx.reject(rows, pc.is_valid(rows["body"]), "closed")

    run = consumer(place.store(), payload="data.amount")
    run._handler = closed
    report = run(batch(sent[0], sent[1], event(9, "a", 1, partition=1)), 0)
    assert (report.dead_lettered, report.duplicates) == (2, 1)
    assert [(x["kind"], x["partition"]) for x in letters(place.store())] == [("REJECTED", 0), ("KEY_CONFLICT", 1)]
    good = consumer(place.store(), payload="data.amount")
    assert good(batch(sent[2]), 1).duplicates == 1
    assert reprocess(Selection(kind="REJECTED"), good).reprocessed == 1
    assert good(batch(sent[3]), 2).duplicates == 1
    assert [(r["id"], r["amount"]) for r in place.read()] == [("a", None)]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_big_batches_commit_in_chunks_in_position_order(place: Place) -> None:
    """More events than max_events_per_transaction: several transactions, together the same effect."""
    store = place.store()
    consumer(store, max_events_per_transaction=4)(batch(*orders(range(10)), event(10, "p0-0", 0)), 0)
    chunks = [(b["chunk"], b["seen"]) for b in store.batches("shop").to_pylist()]
    assert chunks == [(0, [{"first": 0, "last": 3}]), (1, [{"first": 4, "last": 7}]), (2, [{"first": 8, "last": 10}])]
    assert len(place.read()) == 10
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_key_only_mode_dedupes_without_positions(place: Place) -> None:
    """Rows without positions: keys dedupe, letters are kept once, and verify says what it cannot prove."""
    rows = batch(event(0, "a"), event(0, "b"), event(0, "a"), event(0, "c", -1), event(0, None)).select(["body"])
    for _ in range(2):
        run = consumer(place.store(), positions=None)
        run._handler = write_orders
        run(rows, 0)
    assert ids(place.read()) == ["a", "b"]
    assert sorted(x["kind"] for x in letters(place.store())) == ["NO_KEY", "REJECTED"]
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("bisected", [False, pytest.param(True, marks=pytest.mark.full)])
def test_rows_without_positions_come_to_the_handler_as_they_arrived(place: Place, bisected: bool) -> None:
    """A merge leaves the last one, messages of one key leave in their order, and halves of a batch that fails keep it."""
    run, seen = consumer(place.store(), positions=None), list[list[int]]()
    run._handler = None

    @run.foreach_batch
    def load(rows: pa.Table, tx: Any) -> None:
        numbers = pc.struct_field(rows["data"], "amount").to_pylist()
        seen.append(numbers)
        if bisected and 9 in numbers:
            raise ValueError("no")
        tx.merge(pa.table({"id": ["x"] * len(rows), "amount": numbers}), "orders", keys="id")
        tx.publish(pa.table({"body": list(map(str, numbers)), "k": ["x"] * len(rows)}), "out", key="k")

    if isinstance(place, PostgresPlace):
        place.execute("create unique index on orders (id)")
    run(batch(*[event(0, f"k{n}", n) for n in range(10)]).select(["body"]), 0)
    assert all(numbers == sorted(numbers) for numbers in seen) and len(seen) > bisected
    if not bisected:
        assert [row["amount"] for row in place.read()] == [9]
        receiver = Receiver()
        dispatcher(place, receiver).once()
        assert receiver.bodies() == [str(n).encode() for n in range(10)]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_position_behind_which_nothing_can_follow_is_refused(place: Place) -> None:
    """The largest sequence number is an error with advice; the one before it is a position like any other."""
    with pytest.raises(ConfigError, match="9223372036854775807"):
        consumer(place.store())(batch(event(2**63 - 1, "a")), 0)
    assert consumer(place.store())(batch(event(2**63 - 2, "a")), 0).processed == 1
    assert_proven(place.store())
