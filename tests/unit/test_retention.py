"""Up to where a purge may go, computed without a store."""

from __future__ import annotations

import datetime as dt

import pytest

from checkpoint.errors import StoreUnavailable
from checkpoint.head import Checkpoint
from checkpoint.position import Partition
from dedup.core.retention import ACTIVE, NEVER, TOLD, Part, Upkept, apart, bounded, read_to

NOW = dt.datetime(2026, 6, 30, 12, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
ONE, TWO = Partition("broker", "orders", 0), Partition("broker", "orders", 1)


def reached(one: tuple[dt.datetime | None, dt.datetime], two: tuple[dt.datetime | None, dt.datetime]) -> dt.datetime:
    """Of two partitions: the time of their newest event, and when that was decided."""
    times = {ONE: one, TWO: two}
    return read_to({p: Checkpoint(1, enqueued_time=time) for p, (time, _) in times.items()}, {p: at for p, (_, at) in times.items()})


def test_the_slowest_partition_counts() -> None:
    """As long as it has events: the newer one does not hide what it has not read."""
    assert reached((NOW - 9 * DAY, NOW), (NOW, NOW)) == NOW - 9 * DAY
    assert reached((NOW - 9 * DAY, NOW - ACTIVE), (NOW, NOW)) == NOW - 9 * DAY


def test_a_partition_without_events_holds_nothing_back() -> None:
    """It had none in the hour before the last batch, so it is read to its end."""
    assert reached((NOW - 9 * DAY, NOW - 2 * ACTIVE), (NOW - DAY, NOW)) == NOW - DAY


def test_where_a_partition_may_not_have_been_asked_it_was_read_up_to_an_earlier_decision() -> None:
    """Its own last event may be months old: what it may have kept unread came after that decision."""
    points = {ONE: Checkpoint(1, enqueued_time=NOW - 90 * DAY), TWO: Checkpoint(1, enqueued_time=NOW - DAY)}
    decided = {ONE: NOW - 90 * DAY, TWO: NOW}
    assert [read_to(points, decided, before) for before in (None, NOW - 5 * DAY, NEVER)] == [NOW - DAY, NOW - 5 * DAY, NOW - 90 * DAY]
    assert read_to(points, {TWO: NOW}, NOW - 5 * DAY) == NOW - 5 * DAY, "a decision so long ago is not looked for"


def test_no_time_is_later_than_the_last_decision() -> None:
    """A time of the future, or none, says nothing."""
    assert reached((NOW + 9 * DAY, NOW), (None, NOW - DAY)) == NOW
    assert reached((None, NOW - DAY), (None, NOW)) == NOW


def test_a_consumer_that_stopped_holds_a_purge_back_by_as_much() -> None:
    """Stopped ten days ago with a retention of thirty: forty days are kept; and never less than was asked for."""
    assert bounded("shop", NOW - 10 * DAY, NOW - 30 * DAY, NOW).bound == NOW - 40 * DAY
    assert bounded("shop", NOW, NOW - 30 * DAY, NOW).bound == NOW - 30 * DAY
    assert bounded("shop", NOW - DAY, NOW + DAY, NOW).bound == NOW - DAY, "a retention is not negative"
    assert bounded("shop", NOW, NOW - 30 * DAY, NOW).told(NOW - 30 * DAY) is None


def test_a_consumer_that_is_a_minute_behind_is_no_news() -> None:
    """Every running consumer is: it holds a purge back by that minute, and only one that is two hours behind is told of."""
    for behind, is_told in ((dt.timedelta(minutes=1), False), (TOLD, True)):
        found = bounded("shop", NOW - behind, NOW - 30 * DAY, NOW)
        assert found.bound == NOW - 30 * DAY - behind and bool(found.told(NOW - 30 * DAY)) is is_told


def part(name: str, error: str = "") -> Part:
    """A consumer whose purge forgets one key, or cannot reach its state."""
    line = Upkept("reservations", name, 0)

    def act() -> Upkept:
        if error:
            raise StoreUnavailable(error)
        return Upkept("reservations", name, 1)

    return line, act


def test_of_consumers_that_share_nothing_one_out_of_reach_holds_up_no_other() -> None:
    """Its line has the error; where none can be reached, that is the error of all."""
    asked: list[str] = []
    assert apart([], asked.clear) == [] and [line.count for line in apart([part("a")], asked.clear)] == [1]
    lines = apart([part("a", "gone"), part("b"), part("c", "away")], lambda: asked.append("store"))
    assert [(line.consumer, line.count, line.failed) for line in lines] == [("a", 0, "gone"), ("b", 1, None), ("c", 0, "away")]
    assert asked == ["store"] * 2
    with pytest.raises(StoreUnavailable, match="gone"):
        apart([part("a", "gone"), part("b", "away")], asked.clear)


def test_where_the_store_itself_is_away_no_other_consumer_is_waited_for() -> None:
    """Each of a hundred would take as long as an outage is waited for."""
    waited: list[str] = []

    def away() -> Upkept:
        waited.append("one")
        raise StoreUnavailable("the consumer is away")

    def ask() -> None:
        raise StoreUnavailable("the store is away")

    with pytest.raises(StoreUnavailable, match="the store is away"):
        apart([(Upkept("reservations", name, 0), away) for name in "abc"], ask)
    assert waited == ["one"]
