"""Who may commit: taking an epoch, the heartbeat of a long batch, and turns between the stream and decisions about letters.

Promises that a live instance is not taken over without force, and that an instance which is provably gone is taken over at once.

The stream and people's decisions about letters commit to one ledger, and the one that comes second plans again. To avoid that, they take
turns by small files beside the ledger. These files decide nothing: without them, or with wrong ones, work is done twice or waits a little,
and the commit still judges. A process that decides about letters leaves a *request* for a turn. A stream that finds a request leaves one of
its own and waits until the first is done, so neither goes twice while the other waits. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.fs as pafs

from checkpoint.errors import CommitConflict, StillHeld, StoreUnavailable
from checkpoint.head import Head, Holder
from checkpoint.holders import is_alive, this_process
from dedup.delta.commit import Decision, commit_decision
from dedup.delta.ledger import Header
from dedup.delta.state import ConsumerState
from dedup.delta.storage import StorageOptions, answering, filesystem, is_local, put, read, remove, stats
from dedup.delta.tables import DELTA_ERRORS

log = logging.getLogger("dedup")

LETTERS_WAIT = 60.0
"""Seconds that letters wait for a batch at most."""

STREAM_WAIT = 10.0
"""Seconds that a batch waits for letters at most."""

FRESH = 60.0
"""Seconds after which a heartbeat is old."""

_POLL = 0.02


@dataclass(frozen=True)
class Heartbeat:
    """One small file per consumer; that its content changes is the sign of life."""

    note: SmallFile

    def of(self, epoch: int) -> str | None:
        """The content now, of this epoch or a newer one; None where it is of an older one, whose instance may hang and beat on, or none."""
        content = self.note.read()
        return content if content is not None and _epoch_in(content, epoch) >= epoch else None

    def is_fenced(self, epoch: int) -> bool:
        """Whether the content is of a newer epoch."""
        content = self.note.read()
        return content is not None and _epoch_in(content, epoch) > epoch

    def write(self, epoch: int) -> None:
        """Replace the content. Raises StoreUnavailable. Crash: the old or the new content is there."""
        process = this_process()
        self.note.write(json.dumps({"epoch": epoch, "host": process.host, "pid": process.pid, "beat": uuid.uuid4().hex}))

    def show(self, epoch: int) -> None:
        """`write`, where that can be done now: no work fails for want of a sign of life. Crash: as of `write`."""
        try:
            self.write(epoch)
        except (OSError, StoreUnavailable) as error:
            log.warning("could not write the heartbeat of %s: %s", self.note.name, error, extra={"epoch": epoch})

    @contextmanager
    def beating(self, epoch: int, every: float) -> Iterator[None]:
        """While the block runs, a thread writes a new content every `every` seconds, as long as no newer epoch has one."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(epoch, every, done), name="dedup-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self, epoch: int, every: float, done: threading.Event) -> None:
        self.show(epoch)
        while not done.wait(every):
            if not self.is_fenced(epoch):  # one that hangs must not hide that the other one lives
                self.show(epoch)


def _epoch_in(content: str, unknown: int) -> int:
    """The epoch of who has written this heartbeat; `unknown` where it does not say."""
    try:
        return int(json.loads(content)["epoch"])
    except (ValueError, KeyError, TypeError):
        return unknown


@dataclass(frozen=True)
class TakeoverRules:
    """The rules for one attempt to become the instance that commits."""

    holder: Holder
    takeover_after: float
    force: bool
    on_wait: Callable[[float, str], None]
    on_step: Callable[[str], None]
    shared: bool = False  # the epoch is one that other processes may join

    def joins(self, state: ConsumerState) -> bool:
        """Whether the epoch that there is can be shared."""
        return self.shared and state.header.members is not None


