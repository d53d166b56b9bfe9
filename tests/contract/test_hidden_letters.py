"""`FailurePolicy(redact=)`, on every store: what a letter hides is stored nowhere, is never run, and can be had again as was promised."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import LettersUnread, Refused, SealUnavailable
from deadletter.hiding import mark_of
from dedup import DeadLetters, Encrypt, Mask, Retry, Selection, reprocess
from dedup.reprocessing.events import events_of
from fixtures.variants import of_which
from kit.forgetting import files_with, places_with
from kit.orders import assert_proven, event, ids, letters
from kit.outgoing import Receiver, dispatcher
from kit.people import ALL, ANN, actions, statuses
from kit.places import DeltaPlace, Place, other_place
from kit.redacting import BAD, LOST, MASKS, NEW, OLD, SEALS, SECRET, WAYS, Vault, job, noted, parked, recorded, said

OPEN = Selection(status="OPEN", limit=None)

FEW_FIRST = sorted(WAYS, key=lambda way: way not in ("fields", "encrypt"))
"""One that masks and one that seals come before the others: `make test` runs these two."""


def everywhere(place: Place) -> list[str]:
    """Where the person is named: tables, and on Delta files that no table lists any more as well."""
    files = files_with(Path(place.where), SECRET) if isinstance(place, DeltaPlace) and "://" not in str(place.where) else []
    return places_with(place, SECRET) + files


@pytest.mark.parametrize("way", of_which(3, [*FEW_FIRST[:2], None, *FEW_FIRST[2:]]))
def test_what_is_hidden_stands_in_no_table(way: str | None, caplog: pytest.LogCaptureFixture, place: Place, tmp_path: Path) -> None:
    """Of letters and of their copies for others: neither body, headers, other columns nor any text; without redact= all of them do."""
    store = place.store()
    run = parked(store, way and WAYS[way], letters_to="dead")
    found = letters(store)
    assert [row["kind"] for row in found] == ["HANDLER_ERROR", "HANDLER_ERROR", "REJECTED", "UNDECODABLE"]
    assert bool(everywhere(place)) == (way is None)
    with pytest.raises(LettersUnread) if way in MASKS else nullcontext():
        reprocess(ALL, run)  # all fail again
    assert bool(everywhere(place)) == (way is None)
    assert ids(place.read()) == ["a"]
    assert (SECRET in caplog.text) == (way is None)  # neither in the lines about tries that are repeated
    assert_proven(store)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("way", of_which(2, FEW_FIRST))
def test_keys_groups_and_duplicates_are_as_without_it(way: str, place: Place) -> None:
    """What tells letters apart and what recognises their messages is computed before anything is hidden."""
    plain, store = place.store(), place.store()
    parked(plain, None, name="plain")
    run = parked(store, WAYS[way])
    names = ["kind", "fingerprint", "key", "holds_key", "idempotence_key", "payload_hash", "body_size", "status", "attempts", "error_type"]
    told = [[[row[n] for n in names if n != "key"] for row in letters(store, consumer=one)] for one in ("plain", "shop")]
    assert told[0] == told[1]
    again = run(noted(said(10, "x1"), said(11, "r1", 2)), 1)
    assert (again.duplicates, again.dead_lettered) == (1, 1)
    assert letters(store, consumer="shop", kind="KEY_CONFLICT")[0]["idempotence_key"] == "r1"


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("way", of_which(1, SEALS))
def test_a_sealed_letter_is_run_as_the_event_was(way: str, place: Place) -> None:
    """Body, headers and other columns are the event's own, byte for byte; the effect is there once."""
    store = place.store()
    parked(store, WAYS[way])
    run, seen = job(store, WAYS[way], bad=set())
    done = reprocess(OPEN, run)
    assert (done.reprocessed, done.failed) == (3, 1)
    assert [(row["data"]["id"], row["body"], row["properties"], row["note"], row["shard"]) for row in seen] == [
        (id, said(n, id)["body"], said(n, id)["properties"], f"call {SECRET}", 7) for n, id in enumerate(("x1", "t1", "r1"), 1)
    ]
    assert sorted(ids(place.read())) == ["a", "r1", "t1", "x1"]
    assert reprocess(OPEN, run).reprocessed == 0
    assert_proven(store)


