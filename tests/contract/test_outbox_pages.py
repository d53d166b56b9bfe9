"""PostgreSQL keeps messages in pages until something happens to one of them: then its page is unpacked, and nothing else changes."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from typing import Any

import pyarrow as pa
import pytest

from dedup.core.messages import Asked, Chosen, Marks, Messages, lanes
from dedup.outbox import State
from dedup.postgres import outbox
from dedup.postgres.outbox import Page, pages_of
from kit.orders import batch, consumer, event, flatten
from kit.outgoing import Receiver, dispatcher, made, outgoing, publisher, states
from kit.places import PostgresPlace


@pytest.fixture
def place(postgres: str) -> PostgresPlace:
    """A fresh database with the sink."""
    one = PostgresPlace(postgres)
    one.store().migrate()
    one.create_sink()
    return one


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of at most four messages."""
    monkeypatch.setattr(outbox, "PER_PAGE", 4)


def rows_of(place: PostgresPlace) -> list[Any]:
    """Messages that are rows, by number: body and state."""
    return [(body.decode(), state) for body, state in place.execute("SELECT body, state FROM dedup.outbox ORDER BY number")]


def packed(messages: Messages) -> list[Page]:
    """The pages as they would be read."""
    columns = {"header_ends": None, "header_names": None, "header_values": None}
    count, schema, batches = pages_of(1, messages)
    rows = pa.Table.from_batches(batches, schema).to_pylist()
    assert len(rows) == count
    return [Page(n, **{k: v for k, v in (columns | row).items() if k in Page._fields and k != "page"}) for n, row in enumerate(rows)]


@pytest.mark.parametrize(("count", "keys", "size"), [(1, 1, 1), (2_000, 3, 1), (2_000, 500, 1), (40, 2, 300_000)])
def test_pages_hold_every_message_once_in_the_order_of_its_key(count: int, keys: int, size: int) -> None:
    """No page mixes lanes, has more messages or bytes than it may, and the messages of a key stay in order from page to page."""
    messages = made(count, keys, size)
    pages = packed(messages)
    out = [m for page in pages for m in page.messages()]
    given = {m["id"]: (m["key"], m["body"]) for m in messages.rows.to_pylist()}
    assert {m.id: (m.key, m.body) for m in out} == given and len(out) == count
    for key in {m.key for m in out}:
        bodies = [m.body for m in out if m.key == key]
        assert bodies == sorted(bodies)  # type: ignore[type-var]
    lane_of = dict(zip(messages.rows["id"].to_pylist(), messages.rows["lane"].to_pylist(), strict=True))
    assert all(len({lane_of[i] for i in page.ids}) == 1 and len(page.ids) <= outbox.PER_PAGE for page in pages)
    assert all(sum(map(len, page.bodies[1:])) <= outbox.BYTES for page in pages)  # type: ignore[arg-type]
    assert [m.number for m in out] == [1_000 * page.page + n for page in pages for n in range(len(page.ids))]


def test_each_message_of_a_page_has_its_own_headers() -> None:
    """Headers of a page are flat; none, null and several come back to the message that had them."""
    headers = [[("a", b"1"), ("a", None)], None, [], [("", b"\0")]] * 30
    messages = made(120, 7, headers=[h and [{"key": k, "value": v} for k, v in h] for h in headers])
    out = {m.body: m.headers for page in packed(messages) for m in page.messages()}
    cleaned = [tuple((k.replace("\0", "\u2400"), v) for k, v in h or ()) for h in headers]
    assert [out[b"%06dx" % n] for n in range(120)] == cleaned


