"""What dedup keeps of one key is erased on request, on every store: nothing of it can be read any more, and everything still adds up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint import changes
from checkpoint.errors import ConfigError, Refused
from deadletter.letter import CONTENTS, ERASED, LETTERS
from dedup import DeadLetters, Selection, reprocess
from dedup.core.messages import Chosen, State
from dedup.reprocessing import forget as forgetting
from dedup.reprocessing.events import events_of
from kit.forgetting import places_with
from kit.orders import assert_proven, batch, consumer, event, flatten, letters
from kit.outgoing import Receiver, dispatcher, outgoing
from kit.people import ALL, ANN, actions, fixed, statuses
from kit.places import Place, other_place

SECRET = "anna.schmidt"
"""The key of the person who is to be forgotten; body, headers, errors and notes quote it."""

CLERK = {"by": "clerk", "reason": "request 17"}


class Unknown(Exception):
    """What the handler raises."""


def quoting(store: Any, **settings: Any) -> Any:
    """A consumer whose errors quote the event, and which sends its new letters to a topic."""
    told = {"letters_to": "dead"} if settings.pop("told", False) else {}
    run = consumer(store, sequence_key="data.id", budget=None, **told, **settings)
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        tx.publish(outgoing(rows), "out", key="to", order="n")
        tx.write(flat, "orders")
        if bad := flat.filter(pc.less(flat["amount"], 0))["id"].to_pylist():
            raise Unknown(f"no account of {bad[0]}")

    return run


def parked(place: Place, *, others: int = 3, **settings: Any) -> Any:
    """One letter of SECRET and some of others, all discarded: its body, header, extra column, error, key and notes quote it."""
    store = place.store()
    run = quoting(store, **settings)
    said = {"properties": [{"key": "mail", "value": f"{SECRET}@example.org".encode()}], "key": SECRET.encode()}
    rows = batch(event(0, SECRET, -1, **said), *[event(n, f"other-{n}", -1) for n in range(1, 1 + others)])
    run(rows.append_column("note", pa.array([f"call {SECRET}"] + ["x"] * others)), 0)
    DeadLetters(store).discard(letters(store)[0]["id"], by="ann", reason=f"{SECRET} called")
    DeadLetters(store).discard(ALL, **ANN)
    return run


def forget(place: Place, **asked: Any) -> Any:
    """SECRET unless something else is named."""
    return DeadLetters(place.store()).forget("shop", **{**({} if asked.keys() & {"key", "letters"} else {"key": SECRET}), **CLERK, **asked})


def contents(row: dict[str, Any]) -> set[str]:
    """Columns of a letter that say what its event said."""
    return {name for name in CONTENTS if row[name] is not None}


@pytest.mark.fast_on("delta")
def test_a_key_is_not_guessed_after_a_reset(place: Place) -> None:
    """Until the next batch nobody knows what keys are made of: to forget one, or to give a letter one, is refused."""
    parked(place)
    store, letter = place.store(), letters(place.store())[0]["id"]
    DeadLetters(store).reopen(letter, **ANN)
    store.amend("shop", changes.reset, by="ann", reason="start over")
    for asked in ({"key": SECRET}, {"letters": [letter]}):
        with pytest.raises(Refused, match="no batch since it was made or reset"):
            forget(place, **asked, dry_run=True)
    with pytest.raises(Refused, match="no batch since it was made or reset"):
        DeadLetters(store).edit(letter, key="z", **ANN)
    assert contents(letters(store)[0]) and letters(store)[0]["idempotence_key"] == SECRET
    quoting(store)(batch(event(9, "later")), 0)
    DeadLetters(store).discard(letter, **ANN)
    assert forget(place, dry_run=True).letters == 1


def test_nothing_of_a_forgotten_key_can_be_read_any_more(place: Place) -> None:
    """Body, headers, other columns, errors, readable keys, notes: no row of any table has them; the letters of others have theirs."""
    parked(place)
    assert places_with(place, SECRET)
    done = forget(place)
    assert (done.letters, done.messages, done.is_done, done.others) == (1, 0, True, [])
    assert places_with(place, SECRET) == []
    mine, *others = letters(place.store())
    assert (contents(mine), mine["reason"]) == (set(), ERASED)
    assert all({"body", "error_message", "stack", "idempotence_key"} <= contents(other) for other in others)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_forgotten_letter_stays_and_still_counts(place: Place) -> None:
    """Its position, kind, status, hashes and counts are as before, its history says who erased it and why, and its key is reserved."""
    run = parked(place)
    before = letters(place.store())[0]
    forget(place)
    after = letters(place.store())[0]
    changed = {name for name in before if before[name] != after[name]}
    assert changed == (contents(before) | {"reason"}) and (after["status"], after["holds_key"]) == ("DISCARDED", True)
    store = place.store()
    assert actions(store, after["id"])[-1] == ("FORGOTTEN", "clerk", 0)
    assert store.history(after["id"])["reason"].to_pylist()[-1] == "request 17"
    assert run(batch(event(9, SECRET, -1)), 1).duplicates == 1
    assert letters(place.store())[0]["duplicates"] == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_look_changes_nothing(place: Place) -> None:
    """A dry run says how much would be erased, and whoever looks afterwards finds everything as it was."""
    parked(place)
    before = letters(place.store())
    done = forget(place, dry_run=True)
    assert (done.letters, done.dry_run) == (1, True)
    assert letters(place.store()) == before


@pytest.mark.full
def test_twice_is_once(place: Place) -> None:
    """The second call finds nothing of the key, and the record of the first one stays as it is."""
    parked(place)
    letter = letters(place.store())[0]["id"]
    forget(place)
    again = forget(place, by="somebody else")
    assert (again.letters, again.messages, again.is_done) == (0, 0, True)
    assert forget(place, letters=[letter]).letters_erased_before == 1
    assert [by for action, by, _ in actions(place.store(), letter) if action == "FORGOTTEN"] == ["clerk"]


@pytest.mark.parametrize("status", ["OPEN", "BLOCKED"])
def test_a_letter_that_waits_is_not_erased(place: Place, status: str) -> None:
    """It is work that was not done: the command refuses, names the letter and what to type, and erases nothing else either."""
    store = place.store()
    run = consumer(store, sequence_key="key")
    run(batch(event(0, "first", -1, key=b"k"), event(1, SECRET, -1, key=b"k")), 0)
    key = {"OPEN": "first", "BLOCKED": SECRET}[status]
    letter = letters(store, key=key)[0]
    assert letter["status"] == status
    with pytest.raises(Refused, match=rf"1 letters wait.*`dedup dead-letter discard {letter['id'][:12]} --reason"):
        forget(place, key=key)
    assert letters(place.store(), key=key) == [letter]
    assert forget(place, key=key, dry_run=True).waiting == [letter["id"]]


@pytest.mark.fast_on("postgres")
def test_a_forgotten_letter_is_never_run_again(place: Place) -> None:
    """Nobody can reopen it, and no handler would take a letter without its contents for an event."""
    parked(place)
    forget(place)
    store = place.store()
    letter = letters(store)[0]["id"]
    done = DeadLetters(store).reopen([letter], **ANN)
    assert (done.changed, list(done.skipped)) == (0, ["its contents were erased: nothing is left that could be run"])
    run = fixed(store, sequence_key="data.id")
    with pytest.raises(Refused, match=f"Letter {letter}: its contents were erased"):
        reprocess(Selection(ids=(letter,)), run, dry_run=True)
    assert reprocess(ALL, run).selected == 0
    with pytest.raises(Refused, match="contents were erased"):
        events_of(store.letters(Selection(ids=(letter,))).select(LETTERS.names), positions=True)
    assert statuses(store) == ["DISCARDED"] * 4


@pytest.mark.full
def test_its_discard_can_still_release_the_key(place: Place) -> None:
    """The hash of the key is kept, so the message may count as new when a person says so."""
    run = parked(place)
    forget(place)
    letter = letters(place.store())[0]["id"]
    DeadLetters(place.store()).discard([letter], **ANN, release_key=True)
    assert run(batch(event(9, SECRET, 5)), 1).processed == 1
    assert_proven(place.store())


@pytest.mark.full
def test_a_reprocessed_letter_is_forgotten_with_what_its_edits_replaced(place: Place) -> None:
    """The body and the key of before an edit are in the history; the letter is found by the key of before, too."""
    store = place.store()
    consumer(store)(batch(event(0, SECRET, -1)), 0)
    letter = letters(store)[0]["id"]
    DeadLetters(store).edit(letter, body=b'{"id": "new", "amount": 3}', key="new", by="ann", reason=f"not {SECRET}")
    reprocess(Selection(ids=(letter,)), fixed(store))
    assert forget(place).letters == 1
    assert places_with(place, SECRET) == []
    assert_proven(place.store())


@pytest.mark.full
def test_a_letter_whose_edited_body_has_another_key_is_found_by_the_first_one(place: Place) -> None:
    """It failed again under its new key, which is all that it shows: its history has the hash of the first one, and the first body."""
    store = place.store()
    run = consumer(store)
    run(batch(event(0, SECRET, -1)), 0)
    letter = letters(store)[0]["id"]
    DeadLetters(store).edit(letter, body=b'{"id": "new", "amount": -3}', **ANN)
    assert reprocess(Selection(ids=(letter,)), run).failed == 1
    DeadLetters(store).discard(ALL, **ANN)
    assert letters(store)[0]["idempotence_key"] == "new"
    assert forget(place).letters == 1
    assert places_with(place, SECRET) == []
    assert run(batch(event(5, SECRET, -1), event(6, "new", -3)), 1).duplicates == 2
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_only_letters_whose_key_is_meant_are_erased(place: Place) -> None:
    """Keys that are cut to the same text are told apart by their hashes: those of another person stay, and the report names them."""
    store = place.store()
    long = SECRET + "x" * 300
    consumer(store)(batch(event(0, f"{long}1", -1), event(1, f"{long}2", -1)), 0)
    DeadLetters(store).discard(ALL, **ANN)
    first, second = letters(store)
    assert first["idempotence_key"] == second["idempotence_key"]
    done = forget(place, key=f"{long}1")
    assert (done.letters, done.others) == (1, [second["id"]])
    assert letters(place.store())[1] == second


@pytest.mark.fast_on("postgres")
def test_a_key_has_one_part_for_each_column(place: Place) -> None:
    """The parts are given one by one, so that no two keys are taken for each other; a letter is another consumer's, or not there."""
    store = place.store()
    run = consumer(store, idempotence_key=("data.id", "data.amount"))
    run(batch(event(0, "a|b", -1)), 0)
    DeadLetters(store).discard(ALL, **ANN)
    with pytest.raises(ConfigError, match="has 2 part"):
        forget(place, key="a|b")
    assert forget(place, key=["a", "b|-1"]).letters == 0
    assert forget(place, key=["a|b", "-1"]).letters == 1
    with pytest.raises(ConfigError, match="has no letter"):
        forget(place, letters=["0" * 32])
    with pytest.raises(ConfigError, match="Say what to forget"):
        forget(place, key=())


