"""A consumer that is used inside its own handler would wait for itself: told at once, by what the handler began.

Inside is what runs in the handler's context, which coroutines and `asyncio.to_thread` take along, and every thread that was started there,
as long as the handler runs. Any other call waits for its turn: also one that comes again because the first one takes too long.
Two stores may have a consumer of one name each: a consumer is known by both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from weakref import WeakKeyDictionary

from checkpoint.errors import HandlerError

Identity = tuple[str, str]
"""Name of a consumer, and what its store is."""


@dataclass(eq=False)
class _Run:
    """One run of a handler."""

    consumer: Identity
    calls: Calls | None  # of the consumer object; None where it was not called, as in a task
    ended: bool = False


_RUNS: ContextVar[tuple[_Run, ...]] = ContextVar("dedup_runs", default=())
_CALL: ContextVar[Calls | None] = ContextVar("dedup_call", default=None)
_STARTED: WeakKeyDictionary[threading.Thread, tuple[_Run, ...]] = WeakKeyDictionary()
"""Thread -> the runs inside which it was started."""

_patching = threading.Lock()


def identity(name: str, store: object) -> Identity:
    """A store says in its repr where it is, without a password."""
    return name, repr(store)


@contextmanager
def handling(consumer: Identity) -> Iterator[None]:
    """While a handler of this consumer runs, and what it has recorded is evaluated."""
    _watch_threads()
    run = _Run(consumer, _CALL.get())
    token = _RUNS.set((*_RUNS.get(), run))
    try:
        yield
    finally:
        run.ended = True  # what it left behind is not inside it any more
        _RUNS.reset(token)


def refuse(consumer: Identity, doing: str) -> None:
    """Raise HandlerError where this is called by the consumer's own handler. Another consumer's handler may do as it likes."""
    if any(run.consumer == consumer and not run.ended for run in _RUNS.get()):
        raise _inside(consumer, doing)


class Calls:
    """The calls of one consumer object."""

    @contextmanager
    def one(self, consumer: Identity) -> Iterator[None]:
        """One call.

        Raises HandlerError in the handler of another call, or in a thread that this handler has started. Any other call waits for its turn.
        """
        refuse(consumer, "A call")
        if any(run.calls is self and not run.ended for run in _STARTED.get(threading.current_thread(), ())):
            raise _inside(consumer, "A call")
        token = _CALL.set(self)
        try:
            yield
        finally:
            _CALL.reset(token)


def _inside(consumer: Identity, doing: str) -> HandlerError:
    return HandlerError(
        f"{doing} of consumer {consumer[0]!r} inside its own handler, or in a thread that the handler has started: it would wait for the "
        "batch in hand, which waits for it. Do it after the batch, or in another process. For more rows or messages use tx.write and "
        "tx.publish."
    )


def _watch_threads() -> None:
    """From the first handler on, note who starts a thread: threads do not take the context along."""
    with _patching:
        start = threading.Thread.start
        if hasattr(start, "noted_by_dedup"):
            return

        @wraps(start)
        def noting(self: threading.Thread) -> None:
            runs = (*_RUNS.get(), *_STARTED.get(threading.current_thread(), ()))
            if open_runs := tuple(run for run in runs if not run.ended):
                _STARTED[self] = open_runs
            start(self)

        noting.noted_by_dedup = True  # type: ignore[attr-defined]
        threading.Thread.start = noting  # type: ignore[method-assign]
