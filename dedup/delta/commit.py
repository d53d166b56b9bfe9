"""Commit a decision by one commit of the ledger, then publish it: make the sinks show it.

Promises that a decision is committed only against the snapshot that it was planned on, right after the decision before it, and that its
outcome is read back from the ledger. Called by the transaction, the takeover and the store.

Publication reads only the ledger. A transaction id in the sink records what the sink has taken: any number of publishers may try, and the
sink takes each decision once and in order. Called by the store after each decision and before each transaction, and by the command that
repairs sinks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from checkpoint.errors import CommitConflict, CommitUnknown, PublicationStuck, SinkMismatch, StoreUnavailable, command
from deadletter.store import KEYS as KEYS_SCHEMA
from dedup.delta import sinks, tables
from dedup.delta.files import Add
from dedup.delta.fit import check_schema
from dedup.delta.ledger import (
    BATCH,
    HEADER,
    HELD,
    KEYS,
    LOG,
    ORDER,
    Header,
    LogRow,
    Mark,
    SinkFiles,
    freed_rows,
    log_rows,
    reservations,
)
from dedup.delta.ledger_log import batch_docs
from dedup.delta.restores import Publication, require_same, require_unrestored
from dedup.delta.sequences import LASTS, ledger_rows
from dedup.delta.sinks import NoTable, Sink
from dedup.delta.state import ConsumerState
from dedup.delta.storage import StorageOptions, by_objects, filesystem, is_away, join, missing, remove, require_spark_may_commit
from dedup.delta.tables import ID_BITS, part_version, seq_of

MAINTENANCE_RACES = 20
"""How often a decision is tried again because a commit that decides nothing (compaction) came first."""

_OF_AN_EPOCH = ("batch", "epoch", "join", "leave", "claim")
"""Decisions of instances that hold the epoch; what people decide is planned again under the next one."""

MERGE_ATTEMPTS = 20
"""The same for a merge, which gives way to any other commit."""

ERRORS = 3
"""Errors that are no outage and no lost race, until a person is asked: each may read the whole sink. An OPTIMIZE in between may be one."""

ATTEMPTS = 5
"""How often one publication is tried while others commit to the same sink."""

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 2.0
"""Seconds, at most, before the second try after others committed, and before any later one. Between them they double."""


@dataclass(frozen=True)
class Decision:
    """Everything that has to become true with one commit of the ledger."""

    header: Header
    batches: pa.Table | None = None
    keys: pa.Table = field(default_factory=KEYS_SCHEMA.empty_table)
    held: pa.Table = field(default_factory=KEYS_SCHEMA.empty_table)  # keys that a letter of this decision holds
    freed: pa.Table = field(default_factory=KEYS_SCHEMA.empty_table)  # keys that are new again; some may be reserved by this very decision
    lasts: pa.Table = field(default_factory=LASTS.empty_table)  # of the sequences whose letters change


def commit_decision(state: ConsumerState, decision: Decision, on_step: Callable[[str], None]) -> None:
    """Commit the decision to the ledger, or raise.

    Raises:
        Fenced, CommitConflict: another decision came first, of a newer epoch or of this one.
        CommitUnknown: the answer was lost, and the ledger cannot be read back.
        StoreUnavailable: the commit failed, and the ledger does not show it.
        StoreRestored: the ledger was restored or re-created.

    Crash: before the commit nothing is true; from then on everything is, and the next reader of the ledger sees it.
    """
    try:
        _commit(state, decision, on_step)
    finally:
        state.ledger.forget_written()


def _commit(state: ConsumerState, decision: Decision, on_step: Callable[[str], None]) -> None:
    header = decision.header
    state.require_sound_for(header)
    adds = write_files(state, decision)
    on_step("decide")
    for _ in range(MAINTENANCE_RACES):
        table = state.table_to_write()
        if not state.is_at(header):  # somebody decided since this was planned, even if the newest snapshot would take it
            return _judge(state, header)
        failure = _try(state, table, adds, header)
        on_step("read_back")
        _read_back(state, failure)
        if not state.is_at(header):
            return _judge(state, header)
        state.require_sound_for(header)
        if failure is None and state.sinks.engine.skips:
            raise state.skipped(header.seq)
        if failure is None:
            raise CommitUnknown(f"The ledger {state.ledger.uri} took decision {header.seq} but does not return it when it is read again.")
        if not isinstance(failure, tables.COMMIT_REFUSED):
            raise StoreUnavailable(f"The ledger {state.ledger.uri} could not be written; nothing was committed: {failure}") from failure
    raise CommitConflict(f"The ledger {state.ledger.uri} is rewritten too often (compaction?). Nothing was committed; run the batch again.")


def _try(state: ConsumerState, table: DeltaTable, adds: list[Add], header: Header) -> Exception | None:
    """One commit against the snapshot that was read; returns what delta-rs raised."""
    transactions = {state.ledger.app(table, header.head.generation): header.version}
    if header.head.generation != state.header.head.generation:
        # The old generation's number moves on, too: a restore to before this decision is then seen by comparing it.
        old = state.ledger.app(table, state.header.head.generation)
        shown = seq_of(tables.transaction_of(table, old) or 0)
        transactions[old] = max(shown, state.header.seq) + 1 << ID_BITS
    try:
        state.ledger.commit(table, adds, transactions)
    except tables.FAILED as error:
        return error
    return None


def _read_back(state: ConsumerState, failure: Exception | None) -> None:
    try:
        state.catch_up()
    except StoreUnavailable as error:
        raise CommitUnknown(f"{CommitUnknown.__doc__} ({failure or 'committed'}; then: {error})") from (failure or error)


def _judge(state: ConsumerState, header: Header) -> None:
    """Whose decision has this number?"""
    winner = state.decided.get(header.seq)
    if winner is not None and winner.attempt == header.attempt:
        return
    if header.kind in _OF_AN_EPOCH and state.header.head.epoch > header.head.epoch:
        raise state.fenced()
    by = f" ({winner.kind})" if winner else ""
    raise CommitConflict(f"Decision {header.seq} of consumer {state.ledger.consumer!r} was made by another commit{by} first. Plan again.")


def write_files(state: ConsumerState, decision: Decision) -> list[Add]:
    """Write the ledger's own files of a decision; returns what the commit adds.

    Crash: no commit names these files; they are invisible, and a full VACUUM removes them.
    """
    header, day = decision.header, decision.header.committed_at.date()
    rows: list[LogRow] = [(HEADER, None, None, None, header.to_json()), *state.positions(header)]
    rows.extend((BATCH, *doc) for doc in batch_docs(decision.batches) if decision.batches is not None)
    kept, held = (reservations(header.seq, keys["key"], keys["payload_hash"]) for keys in (decision.keys, decision.held))
    lasts = state.sequences.after(decision.lasts) if header.order_since == header.seq else decision.lasts
    sections = [
        (LOG, log_rows(header.seq, rows)),
        (KEYS, kept),
        (HELD, pa.concat_tables([held, freed_rows(header.seq, decision.freed["key"])])),
        (ORDER, ledger_rows(lasts, header.seq)),
    ]
    return state.ledger.write_all(day, sections)


@dataclass(frozen=True)
class SinkPublisher:
    """Publishes decisions of one consumer: makes its sinks show them.

    Args:
        root: the store's own folder; staged rows are below it.
        spark: gives the Spark side for sinks that delta-rs must not write; raises ConfigError where there is no Spark.
    """

    state: ConsumerState
    root: str
    options: StorageOptions
    spark: Callable[[], Any]
    sleep: Callable[[float], None] = time.sleep
    just_written: str = ""  # attempt of the decision whose files this process has written just now

    def publish(self) -> int:
        """Publish every pending decision, ascending; returns how many are known to be published by this call.

        Raises:
            PublicationStuck: a sink refuses, was replaced or restored, or files are gone; names seq, sink and what to do.
            StoreRestored: a sink shows a decision that the ledger does not have, or has another one for.
            StoreUnavailable: the storage of a sink is away, or others commit to it without a pause; the decision stands.

        Crash: each (decision, sink) is done or not; whoever publishes next goes on there.
        """
        count = 0
        self.state.agreement.require_none_behind()
        for seq in sorted(self.state.pending):
            header = self.state.decided[seq]
            given_up = {name for dropped, name in self.state.header.dropped if dropped == seq}
            done = [self._publish_one(header, e) for e in header.sinks if e.name not in given_up]
            self.state.pending.discard(seq)
            count += any(done)
        return count

    def _publish_one(self, header: Header, entry: SinkFiles) -> bool:
        """Whether it took a commit of this process."""
        failure: Exception | None = None
        tried, errors = False, 0
        for attempt in range(ATTEMPTS if entry.merge is None else MERGE_ATTEMPTS):
            sink = self._open(header, entry)
            if self._finds_done(header, entry, sink, tried=tried):
                return tried and failure is None  # after a refusal it was somebody else, or cannot be told
            if errors == ERRORS:
                break
            try:
                if not self._has_files(header, entry, sink):
                    continue
                self._check_schema(header, entry, sink)
                tried = True
                if self._add(header, entry, sink):
                    return True
            except MemoryError:  # Arrow's is an ArrowException, too
                raise
            except (*tables.FAILED, pa.ArrowException) as error:  # of Arrow: a staged file that is damaged
                failure = error
                self.state.sinks.forget(sink.uri)
                errors += not (is_away(error) or isinstance(error, tables.COMMIT_REFUSED))
                if tables.lost_race(error):
                    self.sleep(random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)))
        raise self._not_published(header, entry, failure) from failure

    def _finds_done(self, header: Header, entry: SinkFiles, sink: Sink, *, tried: bool) -> bool:
        """Whether the sink shows it. Raises StoreRestored where it shows what the ledger does not know."""
        what = self.publication(header, entry)
        shown = tables.transaction_of(sink.table, what.app)
        if shown != what.version and header.head.generation == self.state.header.head.generation:
            self.state.require_in_step(entry.name, sink.table)
        if not what.is_reached(shown):
            return False
        require_unrestored(self.state, sink, header.seq, entry, what)
        self._mark(header, entry, sink, sink.table.version(), shown)
        if entry.staged:
            remove(self.root, self.options, [add.path for add in entry.adds])
        return True

    def _not_published(self, header: Header, entry: SinkFiles, failure: Exception | None) -> StoreUnavailable | PublicationStuck:
        if is_away(failure):
            return StoreUnavailable(
                f"Decision {header.seq} ({entry.rows} rows) is made; the storage of sink {entry.name!r} at {entry.uri} does not take it "
                f"now: {failure}. Whoever comes next publishes it."
            )
        if tables.lost_race(failure):
            return StoreUnavailable(
                f"Decision {header.seq} ({entry.rows} rows) is made; others commit to the sink {entry.name!r} at {entry.uri} so often that "
                "it could not be published. Whoever comes next publishes it. Let others pause, or give the consumer its own table."
            )
        return PublicationStuck(
            f"Decision {header.seq} ({entry.rows} rows) cannot be published to the sink {entry.name!r} at {entry.uri}: {failure}. "
            f"Repair the sink and run {command('sink', 'sync', self.state.ledger.consumer)}."
        )

    def app(self, header: Header, sink: str) -> str:
        """The application id under which a sink shows the last decision it took."""
        return self.state.app(header.head.generation, sink)

    def publication(self, header: Header, entry: SinkFiles) -> Publication:
        """What the sink shows once it has taken this entry; the last one of a decision shows the decision."""
        app = self.app(header, entry.name)
        if entry.is_last:
            return Publication(app, header.version)
        return Publication(f"{app}/parts", part_version(header.seq, header.attempt, entry.part), whole=False)

    def is_done(self, header: Header, entry: SinkFiles) -> bool:
        """Whether the table under the entry's name shows it."""
        table = self.state.sinks.table(self.state.place_of(entry, header.seq))
        return table is not None and self.shows(table, header, entry)

    def shows(self, table: DeltaTable, header: Header, entry: SinkFiles) -> bool:
        """Whether this table does."""
        return self.publication(header, entry).shown_by(table)

    def _open(self, header: Header, entry: SinkFiles) -> Sink:
        consumer, mark = self.state.ledger.consumer, self.state.marks.get(entry.name)
        try:
            sink = self.state.sinks.open(entry.name, self.state.place_of(entry, header.seq))
        except SinkMismatch as error:
            advice = (
                f"What it would take: the table back under that name, or {command('sink', 'accept', consumer, entry.name)} "
                "once a new one is there; with --at ADDRESS where the table was moved to."
                if isinstance(error, NoTable)
                else f"Look whether its rows are there already; if not, run {command('sink', 'sync', consumer)} after that."
            )
            raise PublicationStuck(f"Decision {header.seq} ({entry.rows} rows) cannot be published: {error} {advice}") from error
        expected = mark.table_id if mark and mark.accepted >= header.seq else entry.table_id
        require_same(self.state, sink, expected, mark)
        return sink

    def _has_files(self, header: Header, entry: SinkFiles, sink: Sink) -> bool:
        """Before files are added: are they there? False where another publisher was quicker, and removed them."""
        if header.attempt == self.just_written and by_objects(sink.uri, self.options):
            return True  # the storage has just said so
        if not self.missing(entry, sink.uri):
            return True
        self.state.sinks.forget(sink.uri)
        now = self.state.sinks.table(sink.uri)
        if now is not None and self.shows(now, header, entry):
            return False
        self.require_files(header, entry, sink.uri)
        return True

    def require_files(self, header: Header, entry: SinkFiles, sink_uri: str) -> None:
        """Raise PublicationStuck where files of an entry are not there."""
        if gone := self.missing(entry, sink_uri):
            raise PublicationStuck(
                f"Decision {header.seq} for the sink {entry.name!r}: {len(gone)} of {len(entry.adds)} files with its rows are gone "
                f"(VACUUM, or the folder was deleted or copied back): {', '.join(gone[:3])}. Bring them back, or give those rows up with "
                f"{command('sink', 'accept', self.state.ledger.consumer, entry.name, '--lost')}."
            )

    def missing(self, entry: SinkFiles, sink_uri: str) -> list[str]:
        """Files of an entry that are not there."""
        return missing(self.root if entry.staged else sink_uri, self.options, [add.path for add in entry.adds])

    def _check_schema(self, header: Header, entry: SinkFiles, sink: Sink) -> None:
        """Where the table has changed since the rows were checked: do they still fit? Of appends by Spark, Spark says it."""
        try:
            if entry.merge is not None:
                sinks.refuse_append_only(sink)  # a property, which no fingerprint has
            if sink.fingerprint == entry.fingerprint:
                return
            if entry.merge is not None:
                sinks.staged_rows(sink, filesystem(self.root, self.options), entry.adds)
            elif not entry.staged:
                self._check_files(entry, sink)
        except SinkMismatch as error:
            raise PublicationStuck(
                f"Decision {header.seq} ({entry.rows} rows) was made when the sink {entry.name!r} had other columns or properties: {error} "
                f"Change it back and run {command('sink', 'sync', self.state.ledger.consumer)}."
            ) from error

    def _check_files(self, entry: SinkFiles, sink: Sink) -> None:
        """Raise SinkMismatch where the sink must not take these files as they are."""
        system, add = filesystem(sink.uri, self.options), entry.adds[0]
        with system.open_input_file(add.path) as file:
            written = pq.ParquetFile(file).schema_arrow
        if sink.special or sorted(add.partition_values) != sorted(sink.partition_by):
            raise SinkMismatch("it has other partition columns now, or features that forbid adding files: " + ", ".join(sink.special))
        for column in sink.partition_by:
            written = written.append(sink.schema.field(column))
        check_schema(written, sink.schema, entry.name, uri=sink.uri)

    def _add(self, header: Header, entry: SinkFiles, sink: Sink) -> bool:
        """Try one publication; returns whether it is known to be done.

        Crash: the sink shows all of it, with the transaction id, or nothing of it.
        """
        app, version, _ = self.publication(header, entry)
        files = [join(self.root, add.path) for add in entry.adds]
        if self._by_spark(entry, sink):
            # Spark skips a transaction id that is there already, silently: whether it is done is read back from the table.
            if entry.merge is None:
                self.spark().append(sink.uri, files, app, version)
            else:
                self.spark().merge(sink.uri, files, entry.merge, app, version)
            self.state.sinks.engine.took(sink.table, app, version)
            return False
        if entry.merge is not None:
            self.state.sinks.forget(sink.uri)  # the handle moves on with the merge
            sinks.merge_staged(sink, filesystem(self.root, self.options), entry.adds, entry.merge, {app: version})
            return False
        made = tables.commit(sink.table, entry.adds, {app: version}, exact=False)
        self._mark(header, entry, sink, made, header.version)
        return True

    def _by_spark(self, entry: SinkFiles, sink: Sink) -> bool:
        """Whether only Spark may publish it. Raises ConfigError where that has become so, and commits of Spark are not safe there."""
        if entry.mode == "files" and entry.merge is not None and sinks.needs_spark(sink):
            require_spark_may_commit(sink.uri, self.options)
            return True
        return entry.mode == "rows"

    def _mark(self, header: Header, entry: SinkFiles, sink: Sink, version: int, shown: int | None) -> None:
        """Keep how far the sink is, in this version of it."""
        old = self.state.marks.get(entry.name)
        same = old if old and old.table_id == sink.table_id else None
        if not entry.is_last:  # what it shows of whole decisions is what it showed before
            shown = same.shown if same and same.generation == header.head.generation else None
        accepted = same.accepted if same else 0
        self.state.marks[entry.name] = Mark(header.seq, sink.table_id, version, sink.uri, header.head.generation, shown, accepted)
        self.state.agreement.took(entry.name, sink.table, version)
