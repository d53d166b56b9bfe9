"""An event whose key is free again and that fails again is a letter again, whatever was decided about an earlier letter of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dedup import DeadLetters, Selection, reprocess
from dedup.verify import verify
from kit.orders import assert_proven, batch, consumer, event, ids, letters
from kit.people import ALL, ANN, BODY, actions, fixed, statuses
from kit.places import Place, other_place


def key_only(*events: dict[str, Any]) -> pa.Table:
    """Events without positions."""
    return batch(*events).select(["body"])


def held(place: Place) -> list[tuple[str, bool]]:
    """Status of each letter, and whether it holds its key; the newest last."""
    return [(row["status"], row["holds_key"]) for row in sorted(letters(place.store()), key=lambda row: row["first_failed_at"])]


@pytest.mark.full
def test_a_message_without_position_is_a_letter_again_after_its_key_was_released(place: Place) -> None:
    """Discarded with its key released, it comes again and fails again: a second letter holds the key, and the message is not lost."""
    run = consumer(place.store(), positions=None)
    run(key_only(event(0, "a", -1), event(0, "b")), 0)
    DeadLetters(place.store()).discard(ALL, **ANN, release_key=True)
    for _ in range(2):  # the second delivery of the batch finds the key held
        run(key_only(event(0, "a", -5)), 1)
    assert held(place) == [("DISCARDED", False), ("OPEN", True)]
    assert reprocess(Selection(), fixed(place.store(), positions=None)).reprocessed == 1
    assert [(row["id"], row["amount"]) for row in place.read()] == [("a", -5), ("b", 1)]
    assert_proven(place.store())


@pytest.mark.full
def test_a_letter_that_another_store_settled_is_open_again_where_its_event_fails(place: Place, tmp_path: Path) -> None:
    """The import brought it before the stream came to its position: the event is not lost, and who looks at the letter sees why."""
    store, file, told = place.store(), tmp_path / "letters.jsonl", []
    consumer(store)(batch(event(0, "a", -1), event(1, "b", -1), event(2, "c")), 0)
    (reprocessed, released) = [row["id"] for row in letters(store)]
    assert reprocess(Selection(ids=(reprocessed,)), fixed(store)).reprocessed == 1
    DeadLetters(store).discard(released, **ANN, release_key=True)
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path)
    run = consumer(other.store(), on_parked=told.append)
    run(batch(event(9, "z", partition=1)), 0)
    assert DeadLetters(other.store()).import_(file, by="ann").imported == 2
    run(batch(event(0, "a", -1), event(1, "b", -5), event(2, "c"), event(3, "d", -7)), 1)
    found = letters(other.store())
    assert [(row["status"], row["holds_key"], row["attempts"]) for row in found] == [("OPEN", True, 1)] * 3
    assert [row["id"] for row in found[:2]] == [reprocessed, released] and found[1]["body"] == event(1, "b", -5)["body"]
    assert [actions(other.store(), letter)[-1] for letter in (reprocessed, released)] == [("REOPENED", None, 0)] * 2
    assert [group.letters for group in told] == [3]
    assert verify(other.store(), "shop").counts["dead_lettered"] == 3
    assert_proven(other.store())
    assert run(batch(event(4, "a", -1)), 2).duplicates == 1
    assert reprocess(Selection(), fixed(other.store())).reprocessed == 3
    assert sorted(ids(other.read())) == ["a", "b", "c", "d", "z"]
    assert_proven(other.store())


def test_a_settled_letter_that_is_open_again_blocks_its_sequence(place: Place, tmp_path: Path) -> None:
    """What follows it waits behind it, and goes with it, in order."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    consumer(store, sequence_key="data.id", idempotence_key=["data.id", "data.amount"])(batch(event(0, "s", -1)), 0)
    DeadLetters(store).discard(ALL, **ANN, release_key=True)
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path)
    settings: dict[str, Any] = {"sequence_key": "data.id", "idempotence_key": ["data.id", "data.amount"]}
    run = consumer(other.store(), **settings)
    run(batch(), 0)
    DeadLetters(other.store()).import_(file, by="ann")
    run(batch(event(0, "s", -1), event(1, "s", 2)), 1)
    run(batch(event(2, "s", 3)), 2)
    assert statuses(other.store()) == ["OPEN", "BLOCKED", "BLOCKED"]
    assert_proven(other.store())
    assert reprocess(Selection(), fixed(other.store(), **settings)).reprocessed == 3
    assert [row["amount"] for row in other.read()] == [-1, 2, 3]
    assert_proven(other.store())


@pytest.mark.fast_on("postgres")
def test_a_letter_without_a_key_is_left_as_it_was_settled(place: Place, tmp_path: Path) -> None:
    """Its event does not decode, as in the store that settled it: the decision about it goes on to count."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    consumer(store)(batch(event(0, body=BODY)), 0)
    DeadLetters(store).discard(ALL, **ANN)
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path).store()
    run = consumer(other)
    run(batch(), 0)
    DeadLetters(other).import_(file, by="ann")
    assert run(batch(event(0, body=BODY)), 1).dead_lettered == 1
    assert statuses(other) == ["DISCARDED"]
    assert_proven(other)


@pytest.mark.full
def test_a_letter_that_was_erased_and_is_open_again_keeps_its_event(place: Place, tmp_path: Path) -> None:
    """The event came once more and waits for somebody: what takes erased contents out of files leaves it."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    consumer(store)(batch(event(0, "a", -1)), 0)
    assert reprocess(Selection(), fixed(store)).reprocessed == 1
    assert DeadLetters(store).forget("shop", letters=ids(letters(store)), **ANN).letters == 1
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path).store()
    run = consumer(other)
    run(batch(), 0)
    DeadLetters(other).import_(file, by="ann", accept_keys=True)
    run(batch(event(0, "a", -1)), 1)
    other.scrub("shop")
    assert [(row["status"], row["body"]) for row in letters(other)] == [("OPEN", event(0, "a", -1)["body"])]
    assert reprocess(Selection(), fixed(other)).reprocessed == 1
    assert_proven(other)