@pytest.mark.fast_on("postgres")
def test_a_letter_without_a_key_is_named_by_its_id(place: Place) -> None:
    """A body that does not decode has no key: the id is all that it can be found by."""
    store = place.store()
    consumer(store)(batch(event(0, body=f"{SECRET} is no JSON".encode())), 0)
    DeadLetters(store).discard(ALL, **ANN)
    letter = letters(store)[0]["id"]
    assert forget(place).letters == 0 and places_with(place, SECRET)
    assert forget(place, letters=[letter]).letters == 1
    assert places_with(place, SECRET) == []


@pytest.mark.full
def test_messages_of_the_key_are_erased_once_they_have_left(place: Place) -> None:
    """Those that letters sent and those whose ids were made of the key, whatever others lie beside them; before that it is refused."""
    store = place.store()
    run = parked(place, told=True)
    run(batch(event(7, f"{SECRET}.2"), event(8, "other")), 1)
    with pytest.raises(Refused, match="1 messages were not sent: let `dedup outbox dispatch shop` send them"):
        forget(place)
    assert letters(store)[0]["body"] is not None, "it was refused, and nothing was erased"
    dispatcher(place, Receiver()).once()
    done = forget(place)
    assert (done.letters, done.messages) == (1, 1)
    assert forget(place, key=f"{SECRET}.2").messages == 1
    assert places_with(place, SECRET) == []
    outbox = place.store().outbox("shop")
    entries = outbox.entries(Chosen(limit=None))
    blank = [e for e in entries if e.is_erased]
    assert len(blank) == 2 and all((e.state, e.set_by, e.size, e.key) == (State.SENT, "clerk", None, None) for e in blank)
    whole = [outbox.message(e.number) for e in entries if not e.is_erased]
    assert len(whole) == len(entries) - 2 and all(m is not None and m.body for m in whole)
    assert forget(place).messages == 0
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_other_messages_are_named_by_their_numbers(place: Place) -> None:
    """Of a message with an id of its own nobody can tell which event it was for; what a person names is erased."""
    store = place.store()
    run = consumer(store)
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish(outgoing(rows), "out", key="to")

    run(batch(event(0, SECRET), event(1, "other")), 0)
    dispatcher(place, Receiver()).once()
    assert forget(place).messages == 0
    outbox = store.outbox("shop")
    numbers = [e.number for e in outbox.entries(Chosen(limit=None))]
    (number,) = [n for n in numbers if outbox.message(n).body == SECRET.encode()]  # type: ignore[union-attr]
    assert forget(place, messages=[number]).messages == 1
    assert places_with(place, SECRET) == []
    with pytest.raises(ConfigError, match="has no message 987654321"):
        forget(place, messages=[987654321])


