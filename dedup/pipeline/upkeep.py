"""The upkeep that a consumer does by itself (`Limits(upkeep=True)`): turns in a thread of its own, beside batches.

A turn begins after a batch where one is due. So it is never in a batch's transaction, and no batch waits for it: neither for a portion that
takes long, nor, where a handler is slow, does the upkeep wait for the batch. It does small portions, and rests after each of them for three
times as long as it took, so that it takes a quarter of a core at most. Batches fail for nothing that happens here: after three failures in
a row the upkeep rests for an hour, and the log says what to do.
Called by the consumer and by the members of a runner, after their batches.
"""

from __future__ import annotations

import atexit
import datetime as dt
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from dedup import logs
from dedup.core.retention import UpkeepTurn

log = logging.getLogger("dedup")

BY_HAND = "`dedup upkeep --yes` with the longest `--retention` that any consumer of this store needs"
"""What does the same, for all consumers: with the retention of one it would forget what another one needs."""

_STOPPING = 5.0
"""Seconds that a stop waits for the portion that runs."""

_ENDING = 30.0
"""Seconds that the end of the process waits for it: an interpreter that ends while a thread is inside delta-rs crashes."""


@dataclass(frozen=True)
class Pace:
    """How often and how much. Times in seconds."""

    every: float = 600.0  # between two turns
    longest: float = 300.0  # of a turn
    rest: float = 3.0  # after a portion, times what it took
    failures: int = 3  # in a row, after which it pauses
    pause: float = 3600.0


class OwnUpkeep:
    """The turns of one consumer in this process.

    Args:
        begin: makes a turn.
    """

    def __init__(self, consumer: str, begin: Callable[[], UpkeepTurn], pace: Pace | None = None) -> None:
        self._consumer, self._begin, self._pace = consumer, begin, pace or Pace()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._turn: UpkeepTurn | None = None
        self._due, self._failed, self._kept = 0.0, 0, tuple[str, ...]()
        _MADE.add(self)

    def after_batch(self) -> None:
        """Begin a turn in its thread, if one is due and none runs. Returns at once, and raises nothing.

        Crash: each portion is done or not; the next turn goes on, of whatever process.
        """
        with self._lock:
            if time.monotonic() < self._due or (self._thread is not None and self._thread.is_alive()):
                return
            self._stopping, self._turn = threading.Event(), None
            self._thread = threading.Thread(target=self._run, args=(self._stopping,), name="dedup upkeep", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends, or the system has no thread left: the next batch tries again
                self._thread = None

    def let_end(self) -> None:
        """Let no further portion begin. Waits for nothing, so that a garbage collection may call it. Crash: as of `after_batch`."""
        self._stopping.set()

    def stop(self, seconds: float = _STOPPING) -> None:
        """End the turn that runs, if one does, with the portion in hand, which is cancelled where that can be done.

        A later batch begins another one.

        Args:
            seconds: how long it waits for the portion.

        Crash: as of `after_batch`.
        """
        with self._lock:
            thread, turn = self._thread, self._turn
            self._stopping.set()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            if turn is not None:
                turn.stop()
            thread.join(seconds)

    def _run(self, stopping: threading.Event) -> None:
        with logs.about(consumer=self._consumer):
            try:
                self._go(stopping)
            except BaseException as error:  # noqa: BLE001 - a thread of ours: no batch fails for it. A panic of delta-rs is no Exception
                self._note(error, stopping)
            else:
                self._failed, self._due = 0, time.monotonic() + self._pace.every

    def _go(self, stopping: threading.Event) -> None:
        turn = self._turn = self._begin()
        until, portions = time.monotonic() + self._pace.longest, turn.portions()
        try:
            while not stopping.is_set() and (began := time.monotonic()) < until and (done := next(portions, None)) is not None:
                took = time.monotonic() - began
                log.debug("%s: upkeep: %s, %.2f s", self._consumer, done, took)
                stopping.wait(self._pace.rest * took)
        finally:
            portions.close()  # it lets go of its connection
        self._tell(turn.kept)

    def _tell(self, kept: tuple[str, ...]) -> None:
        """Once for each reason, as long as it stays the same."""
        for why in kept if kept != self._kept else ():
            log.warning("%s: upkeep: %s", self._consumer, why)
        self._kept = kept

    def _note(self, error: BaseException, stopping: threading.Event) -> None:
        if stopping.is_set():  # it was cancelled
            return
        self._failed += 1
        if self._failed < self._pace.failures:
            self._due = time.monotonic() + self._pace.every / 10
            log.info("%s: its upkeep failed, and is tried again: %s", self._consumer, error)
            return
        self._due = time.monotonic() + self._pace.pause
        log.warning(
            "%s: its upkeep failed %d times, and rests for %s. The stream goes on, and old reservations stay. To see what is wrong, run "
            "%s. The last error: %s",
            self._consumer,
            self._failed,
            dt.timedelta(seconds=self._pace.pause),
            BY_HAND,
            error,
        )


_MADE: weakref.WeakSet[OwnUpkeep] = weakref.WeakSet()
"""Those of this process; one whose thread runs stays."""


@atexit.register
def _end() -> None:
    made, until = list(_MADE), time.monotonic() + _ENDING
    for each in made:
        each.let_end()
    for each in made:
        each.stop(max(until - time.monotonic(), 0.0))
