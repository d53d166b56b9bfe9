"""Which chunks are tried at the same time in this process. When the process dies, only a chunk that was alone can be blamed.

Promises that a chunk in which a process died before is tried while this process has no other chunk in hand. If the process ends for another
reason, no chunk is blamed. Called around the transaction of each chunk, so that no thread waits here while it holds locks of the store.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from deadletter.crashes import CrashMarker

log = logging.getLogger("dedup")

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a chunk waits for others at most. Then they go on side by side, and the death of any of them counts for nothing.

It may be called inside the handler that it waits for, in a thread which does not tell: then both wait in vain until this is over.
"""

PATIENCE_PART = 0.1
"""How much of the time limit of a handler that runs others wait at most: what it calls leaves it time enough."""

STOPPING_SECONDS = 5.0
"""How long the end of the process, or whoever goes on beside others, waits until that is noted of what is in hand."""


@dataclass(eq=False)
class _Seat:
    """One chunk in hand."""

    marker: CrashMarker | None  # None: what no marker is kept of
    alone: bool
    what: str
    limit: float | None = None  # seconds of one run of its handler
    sends: bool = False  # calls a destination: no suspect waits for it
    found: list[_Seat] = field(default_factory=list)  # the chunks in hand when it came: it may be called inside their handlers


@dataclass
class _Room:
    """The chunks in hand in this process."""

    seats: list[_Seat] = field(default_factory=list)
    waiting: list[_Seat] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, seat: _Seat) -> None:
        """Wait for its turn; after a while sit down beside the others. From then on none of them is alone, and nobody waits for them."""
        with self.changed:
            self._queue(seat)
            try:
                self._wait(seat)
            finally:
                self.waiting.remove(seat)
            others = self._in_the_way(seat)
            for each in (seat, *others) if others or any(other.sends for other in self.seats) else ():
                each.alone = False
            self.seats.append(seat)
            self.changed.notify_all()
        if others:
            _disturb(seat, others)

    def leave(self, seat: _Seat) -> None:
        """Its chunk is decided, or has failed, or it was interrupted before it sat down."""
        with self.changed:
            if seat in self.seats:
                self.seats.remove(seat)
            self.changed.notify_all()

    def holds_up(self, marker: CrashMarker) -> bool:
        """Whether somebody waits who may be called inside the handler of this chunk: came while it was in hand. Takes no lock."""
        return any(found.marker is marker for waiting in list(self.waiting) for found in waiting.found)

    def _queue(self, seat: _Seat) -> None:
        if others := self._in_the_way(seat):
            log.warning(
                "%s: a process died while it tried this chunk or a current one; waiting until %s has finished", seat.what, others[0].what
            )
        seat.found = list(self.seats)
        self.waiting.append(seat)

    def _wait(self, seat: _Seat) -> None:
        begun = time.monotonic()
        while self._in_the_way(seat) and (left := begun + self._patience() - time.monotonic()) > 0:
            self.changed.wait(left)

    def _patience(self) -> float:
        return min([PATIENCE_SECONDS, *(PATIENCE_PART * seat.limit for seat in self.seats if seat.limit is not None)])

    def _in_the_way(self, seat: _Seat) -> list[_Seat]:
        if seat.alone:
            return [other for other in self.seats if not other.sends]
        return [other for other in (*self.seats, *self.waiting) if other.alone and other is not seat]


def _disturb(seat: _Seat, others: list[_Seat]) -> None:
    """Note that they are not alone. Their stores may be away: waits for at most STOPPING_SECONDS."""
    log.warning("%s: waited too long for %s; going on beside it", seat.what, others[0].what)
    _note([other.marker.disturbed for other in others if other.marker is not None])