def test_what_fails_in_a_page_unpacks_that_page_only(place: PostgresPlace, small_pages: None) -> None:
    """The messages of its page become rows with their numbers, ids and marks; other pages stay pages, and are marked as such."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 5) for n in range(12)]), 0)
    before = [(e.number, e.id) for e in place.store().outbox("shop").entries(Chosen())]
    receiver = Receiver()
    receiver.refused = {b"o5": ValueError("no")}
    dispatcher(place, receiver).once()
    assert receiver.bodies() == [b"o0", b"o1", b"o2", b"o3", b"o4"]
    assert rows_of(place)[:4] == [("o4", State.SENT), ("o5", State.DEAD), ("o6", State.BEHIND), ("o7", State.BEHIND)]
    assert place.execute("SELECT messages FROM dedup.outbox_page WHERE sent_at IS NOT NULL") == [(4,)]
    assert [(e.number, e.id) for e in place.store().outbox("shop").entries(Chosen())] == before
    receiver.refused = {}
    outbox = place.store().outbox("shop")
    assert outbox.retry([before[5][0]]) == 1
    assert dispatcher(place, receiver).once().sent == 7
    assert receiver.bodies() == [f"o{n}".encode() for n in range(12)] and states(place) == {"SENT": 12}


@pytest.mark.full
def test_a_message_of_a_page_can_be_given_up_alone(place: PostgresPlace) -> None:
    """Discard of one waiting message unpacks its page; the others leave, in order, and later pages not before them."""
    run = publisher(place.store())
    run(batch(*[event(n, f"o{n}", 5) for n in range(6)]), 0)
    run(batch(*[event(n, f"o{n}", 5) for n in range(6, 9)]), 1)
    outbox, receiver = place.store().outbox("shop"), Receiver()
    assert outbox.discard([outbox.entries(Chosen())[2].number]) == 1
    assert states(place) == {"DISCARDED": 1, "WAITING": 8} and outbox.lag().waiting == 8
    dispatcher(place, receiver, limit=2).once()
    assert receiver.bodies() == [f"o{n}".encode() for n in range(9) if n != 2]


def test_what_is_unpacked_does_not_overtake_an_earlier_page_of_its_key(place: PostgresPlace, small_pages: None) -> None:
    """Rows of one lane wait for a page of their key that is not unpacked, because another lane's pages have filled the turn."""
    run, outbox = publisher(place.store()), place.store().outbox("shop")
    first, second = lanes("out", pa.array([b"0", b"1"])).to_pylist()
    assert first != second
    run(batch(*[event(n, f"o{n}", 0) for n in range(14)]), 0)
    for number, begin in enumerate((14, 18)):
        run(batch(*[event(n, f"o{n}", 1) for n in range(begin, begin + 4)]), number + 1)
    by_id = dict(zip(range(22), [e.number for e in outbox.entries(Chosen())], strict=True))
    assert outbox.discard([by_id[0], by_id[18]]) == 2
    receiver = Receiver()
    assert dispatcher(place, receiver, limit=4).once().sent == 20
    assert receiver.bodies(b"1") == [f"o{n}".encode() for n in range(14, 22) if n != 18]


def test_a_page_that_is_larger_than_a_turn_goes_in_parts(place: PostgresPlace) -> None:
    """No turn has more messages than it was asked for."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 5) for n in range(30)]), 0)
    outbox = place.store().outbox("shop")
    with outbox.turn(Asked(limit=7)) as turn:
        assert [m.body for m in turn.messages] == [f"o{n}".encode() for n in range(7)]
        turn.mark(Marks(sent=[m.number for m in turn.messages]))
    assert states(place) == {"SENT": 7, "WAITING": 23}


def test_a_turn_ends_with_so_many_bytes(place: PostgresPlace, small_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn holds in memory is bounded by bytes as well as by messages."""
    monkeypatch.setattr("dedup.postgres.outbox.BYTES_PER_TURN", 20)
    publisher(place.store())(batch(*[event(n, f"order-{n:04}", 5) for n in range(40)]), 0)  # 40 bytes a page
    with place.store().outbox("shop").turn(Asked()) as turn:
        assert len(turn.messages) == 4


