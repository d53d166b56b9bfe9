"""The dispatcher's own loop: an outbox and a broker in this process, no store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from checkpoint.errors import DestinationUnavailable
from dedup.core.messages import Asked, Failed, Marks, Message
from dedup.outbox import Dispatcher, ExactlyOnce, Outcome, SendFailure
from dedup.outbox.dispatch import Dispatched, Patience
from dedup.outbox.exactly_once import Flight

SOON = Patience(first=0.02, most=0.02)


class Box:
    """An outbox with one message, until somebody else has sent it."""

    parallel, consumer = False, "c"

    def __init__(self) -> None:
        self.looks, self.waiting = 0, [Message(1, "t", None, "id", b"x")]

    @contextmanager
    def turn(self, asked: Asked) -> Iterator[Any]:
        self.looks += 1
        yield Turn([m for m in self.waiting if m.topic not in asked.resting_topics])


class Turn:
    """What it gives."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages


class Away:
    """A destination that takes nothing."""

    def send(self, messages: Sequence[Message]) -> Outcome:
        raise DestinationUnavailable("away")

    def close(self) -> None: ...


def test_a_dispatcher_looks_no_more_often_after_an_outage() -> None:
    """Messages that found the destination away were sent by another dispatcher: from then on it looks every second, not all the time."""
    box, waits = Box(), list[float | None]()

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            if box.looks > 3:
                box.waiting = []
            if box.looks > 8:
                self.set()
            return super().wait(min(timeout or 0.0, 0.05))

    stop = Stop()
    Dispatcher(box, Away(), patience=SOON).run(stop, every=1.0)  # type: ignore[arg-type]
    assert min(wait for wait in waits[:3] if wait is not None) < 0.1 and waits[-2:] == [1.0, 1.0]


class Flying:
    """An outbox that notes flights."""

    parallel, consumer = False, "c"

    def __init__(self, *messages: Message) -> None:
        self.waiting, self.flying, self.sent = list(messages), list[Message](), list[int]()

    def fly(self, asked: Asked) -> Flight | None:
        fresh = not self.flying
        due = [m for m in self.waiting if m.topic not in asked.resting_topics and m.topic in (asked.topics or (m.topic,))]
        self.flying = self.flying or due[: asked.limit]
        return Flight(1, self.flying, fresh) if self.flying else None

    def land(self, flight: Flight) -> None:
        self.sent += [m.number for m in flight.messages]
        self.waiting, self.flying = [m for m in self.waiting if m not in flight.messages], []

    def ground(self, flight: Flight, dead: Failed | None) -> None:
        assert dead is None
        self.flying = []


class Broker:
    """It is away for a number of calls, and has no topic whose name begins with "no"."""

    def __init__(self, away: int = 0) -> None:
        self.away, self.created = away, False

    def connect(self, *, anew: bool = False) -> None:
        self.away -= 1
        if self.away >= 0:
            raise DestinationUnavailable("away")

    def has(self, flight: Flight) -> bool:
        return False

    def send(self, flight: Flight) -> Outcome:
        why = SendFailure("KafkaError UNKNOWN_TOPIC_OR_PART", "no such topic", permanent=False)
        missing = [place for place, m in enumerate(flight.messages) if m.topic.startswith("no") and not self.created]
        return Outcome(dict.fromkeys(missing, why))


def test_exactly_once_goes_on_after_an_outage() -> None:
    """The dispatcher waits with backoff, as it does for the store, and sends when the broker is there again."""
    box, stop, told = Flying(Message(1, "t", None, "id", b"x")), threading.Event(), list[Dispatched]()
    one = ExactlyOnce(box, Broker(away=3))  # type: ignore[arg-type]
    one.patience = SOON

    def tell(done: Dispatched) -> None:
        told.append(done)
        stop.set()

    one.run(stop, every=0.01, tell=tell)
    assert box.sent == [1] and told == [Dispatched(sent=1)]


def flown(broker: Broker, *topics: str) -> Flying:
    """An outbox with a message to each topic, after it was sent once."""
    box = Flying(*(Message(n, topic, None, f"id{n}", b"x") for n, topic in enumerate(topics)))
    with pytest.raises(DestinationUnavailable, match="no such topic"):
        ExactlyOnce(box, broker).once()  # type: ignore[arg-type]
    return box


def test_exactly_once_sends_what_is_for_other_topics() -> None:
    """Messages to topics that do not exist wait, none is dead, and the flight is taken back; the others are sent."""
    box = flown(Broker(), "a", "no-1", "b", "no-2", "no-1")
    assert (box.sent, [m.topic for m in box.waiting], box.flying) == ([0, 2], ["no-1", "no-2", "no-1"], [])


