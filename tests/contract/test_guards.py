"""State and log disagree: each case is refused with the command to go on, and the command works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from checkpoint import changes
from checkpoint.errors import (
    BatchTooLarge,
    Fenced,
    IncarnationChanged,
    PositionGap,
    PublicationStuck,
    SettingsChanged,
    StillHeld,
    StoreRestored,
)
from checkpoint.head import Holder
from checkpoint.holders import this_process
from checkpoint.position import Partition
from deadletter import policy
from deadletter.letter import Kind
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders
from kit.places import Place


def test_a_gap_can_be_accepted_once(place: Place) -> None:
    """accept-gap lets exactly the next batch begin above the checkpoint."""
    consumer(place.store(), query="one")(batch(*orders(range(3))), 0)
    second = consumer(place.store(), query="two")
    with pytest.raises(PositionGap):
        second(batch(*orders([7])), 0)
    place.store().amend("shop", changes.accept_gap, by="test", reason="known loss")
    second(batch(*orders([7])), 0)
    with pytest.raises(PositionGap):
        consumer(place.store(), query="three")(batch(*orders([9])), 0)
    assert_proven(place.store())


def test_a_restored_store_is_noticed_by_its_batch_id(place: Place) -> None:
    """The same query ahead of our state by more than one batch: our state is old. Positions alone cannot tell."""
    run = consumer(place.store())
    run(batch(*orders([0])), 0)
    with pytest.raises(StoreRestored, match="accept-restore shop"):
        run(batch(*orders([5])), 3)
    place.store().amend("shop", changes.accept_restore, by="test", reason="restored from a backup")
    with pytest.raises(StoreRestored, match="no record of this query"):
        consumer(place.store())(batch(*orders([0, 5])), 3)
    consumer(place.store(), query="at the checkpoint")(batch(*orders([0, 5])), 0)
    assert ids(place.read()) == ["p0-0", "p0-5"]
    assert place.store().head("shop").generation == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_query_that_is_further_than_an_empty_store_is_refused(place: Place) -> None:
    """State that was dropped, or restored to before the first batch, does not begin in silence; nor does a query that ran without us."""
    run = consumer(place.store())
    with pytest.raises(StoreRestored, match=r"has no state of it.*accept-gap shop"):
        run(batch(*orders([5])), 3)
    assert place.read() == [] and place.store().head("shop").checkpoints == {}
    place.store().amend("shop", changes.accept_restore, by="test", reason="another query will read all of it again")
    with pytest.raises(StoreRestored):
        consumer(place.store())(batch(*orders([5])), 3)
    place.store().amend("shop", changes.accept_gap, by="test", reason="the query ran without us until now")
    run = consumer(place.store())
    run(batch(*orders([5])), 3)
    run(batch(*orders([6])), 4)
    assert ids(place.read()) == ["p0-5", "p0-6"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_query_without_a_lasting_name_begins_at_any_batch(place: Place) -> None:
    """What has no id that outlives the process numbers its batches as it likes."""
    consumer(place.store(), query=None)(batch(*orders([5])), 3)
    assert ids(place.read()) == ["p0-5"]


@pytest.mark.fast_on("delta")
def test_a_reset_lets_the_query_that_runs_go_on(place: Place) -> None:
    """Whoever says that nothing counts any more need not say it twice."""
    run = consumer(place.store())
    run(batch(*orders([0])), 0)
    place.store().amend("shop", changes.reset, by="test", reason="new sink")
    consumer(place.store())(batch(*orders([1])), 1)
    assert ids(place.read()) == ["p0-0", "p0-1"]


def test_a_store_restored_to_the_middle_of_a_batch_is_noticed(place: Place) -> None:
    """Of the last batch only the first chunk is there, and Spark goes on with the next one: the other chunks are not left behind."""

    def dies(name: str) -> None:
        if name == "commit":
            left.append(name)
        if len(left) == 2:
            raise ConnectionError

    left: list[str] = []
    with pytest.raises(ConnectionError):
        consumer(place.store(on_step=dies), max_events_per_transaction=2, max_outage=0.0)(batch(*orders(range(4))), 0)
    assert (place.store().head("shop").batch_id, place.store().head("shop").batch_ended) == (0, False)
    run = consumer(place.store(), max_events_per_transaction=2)
    with pytest.raises(StoreRestored, match="accept-restore shop"):
        run(batch(*orders([4])), 1)
    run(batch(*orders(range(4))), 0)
    run(batch(*orders([4])), 1)
    assert place.store().head("shop").batch_ended
    assert ids(place.read()) == [f"p0-{n}" for n in range(5)]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_the_last_chunk_of_a_batch_ends_it_though_all_of_it_was_seen(place: Place) -> None:
    """Another query had the second half already: the batch counts as ended all the same, and the next one is welcome."""
    consumer(place.store(), query="one")(batch(*orders(range(4))), 0)
    again = consumer(place.store(), query="two", max_events_per_transaction=2)
    for number, rows in enumerate([range(4), range(4, 6), range(6, 7)]):
        again(batch(*orders(rows)), number)
    assert len(place.read()) == 7
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_the_old_query_cannot_leave_out_what_a_restore_lost(place: Place) -> None:
    """A restart of the query from before, right after the restore was accepted, would go on behind what is lost: it stays refused."""
    run = consumer(place.store())
    run(batch(*orders([0])), 0)
    with pytest.raises(StoreRestored):
        run(batch(*orders([5])), 3)
    place.store().amend("shop", changes.accept_restore, by="test", reason="restored from a backup")
    for numbers in ([5], [0]):  # also with a batch that leaves nothing out: it would be known from then on
        with pytest.raises(StoreRestored, match="no record of this query"):
            consumer(place.store())(batch(*orders(numbers)), 3)
    consumer(place.store(), query="at the checkpoint")(batch(*orders(range(1, 6))), 0)
    assert ids(place.read()) == [f"p0-{n}" for n in range(6)]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("accepted", of_which(1, [False, True]))
def test_one_harmless_batch_makes_no_query_known(place: Place, accepted: bool) -> None:
    """A query of which the restored state has nothing is refused at a batch that leaves nothing out, and at the next one, which would."""
    consumer(place.store(), query="before")(batch(*orders(range(3))), 0)
    if accepted:
        place.store().amend("shop", changes.accept_restore, by="test", reason="restored from a backup")
    harmless, next_one, elsewhere = batch(*orders([2, 3])), batch(*orders([9])), batch(*orders([9], partition=1))
    for number, rows in ((1, harmless), (2, next_one), (1, elsewhere), (2, next_one)):
        with pytest.raises(StoreRestored, match="no record of this query"):
            consumer(place.store(), query="of the lost time")(rows, number)
    assert ids(place.read()) == ["p0-0", "p0-1", "p0-2"]
    consumer(place.store(), query="at the checkpoint")(batch(*orders(range(3, 10)), *orders(range(10), partition=1)), 0)
    assert len(place.read()) == 20
    assert_proven(place.store())


def test_a_recreated_topic_is_refused_and_accepted(place: Place) -> None:
    """Positions that were seen now hold other events: refused, not dropped as redeliveries; accepted, they are new."""
    consumer(place.store())(batch(*orders(range(5))), 0)
    reborn = batch(event(0, "x0"), event(1, "x1"))
    with pytest.raises(IncarnationChanged, match="accept-incarnation shop"):
        consumer(place.store(), query="q2")(reborn, 0)
    place.store().amend("shop", lambda head: changes.accept_incarnation(head, "broker", "orders"), by="test", reason="re-created")
    run = consumer(place.store(), query="q2")
    assert run(reborn, 0).processed == 2
    assert run(batch(event(0, "x0"), event(2, "p0-1", 1)), 1).duplicates == 1
    assert len(place.read()) == 7
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_recreated_topic_with_position_keys_is_refused_and_accepted(place: Place) -> None:
    """With position keys the payload tells; in the new incarnation the same position is another message."""
    settings = {"idempotence_key": None, "decode": None}

    def run(rows, query):  # type: ignore[no-untyped-def]
        made = consumer(place.store(), query=query, **settings)
        made._handler = lambda new, tx: tx.write([{"id": b.decode(), "amount": 1} for b in new["body"].to_pylist()], "orders")
        return made(rows, 0)

    run(batch(event(0, body=b"a"), event(1, body=b"b")), "one")
    with pytest.raises(IncarnationChanged):
        run(batch(event(0, body=b"c")), "two")
    place.store().amend("shop", lambda head: changes.accept_incarnation(head, "broker", "orders"), by="test", reason="re-created")
    assert run(batch(event(0, body=b"c")), "two").processed == 1
    assert ids(place.read()) == ["a", "b", "c"]


@pytest.mark.fast_on("delta")
def test_undecodable_events_of_a_recreated_topic_are_not_dropped(place: Place) -> None:
    """An event without a usable key at a seen position is only a redelivery if that very event was parked there."""
    consumer(place.store())(batch(event(0, "a"), event(1, body=b"junk")), 0)
    assert consumer(place.store())(batch(event(0, "a"), event(1, body=b"junk")), 0).redelivered == 2
    with pytest.raises(IncarnationChanged):
        consumer(place.store(), query="q2")(batch(event(0, body=b"other junk")), 0)


@pytest.mark.fast_on("postgres")
def test_a_kafka_stream_without_source_incarnation_or_key_is_warned_of(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """By check and by the first batch, once, and of the source only while it can be given: later it is a changed setting."""
    kind = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
    schema = pa.schema({**kind, "timestamp": pa.timestamp("us", tz="UTC")})

    def rows(offset: int) -> pa.Table:
        one = {"topic": "orders", "partition": 0, "offset": offset, "value": b'{"id":"a","amount":1}'}
        return pa.Table.from_pylist([one], schema=schema)

    def told(settings: dict[str, Any], *, offset: int | None) -> list[str]:
        caplog.clear()
        made = consumer(place.store(), **{"idempotence_key": None, **settings})
        made.check(rows(0))
        if offset is not None:
            made(rows(offset), offset)
        return [word for word in ("includeHeaders", "source=:", "incarnation=:") for line in caplog.messages if word in line]

    incarnation: Any = lambda source, topics: {}  # noqa: E731
    with caplog.at_level("WARNING", "dedup"):
        assert told({}, offset=None) == ["includeHeaders", "source=:", "incarnation=:"]
        assert told({}, offset=0) == ["includeHeaders", "source=:", "incarnation=:"]
        assert told({"incarnation": incarnation}, offset=1) == ["includeHeaders"]
    with pytest.raises(SettingsChanged, match="source"):
        consumer(place.store(), idempotence_key=None, source="eu").check(rows(2))


@pytest.mark.fast_on("postgres")
def test_changed_key_settings_are_refused(place: Place) -> None:
    """A key that is computed otherwise would not recognise old messages: refused, naming the setting; reset starts over."""
    consumer(place.store())(batch(*orders(range(2))), 0)
    with pytest.raises(SettingsChanged, match="reset shop"):
        consumer(place.store(), idempotence_key=["data.id", "data.amount"])(batch(*orders([2])), 1)
    assert len(place.read()) == 2


@pytest.mark.fast_on("postgres")
def test_a_reset_forgets_keys_positions_and_settings(place: Place) -> None:
    """After reset the same events are new; what was parked before no longer holds its key."""
    consumer(place.store())(batch(*orders(range(2)), event(2, "bad", -1)), 0)
    place.store().amend("shop", changes.reset, by="test", reason="start over")
    place.drop_sink()
    place.create_sink()
    place.accept_sink()
    report = consumer(place.store(), query="fresh", idempotence_key=["data.id", "data.amount"])(
        batch(*orders(range(2)), event(2, "bad", -1)), 0
    )
    assert (report.processed, report.dead_lettered) == (2, 1)
    assert len(letters(place.store())) == 2
    assert_proven(place.store())


@pytest.mark.parametrize("kind", [0, 1], ids=["CreateTime", "LogAppendTime"])
def test_times_of_producers_do_not_tell_another_incarnation(place: Place, kind: int) -> None:
    """Behind a purge only the broker's clock tells a topic that was created again: what producers say is in no order."""

    def rows(times: list[int]) -> pa.Table:
        count, stamps = len(times), pa.array(times, pa.timestamp("ms", tz="UTC"))
        plain = {"key": pa.nulls(count, pa.binary()), "topic": ["orders"] * count, "partition": [0] * count, "offset": range(count)}
        body = [event(n, f"a{n}")["body"] for n in range(count)]
        return pa.table({**plain, "value": body, "timestamp": stamps, "timestampType": pa.array([kind] * count, pa.int32())})

    run, partition = consumer(place.store()), Partition("kafka", "orders", 0)
    assert run(rows([9_000_000, 8_000_000, 5_000_000]), 0).processed == 3
    place.store().amend("shop", lambda head: replace(head, floors={partition: 2}), by="test", reason="as a purge leaves it")
    again = rows([9_000_000, 8_000_000])
    assert place.store().head("shop").checkpoints[partition].log_time == bool(kind)
    if kind:
        with pytest.raises(IncarnationChanged):
            run(again, 1)
    else:
        assert run(again, 1).redelivered == 2