def test_a_receiver_that_takes_long_is_no_forgotten_session(place: PostgresPlace) -> None:
    """Where the database ends transactions that do nothing for a while, a turn is marked all the same, and nothing is sent again."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 5) for n in range(5)]), 0)
    name = place.execute("select current_database()")[0][0]
    place.execute(f"alter database {name} set idle_in_transaction_session_timeout = 200")
    receiver = Receiver()

    def slow(messages: Any) -> None:
        time.sleep(0.6)
        receiver(messages)

    assert dispatcher(place, slow).once().sent == 5 and len(receiver.got) == 5


def test_rows_of_an_older_version_leave_first(place: PostgresPlace) -> None:
    """What was in the outbox before there were pages is sent before what came after it, key by key."""
    run = publisher(place.store())
    run(batch(*[event(n, f"o{n}", n % 2) for n in range(6)]), 0)
    place.execute(
        "WITH gone AS (DELETE FROM dedup.outbox_page RETURNING *), old AS (SELECT g.consumer_id, g.topic, g.lane, m.* FROM gone g"
        " CROSS JOIN LATERAL unnest(g.keys, g.ids, g.bodies) WITH ORDINALITY m (key, id, body, n)) INSERT INTO dedup.outbox"
        " (consumer_id, topic, lane, key, id, body) SELECT consumer_id, topic, lane, key, id, body FROM old ORDER BY n"
    )
    run(batch(*[event(n, f"o{n}", n % 2) for n in range(6, 10)]), 1)
    assert states(place) == {"WAITING": 10}
    receiver = Receiver()
    assert dispatcher(place, receiver, limit=3).once().sent == 10
    for key in range(2):
        assert receiver.bodies(b"%d" % key) == [f"o{n}".encode() for n in range(10) if n % 2 == key]


def test_another_topic_of_a_lane_holds_nothing_back(place: PostgresPlace) -> None:
    """Pages of a topic that this dispatcher does not send are neither sent nor in the way of unpacked messages of its own topic."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        for topic in ("other", "out"):
            tx.publish(outgoing(rows), topic, key="to", order="n")

    run(batch(*[event(n, f"o{n}", n % 200) for n in range(400)]), 0)
    outbox = place.store().outbox("shop")
    assert outbox.discard([e.number for e in outbox.entries(Chosen(topic="out", limit=None))[:1]]) == 1
    receiver = Receiver()
    assert dispatcher(place, receiver, topics=["out"]).once().sent == 399
    assert {m.topic for m in receiver.got} == {"out"} and outbox.lag(["other"]).waiting == 400


@pytest.mark.full
def test_headers_survive_their_page(place: PostgresPlace) -> None:
    """A message that is unpacked has the headers that it had in its page."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        ids = flatten(rows)["id"].to_pylist()
        tx.publish([{"k": "a", "body": i, "h": [{"key": i, "value": b"1"}] * n} for n, i in enumerate(ids)], "out", key="k", headers="h")

    run(batch(*[event(n, f"o{n}", 1) for n in range(4)]), 0)
    outbox = place.store().outbox("shop")
    numbers = [e.number for e in outbox.entries(Chosen())]
    packed_one = outbox.message(numbers[2])
    assert outbox.discard([numbers[0]]) == 1
    assert packed_one is not None and packed_one.headers == (("o2", b"1"),) * 2 and outbox.message(numbers[2]) == packed_one
    receiver = Receiver()
    dispatcher(place, receiver).once()
    assert [m.headers for m in receiver.got] == [((f"o{n}", b"1"),) * n for n in (1, 2, 3)]
    assert uuid.UUID(receiver.got[0].id)


def test_a_message_is_erased_out_of_the_middle_of_its_page(place: PostgresPlace, small_pages: None) -> None:
    """Its page becomes rows that are sent; the numbers, bodies and headers of the others are as before, and a purge takes them all."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 7) for n in range(10)]), 0)
    dispatcher(place, Receiver()).once()
    box = place.store().outbox("shop")
    entries = box.entries(Chosen(limit=None))
    before = {e.number: box.message(e.number) for e in entries}
    assert box.erase([entries[5].number], by="clerk", reason="request") == 1
    assert place.execute("SELECT count(*) FROM dedup.outbox_page") == [(2,)]
    after = {e.number: box.message(e.number) for e in box.entries(Chosen(limit=None))}
    assert {n for n in before if before[n] != after[n]} == {entries[5].number} and states(place) == {"SENT": 10}
    assert box.erase([entries[5].number], by="another", reason="again") == 0
    assert box.purge(dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)) == 10


def test_a_message_that_waits_is_not_erased(place: PostgresPlace, small_pages: None) -> None:
    """Neither in a page nor as a row: it is still to be sent."""
    publisher(place.store())(batch(*[event(n, f"o{n}", 7) for n in range(6)]), 0)
    box = place.store().outbox("shop")
    numbers = [e.number for e in box.entries(Chosen(limit=None))]
    assert box.erase(numbers, by="clerk", reason="request") == 0
    assert box.discard(numbers[1:2]) == 1
    assert box.erase(numbers, by="clerk", reason="request") == 1
    receiver = Receiver()
    assert dispatcher(place, receiver).once().sent == 5
    assert receiver.bodies() == [b"o0", b"o2", b"o3", b"o4", b"o5"]