def test_exactly_once_finds_the_topic_that_a_transaction_failed_for() -> None:
    """A broker that refuses a transaction without a word about which topic: each is tried alone."""

    class Mute(Broker):
        def send(self, flight: Flight) -> Outcome:
            failed = super().send(flight).failed
            return Outcome(dict.fromkeys(range(len(flight.messages)), next(iter(failed.values()))) if failed else {})

    box = flown(Mute(), "a", "no-1", "b")
    assert (box.sent, [m.topic for m in box.waiting]) == ([0, 2], ["no-1"])


def test_exactly_once_takes_a_flight_back_that_another_process_has_left() -> None:
    """Also where it has topics that this dispatcher is not asked for; of those it sends nothing afterwards."""
    box = Flying(*(Message(n, topic, None, f"id{n}", b"x") for n, topic in enumerate(("no-1", "a", "other"))))
    box.flying = list(box.waiting)
    with pytest.raises(DestinationUnavailable, match="'no-1'"):
        ExactlyOnce(box, Broker(), topics=["a"]).once()  # type: ignore[arg-type]
    assert box.sent == [1] and [m.topic for m in box.waiting] == ["no-1", "other"]


def test_exactly_once_fences_again_before_it_asks_for_a_flight_that_was_left() -> None:
    """Its connection may be older than that of who left the flight, and who may still commit it."""

    class Telling(Broker):
        calls: ClassVar = list[object]()

        def connect(self, *, anew: bool = False) -> None:
            self.calls.append(anew)

        def has(self, flight: Flight) -> bool:
            self.calls.append("has")
            return True

    box = Flying(Message(1, "a", None, "id1", b"x"))
    box.flying = list(box.waiting)
    assert ExactlyOnce(box, Telling()).once().sent == 1  # type: ignore[arg-type]
    assert Telling.calls[:3] == [False, True, "has"]


def test_exactly_once_sends_to_a_topic_once_it_exists() -> None:
    """It is tried again with backoff, and messages to it go with the others then."""
    box, stop = Flying(Message(0, "no", None, "id0", b"x"), Message(1, "a", None, "id1", b"x")), threading.Event()
    broker = Broker()
    one = ExactlyOnce(box, broker)  # type: ignore[arg-type]
    one.patience = SOON
    rounds = list[Dispatched]()

    def tell(done: Dispatched) -> None:
        rounds.append(done)
        broker.created = True
        if not box.waiting:
            stop.set()

    one.run(stop, every=0.01, tell=tell)
    assert box.sent == [1, 0] and not one._alone and all(not done.dead for done in rounds)


def test_exactly_once_takes_a_flight_back_that_is_too_large_for_the_time_out() -> None:
    """It was noted and not committed in time: its messages go in smaller flights, in place of the same one for ever."""
    tries, stop = list[int](), threading.Event()

    class Slow(Broker):
        def send(self, flight: Flight) -> Outcome:
            tries.append(len(flight.messages))
            assert len(tries) < 50, "the same flight again and again"
            if len(flight.messages) > 2:
                raise DestinationUnavailable("not in time")
            if flight.messages[-1].number == 7:
                stop.set()
            return Outcome()

    box = Flying(*(Message(n, "a", None, f"id{n}", b"x") for n in range(8)))
    one = ExactlyOnce(box, Slow())  # type: ignore[arg-type]
    one.patience = SOON
    one.run(stop, every=0.01)
    assert box.sent == [*range(8)] and tries[:3] == [8, 4, 2]


class Stream:
    """An outbox that always has another message for "good", and one for "bad"."""

    parallel, consumer = False, "c"

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.limits: list[int] = []
        self._bad = Message(0, "bad", b"k", "id-0", b"x")

    @contextmanager
    def turn(self, asked: Asked) -> Iterator[Any]:
        self.limits.append(asked.limit)
        number = len(self.limits)
        waiting = [*([] if self._bad in self.sent else [self._bad]), Message(number, "good", b"k", f"id-{number}", b"x")]
        yield Marked(self, [m for m in waiting if m.topic not in asked.resting_topics])


class Marked(Turn):
    """What it gives; notes what was sent."""

    def __init__(self, stream: Stream, messages: Sequence[Message]) -> None:
        super().__init__(messages)
        self._stream = stream

    def mark(self, marks: Marks) -> None:
        self._stream.sent += [m for m in self.messages if m.number in marks.sent]


