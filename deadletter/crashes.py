"""What a process was trying when it died: an event that kills or hangs the process must not do so for ever.

Before a chunk's handler runs, a marker outside the transaction says which rows are about to be tried. A process that finds the marker of
its own chunk knows that another one died there. After MAX_DEATHS of them the chunk is tried in halves, each marked, until the event that
kills is alone: it is parked as CRASHED without being run again. Pure but for the two functions that keep the marker.

A death counts for what caused it. The first one makes a chunk a suspect and no more: it may have been a deploy, another query of the
process, or the commit. A suspect is tried with nothing beside it (pipeline/company.py), and the end of the try is noted: only a death in
such a try counts, or one whose cause is known, as where `handler_timeout` ended the process for this very chunk.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from checkpoint.position import Ints

MAX_DEATHS = 3
"""Deaths in one chunk before it is tried in parts, or once more where it is one event: the first, whatever it was, and two that count."""

Span = tuple[int, int]
"""First and last row of a part of the chunk."""


@dataclass(frozen=True)
class Marker:
    """What the marker says."""

    chunk: str = ""  # which rows these are: equal for the same chunk delivered again
    deaths: int = 0
    dead: tuple[Span, ...] = ()  # parts that a process died in after MAX_DEATHS
    running: Span | None = None
    sure: bool = True  # whether a death is the doing of what runs: else the process may have died of something else

    @classmethod
    def read(cls, text: str | None) -> Marker:
        """The marker as it was kept; none is an empty one, and so is one of a runner's (pipeline/member.py), whose batches are others."""
        known = json.loads(text) if text else {}
        if "running" not in known:
            return cls()
        running = known["running"]
        dead = tuple((a, b) for a, b in known["dead"])
        return cls(known["chunk"], known["deaths"], dead, tuple(running) if running else None, known.get("sure", True))

    def kept(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self))

    def resumed(self, chunk: str) -> Marker:
        """The marker of this chunk in a new process."""
        if self.chunk != chunk:
            return Marker(chunk)
        if self.running is None:
            return self
        deaths = self.deaths + 1 if self.sure else max(self.deaths, 1)
        return replace(self, deaths=deaths, dead=(*self.dead, self.running) if self._tells(deaths) else self.dead, running=None)

    def _tells(self, deaths: int) -> bool:
        """Whether this death says something of the part that was tried: of a chunk of one event, only if that was tried for this."""
        assert self.running is not None
        first, last = self.running
        return self.sure and (deaths > MAX_DEATHS or (deaths == MAX_DEATHS and first < last))


class CrashMarker:
    """The marker of one process of a consumer. The thread that tries uses it, and whoever ends the process.

    Args:
        alone: whether nothing is tried in other processes meanwhile that could end this one.
    """

    def __init__(self, load: Callable[[], str | None], save: Callable[[str | None], None], *, alone: bool = True) -> None:
        self._load, self._save, self._alone = load, save, alone
        self._marker: Marker | None = None
        self._accompanied, self._stopped, self._lock = False, False, threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _lock=threading.RLock())

    def begin(self, chunk: str) -> None:
        """This chunk is next. Only the first one of a process can be one that another process died in.

        A process that goes on after `stop` keeps markers again.
        """
        self._stopped = False
        if self._marker is None:
            self._marker = Marker.read(self._load()).resumed(chunk)
        elif self._marker.chunk != chunk:
            self._marker = Marker(chunk)

    def tries(self, chunk: str) -> bool:
        """Whether the marker is of this chunk, or would be: that of a later one, in which processes die, is left to that one."""
        marker = self._marker or Marker.read(self._load())
        return marker.chunk == chunk

    def forget(self, chunk: str) -> None:
        """This chunk is decided: a marker of it was left by a process that died right after its commit.

        Crash: the marker is there or not; the next one who finds the chunk decided removes it.
        """
        if self.tries(chunk):
            self._save(None)

    @property
    def deaths(self) -> int:
        """How many processes died in this chunk."""
        return self._marker.deaths if self._marker else 0

    @property
    def careful(self) -> bool:
        """Whether the chunk is tried in parts."""
        return bool(self._marker and self._marker.dead)

    def kills(self, rows: Ints) -> bool:
        """Whether a process died in a part that lies within these rows."""
        dead = self._marker.dead if self._marker else ()
        return any(rows[0] <= first and last <= rows[-1] for first, last in dead)

    def suspects(self, chunk: Callable[[], str]) -> bool:
        """Whether a process died in this chunk, for whatever reason. Asked before it begins.

        Args:
            chunk: gives its ident; called only where there is a suspect.
        """
        if self._marker is not None:
            return self._marker.deaths > 0 and self._marker.chunk == chunk()
        left = Marker.read(self._load())
        return left.resumed(left.chunk).deaths > 0 and left.chunk == chunk()

    def seated(self, *, alone: bool) -> None:
        """Whether the next try has this process for itself."""
        with self._lock:
            self._accompanied = not alone

    def mark(self, rows: Ints) -> None:
        """Note that these rows are tried now.

        Crash: the marker is written or not; without it the death in there is not counted.
        """
        with self._lock:
            if self._marker is not None and not self._stopped:
                sure = self._alone and not self._accompanied and self._marker.deaths > 0
                self._marker = replace(self._marker, running=(int(rows[0]), int(rows[-1])), sure=sure)
                self._keep()

    def survived(self) -> None:
        """The process lives, or ends for another reason: whoever comes next has not found a death."""
        with self._lock:
            if self._marker is not None and self._marker.running is not None:
                self._marker = replace(self._marker, running=None)
                self._keep()

    def disturbed(self) -> None:
        """Something is tried beside it from here on."""
        self.seated(alone=False)
        self._judge(sure=False)

    def convict(self) -> None:
        """The process is ended because of what runs: the death counts, whatever is tried beside it."""
        self._judge(sure=True)

    def stop(self) -> None:
        """The process was asked to stop: until the next chunk begins, its end says nothing of what it tries."""
        with self._lock:
            self._stopped = True
            self.survived()

    def _judge(self, *, sure: bool) -> None:
        with self._lock:
            if self._marker is not None and self._marker.running is not None and self._marker.sure != sure:
                self._marker = replace(self._marker, sure=sure)
                self._keep()

    def _keep(self) -> None:
        assert self._marker is not None
        self._save(self._marker.kept())


def cancelled(left: Mapping[str, str]) -> dict[str, str]:
    """Markers of tasks that were ended because somebody cancelled their job: no death of theirs says anything of what they tried.

    Args:
        left: scope -> marker. Returns those that change.
    """
    markers = {scope: Marker.read(text) for scope, text in left.items()}
    return {scope: replace(marker, running=None).kept() for scope, marker in markers.items() if marker.running is not None}


def untried() -> CrashMarker:
    """For what no marker is kept of: letters that are reprocessed."""
    return CrashMarker(_nothing, _forget)


def _nothing() -> None:
    """No marker."""


def _forget(text: str | None) -> None:
    """Keep none."""
