"""DeltaStore: one ledger table per consumer decides, sinks follow.

Promises the Store of dedup/core/store.py on Delta tables, with commits by delta-rs (on object storage by `snapshot.py`), or by Spark
(`engine="spark"`). With delta-rs no Spark is needed except for sinks that only Spark may write. Each part is a module of this package; this
one holds them together. Entering, leaving and claiming are decisions of the ledger, so a batch that was planned before one of them is
planned again, and finds out. `STEPS` says step by step what a dying process leaves behind. Called by the consumer and by the command line.
"""

from __future__ import annotations

import datetime as dt
import importlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal

import pyarrow as pa

from checkpoint import given
from checkpoint.errors import CommitConflict, PublicationStuck, StillHeld, StoreRestored
from checkpoint.head import Claim, Head, Holder, Present
from checkpoint.holders import is_alive
from checkpoint.position import Partition
from checkpoint.records import ALL, RecordFilter
from deadletter.letter import HISTORY
from deadletter.selection import Selection
from dedup.core.retention import Remains
from dedup.core.settings import DELTA_STORE
from dedup.delta import erasure, ledger_log, letters, upkeep, verify
from dedup.delta.commit import Decision, SinkPublisher, commit_decision
from dedup.delta.consumers import AMEND_ATTEMPTS, States
from dedup.delta.deletion import Deleting
from dedup.delta.engine import DeltaRs, SparkEngine
from dedup.delta.epoch import Heartbeat, TakeoverRules, holders, is_gone, take_epoch
from dedup.delta.ledger import DELETED, Header
from dedup.delta.letters import ALL_LETTERS, Letters
from dedup.delta.outbox import DeltaOutbox
from dedup.delta.sinks import SinkNames
from dedup.delta.state import ConsumerState
from dedup.delta.storage import SPARK, StorageOptions, absolute, options_of, require_put_if_absent, require_spark_may_commit, safe_name
from dedup.delta.tending import Tending, midnight
from dedup.delta.transaction import DeltaTransaction
from dedup.delta.upkeep import acceptance, amendment
from dedup.delta.verify import problems, require_letters
from dedup.delta.writing import Context

log = logging.getLogger("dedup")

STEPS = {
    "catch_up": "Nothing of the batch has happened. The next instance begins here.",
    "redeliveries": "Earlier decisions are published. Nothing of the batch has happened.",
    "reserve": "Nothing is reserved: reservations are rows of the ledger commit.",
    "handler": "Nothing is reserved or written. The next instance runs the handler for the first time.",
    "check": "The handler has run; its rows were not written. It runs again.",
    "files": "No file of the batch exists. The handler runs again.",
    "park": "Files of sink rows exist that no commit names. The handler runs again; VACUUM takes them.",
    "note": "As at park: nothing is decided.",
    "record": "As at park: nothing is decided.",
    "advance": "As at park: nothing is decided.",
    "commit": "As at park: nothing is decided.",
    "decide": "The ledger's own files exist, too, and no commit names them. Nothing is decided.",
    "read_back": "The ledger commit was tried. If it landed, the batch is decided, and the next instance publishes it; if not, nothing is.",
    "publish": "The batch is decided: reservations, letters, batch record and checkpoint are true. The next instance publishes its rows.",
    "published": "Everything is true and visible.",
}
"""Every name given to on_step, in order -> what is true if the process dies right before it."""

MEMBERS = 100
"""Processes of a shared epoch that are on record: each decision repeats them. Who is left out commits as before; nobody waits for it."""


def _noop(_name: str) -> None:
    pass


