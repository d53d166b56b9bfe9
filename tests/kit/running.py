"""The runner of a hub in a thread of the test, with options that make it quick."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dedup import Consumer
from dedup.eventhub import run_async
from kit.hub_orders import Orders

# The aio client leaves the sockets of connections that broke to the garbage collector.
MARKS = (
    pytest.mark.eventhubs,
    pytest.mark.usefixtures("collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
)
"""Of modules whose tests run it."""

QUICK = {"balance_every": 0.3, "expire_after": 2.0, "max_events": 300, "max_wait": 0.1, "retry_backoff_factor": 0.1, "retry_total": 1}


class Running:
    """`run_async` in a thread with a loop of its own."""

    def __init__(self, consumer: Consumer, sent: Orders, **options: Any) -> None:
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(consumer, sent, {**QUICK, **options}), daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self, consumer: Consumer, sent: Orders, options: dict[str, Any]) -> None:
        async def body() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._ready.set()
            await run_async(consumer, sent.double.connection_string, sent.hub, stop=self._stop, **options)

        try:
            asyncio.run(body())
        except BaseException as error:  # noqa: BLE001 - the test asks for it
            self.error = error

    def alive(self) -> None:
        """It has not ended yet."""
        assert self._thread.is_alive(), self.error

    def stop(self) -> None:
        """End it; it must end well."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def ends_with(self) -> BaseException:
        """What it ends with by itself."""
        self._thread.join(60)
        assert not self._thread.is_alive() and self.error is not None
        return self.error


@contextmanager
def running(consumer: Consumer, sent: Orders, **options: Any) -> Iterator[Running]:
    """For the length of the block."""
    one = Running(consumer, sent, **options)
    try:
        yield one
    except BaseException:
        one._loop.call_soon_threadsafe(one._stop.set)
        one._thread.join(30)
        raise
    one.stop()
