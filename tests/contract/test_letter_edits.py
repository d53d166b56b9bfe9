"""What is edited is what runs: edits followed by a reprocess, on every store. No effect is lost, and none is there twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dedup import DeadLetters, ReprocessOptions, Selection, reprocess
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters
from kit.people import ALL, ANN, BODY, actions, failing, fixed, statuses
from kit.places import Place


@pytest.mark.fast_on("postgres")
def test_a_repaired_body_is_processed_under_the_key_that_it_has(place: Place) -> None:
    """Bytes that did not decode are made an order; that order is a duplicate when it comes again."""
    store = place.store()
    run = failing(store)
    letter = letters(store, kind="UNDECODABLE")[0]["id"]
    DeadLetters(store).edit(letter, body=b'{"id": "z", "amount": 9}', **ANN)
    assert reprocess(Selection(ids=(letter,)), fixed(store)).reprocessed == 1
    assert ids(place.read()) == ["a", "z"]
    assert run(batch(event(4, "z", 9), event(5, body=BODY)), 1).processed == 0
    assert [a for a, _, _ in actions(store, letter)] == ["FAILED", "EDITED", "REPROCESSED"]
    assert_proven(store)


@pytest.mark.full
def test_a_body_with_another_key_takes_that_key_and_keeps_the_old_one(place: Place) -> None:
    """Duplicates under either key are no new message afterwards."""
    store = place.store()
    run = failing(store)
    letter = letters(store, key="b")[0]["id"]
    DeadLetters(store).edit(letter, body=b'{"id": "z", "amount": 9}', **ANN)
    assert reprocess(Selection(ids=(letter,)), fixed(store)).reprocessed == 1
    assert ids(place.read()) == ["a", "z"]
    assert run(batch(event(4, "z", 9), event(5, "b", -1)), 1).duplicates == 2
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_body_whose_key_is_decided_is_a_duplicate(place: Place) -> None:
    """There is an effect under it: the letter is settled without another one, or a conflict where the payload differs."""
    store = place.store()
    failing(store)
    first, second = (row["id"] for row in letters(store, kind="REJECTED"))
    DeadLetters(store).edit(first, body=b'{"id": "a", "amount": 1}', **ANN)
    DeadLetters(store).edit(second, body=b'{"id": "a", "amount": 9}', **ANN)
    done = reprocess(Selection(ids=(first, second)), fixed(store))
    assert (done.duplicates, done.failed, ids(place.read())) == (1, 1, ["a"])
    assert [(row["status"], row["kind"]) for row in letters(store)[:2]] == [("DUPLICATE", "REJECTED"), ("OPEN", "KEY_CONFLICT")]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_an_edited_letter_that_fails_again_holds_all_its_keys(place: Place) -> None:
    """That of the new body, too; discard with release frees the old and the new one."""
    store = place.store()
    run = failing(store)
    letter = letters(store, key="b")[0]["id"]
    DeadLetters(store).edit(letter, body=b'{"id": "z", "amount": -9}', **ANN)
    assert reprocess(Selection(ids=(letter,)), run).failed == 1
    assert run(batch(event(4, "z", -9), event(5, "b", -1)), 1).duplicates == 2
    assert_proven(store)
    DeadLetters(store).discard(letter, **ANN, release_key=True)
    assert actions(store, letter)[-1] == ("RELEASED", "ann", -2)
    assert run(batch(event(6, "z", 9), event(7, "b", 1)), 2).processed == 2
    assert_proven(store)


@pytest.mark.full
@pytest.mark.parametrize("parked", ["its own", "none"])
def test_an_edited_letter_that_has_to_wait_holds_its_new_key(place: Place, parked: str) -> None:
    """Behind one that fails again it is not run: the key of its new body is its own, it holds it, and its event has its effect later."""
    store = place.store()
    run = consumer(store, sequence_key="key")
    second = event(1, "b", 2, key=b"k") if parked == "its own" else event(1, body=BODY, key=b"k")
    run(batch(event(0, "a", -1, key=b"k"), second), 0)
    waiting = letters(store)[1]["id"]
    DeadLetters(store).edit(waiting, body=b'{"id": "z", "amount": 3}', **ANN)
    for _ in range(2):
        done = reprocess(ALL, run)
        assert (done.failed, done.waiting, done.duplicates) == (1, 1, 0)
        assert [reserved for action, _, reserved in actions(store, waiting) if action == "RESERVED"] == [1]
    assert_proven(store)
    assert run(batch(event(2, "z", 3), event(3, "b", 2) if parked == "its own" else event(3, "z", 3)), 1).duplicates == 2
    done = reprocess(ALL, fixed(store, sequence_key="key"))
    assert (done.reprocessed, ids(place.read())) == (2, ["a", "z"])
    assert_proven(store)


@pytest.mark.full
@pytest.mark.parametrize("moved", [b'{"id": "t", "amount": -7}', b'{"id": null, "amount": -7}'])
def test_a_letter_that_an_edit_moves_goes_on_to_block_its_sequence(place: Place, moved: bytes) -> None:
    """Letters keep the order that they came in with: what waits behind one that fails again is not run, whatever its new body says."""
    settings: dict[str, Any] = {"sequence_key": "data.id", "idempotence_key": ["data.id", "data.amount"]}
    run = consumer(place.store(), **settings)
    run(batch(event(0, "s", -1), event(1, "s", 2)), 0)
    first = letters(place.store())[0]["id"]
    DeadLetters(place.store()).edit(first, body=moved, **ANN)
    done = reprocess(ALL, run)
    assert (done.failed, done.waiting, statuses(place.store()), place.read()) == (1, 1, ["OPEN", "BLOCKED"], [])
    assert_proven(place.store())
    DeadLetters(place.store()).edit(first, body=b'{"id": "t", "amount": 7}', **ANN)
    assert reprocess(Selection(ids=(first,)), run).reprocessed == 2
    assert sorted(row["amount"] for row in place.read()) == [2, 7]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_given_key_counts_whatever_the_body_says(place: Place) -> None:
    """Also where the body is edited afterwards; the key that the body has is not taken."""
    store = place.store()
    run = failing(store)
    first, second = (row["id"] for row in letters(store, kind="REJECTED"))
    found = DeadLetters(store)
    found.edit(first, key="y", **ANN)
    found.edit(second, key="z", **ANN)
    found.edit(second, body=b'{"id": "d", "amount": 4}', **ANN)
    assert reprocess(Selection(kind="REJECTED"), fixed(store)).reprocessed == 2
    assert ids(place.read()) == ["a", "b", "d"]
    report = run(batch(event(4, "b", -1), event(5, "c", -2), event(6, "y", 1), event(7, "z", 1), event(8, "d", 5)), 1)
    assert (report.duplicates, report.processed, ids(place.read())) == (2, 1, ["a", "b", "d", "d"])
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_conflict_is_settled_by_giving_it_a_key_of_its_own(place: Place) -> None:
    """Two messages that had one key by mistake have their effect both."""
    store = place.store()
    run = failing(store)
    run(batch(event(4, "a", 9)), 1)
    letter = letters(store, kind="KEY_CONFLICT")[0]["id"]
    assert reprocess(Selection(ids=(letter,)), fixed(store)).reprocessed == 0
    DeadLetters(store).edit(letter, key="a2", **ANN)
    assert reprocess(Selection(ids=(letter,)), fixed(store)).reprocessed == 1
    assert place.read() == [{"id": "a", "amount": 1}, {"id": "a", "amount": 9}]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_discarded_letters_are_not_run_and_reopened_ones_are(place: Place) -> None:
    """Whoever discards wins over a later reprocess, until it is taken back."""
    store = place.store()
    failing(store)
    DeadLetters(store).discard(ALL, **ANN)
    assert reprocess(ALL, fixed(store)).selected == 0
    DeadLetters(store).reopen(Selection(kind="REJECTED"), **ANN)
    assert reprocess(ALL, fixed(store)).reprocessed == 2
    assert statuses(store) == ["REPROCESSED", "REPROCESSED", "DISCARDED"]
    done = DeadLetters(store).discard(ALL, **ANN)
    assert (done.changed, done.skipped) == (0, {"it is REPROCESSED": 2, "it is DISCARDED": 1})
    assert_proven(store)


def test_of_a_reprocess_and_a_discard_at_once_one_wins(place: Place) -> None:
    """While the handler runs, somebody discards the same letter: either it has its effect or it is discarded, never both or neither."""
    store = place.store()
    run = failing(store)
    letter = letters(store, key="b")[0]["id"]
    discarded: list[int] = []

    def discard() -> None:
        discarded.append(DeadLetters(place.store()).discard(letter, **ANN, release_key=True).changed)

    other = threading.Thread(target=discard)
    made = fixed(store)
    inner = made._handler

    def slow(rows: Any, tx: Any) -> None:
        if not other.ident:
            other.start()
            other.join(1.0)
        inner(rows, tx)

    made._handler = slow
    done = reprocess(Selection(ids=(letter,)), made)
    other.join()
    assert done.reprocessed + discarded[0] == 1
    assert ids(place.read()) == (["a", "b"] if done.reprocessed else ["a"])
    assert statuses(store)[0] == ("REPROCESSED" if done.reprocessed else "DISCARDED")
    assert run(batch(event(4, "b", -1)), 1).duplicates == done.reprocessed
    assert_proven(store)


@pytest.mark.full
def test_of_a_discard_and_a_reprocess_at_once_one_wins(place: Place) -> None:
    """The same the other way round: the reprocess comes while the discard is about to commit."""
    failing(place.store())
    letter, reports = letters(place.store(), key="b")[0]["id"], []

    def again() -> None:
        reports.append(reprocess(Selection(ids=(letter,)), fixed(place.store())).reprocessed)

    other, store = threading.Thread(target=again), place.store()

    def meanwhile(step: str) -> None:
        if step == "commit" and not other.ident:
            other.start()
            other.join(1.0)

    store.on_step = meanwhile
    changed = DeadLetters(store).discard(letter, **ANN).changed
    other.join()
    assert changed + reports[0] == 1
    assert ids(place.read()) == (["a", "b"] if reports[0] else ["a"])
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_letter_that_is_discarded_after_it_was_listed_is_not_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reprocess looks at the status of its letters again once it has them for itself."""
    failing(place.store())
    letter, store = letters(place.store(), key="b")[0]["id"], place.store()
    begin = store.begin_letters

    def after_a_discard(*args: Any, **options: Any) -> Any:
        if letters(place.store(), ids=(letter,))[0]["status"] == "OPEN":
            assert DeadLetters(place.store()).discard(letter, **ANN).changed == 1
        return begin(*args, **options)

    monkeypatch.setattr(store, "begin_letters", after_a_discard)
    assert reprocess(Selection(ids=(letter,)), fixed(store)).reprocessed == 0
    assert ids(place.read()) == ["a"]
    assert letters(place.store(), ids=(letter,))[0]["status"] == "DISCARDED"
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_lost_letter_lets_go_of_all_its_keys(place: Place) -> None:
    """Of the one that it was given and of its own: what comes under either is processed."""
    store = place.store()
    run = consumer(store, max_body=30)
    run(batch(event(0, "b", -1, body=b'{"id": "b", "amount": -1, "more": "%s"}' % (b"x" * 40))), 0)
    letter = letters(store)[0]["id"]
    DeadLetters(store).edit(letter, key="z", **ANN)
    made = fixed(store)
    made.register_log_reader(lambda *span: batch())
    assert reprocess(ALL, made, options=ReprocessOptions(skip_missing=True)).lost == 1
    assert actions(store, letter)[-1][0::2] == ("LOST", -2)
    assert run(batch(event(1, "b", 1), event(2, "z", 1)), 1).processed == 2
    assert_proven(store)


