"""Messages that no receiver could tell apart are refused with their event, and many that wait behind a dead one hold back nobody."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import ConfigError, DestinationUnavailable, StoreUnavailable
from dedup.core.messages import LANES, Asked, Chosen, Marks
from dedup.outbox import Call, Dispatcher, Message, Outcome, State
from dedup.outbox.destination import SendFailure
from dedup.outbox.dispatch import Patience
from fixtures.variants import of_which
from kit.orders import batch, consumer, event
from kit.outgoing import Receiver, dispatcher, publisher, states
from kit.places import Place

KIND = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    "odd", of_which(3, [{"topic": "a\0b"}, {"id": ""}, {"h": [{"key": "a\0", "value": b"1"}]}, {"topic": ""}, {"topic": 7}, {"id": "a\0b"}])
)
def test_a_message_that_would_arrive_as_another_is_a_letter_of_its_event(place: Place, odd: dict[str, Any]) -> None:
    """A NUL in an id, a topic or a header's name, and no id at all: that event is parked, the message of the other one is there."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        for id in pc.struct_field(rows["data"], "id").to_pylist():
            row = {"body": id, "id": f"id of {id}", "h": [{"key": "a", "value": b"\0"}], "topic": "out", **(odd if id == "odd" else {})}
            table = pa.table({"body": [row["body"]], "id": [row["id"]], "h": pa.array([row["h"]], KIND)})
            tx.publish(table, row["topic"], id="id", headers="h")

    report = run(batch(event(0, "odd"), event(1, "good")), 0)
    assert (report.processed, report.dead_lettered) == (1, 1)
    assert [(e.id, e.topic) for e in place.store().outbox("shop").entries(Chosen())] == [("id of good", "out")]


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("answer", of_which(2, [ConnectionError("no mail server"), None, KeyError("to"), ConfigError("no such hub")]))
def test_a_destination_of_ones_own_that_raises_anything_fails_no_batch(
    place: Place, answer: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The batches that are committed end well, the log says what it raised, and the messages wait until it sends them."""
    sent: list[Message] = []

    class Mailer:
        answer: Any = None

        def send(self, messages: Sequence[Message]) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            sent.extend(messages if self.answer else ())
            return self.answer

        def close(self) -> None: ...

    run, mailer = publisher(place.store()), Mailer()
    run.dispatch_to(mailer)
    mailer.answer = answer
    for number in range(2):
        assert run(batch(event(number, f"o{number}")), number).processed == 1
    assert states(place) == {"WAITING": 2} and (str(answer) if answer else "not an Outcome") in caplog.text
    mailer.answer = Outcome()
    run(batch(event(2, "o2")), 2)
    assert states(place) == {"SENT": 3} and len(sent) == 3


ODD: list[tuple[Any, str]] = [
    (Outcome({0: ConnectionError("no")}), r"the failure ConnectionError\('no'\), which is no SendFailure"),  # type: ignore[dict-item]
    (Outcome({1: SendFailure("E", "no", permanent=True)}), "the place 1, which none of 1 messages has"),
    (Outcome(unsent=None), "whose unsent is NoneType"),  # type: ignore[arg-type]
    (Outcome(unsent={0}, away={"out": ValueError("no")}), r"ValueError\('no'\) in away, which is no text"),  # type: ignore[dict-item]
    (Outcome({0: SendFailure("E", ValueError("no"), permanent=True)}), "which is no SendFailure of two texts"),  # type: ignore[arg-type]
    (Outcome({-1: SendFailure("E", "no", permanent=True)}), "the place -1, which"),
    (Outcome(unsent={"o0"}), "the place 'o0', which"),  # type: ignore[arg-type]
    (Outcome([]), "whose failed is list"),  # type: ignore[arg-type]
]
"""Answers to one message that nobody understands, and what the log says of them."""


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(("answer", "said"), of_which(4, ODD), ids=range(len(ODD)))
def test_an_outcome_that_nobody_understands_fails_no_batch(
    place: Place, answer: Outcome, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as a destination that cannot be reached: nothing is marked, and the log says what is wrong with the answer."""

    class Odd:
        def send(self, messages: Sequence[Message]) -> Outcome:
            return answer

        def close(self) -> None: ...

    run = publisher(place.store())
    run.dispatch_to(Odd())
    assert run(batch(event(0, "o0")), 0).processed == 1
    assert states(place) == {"WAITING": 1} and re.search(f"Odd.send returned an Outcome.*{said}", caplog.text)
    with pytest.raises(DestinationUnavailable, match=said):
        Dispatcher(place.store().outbox("shop"), Odd()).once()


@pytest.mark.parametrize("whose", of_which(1, ["a function's error", "a failure of one's own"]))
def test_a_failure_of_any_text_is_kept_with_its_message(place: Place, whose: str) -> None:
    """Half a surrogate, NUL and a secret in what a receiver says of a body: the other message is sent once, and this one is dead."""
    text, sent = "no customer \ud83d\0, password=hunter2", list[Message]()

    def book(messages: Sequence[Message]) -> None:
        if any(message.body == b"odd" for message in messages):
            raise ValueError(text)
        sent.extend(messages)

    class Odd:
        def send(self, messages: Sequence[Message]) -> Outcome:
            wrong = {n: SendFailure("E\ud83d", text, permanent=True) for n, message in enumerate(messages) if message.body == b"odd"}
            sent.extend(message for n, message in enumerate(messages) if n not in wrong)
            return Outcome(wrong)

        def close(self) -> None: ...

    run = publisher(place.store())
    run.dispatch_to(Call(book) if whose == "a function's error" else Odd())
    assert run(batch(event(0, "good"), event(1, "odd")), 0).processed == 2
    assert [message.body for message in sent] == [b"good"] and states(place) == {"SENT": 1, "DEAD": 1}
    (dead,) = place.store().outbox("shop").entries(Chosen(states=(State.DEAD,)))
    assert dead.error_message == "no customer \\ud83d\\x00, password=***"


def test_a_dispatcher_tries_again_whatever_a_destination_raises(place: Place) -> None:
    """Of a call whose error nobody knows nothing is marked or given up: it is as if the destination could not be reached."""
    publisher(place.store())(batch(event(0, "o0")), 0)

    class Defect:
        def send(self, messages: Sequence[Message]) -> Outcome:
            raise ValueError("no number")

        def close(self) -> None: ...

    with pytest.raises(DestinationUnavailable, match="raised ValueError: no number"):
        Dispatcher(place.store().outbox("shop"), Defect()).once()
    assert states(place) == {"WAITING": 1}


@pytest.mark.fast_on("postgres")
def test_many_behind_a_dead_one_do_not_hide_those_of_another_key(place: Place) -> None:
    """More than a turn has wait behind it, in the same lane as another key: one call of dispatch sends that one."""
    lane = {n: zlib.crc32(b"%d" % n, zlib.crc32(b"out")) % LANES for n in range(1, 1_000)}
    other = next(n for n in range(2, 1_000) if lane[n] == lane[1])
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        data = pa.Table.from_struct_array(rows["data"].combine_chunks())
        tx.publish(pa.table({"body": data["id"], "to": data["amount"].cast(pa.string())}), "out", key="to")

    receiver = Receiver()
    receiver.refused = {b"o0": ValueError("no")}
    for number in range(3):  # each batch has pages of its own
        run(batch(*[event(n, f"o{n}", 1) for n in range(40 * number, 40 * number + 40)]), number)
    run(batch(event(120, "last", other)), 3)
    dispatcher(place, receiver, limit=20).once()
    assert receiver.bodies() == [b"last"] and states(place) == {"BEHIND": 119, "DEAD": 1, "SENT": 1}


@pytest.mark.fast_on("postgres")
def test_turns_get_smaller_where_the_store_does_not_wait_for_their_marks(place: Place) -> None:
    """As a database that ends sessions which do nothing for a while: what takes longer than that to send is not sent for ever."""
    run = consumer(place.store())
    run._handler = None
    run.foreach_batch(lambda rows, tx: tx.publish(pa.table({"body": [b"%d" % n for n in range(64)]}), "out"))
    run(batch(event(0, "o0")), 0)
    receiver = Receiver()
    one = dispatcher(place, receiver, limit=40, workers=1)
    turn = one.outbox.turn

    def lost(marks: Marks) -> None:
        raise StoreUnavailable("You were idle.")

    @contextmanager
    def impatient(asked: Asked) -> Iterator[Any]:
        with turn(asked) as taken:
            if len(taken.messages) > 12:
                taken.mark = lost  # type: ignore[method-assign]
            yield taken

    one.outbox.turn = impatient  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            one.once()
    for _ in range(12):
        with suppress(StoreUnavailable):
            one.once()
    assert states(place) == {"SENT": 64}
    assert {m.body for m in receiver.got} == {b"%d" % n for n in range(64)} and len(receiver.got) < 3 * 64


def test_a_turn_of_single_messages_ends_with_so_many_bytes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn holds in memory is bounded by bytes, also where messages do not lie in pages; all of them leave, in order."""
    for module in ("dedup.postgres.outbox", "dedup.delta.messages"):
        monkeypatch.setattr(f"{module}.BYTES_PER_TURN", 250)
    run = consumer(place.store())
    run._handler = None
    rows = pa.table({"body": [b"%03d" % n + bytes(97) for n in range(20)], "k": [b"k"] * 20})
    run.foreach_batch(lambda events, tx: tx.publish(rows, "out", key="k"))
    run(batch(event(0, "o0")), 0)
    outbox = place.store().outbox("shop")
    outbox.discard([outbox.entries(Chosen())[0].number])  # its page is unpacked on PostgreSQL
    sizes, receiver = list[int](), Receiver()

    def send(messages: Any) -> None:
        sizes.append(len(messages))
        receiver(messages)

    assert dispatcher(place, send).once().sent == 19 and max(sizes) == 3
    assert [m.body for m in receiver.got] == rows["body"].to_pylist()[1:]


@pytest.mark.full
@pytest.mark.parametrize("daemon", [False, True])
def test_a_topic_that_takes_nothing_holds_back_no_other(place: Place, daemon: bool) -> None:
    """More than a turn waits for a topic that is not there: what came later for another one is sent, and all of it once it is there."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        first = rows["sequence_number"][0].as_py() == 0
        tx.publish(pa.table({"body": [b"%d" % n for n in range(100)], "k": [b"k"] * 100}), "missing" if first else "good", key="k")

    run(batch(event(0, "o0")), 0)
    run(batch(event(1, "o1")), 1)
    there, got, stop = set[str](), dict[str, list[Any]](), threading.Event()

    def send(messages: Any) -> None:
        if any(message.topic == "missing" for message in messages) and not there:
            raise DestinationUnavailable("There is no such topic.")
        for message in messages:
            got.setdefault(message.topic, []).append(message.body)
        there.update({"once"} if daemon else ())
        if len(got) == 2 and all(len(bodies) >= 100 for bodies in got.values()):
            stop.set()

    # A second worker may have both topics in one turn, of which some passes: then attempts are counted.
    one = dispatcher(place, send, limit=20, workers=1, patience=Patience(first=0.01, most=0.02))
    if daemon:
        one.run(stop, every=0.01)
    else:
        with pytest.raises(DestinationUnavailable, match="no such topic"):
            one.once()
        assert list(got) == ["good"] and states(place) == {"SENT": 100, "WAITING": 100}
        there.add("now")
        one.once()
    assert states(place) == {"SENT": 200} and all(entry.attempts == 0 for entry in place.store().outbox("shop").entries(Chosen(limit=None)))
    assert got == {topic: [b"%d" % n for n in range(100)] for topic in ("good", "missing")}


def test_numbers_of_messages_that_are_undone_are_given_again(place: Place) -> None:
    """A search for a bad event runs the handler many times over: the messages that are left are numbered as if it had run once."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        data = pa.Table.from_struct_array(rows["data"].combine_chunks())
        tx.publish(pa.table({"body": data["id"]}), "out")
        tx.publish(pa.table({"body": data["id"], "id": pc.if_else(pc.equal(data["amount"], 7), None, data["id"])}), "to judge", id="id")

    assert run(batch(*(event(n, f"k{n}", n) for n in range(16))), 0).dead_lettered == 1
    numbers = [e.number for e in place.store().outbox("shop").entries(Chosen())]
    assert place.kind == "postgres" or numbers == list(range(numbers[0], numbers[0] + 30))
    assert len(numbers) == 30
