"""Which life of a topic it is, told by the broker: stored with the first batch, compared after each read, forgotten when accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from checkpoint import changes
from checkpoint.errors import IncarnationChanged, SourceUnavailable
from dedup.consumer import Consumer
from kit.orders import assert_proven, batch, consumer, event, ids, orders
from kit.places import Place

TOPIC = ("broker", "orders")


@dataclass
class Broker:
    """Tells what it is told to tell."""

    told: dict[str, str] = field(default_factory=lambda: {"orders": "first"})
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    away: int = 0

    def __call__(self, source: str, topics: Sequence[str]) -> Mapping[str, str]:
        """topic -> id."""
        self.asked.append((source, tuple(topics)))
        if self.away:
            self.away -= 1
            raise SourceUnavailable
        return {topic: self.told[topic] for topic in topics if topic in self.told}


@pytest.mark.fast_on("postgres")
def test_a_topic_with_another_id_is_refused_until_it_is_accepted(place: Place) -> None:
    """A topic that was created again and has grown past the checkpoint looks like its old self by positions alone; its id tells."""
    broker = Broker()
    run = consumer(place.store(), incarnation=broker)
    run(batch(*orders(range(3))), 0)
    assert place.store().head("shop").incarnation_ids == {TOPIC: "first"}
    run(batch(*orders([3])), 1)
    broker.told["orders"] = "second"
    with pytest.raises(IncarnationChanged, match="accept-incarnation shop --source broker --topic orders"):
        run(batch(event(4, "x4")), 2)
    place.store().amend("shop", lambda head: changes.accept_incarnation(head, *TOPIC), by="test", reason="re-created")
    assert place.store().head("shop").incarnation_ids == {}
    again = consumer(place.store(), incarnation=broker, query="q2")
    again(batch(event(0, "x0"), event(1, "x1")), 0)
    assert place.store().head("shop").incarnation_ids == {TOPIC: "second"}
    assert ids(place.read()) == ["p0-0", "p0-1", "p0-2", "p0-3", "x0", "x1"]
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_it_is_asked_after_each_read_and_for_the_topics_of_the_batch_only(place: Place) -> None:
    """A topic that is created again while the query runs is refused at its first batch, not at the next start."""
    broker = Broker({"orders": "first", "other": "o"})
    run = consumer(place.store(), incarnation=broker)
    run(batch(*orders([0]), event(0, "z", topic="other")), 0)
    run(batch(*orders([1])), 1)
    assert broker.asked == [("broker", ("orders", "other")), ("broker", ("orders",))]
    assert place.store().head("shop").incarnation_ids == {TOPIC: "first", ("broker", "other"): "o"}


@pytest.mark.fast_on("postgres")
def test_a_broker_that_is_away_is_waited_for(place: Place) -> None:
    """Nothing is decided while the id is not known; the batch is tried again, as when the store is away."""
    broker = Broker(away=2)
    run = consumer(place.store(), incarnation=broker, max_outage=30.0)
    assert run(batch(*orders(range(2))), 0).processed == 2
    broker.away = 99
    impatient = consumer(place.store(), incarnation=broker)
    with pytest.raises(SourceUnavailable):
        impatient(batch(*orders([2])), 1)
    assert ids(place.read()) == ["p0-0", "p0-1"]


@pytest.mark.fast_on("postgres")
def test_state_of_before_learns_the_id_and_a_deleted_topic_is_let_through(place: Place) -> None:
    """Who adds incarnation= to a consumer that runs already is not refused; the last events of a deleted topic still count."""
    consumer(place.store())(batch(*orders([0])), 0)
    broker = Broker()
    run = consumer(place.store(), incarnation=broker)
    run(batch(*orders([1])), 1)
    assert place.store().head("shop").incarnation_ids == {TOPIC: "first"}
    broker.told.clear()
    run(batch(*orders([2])), 2)
    assert place.store().head("shop").incarnation_ids == {TOPIC: "first"}
    assert len(place.read()) == 3


@pytest.mark.fast_on("delta")
def test_check_refuses_before_the_start(place: Place) -> None:
    """consumer.check asks for every topic that has a checkpoint, before anything is read."""
    broker = Broker()
    run: Consumer = consumer(place.store(), incarnation=broker)
    run(batch(*orders([0])), 0)
    run.check(batch())
    broker.told["orders"] = "second"
    with pytest.raises(IncarnationChanged):
        run.check(batch())


@pytest.mark.fast_on("delta")
def test_a_reset_forgets_the_id(place: Place) -> None:
    """After a reset the topic is read as if it were new, whatever its id was."""
    run = consumer(place.store(), incarnation=Broker())
    run(batch(*orders([0])), 0)
    place.store().amend("shop", changes.reset, by="test", reason="start over")
    assert place.store().head("shop").incarnation_ids == {}
