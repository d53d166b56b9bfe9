"""Retention is counted in the time of the log: a purge goes no further than the consumer has read."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import IncarnationChanged
from checkpoint.position import Partition
from dedup.core.retention import PurgeBound
from dedup.pipeline.member import Member
from kit.aged import MONTH, age, months_later, now
from kit.clock import showing
from kit.orders import assert_proven, batch, consumer, event, flatten, ids
from kit.places import Place, PostgresPlace


def ago(**age: float) -> dt.datetime:
    """That long before now."""
    return dt.datetime.now(dt.UTC) - dt.timedelta(**age)


def bound(place: Place, before: dt.datetime) -> PurgeBound | None:
    """Of the consumer `shop`."""
    store: Any = place.store()
    if isinstance(place, PostgresPlace):
        return next((one for one in store.purge_bounds(before) if one.consumer == "shop"), None)
    found: PurgeBound | None = store.purge_bound("shop", before.date())
    return found


def purge(place: Place, *, although_behind: bool = False) -> None:
    """Everything that may go: a retention of nothing."""
    store: Any = place.store()
    if isinstance(place, PostgresPlace):
        store.rotate_reservations()
        store.purge_reservations(ago(seconds=-1), although_behind=["shop"] if although_behind else [])
    else:
        store.purge("shop", ago(days=-1).date(), by="test", reason="old", although_behind=although_behind)


def at(number: int, id: str, time: dt.datetime | None, partition: int = 0) -> dict[str, Any]:
    """An event that was logged at this time."""
    return event(number, id, partition=partition, enqueued_time=time)


@pytest.mark.parametrize("although_behind", [False, True])
def test_a_duplicate_that_the_log_still_holds_is_known_after_a_purge(place: Place, although_behind: bool) -> None:
    """A consumer that is days behind keeps the keys of what it has just done, unless a person wants them gone."""
    consumer(place.store())(batch(at(0, "a", ago(days=3)), at(1, "b", ago(days=3))), 0)
    purge(place, although_behind=although_behind)
    consumer(place.store())(batch(at(2, "a", ago(days=2)), at(3, "c", ago(days=2))), 1)
    assert sorted(ids(place.read())) == ["a", *["a"] * although_behind, "b", "c"]
    assert_proven(place.store())


def test_in_the_middle_of_a_batch_each_partition_counts(place: Place) -> None:
    """After a long stop the first chunks of a batch are of some partitions: keys of the others, whose duplicates come later, are kept."""
    age(place)
    stopped = now() - dt.timedelta(days=90)

    def dies(rows: pa.Table, tx: Any) -> None:
        if "b" not in flatten(rows)["id"].to_pylist():
            raise KeyboardInterrupt
        tx.write(flatten(rows), "orders")

    run = consumer(place.store(), max_events_per_transaction=1)
    run._handler = None
    run.foreach_batch(dies)
    more = batch(event(0, "b", topic="first", enqueued_time=now()), event(1, "c", enqueued_time=stopped))
    with pytest.raises(KeyboardInterrupt):
        run(more, 1)
    place.store().upkeep(MONTH)  # type: ignore[attr-defined]
    found = bound(place, ago(days=30))
    assert found is not None and found.read_to < ago(days=80)
    again = batch(
        event(0, "b", topic="first", enqueued_time=now()), event(1, "c", enqueued_time=stopped), event(2, "a", enqueued_time=stopped)
    )
    assert consumer(place.store())(again, 1).duplicates == 1
    assert_proven(place.store())


def test_of_a_runner_that_goes_on_each_partition_counts(place: Place) -> None:
    """After a long stop its processes take one partition after another: keys of those that had no batch yet are kept."""
    age(place)
    one = Member(consumer(place.store(), query=None).job())
    one.join()
    other, first = (Partition("broker", "orders", number) for number in (0, 1))
    assert one.process(one.claim(first), batch(at(0, "b", now(), partition=1))).processed == 1
    place.store().upkeep(MONTH)  # type: ignore[attr-defined]
    assert one.process(one.claim(other), batch(at(1, "a", ago(days=89)))).duplicates == 1
    assert_proven(place.store())


def test_what_is_kept_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The log says who is behind, up to when it has read, and what that keeps."""
    read = dt.datetime(2026, 5, 4, 3, 2, 1, tzinfo=dt.UTC)
    consumer(place.store())(batch(at(0, "a", read)), 0)
    purge(place)
    assert "shop has read its log up to 2026-05-04 03:02:01 UTC only" in caplog.text


def test_the_bound_is_the_retention_before_where_the_consumer_is(place: Place) -> None:
    """Its slowest partition counts; one that had nothing for an hour does not; nor what a producer says of the future."""
    run = consumer(place.store())
    behind = ago(days=8)
    run(batch(at(0, "a", behind), at(0, "b", ago(minutes=1), partition=1), at(0, "c", ago(days=-9), partition=2)), 0)
    midnight = dt.datetime.combine(ago(days=30).date(), dt.time(), dt.UTC)
    found = bound(place, midnight)
    assert found is not None and found.read_to == behind
    assert abs(found.bound - (behind - (dt.datetime.now(dt.UTC) - midnight))) < dt.timedelta(minutes=2)


def test_without_times_of_the_log_the_last_decision_counts(place: Place) -> None:
    """Events may come without a time: then a consumer counts as having read everything when it last did something."""
    run = consumer(place.store())
    run(batch(at(0, "a", None)), 0)
    found = bound(place, ago(days=30))
    assert found is not None and ago(minutes=5) < found.read_to <= dt.datetime.now(dt.UTC)


def test_a_late_event_does_not_count_as_having_read_on(place: Place) -> None:
    """A consumer that only went back to a position which it had left out is where it was three months ago."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dedup.delta.transaction.dt", showing(lambda tz: ago(days=90)))
        consumer(place.store())(batch(at(5, "a", None)), 0)
    if isinstance(place, PostgresPlace):
        months_later(place)
    consumer(place.store())(batch(at(3, "b", None)), 1)
    assert sorted(ids(place.read())) == ["a", "b"]
    found = bound(place, ago(days=30))
    assert found is not None and found.read_to < ago(days=89)


@pytest.mark.fast_on("postgres")
def test_a_duplicate_of_what_a_purge_took_is_a_redelivery_all_the_same(place: Place) -> None:
    """Its key is unknown by then, and the record of its batch says what it was; an event of a later life of the topic is told from it."""
    age(place)
    logged = now()
    again = batch(event(1, "a", enqueued_time=logged), event(2, "b", enqueued_time=logged))
    assert consumer(place.store())(again, 1).duplicates == 1
    place.store().upkeep(MONTH)  # type: ignore[attr-defined]
    for number, settings in ((1, {}), (0, {"query": "q2"})):
        report = consumer(place.store(), **settings)(again, number)
        assert (report.redelivered, report.processed, report.dead_lettered) == (2, 0, 0)
    later = event(1, "x", enqueued_time=logged + dt.timedelta(hours=1))
    with pytest.raises(IncarnationChanged, match="broker/orders/0 1"):
        consumer(place.store(), query="q3")(batch(later), 0)
    assert sorted(ids(place.read())) == ["a", "b"]
    assert_proven(place.store())