class _Noter:
    """A thread for the end of the process, where Python 3.12 starts none any more. Nothing else uses it, so it is never busy then.

    https://docs.python.org/3/library/threading.html#threading.Thread.start
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[list[Callable[[], None]], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="dedup notes", daemon=True).start()

    def note(self, calls: list[Callable[[], None]]) -> None:
        """Call these, and wait for them."""
        done = threading.Event()
        self._calls.put((calls, done))
        done.wait(STOPPING_SECONDS)

    def _serve(self) -> None:
        while True:
            calls, done = self._calls.get()
            _call_all(calls)
            done.set()


def _note(calls: list[Callable[[], None]]) -> None:
    """Call these in another thread, which is waited for at most STOPPING_SECONDS; their errors are left out."""
    noting = threading.Thread(target=_call_all, args=(calls,), daemon=True)
    try:
        noting.start()
    except RuntimeError:  # the interpreter starts no thread any more
        if _noter is not None:
            _noter.note(calls)
    else:
        noting.join(STOPPING_SECONDS)


def _be_ready() -> None:
    """Start the thread that notes, once a process. Two threads that come at once may start two, which harms nothing."""
    global _noter
    if _noter is None:
        _noter = _Noter()


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        with contextlib.suppress(Exception):
            call()


_room = _Room()
_noter: _Noter | None = None
_inside: ContextVar[bool] = ContextVar("dedup_inside", default=False)
_own: ContextVar[_Room | None] = ContextVar("dedup_room", default=None)


def be_a_process() -> None:
    """From here on this context counts as a process of its own: a simulation has many of them in one. Waits for nobody."""
    _own.set(_Room())


def _begin_anew() -> None:
    """A process that was forked tries nothing of its parent's."""
    global _room, _noter
    _room, _noter = _Room(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def seat(marker: CrashMarker, chunk: Callable[[], str], what: str, limit: float | None = None) -> Iterator[None]:
    """The block is a chunk: alone in this process where a process died in it before, else beside others.

    Args:
        chunk: gives its ident.
        what: names it in the log.
        limit: seconds of one run of its handler; None: any time.

    Crash: the markers of the chunks in hand are there; that of one which was alone counts.
    """
    with taken(what, marker, alone=marker.suspects(chunk), limit=limit):
        yield


def sending(what: str) -> AbstractContextManager[bool]:
    """The block calls a destination, which may take long. It waits for a suspect in hand as any other.

    A suspect does not wait for it, and is not alone beside it: then its death counts for nothing. Crash: as for `seat`.
    """
    return taken(what, sends=True)


@contextmanager
def taken(
    what: str, marker: CrashMarker | None = None, *, alone: bool = False, limit: float | None = None, sends: bool = False
) -> Iterator[bool]:
    """The block is beside others, or alone; yields whether it is alone.

    A consumer that is called inside a handler is part of that handler's chunk: it waits for nobody. In a thread that does not tell so it
    waits for a while. Crash: as for `seat`.
    """
    if _inside.get():
        if marker is not None:
            marker.seated(alone=False)
        yield False
        return
    if marker is not None:
        _be_ready()
    mine, room, token = _Seat(marker, alone, what, limit, sends), _own.get() or _room, None
    try:
        room.enter(mine)
        token = _inside.set(True)
        _seated(mine)
        yield mine.alone
    finally:
        if token is not None:
            _inside.reset(token)
        room.leave(mine)


def _seated(seat: _Seat) -> None:
    """Tell its marker. Looks twice: whoever sits down beside it meanwhile says so before it notes it."""
    if seat.marker is not None:
        seat.marker.seated(alone=seat.alone)
        if not seat.alone:
            seat.marker.seated(alone=False)


@contextmanager
def entered(what: str, context: AbstractContextManager[T]) -> Iterator[T]:
    """The context, entered beside others: reading a batch may take the memory of the process. The block itself is not in hand."""
    with ExitStack() as stack:
        with taken(what):
            made = stack.enter_context(context)
        yield made


def blame(guilty: CrashMarker) -> None:
    """This process ends because of what is tried under this marker: the others in hand have nothing to do with it.

    Where somebody waits who may be called inside its handler, it may have hung because of that wait: its end counts for nothing.

    Crash: what is not noted makes a chunk a suspect.
    """
    with contextlib.suppress(Exception):
        if _room.holds_up(guilty):
            guilty.disturbed()
        else:
            guilty.convict()
    for other in list(_room.seats):
        if other.marker is not None and other.marker is not guilty:
            with contextlib.suppress(Exception):
                other.marker.survived()


def stop() -> None:
    """This process was asked to stop: its end says nothing of what is in hand. Waits for at most STOPPING_SECONDS.

    Called at the exit of the interpreter, and by `Consumer.run` at SIGTERM; call it in a SIGTERM handler of your own.

    Crash: what is not noted makes a chunk a suspect.
    """
    if found := [each.marker.stop for each in list(_room.seats) if each.marker is not None]:
        _note(found)


atexit.register(stop)


@contextmanager
def stopping_at_sigterm() -> Iterator[None]:
    """While the block runs, SIGTERM ends the process as ever, but is noted first.

    Where SIGTERM has a handler, and outside the main thread, it does nothing. A handler that is set meanwhile stays.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _stop_and_end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _stop_and_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop_and_end(number: int, frame: FrameType | None) -> None:
    stop()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