def take_epoch(state: ConsumerState, heartbeat: Heartbeat, rules: TakeoverRules) -> Head:
    """Raise the epoch by a decision of the ledger; or find one that can be shared, and leave it as it is.

    Raises:
        StillHeld: another instance is alive.
        StoreRestored: the ledger contradicts itself.

    Crash: before the decision nothing has changed; after it older instances are fenced, and this one counts as provably gone.
    """
    while True:
        state.catch_up()
        state.require_sound()
        if not (rules.force or rules.joins(state) or _free(state, rules.holder)):
            _wait(state, heartbeat, rules)
        if rules.joins(state):
            return state.header.head
        now = dt.datetime.now(dt.UTC)
        head = replace(state.header.head, epoch=state.header.head.epoch + 1)
        held = {"holder": rules.holder, "held_since": now, "members": () if rules.shared else None}
        header = state.following("epoch", uuid.uuid4().hex, now, head, **held)
        try:
            commit_decision(state, Decision(header), rules.on_step)
        except CommitConflict:
            continue  # somebody else was quicker: who holds it has to be asked again
        # Whoever beats on for an older epoch ends; also where the store was restored, and epochs are lower again.
        heartbeat.show(head.epoch)
        return state.header.head


def _free(state: ConsumerState, mine: Holder) -> bool:
    """Whether nobody holds the epoch or shares it, or provably nobody any more. This very process may take over from itself."""
    return all(is_gone(held, mine) for held in holders(state.header))


def holders(header: Header) -> tuple[Holder, ...]:
    """The processes that hold the epoch or share it."""
    alone = () if header.holder is None else (header.holder,)
    return alone if header.members is None else header.members


def is_gone(held: Holder, mine: Holder) -> bool:
    """Whether that process is this very one, or provably no more."""
    process = (held.host, held.pid, held.started)
    return process == (mine.host, mine.pid, mine.started) or is_alive(*process) is False


def _who(state: ConsumerState) -> str:
    held = state.header.members or ([state.header.holder] if state.header.holder else [])
    return "; ".join(f"process {one.pid} on {one.host}" for one in held) or "another instance"


def _wait(state: ConsumerState, heartbeat: Heartbeat, rules: TakeoverRules) -> None:
    """Return after `takeover_after` seconds without a sign of life; raise StillHeld after twice that with some."""
    started = quiet_since = time.monotonic()
    signs = (state.header.seq, heartbeat.of(state.header.head.epoch))
    while time.monotonic() - quiet_since < rules.takeover_after:
        who = _who(state)
        if time.monotonic() - started > 2 * rules.takeover_after:
            raise StillHeld(
                f"Consumer {state.ledger.consumer!r} is held by {who}, which is alive (epoch {state.header.head.epoch}). "
                "Stop it first. If it must not go on, take over by force: Consumer(..., takeover=Takeover(now=True))."
            )
        rules.on_wait(time.monotonic() - started, who)
        time.sleep(min(1.0, rules.takeover_after / 4))
        state.catch_up()
        state.require_sound()
        if rules.joins(state) or _free(state, rules.holder):
            return
        if (now := (state.header.seq, heartbeat.of(state.header.head.epoch) or signs[1])) != signs:
            signs, quiet_since = now, time.monotonic()


def exists(root: str, options: StorageOptions) -> bool:
    """Whether a store folder is there at all. Raises StoreUnavailable where the storage does not answer."""
    if is_local(root):
        return bool(pafs.LocalFileSystem().get_file_info(root).type == pafs.FileType.Directory)
    with answering(root):
        return bool(filesystem(root, options).get_file_info(pafs.FileSelector("", allow_not_found=True)))