class Says:
    """A destination that says the same of each turn."""

    def __init__(self, outcome: Callable[[Sequence[Message]], Outcome]) -> None:
        self.send, self.calls = outcome, 0

    def close(self) -> None: ...


def test_a_dispatcher_that_always_has_messages_stops_when_it_is_told_to() -> None:
    """And what it has sent is told meanwhile: a round has an end, however much comes."""
    stop, told, box = threading.Event(), list[Dispatched](), Stream()

    def send(messages: Sequence[Message]) -> Outcome:
        if len(box.limits) > 300:
            stop.set()
        assert len(box.limits) < 1_000, "it does not stop"
        return Outcome()

    ticks = itertools.count()
    Dispatcher(box, Says(send), clock=lambda: float(next(ticks))).run(stop, tell=told.append)
    assert len(told) > 3 and sum(one.sent for one in told) == len(box.sent) > 300


def test_a_topic_that_took_nothing_has_its_turn_again_while_others_have_messages() -> None:
    """It is tried again after its rest, though there is always another message for another topic, and counts no attempt."""
    stop, box, away = threading.Event(), Stream(), [3]

    def send(messages: Sequence[Message]) -> Outcome:
        assert len(box.limits) < 1_000, "it is not tried again"
        if any(m.topic == "bad" for m in messages) and away[0]:
            away[0] -= 1
            return Outcome(unsent={0}, away={"bad": "it is not there."})
        if any(m.topic == "bad" for m in box.sent):
            stop.set()
        return Outcome()

    ticks = itertools.count()
    Dispatcher(box, Says(send), patience=SOON, clock=lambda: float(next(ticks))).run(stop)
    assert not away[0] and box._bad in box.sent


def test_once_sends_what_waits_and_the_error_of_a_topic_comes_last() -> None:
    """It ends though there is always another message; what took nothing is told when the others were sent."""
    box = Stream()
    bad = Says(lambda messages: Outcome(unsent={0}, away={"bad": "it is not there."}) if messages[0].topic == "bad" else Outcome())
    with pytest.raises(DestinationUnavailable, match="'bad' took nothing: it is not there"):
        Dispatcher(box, bad).once(5)
    assert len(box.sent) == 5
    assert Dispatcher(box, Says(lambda messages: Outcome())).once(7).sent >= 7


def test_a_destination_that_takes_nothing_and_says_nothing_is_away() -> None:
    """No loop of turns without an end: what neither was sent nor has failed is an outage."""
    with pytest.raises(DestinationUnavailable, match="does not say why"):
        Dispatcher(Box(), Says(lambda messages: Outcome(unsent=set(range(len(messages)))))).once()


def test_a_message_that_was_refused_alone_is_no_outage() -> None:
    """It counts its attempts though nothing else waits, and is given up in the end."""
    box = Box()
    box.waiting = [box.waiting[0]._replace(attempts=4)]
    marked: list[Marks] = []

    @contextmanager
    def turn(asked: Asked) -> Iterator[Any]:
        one = Turn([] if marked else box.waiting)
        one.mark = marked.append  # type: ignore[attr-defined]
        yield one

    box.turn = turn  # type: ignore[method-assign,assignment]
    refused = SendFailure("EventHubError argument-error", "no", permanent=False, alone=True)
    assert Dispatcher(box, Says(lambda messages: Outcome({0: refused}))).once().dead == 1


@pytest.mark.full
def test_turns_are_smaller_after_one_that_the_destination_did_not_take_in_time() -> None:
    """Else a slow receiver gets the same messages again and again. A store that gives twice what it was asked for is asked for less."""
    stop, sent, todo = threading.Event(), list[int](), [Message(n, "t", None, str(n), b"") for n in range(32)]

    @contextmanager
    def turn(asked: Asked) -> Iterator[Any]:
        one = Turn([] if asked.resting_topics else todo[len(sent) :][: 2 * asked.limit])
        one.mark = lambda marks: sent.extend(marks.sent)  # type: ignore[attr-defined]
        yield one

    def slow(messages: Sequence[Message]) -> Outcome:
        assert next(calls) < 100, "the same messages come again and again"
        if len(messages) > 5:
            raise DestinationUnavailable("not acknowledged in time")
        if sent and sent[-1] + len(messages) >= 31:
            stop.set()
        return Outcome()

    box, calls, ticks = Box(), itertools.count(), itertools.count()
    box.turn = turn  # type: ignore[method-assign,assignment]
    Dispatcher(box, Says(slow), limit=16, patience=SOON, clock=lambda: float(next(ticks))).run(stop)
    assert sent == [*range(32)]
