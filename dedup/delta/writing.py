"""What one transaction writes to sinks: checked, put into files that no commit names yet, and listed for its decision.

Called by the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from checkpoint.errors import RowsRefused, SinkMismatch
from dedup.delta import merge as merging
from dedup.delta.files import Add, FileWriter
from dedup.delta.fit import check_schema
from dedup.delta.header import SinkFiles
from dedup.delta.names import sql_name
from dedup.delta.sink import Sink, require_same
from dedup.delta.state import ConsumerState
from dedup.delta.storage import Options, join, safe_name
from dedup.steps import Merge
from dedup.store import Rows


@dataclass(frozen=True)
class Context:
    """What a transaction needs of its store."""

    root: str
    options: Options
    resolve: Callable[[str], str]  # sink name -> absolute URI
    letters: str  # URI of the consumer's table of dead letter events
    spark: Callable[[], Any]
    on_step: Callable[[str], None]
    committed: Callable[[], None]  # called once a batch of the stream is decided


class SinkWrites:
    """The writes of one transaction, in the order of the calls."""

    def __init__(self, state: ConsumerState, context: Context, attempt: str) -> None:
        self._state, self._context = state, context
        self._staging = f"staged/{safe_name(state.ledger.consumer)}/{attempt}/"
        self._entries: tuple[SinkFiles, ...] = ()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is written inside vanishes if the block raises: its files are never named by a commit, and VACUUM takes them."""
        before = self._entries
        try:
            yield
        except Exception:
            self._entries = before
            raise

    def entries(self) -> tuple[SinkFiles, ...]:
        """What the decision lists."""
        names = [entry.name for entry in self._entries]
        return tuple(
            replace(entry, part=names[:i].count(entry.name), parts=names.count(entry.name)) for i, entry in enumerate(self._entries)
        )

    def append(self, table: str, rows: Rows) -> int:
        """Rows for a sink; returns their number.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        context = self._context
        given = None if rows.in_tasks else rows.arrow()
        sink = self._open(table, rows.schema)
        columns = check_schema(rows.schema, sink.schema, table, sink.computed)
        _require_not_numbered(sink, columns)
        spark = context.spark() if sink.special else None
        context.on_step("files")
        writer = self._writer(sink, columns)
        written = map(Add.from_json, rows.files(writer, columns)) if given is None else writer.write(given.select(columns))
        adds = tuple(written)
        if spark is not None and adds:
            self._check_constraints(sink, spark, adds)
        self.add(sink, sink.mode, adds)
        return sum(add.rows for add in adds)

    def merge(self, table: str, rows: Rows, how: Merge) -> int:
        """Rows for a sink that keeps one per key; returns their number.

        Crash: staged files that no commit names are deleted after some days.
        """
        context, given = self._context, rows.arrow()
        sink = self._open(table, given.schema)
        upserts, deletes = merging.split(given, how, sink)
        _require_not_numbered(sink, upserts.column_names)
        spark = context.spark() if merging.needs_spark(sink) else None
        context.on_step("files")
        adds = tuple(merging.stage(self._stager(sink, upserts), upserts, deletes=False))
        if spark is not None and adds:
            self._check_constraints(sink, spark, adds)
        adds += tuple(merging.stage(self._stager(sink, deletes), deletes, deletes=True))
        self.add(sink, "files" if spark is None else "rows", adds, how)
        return int(given.num_rows)

    def own(self, sink: Sink, rows: pa.Table, codec: Mapping[str, Any] | None = None) -> None:
        """Rows for a table of ours, which fit.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        writer = self._writer(sink, sink.schema.names)
        self.add(sink, sink.mode, tuple(replace(writer, codec=codec or writer.codec).write(rows)))

    def add(self, sink: Sink, mode: str, adds: tuple[Add, ...], how: Merge | None = None) -> None:
        """List files of a sink."""
        if not adds:
            return
        entry = SinkFiles(sink.name, sink.uri, sink.table_id, mode, sink.fingerprint, adds, sink.table.version(), how)
        last = next((e for e in reversed(self._entries) if e.name == entry.name), None)
        if last and (last.table_id, last.fingerprint) != (entry.table_id, entry.fingerprint):
            raise SinkMismatch(f"The sink {entry.name!r} was changed between two writes of one transaction. Run the batch again.")
        if last and last.merge is None and how is None:
            both = replace(last, adds=(*last.adds, *entry.adds))
            self._entries = tuple(both if e is last else e for e in self._entries)
        else:
            self._entries += (entry,)

    def require_same(self, sink: Sink) -> None:
        """Raise PublicationStuck where the sink was replaced or restored."""
        if mark := self._state.marks.get(sink.name):
            require_same(sink, self._state.ledger.consumer, mark.table_id, mark)

    def _open(self, table: str, rows: pa.Schema) -> Sink:
        self._context.on_step("check")
        sink = self._state.sinks.open(table, self._context.resolve(table), rows)
        self.require_same(sink)
        return sink

    def _writer(self, sink: Sink, columns: list[str]) -> FileWriter:
        context = self._context
        if not sink.special:
            return FileWriter(sink.uri, context.options, sink.schema, sink.name, sink.partition_by, sink.indexed)
        # Staged rows keep only what the handler gave: a missing generated column must stay missing for Spark to compute it.
        schema = pa.schema([f for f in sink.schema if f.name in columns or f.name not in sink.computed])
        return FileWriter(context.root, context.options, schema, sink.name, prefix=self._staging, indexed=0)

    def _stager(self, sink: Sink, rows: pa.Table) -> FileWriter:
        schema = merging.staged_schema(sink, rows.column_names)
        return FileWriter(self._context.root, self._context.options, schema, sink.name, prefix=self._staging, indexed=0)

    def _check_constraints(self, sink: Sink, spark: Any, adds: tuple[Add, ...]) -> None:
        files = [join(self._context.root, add.path) for add in adds]
        for name, count in spark.violations(files, sink.constraints, sink.generated).items():
            raise RowsRefused(
                f"{count} of {sum(add.rows for add in adds)} rows violate {name} of {sink.name!r}: {sink.constraints[name]}. "
                f"Reject them in the handler, or change the table (ALTER TABLE {sql_name(sink.name)} DROP CONSTRAINT ...)."
            )


def _require_not_numbered(sink: Sink, columns: list[str]) -> None:
    if brought := sorted(sink.always & set(columns)):
        raise SinkMismatch(f"{sink.name!r} numbers {', '.join(brought)} itself (GENERATED ALWAYS AS IDENTITY). Leave it out of the rows.")
