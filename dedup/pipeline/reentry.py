"""What guards a process against the handlers in it: one that takes too long, and one that uses the consumer it is called by.

A thread that hangs cannot be stopped, so that the process is ended (`limited`). A process has one watchdog for any number of limits. A
thread of Python's ends the process when the first limit is over, and tells whoever asked first. A C extension that hangs with the
interpreter's lock keeps that thread from running: for this, `faulthandler` is always armed with the earliest limit and a little more. Its
timer needs no lock, and there is one in a process: pytest's `faulthandler_timeout` and calls of `faulthandler.dump_traceback_later` by the
user replace ours. Then a hang that holds the lock is not ended; any other one is.

A consumer that is used inside its own handler would wait for itself: told at once (`refuse`). Inside is what runs in the handler's context,
which coroutines and `asyncio.to_thread` take along. A thread that a handler starts by itself has none of it, and cannot be told from one
that gives a batch again because the first one takes too long: such a call waits for its turn.
Two stores may have a consumer of one name each: a consumer is known by both.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from checkpoint.errors import HandlerError

GRACE_SECONDS = 1.0
"""How long after a limit a process ends in which no thread of Python's can run."""

TELLING_SECONDS = 10.0
"""How long the end of a process waits for those who are told of it."""


@dataclass(frozen=True)
class _Limit:
    """One run."""

    end: float  # by time.monotonic
    what: str
    on_end: Callable[[], None]


@dataclass
class _Watchdog:
    """The limits of this process."""

    limits: dict[int, _Limit] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None
    armed: float | None = None  # the earliest end that faulthandler knows of
    ending: bool = False

    def add(self, number: int, limit: _Limit) -> None:
        """Watch a run."""
        with self.changed:
            self.limits[number] = limit
            if self.thread is None:
                self.thread = threading.Thread(target=self._watch, name="dedup-watchdog", daemon=True)
                self.thread.start()
            self._arm()

    def remove(self, number: int) -> None:
        """The run is over."""
        with self.changed:
            self.limits.pop(number, None)
            self._arm()

    def _arm(self) -> None:
        earliest = min((limit.end for limit in self.limits.values()), default=None)
        if earliest == self.armed or self.ending:
            return
        self.armed = earliest
        self.changed.notify()
        if earliest is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            _end_later(earliest + GRACE_SECONDS - time.monotonic())

    def pause(self) -> None:
        """Disarm: a child that is forked from a process with a running timer waits for its end for ever."""
        self.changed.acquire()
        if self.armed is not None and not self.ending:
            faulthandler.cancel_dump_traceback_later()

    def go_on(self) -> None:
        """Arm again."""
        self.armed = None
        self._arm()
        self.changed.release()

    def _watch(self) -> None:
        while True:
            with self.changed:
                while (due := self._due()) is None:
                    self.changed.wait(None if self.armed is None else self.armed - time.monotonic())
                self.ending = True
                _end_later(TELLING_SECONDS)
            _end(due)

    def _due(self) -> list[_Limit] | None:
        now = time.monotonic()
        return [limit for limit in self.limits.values() if limit.end <= now] or None


_numbers = itertools.count()
_watchdog = _Watchdog()


def _begin_anew() -> None:
    """A process that was forked has none of its parent's threads, and none of its runs."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _watchdog.pause(), after_in_parent=lambda: _watchdog.go_on(), after_in_child=_begin_anew)


def _nothing() -> None:
    """Nobody is told."""


@contextmanager
def limited(seconds: float | None, what: str = "a run of a handler", on_end: Callable[[], None] = _nothing) -> Iterator[None]:
    """End the process where the block takes longer. Any number of blocks may be limited at once, in any threads.

    Args:
        seconds: None: no limit.
        what: names the block on stderr.
        on_end: called before the process ends, in another thread, for at most TELLING_SECONDS; its errors are left out.

    Crash: that is what it does, with code 1; the stack of every thread is on stderr.
    """
    if seconds is None:
        yield
        return
    number, dog = next(_numbers), _watchdog
    try:
        dog.add(number, _Limit(time.monotonic() + seconds, f"{what} took longer than {seconds:g} s", on_end))
        yield
    finally:
        dog.remove(number)


def _end_later(seconds: float) -> None:
    """A timer of faulthandler's own, which needs no lock of the interpreter."""
    faulthandler.dump_traceback_later(max(seconds, 0.001), exit=True, file=_stderr())


def _end(due: list[_Limit]) -> None:
    """Say which limits are over, and where every thread is; tell; exit."""
    said = "".join(f"Timeout! {limit.what}; this process ends.\n" for limit in due)
    with contextlib.suppress(Exception):
        os.write(_stderr(), said.encode())
        faulthandler.dump_traceback(_stderr(), all_threads=True)
    for limit in due:
        with contextlib.suppress(Exception):
            limit.on_end()
    os._exit(1)


def _stderr() -> int:
    """The descriptor: a notebook's sys.stderr may have none."""
    try:
        return sys.stderr.fileno()
    except Exception:  # noqa: BLE001 - whatever stands in for it
        return 2


Identity = tuple[str, str]
"""Name of a consumer, and what its store is."""

_HANDLING: ContextVar[tuple[_HandlerRun, ...]] = ContextVar("dedup_handling", default=())


@dataclass(eq=False)
class _HandlerRun:
    """One run of a handler."""

    consumer: Identity
    ended: bool = False


def identity(name: str, store: object) -> Identity:
    """What tells a consumer from every other one: its name, and the repr of its store, which has no password."""
    return name, repr(store)


@contextmanager
def handling(consumer: Identity) -> Iterator[None]:
    """While a handler of this consumer runs, and what it has recorded is evaluated."""
    run = _HandlerRun(consumer)
    token = _HANDLING.set((*_HANDLING.get(), run))
    try:
        yield
    finally:
        run.ended = True  # what it left behind is not inside it any more
        _HANDLING.reset(token)


def refuse(consumer: Identity, doing: str) -> None:
    """Raise HandlerError if the consumer's own handler calls this. The handler of another consumer may."""
    if any(run.consumer == consumer and not run.ended for run in _HANDLING.get()):
        raise HandlerError(
            f"{doing} of consumer {consumer[0]!r} inside its own handler: it would wait for the batch in hand, which waits for it. "
            "Do it after the batch, or in another process. For more rows or messages use tx.write and tx.publish."
        )
