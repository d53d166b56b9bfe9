"""A consumer that is used inside its own handler would wait for itself: told at once, by what is known of the handlers that run.

Known of a handler: the context it runs in, which coroutines and `asyncio.to_thread` take along; and which threads there were before it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from checkpoint.errors import HandlerError

_HANDLING: ContextVar[frozenset[str]] = ContextVar("dedup_handling", default=frozenset())


@contextmanager
def handling(consumer: str) -> Iterator[None]:
    """While a handler of this consumer runs, and what it has recorded is evaluated."""
    token = _HANDLING.set(_HANDLING.get() | {consumer})
    try:
        yield
    finally:
        _HANDLING.reset(token)


def refuse(consumer: str, doing: str) -> None:
    """Raise HandlerError where this is called by the consumer's own handler. Another consumer's handler may do as it likes."""
    if consumer in _HANDLING.get():
        raise HandlerError(
            f"{doing} of consumer {consumer!r} inside its own handler: it would wait for the batch in hand, which waits for the handler. "
            "Do it after the batch, or in another process. For more rows or messages use tx.write and tx.publish."
        )


class Calls:
    """The calls of one consumer object that run: for each, which threads there were before it."""

    def __init__(self) -> None:
        self._running: list[frozenset[threading.Thread]] = []

    @contextmanager
    def one(self, consumer: str) -> Iterator[None]:
        """One call.

        Raises HandlerError in the handler of another call, or in a thread that it seems to have started: one that began since, and that
        Spark did not start.
        """
        refuse(consumer, "A call")
        this = threading.current_thread()
        if any(this not in before for before in self._running) and not _called_by_spark():
            raise HandlerError(
                f"Consumer {consumer!r} is called by a thread that began while it handles another batch: a handler that waits for this "
                "thread would wait for ever. Call it outside its handler, or make another Consumer object for another instance."
            )
        before = frozenset(threading.enumerate())
        self._running.append(before)
        try:
            yield
        finally:
            self._running.remove(before)


def _called_by_spark() -> bool:
    """Whether this is a call of foreachBatch: such threads come and go with queries, not with handlers."""
    frame: Any = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).startswith("py4j."):
            return True
    return False
