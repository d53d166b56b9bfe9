"""Who is tried beside whom in this process: where it dies, only what was alone can be told from what killed it.

Promises that a chunk in which a process died before is tried while no other chunk is in hand in this process, and that an end of the
process that is none of a chunk's doing is not held against it. Called around the transaction of each chunk, so that nobody waits in here
who holds locks of the store.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from dedup.trial import Trials

log = logging.getLogger("dedup")

T = TypeVar("T")

PATIENCE_SECONDS = 300.0
"""How long a chunk waits for others at most. Then they go on side by side, and the death of any of them counts for nothing."""

STOPPING_SECONDS = 5.0
"""How long the end of the process waits until what is in hand is noted."""


@dataclass(eq=False)
class _Seat:
    """One chunk in hand."""

    trials: Trials | None  # None: what no marker is kept of
    alone: bool
    what: str


@dataclass
class _Room:
    """The chunks in hand in this process."""

    seats: list[_Seat] = field(default_factory=list)
    waiting: list[_Seat] = field(default_factory=list)  # for being alone
    changed: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, seat: _Seat, patience: float) -> None:
        """Wait for its turn; after `patience` seconds sit down beside the others."""
        end = time.monotonic() + patience
        with self.changed:
            self._queue(seat)
            try:
                while self._in_the_way(seat) and time.monotonic() < end:
                    self.changed.wait(max(end - time.monotonic(), 0.0))
                if others := self._in_the_way(seat):
                    seat.alone = False
                    _disturb(seat, others)
            finally:
                if seat in self.waiting:
                    self.waiting.remove(seat)
            self.seats.append(seat)
            self.changed.notify_all()

    def leave(self, seat: _Seat) -> None:
        """Its chunk is decided, or has failed."""
        with self.changed:
            self.seats.remove(seat)
            self.changed.notify_all()

    def _queue(self, seat: _Seat) -> None:
        if others := self._in_the_way(seat):
            log.warning("%s: a process died in this chunk, or in one in hand; it waits until %s is through", seat.what, others[0].what)
        if seat.alone:
            self.waiting.append(seat)

    def _in_the_way(self, seat: _Seat) -> list[_Seat]:
        if seat.alone:
            return list(self.seats)
        return [other for other in (*self.seats, *self.waiting) if other.alone]


def _disturb(seat: _Seat, others: list[_Seat]) -> None:
    log.warning("%s: has waited for %s for %.0f s, and goes on beside it", seat.what, others[0].what, PATIENCE_SECONDS)
    for other in others:
        if other.trials is not None:
            other.trials.disturbed()


_room = _Room()
_inside: ContextVar[bool] = ContextVar("dedup_inside", default=False)
_own: ContextVar[_Room | None] = ContextVar("dedup_room", default=None)


def be_a_process() -> None:
    """From here on this context counts as a process of its own: a simulation has many of them in one. Waits for nobody."""
    _own.set(_Room())


def _begin_anew() -> None:
    """A process that was forked tries nothing of its parent's."""
    global _room
    _room = _Room()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def seat(trials: Trials, chunk: Callable[[], str], what: str) -> Iterator[None]:
    """The block is a chunk: alone in this process where a process died in it before, else beside others.

    Args:
        chunk: gives its ident.
        what: names it in the log.

    Crash: the markers of the chunks in hand are there; that of one which was alone counts.
    """
    with taken(what, trials, alone=trials.suspects(chunk)):
        yield


@contextmanager
def taken(what: str, trials: Trials | None = None, *, alone: bool = False) -> Iterator[bool]:
    """The block is beside others, or alone; yields whether it is alone.

    A consumer that is called inside a handler is part of that handler's chunk: it waits for nobody. Crash: as for `seat`.
    """
    if _inside.get():
        if trials is not None:
            trials.seated(alone=False)
        yield False
        return
    mine, room = _Seat(trials, alone, what), _own.get() or _room
    room.enter(mine, PATIENCE_SECONDS)
    token = _inside.set(True)
    try:
        if trials is not None:
            trials.seated(alone=mine.alone)
        yield mine.alone
    finally:
        _inside.reset(token)
        room.leave(mine)


@contextmanager
def entered(what: str, context: AbstractContextManager[T]) -> Iterator[T]:
    """The context, entered beside others: reading a batch may take the memory of the process. The block itself is not in hand."""
    with ExitStack() as stack:
        with taken(what):
            made = stack.enter_context(context)
        yield made


def blame(guilty: Trials) -> None:
    """This process ends because of what this trial runs: the others in hand have nothing to do with it.

    Crash: what is not noted makes a chunk a suspect.
    """
    with contextlib.suppress(Exception):
        guilty.convict()
    for other in list(_room.seats):
        if other.trials is not None and other.trials is not guilty:
            with contextlib.suppress(Exception):
                other.trials.survived()


def stop() -> None:
    """This process was asked to stop: its end says nothing of what is in hand. Waits for at most STOPPING_SECONDS.

    Called at the exit of the interpreter, and by `Consumer.run` at SIGTERM; call it in a SIGTERM handler of your own.

    Crash: what is not noted makes a chunk a suspect.
    """
    found = [each.trials for each in list(_room.seats) if each.trials is not None]
    if not found:
        return
    noting = threading.Thread(target=_stop_all, args=(found,), daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter starts no thread any more
        noting.start()
        noting.join(STOPPING_SECONDS)


def _stop_all(found: list[Trials]) -> None:
    for trials in found:
        with contextlib.suppress(Exception):
            trials.stop()


atexit.register(stop)


@contextmanager
def stopping_at_sigterm() -> Iterator[None]:
    """While the block runs, SIGTERM ends the process as ever, but is noted first.

    Where SIGTERM has a handler, and outside the main thread, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _stop_and_end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop_and_end(number: int, frame: FrameType | None) -> None:
    stop()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
