"""The outbox on every store: messages are true with their batch, keep their ids, and leave in the order of their key."""

from __future__ import annotations

import datetime as dt
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import DestinationUnavailable, Fenced, HandlerError
from deadletter.selection import Selection
from dedup.core.messages import Asked, Chosen, Failed, Marks
from dedup.outbox import Call, Dispatcher, Patience, State
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.replay import replay
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, flatten, orders
from kit.outgoing import Receiver, dispatcher, outgoing, publisher, states
from kit.places import DeltaPlace, Place


def test_messages_leave_after_their_batch_in_the_order_of_their_key(place: Place) -> None:
    """Each event's message arrives once, in order per key, with an id that is stored and of its own."""
    run = publisher(place.store())
    run(batch(*[event(n, f"o{n}", n % 3) for n in range(12)]), 0)
    run(batch(*[event(n, f"o{n}", n % 3) for n in range(12, 20)]), 1)
    receiver = Receiver()
    assert dispatcher(place, receiver, limit=7).once().sent == 20
    for key in range(3):
        assert receiver.bodies(str(key).encode()) == [f"o{n}".encode() for n in range(20) if n % 3 == key]
    assert len({m.id for m in receiver.got}) == 20
    assert dispatcher(place, receiver).once().sent == 0
    assert states(place) == {"SENT": 20}
    assert_proven(place.store())


def test_a_batch_that_fails_leaves_no_message(place: Place) -> None:
    """What a handler published before it failed is nowhere; delivered again, each message is there once."""
    run = publisher(place.store(), bisect=False)
    handler, run._handler = run._handler, None

    @run.foreach_batch
    def broken(rows: pa.Table, tx: Any) -> None:
        handler(rows, tx)  # type: ignore[misc]
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(batch(*orders(range(5))), 0)
    assert states(place) == {}
    publisher(place.store(), bisect=False)(batch(*orders(range(5))), 0)
    assert states(place) == {"WAITING": 5}


@pytest.mark.fast_on("postgres")
def test_a_guilty_event_takes_only_its_own_message_with_it(place: Place) -> None:
    """Bisect undoes what failed halves published; a rejected event has no message either."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish(outgoing(rows), "out", key="to", order="n")
        if "bad" in flatten(rows)["id"].to_pylist():
            raise ValueError("bad")

    report = run(batch(*orders(range(6)), event(6, "bad"), *orders(range(7, 9))), 0)
    assert (report.processed, report.dead_lettered) == (8, 1)
    receiver = Receiver()
    dispatcher(place, receiver).once()
    assert sorted(receiver.bodies()) == sorted(f"p0-{n}".encode() for n in (*range(6), 7, 8))


@pytest.mark.fast_on("delta")
def test_a_rejected_event_must_not_be_published(place: Place) -> None:
    """Rows that carry the position of a rejected event are refused, as in tx.write."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.reject(rows, pa.array([True] * rows.num_rows), "no")
        tx.publish(outgoing(rows), "out", key="to")

    with pytest.raises(HandlerError, match="rejected"):
        run(batch(*orders(range(2))), 0)
    assert states(place) == {}


@pytest.mark.fast_on("postgres")
def test_handlers_of_events_publish_with_stable_ids(place: Place) -> None:
    """In foreach the id is made of the event's key and the number of its message; a failing event's messages are gone."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach(into="orders")
    def handle(event: Any, tx: Any) -> Any:
        for part in range(2):
            tx.publish({"to": event.data["id"], "body": f"{event.data['id']}.{part}"}, "out", key="to")
        if event.data["id"] == "p0-2":
            raise ValueError("no")

    report = run(batch(*orders(range(4))), 0)
    assert (report.processed, report.skipped, report.dead_lettered) == (3, 0, 1)
    receiver = Receiver()
    dispatcher(place, receiver).once()
    assert receiver.bodies(b"p0-3") == [b"p0-3.0", b"p0-3.1"] and len(receiver.got) == 6
    first, second = (m.id for m in receiver.got if m.key == b"p0-3")
    assert first.rpartition("-")[0] == second.rpartition("-")[0] and (first[-2:], second[-2:]) == ("-0", "-1")


@pytest.mark.fast_on("postgres")
def test_ids_are_given_derived_or_random(place: Place) -> None:
    """id= is taken as it is; without positions or an order ids are random; a number that comes twice, in two calls too, is an error."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish([{"id": f"mine-{i}", "body": b"1"} for i in flatten(rows)["id"].to_pylist()], "given", id="id")
        tx.publish([{"body": b"1"}, {"body": b"2"}], "random")
        tx.publish(outgoing(rows), "derived", order="n")
        if "twice" in flatten(rows)["id"].to_pylist():
            tx.publish(pa.concat_tables([outgoing(rows), outgoing(rows)]), "twice", order="n")
        if "two calls" in flatten(rows)["id"].to_pylist():
            tx.publish(outgoing(rows), "derived", order="n")

    run(batch(*orders(range(2))), 0)
    found = place.store().outbox("shop").entries(Chosen())
    assert [e.id for e in found if e.topic == "given"] == ["mine-p0-0", "mine-p0-1"]
    assert len({e.id for e in found}) == 6
    with pytest.raises(HandlerError, match="order="):
        run(batch(event(5, "twice")), 1)
    with pytest.raises(HandlerError, match="over all calls"):
        run(batch(event(6, "two calls")), 1)


