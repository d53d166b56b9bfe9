"""What one transaction writes to sinks: checked, put into files that no commit names yet, and listed for its decision.

Called by the transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from checkpoint.errors import ConfigError, HandlerError, RowsRefused, SinkMismatch
from dedup.core.merges import disjoint_runs, merges, refuse_unknown
from dedup.core.rows import ArrowRows, Rows, given_rows
from dedup.core.steps import Merge
from dedup.delta import sinks
from dedup.delta.files import Add, FileWriter
from dedup.delta.fit import sql_name
from dedup.delta.ledger import SinkFiles
from dedup.delta.restores import require_same
from dedup.delta.sinks import Sink, SinkColumns
from dedup.delta.state import ConsumerState
from dedup.delta.storage import StorageOptions, is_local, join, missing, require_spark_may_commit, safe_name
from dedup.delta.tables import PART_BITS


@dataclass(frozen=True)
class Context:
    """What a transaction needs of its store."""

    root: str
    options: StorageOptions
    resolve: Callable[[str], str]  # sink name -> absolute URI
    letters: str  # URI of the consumer's table of dead letter events
    spark: Callable[[], Any]
    on_step: Callable[[str], None]
    committed: Callable[[], None]  # called once a batch of the stream is decided


@dataclass(frozen=True)
class RowWriter:
    """Puts rows of one sink into files. Travels to tasks.

    Crash: files that no commit names are invisible; VACUUM takes them.
    """

    sink: Sink
    root: str
    options: StorageOptions
    staging: str  # folder below the root, for sinks that Spark appends to

    def columns(self, rows: pa.Schema) -> list[str]:
        """Which columns of such rows are taken, in the sink's order. Raises SinkMismatch."""
        sink = self.sink
        columns = sink.columns(rows)
        self.require_not_numbered(columns)
        return columns

    def require_not_numbered(self, columns: Iterable[str]) -> None:
        """Raise SinkMismatch for columns that the sink numbers itself."""
        if brought := sorted(self.sink.always & set(columns)):
            name = self.sink.name
            raise SinkMismatch(f"{name!r} numbers {', '.join(brought)} itself (GENERATED ALWAYS AS IDENTITY). Leave it out of the rows.")

    def files(self, columns: list[str]) -> FileWriter:
        """The writer of rows with these columns."""
        sink = self.sink
        if not sink.special:
            return FileWriter(sink.uri, self.options, sink.schema, sink.name, sink.partition_by, sink.indexed)
        # Staged rows keep only what the handler gave: a missing generated column must stay missing for Spark to compute it.
        schema = pa.schema([f for f in sink.schema if f.name in columns or f.name not in sink.computed])
        return FileWriter(self.root, self.options, schema, sink.name, prefix=self.staging + _given(schema), indexed=0, sink=sink.uri)

    def write(self, rows: Rows) -> list[str]:
        """Write these rows into files that no commit names yet; returns `Add` lines. Raises SinkMismatch, RowsRefused.

        Crash: the files stay invisible; they are removed after some days.
        """
        given = given_rows(SinkColumns(self.sink), rows)
        columns = self.columns(given.schema)
        return [add.to_json() for add in self.files(columns).write(given.select(columns))]