@pytest.mark.fast_on("postgres")
def test_a_letter_that_comes_meanwhile_is_told(place: Place) -> None:
    """While the key is being erased the consumer parks another letter of it: it stays, open, and the report names it."""
    store = place.store()
    run = parked(place)

    def meanwhile(step: str) -> None:
        if step == "erase" and len(letters(place.store(), key=SECRET)) == 1 and not done:
            done.append(step)
            thread = threading.Thread(target=lambda: run(batch(event(9, SECRET, -7)), 1))
            thread.start()
            thread.join(20)

    done: list[str] = []
    report = DeadLetters(place.store(on_step=meanwhile)).forget("shop", key=SECRET, **CLERK)
    conflict = letters(store, kind="KEY_CONFLICT")
    assert done and [row["status"] for row in conflict] == ["OPEN"] and conflict[0]["body"] is not None
    assert (report.letters, report.waiting, report.is_done) == (1, [conflict[0]["id"]], False)
    assert_proven(place.store())


@pytest.mark.full
def test_a_letter_that_somebody_reopens_meanwhile_is_not_erased(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the lock it is work again: it stays as it is, and the report says why."""
    parked(place)
    letter, change = letters(place.store())[0]["id"], forgetting.change

    def later(*given: Any, **how: Any) -> Any:
        DeadLetters(place.store()).reopen([letter], **ANN)
        return change(*given, **how)

    monkeypatch.setattr(forgetting, "change", later)
    report = forget(place)
    assert (report.letters, report.letters_skipped, report.waiting, report.is_done) == (0, {"it is OPEN": 1}, [letter], False)
    assert letters(place.store())[0]["body"] is not None
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_two_who_forget_at_once_do_it_once(place: Place) -> None:
    """While one of them erases, another one begins: whichever is first, the letter is erased, and one record says who did it."""
    parked(place)
    others: list[threading.Thread] = []

    def meanwhile(step: str) -> None:
        if step == "erase" and not others:
            others.append(threading.Thread(target=lambda: DeadLetters(place.store()).forget("shop", key=SECRET, by="other", reason="too")))
            others[0].start()
            time.sleep(0.3)

    DeadLetters(place.store(on_step=meanwhile)).forget("shop", key=SECRET, **CLERK)
    others[0].join(60)
    assert places_with(place, SECRET) == [] and not others[0].is_alive()
    assert [action for action, _, _ in actions(place.store(), letters(place.store())[0]["id"])].count("FORGOTTEN") == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_an_export_of_before_does_not_bring_it_back(place: Place, tmp_path: Path) -> None:
    """The letter is there, so a file leaves it as it is; a file of after has no contents, and takes no letter to a handler."""
    parked(place)
    store = place.store()
    DeadLetters(store).export(ALL, tmp_path / "before.jsonl")
    forget(place)
    assert DeadLetters(store).import_(tmp_path / "before.jsonl", by="ann").existing == 4
    assert places_with(place, SECRET) == []
    DeadLetters(store).export(ALL, tmp_path / "after.jsonl")
    text = (tmp_path / "after.jsonl").read_text()
    assert SECRET not in text
    rows = [json.loads(line) for line in text.splitlines()]
    made_up = {**rows[0], "status": "OPEN"}
    (tmp_path / "made up.jsonl").write_text(json.dumps(made_up) + "\n")
    with pytest.raises(ConfigError, match="its contents were erased"):
        DeadLetters(store).import_(tmp_path / "made up.jsonl", by="ann", accept_keys=True)


@pytest.mark.full
def test_a_file_with_an_erased_letter_says_why_its_key_cannot_be_checked(place: Place, tmp_path: Path) -> None:
    """Nothing is wrong with such a file: whoever trusts it takes its keys as they are, and elsewhere the letter holds its key."""
    parked(place)
    forget(place)
    DeadLetters(place.store()).export(ALL, tmp_path / "after.jsonl")
    with pytest.raises(ConfigError, match=r"because `dedup consumer forget` erased the readable key.*--accept-keys"):
        DeadLetters(place.store()).import_(tmp_path / "after.jsonl", by="ann")
    other = other_place(place, tmp_path).store()
    run = quoting(other)
    run(batch(), 0)
    assert DeadLetters(other).import_(tmp_path / "after.jsonl", by="ann", accept_keys=True).imported == 4
    assert run(batch(event(90, SECRET, -1)), 1).processed == 0


@pytest.mark.fast_on("postgres")
def test_what_remains_is_told(place: Place) -> None:
    """The report says where the data still is, until when, and what removes it; where dedup erases nothing it says that, too."""
    parked(place)
    done = forget(place)
    assert done.remains and all(one.where and one.then for one in done.remains)
    assert any("sinks" in one for one in done.elsewhere)
    if place.kind == "postgres":
        assert "VACUUM dedup.dead_letter" in done.remains[0].then
    else:
        assert done.remains[0].until is not None
