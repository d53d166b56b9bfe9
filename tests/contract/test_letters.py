"""What a person does with dead letters, on every store: nothing is lost by it, and nothing happens twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from checkpoint import changes
from checkpoint.errors import CommitConflict, ConfigError
from dedup import DeadLetters, Selection
from kit.orders import assert_proven, batch, consumer, event, ids, letters
from kit.people import ALL, ANN, BODY, actions, failing, statuses
from kit.places import Place


@pytest.mark.fast_on("postgres")
def test_a_letter_is_shown_with_its_first_failure_and_its_body(place: Place) -> None:
    """By the first digits of its id: every column, the body as JSON or text where it is, and the failure it was parked with."""
    store = place.store()
    failing(store)
    rejected, _, torn = letters(store)
    shown = DeadLetters(store).show(rejected["id"][:10])
    assert (shown.row["id"], shown.json) == (rejected["id"], {"id": "b", "amount": -1})
    assert [(h["action"], h["at"], h["error_message"]) for h in shown.history.to_pylist()] == [
        ("FAILED", rejected["first_failed_at"], "negative amount")
    ]
    shown = DeadLetters(store).show(torn["id"])
    assert (shown.row["body"], shown.text, shown.json) == (BODY, None, None)
    for wrong in ("zzzz", ""):
        with pytest.raises(ConfigError, match="dead-letter list"):
            DeadLetters(store).show(wrong)


@pytest.mark.fast_on("postgres")
def test_select_and_groups_answer_for_what_was_asked(place: Place) -> None:
    """The API gives the store's rows as they are, in position order and grouped by fingerprint."""
    store = place.store()
    failing(store)
    found = DeadLetters(store)
    assert found.select(Selection(kind="REJECTED"))["sequence_number"].to_pylist() == [1, 2]
    assert [(g["kind"], g["letters"]) for g in found.groups().to_pylist()] == [("REJECTED", 2), ("UNDECODABLE", 1)]


