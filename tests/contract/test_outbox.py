"""The outbox on every store: messages are true with their batch, keep their ids, and leave in the order of their key."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from orders import assert_proven, batch, consumer, event, flatten, orders
from places import Place

from checkpoint.errors import DestinationUnavailable, HandlerError
from dedup import Consumer
from dedup.outbox import Call, Dispatcher, Message, Patience, State
from dedup.outbox.store import Chosen
from dedup.store import Store


class Receiver:
    """What arrives, in order; refuses bodies in `refused`, with the error given for them."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.refused: dict[bytes, Exception] = {}

    def __call__(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (message.body or b"") in self.refused:
                raise self.refused[message.body or b""]
        self.got += messages

    def bodies(self, key: bytes | None = None) -> list[bytes | None]:
        return [m.body for m in self.got if key is None or m.key == key]


def publisher(store: Store, **settings: Any) -> Consumer:
    """Writes each order and publishes it: key is the amount."""
    made = consumer(store, **settings)
    made._handler = None

    @made.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        rest = tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative")
        tx.write(flatten(rest), "orders")
        tx.publish(outgoing(rest), "out", key="to", order="n")

    return made


def outgoing(rows: pa.Table) -> pa.Table:
    """Messages of orders, with the events' positions."""
    data = flatten(rows)
    return (
        rows.select(["source", "topic", "partition", "sequence_number", "part"])
        .append_column("body", data["id"])
        .append_column("to", data["amount"].cast(pa.string()))
        .append_column("n", pa.array([0] * rows.num_rows))
    )


def dispatcher(place: Place, receiver: Any, **options: Any) -> Dispatcher:
    return Dispatcher(place.store().outbox("shop"), Call(receiver), **options)


def states(place: Place) -> dict[str, int]:
    """How many messages are in which state."""
    found = [e.state.name for e in place.store().outbox("shop").entries(Chosen(limit=None))]
    return {name: found.count(name) for name in sorted(set(found))}


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


def test_ids_are_given_derived_or_random(place: Place) -> None:
    """id= is taken as it is; without positions or an order ids are random; the same ordinal twice is an error that names order=."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish([{"id": f"mine-{i}", "body": b"1"} for i in flatten(rows)["id"].to_pylist()], "given", id="id")
        tx.publish([{"body": b"1"}, {"body": b"2"}], "random")
        tx.publish(outgoing(rows), "derived", order="n")
        if "twice" in flatten(rows)["id"].to_pylist():
            tx.publish(pa.concat_tables([outgoing(rows), outgoing(rows)]), "twice", order="n")

    run(batch(*orders(range(2))), 0)
    found = place.store().outbox("shop").entries(Chosen())
    assert [e.id for e in found if e.topic == "given"] == ["mine-p0-0", "mine-p0-1"]
    assert len({e.id for e in found}) == 6
    with pytest.raises(HandlerError, match="order="):
        run(batch(event(5, "twice")), 1)


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


def test_dead_messages_can_be_overtaken_on_demand(place: Place) -> None:
    """With blocking=False a dead message does not hold back its key."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 0) for n in range(4)]), 0)
    receiver = Receiver()
    receiver.refused = {b"o1": ValueError("no")}
    dispatcher(place, receiver).once()
    assert dispatcher(place, receiver, blocking=False).once().sent == 2
    assert receiver.bodies() == [b"o0", b"o2", b"o3"]


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