@pytest.mark.parametrize("way", of_which(1, SEALS))
def test_whoever_has_the_key_reads_what_the_letter_says(way: str, place: Place) -> None:
    """Contents, the error with its stack, and each earlier try; without the key the same letter tells its class and place alone."""
    store = place.store()
    parked(store, WAYS[way])
    failed = letters(store)[1]
    assert "its text is hidden" in failed["reason"] and failed["error_type"].endswith("Brief") and failed["stack"] is None
    assert "redacting.py:handle" in failed["reason"]
    plain, whole = DeadLetters(store).show(failed["id"]), DeadLetters(store, WAYS[way]).show(failed["id"])
    assert SECRET not in str(plain) and len(plain.history) == 3
    assert whole.json["mail"] == f"{SECRET}@example.org" and whole.row["properties"][0]["value"] == SECRET.encode()
    assert SECRET in whole.row["error_message"] and "Traceback" in whole.row["stack"] and SECRET in whole.row["reason"]
    assert all(SECRET in entry["error_message"] for entry in whole.history.to_pylist())
    undecodable = DeadLetters(store, WAYS[way]).show(letters(store)[3]["id"]).row
    assert SECRET in undecodable["reason"] and SECRET not in letters(store)[3]["reason"]


@pytest.mark.fast_on("postgres")
def test_a_new_key_seals_and_old_ones_go_on_to_open(place: Place) -> None:
    """Letters of before the change are run; the next ones are sealed with the new key alone."""
    store = place.store()
    parked(store, Encrypt(OLD))
    run, _ = job(store, Encrypt([NEW, OLD]))
    run(noted(said(10, "x2"), said(11, "r1", 3)), 1)
    newest = letters(store)[-1]["id"]
    assert DeadLetters(store, Encrypt(NEW)).show(newest).json["id"] == "r1"
    with pytest.raises(Refused, match="not among those"):
        DeadLetters(store, Encrypt(OLD)).show(newest)
    fixed, _ = job(store, Encrypt([NEW, OLD]), bad=set())
    assert reprocess(Selection(status="OPEN", kind="HANDLER_ERROR"), fixed).reprocessed == 2


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(
    ("redact", "why"), of_which(1, [(Encrypt(LOST), "not among those"), (None, "nothing opens it"), (Mask(), "nothing opens it")])
)
def test_a_lost_key_leaves_the_letter_as_it_is(redact: Any, why: str, place: Place) -> None:
    """No handler gets sealed bytes: a look and the error say what is missing, nothing of the letter changes, and others are run."""
    store = place.store()
    parked(store, Encrypt(OLD))
    run, _ = job(store, redact, bad={"y1"})
    run(noted(said(10, "y1")), 1)
    before = letters(store)[:4]
    run._handler = job(store, redact, bad=set())[0]._handler
    run.register_log_reader(recorded(said(10, "y1")))
    assert {why in one.why for one in reprocess(OPEN, run, dry_run=True).unread} == {True}
    with pytest.raises(LettersUnread, match=why) as caught:
        reprocess(OPEN, run)
    report = caught.value.report
    assert (len(report.unread), report.reprocessed, report.failed, report.left) == (4, 1, 0, 0)
    assert letters(store)[:4] == before and reprocess(OPEN, run, dry_run=True).unread == report.unread
    assert sorted(ids(place.read())) == ["a", "y1"]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_none_overtakes_a_letter_that_cannot_be_opened(place: Place) -> None:
    """Those behind it in its sequence wait, although their own key is there."""
    store = place.store()
    first, _ = job(store, Encrypt(LOST), sequence_key="partition")
    first(noted(said(0, "x1")), 0)
    then, _ = job(store, Encrypt(OLD), sequence_key="partition")
    then(noted(said(1, "b")), 1)
    fixed, seen = job(store, Encrypt(OLD), sequence_key="partition", bad=set())
    with pytest.raises(LettersUnread):
        reprocess(ALL, fixed)
    assert (statuses(store), seen) == (["OPEN", "BLOCKED"], [])
    both, seen = job(store, Encrypt([OLD, LOST]), sequence_key="partition", bad=set())
    reprocess(ALL, both)
    assert [row["data"]["id"] for row in seen] == ["x1", "b"]
    assert_proven(store)


