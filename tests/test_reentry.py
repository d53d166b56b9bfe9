"""A consumer inside its own handler is told so; a call that only runs beside another one is not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from checkpoint.errors import HandlerError
from dedup import reentry

SHOP = reentry.identity("shop", "PostgresStore('a')")


def in_a_new_thread(body: Callable[[], object]) -> None:
    """What it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - the test judges it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if raised:
        raise raised[0]


def call(calls: reentry.Calls) -> None:
    """A call of this consumer that does nothing."""
    with calls.one(SHOP):
        pass


def test_a_thread_that_began_beside_a_call_is_not_inside_its_handler() -> None:
    """A pool, or whoever calls again after a time-out, waits for its turn: it is younger than the call, and older than the handler."""
    calls, begun, go_on = reentry.Calls(), threading.Event(), threading.Event()

    def late() -> None:
        begun.set()
        go_on.wait(30)
        call(calls)

    with calls.one(SHOP):
        in_a_new_thread(lambda: call(calls))
        thread = threading.Thread(target=late)
        thread.start()
        begun.wait(30)
        with reentry.handling(SHOP):
            go_on.set()
            thread.join(30)
            with pytest.raises(HandlerError, match="while its handler runs"):
                in_a_new_thread(lambda: call(calls))
            in_a_new_thread(lambda: call(reentry.Calls()))
        in_a_new_thread(lambda: call(calls))


def test_two_stores_have_two_consumers_of_one_name() -> None:
    """The handler of one may call the other, which waits for nothing of it."""
    one, other = reentry.identity("shop", "PostgresStore('a')"), reentry.identity("shop", "PostgresStore('b')")
    with reentry.handling(one):
        reentry.refuse(other, "A call")
        with pytest.raises(HandlerError, match="consumer 'shop' inside its own handler"):
            reentry.refuse(one, "A call")