class SinkWrites:
    """The writes of one transaction, in the order of the calls."""

    def __init__(self, state: ConsumerState, context: Context, attempt: str) -> None:
        self._state, self._context = state, context
        self._staging = f"staged/{safe_name(state.ledger.consumer)}/{attempt}/"
        self._entries: tuple[SinkFiles, ...] = ()
        self._opened: dict[str, Sink] = {}  # those that tasks write to
        self._merged: dict[str, _Merged] = {}  # by the path of a merge's first file

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
        """The files that the decision lists; neighbouring merges that share no key are one, since each costs a commit of the sink.

        Raises HandlerError where two names of one sink are used and one of them merges: each name has its own order. Raises ConfigError for
        more writes to one sink than can be told apart.
        """
        entries = self._with_joined_merges()
        _refuse_two_names(entries)
        names = [entry.name for entry in entries]
        for name, count in Counter(names).items():
            if count > 1 << PART_BITS:
                raise ConfigError(
                    f"One transaction makes {count} separate writes to {name!r}; at most {1 << PART_BITS} are possible. Collect the rows "
                    "of several tx.merge into one."
                )
        return tuple(replace(entry, part=names[:i].count(entry.name), parts=names.count(entry.name)) for i, entry in enumerate(entries))

    def _with_joined_merges(self) -> list[SinkFiles]:
        """The same with fewer merges: a batch that is halved around its bad events merges each of its parts."""
        found: list[SinkFiles] = []
        for name in dict.fromkeys(entry.name for entry in self._entries):
            mine = [entry for entry in self._entries if entry.name == name]
            for merged, run in groupby(mine, lambda e: e.merge and self._merged[e.adds[0].path].alike):
                alike = list(run)
                found += _joined(alike, self._merged) if merged else alike
        return found

    def count(self, name: str) -> int:
        """Rows for this sink so far, without those that were undone."""
        return sum(entry.rows for entry in self._entries if entry.name == name)

    def append(self, table: str, rows: Rows) -> int:
        """Rows for a sink; returns their number.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        context = self._context
        here = None if rows.in_tasks or rows.plain() else rows.arrow()
        sink = self._open(table, rows)
        writer = self._writer(sink)
        given = given_rows(SinkColumns(sink), rows) if here is None and not rows.in_tasks else here
        columns = writer.columns(rows.schema if given is None else given.schema)
        _require_spark(sink, context)
        context.on_step("files")
        files = writer.files(columns)
        written = self._of_tasks(sink, rows.files(files, columns)) if given is None else tuple(files.write(given.select(columns)))
        return self._take(sink, written)

    def task_files(self, table: str) -> RowWriter:
        """What writes rows of this sink in tasks; `adopt` takes what it returns."""
        sink = self._open(table, None)
        _require_spark(sink, self._context)
        self._context.on_step("files")
        self._opened[table] = sink
        return self._writer(sink)

    def adopt(self, table: str, files: Sequence[str]) -> int:
        """Files of tasks for a sink; returns the number of their rows.

        Crash: as `append`.
        """
        sink = self._opened[table]
        return self._take(sink, self._of_tasks(sink, files))

    def _of_tasks(self, sink: Sink, files: Iterable[str]) -> tuple[Add, ...]:
        """What tasks have written. Raises ConfigError where this process does not find it: each machine may have a folder of its own."""
        adds, uri = tuple(map(Add.from_json, files)), self._context.root if sink.special else sink.uri
        gone = missing(uri, None, [add.path for add in adds]) if is_local(uri) else []
        if gone:
            raise ConfigError(
                f"Spark's tasks wrote {len(adds)} files of rows into {uri}, and {len(gone)} of them are not there for the driver. Nothing "
                "was committed. Put the store and its sinks into a folder that driver and executors share, or into object storage."
            )
        return adds

    def _take(self, sink: Sink, adds: tuple[Add, ...]) -> int:
        for alike in _by_columns(adds):
            if sink.special:
                self._check_constraints(sink, self._context.spark(), alike, {**sink.defaults, **sink.generated})
            self.add(sink, sink.mode, alike)
        return sum(add.rows for add in adds)

    def merge(self, table: str, rows: Rows, how: Merge) -> int:
        """Rows for a sink that keeps one per key; returns their number.

        Crash: staged files that no commit names are deleted after some days.
        """
        here = rows.plain() or ArrowRows(rows.arrow(), rows.ordered)
        sink = self._open(table, rows)
        refuse_unknown(how, here, sink.schema.names, repr(sink.name))
        turns = merges(here, how, lambda some: given_rows(SinkColumns(sink), some, how), lambda _: {})
        for turn in turns:
            self._merge(sink, turn, how)
        return sum(turn.num_rows for turn in turns)

    def apart(self, tables: Collection[str]) -> bool:
        """Whether these are different tables."""
        return len({self._context.resolve(table) for table in tables}) == len(tables)

    def _merge(self, sink: Sink, rows: pa.Table, how: Merge) -> None:
        """Rows of different keys, all with the same columns."""
        context = self._context
        sinks.refuse_append_only(sink)
        sinks.refuse_padded(sink, how)
        upserts, deletes = sinks.split(rows, how, sink)
        self._writer(sink).require_not_numbered(upserts.column_names)
        spark = _spark_for(sink, context) if sinks.needs_spark(sink) else None
        context.on_step("files")
        adds = tuple(sinks.stage(self._stager(sink, upserts), upserts, deletes=False))
        if spark is not None and adds:
            self._check_constraints(sink, spark, adds, sink.generated)
        adds += tuple(sinks.stage(self._stager(sink, deletes), deletes, deletes=True))
        if adds:
            keys = pa.concat_tables([upserts.select(how.keys), deletes.select(how.keys)])
            self._merged[adds[0].path] = _Merged(keys, upserts.column_names, how)
        self.add(sink, "files" if spark is None else "rows", adds, how)

    def own(self, sink: Sink, rows: pa.Table, codec: Mapping[str, Any] | None = None) -> None:
        """Rows for a table of ours, which fit.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        writer = self._writer(sink).files(sink.schema.names)
        self.add(sink, sink.mode, tuple(replace(writer, codec=codec or writer.codec).write(rows)))

    def add(self, sink: Sink, mode: str, adds: tuple[Add, ...], how: Merge | None = None) -> None:
        """List files of a sink, all with the same columns."""
        if not adds:
            return
        entry = SinkFiles(sink.name, sink.uri, sink.table_id, mode, sink.fingerprint, adds, sink.table.version(), how)
        last = next((e for e in reversed(self._entries) if e.name == entry.name), None)
        if last and (last.table_id, last.fingerprint) != (entry.table_id, entry.fingerprint):
            raise SinkMismatch(f"The sink {entry.name!r} was changed between two writes of one transaction. Run the batch again.")
        joins = self._append_like(entry) if how is None else None
        if joins is None:
            self._entries += (entry,)
        else:
            both = replace(joins, adds=(*joins.adds, *entry.adds))
            self._entries = tuple(both if e is joins else e for e in self._entries)

    def _append_like(self, entry: SinkFiles) -> SinkFiles | None:
        """An append behind the sink's last merge whose files have the columns that these have: Spark reads those of one append as one."""
        for other in reversed([e for e in self._entries if e.name == entry.name]):
            if other.merge is not None:
                return None
            if _columns_of(other.adds[0]) == _columns_of(entry.adds[0]):
                return other
        return None

    def require_same(self, sink: Sink) -> None:
        """Raise PublicationStuck where the sink was replaced or restored, StoreRestored where it shows what the ledger does not know."""
        if mark := self._state.marks.get(sink.name):
            require_same(self._state, sink, mark.table_id, mark)
        self._state.require_in_step(sink.name, sink.table)

    def _open(self, table: str, rows: Rows | None) -> Sink:
        self._context.on_step("check")
        sink = self._state.sinks.open(table, self._context.resolve(table), rows)
        self.require_same(sink)
        return sink

    def _writer(self, sink: Sink) -> RowWriter:
        return RowWriter(sink.travelling(), self._context.root, self._context.options, self._staging)

    def _stager(self, sink: Sink, rows: pa.Table) -> FileWriter:
        schema = sinks.staged_schema(sink, rows.column_names)
        return FileWriter(self._context.root, self._context.options, schema, sink.name, prefix=self._staging, indexed=0, sink=sink.uri)

    def _check_constraints(self, sink: Sink, spark: Any, adds: tuple[Add, ...], filled: Mapping[str, str]) -> None:
        files = [join(self._context.root, add.path) for add in adds]
        for name, count in spark.violations(files, sink.constraints, filled, sink.if_there, sink.emptied).items():
            raise RowsRefused(
                f"{count} of {sum(add.rows for add in adds)} rows violate {name} of {sink.name!r}: {sink.constraints[name]}. "
                f"Reject them in the handler, or change the table (ALTER TABLE {sql_name(sink.uri)} DROP CONSTRAINT ...)."
            )


