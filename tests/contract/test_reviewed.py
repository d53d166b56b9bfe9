"""What a review found broken: rare ways in which letters, replays and resets met."""

from __future__ import annotations

from typing import Any

from orders import assert_proven, batch, consumer, event, ids, letters
from people import ANN, failing, fixed
from places import Place

from dedup import DeadLetters
from dedup.planning import reset
from dedup.replaying import replay
from dedup.reprocessing import reprocess
from dedup.store import Selection


def logged(consumer: Any, *events: dict[str, Any]) -> Any:
    """The consumer with these events as its log."""
    consumer.log(lambda *asked: batch(*events))
    return consumer


def test_a_replay_that_reads_other_keys_accounts_for_them(place: Place) -> None:
    """What a changed decode makes of an event is reserved by its replay, and verify is told of it."""
    fixed(place.store())(batch(event(0, "a"), event(1, "b")), 0)
    run = logged(fixed(place.store()), event(0, "a"), event(1, "x"))
    assert replay(Selection(topic="orders", first=0, last=1), run, accept_double=True).replayed == 2
    assert run(batch(event(2, "x")), 1).duplicates == 1
    assert_proven(place.store())


def test_a_replay_leaves_out_parts_that_were_duplicates(place: Place) -> None:
    """Of an exploded event one part was processed, one was a copy of an earlier event: the copy gets no effect by a replay."""
    events = (event(0, "a"), event(1, "b"), {**event(1, "a"), "part": 1})
    fixed(place.store())(batch(*events), 0)
    assert ids(place.read()) == ["a", "b"]
    run = logged(fixed(place.store()), *events)
    assert replay(Selection(topic="orders", first=0, last=1), run, accept_double=True).replayed == 2
    assert ids(place.read()) == ["a", "a", "b", "b"]
    assert_proven(place.store())


def test_a_letter_from_before_a_reset_can_be_changed(place: Place) -> None:
    """Its key counts no longer: tried again or discarded, it reserves nothing but the key of now, and verify agrees."""
    store = place.store()
    failing(store)
    first, second, *_ = letters(store)
    store.amend("shop", reset, **ANN)
    assert DeadLetters(store).discard([first["id"]], **ANN).changed == 1
    assert_proven(store)
    assert reprocess(Selection(id=second["id"]), consumer(store)).failed == 1
    assert_proven(store)
    assert fixed(store)(batch(event(0, "a"), event(1, "b")), 0).processed == 2
    assert reprocess(Selection(id=second["id"]), fixed(store)).reprocessed == 1
    assert_proven(store)


def test_a_replay_leaves_out_parts_whose_key_a_letter_holds(place: Place) -> None:
    """An exploded event with a copy of what is a dead letter: the letter alone has the key, and its effect comes once, by reprocess."""
    events = (event(0, "a", -1), event(1, "b"), {**event(1, "a", -1), "part": 1})
    consumer(place.store())(batch(*events), 0)
    run = logged(fixed(place.store()), *events)
    assert replay(Selection(topic="orders", first=0, last=1), run, accept_double=True).replayed == 1
    assert ids(place.read()) == ["b", "b"]
    assert reprocess(Selection(), run).reprocessed == 1
    assert ids(place.read()) == ["a", "b", "b"]
    assert_proven(place.store())
