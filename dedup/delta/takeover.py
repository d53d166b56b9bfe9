"""Who may commit: taking an epoch, and the heartbeat that says a long batch is alive.

Promises that a live instance is not taken over without force, and that one which is provably gone is taken over at once.
Called by the store.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow.fs as pafs

from checkpoint.errors import CommitConflict, StillHeld, StoreUnavailable
from dedup.delta.decide import Decision, decide
from dedup.delta.state import ConsumerState
from dedup.delta.storage import Options, filesystem, is_local
from dedup.delta.turns import Note
from dedup.process import is_alive, this_process
from dedup.store import Head, Holder

log = logging.getLogger("dedup")


@dataclass(frozen=True)
class Heartbeat:
    """One small file per consumer; that its content changes is the sign of life."""

    note: Note

    def read(self) -> str | None:
        """The content now; None where there is none."""
        return self.note.read()

    def write(self, epoch: int) -> None:
        """Replace the content. Raises StoreUnavailable. Crash: the old or the new content is there."""
        process = this_process()
        self.note.write(json.dumps({"epoch": epoch, "host": process.host, "pid": process.pid, "beat": uuid.uuid4().hex}))

    @contextmanager
    def beating(self, epoch: int, every: float) -> Iterator[None]:
        """While the block runs, a thread writes a new content every `every` seconds."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(epoch, every, done), name="dedup-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self, epoch: int, every: float, done: threading.Event) -> None:
        while True:
            try:
                self.write(epoch)
            except (OSError, StoreUnavailable) as error:
                log.warning("heartbeat of %s cannot be written: %s", self.note.name, error)
            if done.wait(every):
                return


@dataclass(frozen=True)
class Takeover:
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


def take_epoch(state: ConsumerState, heartbeat: Heartbeat, rules: Takeover) -> Head:
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
            decide(state, Decision(header), rules.on_step)
        except CommitConflict:
            continue  # somebody else was quicker: who holds it has to be asked again
        return state.header.head


def _free(state: ConsumerState, mine: Holder) -> bool:
    """Whether nobody holds the epoch or shares it, or provably nobody any more. This very process may take over from itself."""
    alone = () if state.header.holder is None else (state.header.holder,)
    return all(is_gone(held, mine) for held in (alone if state.header.members is None else state.header.members))


def is_gone(held: Holder, mine: Holder) -> bool:
    """Whether that process is this very one, or provably no more."""
    process = (held.host, held.pid, held.started)
    return process == (mine.host, mine.pid, mine.started) or is_alive(*process) is False


def _who(state: ConsumerState) -> str:
    held = state.header.members or ([state.header.holder] if state.header.holder else [])
    return "; ".join(f"process {one.pid} on {one.host}" for one in held) or "another instance"


def _wait(state: ConsumerState, heartbeat: Heartbeat, rules: Takeover) -> None:
    """Return after `takeover_after` seconds without a sign of life; raise StillHeld after twice that with some."""
    started = quiet_since = time.monotonic()
    signs = (state.header.seq, heartbeat.read())
    while time.monotonic() - quiet_since < rules.takeover_after:
        who = _who(state)
        if time.monotonic() - started > 2 * rules.takeover_after:
            raise StillHeld(
                f"Consumer {state.ledger.consumer!r} is held by {who}, which is alive (epoch {state.header.head.epoch}). "
                "Stop it first, or take over by force."
            )
        rules.on_wait(time.monotonic() - started, who)
        time.sleep(min(1.0, rules.takeover_after / 4))
        state.catch_up()
        state.require_sound()
        if rules.joins(state) or _free(state, rules.holder):
            return
        if (now := (state.header.seq, heartbeat.read())) != signs:
            signs, quiet_since = now, time.monotonic()


def exists(root: str, options: Options) -> bool:
    """Whether a store folder is there at all."""
    if is_local(root):
        return bool(pafs.LocalFileSystem().get_file_info(root).type == pafs.FileType.Directory)
    return bool(filesystem(root, options).get_file_info(pafs.FileSelector("", allow_not_found=True)))