@dataclass(frozen=True)
class _Merged:
    """What tells whether merges can be made as one."""

    keys: pa.Table
    columns: Sequence[str]
    how: Merge

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for merges that differ in their rows only."""
        return self.how, tuple(self.columns), tuple(self.keys.schema.types)


def _refuse_two_names(entries: Sequence[SinkFiles]) -> None:
    """Raise HandlerError where rows are merged into a table that has two names here; of appended rows the order does not count."""
    merged = {entry.table_id for entry in entries if entry.merge is not None}
    names = {(entry.table_id, entry.name) for entry in entries if entry.table_id in merged}
    for table_id, some in groupby(sorted(names), lambda one: one[0]):
        if len(known := [repr(name) for _, name in some]) > 1:
            raise HandlerError(
                f"The handler names one sink (table id {table_id}) in {len(known)} ways, {' and '.join(known)}, and merges: "
                "its calls would lose their order. Use one name. Of two tables with one id, one is a copy of the other: create it anew."
            )


def _joined(entries: Sequence[SinkFiles], merged: Mapping[str, _Merged]) -> Iterator[SinkFiles]:
    for run in disjoint_runs([merged[entry.adds[0].path].keys for entry in entries]):
        yield replace(entries[run.start], adds=tuple(add for at in run for add in entries[at].adds))


def _given(schema: pa.Schema) -> str:
    """What the names of staged files begin with: the same for those with the same columns."""
    return hashlib.sha256(json.dumps(schema.names).encode()).hexdigest()[:8] + "-"


def _columns_of(add: Add) -> str:
    """What says which columns a file has: nothing for a sink's own files, of which each commit takes any."""
    folder, _, name = add.path.rpartition("/")
    return name.partition("-")[0] if folder.startswith("staged/") else ""


def _by_columns(adds: Iterable[Add]) -> Iterator[tuple[Add, ...]]:
    found: dict[str, tuple[Add, ...]] = {}
    for add in adds:
        found[_columns_of(add)] = (*found.get(_columns_of(add), ()), add)
    yield from found.values()


def _require_spark(sink: Sink, context: Context) -> None:
    """Before files are written that only Spark can bring into the sink. Raises ConfigError."""
    if sink.special:
        _spark_for(sink, context)


def _spark_for(sink: Sink, context: Context) -> Any:
    require_spark_may_commit(sink.uri, context.options)
    return context.spark()