BODIES = [b"no json", b'{"amount": 3}', b'{"id": "b", "amount": 99}']


@pytest.mark.parametrize("body", of_which(1, BODIES), ids=["undecodable", "no key", "conflict"])
@pytest.mark.parametrize(
    "settled", [pytest.param(False, marks=pytest.mark.fast_on("delta")), pytest.param(True, marks=pytest.mark.fast_on("postgres"))]
)
def test_an_edited_letter_explains_the_event_that_it_came_of(place: Place, body: bytes, settled: bool) -> None:
    """Whatever became of the new body, and with whichever key and payload: the old event delivered again is a redelivery."""
    events = batch(event(0, "b", 1), event(1, body=body), event(2, "c", 1))
    run = consumer(place.store())
    run(events, 0)
    for amount in (-4, 4)[: 1 + settled]:
        (letter,) = letters(place.store())
        DeadLetters(place.store()).edit(letter["id"], body=b'{"id": "new", "amount": %d}' % amount, reason="r", by="me")
        reprocess(Selection(), run)
    assert [letter["status"] for letter in letters(place.store())] == ["REPROCESSED" if settled else "OPEN"]
    for settings in ({}, {"query": "q2"}):
        report = consumer(place.store(), **settings)(events, 0)
        assert (report.redelivered, report.dead_lettered) == (3, 0)
    assert_proven(place.store())
