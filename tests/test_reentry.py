"""A consumer inside its own handler is told so; a call that only runs beside another one is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from checkpoint.errors import HandlerError
from dedup import reentry
from dedup.foreach_async import _the_loop

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


def test_a_call_that_comes_again_from_a_new_thread_waits_for_its_turn() -> None:
    """Whoever calls again after a time-out does not stand in the handler that still runs, however young its thread is."""
    calls, inside, go_on = reentry.Calls(), threading.Event(), threading.Event()

    def orphan() -> None:
        with calls.one(SHOP), reentry.handling(SHOP):
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=orphan)
    thread.start()
    inside.wait(30)
    in_a_new_thread(lambda: call(calls))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, calls).result(30)
    go_on.set()
    thread.join(30)


@pytest.mark.parametrize("way", ["thread", "thread of a thread", "new pool", "to_thread", "coroutine", "timer"])
def test_what_a_handler_starts_is_inside_it(way: str) -> None:
    """A handler that waits for a call in what it has started would wait for ever."""
    calls = reentry.Calls()

    async def coroutine() -> None:
        call(calls)

    ways: dict[str, Callable[[], object]] = {
        "thread": lambda: in_a_new_thread(lambda: call(calls)),
        "thread of a thread": lambda: in_a_new_thread(lambda: in_a_new_thread(lambda: call(calls))),
        "new pool": lambda: ThreadPoolExecutor(1).submit(call, calls).result(30),
        "to_thread": lambda: asyncio.run(asyncio.to_thread(call, calls)),
        "coroutine": lambda: asyncio.run_coroutine_threadsafe(coroutine(), _the_loop()).result(30),
        "timer": lambda: in_a_timer(lambda: call(calls)),
    }
    with calls.one(SHOP), reentry.handling(SHOP), pytest.raises(HandlerError, match="inside its own handler"):
        ways[way]()


def in_a_timer(body: Callable[[], object]) -> None:
    """Run it by threading.Timer; what it raises is raised here."""
    done: Future[None] = Future()
    timer = threading.Timer(0, lambda: done.set_exception(error) if (error := raised_by(body)) else done.set_result(None))
    timer.start()
    done.result(30)


def raised_by(body: Callable[[], object]) -> Exception | None:
    """What it raises."""
    try:
        body()
    except Exception as error:  # noqa: BLE001 - the test judges it
        return error
    return None


def test_what_a_handler_left_behind_is_not_inside_the_next_one() -> None:
    """A thread or a task that goes on after its handler may call the consumer as anybody else may, whatever runs then."""
    calls, go_on, done = reentry.Calls(), threading.Event(), list[Exception | None]()

    def late() -> None:
        go_on.wait(30)
        done.append(raised_by(lambda: call(calls)))

    async def task() -> None:
        await asyncio.to_thread(late)

    with calls.one(SHOP), reentry.handling(SHOP):
        thread = threading.Thread(target=late)
        thread.start()
        left = asyncio.run_coroutine_threadsafe(task(), _the_loop())
        in_a_new_thread(lambda: call(reentry.Calls()))  # another instance, which has an epoch of its own
    with calls.one(SHOP), reentry.handling(SHOP):
        go_on.set()
        thread.join(30)
        left.result(30)
    assert done == [None, None]


def test_two_stores_have_two_consumers_of_one_name() -> None:
    """The handler of one may call the other, which waits for nothing of it."""
    one, other = reentry.identity("shop", "PostgresStore('a')"), reentry.identity("shop", "PostgresStore('b')")
    with reentry.handling(one):
        reentry.refuse(other, "A call")
        with pytest.raises(HandlerError, match="consumer 'shop' inside its own handler"):
            reentry.refuse(one, "A call")
