"""An edited letter holds all its keys, those that edits replaced as well: no purge frees them, and no other event is decided under them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dedup import DeadLetters, ReprocessOptions, Selection, reprocess
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters
from kit.people import ANN, actions, failing, fixed, statuses
from kit.places import Place, PostgresPlace, other_place


def close(place: Place) -> None:
    """From now on a purge can take what is reserved so far."""
    if isinstance(place, PostgresPlace):
        place.store().rotate_reservations()


def purge(place: Place) -> None:
    """Forget every reservation that no letter holds, of what was closed."""
    store: Any = place.store()
    if isinstance(place, PostgresPlace):
        later = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
        assert store.purge_reservations(later, although_behind=["shop"], patience=0)
    else:
        store.purge("shop", dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1), by="test", reason="old", although_behind=True)


def edited(place: Place, *keys: str) -> str:
    """The letter that came with the key b, after edits that gave it these keys, one after the other."""
    letter: str = letters(place.store(), key="b")[0]["id"]
    for key in keys:
        DeadLetters(place.store()).edit(letter, key=key, **ANN)
    return letter


def test_a_purge_frees_no_key_that_an_edit_replaced(place: Place) -> None:
    """The original is a duplicate after a purge as before it, and what comes under a key that the letter was given has no effect."""
    run = failing(place.store())
    letter = edited(place, "z", "y")
    close(place)
    purge(place)
    report = run(batch(event(4, "a"), event(5, "b", -1), event(6, "z"), event(7, "y")), 1)
    assert (report.processed, report.duplicates) == (1, 1)  # what comes under a given key has another payload: a conflict
    assert [row["kind"] for row in letters(place.store())][3:] == ["KEY_CONFLICT"] * 2
    assert reprocess(Selection(ids=(letter,)), fixed(place.store())).reprocessed == 1
    assert ids(place.read()) == ["a", "a", "b"]
    assert_proven(place.store())


@pytest.mark.full
def test_a_key_that_an_edit_takes_after_a_purge_leaves_the_other_one_held(place: Place) -> None:
    """Also where the reservation of the key was purged before, and the letter alone held it."""
    run = failing(place.store())
    close(place)
    purge(place)
    edited(place, "z")
    report = run(batch(event(4, "b", -1), event(5, "z")), 1)
    assert (report.processed, report.duplicates) == (0, 1)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_an_original_is_no_conflict_with_the_body_that_repaired_it(place: Place) -> None:
    """A letter that failed again under the key of its new body has the payload of that one; its earlier key keeps its own."""
    run = failing(place.store())
    letter = letters(place.store(), key="b")[0]["id"]
    DeadLetters(place.store()).edit(letter, body=b'{"id": "z", "amount": -9}', **ANN)
    assert reprocess(Selection(ids=(letter,)), run).failed == 1
    close(place)
    purge(place)
    report = run(batch(event(4, "b", -1), event(5, "z", -9)), 1)
    assert (report.duplicates, report.dead_lettered) == (2, 0)
    assert_proven(place.store())


@pytest.mark.full
def test_a_release_after_a_purge_frees_every_key_once(place: Place) -> None:
    """Whatever came before it is a duplicate, so the release frees no key under which another event had its effect."""
    run = failing(place.store())
    letter = edited(place, "z")
    close(place)
    purge(place)
    assert run(batch(event(4, "b", 4), event(5, "z", 5)), 1).processed == 0
    DeadLetters(place.store()).discard(letter, **ANN, release_key=True)
    assert actions(place.store(), letter)[-1] == ("RELEASED", "ann", -2)
    assert run(batch(event(6, "b", 6), event(7, "z", 7)), 2).processed == 2
    assert run(batch(event(8, "b", 6), event(9, "z", 7)), 3).processed == 0
    assert ids(place.read()) == ["a", "b", "z"]
    assert DeadLetters(place.store()).reopen(letter, **ANN).changed == 0
    assert_proven(place.store())


@pytest.mark.full
def test_an_edit_back_after_a_purge_takes_a_key_that_nobody_else_has(place: Place) -> None:
    """An event that came meanwhile is a duplicate: the letter has the only effect under the key."""
    run = failing(place.store())
    letter = edited(place, "z", "y")
    close(place)
    purge(place)
    assert run(batch(event(4, "z", 4)), 1).processed == 0
    edited_back = DeadLetters(place.store()).edit(letter, key="z", **ANN)
    assert (edited_back.changed, actions(place.store(), letter)[-1]) == (1, ("EDITED", "ann", 0))
    assert reprocess(Selection(ids=(letter,)), fixed(place.store())).reprocessed == 1
    assert run(batch(event(5, "z", 4), event(6, "y", 4), event(7, "b", 4)), 2).processed == 0
    assert ids(place.read()) == ["a", "b"]
    assert_proven(place.store())


def test_a_letter_that_passes_after_a_purge_leaves_all_its_keys_decided(place: Place) -> None:
    """From then on no letter holds them: each of them is reserved like that of any event."""
    run = failing(place.store())
    letter = edited(place, "z", "y")
    close(place)
    purge(place)
    assert reprocess(Selection(ids=(letter,)), fixed(place.store())).reprocessed == 1
    report = run(batch(event(4, "b", -1), event(5, "z"), event(6, "y")), 1)
    assert (report.processed, report.duplicates) == (0, 1)
    assert_proven(place.store())


@pytest.mark.full
def test_a_letter_lost_after_a_purge_frees_every_key_once(place: Place) -> None:
    """What comes before that is a duplicate, what comes afterwards has its effect, once."""
    store = place.store()
    run = consumer(store, max_body=30)
    run(batch(event(0, "b", -1, body=b'{"id": "b", "amount": -1, "more": "%s"}' % (b"x" * 40))), 0)
    letter = edited(place, "z")
    close(place)
    purge(place)
    assert run(batch(event(1, "b", 1), event(2, "z", 1)), 1).processed == 0
    made = fixed(store)
    made.register_log_reader(lambda *span: batch())
    done = reprocess(Selection(ids=(letter,)), made, options=ReprocessOptions(skip_missing=True))
    assert (done.lost, statuses(store)[0]) == (1, "LOST")
    for number in (2, 3):
        run(batch(event(2 * number, "b", 1), event(2 * number + 1, "z", 1)), number)
    assert ids(place.read()) == ["b", "z"]


@pytest.mark.full
def test_a_letter_that_was_imported_holds_its_earlier_keys_all_the_same(place: Place, tmp_path: Path) -> None:
    """In the store that it comes into a purge frees none of them."""
    failing(place.store())
    edited(place, "z", "y")
    DeadLetters(place.store()).export(Selection(limit=None), tmp_path / "letters.jsonl")
    other = other_place(place, tmp_path)
    run = consumer(other.store())
    run(batch(), 0)
    assert DeadLetters(other.store()).import_(tmp_path / "letters.jsonl", by="ann").imported == 3
    close(other)
    purge(other)
    assert run(batch(event(4, "b", 1), event(5, "z", 1), event(6, "y", 1)), 1).processed == 0
    assert other.read() == []


@pytest.mark.full
def test_an_erased_letter_holds_its_earlier_keys_all_the_same(place: Place) -> None:
    """`forget` erases what its history says of the event, and not that its keys are decided."""
    run = failing(place.store())
    letter = edited(place, "z")
    DeadLetters(place.store()).discard(letter, **ANN)
    assert DeadLetters(place.store()).forget("shop", letters=[letter], **ANN).letters == 1
    close(place)
    purge(place)
    report = run(batch(event(4, "b", -1), event(5, "z")), 1)
    assert (report.processed, report.duplicates) == (0, 1)
    assert_proven(place.store())


def _released(place: Place, letter: str) -> Callable[[Any], Any]:
    return lambda store: DeadLetters(store).discard(letter, **ANN, release_key=True)


def _edited_back(place: Place, letter: str) -> Callable[[Any], Any]:
    return lambda store: DeadLetters(store).edit(letter, key="z", **ANN)


@pytest.mark.fast_on("postgres")  # a batch of Delta waits ten seconds for the turn of the decision
@pytest.mark.parametrize("decision", of_which(1, [_released, _edited_back]))
@pytest.mark.parametrize("purged", of_which(1, ["meanwhile", "before"]))
def test_no_event_comes_between_a_decision_and_its_keys(place: Place, decision: Callable[..., Any], purged: str) -> None:
    """While a release or an edit is about to commit, and a purge too, an event under an earlier key is a duplicate."""
    run = failing(place.store())
    letter = edited(place, "z", "y")
    assert run(batch(event(10, "d")), 1).processed == 1  # the last key that was reserved is not one of the letter's
    store, seen = place.store(), list[int]()
    close(place)
    if purged == "before":
        purge(place)

    def meanwhile(step: str) -> None:
        if step == "commit" and not seen:
            seen.append(0)
            if purged == "meanwhile":
                purge(place)
            seen[0] = run(batch(event(11, "b", 4), event(12, "z", 5)), 2).processed

    store.on_step = meanwhile
    assert decision(place, letter)(store).changed == 1 and seen == [0]
    again = run(batch(event(13, "b", 4), event(14, "z", 5)), 3).processed
    assert again == (2 if decision is _released else 0)
    assert run(batch(event(15, "b", 4), event(16, "z", 5)), 4).processed == 0
    assert ids(place.read()) == (["a", "b", "d", "z"] if decision is _released else ["a", "d"])
    assert_proven(place.store())