@pytest.mark.fast_on("postgres")
def test_an_id_that_is_given_twice_is_sent_twice(place: Place) -> None:
    """In one batch and in two: each is a message of its own, and its id tells whoever looks at ids that they are one."""
    run, receiver = consumer(place.store()), Receiver()
    run._handler = None
    run.foreach_batch(lambda rows, tx: tx.publish([{"id": "same", "body": b"1"}, {"id": "same", "body": b"2"}], "out", id="id"))
    run(batch(*orders(range(2))), 0)
    run(batch(*orders(range(2, 4))), 1)
    assert dispatcher(place, receiver).once().sent == 4
    assert ({m.id for m in receiver.got}, sorted(receiver.bodies())) == ({"same"}, [b"1", b"1", b"2", b"2"])


def test_a_message_that_cannot_be_sent_holds_back_its_own_key_only(place: Place) -> None:
    """It is dead, those behind it wait, all other keys leave; retry sends it and then the others, in order."""
    publisher(place.store())(batch(*[event(n, f"o{n}", n % 2) for n in range(8)]), 0)
    receiver = Receiver()
    receiver.refused = {b"o2": ValueError("too odd")}
    done = dispatcher(place, receiver).once()
    assert (done.sent, done.dead) == (5, 1)
    assert receiver.bodies(b"0") == [b"o0"] and receiver.bodies(b"1") == [b"o1", b"o3", b"o5", b"o7"]
    publisher(place.store())(batch(event(8, "o8", 0)), 1)
    assert dispatcher(place, receiver).once().sent == 0
    assert states(place) == {"BEHIND": 3, "DEAD": 1, "SENT": 5}
    outbox = place.store().outbox("shop")
    dead = outbox.entries(Chosen(states=(State.DEAD,)))
    assert (dead[0].error_type, dead[0].error_message, dead[0].attempts) == ("ValueError", "too odd", 1)
    lag = outbox.lag()
    assert (lag.waiting, lag.dead, lag.behind) == (0, 1, 3) and lag.oldest is not None
    receiver.refused = {}
    assert outbox.retry([dead[0].number]) == 1
    assert dispatcher(place, receiver).once().sent == 4
    assert receiver.bodies(b"0") == [b"o0", b"o2", b"o4", b"o6", b"o8"]


@pytest.mark.fast_on("postgres")
def test_a_dead_message_holds_back_only_later_ones_of_its_key(place: Place) -> None:
    """Of two dead ones of a key the first can be sent again alone, with what stands between them; the rest waits behind the second."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(5)]), 0)
    receiver, outbox = Receiver(), place.store().outbox("shop")
    receiver.refused = {b"o1": ValueError("too odd")}
    dispatcher(place, receiver).once()
    receiver.refused |= {b"o3": ValueError("too odd")}
    dispatcher(place, receiver, blocking=False).once()
    assert receiver.bodies() == [b"o0", b"o2", b"o4"]
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(5, 7)]), 1)
    first, second = (entry.number for entry in outbox.entries(Chosen(states=(State.DEAD,))))
    receiver.refused = {}
    assert outbox.retry([first]) == 1
    assert dispatcher(place, receiver).once().sent == 1 and receiver.bodies()[3:] == [b"o1"]
    assert states(place) == {"SENT": 4, "DEAD": 1, "BEHIND": 2}
    assert outbox.retry([second]) == 1
    assert dispatcher(place, receiver).once().sent == 3 and receiver.bodies()[4:] == [b"o3", b"o5", b"o6"]


@pytest.mark.fast_on("postgres")
def test_a_discarded_message_lets_the_others_go(place: Place) -> None:
    """Discard gives one message up, for good; those behind it leave in order."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(4)]), 0)
    receiver = Receiver()
    receiver.refused = {b"o1": ValueError("no")}
    dispatcher(place, receiver).once()
    outbox = place.store().outbox("shop")
    assert outbox.discard([e.number for e in outbox.entries(Chosen(states=(State.DEAD,)))]) == 1
    assert dispatcher(place, receiver).once().sent == 2
    assert receiver.bodies() == [b"o0", b"o2", b"o3"] and states(place) == {"DISCARDED": 1, "SENT": 3}


