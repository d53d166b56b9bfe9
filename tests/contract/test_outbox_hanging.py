"""A destination that hangs, on every store: the stream goes on, nothing is locked or lost, and what arrives late is not sent again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from checkpoint.errors import DestinationUnavailable
from dedup import Consumer
from dedup.outbox import Call, Message
from kit.orders import batch, event, orders
from kit.outgoing import Receiver, dispatcher, publisher, states
from kit.places import Place

SHORT = 0.05
"""Seconds. It only decides how long a test waits: what hangs does so until it is told otherwise."""


class Hanging(Receiver):
    """Takes a call, and answers it only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.go, self.ended = True, threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, messages: Sequence[Message]) -> None:
        self.calls += 1
        if self.hangs:
            self.go.wait()
        super().__call__(messages)
        self.ended.set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.go.set()


def settle(run: Consumer) -> None:
    """The call that was left behind has returned, and from here on there is time enough."""
    assert run._inline is not None and run._inline.wait_for_calls(30)
    run._inline._seconds = 60.0


@pytest.mark.fast_on("postgres")
def test_a_batch_does_not_wait_for_a_destination_that_hangs(place: Place, hanging: Hanging) -> None:
    """The next batches go on, and while the call hangs no other one is made; what another dispatcher sends meanwhile is free for it."""
    run = publisher(place.store())
    run.dispatch_to(Call(hanging), timeout=SHORT)
    for number in range(3):
        assert run(batch(*orders([2 * number, 2 * number + 1])), number).processed == 2
    assert hanging.calls == 1 and states(place) == {"WAITING": 6}
    other = Receiver()
    dispatcher(place, other).once()
    assert sorted(map(bytes, filter(None, other.bodies()))) == [b"p0-%d" % n for n in range(6)]
    assert states(place) == {"SENT": 6}
    hanging.hangs = False
    hanging.go.set()
    settle(run)
    run(batch(*orders([6])), 3)
    assert hanging.bodies()[-1] == b"p0-6" and states(place) == {"SENT": 7}


@pytest.mark.fast_on("postgres")
def test_what_a_late_call_has_sent_is_not_sent_again(place: Place, hanging: Hanging) -> None:
    """A destination that takes longer than the limit gets on all the same: its answer is heard before the next batch's messages go."""
    run = publisher(place.store())
    run.dispatch_to(Call(hanging), timeout=SHORT)
    run(batch(*orders([0, 1])), 0)
    assert states(place) == {"WAITING": 2}
    hanging.hangs = False
    hanging.go.set()
    settle(run)
    run(batch(*orders([2])), 1)
    assert sorted(filter(None, hanging.bodies())) == [b"p0-0", b"p0-1", b"p0-2"] and states(place) == {"SENT": 3}


@pytest.mark.fast_on("postgres")
def test_a_socket_that_never_answers_stops_no_stream(place: Place) -> None:
    """A receiver that accepts the connection and then says nothing: the batch is done, its messages wait, and its process can end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send(messages: Sequence[Message]) -> None:
            with socket.create_connection(server.getsockname()) as one:
                one.sendall(messages[0].body or b"")
                if not one.recv(1):
                    raise ConnectionResetError("closed")

        run = publisher(place.store())
        run.dispatch_to(Call(send), timeout=SHORT)
        assert run(batch(*orders([0])), 0).processed == 1
        assert states(place) == {"WAITING": 1}
        connection, _ = server.accept()
        assert connection.recv(100) == b"p0-0"
        connection.close()
    settle(run)


@pytest.mark.fast_on("postgres")
def test_a_receiver_that_answers_nothing_in_time_is_not_asked_for_each_message(place: Place) -> None:
    """A turn of many messages waits for few time-outs; where only some time out, the others arrive, and those of a key in their order."""
    publisher(place.store())(batch(*(event(n, f"o{n}", n % 50) for n in range(100))), 0)
    receiver, slow, calls = Receiver(), set(range(100)), list[int]()

    def send(messages: Sequence[Message]) -> None:
        calls.append(len(messages))
        if any(int((message.body or b"o").decode()[1:]) in slow for message in messages):
            raise TimeoutError("no answer")
        receiver(messages)

    with pytest.raises(DestinationUnavailable):
        dispatcher(place, send).once()
    assert calls.count(1) < 30 and states(place) == {"WAITING": 100}, calls
    slow = {0, 1, 2, 3, 4, 60}
    with suppress(DestinationUnavailable):  # of a turn of none but those
        dispatcher(place, send).once()
    assert states(place)["SENT"] >= 50
    slow = set()
    dispatcher(place, send).once()
    assert states(place) == {"SENT": 100}
    for key in range(50):
        assert receiver.bodies(str(key).encode()) == [b"o%d" % key, b"o%d" % (key + 50)]