@pytest.mark.parametrize("way", of_which(1, MASKS))
def test_no_handler_is_given_a_mask(way: str, place: Place) -> None:
    """Without a log reader the letter stays, and says why; with one the handler gets the event as it was."""
    store = place.store()
    parked(store, WAYS[way])
    run, seen = job(store, WAYS[way], bad=set())
    before = letters(store)
    with pytest.raises(LettersUnread, match="register_log_reader"):
        reprocess(OPEN, run)
    assert (letters(store), seen) == (before, [])
    with pytest.raises(Refused, match="masked"):
        events_of(store.letters(ALL), positions=True)
    run.register_log_reader(recorded(said(1, "x1"), said(2, "t1"), said(3, "r1")))
    with pytest.raises(LettersUnread, match="does not have the event"):
        reprocess(OPEN, run)
    assert [(row["data"]["id"], row["body"], row["note"], row["shard"]) for row in seen] == [
        (id, said(n, id)["body"], f"call {SECRET}", 7) for n, id in enumerate(("x1", "t1", "r1"), 1)
    ]
    assert all(SECRET in str(row["properties"]) for row in seen)
    assert_proven(store)


def test_another_event_in_the_log_is_not_taken_for_a_masked_one(place: Place) -> None:
    """The digest of the whole body tells: nothing is run, and the letter stays."""
    store = place.store()
    parked(store, Mask("mail"))
    run, seen = job(store, Mask("mail"), bad=set())
    run.register_log_reader(recorded(said(1, "x1", 5), said(2, "t1", 5), said(3, "r1", 5)))
    with pytest.raises(LettersUnread, match="another event"):
        reprocess(Selection(kind="REJECTED"), run)
    assert (seen, statuses(store)) == ([], ["OPEN"] * 4)


def test_a_letter_of_which_nothing_is_masked_is_run_as_it_is(place: Place) -> None:
    """An event without the masked fields needs no log."""
    store = place.store()
    run, _ = job(store, Mask("iban", "customer.mail"), bad={"x1"})
    run(noted(event(0, "x1")), 0)
    assert mark_of(letters(store)[0]["extras"]) is None
    fixed, seen = job(store, Mask("iban"), bad=set())
    assert reprocess(ALL, fixed).reprocessed == 1
    assert seen[0]["note"] == f"call {SECRET}"


def test_texts_are_kept_where_the_user_says_so(place: Place) -> None:
    """`texts="keep"`: errors read as they were raised, contents are hidden all the same."""
    store = place.store()
    parked(store, Encrypt(OLD, texts="keep"))
    first, _, rejected, torn = letters(store)
    assert SECRET in first["error_message"] and "Traceback" in first["stack"]
    assert (rejected["reason"], SECRET in torn["reason"], SECRET.encode() in first["body"]) == (f"not {SECRET}", True, False)