@pytest.mark.full
def test_a_reset_begins_a_new_budget(place: Place) -> None:
    """What failed before it counts no more, and what was admitted is admitted no more."""

    def broken(_rows: Any, _tx: Any) -> None:
        raise ValueError("no")

    run = consumer(place.store())
    run._handler = broken
    run(batch(*orders(range(50))), 0)
    place.store().amend("shop", lambda head: policy.lift_budget(head, 9, Kind.HANDLER_ERROR), by="test", reason="known")
    place.store().amend("shop", changes.reset, by="test", reason="start over")
    head = place.store().head("shop")
    assert head.spent == {}
    again = consumer(place.store(), query="fresh")
    again._handler = broken
    assert again(batch(*orders(range(50))), 0).dead_lettered == 50
    assert_proven(place.store())


def test_after_a_reset_the_same_events_are_new_in_any_order(place: Place) -> None:
    """Neither keys nor batch records of the life before count: same settings, and positions below the new checkpoint."""
    consumer(place.store())(batch(*orders(range(5))), 0)
    place.store().amend("shop", changes.reset, by="test", reason="start over")
    place.drop_sink()
    place.create_sink()
    place.accept_sink()
    run = consumer(place.store(), query="fresh")
    assert run(batch(*orders([4])), 0).processed == 1
    assert run(batch(*orders(range(4))), 1).processed == 4
    assert len(place.read()) == 5
    assert_proven(place.store())