@dataclass(frozen=True)
class SmallFile:
    """One small file below the store's folder."""

    root: str
    options: StorageOptions
    folder: str
    name: str  # safe name of the consumer

    def read(self) -> str | None:
        """The content; None where there is none."""
        try:
            content = read(self.root, self.options, self._path)
        except DELTA_ERRORS:
            return None
        return None if content is None else content.to_pybytes().decode(errors="replace")

    def note(self) -> str | None:
        """The content, a JSON object. None where there is none, or where it is damaged, as by a power cut: that is told in the log."""
        text = self.read()
        try:
            if text is None or isinstance(json.loads(text), dict):
                return text
        except ValueError:
            pass
        log.warning("the small file %s below %s is damaged and is not used: what it counted is counted anew", self._path, self.root)
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
            raise StoreUnavailable(f"The small file {self._path} below {self.root} could not be kept: {error}") from error

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
        (stat,) = stats(self.root, self.options, [self._path])
        return None if stat is None else time.time() - stat.modified

    @property
    def _path(self) -> str:
        return f"{self.folder}/{self.name}"


@dataclass
class Turns:
    """The turns of one consumer, as one process takes them."""

    letters_turn: SmallFile
    batch_turn: SmallFile
    crash_marker: SmallFile
    heartbeat: SmallFile
    _ignored: set[str] = field(default_factory=set)  # requests that were waited for in vain
    _thread: threading.local = field(default_factory=threading.local)

    @classmethod
    def of(cls, root: str, options: StorageOptions, name: str) -> Turns:
        """Those of the consumer with this safe name."""
        letters, batch, marker, heartbeat = (
            SmallFile(root, options, f, name) for f in ("letters_turn", "batch_turn", "crash_marker", "heartbeat")
        )
        return cls(letters, batch, marker, heartbeat)

    def crash_marker_of(self, scope: str) -> SmallFile:
        """The marker of one claimed partition, or of the whole consumer."""
        if not scope:
            return self.crash_marker
        return replace(self.crash_marker, name=f"{self.crash_marker.name}@{hashlib.sha256(scope.encode()).hexdigest()[:32]}")

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The block is a batch: it waits for letters that asked for a turn, at most STREAM_WAIT seconds, and has the next one.

        Crash: its request may be left behind; letters see that its process is gone.
        """
        request = None if getattr(self._thread, "asking", False) else self.letters_turn.read()
        if request is None or request in self._ignored or _gone(request):
            yield
            return
        mine = _sign()
        self.batch_turn.write(mine)
        try:
            if not _until(lambda: self.letters_turn.read() != request or _gone(request), STREAM_WAIT):
                self._ignored.add(request)
            yield
        finally:
            self.batch_turn.drop(mine)

    @contextmanager
    def letters(self, newest: Callable[[], Header]) -> Iterator[None]:
        """The block is a decision about letters: it waits for the batch that runs, at most LETTERS_WAIT seconds, and has the next turn.

        Args:
            newest: gives the header of the newest decision.

        Crash: its request may be left behind; a stream waits for it once, or sees that its process is gone.
        """
        request = _sign()
        self.letters_turn.write(request)
        self._thread.asking = True
        try:
            first = newest()
            if self._busy(first.holder):
                _until(lambda: newest().seq != first.seq or not self._busy(first.holder), LETTERS_WAIT)
            yield
        finally:
            self._thread.asking = False
            self.letters_turn.drop(request)

    def _busy(self, holder: Holder | None) -> bool:
        """Whether a batch runs, or is about to, in a process that lives."""
        request = self.batch_turn.read()
        if request is not None and not _gone(request):
            return self._fresh(self.batch_turn)
        if self.crash_marker.read() is None or holder is None:
            return False
        alive = is_alive(holder.host, holder.pid, holder.started)
        return self._fresh(self.crash_marker) if alive is None else alive

    def _fresh(self, file: SmallFile) -> bool:
        """Whether it was written, or a heartbeat, a short while ago."""
        return any(age is not None and age < FRESH for age in (file.age(), self.heartbeat.age()))


def _sign() -> str:
    return json.dumps([*this_process(), uuid.uuid4().hex])


def _gone(sign: str) -> bool:
    """Whether the process that signed is known to be dead."""
    try:
        host, pid, started, _ = json.loads(sign)
    except (ValueError, TypeError):
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
