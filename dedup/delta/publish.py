"""Publication: what the ledger decided becomes visible in the sinks, each decision once and in order.

Everything published is read from the ledger; a transaction id in the sink says what is done, so that any number of publishers may try.
Called by the store after each decision, before each transaction, and by `dedup publish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from checkpoint.errors import PublicationStuck, SinkMismatch, StoreUnavailable
from dedup.delta import merge, tables
from dedup.delta.fit import check_schema
from dedup.delta.header import Header, Mark, SinkFiles
from dedup.delta.sink import Sink, require_same, require_unrestored
from dedup.delta.state import ConsumerState
from dedup.delta.storage import Options, filesystem, is_away, join, remove

MERGE_ATTEMPTS = 20
"""The same for a merge, which gives way to any other commit."""

MAX_PARTS = 1 << 32
"""More writes of one decision to one sink than there can be: each has a number of its own, above those of all decisions before."""

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

    def publish(self, fresh: int | None = None) -> int:
        """Publish every pending decision, ascending; returns how many are known to be published by this call.

        Args:
            fresh: a decision of this very process, whose files need no looking for.

        Raises:
            PublicationStuck: a sink refuses, was replaced or restored, or files are gone; names seq, sink and what to do.
            StoreUnavailable: the storage of a sink is away; the decision stands.

        Crash: each (decision, sink) is done or not; whoever publishes next goes on there.
        """
        count = 0
        for seq in sorted(self.state.pending):
            header = self.state.decided[seq]
            given_up = {name for dropped, name in self.state.header.dropped if dropped == seq}
            done = [self._publish_one(header, e, fresh=seq == fresh) for e in header.sinks if e.name not in given_up]
            self.state.pending.discard(seq)
            count += any(done)
        return count

    def _publish_one(self, header: Header, entry: SinkFiles, *, fresh: bool) -> bool:
        """Whether it took a commit of this process."""
        app, version = self.mark_of(header, entry)
        failure: Exception | None = None
        tried = False
        for _ in range(ATTEMPTS if entry.merge is None else MERGE_ATTEMPTS):
            sink = self._open(header, entry)
            done = tables.transaction_of(sink.table, app)
            if done is not None and done >= version:
                if not tried and entry.name not in self.state.marks:
                    require_unrestored(sink, self.state.ledger.consumer, header.seq, entry)
                self._mark(header.seq, entry, sink, sink.table.version())
                if entry.staged:
                    remove(self.root, self.options, [add.path for add in entry.adds])
                return tried and failure is None  # after a refusal it was somebody else, or cannot be told
            if (not fresh or failure is not None) and not self._has_files(header, entry, sink):
                continue
            if not entry.staged and sink.fingerprint != entry.fingerprint:
                self._check_schema(header, entry, sink)
            tried = True
            try:
                if self._add(header, entry, sink, {app: version}):
                    return True
            except (tables.COMMIT_REFUSED, *tables.DELTA_ERRORS, StoreUnavailable) as error:
                failure = error
                self.state.sinks.forget(sink.uri)
        if is_away(failure):
            raise StoreUnavailable(
                f"Decision {header.seq} ({entry.rows} rows) is made; the storage of sink {entry.name!r} at {entry.uri} does not take it "
                f"now: {failure}. Whoever comes next publishes it."
            ) from failure
        raise PublicationStuck(
            f"Decision {header.seq} ({entry.rows} rows) cannot be published to the sink {entry.name!r} at {entry.uri}: {failure}. "
            f"Repair the sink and run `dedup publish {self.state.ledger.consumer}`."
        ) from failure

    def app(self, header: Header, sink: str) -> str:
        """The application id under which a sink remembers the last decision it took."""
        table = self.state.table
        assert table is not None
        return f"{self.state.ledger.app(table, header.head.generation)}/{sink}"

    def mark_of(self, header: Header, entry: SinkFiles) -> tuple[str, int]:
        """The transaction id by which the sink shows that it has taken this entry; the last one of a decision is that of the decision."""
        app = self.app(header, entry.name)
        return (app, header.seq) if entry.part == entry.parts - 1 else (f"{app}/parts", header.seq * MAX_PARTS + entry.part)

    def is_done(self, header: Header, entry: SinkFiles) -> bool:
        """Whether the table under the entry's name shows it."""
        return self._shows(entry.uri, *self.mark_of(header, entry))

    def _shows(self, uri: str, app: str, version: int) -> bool:
        table = self.state.sinks.table(uri)
        return table is not None and (tables.transaction_of(table, app) or -1) >= version

    def _open(self, header: Header, entry: SinkFiles) -> Sink:
        consumer, mark = self.state.ledger.consumer, self.state.marks.get(entry.name)
        uri = mark.uri if mark and mark.accepted >= header.seq else entry.uri
        try:
            sink = self.state.sinks.open(entry.name, uri)
        except SinkMismatch as error:
            gone = self.state.sinks.table(uri) is None
            advice = (
                f"What it would take: the table back under that name, or `dedup publish {consumer} --accept-sink {entry.name}` "
                "once a new one is there."
                if gone
                else f"Look whether its rows are there already; if not, run `dedup publish {consumer}` after that."
            )
            raise PublicationStuck(f"Decision {header.seq} ({entry.rows} rows) cannot be published: {error} {advice}") from error
        expected = mark.table_id if mark and mark.accepted >= header.seq else entry.table_id
        require_same(sink, consumer, expected, mark)
        return sink

    def _has_files(self, header: Header, entry: SinkFiles, sink: Sink) -> bool:
        """Before files of an earlier time are added: are they still there? False where another publisher was quicker, and removed them."""
        missing = self.missing(entry, sink.uri)
        if not missing:
            return True
        self.state.sinks.forget(sink.uri)
        if self._shows(sink.uri, *self.mark_of(header, entry)):
            return False
        raise PublicationStuck(
            f"Decision {header.seq} for the sink {entry.name!r}: {len(missing)} of {len(entry.adds)} files with its rows are gone "
            f"(VACUUM, or the folder was deleted): {', '.join(missing[:3])}. Bring them back, or give those rows up with "
            f"`dedup publish {self.state.ledger.consumer} --accept-sink {entry.name} --lost`."
        )

    def missing(self, entry: SinkFiles, sink_uri: str) -> list[str]:
        """Files of an entry that are not there."""
        system = filesystem(self.root if entry.staged else sink_uri, self.options)
        found = system.get_file_info([add.path for add in entry.adds])
        return [info.path for info in found if info.type != pafs.FileType.File]

    def _check_schema(self, header: Header, entry: SinkFiles, sink: Sink) -> None:
        """The table has changed since the rows were checked: do they still fit?"""
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
                f"Change it back and run `dedup publish {self.state.ledger.consumer}`."
            ) from error

    def _add(self, header: Header, entry: SinkFiles, sink: Sink, transactions: Mapping[str, int]) -> bool:
        """Try one publication; returns whether it is known to be done.

        Crash: the sink shows all of it, with the transaction id, or nothing of it.
        """
        files = [join(self.root, add.path) for add in entry.adds]
        if entry.mode == "rows":
            # Spark skips a transaction id that is there already, silently: whether it is done is read back from the table.
            ((app, version),) = transactions.items()
            if entry.merge is None:
                self.spark().append(sink.uri, files, app, version)
            else:
                self.spark().merge(sink.uri, files, entry.merge, app, version)
            self.state.sinks.engine.took(sink.table, app, version)
            return False
        if entry.merge is not None:
            self.state.sinks.forget(sink.uri)  # the handle moves on with the merge
            merge.publish(sink, filesystem(self.root, self.options), entry.adds, entry.merge, transactions)
            return False
        tables.commit(sink.table, entry.adds, transactions, exact=False)
        self._mark(header.seq, entry, sink, sink.table.version() + 1)
        return True

    def _mark(self, seq: int, entry: SinkFiles, sink: Sink, version: int) -> None:
        old = self.state.marks.get(entry.name)
        accepted = old.accepted if old and old.table_id == sink.table_id else 0
        self.state.marks[entry.name] = Mark(seq, sink.table_id, version, sink.uri, accepted)