def test_an_older_instance_is_fenced(place: Place) -> None:
    """An instance whose epoch was taken over commits nothing and stays stopped."""
    old, new = consumer(place.store()), consumer(place.store(), query="q")
    old(batch(*orders([0])), 0)
    new(batch(*orders([1])), 1)
    for _ in range(2):
        with pytest.raises(Fenced):
            old(batch(*orders([2])), 2)
    assert ids(place.read()) == ["p0-0", "p0-1"]
    new(batch(*orders([2])), 2)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_query_restarted_in_the_same_process_does_not_wait(place: Place) -> None:
    """A notebook that stops a query and starts it again takes over from itself at once; another process would be waited for."""
    waits: list[float] = []
    first = place.store()
    consumer(first)(batch(*orders([0])), 0)
    again = place.store()
    again.take_epoch("shop", Holder(*this_process(), "another run"), takeover_after=600, on_wait=lambda left, who: waits.append(left))
    assert waits == []
    first.close()


def elsewhere(host: str) -> Holder:
    """A process on another machine: nobody here can tell whether it lives."""
    return Holder(host, 7, this_process().started, host)


def test_a_fenced_instance_that_hangs_is_no_sign_of_life(place: Place) -> None:
    """It beats on; the one that has taken over by force dies without a trace: the next one takes over after the time."""
    hanging = place.store()
    first = hanging.take_epoch("shop", elsewhere("a"), takeover_after=0.1).epoch
    with hanging.heartbeat("shop", first, 0.02):
        assert place.store().take_epoch("shop", elsewhere("b"), takeover_after=0.1, force=True).epoch == first + 1
        assert place.store().take_epoch("shop", elsewhere("c"), takeover_after=0.3).epoch == first + 2


