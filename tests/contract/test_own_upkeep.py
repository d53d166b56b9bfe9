"""`Limits(upkeep=True)`: a consumer that forgets by itself what is older than its retention, on every store where Spark does not commit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fixtures.fix_places import WITHOUT_SPARK
from kit.aged import ADVISORY, MONTH, age, deliver, now, turned
from kit.orders import assert_proven, batch, consumer, event, ids, orders
from kit.outgoing import Receiver, dispatcher, publisher
from kit.places import Place, PostgresPlace

pytestmark = pytest.mark.parametrize("place", WITHOUT_SPARK, indirect=True)  # it is refused where Spark commits

OWN = {"retention": MONTH, "upkeep": True}


@pytest.fixture
def aged(place: Place) -> Place:
    """Its first event was decided 90 days ago."""
    age(place, retention=MONTH)
    return place


def test_a_consumer_forgets_by_itself_what_is_older_than_its_retention(aged: Place) -> None:
    """After its first batch, in a thread that ends; nothing that is younger; the state is proven."""
    made = consumer(aged.store(), **OWN)
    made(batch(event(1, "b", enqueued_time=now())), 1)
    turned(made)
    for number, id in enumerate("ab", 2):
        deliver(aged, number, id, retention=MONTH)
    assert sorted(ids(aged.read())) == ["a", "a", "b"], "the key of a is forgotten, that of b is not"
    assert [t.name for t in threading.enumerate() if t.name.startswith("dedup upkeep")] == []
    assert_proven(aged.store())


@pytest.mark.fast_on("postgres")
def test_without_it_a_consumer_forgets_nothing(aged: Place) -> None:
    """The retention alone purges nothing."""
    made = consumer(aged.store(), retention=MONTH)
    made(batch(event(1, "b", enqueued_time=now())), 1)
    assert made._upkeep is None
    deliver(aged, 2, "a", retention=MONTH)
    assert sorted(ids(aged.read())) == ["a", "b"]


@pytest.mark.fast_on("delta")
def test_it_keeps_what_a_consumer_that_is_behind_may_read_again(aged: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Its next batch is of 90 days ago: the retention counts back from there, and the log says so."""
    made = consumer(aged.store(), **OWN)
    made(batch(event(1, "b", enqueued_time=now() - 3 * MONTH)), 1)
    turned(made)
    assert "shop: upkeep: shop has read its log up to" in caplog.text
    deliver(aged, 2, "a", retention=MONTH)
    assert sorted(ids(aged.read())) == ["a", "b"]


@pytest.mark.fast_on("postgres")
def test_messages_that_were_sent_long_ago_go_with_it(place: Place) -> None:
    """Those of this consumer; what waits stays."""
    publisher(place.store(), retention=0)(batch(*orders(range(4))), 0)
    dispatcher(place, Receiver()).once()
    made = publisher(place.store(), retention=0, upkeep=True)
    made(batch(*orders(range(4, 6))), 1)
    turned(made)
    assert place.store().outbox("shop").lag().waiting == 2
    assert place.store().outbox("shop").purge(now(), dry_run=True) == 0, "the four that were sent are gone"


@pytest.mark.full
def test_two_instances_at_once_forget_once(aged: Place) -> None:
    """Both have turns; the second finds nothing, or that the first is at it, and no batch of either fails."""
    consumer(aged.store(), name="two", retention=MONTH)(batch(event(0, "b", enqueued_time=now())), 0)  # both have told their retention
    both = [consumer(aged.store(), name=name, **OWN) for name in ("shop", "two")]
    for made in both:
        made(batch(event(1, "c", enqueued_time=now())), 1)
    turns: list[Any] = [made.store.upkeep_turn(made.name, MONTH) for made in both for _ in range(2)]
    threads = [threading.Thread(target=lambda turn=turn: list(turn.portions())) for turn in turns]
    for thread in threads:
        thread.start()
    for made in both:
        turned(made)
    for thread in threads:
        thread.join(60)
    deliver(aged, 2, "a", retention=MONTH)
    deliver(aged, 3, "c", retention=MONTH)
    assert sorted(ids(aged.read())) == ["a", "a", "b", "c", "c"]  # one c of each consumer
    assert_proven(aged.store())
    if isinstance(aged, PostgresPlace):
        assert aged.execute(ADVISORY) == [(0,)]
