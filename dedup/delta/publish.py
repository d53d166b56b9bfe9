"""Publication: what the ledger decided becomes visible in the sinks, each decision once and in order.

Everything published is read from the ledger; a transaction id in the sink says what is done, so that any number of publishers may try.
Called by the store after each decision, before each transaction, and by `dedup publish`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable

from checkpoint.advice import command
from checkpoint.errors import PublicationStuck, SinkMismatch, StoreUnavailable
from dedup.delta import merge, tables
from dedup.delta.fit import check_schema
from dedup.delta.header import Header, Mark, SinkFiles
from dedup.delta.lineage import part_reached, part_version, reached
from dedup.delta.restores import Publication, require_same, require_unrestored
from dedup.delta.sink import Sink
from dedup.delta.state import ConsumerState
from dedup.delta.storage import Options, filesystem, is_away, join, missing, remove

MERGE_ATTEMPTS = 20
"""The same for a merge, which gives way to any other commit."""

ATTEMPTS = 5
"""How often one publication is tried while others commit to the same sink."""


@dataclass(frozen=True)
class Publisher:
    """Publishes for one consumer.

    Args:
        root: the store's own folder; staged rows are below it.
        spark: gives the Spark side for sinks that delta-rs must not write; raises ConfigError where there is no Spark.
    """

    state: ConsumerState
    root: str
    options: Options
    spark: Callable[[], Any]

    def publish(self) -> int:
        """Publish every pending decision, ascending; returns how many are known to be published by this call.

        Raises:
            PublicationStuck: a sink refuses, was replaced or restored, or files are gone; names seq, sink and what to do.
            StoreRestored: a sink shows a decision that the ledger does not have, or has another one for.
            StoreUnavailable: the storage of a sink is away; the decision stands.

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
        tried = False
        for _ in range(ATTEMPTS if entry.merge is None else MERGE_ATTEMPTS):
            sink = self._open(header, entry)
            if self._finds_done(header, entry, sink, tried=tried):
                return tried and failure is None  # after a refusal it was somebody else, or cannot be told
            try:
                if not self._has_files(header, entry, sink):
                    continue
                self._check_schema(header, entry, sink)
                tried = True
                if self._add(header, entry, sink):
                    return True
            except (tables.COMMIT_REFUSED, *tables.DELTA_ERRORS, StoreUnavailable) as error:
                failure = error
                self.state.sinks.forget(sink.uri)
        raise self._not_published(header, entry, failure) from failure

    def _finds_done(self, header: Header, entry: SinkFiles, sink: Sink, *, tried: bool) -> bool:
        """Whether the sink shows it. Raises StoreRestored where it shows what the ledger does not know."""
        app, version = self.mark_of(header, entry)
        shown = tables.transaction_of(sink.table, app)
        if shown != version and header.head.generation == self.state.header.head.generation:
            self.state.require_in_step(entry.name, sink.table)
        if not self._reached(entry, shown, version):
            return False
        require_unrestored(self.state, sink, header.seq, entry, self.publication(header, entry))
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
        return PublicationStuck(
            f"Decision {header.seq} ({entry.rows} rows) cannot be published to the sink {entry.name!r} at {entry.uri}: {failure}. "
            f"Repair the sink and run {command('publish', self.state.ledger.consumer)}."
        )

    def app(self, header: Header, sink: str) -> str:
        """The application id under which a sink shows the last decision it took."""
        return self.state.app(header.head.generation, sink)

    def mark_of(self, header: Header, entry: SinkFiles) -> tuple[str, int]:
        """The transaction id by which the sink shows that it has taken this entry; the last one of a decision is that of the decision."""
        app = self.app(header, entry.name)
        return (app, header.version) if entry.is_last else (f"{app}/parts", part_version(header.seq, header.attempt, entry.part))

    def publication(self, header: Header, entry: SinkFiles) -> Publication:
        """The same, for what a RESTORE may have taken back."""
        return Publication(*self.mark_of(header, entry), whole=entry.is_last)

    def is_done(self, header: Header, entry: SinkFiles) -> bool:
        """Whether the table under the entry's name shows it."""
        table = self.state.sinks.table(entry.uri)
        return table is not None and self.shows(table, header, entry)

    def shows(self, table: DeltaTable, header: Header, entry: SinkFiles) -> bool:
        """Whether this table does."""
        app, version = self.mark_of(header, entry)
        return self._reached(entry, tables.transaction_of(table, app), version)

    def _reached(self, entry: SinkFiles, shown: int | None, version: int) -> bool:
        return (reached if entry.is_last else part_reached)(shown, version)

    def _open(self, header: Header, entry: SinkFiles) -> Sink:
        consumer, mark = self.state.ledger.consumer, self.state.marks.get(entry.name)
        uri = mark.uri if mark and mark.accepted >= header.seq else entry.uri
        try:
            sink = self.state.sinks.open(entry.name, uri)
        except SinkMismatch as error:
            gone = self.state.sinks.table(uri) is None
            advice = (
                f"What it would take: the table back under that name, or {command('publish', consumer, '--accept-sink', entry.name)} "
                "once a new one is there."
                if gone
                else f"Look whether its rows are there already; if not, run {command('publish', consumer)} after that."
            )
            raise PublicationStuck(f"Decision {header.seq} ({entry.rows} rows) cannot be published: {error} {advice}") from error
        expected = mark.table_id if mark and mark.accepted >= header.seq else entry.table_id
        require_same(self.state, sink, expected, mark)
        return sink

    def _has_files(self, header: Header, entry: SinkFiles, sink: Sink) -> bool:
        """Before files are added: are they there? False where another publisher was quicker, and removed them."""
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
                f"{command('publish', self.state.ledger.consumer, '--accept-sink', entry.name, '--lost')}."
            )

    def missing(self, entry: SinkFiles, sink_uri: str) -> list[str]:
        """Files of an entry that are not there."""
        return missing(self.root if entry.staged else sink_uri, self.options, [add.path for add in entry.adds])

    def _check_schema(self, header: Header, entry: SinkFiles, sink: Sink) -> None:
        """Where the table has changed since the rows were checked: do they still fit?"""
        if entry.staged or sink.fingerprint == entry.fingerprint:
            return
        system, add = filesystem(sink.uri, self.options), entry.adds[0]
        with system.open_input_file(add.path) as file:
            written = pq.ParquetFile(file).schema_arrow
        try:
            if sink.special or sorted(add.partition_values) != sorted(sink.partition_by):
                raise SinkMismatch("it has other partition columns now, or features that forbid adding files: " + ", ".join(sink.special))
            for column in sink.partition_by:
                written = written.append(sink.schema.field(column))
            check_schema(written, sink.schema, entry.name)
        except SinkMismatch as error:
            raise PublicationStuck(
                f"Decision {header.seq} ({entry.rows} rows) was made when the sink {entry.name!r} had other columns: {error} "
                f"Change it back and run {command('publish', self.state.ledger.consumer)}."
            ) from error

    def _add(self, header: Header, entry: SinkFiles, sink: Sink) -> bool:
        """Try one publication; returns whether it is known to be done.

        Crash: the sink shows all of it, with the transaction id, or nothing of it.
        """
        app, version = self.mark_of(header, entry)
        files = [join(self.root, add.path) for add in entry.adds]
        if entry.mode == "rows":
            # Spark skips a transaction id that is there already, silently: whether it is done is read back from the table.
            if entry.merge is None:
                self.spark().append(sink.uri, files, app, version)
            else:
                self.spark().merge(sink.uri, files, entry.merge, app, version)
            self.state.sinks.engine.took(sink.table, app, version)
            return False
        if entry.merge is not None:
            self.state.sinks.forget(sink.uri)  # the handle moves on with the merge
            merge.publish(sink, filesystem(self.root, self.options), entry.adds, entry.merge, {app: version})
            return False
        tables.commit(sink.table, entry.adds, {app: version}, exact=False)
        self._mark(header, entry, sink, sink.table.version() + 1, header.version)
        return True

    def _mark(self, header: Header, entry: SinkFiles, sink: Sink, version: int, shown: int | None) -> None:
        """Keep how far the sink is, in this version of it."""
        old = self.state.marks.get(entry.name)
        same = old if old and old.table_id == sink.table_id else None
        if not entry.is_last:  # what it shows of whole decisions is what it showed before
            shown = same.shown if same and same.generation == header.head.generation else None
        accepted = same.accepted if same else 0
        self.state.marks[entry.name] = Mark(header.seq, sink.table_id, version, sink.uri, header.head.generation, shown, accepted)
        self.state.agreement.took(entry.name, sink.table, version)