def test_a_discarded_letter_goes_on_to_hold_its_key(place: Place) -> None:
    """Its message is a duplicate when it comes again; reopened, the letter is open as before; each step says who and why."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    done = found.discard(ALL, **ANN)
    assert (done.selected, done.changed, done.by_kind, done.skipped) == (3, 3, {"REJECTED": 2, "UNDECODABLE": 1}, {})
    assert statuses(store) == ["DISCARDED"] * 3
    assert run(batch(event(4, "b", -1)), 1).duplicates == 1
    again = found.discard(ALL, **ANN)
    assert (again.changed, again.skipped) == (0, {"it is DISCARDED": 3})
    assert found.reopen(ALL, **ANN).changed == 3
    assert statuses(store) == ["OPEN"] * 3
    letter = letters(store)[0]
    assert letter["duplicates"] == 1
    assert actions(store, letter["id"]) == [("FAILED", None, 0), ("DISCARDED", "ann", 0), ("REOPENED", "ann", 0)]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_dry_run_changes_nothing_and_says_what_would_be_done(place: Place) -> None:
    """The same counts as the real thing, and not one row different after it."""
    store = place.store()
    failing(store)
    found, before = DeadLetters(store), letters(store)
    would = found.discard(ALL, **ANN, release_key=True, dry_run=True)
    assert letters(store) == before and would.dry_run
    done = found.discard(ALL, **ANN, release_key=True)
    assert (would.changed, would.by_kind) == (done.changed, done.by_kind) == (3, {"REJECTED": 2, "UNDECODABLE": 1})
    before = letters(store)
    assert found.reopen(ALL, **ANN, dry_run=True).changed == 3
    assert letters(store) == before


@pytest.mark.fast_on("postgres")
def test_a_released_key_is_free_until_it_is_taken_again(place: Place) -> None:
    """What comes again is processed once; the letter cannot be reopened then, but one whose key nobody took can, and holds it again."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    first, second, _ = letters(store)
    assert found.discard([first["id"], second["id"]], **ANN, release_key=True).changed == 2
    assert_proven(store)
    assert run(batch(event(4, "b", 7)), 1).processed == 1
    done = found.reopen(Selection(status="DISCARDED"), **ANN)
    (why,) = done.skipped
    assert (done.changed, "decided by another event" in why, done.examples[why]) == (1, True, first["id"])
    assert statuses(store) == ["DISCARDED", "OPEN", "OPEN"]
    assert run(batch(event(5, "c", 7)), 2).dead_lettered == 1  # KEY_CONFLICT: the letter holds the key again
    assert ids(place.read()) == ["a", "b"]
    assert actions(store, second["id"])[1:] == [("DISCARDED", "ann", 0), ("RELEASED", "ann", -1), ("REOPENED", "ann", 1)]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_discarded_letter_can_release_its_key_later(place: Place) -> None:
    """Discarding again with release_key only releases."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    letter = letters(store)[0]
    found.discard(letter["id"], **ANN)
    assert found.discard(letter["id"], **ANN, release_key=True).changed == 1
    assert found.discard(letter["id"], **ANN, release_key=True).skipped == {"it is DISCARDED": 1}
    assert [a for a, _, _ in actions(store, letter["id"])] == ["FAILED", "DISCARDED", "RELEASED"]
    assert run(batch(event(4, "b", 7)), 1).processed == 1
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_of_two_released_letters_of_one_key_one_can_be_reopened(place: Place) -> None:
    """The key is held by one letter only, also where both are reopened at once."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    found.discard(Selection(kind="REJECTED"), **ANN, release_key=True)
    run(batch(event(4, "b", -1)), 1)
    found.discard(Selection(status="OPEN", kind="REJECTED"), **ANN, release_key=True)
    done = found.reopen(Selection(kind="REJECTED"), **ANN)
    assert (done.changed, sum(done.skipped.values())) == (2, 1)
    assert sorted(statuses(store, kind="REJECTED")) == ["DISCARDED", "OPEN", "OPEN"]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_an_id_that_is_not_there_is_told(place: Place) -> None:
    """The other letters are changed all the same."""
    store = place.store()
    failing(store)
    done = DeadLetters(store).discard([letters(store)[0]["id"], "0" * 32], **ANN)
    assert (done.changed, done.skipped, done.examples) == (1, {"there is no such letter": 1}, {"there is no such letter": "0" * 32})


