"""What keeps the checkpoints of another system up to date, from a thread of its own: what one look does is a subclass's.

A system that cannot be reached stops nobody; it shows in the log and in `health`.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from checkpoint import given
from checkpoint.errors import DedupError
from checkpoint.given import Duration

_log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two looks of a mirror: what KEDA asks at by default."""

MIRROR: given.Settings = {"every": given.duration("30.0", above=0)}
"""What a mirror takes beside where it writes, what it writes and what reads it."""


@dataclass(frozen=True)
class Mirrored:
    """What one look has done, by partition."""

    written: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()  # what is there is further on than we are: left alone
    unknown: tuple[str, ...] = ()  # no offset is known, so that a processor could not resume from there: left alone
    raced: tuple[str, ...] = ()  # somebody else wrote in between: looked at again next time
    foreign: tuple[str, ...] = ()  # another program wrote what is there: left alone


@dataclass(frozen=True)
class Health:
    """How a mirror fares."""

    looks: int = 0  # that ended well
    written: int = 0  # checkpoints
    last: dt.datetime | None = None  # of the last look that ended well, UTC
    failures: int = 0  # looks in a row that failed
    error: str | None = None  # of the last of these
    ahead: tuple[str, ...] = ()  # partitions that are left alone: see Mirrored
    unknown: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


class Mirror:
    """Looks again and again until it is stopped, and then a last time.

    Args:
        what: whose checkpoints these are, for the log.
        where: where they are mirrored to, for the log.
        every: the time between the beginnings of two looks, as a timedelta or in seconds.
    """

    def __init__(self, what: object, where: str, every: Duration) -> None:
        given.check(MIRROR, {"every": every})
        self._what, self._where, self._every = what, where, given.to_seconds(every)
        self._ending, self._thread = threading.Event(), threading.Thread(target=self._run, name="dedup mirror", daemon=True)
        self.health = Health()

    def start(self) -> Self:
        """Begin; returns itself."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Until it is stopped, by another thread or by Ctrl-C."""
        self._thread.join()

    def stop(self, timeout: Duration = 30.0) -> None:
        """Look a last time, and end. A look that hangs is left behind after this time."""
        self._ending.set()
        self._thread.join(given.to_seconds(timeout))

    def look(self) -> None:
        """Mirror once. Never raises: what went wrong is logged and in `health`.

        Crash: what is mirrored is behind until the next look of any mirror.
        """
        try:
            done = self._mirror()
        except Exception as error:  # noqa: BLE001  a mirror must not end because of what it mirrors
            self._failed(str(error) if isinstance(error, DedupError) else self._told(error))
            return
        for left, before, why in (
            (done.ahead, self.health.ahead, "it is ahead of our checkpoints"),
            (done.foreign, self.health.foreign, "another program wrote there"),
        ):
            if left and left != before:
                _log.warning("%s: %s is left as it is, since %s: partitions %s", self._what, self._where, why, ", ".join(left))
        looks, written = self.health.looks + 1, self.health.written + len(done.written)
        self.health = Health(looks, written, dt.datetime.now(dt.UTC), 0, None, done.ahead, done.unknown, done.foreign)

    def _mirror(self) -> Mirrored:
        """One look."""
        raise NotImplementedError

    def _told(self, error: Exception) -> str:
        """What went wrong, without secrets."""
        return type(error).__name__

    def _failed(self, why: str) -> None:
        self.health = replace(self.health, failures=self.health.failures + 1, error=why)
        _log.warning("%s: mirroring checkpoints to %s failed (%d in a row): %s", self._what, self._where, self.health.failures, why)

    def _run(self) -> None:
        pause = 0.0
        while not self._ending.wait(pause):
            begun = time.monotonic()
            self.look()
            pause = max(0.0, self._every - (time.monotonic() - begun))
        self.look()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
