"""A consumer that is used inside its own handler would wait for itself: told at once, by what is known of the handlers that run.

Known of a handler: the context it runs in, which coroutines and `asyncio.to_thread` take along; and which threads there were before it.
Two stores may have a consumer of one name each: a consumer is known by both.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from checkpoint.errors import HandlerError

Identity = tuple[str, str]
"""Name of a consumer, and what its store is."""

_HANDLING: ContextVar[frozenset[Identity]] = ContextVar("dedup_handling", default=frozenset())
_CALL: ContextVar[Calls | None] = ContextVar("dedup_call", default=None)


def identity(name: str, store: object) -> Identity:
    """A store says in its repr where it is, without a password."""
    return name, repr(store)


@contextmanager
def handling(consumer: Identity) -> Iterator[None]:
    """While a handler of this consumer runs, and what it has recorded is evaluated."""
    token = _HANDLING.set(_HANDLING.get() | {consumer})
    try:
        with _in_call():
            yield
    finally:
        _HANDLING.reset(token)


def refuse(consumer: Identity, doing: str) -> None:
    """Raise HandlerError where this is called by the consumer's own handler. Another consumer's handler may do as it likes."""
    if consumer in _HANDLING.get():
        raise HandlerError(
            f"{doing} of consumer {consumer[0]!r} inside its own handler: it would wait for the batch in hand, which waits for it. "
            "Do it after the batch, or in another process. For more rows or messages use tx.write and tx.publish."
        )


class Calls:
    """The calls of one consumer object: for each handler that runs in one, which threads there were before it."""

    def __init__(self) -> None:
        self._handling: list[frozenset[threading.Thread]] = []

    @contextmanager
    def one(self, consumer: Identity) -> Iterator[None]:
        """One call.

        Raises HandlerError in the handler of another call, or in a thread that this handler seems to have started: one that began while
        it runs, and that Spark did not start. Any other call waits for its turn.
        """
        refuse(consumer, "A call")
        this = threading.current_thread()
        if any(this not in before for before in list(self._handling)) and not _called_by_spark():
            raise HandlerError(
                f"Consumer {consumer[0]!r} is called by a thread that began while its handler runs: a handler that waits for this thread "
                "would wait for ever. Call it outside its handler, or make another Consumer object for another instance."
            )
        token = _CALL.set(self)
        try:
            yield
        finally:
            _CALL.reset(token)

    @contextmanager
    def handler(self) -> Iterator[None]:
        """A handler runs."""
        before = frozenset(threading.enumerate())
        self._handling.append(before)
        try:
            yield
        finally:
            self._handling.remove(before)


def _in_call() -> AbstractContextManager[None]:
    call = _CALL.get()
    return nullcontext() if call is None else call.handler()


def _called_by_spark() -> bool:
    """Whether this is a call of foreachBatch: such threads come and go with queries, not with handlers."""
    frame: Any = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).startswith("py4j."):
            return True
    return False