@pytest.mark.fast_on("delta")
def test_dead_messages_can_be_overtaken_on_demand(place: Place) -> None:
    """With blocking=False a dead message does not hold back its key."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(4)]), 0)
    receiver = Receiver()
    receiver.refused = {b"o1": ValueError("no")}
    dispatcher(place, receiver).once()
    assert dispatcher(place, receiver, blocking=False).once().sent == 2
    assert receiver.bodies() == [b"o0", b"o2", b"o3"]


@pytest.mark.fast_on("postgres")
def test_an_error_that_may_pass_is_tried_again_and_given_up_in_the_end(place: Place) -> None:
    """A time-out of one message rests its key for a while; after the last attempt it is dead. Others are not held back."""
    publisher(place.store())(batch(*[event(n, f"o{n}", n % 2) for n in range(4)]), 0)
    receiver, now = Receiver(), [0.0]
    receiver.refused = {b"o0": TimeoutError("slow")}
    one = dispatcher(place, receiver, patience=Patience(attempts=2), clock=lambda: now[0])
    done = one.once()
    assert (done.sent, done.tried, done.dead) == (2, 1, 0)
    assert one.once().tried == 0  # it rests
    publisher(place.store())(batch(event(4, "o4", 1)), 1)
    now[0] += 100
    assert (one.once().dead, receiver.bodies(b"1")) == (1, [b"o1", b"o3", b"o4"])


@pytest.mark.fast_on("postgres")
def test_while_nothing_passes_nothing_is_given_up(place: Place) -> None:
    """An outage of the destination counts no attempt, however long it lasts."""
    publisher(place.store())(batch(*orders(range(3))), 0)
    receiver = Receiver()
    receiver.refused = {
        f"p0-{n}".encode(): error for n, error in enumerate([ConnectionRefusedError("down"), TimeoutError("slow"), TimeoutError("slow")])
    }
    for _ in range(8):
        with pytest.raises(DestinationUnavailable):
            dispatcher(place, receiver).once()
    assert states(place) == {"WAITING": 3}
    assert all(e.attempts == 0 for e in place.store().outbox("shop").entries(Chosen()))


def test_a_turn_that_is_not_marked_is_sent_again_with_the_same_ids(place: Place) -> None:
    """A dispatcher that ends between sending and marking doubles messages, never their ids."""
    publisher(place.store())(batch(*orders(range(5))), 0)
    receiver = Receiver()

    def die(step: str) -> None:
        if step == "sent":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dispatcher(place, receiver, on_step=die).once()
    dispatcher(place, receiver).once()
    assert len(receiver.got) == 10 and len({m.id for m in receiver.got}) == 5


@pytest.mark.fast_on("postgres")
def test_purge_deletes_what_was_sent(place: Place) -> None:
    """Only sent and discarded messages of the age given go; a dry run counts them; what is dead stays and can still be sent."""
    publisher(place.store())(batch(*orders(range(4))), 0)
    publisher(place.store())(batch(*orders(range(4, 5))), 1)
    receiver = Receiver()
    receiver.refused = {b"p0-4": ValueError("no")}
    dispatcher(place, receiver).once()
    outbox, later = place.store().outbox("shop"), dt.datetime.now(dt.UTC) + dt.timedelta(seconds=5)
    assert outbox.purge(later - dt.timedelta(hours=1)) == 0
    assert outbox.purge(later, dry_run=True) == 4 and states(place)["SENT"] == 4
    assert outbox.purge(later) == 4
    assert states(place) == {"DEAD": 1}
    assert outbox.purge(later) == 0
    receiver.refused = {}
    outbox.retry([outbox.entries(Chosen())[0].number])
    assert dispatcher(place, receiver).once().sent == 1 and len(receiver.got) == 5
    publisher(place.store())(batch(*orders(range(5, 8))), 2)
    assert dispatcher(place, receiver).once().sent == 3


@pytest.mark.full
def test_messages_are_sent_after_all_earlier_ones_were_purged(place: Place) -> None:
    """By a dispatcher that runs on, and by one that begins then: nothing of what was purged is needed for the next turn."""
    running, receiver = dispatcher(place, Receiver()), Receiver()
    for number in range(2):
        publisher(place.store())(batch(*orders(range(number, number + 1))), number)
        assert running.once().sent == 1
        assert place.store().outbox("shop").purge(dt.datetime.now(dt.UTC) + dt.timedelta(seconds=5)) == 1
    publisher(place.store())(batch(*orders(range(2, 3))), 2)
    assert dispatcher(place, receiver).once().sent == 1 and len(receiver.got) == 1


@pytest.mark.fast_on("postgres")
def test_rows_with_positions_leave_in_the_order_of_their_positions(place: Place) -> None:
    """However a handler's frame is shuffled, the messages of one key are in the order of their events."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish(outgoing(rows).take(pa.array(range(rows.num_rows - 1, -1, -1))), "out", key="to")

    run(batch(*[event(n, f"o{n}", 7) for n in range(9)]), 0)
    receiver = Receiver()
    dispatcher(place, receiver).once()
    assert receiver.bodies() == [f"o{n}".encode() for n in range(9)]