class Joins:
    """Each method is a decision of its own, or none."""

    path: str
    storage_options: StorageOptions
    _states: States

    def join(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become one of the processes that share the consumer's epoch; returns the head.

        An epoch that is shared is entered; one that a single instance holds is taken over by the rules of `take_epoch`.

        Raises:
            StillHeld: after twice `takeover_after` a single instance still shows signs of life.

        Crash: this process is on record or not; on record, it counts as gone with its process, or after a silence.
        """
        with (state := self._states.of(consumer)).lock:
            rules = TakeoverRules(holder, takeover_after, force, on_wait, lambda _: None, shared=True)
            epoch = take_epoch(state, self._heartbeat(consumer), rules).epoch
            return self._commit_change(state, epoch, "join", lambda header: {"members": _entered(header, holder)}).head

    def leave(self, consumer: str, epoch: int, run_id: str) -> None:
        """Take this process off the record, so that nobody waits for it.

        Crash: as if it had not been called.
        """
        with self._states.caught_up(consumer) as state:
            self._commit_change(state, epoch, "leave", lambda h: {"members": tuple(m for m in h.members or () if m.run_id != run_id)})

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Make one partition this process's own: whoever had it cannot commit any more. It never waits.

        Raises:
            Fenced: a newer epoch was taken.

        Crash: the number is raised or not; raised, nobody commits for the partition until the next claim.
        """
        with self._states.caught_up(consumer) as state:
            raised = self._commit_change(
                state, epoch, "claim", lambda h: {"claims": {**h.claims, partition: h.claims.get(partition, 0) + 1}}
            )
        return Claim(partition, raised.claims[partition], run_id)

    def _commit_change(self, state: ConsumerState, epoch: int, kind: str, change: Callable[[Header], dict[str, Any]]) -> Header:
        """One decision that changes who runs; planned again where another one comes first. Raises Fenced."""
        for _ in range(AMEND_ATTEMPTS):
            state.catch_up()
            state.require_sound()
            if state.header.head.epoch != epoch:
                raise state.fenced()
            now = dt.datetime.now(dt.UTC)
            header = state.following(kind, uuid.uuid4().hex, now, state.header.head, **change(state.header))
            try:
                commit_decision(state, Decision(header), lambda _: None)
            except CommitConflict:
                continue
            return header
        raise StillHeld(f"Consumer {state.ledger.consumer!r} commits too often: no {kind} was committed. Try again.")

    def _heartbeat(self, consumer: str) -> Heartbeat:
        return Heartbeat(self._states.turns(consumer).heartbeat)

    def crash_marker(self, consumer: str, scope: str = "") -> str | None:
        """What `set_crash_marker` kept last under this scope, unless a batch of it was committed since. None where its file is damaged."""
        return self._states.turns(consumer).crash_marker_of(scope).note()

    def set_crash_marker(self, consumer: str, marker: str | None, scope: str = "") -> None:
        """Keep it outside any transaction. Crash: it survives the death of the process, not that of the machine."""
        self._states.turns(consumer).crash_marker_of(scope).keep(marker)

    def heartbeat(self, consumer: str, epoch: int, every: float, run_id: str = "") -> AbstractContextManager[None]:
        """While the block runs, tell other instances every `every` seconds that this one is alive."""
        return self._heartbeat(consumer).beating(epoch, every)


class DeltaStore(Joins, Deleting, Tending):
    """State in Delta tables below `path`. Sinks are any Delta tables. One ledger commit decides each chunk.

    Args:
        path: folder or URI of the store; created when the first consumer starts.
        tables: sink name -> path or URI, for names that are neither a path nor a table of Spark's catalog.
        storage_options: credentials and settings for delta-rs, for the store and all sinks. A function that returns them is called in each
            process, every five minutes: tokens may expire, and nothing that Spark sends to its tasks has a credential.
        engine: "spark" where delta-rs gets no credentials: then Spark makes all commits.
        keys_folder: folder of this machine for files of reserved keys, which a start opens in place of reading the ledger. By default
            they are below `path` where that is a folder, and otherwise in the system's temporary folder, until the process ends. Beside a
            store on object storage there are copies of them, which a process without files fetches. Several stores may share it: each
            consumer has a folder there, `NAME@HASH`, with a hash of `path`.
        on_step: called with each step's name right before it acts.

    Raises:
        ConfigError: the storage cannot decide between two writers.
    """

    steps: ClassVar[Mapping[str, str]] = STEPS
    default_max_events: ClassVar[int] = 250_000

    def __init__(
        self,
        path: str,
        tables: Mapping[str, str] | None = None,
        storage_options: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        on_step: Callable[[str], None] = _noop,
        engine: Literal["delta-rs", "spark"] = "delta-rs",
        keys_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        given.check(DELTA_STORE, locals())
        self.path = absolute(str(path))
        self.storage_options: StorageOptions = options_of(storage_options)
        self.on_step = on_step
        require_put_if_absent(self.path, self.storage_options)
        if engine == SPARK:
            require_spark_may_commit(self.path, self.storage_options)
        commits = SparkEngine.at(self.path) if engine == SPARK else DeltaRs(self.storage_options)
        self._names = SinkNames.of(tables or {}, self.storage_options, commits)
        self.tables = self._names.tables
        self._states = States(self.path, self.storage_options, commits, keys_folder)

    def __repr__(self) -> str:
        return f"DeltaStore({self.path!r}{', engine=spark' * (self._states.engine.name == SPARK)})"

    def migrate(self, *, dry_run: bool = False) -> list[str]:
        """Check that this library knows the state of every consumer. There is nothing to apply: each ledger is made by its first decision.

        Args:
            dry_run: is the same.

        Raises:
            StateTooNew, SchemaOutdated: a newer library wrote here, or an older one.
        """
        for consumer in self.consumers():
            self.head(consumer)
        return []

    def take_epoch(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become the one instance that may commit; returns the new head. Waits `takeover_after` seconds for a live or unknowable holder.

        Raises:
            StillHeld: after twice `takeover_after` the other instance still shows signs of life.

        Crash: either nothing has changed, or older instances are fenced and this one counts as gone.
        """
        with (state := self._states.of(consumer)).lock:
            return take_epoch(state, self._heartbeat(consumer), TakeoverRules(holder, takeover_after, force, on_wait, _noop))

    def head(self, consumer: str) -> Head:
        """The state now. Of a consumer that was deleted nothing but the epoch."""
        with self._states.caught_up(consumer) as state:
            known = state.header.head
            return Head(consumer, epoch=known.epoch) if state.header.kind == DELETED else known

    @contextmanager
    def begin(self, consumer: str, epoch: int, claim: Claim | None = None) -> Iterator[DeltaTransaction]:
        """Open the transaction of one chunk; decisions that are not published yet are published first.

        Args:
            claim: the partition of the chunk, where the epoch is shared.

        Raises:
            Fenced: a newer epoch was taken.
            PartitionLost: another process claimed the partition.
            StoreRestored: the ledger is older than this instance, or than a table that it publishes to.
            PublicationStuck: an earlier decision cannot be published, or a table lacks one that was.

        Crash: without a commit nothing of the chunk is true; what was published of earlier decisions stays published.
        """
        self.on_step("catch_up")
        with self._states.turns(consumer).stream(), self._states.caught_up(consumer) as state:
            state.require_sound()
            known = state.header.head.epoch
            if known > epoch:
                raise state.fenced()
            if known < epoch:
                raise StoreRestored(
                    f"The ledger of consumer {consumer!r} is at epoch {known}, this instance at {epoch}: the ledger is the older one."
                )
            if claim is not None:
                state.require_claim(claim)
            self._publisher(state).publish()
            yield DeltaTransaction(state, self._context(consumer, claim))

    @contextmanager
    def begin_letters(self, consumer: str, *, positions: bool = False) -> Iterator[DeltaTransaction]:
        """Open a transaction of letters under the epoch that there is.

        It has its turn between two batches of a running stream: each waits for the other, for a while (epoch.py). Of two decisions the
        later one is planned again (CommitConflict), so nothing more is needed for `positions`.

        Raises:
            ConfigError: there is no such consumer.
            StoreRestored: the ledger contradicts itself, or a table that it publishes to.
            PublicationStuck: an earlier decision cannot be published, or a table lacks one that was.

        Crash: without a commit nothing of the transaction is true; a stream waits for its request once, or sees that its process is gone.
        """
        turn = self._states.turns(consumer).letters(lambda: self._states.header(consumer))
        with turn, self._states.existing(consumer) as state:
            state.require_sound()
            self._publisher(state).publish()
            yield DeltaTransaction(state, self._context(consumer), "letters")

    def amend(self, consumer: str, change: Callable[[Head], Head], *, by: str, reason: str) -> Head:
        """Replace the head by `change(head)`, recorded with who and why. A running instance plans its batch again.

        Where the change begins all over, it gives up decisions that a sink does not take or that cannot reach it; the log names them.

        Raises:
            ConfigError: there is no such consumer.
            PublicationStuck, StoreUnavailable: a sink does not take what is decided, and the change does not begin all over.
            StoreRestored: the ledger was restored, and the change does not begin a new generation.

        Crash: the change is made, with its record, or it is not.
        """
        return self._states.commit_planned(
            consumer, lambda state: amendment(state, self._publisher(state), change, by=by, reason=reason)
        ).head

    def accept_sink(
        self, consumer: str, sink: str, *, at: str | None = None, lost: bool = False, by: str, reason: str, dry_run: bool = False
    ) -> None:
        """Go on with the table that is under a sink's name now: it was dropped and created again, moved, or restored, on purpose.

        What was published before stays out of it. What is decided and not published goes there.

        Args:
            at: where the table was moved to; by default it is where `tables` says, or where it was.
            lost: give up decided rows whose files are gone.
            dry_run: raise what the change would raise, and change nothing.

        Raises:
            ConfigError: the consumer has never written to that sink, or `at` is no address.
            Refused: `at` is given, and a table is still where the sink was.
            SinkMismatch: there is no table.
            PublicationStuck: files with decided rows are gone, and `lost` is not said.

        Crash: it is accepted, with its record, or it is not.
        """
        uri = self.tables.get(sink) if at is None else self._names.uri(at)

        def plan(state: ConsumerState) -> Header:
            return acceptance(state, self._publisher(state), sink, uri, moved=at is not None, lost=lost, by=by, reason=reason)

        if dry_run:
            with self._states.existing(consumer) as state:
                state.require_sound_for(plan(state))
            return
        self._states.commit_planned(consumer, plan)

    def views(self, spark: Any) -> list[str]:
        """Temporary views of the state as of now; returns their names: dedup_checkpoints, dedup_batches, dedup_reservations,
        dedup_dead_letters, dedup_letter_history, dedup_blocked_sequences.
        """
        ledgers = {name: self._states.of(name).ledger.uri for name in self.consumers()}
        history = pa.concat_tables([HISTORY.empty_table(), *(one.history() for one in self._letters(Selection()))])
        more = {"dedup_letter_history": history, "dedup_blocked_sequences": self._states.blocked()}
        return list(importlib.import_module("dedup.spark.delta").create(self, ledgers, more, spark))

    def publish(self, consumer: str) -> int:
        """Make committed batches visible in their sinks; returns how many.

        Raises:
            PublicationStuck: a sink refuses, or lacks what was published; names what to do.
            StoreRestored: the ledger contradicts itself, or a table that it publishes to.

        Crash: whoever publishes next goes on.
        """
        with self._states.caught_up(consumer) as state:
            state.require_sound()
            return self._publisher(state).publish()

    def outbox(self, consumer: str) -> DeltaOutbox:
        """The messages that this consumer has published."""
        return DeltaOutbox(consumer, self._states, self.publish, self._messages_waiting, self.on_step)

    def consumers(self) -> list[str]:
        """Names, sorted."""
        return self._states.names()

    def was_used(self) -> bool:
        """Whether the folder has, or had, a consumer: deleted ones leave a trace. Raises StoreUnavailable."""
        return self._states.was_used()

    def present(self, consumer: str) -> list[Present]:
        """The processes that hold the consumer's epoch or share it; only those of this host can be known to be alive or gone."""
        with self._states.caught_up(consumer) as state:
            return [Present(one.host, one.pid, is_alive(one.host, one.pid, one.started)) for one in holders(state.header)]

    def batches(self, consumer: str, record_filter: RecordFilter = ALL) -> pa.Table:
        """Batch records (BATCHES + generation, epoch, seq, committed_at), in seq order."""
        with self._states.caught_up(consumer) as state:
            return ledger_log.batches(state.ledger, record_filter)

    def letters(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Dead letters (LETTERS + duplicates) in position order; those that are decided and not yet published are among them.

        Raises:
            ConfigError: `selection.after` names no letter.
        """
        return letters.select(self._letters(selection), selection, ALL_LETTERS.names if columns is None else list(columns))

    def groups(self, selection: Selection) -> pa.Table:
        """GROUPS: the selected letters by fingerprint and kind, the largest first; the limit counts groups."""
        return letters.groups(self._letters(selection), selection)

    def history(self, *letter_ids: str) -> pa.Table:
        """HISTORY of these letters, each one's oldest first."""
        parts = [one.history(letter_ids) for one in self._letters(Selection())] if letter_ids else []
        return pa.concat_tables([HISTORY.empty_table(), *parts])

    def named(self, consumer: str, key: str, hashes: Sequence[bytes] = ()) -> list[str]:
        """Ids of the letters that show this idempotence key, or showed it, or had one of these hashes, before an edit."""
        return sorted({id for one in self._letters(Selection(consumer)) for id in one.named(key, hashes)})

    def scrub(self, consumer: str, *, dry_run: bool = False) -> list[Remains]:
        """Write the files anew that still hold what letters lost by `Erase`, and delete what left the tables long enough ago.

        Returns where it can still be found: files that left a table stay as long as the table says, for those who read older versions, and
        what attempts have staged that failed stays for a week.

        Raises:
            CommitConflict: others commit to a table all the time.

        Crash: each table has its old files or its new ones; the next call goes on.
        """
        turn = self._states.turns(consumer).letters(lambda: self._states.header(consumer))
        with turn, self._states.existing(consumer) as state:
            state.require_sound()
            self._publisher(state).publish()
            uris = (state.letters_uri, *state.outbox_uris())
            staged = (self.path, self.storage_options, safe_name(consumer), upkeep.needed_files(state))
            if not dry_run:
                ids = verify.letters_now(state, self._publisher(state)).forgotten()
                self.on_step("scrub")
                erasure.blanked(self._states.engine, state.letters_uri, erasure.of_letters(ids))
                self.on_step("expire")
                upkeep.expire(uris, self._states.engine)
                upkeep.clear_staged(*staged, dt.datetime.now(dt.UTC))
            found = [one for uri in uris for one in erasure.expiring(self._states.engine, uri)]
            found += upkeep.staged_left(*staged)
            return [*found, erasure.bounds(state.ledger.uri)]

    def reserved(self, consumer: str) -> int | None:
        """How many reservations of its current keyspace are kept."""
        with self._states.caught_up(consumer) as state:
            return state.reserved()

    def reserved_since(self, consumer: str) -> dt.datetime | None:
        """The first UTC day of which reservations are kept."""
        with self._states.caught_up(consumer) as state:
            day = state.ledger.reserved_since()
        return None if day is None else midnight(day)

    def unpublished_since(self, consumer: str) -> dt.datetime | None:
        """When the first batch was committed that a sink does not show yet."""
        with self._states.caught_up(consumer) as state:
            return verify.unpublished_since(state, self._publisher(state))

    def require_letters(self, consumer: str) -> None:
        """Raise StoreRestored or PublicationStuck where the ledger or the table of dead letters was taken back, or is another one."""
        with self._states.caught_up(consumer) as state:
            require_letters(state, self._publisher(state))

    def problems(self, consumer: str) -> list[str]:
        """Contradictions only this store can see; empty when all is well."""
        try:
            with self._states.caught_up(consumer) as state:
                return problems(state, self._publisher(state))
        except (StoreRestored, PublicationStuck) as error:
            return [str(error)]

    def close(self) -> None:
        """Forget what was read; waits up to half a minute for copies of files of keys. The store can be used again."""
        self._states.forget()

    def _messages_waiting(self, consumer: str) -> Sequence[verify.Waiting]:
        with self._states.caught_up(consumer) as state:
            return verify.messages_waiting(state, self._publisher(state))

    def _publisher(self, state: ConsumerState) -> SinkPublisher:
        return SinkPublisher(state, self.path, self.storage_options, self._names.spark)

    def _context(self, consumer: str, claim: Claim | None = None) -> Context:
        letters_uri = self._states.of(consumer).letters_uri
        marker = self._states.turns(consumer).crash_marker_of(claim.scope if claim else "")
        return Context(self.path, self.storage_options, self._names.uri, letters_uri, self._names.spark, self.on_step, marker.drop)

    def _letters(self, selection: Selection) -> Iterator[Letters]:
        """The letters of one consumer, or of all in the order of their names."""
        for name in self.consumers() if selection.consumer is None else [selection.consumer]:
            with self._states.caught_up(name) as state:
                found = verify.letters_now(state, self._publisher(state))
            yield found


def _entered(header: Header, holder: Holder) -> tuple[Holder, ...]:
    """With this process, and without those that are provably gone. Of others the last ones: those killed on hosts that are no more stay."""
    others = (m for m in header.members or () if m.run_id != holder.run_id and (m.pid == holder.pid or not is_gone(m, holder)))
    return (*others, holder)[-MEMBERS:]