@pytest.mark.fast_on("postgres")
def test_an_edited_body_is_there_exactly_and_the_original_is_kept(place: Place) -> None:
    """Bytes for bytes; the old key stays reserved, so that the original is a duplicate when it comes again."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    letter = letters(store)[0]
    found.edit(letter["id"], body=b'\xff\x00{"id"', accept_any_body=True, **ANN)
    shown = found.show(letter["id"])
    assert (shown.row["body"], shown.row["body_size"], shown.row["status"]) == (b'\xff\x00{"id"', 7, "OPEN")
    assert [(h["action"], h["body"], h["idempotence_key"]) for h in shown.history.to_pylist()][1:] == [("EDITED", letter["body"], None)]
    assert run(batch(event(4, "b", -1)), 1).duplicates == 1
    assert_proven(store)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["REJECTED", "UNDECODABLE"])
def test_a_body_that_is_decoded_as_json_stays_json(place: Place, kind: str) -> None:
    """An edit to a body that does not parse is refused with the reason and the place; JSON is taken, and any bytes if they are accepted."""
    store = place.store()
    failing(store)
    found, (letter, *_) = DeadLetters(store), letters(store, kind=kind)
    for body in (b'{"id": "b", "amou', b"", b"\xff", b'{"id": NaN}', b"\xef\xbb\xbf{}", b"{} {}"):
        with pytest.raises(ConfigError, match=r"The new body .*accept_any_body=True"):
            found.edit(letter["id"], body=body, **ANN)
    assert letters(store, kind=kind)[0] == letter
    found.edit(letter["id"], body=b'{"id": "b"}', **ANN)
    found.edit(letter["id"], body=b"{} {}", accept_any_body=True, **ANN)
    assert letters(store, kind=kind)[0]["body"] == b"{} {}"


@pytest.mark.fast_on("postgres")
def test_an_edited_key_is_the_one_that_an_event_with_it_has(place: Place) -> None:
    """Both keys are reserved from then on: the original is a duplicate when it comes again, another event with the new key a conflict."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    letter = letters(store)[0]
    found.edit(letter["id"], key="z", **ANN)
    shown = found.show(letter["id"])
    assert (shown.row["idempotence_key"], shown.row["holds_key"]) == ("z", True)
    entry = shown.history.to_pylist()[-1]
    assert (entry["action"], entry["key"], entry["idempotence_key"], entry["reserved"]) == ("EDITED", letter["key"], "b", 1)
    report = run(batch(event(4, "b", -1), event(5, "z", -1)), 1)
    assert (report.processed, report.duplicates, statuses(store, kind="KEY_CONFLICT")) == (0, 1, ["OPEN"])
    found.edit(letter["id"], key="b", **ANN)  # its own old key: nothing new to reserve
    assert found.show(letter["id"]).history.to_pylist()[-1]["reserved"] == 0
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_key_that_is_decided_is_refused_in_an_edit(place: Place) -> None:
    """Processed or held by another letter: the edit is an error that says so, and nothing is changed."""
    store = place.store()
    failing(store)
    found, before = DeadLetters(store), letters(store)
    for taken in ("a", "c"):
        with pytest.raises(ConfigError, match="decided already"):
            found.edit(before[0]["id"], key=taken, **ANN)
    for wrong in ({}, {"key": ("x", "y")}):
        with pytest.raises(ConfigError, match="Give"):
            found.edit(before[0]["id"], **wrong, **ANN)
    with pytest.raises(ConfigError, match="no such letter"):
        found.edit("0" * 32, body=b"", **ANN)
    assert letters(store) == before


@pytest.mark.fast_on("postgres")
def test_a_letter_without_a_key_can_be_given_one(place: Place) -> None:
    """It holds it from then on."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    letter = letters(store, kind="UNDECODABLE")[0]
    found.edit(letter["id"], key="z", **ANN)
    assert run(batch(event(4, "z", 1)), 1).processed == 0
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_only_letters_that_wait_can_be_edited(place: Place) -> None:
    """A discarded one has to be reopened first, and the error says so."""
    store = place.store()
    failing(store)
    letter = letters(store)[0]["id"]
    DeadLetters(store).discard(letter, **ANN)
    with pytest.raises(ConfigError, match="Reopen it first"):
        DeadLetters(store).edit(letter, body=b"x", **ANN)


@pytest.mark.fast_on("postgres")
def test_release_frees_the_keys_of_edits_too(place: Place) -> None:
    """Whatever an edited letter held counts as new again; reopened it takes all of it, or nothing."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    letter = letters(store)[0]["id"]
    found.edit(letter, key="z", **ANN)
    found.discard(letter, **ANN, release_key=True)
    assert actions(store, letter)[-1] == ("RELEASED", "ann", -2)
    assert_proven(store)
    found.reopen(letter, **ANN)
    assert actions(store, letter)[-1] == ("REOPENED", "ann", 2)
    found.discard(letter, **ANN, release_key=True)
    assert run(batch(event(4, "b", 5)), 1).processed == 1
    assert found.reopen(letter, **ANN).changed == 0
    assert run(batch(event(5, "z", 5)), 2).processed == 1
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_discard_of_a_blocker_lets_its_followers_go_oldest_first(place: Place) -> None:
    """Of a sequence the next letter is open then; reopened, the first one blocks them again."""
    store = place.store()
    run = consumer(store, sequence_key="data.id", idempotence_key=["data.id", "data.amount"])
    run(batch(event(0, "s", -1), event(1, "s", 1), event(2, "s", 2), event(3, "t", 3)), 0)
    assert statuses(store) == ["OPEN", "BLOCKED", "BLOCKED"]
    first, second, third = letters(store)
    found = DeadLetters(store)
    found.discard(first["id"], **ANN)
    assert [(r["status"], r["blocked_by"]) for r in letters(store)] == [("DISCARDED", None), ("OPEN", None), ("BLOCKED", second["id"])]
    found.reopen(first["id"], **ANN)
    assert [(r["status"], r["blocked_by"]) for r in letters(store)] == [
        ("OPEN", None),
        ("BLOCKED", first["id"]),
        ("BLOCKED", second["id"]),
    ]
    found.discard([first["id"], second["id"], third["id"]], **ANN)
    assert run(batch(event(4, "s", 4)), 1).processed == 1
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_discard_of_open_letters_takes_none_that_it_opens(place: Place) -> None:
    """What is meant is fixed before anything changes, so that the dry run told the truth, whatever the size of the portions."""
    store = place.store()
    run = consumer(store, sequence_key="data.id", idempotence_key=["data.id", "data.amount"])
    run(batch(event(0, "s", -1), event(1, "s", 1), event(2, "s", 2)), 0)
    selection = Selection(status="OPEN", limit=None)
    assert DeadLetters(store).discard(selection, **ANN).changed == 1
    assert statuses(store) == ["DISCARDED", "OPEN", "BLOCKED"]


