"""Upkeep: what a scheduler runs, on every store, beside consumers that go on."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from kit.aged import MONTH, age, deliver, now
from kit.orders import assert_proven, batch, ids, orders
from kit.outgoing import Receiver, dispatcher, publisher
from kit.places import Place, PostgresPlace


def upkept(place: Place, retention: dt.timedelta = MONTH, **options: Any) -> dict[str, int]:
    """What was done, how often. Packing is left out: it forgets nothing."""
    done = place.store().upkeep(retention, **options)
    assert [line.failed for line in done if line.failed] == []
    return {line.what: line.count for line in done if line.count and line.what != "packed tables"}


def old_ones(place: Place) -> str:
    """What a store counts."""
    return "tables of reservations" if isinstance(place, PostgresPlace) else "reservations"


@pytest.fixture
def aged(place: Place) -> Place:
    """Its first event was decided 90 days ago."""
    age(place)
    return place


def test_what_is_older_than_the_retention_goes_and_the_rest_stays(aged: Place) -> None:
    """Also while a consumer goes on; a dry run changes nothing; the second upkeep finds nothing."""
    deliver(aged, 1, "b")
    assert upkept(aged, dry_run=True) == {old_ones(aged): 1} == upkept(aged, dry_run=True)
    assert upkept(aged) == {old_ones(aged): 1}
    assert upkept(aged) == {}
    for number, id in enumerate("ab", 2):
        deliver(aged, number, id)
    assert sorted(ids(aged.read())) == ["a", "a", "b"], "the key of a is forgotten, that of b is not"
    assert_proven(aged.store())


def test_a_store_tells_how_far_back_its_reservations_go(aged: Place) -> None:
    """What an alarm looks at: months before the upkeep, and not after it."""
    deliver(aged, 1, "b")
    since = aged.store().reserved_since("shop")
    assert since is not None and since < now() - MONTH
    upkept(aged)
    left = aged.store().reserved_since("shop")
    assert left is not None and now() - dt.timedelta(days=2) < left < now()


def test_a_consumer_that_stopped_keeps_what_its_log_may_repeat(aged: Place) -> None:
    """It stopped 90 days ago: its duplicates of that time are still unread, and its key is known; a person may say that it is gone."""
    assert upkept(aged, dry_run=True) == upkept(aged) == {}
    (line, *_) = aged.store().upkeep(MONTH)
    assert "has read its log up to" in line.kept[0]
    assert upkept(aged, dry_run=True, although_behind=["shop"]) == {old_ones(aged): 1}
    deliver(aged, 1, "a")
    assert ids(aged.read()) == ["a"]


@pytest.mark.full
def test_messages_that_were_sent_long_ago_go(place: Place) -> None:
    """Of all consumers; those that wait stay."""
    publisher(place.store())(batch(*orders(range(4))), 0)
    publisher(place.store(), name="two")(batch(*orders(range(4, 6))), 0)
    dispatcher(place, Receiver()).once()
    assert upkept(place) == {}
    assert upkept(place, dt.timedelta(0))["sent messages"] == 4
    assert place.store().outbox("two").lag().waiting == 2