def test_headers_and_empty_bodies_arrive_as_they_were(place: Place) -> None:
    """Bytes, nulls, empty values and headers are the same on the other side."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        headers = [[{"key": "a", "value": b"\0\xff"}, {"key": "a", "value": None}], None, []]
        tx.publish(
            [{"b": b, "h": h, "k": k} for b, h, k in zip([b"\0", b"", None], headers, [b"", None, b"\0"], strict=True)],
            "out",
            key="k",
            body="b",
            headers="h",
        )

    run(batch(*orders(range(1))), 0)
    receiver = Receiver()
    dispatcher(place, receiver).once()
    got = sorted(((m.body, m.headers, m.key) for m in receiver.got), key=repr)
    assert got == sorted([(b"\0", (("a", b"\0\xff"), ("a", None)), b""), (b"", (), None), (None, (), b"\0")], key=repr)


def test_two_turns_at_once_have_no_key_in_common(place: Place) -> None:
    """PostgreSQL: what one dispatcher has in hand no other one gets, by key. Delta: whoever begins last goes on, the other one stops."""
    publisher(place.store())(batch(*[event(n, f"o{n}", n % 100) for n in range(200)]), 0)
    first, second = (place.store().outbox("shop") for _ in range(2))
    if isinstance(place, DeltaPlace):
        with first.turn(Asked()) as one:
            with second.turn(Asked()) as two:
                two.mark(Marks(sent=[m.number for m in two.messages]))
            with pytest.raises(Fenced):
                one.mark(Marks(sent=[m.number for m in one.messages]))
        with pytest.raises(Fenced), first.turn(Asked()):
            pass
        return
    with first.turn(Asked()) as one, second.turn(Asked()) as two:
        mine, others = ({m.line for m in turn.messages} for turn in (one, two))
        assert mine and others and not mine & others


@pytest.mark.fast_on("postgres")
def test_messages_are_sent_right_after_their_batch_where_that_is_asked_for(place: Place) -> None:
    """dispatch_to sends inline; a destination that is away fails no batch, and what waited goes with the next one."""
    receiver, run = Receiver(), publisher(place.store())
    run.dispatch_to(Call(receiver))
    receiver.refused = {b"p0-0": ConnectionRefusedError("down"), b"p0-1": ConnectionRefusedError("down")}
    assert run(batch(*orders(range(2))), 0).processed == 2
    assert states(place) == {"WAITING": 2}
    receiver.refused = {}
    run(batch(*orders(range(2, 4))), 1)
    assert sorted(receiver.bodies()) == [b"p0-0", b"p0-1", b"p0-2", b"p0-3"] and states(place) == {"SENT": 4}


@pytest.mark.fast_on("postgres")
def test_a_replay_sends_nothing_twice_unless_that_is_accepted(place: Place) -> None:
    """Messages cannot be taken back: a replay is refused; with accept_double they are new messages with ids of their own."""
    events = orders(range(3))
    run = publisher(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish(outgoing(rows), "out", key="to", order="n")

    run.register_log_reader(lambda source, topic, partition, first, last: batch(*events[first : last + 1]))
    run(batch(*events), 0)
    before = {e.id for e in place.store().outbox("shop").entries(Chosen())}
    with pytest.raises(HandlerError, match="taken back"):
        replay(Selection("shop", topic="orders"), run)
    assert states(place) == {"WAITING": 3}
    assert replay(Selection("shop", topic="orders"), run, accept_double=True).replayed == 3
    after = {e.id for e in place.store().outbox("shop").entries(Chosen())}
    assert len(after) == 6 and before < after


@pytest.mark.fast_on("postgres")
def test_a_letter_that_is_reprocessed_publishes_then(place: Place) -> None:
    """A parked event has no message until it is reprocessed; its id is that of its key."""
    bad = {"p0-1"}
    run = consumer(place.store())
    run._handler = None

    @run.foreach(into="orders")
    def handle(event: Any, tx: Any) -> None:
        tx.publish({"body": event.data["id"]}, "out")
        if event.data["id"] in bad:
            raise ValueError("no")

    run(batch(*orders(range(3))), 0)
    assert states(place) == {"WAITING": 2}
    bad.clear()
    assert reprocess(Selection("shop"), run).reprocessed == 1
    found = place.store().outbox("shop").entries(Chosen())
    assert len(found) == 3 and all(e.id.endswith("-0") for e in found) and len({e.id for e in found}) == 3
    assert_proven(place.store())


def test_what_became_of_a_message_is_the_same_for_whoever_asks(place: Place) -> None:
    """Its last failure, how often sending it failed and who decided about it stay with it as it goes on, here and in a new process."""
    publisher(place.store())(batch(event(0, "o0", 1)), 0)
    outbox = place.store().outbox("shop")
    (number,) = (e.number for e in outbox.entries(Chosen()))

    def becomes(marks: Marks) -> None:
        with outbox.turn(Asked()) as turn:
            assert [m.number for m in turn.messages] == [number]
            turn.mark(marks)

    def told(state: State) -> list[tuple[Any, ...]]:
        (mine,), (new,) = (one.entries(Chosen((state,))) for one in (outbox, place.store().outbox("shop")))
        return [(e.attempts, e.error_type, e.error_message, e.set_by, e.set_reason) for e in (mine, new)]

    becomes(Marks(dead=(Failed(number, "No", "no"),)))
    assert outbox.retry([number], by="ann", reason="again") == 1 and told(State.WAITING) == [(0, "No", "no", "ann", "again")] * 2
    becomes(Marks(tried=(Failed(number, "Away", "later"),)))
    assert told(State.WAITING) == [(1, "Away", "later", "ann", "again")] * 2
    becomes(Marks(sent=(number,)))
    assert told(State.SENT) == [(1, "Away", "later", "ann", "again")] * 2


@pytest.mark.fast_on("postgres")
def test_a_decision_without_a_name_is_nobodys(place: Place) -> None:
    """Who decided before does not stand beside it, and what a dispatcher notes takes no name away."""
    publisher(place.store())(batch(event(0, "o0", 0)), 0)
    receiver = Receiver()
    receiver.refused = {b"o0": ValueError("no")}
    box = place.store().outbox("shop")

    def told() -> tuple[str | None, str | None]:
        (found,) = box.entries(Chosen())
        return found.set_by, found.set_reason

    dispatcher(place, receiver).once()
    (number,) = (found.number for found in box.entries(Chosen()))
    box.retry([number], by="ann", reason="receiver fixed")
    dispatcher(place, receiver).once()
    assert told() == ("ann", "receiver fixed")
    box.discard([number], by="bob")
    assert told() == ("bob", None)


@pytest.mark.fast_on("postgres")
def test_the_command_line_shows_and_decides(place: Place, dedup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """list, show, lag, retry, discard, purge and dispatch say what they would do, and do it with --yes."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(4)]), 0)
    receiver = Receiver()
    receiver.refused = {b"o1": ValueError("no"), b"o2": ValueError("neither")}
    dispatcher(place, receiver).once()
    shown = json.loads(dedup("outbox list shop --json", place)[1])
    assert [(m["state"], m["key"]) for m in shown] == [("DEAD", "0"), ("BEHIND", "0"), ("BEHIND", "0")]
    number = shown[0]["number"]
    assert "ValueError: no" in dedup("outbox list shop --state dead", place)[1]
    assert json.loads(dedup(f"outbox show shop {number} --json", place)[1])["body"] == "o1"
    assert "o1" in dedup(f"outbox show shop {number}", place)[1]
    found = json.loads(dedup("outbox lag shop --json", place)[1])[0]
    assert [dedup(f"outbox lag shop --fail-above {limit}", place)[0] for limit in ("2", "3", "0s", "1d")] == [1, 0, 1, 0]
    assert (found["waiting"], found["dead"], found["behind"]) == (0, 1, 2) and found["seconds"] >= 0
    assert "--yes" in dedup(f"outbox discard shop {number}", place)[1] and states(place)["DEAD"] == 1
    assert "1 messages given up" in dedup(f"outbox discard shop {number} --by ann --reason obsolete --yes", place)[1]
    given_up = json.loads(dedup(f"outbox show shop {number} --json", place)[1])
    assert (given_up["state"], given_up["set_by"], given_up["set_reason"]) == ("DISCARDED", "ann", "obsolete")
    dispatcher(place, receiver).once()
    code, _, err = dedup(f"outbox retry shop {number} --yes", place)
    assert (code, f"Only messages that are DEAD can be sent again: {number} is DISCARDED" in err) == (3, True)
    number = json.loads(dedup("outbox list shop --state DEAD --json", place)[1])[0]["number"]
    assert json.loads(dedup(f"outbox retry shop {number} --yes --json", place)[1])["changed"] == 1
    (tmp_path / "mail_out.py").write_text("got = []\ndef send(messages):\n    got.extend(m.body for m in messages)\n")
    monkeypatch.chdir(tmp_path)
    code, out, err = dedup("outbox dispatch shop --call mail_out:send --once", place)
    assert (code, out.strip()) == (0, "sent 2"), err
    assert "4 messages would be" in dedup("outbox purge shop --older-than 0s", place)[1] and states(place)["SENT"] == 3
    done = json.loads(dedup("outbox purge shop --older-than 0s --yes --json", place)[1])
    assert (done["messages"], done["done"]) == (4, True)
    assert states(place) == {}
    assert dedup("outbox dispatch shop --once", place)[0] == 2


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("sent", of_which(1, [True, False]))
def test_a_topic_that_no_message_is_for_is_named(
    place: Place, sent: bool, dedup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dispatch --topic` names it with the topics that there are, those of sent messages too; it is no error, and sends the others."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(2)]), 0)
    if sent:
        dispatcher(place, Receiver()).once()
    assert place.store().outbox("shop").topics() == ["out"]
    (tmp_path / "mail_topics.py").write_text("def send(messages):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    code, out, err = dedup("outbox dispatch shop --call mail_topics:send --topic Outt --topic out --once", place)
    assert (code, out) == (0, f"sent {0 if sent else 2}\n")
    assert err == "dedup: 'shop' has no message to topic 'Outt'. Did you mean out? Topics of stored messages: out.\n"


@pytest.mark.fast_on("postgres")
def test_once_with_overtake_sends_all_that_wait_behind_dead_messages(
    place: Place, dedup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns it takes: `dispatch --once --overtake` leaves nothing but the dead messages."""
    publisher(place.store())(batch(*[event(n, f"o{n}", n % 3) for n in range(18)]), 0)
    receiver = Receiver()
    receiver.refused = {b"o%d" % n: ValueError("no") for n in range(3)}
    dispatcher(place, receiver, patience=Patience(attempts=1)).once()
    assert states(place) == {"BEHIND": 15, "DEAD": 3}
    (tmp_path / "mail_past.py").write_text("def send(messages):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dedup.cli.outbox.Dispatcher", partial(Dispatcher, limit=4))
    code, out, err = dedup("outbox dispatch shop --call mail_past:send --once --overtake", place)
    assert (code, out.strip(), states(place)) == (0, "sent 15", {"DEAD": 3, "SENT": 15}), err
