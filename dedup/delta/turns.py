"""The stream and people's decisions about letters take turns: both commit to one ledger, and whoever comes second plans again.

Two small files per consumer beside the ledger, which decide nothing: without them, or with wrong ones, work is done twice or waits a
little, and the commit is still the judge. Somebody who wants a turn leaves a *wish*; a stream that finds one leaves a *claim* and waits
until that wish is through. So neither goes twice while the other waits. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.fs as pafs

from checkpoint.errors import StoreUnavailable
from dedup.delta.header import Header
from dedup.delta.storage import Options, filesystem, is_local, put, remove
from dedup.delta.tables import DELTA_ERRORS
from dedup.process import is_alive, this_process
from dedup.store import Holder

LETTERS_WAIT = 60.0
"""Seconds that letters wait for a batch at most."""

STREAM_WAIT = 10.0
"""Seconds that a batch waits for letters at most."""

FRESH = 60.0
"""Seconds after which a heartbeat is old."""

_POLL = 0.02


@dataclass(frozen=True)
class Note:
    """One small file below the store's folder."""

    root: str
    options: Options
    folder: str
    name: str  # safe name of the consumer

    def read(self) -> str | None:
        """The content; None where there is none."""
        try:
            with filesystem(self.root, self.options).open_input_stream(self._path) as stream:
                return bytes(stream.read()).decode()
        except DELTA_ERRORS:
            return None

    def write(self, text: str) -> None:
        """Replace the content in one piece. Raises StoreUnavailable. Crash: the old or the new content is there."""
        content = pa.py_buffer(text.encode())
        if not is_local(self.root):
            put(self.root, self.options, self._path, content)
            return
        temporary = f"{self._path}.{uuid.uuid4().hex}.tmp"
        put(self.root, self.options, temporary, content)
        try:
            filesystem(self.root, self.options).move(temporary, self._path)
        except DELTA_ERRORS as error:
            raise StoreUnavailable(f"The note {self._path} below {self.root} could not be kept: {error}") from error

    def keep(self, text: str | None) -> None:
        """Replace the content, or delete it. Crash: as `write` says."""
        if text is None:
            self.drop()
        else:
            self.write(text)

    def drop(self, content: str | None = None) -> None:
        """Delete it, or only this content of it. One that is not there is no error."""
        if content is None or self.read() == content:
            remove(self.root, self.options, [self._path])

    def age(self) -> float | None:
        """Seconds since it was written, by the clocks of the storage and of this machine; None where there is none."""
        info = filesystem(self.root, self.options).get_file_info(self._path)
        if info.type != pafs.FileType.File or info.mtime is None:
            return None
        return float((dt.datetime.now(dt.UTC) - info.mtime).total_seconds())

    @property
    def _path(self) -> str:
        return f"{self.folder}/{self.name}"


@dataclass
class Turns:
    """The turns of one consumer, as one process takes them."""

    wish: Note
    claim: Note
    trial: Note
    heartbeat: Note
    _ignored: set[str] = field(default_factory=set)  # wishes that were waited for in vain
    _thread: threading.local = field(default_factory=threading.local)

    @classmethod
    def of(cls, root: str, options: Options, name: str) -> Turns:
        """Those of the consumer with this safe name."""
        wish, claim, trial, heartbeat = (Note(root, options, folder, name) for folder in ("turn", "claim", "trial", "heartbeat"))
        return cls(wish, claim, trial, heartbeat)

    def trial_of(self, scope: str) -> Note:
        """The marker of one claimed partition, or of the whole consumer."""
        if not scope:
            return self.trial
        return replace(self.trial, name=f"{self.trial.name}@{hashlib.sha256(scope.encode()).hexdigest()[:32]}")

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The block is a batch: it waits for somebody who wished for a turn, at most STREAM_WAIT seconds, and has the next one.

        Crash: a claim may be left behind; letters see that its process is gone.
        """
        wish = None if getattr(self._thread, "wishing", False) else self.wish.read()
        if wish is None or wish in self._ignored or _gone(wish):
            yield
            return
        claim = _sign()
        self.claim.write(claim)
        try:
            if not _until(lambda: self.wish.read() != wish or _gone(wish), STREAM_WAIT):
                self._ignored.add(wish)
            yield
        finally:
            self.claim.drop(claim)

    @contextmanager
    def letters(self, newest: Callable[[], Header]) -> Iterator[None]:
        """The block is a decision about letters: it waits for the batch that runs, at most LETTERS_WAIT seconds, and has the next turn.

        Args:
            newest: gives the header of the newest decision.

        Crash: a wish may be left behind; a stream waits for it once, or sees that its process is gone.
        """
        wish = _sign()
        self.wish.write(wish)
        self._thread.wishing = True
        try:
            first = newest()
            if self._busy(first.holder):
                _until(lambda: newest().seq != first.seq or not self._busy(first.holder), LETTERS_WAIT)
            yield
        finally:
            self._thread.wishing = False
            self.wish.drop(wish)

    def _busy(self, holder: Holder | None) -> bool:
        """Whether a batch runs, or is about to, in a process that lives."""
        claim = self.claim.read()
        if claim is not None and not _gone(claim):
            return self._fresh(self.claim)
        if self.trial.read() is None or holder is None:
            return False
        alive = is_alive(holder.host, holder.pid, holder.started)
        return self._fresh(self.trial) if alive is None else alive

    def _fresh(self, note: Note) -> bool:
        """Whether it was written, or a heartbeat, a short while ago."""
        return any(age is not None and age < FRESH for age in (note.age(), self.heartbeat.age()))


def _sign() -> str:
    return json.dumps([*this_process(), uuid.uuid4().hex])


def _gone(sign: str) -> bool:
    """Whether the process that signed is known to be dead."""
    try:
        host, pid, started, _ = json.loads(sign)
    except ValueError:
        return True
    return is_alive(host, pid, started) is False


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Poll, a little more slowly each time; whether it came true."""
    end, pause = time.monotonic() + seconds, _POLL
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(1.0, pause * 1.2)
    return True
