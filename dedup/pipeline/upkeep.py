"""The upkeep that a consumer does by itself (`Limits(upkeep=True)`): turns in a thread of its own, beside batches.

A turn begins after a batch where one is due. So it is never in a batch's transaction, and no batch waits for it: neither for a portion that
takes long, nor, where a handler is slow, does the upkeep wait for the batch. It does small portions, and rests after each of them for three
times as long as it took, so that it takes a quarter of a core at most. Batches fail for nothing that happens here: after three failures in
a row the upkeep rests for an hour, and the log says what to do.
Called by the consumer and by the members of a runner, after their batches.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpoint.errors import command
from dedup import logs
from dedup.core.retention import UpkeepTurn

log = logging.getLogger("dedup")

_STOPPING = 5.0
"""Seconds that a stop waits for the portion that runs."""


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
        by_hand: the command that does the same.
    """

    def __init__(self, consumer: str, begin: Callable[[], UpkeepTurn], by_hand: str, pace: Pace | None = None) -> None:
        self._consumer, self._begin, self._by_hand, self._pace = consumer, begin, by_hand, pace or Pace()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._turn: UpkeepTurn | None = None
        self._due, self._failed, self._kept = 0.0, 0, tuple[str, ...]()

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

    def stop(self) -> None:
        """End the turn that runs, if one does, with the portion in hand, which is cancelled where that can be done.

        A later batch begins another one.

        Crash: as of `after_batch`.
        """
        with self._lock:
            thread, turn = self._thread, self._turn
            self._stopping.set()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            if turn is not None:
                turn.stop()
            thread.join(_STOPPING)

    def _run(self, stopping: threading.Event) -> None:
        with logs.about(consumer=self._consumer):
            try:
                self._go(stopping)
            except Exception as error:  # noqa: BLE001 - a thread of ours: no batch fails for it
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

    def _note(self, error: Exception, stopping: threading.Event) -> None:
        if stopping.is_set():  # it was cancelled
            return
        self._failed += 1
        if self._failed < self._pace.failures:
            self._due = time.monotonic() + self._pace.every / 10
            log.info("%s: its upkeep failed, and is tried again: %s", self._consumer, error)
            return
        self._due = time.monotonic() + self._pace.pause
        log.warning(
            "%s: its upkeep failed %d times, and rests for %s. The stream goes on, and old reservations stay. Run %s, which tells what is "
            "wrong. The last error: %s",
            self._consumer,
            self._failed,
            dt.timedelta(seconds=self._pace.pause),
            self._by_hand,
            error,
        )


def by_hand(retention: dt.timedelta) -> str:
    """The command that does what the upkeep does by itself."""
    return command("upkeep", "--retention", f"{retention.total_seconds():.0f}s", "--yes")