def test_a_living_instance_is_seen_beside_a_fenced_one_that_hangs(place: Place) -> None:
    """Both beat, the one that is fenced five times as often: it does not hide that the other one lives."""
    hanging, living = place.store(), place.store()
    first = hanging.take_epoch("shop", elsewhere("a"), takeover_after=0.1).epoch
    second = living.take_epoch("shop", elsewhere("b"), takeover_after=0.1, force=True).epoch
    with hanging.heartbeat("shop", first, 0.02), living.heartbeat("shop", second, 0.1), pytest.raises(StillHeld, match="which is alive"):
        place.store().take_epoch("shop", elsewhere("c"), takeover_after=0.4)


@pytest.mark.fast_on("postgres")
def test_two_consumers_of_one_store_do_not_meet(place: Place) -> None:
    """Each consumer has its own checkpoint and its own keys."""
    store = place.store()
    for name in ("shop", 'other "; drop table'):
        consumer(store, name=name)(batch(*orders(range(2))), 0)
    assert sorted(store.consumers()) == sorted(["shop", 'other "; drop table'])
    assert len(place.read()) == 4
    for name in store.consumers():
        assert_proven(store, name)


def test_a_sink_that_was_dropped_and_created_again(place: Place) -> None:
    """Its loss is noticed and accepted; then rows go to the new table."""
    consumer(place.store())(batch(*orders([0])), 0)
    place.drop_sink()
    place.create_sink()
    with pytest.raises(PublicationStuck, match="sink accept"):
        consumer(place.store())(batch(*orders([1])), 1)
    place.accept_sink()
    consumer(place.store())(batch(*orders([1])), 1)
    assert ids(place.read()) == ["p0-1"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_an_accepted_gap_counts_for_every_partition_and_chunk_of_the_query(place: Place) -> None:
    """Accepted once: partitions that come in a later chunk or batch, or after a failure, are not refused again."""
    both = [*orders(range(3)), *orders(range(3), partition=1), *orders(range(3), partition=2)]
    consumer(place.store(), query="one")(batch(*both), 0)
    place.store().amend("shop", changes.accept_gap, by="test", reason="known loss")
    second = consumer(place.store(), query="two", max_events_per_transaction=1)
    good, calls = second._handler, []

    def fails_at_the_second_chunk(rows, tx):  # type: ignore[no-untyped-def]
        calls.append(rows)
        if len(calls) == 2:
            raise MemoryError("boom")
        good(rows, tx)

    second._handler = fails_at_the_second_chunk
    jump = batch(*orders([9]), *orders([9], partition=1))
    with pytest.raises(BatchTooLarge):
        second(jump, 0)
    again = consumer(place.store(), query="two")
    assert again(jump, 0).processed == 1
    assert again(batch(*orders([9], partition=2)), 1).processed == 1
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_another_source_name_is_another_setting(place: Place) -> None:
    """source= is part of every key: changing it would double everything, so it is refused."""
    consumer(place.store(), source="a")(batch(*orders([0])), 0)
    with pytest.raises(SettingsChanged, match="source"):
        consumer(place.store(), source="b")(batch(*orders([0])), 0)
