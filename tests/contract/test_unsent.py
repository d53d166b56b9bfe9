"""A message that cannot be sent is a dead letter of its own kind, in the same commands as those of events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import ConfigError, Refused
from deadletter.letter import Kind
from deadletter.selection import Selection
from dedup.core.messages import Asked, Failed, Marks
from dedup.reprocessing.dead_letters import DeadLetters
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.options import ReprocessOptions
from kit.orders import batch, event
from kit.outgoing import Receiver, dispatcher, publisher, states
from kit.places import Place

UNSENT = Selection(kind=Kind.UNSENT, limit=None)


@pytest.fixture
def receiver(place: Place) -> Receiver:
    """Two keys with four messages each; the second of key 0 and the third of key 1 cannot be sent. One event is a letter itself."""
    run, one = publisher(place.store()), Receiver()
    run(batch(*[event(n, f"o{n}", n % 2) for n in range(8)], event(8, "o8", -1)), 0)
    one.refused = {b"o2": ValueError("no 1 of 'a'"), b"o5": ValueError("no 2 of 'b'")}
    dispatcher(place, one).once()
    return one


def test_it_is_listed_and_shown_beside_letters_of_events(place: Place, receiver: Receiver) -> None:
    """List has both, events first; show has error, body and ids; the same error is one group; what was sent is no letter."""
    letters = DeadLetters(place.store())
    found = letters.select(Selection()).to_pylist()
    assert [(r["kind"], r["status"], r["idempotence_key"] and r["body"]) for r in found[1:]] == [
        ("UNSENT", "OPEN", b"o2"),
        ("UNSENT", "OPEN", b"o5"),
    ]
    assert found[0]["kind"] == "REJECTED" and found[1]["topic"] == "out" and found[1]["event_key"] == b"0"
    assert letters.select(Selection(kind="REJECTED"))["id"].to_pylist() == [found[0]["id"]]
    assert letters.select(Selection(limit=2))["id"].to_pylist() == [r["id"] for r in found[:2]]
    for page in (0, 1):
        assert letters.select(Selection(after=found[page]["id"]), ["id"])["id"].to_pylist() == [r["id"] for r in found[page + 1 :]]
    shown = letters.show(found[1]["id"][:10])
    assert (shown.row["error_type"], shown.row["error_message"], shown.text) == ("ValueError", "no 1 of 'a'", "o2")
    assert [e["action"] for e in shown.history.to_pylist()] == ["FAILED"]
    assert {(g["kind"], g["letters"]) for g in letters.groups().to_pylist()} == {("UNSENT", 2), ("REJECTED", 1)}


@pytest.mark.fast_on("postgres")
def test_reprocessing_it_sends_it_and_then_those_behind_it(place: Place, receiver: Receiver) -> None:
    """A dry run counts; reprocess lets the message wait again, no handler runs, and dispatch keeps the order of its key."""
    run = publisher(place.store())
    run._handler = None
    run.foreach_batch(lambda rows, tx: pytest.fail("no handler"))
    assert reprocess(UNSENT, run, dry_run=True).selected == 2 and len(DeadLetters(place.store()).select(UNSENT)) == 2
    receiver.refused = {}
    done = reprocess(Selection(kind=Kind.UNSENT, text="NO 1"), run)
    assert (done.selected, done.reprocessed, done.by_kind) == (1, 1, {"UNSENT": 1})
    assert dispatcher(place, receiver).once().sent == 3
    assert receiver.bodies(b"0") == [b"o0", b"o2", b"o4", b"o6"] and receiver.bodies(b"1") == [b"o1", b"o3"]
    assert DeadLetters(place.store()).select(UNSENT)["body"].to_pylist() == [b"o5"]


def test_its_id_alone_says_that_a_message_is_meant(place: Place, receiver: Receiver) -> None:
    """What `dedup dead-letter reprocess ID` asks for is done; ids of both kinds together are refused."""
    run = publisher(place.store())
    event_id, first, _ = DeadLetters(place.store()).select(Selection(), ["id"])["id"].to_pylist()
    with pytest.raises(ConfigError, match="reprocess them separately"):
        reprocess(Selection(ids=(event_id, first)), run)
    assert reprocess(Selection(ids=(first,)), run, dry_run=True).selected == 1 and states(place)["DEAD"] == 2
    assert reprocess(Selection(ids=(first,)), run).reprocessed == 1 and states(place)["DEAD"] == 1
    assert reprocess(Selection(ids=(event_id,)), run, dry_run=True).by_kind == {"REJECTED": 1}


@pytest.mark.fast_on("delta")
def test_how_many_messages_are_let_go_is_said_by_the_options_alone(place: Place, receiver: Receiver) -> None:
    """As of letters of events: the limit of the selection, which is 100 where nobody says one, does not count."""
    run = publisher(place.store())
    few = Selection(kind=Kind.UNSENT, limit=1)
    assert reprocess(few, run, dry_run=True).selected == 2
    assert reprocess(replace(UNSENT, limit=2), run, options=ReprocessOptions(limit=1)).reprocessed == 1
    assert reprocess(few, run).selected == 1 and states(place).get("DEAD") is None


@pytest.mark.fast_on("delta")
def test_one_id_may_be_given_as_it_is(place: Place, receiver: Receiver) -> None:
    """A text is one id, as for letters of events, and not many of one letter each."""
    letters = DeadLetters(place.store())
    first, second = letters.select(UNSENT, ["id"])["id"].to_pylist()
    with pytest.raises(Refused, match="has no event to reopen"):
        letters.reopen(second, reason="r", by="b")
    assert letters.discard(first, reason="r", by="b").by_kind == {"UNSENT": 1}


def test_discarding_it_gives_it_up_and_lets_the_others_go(place: Place, receiver: Receiver) -> None:
    """By id or by kind; without the kind a selection means letters of events only, and the two are not mixed by id."""
    letters = DeadLetters(place.store())
    event_id, first, second = letters.select(Selection(), ["id"])["id"].to_pylist()
    with pytest.raises(ConfigError, match="separately"):
        letters.discard([event_id, first], reason="x", by="me")
    assert letters.discard(Selection(consumer="shop"), reason="x", by="me").by_kind == {"REJECTED": 1}
    assert states(place)["DEAD"] == 2
    assert letters.discard([first], reason="x", by="me", dry_run=True).changed == 1 and states(place)["DEAD"] == 2
    assert letters.discard([first], reason="x", by="me").by_kind == {"UNSENT": 1}
    assert dispatcher(place, receiver).once().sent == 2 and receiver.bodies(b"0") == [b"o0", b"o4", b"o6"]
    assert {r["id"]: r["status"] for r in letters.select(UNSENT).to_pylist()} == {first: "DISCARDED", second: "OPEN"}


def test_what_only_events_have_is_refused_as_such(place: Place, receiver: Receiver, tmp_path: Path) -> None:
    """A letter that is listed is there: who edits, reopens or exports it is told what can be done instead."""
    letters = DeadLetters(place.store())
    first = letters.select(UNSENT, ["id"])["id"].to_pylist()[0]
    with pytest.raises(Refused, match=r"\(UNSENT\) has no event to edit. Reprocess it, which sends it, or discard it"):
        letters.edit(first, body=b"{}", reason="r", by="b")
    letters.discard([first], reason="r", by="b")
    for which in ([first], UNSENT, Selection(ids=(first,))):
        with pytest.raises(Refused, match=r"\(UNSENT\) has no event to reopen"):
            letters.reopen(which, reason="r", by="b")
    for which in (UNSENT, Selection(ids=(first,))):
        with pytest.raises(Refused, match=r"\(UNSENT\) has no event to export"):
            letters.export(which, tmp_path / "letters.jsonl")
    assert states(place)["DISCARDED"] == 1 and not list(tmp_path.glob("*.jsonl"))


@pytest.mark.fast_on("postgres")
def test_one_that_was_given_up_is_not_given_up_again(place: Place, receiver: Receiver, dedup: Any) -> None:
    """As of letters of events, the result says why; a person who names it is told with exit code 3."""
    letters = DeadLetters(place.store())
    first, second = letters.select(UNSENT, ["id"])["id"].to_pylist()
    letters.discard(first, reason="r", by="b")
    done = letters.discard([first, second], reason="r", by="b", dry_run=True)
    assert (done.selected, done.changed, done.skipped, done.examples) == (2, 1, {"it is DISCARDED": 1}, {"it is DISCARDED": first})
    code, _, err = dedup(f"dead-letter discard {first} --reason r --yes", place)
    assert code == 3 and "None of these letters can be discarded: it is DISCARDED" in err


@pytest.mark.fast_on("delta")
def test_a_message_that_was_tried_several_times_has_failed(place: Place, dedup: Any) -> None:
    """Its letter shows the last failure as its history; a topic of messages is known while none of them is dead."""
    publisher(place.store())(batch(event(0, "o0")), 0)
    assert dedup("dead-letter list --kind UNSENT --topic out", place)[:2] == (0, "no dead letters match\n")
    assert dedup("dead-letter list --kind REJECTED --topic out", place)[0] == 2
    with place.store().outbox("shop").turn(Asked()) as turn:
        turn.mark(Marks(tried=[Failed(m.number, "Away", "later") for m in turn.messages]))
    with place.store().outbox("shop").turn(Asked()) as turn:
        turn.mark(Marks(dead=[Failed(m.number, "Away", "never") for m in turn.messages]))
    letters = DeadLetters(place.store())
    shown = letters.show(letters.select(UNSENT, ["id"])["id"][0].as_py())
    assert shown.row["attempts"] == 2
    assert [(e["action"], e["error_message"]) for e in shown.history.to_pylist()] == [("FAILED", "never")]
    assert "never tried" not in dedup(f"dead-letter show {shown.row['id']}", place)[1]


@pytest.mark.full
def test_the_command_line_has_it(place: Place, receiver: Receiver, dedup: Any) -> None:
    """`dedup dead-letter list --kind UNSENT`, show, groups and discard know the kind."""
    rows = json.loads(dedup("dead-letter list --kind UNSENT --json", place)[1])
    assert [r["kind"] for r in rows] == ["UNSENT"] * 2
    assert "ValueError" in dedup(f"dead-letter show {rows[0]['id']}", place)[1]
    assert "UNSENT" in dedup("dead-letter group --consumer shop", place)[1]
    assert json.loads(dedup("dead-letter discard --kind UNSENT --reason no --yes --json", place)[1])["changed"] == 2
    assert states(place)["DISCARDED"] == 2