def test_a_mask_that_raises_loses_no_event(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The letter keeps the digest of its event and nothing else; the log names the letter and the class of the error, not the event."""
    store = place.store()
    with caplog.at_level(logging.ERROR, "dedup"):
        parked(store, WAYS["broken"])
    assert [row["body"] for row in letters(store)] == [b"***"] * 4
    said_ = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said_) == 4 and all("KeyError" in one and SECRET not in one for one in said_)


def test_a_seal_that_fails_is_an_outage(place: Place) -> None:
    """Nothing of the batch is stored, rows neither, and the same batch passes when the seal is back."""
    store, vault = place.store(), Vault()
    vault.away = True
    with pytest.raises(SealUnavailable, match="no vault"):
        parked(store, vault)
    assert (letters(store), place.read()) == ([], [])
    vault.away = False
    parked(store, vault)
    assert (len(letters(store)), ids(place.read())) == (4, ["a"])
    vault.away = True
    before = letters(store)
    with pytest.raises(SealUnavailable):  # the text of the new failure
        reprocess(Selection(kind="HANDLER_ERROR"), Failing(store, vault))
    assert letters(store) == before
    assert_proven(store)


def Failing(store: Any, vault: Any) -> Any:
    """A consumer that opens letters, and then finds the vault away."""

    class Half(Vault):
        def seal(self, data: bytes, of: Any) -> bytes:
            raise ConnectionError("no vault")

    return job(store, Half(), bad=BAD)[0]


def test_each_letter_is_hidden_once(place: Place) -> None:
    """The store, the message of `letters_to=` and what `on_parked=` is told have one and the same evaluation."""
    asked: list[Any] = []

    def mask(contents: Any) -> Any:
        asked.append(contents)
        return Mask("mail")(contents)

    told: list[Any] = []
    parked(place.store(), mask, letters_to="dead", on_parked=told.append)
    assert len(asked) == 4 == len({one.body for one in asked})
    assert [SECRET in group.reason for group in told] == [False] * 4


@pytest.mark.parametrize("way", ["fields", "encrypt"])
def test_the_copies_for_others_hide_the_same(way: str, place: Place) -> None:
    """A message of `letters_to=` has the letter's body and headers as they are stored, and says that they are hidden."""
    store = place.store()
    run = parked(store, WAYS[way], letters_to="dead")
    receiver = Receiver()
    dispatcher(place, receiver).once()
    found = {row["id"]: row for row in letters(store)}
    sent = receiver.got
    assert len(sent) == 4 and run is not None
    for message in sent:
        headers = dict(message.headers)
        assert message.body == found[message.id]["body"]
        assert headers["dedup.redaction"] == (b"masked" if way == "fields" else b"sealed")
        assert SECRET.encode() not in b"".join(value or b"" for value in headers.values()) + (message.body or b"")


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("way", ["fields", "encrypt"])
@pytest.mark.parametrize("format", of_which(1, ["jsonl", "parquet"]))
def test_files_hide_it_and_come_back(way: str, format: Any, place: Place, tmp_path: Path) -> None:
    """An exported file does not name the person; imported again, a sealed letter opens and a masked one waits for the log."""
    store, file = place.store(), tmp_path / f"letters.{format}"
    parked(store, WAYS[way])
    DeadLetters(store).export(ALL, file)
    assert SECRET.encode() not in file.read_bytes()
    other = other_place(place, tmp_path)
    run, seen = job(other.store(), WAYS[way], bad=set())
    run(noted(), 0)
    assert DeadLetters(other.store()).import_(file, by="ann").imported == 4
    assert letters(other.store()) == letters(store)
    with pytest.raises(LettersUnread) if way == "fields" else nullcontext():
        reprocess(OPEN, run)
    assert [row["data"]["id"] for row in seen] == ([] if way == "fields" else ["x1", "t1", "r1"])


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("way", of_which(1, ["encrypt", "fields"]))
def test_a_hidden_letter_can_be_forgotten(way: str, place: Place) -> None:
    """By its key, as any other letter; afterwards nobody can run it."""
    store = place.store()
    run = parked(store, WAYS[way], letters_to="dead")
    dispatcher(place, Receiver()).once()
    DeadLetters(store).discard(ALL, **ANN)
    done = DeadLetters(store).forget("shop", key="x1", by="clerk", reason="request 1")
    assert (done.letters, done.messages) == (1, 1)
    gone = letters(store)[0]
    assert [gone[name] for name in ("body", "extras", "properties", "error_message", "body_sha256")] == [None] * 5
    assert actions(store, gone["id"])[-1][0] == "FORGOTTEN"
    with pytest.raises(Refused):
        reprocess(Selection(ids=(gone["id"],)), run)
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_new_body_of_a_sealed_letter_is_sealed(place: Place, tmp_path: Path) -> None:
    """Without the key an edit is refused; with it neither the new body nor the old one can be read, and the new one is run."""
    store, key = place.store(), Encrypt(OLD)
    parked(store, key)
    letter, body = letters(store)[2]["id"], json.dumps({"id": "r1", "amount": 9, "mail": f"{SECRET}@new.org"}).encode()
    with pytest.raises(Refused, match="sealed"):
        DeadLetters(store).edit(letter, body=body, **ANN)
    with pytest.raises(Refused, match="not among those"):
        DeadLetters(store, Encrypt(NEW)).edit(letter, body=body, **ANN)
    assert DeadLetters(store, key).edit(letter, body=body, **ANN).changed == 1
    assert everywhere(place) == []
    past = DeadLetters(store, key).show(letter)
    assert (past.row["body"], past.history.to_pylist()[-1]["body"]) == (body, said(3, "r1")["body"])
    fixed, seen = job(store, key, bad=set())
    assert reprocess(Selection(ids=(letter,)), fixed).reprocessed == 1
    assert (seen[0]["body"], seen[0]["note"]) == (body, f"call {SECRET}")
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_new_body_of_a_masked_letter_is_refused(place: Place) -> None:
    """It would be stored for all to read; another key can be given, and no step makes the mask an event."""
    store = place.store()
    parked(store, Mask())
    letter = letters(store)[2]["id"]
    with pytest.raises(Refused, match="masked"):
        DeadLetters(store, Mask()).edit(letter, body=b"{}", **ANN)
    DeadLetters(store).edit(letter, key="r9", **ANN)
    DeadLetters(store).discard(letter, **ANN)
    DeadLetters(store).reopen(letter, **ANN)
    run, seen = job(store, Mask(), bad=set())
    with pytest.raises(LettersUnread):
        reprocess(Selection(ids=(letter,)), run)
    assert seen == []


def test_a_sealed_letter_is_run_when_it_is_due(place: Place) -> None:
    """`Retry(later=)` counts from the failure, whatever the letter hides."""
    store = place.store()
    later = Retry(attempts=1, later=[0.001])
    parked(store, Encrypt(OLD), retry=later)
    fixed, _ = job(store, Encrypt(OLD), bad=set(), retry=later)
    assert reprocess(Selection(), fixed, due=True).reprocessed == 2
    assert_proven(store)


@pytest.mark.parametrize("way", of_which(1, ["mask", "encrypt"]))
def test_what_is_too_large_is_hidden_and_read_from_the_log(way: str, place: Place, tmp_path: Path) -> None:
    """Its beginning is not stored for all to read; the whole body comes from the log, the rest from the letter or the log."""
    store = place.store()
    run, _ = job(store, WAYS[way], max_body=50)
    run(noted(said(1, "x1")), 0)
    assert letters(store)[0]["kind"] == "TOO_LARGE"
    assert everywhere(place) == []
    fixed, seen = job(store, WAYS[way], max_body=50, bad=set())
    with pytest.raises(LettersUnread, match="register_log_reader"):
        reprocess(ALL, fixed)
    fixed.register_log_reader(recorded(said(1, "x1")))
    assert reprocess(ALL, fixed).reprocessed == 1
    assert (seen[0]["body"], seen[0]["note"]) == (said(1, "x1")["body"], f"call {SECRET}")


@pytest.mark.parametrize("way", of_which(1, ["mask", "encrypt"]))
def test_letters_without_positions(way: str, place: Place) -> None:
    """A sealed one is run; of a masked one nobody can read the event again, and its letter says so."""
    store = place.store()
    settings: dict[str, Any] = {"positions": None}
    run, _ = job(store, WAYS[way], **settings)
    rows = noted(said(1, "x1")).drop_columns(["source", "topic", "partition", "sequence_number", "offset", "part"])
    run(rows, 0)
    fixed, seen = job(store, WAYS[way], bad=set(), **settings)
    fixed.register_log_reader(recorded(said(1, "x1")))
    if way == "mask":
        with pytest.raises(LettersUnread, match="no position"):
            reprocess(ALL, fixed)
    else:
        assert reprocess(ALL, fixed).reprocessed == 1
    assert len(seen) == (way != "mask")