@pytest.mark.fast_on("postgres")
def test_portions_go_on_behind_each_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many portions and pages it takes, each letter is changed once, and the progress is told."""
    from deadletter import work

    monkeypatch.setattr(work, "PAGE", 4)
    monkeypatch.setattr(work, "PORTION", 3)
    store, told = place.store(), []
    consumer(store)(batch(*(event(n, f"x{n}", -1) for n in range(11))), 0)
    done = DeadLetters(store).discard(Selection(limit=10), **ANN, on_progress=lambda *numbers: told.append(numbers))
    assert (done.selected, done.changed) == (10, 10)
    assert told == [(3, 10), (6, 10), (9, 10), (10, 10)]
    assert statuses(store) == ["DISCARDED"] * 10 + ["OPEN"]


@pytest.mark.fast_on("postgres")
def test_a_discard_beside_the_stream_is_planned_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that comes first costs another attempt, no letter."""
    from deadletter import work

    store = place.store()
    failing(store)
    transact, tried = work._transact, []

    def conflicting(*arguments: Any) -> Any:
        tried.append(1)
        if len(tried) < 3:
            raise CommitConflict
        return transact(*arguments)

    monkeypatch.setattr(work, "_transact", conflicting)
    assert DeadLetters(store).discard(ALL, **ANN).changed == 3
    assert len(tried) == 3


@pytest.mark.full
def test_of_many_discards_of_one_letter_one_wins(place: Place) -> None:
    """Several people at once: the letter is changed once, and its history tells of one."""
    failing(place.store())
    letter, results = letters(place.store())[0]["id"], []

    def discard() -> None:
        results.append(DeadLetters(place.store()).discard(letter, **ANN, release_key=True).changed)

    threads = [threading.Thread(target=discard) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 0, 0, 1]
    assert [a for a, _, _ in actions(place.store(), letter)] == ["FAILED", "DISCARDED", "RELEASED"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_letters_of_a_life_before_a_reset_can_be_given_up_and_taken_back(place: Place) -> None:
    """Their keys no longer count; what is done with them leaves the new life as it is."""
    store = place.store()
    run, found = failing(store), DeadLetters(store)
    store.amend("shop", changes.reset, by="ann", reason="again")
    assert run(batch(event(1, "b", -1), event(2, "d", 1)), 0).processed == 1
    assert found.discard(ALL, **ANN, release_key=True).changed == 4
    assert_proven(store)
    assert run(batch(event(3, "b", 1), event(4, "d", 1)), 1).processed == 1
    assert found.reopen(ALL, **ANN).changed == 3
    assert run(batch(event(5, "b", 1)), 2).duplicates == 1
    assert_proven(store)
