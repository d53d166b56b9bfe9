"""A consumer inside its own handler is told so; a call that only runs beside another one is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoint.errors import HandlerError
from dedup.pipeline import reentry
from dedup.pipeline.handlers import _the_loop

SHOP = reentry.identity("shop", "PostgresStore('a')")


def call() -> None:
    """A call of this consumer that does nothing."""
    reentry.refuse(SHOP, "A call")


async def coroutine() -> None:
    call()


WAYS: dict[str, Callable[[], object]] = {
    "at once": call,
    "to_thread": lambda: asyncio.run(asyncio.to_thread(call)),
    "coroutine": lambda: asyncio.run_coroutine_threadsafe(coroutine(), _the_loop()).result(30),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_handler_calls_is_inside_it(way: str) -> None:
    """A handler that waits for a call of its own consumer would wait for ever."""
    with reentry.handling(SHOP), pytest.raises(HandlerError, match="inside its own handler"):
        WAYS[way]()


def test_a_call_that_comes_again_from_a_new_thread_waits_for_its_turn() -> None:
    """Whoever calls again after a time-out does not stand in the handler that still runs, however young its thread is."""
    with reentry.handling(SHOP), ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(30)


def test_what_a_handler_left_behind_is_not_inside_the_next_one() -> None:
    """A task that goes on after its handler may call the consumer as anybody else may, whatever runs then."""
    go_on = threading.Event()

    def late() -> None:
        go_on.wait(30)
        call()

    async def task() -> None:
        await asyncio.to_thread(late)

    with reentry.handling(SHOP):
        left = asyncio.run_coroutine_threadsafe(task(), _the_loop())
    with reentry.handling(SHOP):
        go_on.set()
        left.result(30)


def test_two_stores_have_two_consumers_of_one_name() -> None:
    """The handler of one may call the other, which waits for nothing of it."""
    one, other = reentry.identity("shop", "PostgresStore('a')"), reentry.identity("shop", "PostgresStore('b')")
    with reentry.handling(one):
        reentry.refuse(other, "A call")
        with pytest.raises(HandlerError, match="consumer 'shop' inside its own handler"):
            reentry.refuse(one, "A call")
