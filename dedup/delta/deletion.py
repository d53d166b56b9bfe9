"""Deleting a consumer: one decision of its ledger, then its rows, its files, and a second decision that says that all of it is gone.

Promises that after the first decision no instance of the consumer decides anything, whenever it comes back; that nothing can be begun under
the name until the second one; and that a consumer which gets the name afterwards begins as a new one. So the ledger stays as a table with
two rows, and the logs of the other tables stay: an instance that was stopped for a year and commits against the version that it knows meets
them. In an empty folder its commit would land. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow.fs as pafs

from checkpoint import changes
from checkpoint.errors import CommitConflict, PublicationStuck, StillHeld, StoreRestored, StoreUnavailable
from checkpoint.head import Present
from deadletter.selection import Selection
from dedup.core.deletion import Allowed, Deletion, no_consumer, require, running, waits
from dedup.delta import tables, verify
from dedup.delta.commit import Decision, SinkPublisher, commit_decision
from dedup.delta.consumers import AMEND_ATTEMPTS, States
from dedup.delta.ledger import DELETE, DELETED, HELD, KEYS, LOG, Header
from dedup.delta.messages import ROWS_BITS
from dedup.delta.outbox import DeltaOutbox, take_turn
from dedup.delta.sequences import WAITING
from dedup.delta.state import ConsumerState
from dedup.delta.storage import StorageOptions, answering, filesystem, remove, safe_name
from dedup.delta.upkeep import amendment, require_own_tables

FOLDERS = ("ledger", "dead_letters", "outbox", "staged")
"""Folders in which the consumer has one of its own; and in "keys", of files of keys or of their copies."""

TURNS = ("letters_turn", "batch_turn", "crash_marker", "heartbeat")
"""Folders of small files, of which the consumer has some."""


class Deleting:
    """The part of `DeltaStore` that removes consumers."""

    path: str
    storage_options: StorageOptions
    on_step: Callable[[str], None]
    _states: States

    def _publisher(self, state: ConsumerState) -> SinkPublisher:
        raise NotImplementedError

    def publish(self, consumer: str) -> int:
        """Make committed batches visible in their sinks; returns how many."""
        raise NotImplementedError

    def outbox(self, consumer: str) -> DeltaOutbox:
        """The messages that this consumer has published."""
        raise NotImplementedError

    def present(self, consumer: str) -> list[Present]:
        """The processes that hold the consumer's epoch or share it."""
        raise NotImplementedError

    def delete_consumer(
        self,
        consumer: str,
        *,
        although_running: bool = False,
        although_waiting: bool = False,
        dry_run: bool = False,
        by: str,
        reason: str,
    ) -> Deletion:
        """Delete everything that is kept of a consumer. Its ledger says from then on who did that and why. Sinks stay as they are.

        Args:
            although_running: also if an instance runs or may run; it ends with `Fenced`.
            although_waiting: also with letters that are open or blocked, messages that are not sent, or rows that a sink does not show yet
                and that cannot be published now, also where a sink cannot be reached. They are lost.
            dry_run: change nothing; returns what there is and what speaks against it.

        Raises:
            ConfigError: there is no such consumer. Refused: it runs, or something waits.
            StillHeld: it decides too often.

        Crash: nothing has changed; or it is decided, no instance commits, and the next call deletes the rest.
        """
        allowed = Allowed(although_running, although_waiting)
        found = self._found(consumer, dry_run=dry_run)
        if dry_run:
            return found
        require(found, allowed)
        if not found.under_way:
            found = self._decide(consumer, allowed, by, reason)
        self._finish(consumer)
        return found

    def _found(self, consumer: str, *, dry_run: bool) -> Deletion:
        with self._states.caught_up(consumer) as state:
            if state.table is None or state.header.kind == DELETED:
                raise no_consumer(consumer, self._states.names())
            if state.header.kind == DELETE:
                return Deletion(consumer, {}, under_way=True, dry_run=dry_run)
            parts, waiting = self._contents(consumer, state)
            return Deletion(consumer, parts, running(self.present(consumer)), waiting, dry_run=dry_run)

    def _contents(self, consumer: str, state: ConsumerState) -> tuple[dict[str, int], tuple[str, ...]]:
        """How much there is, and what is not done. Raises StoreUnavailable where not only a sink cannot be reached."""
        outbox, files = self.outbox(consumer), state.ledger.files_now()
        parts = {
            "checkpoints": len(state.header.head.checkpoints),
            "decisions": state.header.seq,
            "reservations": sum(f.rows for f in files if f.section in (KEYS, HELD)),
        }
        try:
            with suppress(PublicationStuck, StoreRestored):
                self.publish(consumer)
            lag, publisher = outbox.lag(), self._publisher(state)
            letters, unshown = verify.letters_now(state, publisher), verify.unpublished_since(state, publisher)
            parts["dead letters"] = letters.select(Selection(limit=None), ["id"]).num_rows
            counts = {
                "open or blocked dead letters": letters.select(Selection(statuses=WAITING, limit=None), ["id"]).num_rows,
                "messages that are not sent": lag.waiting + lag.dead + lag.behind,
                "decisions that a sink does not show yet": len(state.pending) if unshown else 0,
            }
        except (PublicationStuck, StoreRestored) as error:
            return parts, (f"state that contradicts itself ({error})",)
        except StoreUnavailable as error:
            require_own_tables(state)
            return parts, (f"a sink of which nobody can tell what it shows ({error})",)
        return {**parts, "messages": outbox.count()}, waits(counts)

    def _decide(self, consumer: str, allowed: Allowed, by: str, reason: str) -> Deletion:
        """Look and decide, against the very decision that was looked at; returns what there was.

        Crash: it is decided, or nothing has changed.
        """
        for _ in range(AMEND_ATTEMPTS):
            with self._states.caught_up(consumer) as state:
                found = self._found(consumer, dry_run=False)
                require(found, allowed)
                if found.under_way:
                    return found
                self.on_step("decide_deletion")
                self._states.hint_of_deletion(consumer).write(consumer)
                try:
                    commit_decision(state, Decision(_decision(state, self._publisher(state), allowed, by, reason)), lambda _: None)
                except CommitConflict:
                    continue
                return found
        raise StillHeld(f"Consumer {consumer!r} decides too often: it was not deleted. Stop it first.")

    def _finish(self, consumer: str) -> None:
        """Delete the rest of a consumer whose deletion is decided, and decide that it is gone.

        Crash: a part of it is gone; the next call goes on.
        """
        while True:
            with self._states.caught_up(consumer) as state:
                if state.header.kind != DELETE:
                    return
                self._empty(state)
                state.catch_up()
                self._sweep(state)
                self.on_step("note_deletion")
                last, now = state.header, dt.datetime.now(dt.UTC)
                if last.kind != DELETE:
                    return
                header = state.following(DELETED, uuid.uuid4().hex, now, last.head, by=last.by, reason=last.reason)
                try:
                    commit_decision(state, Decision(header), lambda _: None)
                except CommitConflict:
                    continue  # another call has done the same
                return

    def _empty(self, state: ConsumerState) -> None:
        """Delete the rows of everything that was decided before the deletion.

        By the number of the decision: a call that is slow must not touch what a new consumer of that name has decided meanwhile. Claims of
        dispatchers have none, and stay: they hold nothing but turns.

        Crash: rows of some tables are gone.
        """
        before, (messages, marks) = state.header.seq, state.outbox_uris()
        decided = f"seq < {before}"
        rows = {state.letters_uri: decided, messages: decided, marks: f"number >= 0 and number < {before << ROWS_BITS}"}
        self._act(marks, partial(take_turn, self._states.engine))
        for uri, where in {**rows, state.ledger.uri: decided}.items():
            self.on_step("empty_table")
            self._act(uri, partial(self._states.engine.delete, where=where))
        state.ledger.forget()

    def _act(self, uri: str, act: Callable[[Any], object]) -> None:
        """Do something with a table, if there is one. Raises StoreUnavailable."""
        table = self._states.engine.handle(uri).look()
        try:
            if table is not None:
                act(table)
        except tables.FAILED as error:
            raise StoreUnavailable(f"The table {uri} of the consumer that is being deleted could not be emptied: {error}") from error

    def _sweep(self, state: ConsumerState) -> None:
        """Delete files that no table needs, among them those of attempts that never decided.

        What is listed before the ledger is seen to end with the deletion cannot be of a new consumer: that begins after `note_deletion`.

        Crash: some of them are gone.
        """
        name, engine, ours = (
            safe_name(state.ledger.consumer),
            self._states.engine,
            (state.ledger.uri, state.letters_uri, *state.outbox_uris()),
        )
        self.on_step("list_files")
        found = [info for folder in (*FOLDERS, "keys") for info in self._files(f"{folder}/{name}")]
        small = [info.path for folder in TURNS for info in self._files(folder) if info.base_name.partition("@")[0] == name]
        state.catch_up()
        if state.header.kind != DELETE:
            return
        self.on_step("sweep_files")
        folders = tuple(self._below(uri) for uri in ours)
        gone = [info.path for info in found if not info.path.startswith(folders)]  # staged rows, keys, an outbox without ledger
        for uri in self._certain(state) if engine.tells_files else ():
            gone += self._unnamed(state, uri, found)
        for uri in ours:
            self._act(uri, lambda table: engine.vacuum(table, full=False, at_once=True))
        remove(self.path, self.storage_options, [*gone, *small])
        if (folder := state.keys.folder.path) is not None:
            shutil.rmtree(folder, ignore_errors=True)
        state.keys.forget()

    def _certain(self, state: ConsumerState) -> list[str]:
        """URIs of the tables to which nobody can commit a file any more that is there already.

        Marks of messages are committed by dispatchers, without the ledger. Files of letters and messages whose publication was given up may
        be in the hands of who has decided them.
        """
        given_up = {sink for _, sink in state.header.dropped}
        return [state.ledger.uri, *(uri for sink, uri in state.own_tables().items() if sink not in given_up)]

    def _unnamed(self, state: ConsumerState, uri: str, found: list[pafs.FileInfo]) -> Iterator[str]:
        """Files of a table that its newest snapshot does not name, without its log.

        Only those that are older than the file of the deletion itself: another call may be writing that of its end.
        """
        table, below = self._states.engine.handle(uri).look(), self._below(uri)
        named = {below + path for path in self._states.engine.listed(table)} if table is not None else set()
        ledger = {self._below(state.ledger.uri) + file.path for file in state.ledger.files_now() if file.section == LOG}
        since = min((info.mtime_ns for info in found if info.path in ledger and info.mtime_ns is not None), default=0)
        mine = (info for info in found if info.path.startswith(below) and "/_delta_log/" not in info.path and info.path not in named)
        yield from (info.path for info in mine if info.mtime_ns is not None and info.mtime_ns < since)

    def _below(self, uri: str) -> str:
        """The path of a table's folder below that of the store."""
        return f"{uri.removeprefix(self.path).strip('/')}/"

    def _files(self, folder: str) -> Iterator[pafs.FileInfo]:
        """The files in a folder below that of the store."""
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        with answering(self.path):
            infos = filesystem(self.path, self.storage_options).get_file_info(selector)
        yield from (info for info in infos if info.type == pafs.FileType.File)


def _decision(state: ConsumerState, publisher: SinkPublisher, allowed: Allowed, by: str, reason: str) -> Header:
    """The header that says: from now on nobody commits, and nothing of before counts. What is decided is published first."""
    header = amendment(state, publisher, changes.deleted, by=by, reason=reason, give_up=allowed.waiting)
    head = replace(header.head, epoch=header.head.epoch + 1)
    unshown = tuple((seq, entry.name) for seq in sorted(state.pending) for entry in state.decided[seq].sinks)
    nobody: dict[str, Any] = {"holder": None, "held_since": header.committed_at, "members": None, "claims": {}}
    return replace(header, kind=DELETE, head=head, marks={}, pending=(), dropped=unshown, **nobody)
