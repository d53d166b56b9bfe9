"""Rows into a sink that keeps one row per key: staged before the decision, merged after it.

Promises that the sink ends as if the rows of all decisions had been merged in the order of seq, each once: the merge is made on the very
snapshot whose transaction id was looked at, and fails if any other commit came in between. Called by the transaction and the publisher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from checkpoint.errors import RowsRefused, SinkMismatch
from dedup.delta import tables
from dedup.delta.files import Add, FileWriter
from dedup.delta.fit import check_schema
from dedup.delta.sink import Sink
from dedup.envelope import POSITION
from dedup.steps import Merge

DELETE = "_dedup_delete"
"""Column of staged rows: true deletes the sink's row."""

_PLAIN_FEATURES = frozenset({"appendOnly", "invariants", "checkConstraints", "generatedColumns", "timestampNtz", "changeDataFeed"})
"""Writer features under which delta-rs may rewrite files, as long as no column or property uses them."""


def needs_spark(sink: Sink) -> bool:
    """Whether only Spark may merge into this sink."""
    settings = sink.table.metadata().configuration
    features = set(sink.table.protocol().writer_features or ())
    in_use = "true" in (settings.get("delta.enableChangeDataFeed"), settings.get("delta.enableDeletionVectors"))
    return bool(sink.special) or bool(features - _PLAIN_FEATURES) or in_use


def split(rows: pa.Table, merge: Merge, sink: Sink) -> tuple[pa.Table, pa.Table]:
    """(rows to insert or update, rows to delete): of the latter only the keys and `newer_by`. Without positions that the sink lacks.

    Raises:
        SinkMismatch: the rows do not fit, or a column that the merge goes by is missing.
        RowsRefused: a key is null.
    """
    lost = [n for n in rows.column_names if n in POSITION and n not in sink.schema.names]
    flag = [merge.delete_when] if merge.delete_when and merge.delete_when not in sink.schema.names else []
    kept = rows.drop_columns([*lost, *flag])
    check_schema(kept.schema, sink.schema, sink.name, sink.computed)
    _check_keys(kept, merge, sink)
    if merge.delete_when is None:
        return kept, kept.slice(0, 0)
    gone = pc.fill_null(rows[merge.delete_when].cast(pa.bool_()), False)
    named = list(dict.fromkeys([*merge.keys, *([merge.newer_by] if merge.newer_by else [])]))
    return kept.filter(pc.invert(gone)), kept.filter(gone).select(named)


def _check_keys(rows: pa.Table, merge: Merge, sink: Sink) -> None:
    asked = [*merge.keys, *([merge.newer_by] if merge.newer_by else [])]
    if lacking := [n for n in asked if n not in rows.column_names]:
        raise SinkMismatch(f"tx.merge into {sink.name!r} goes by {', '.join(lacking)}, which the rows or the sink lack. Add the column.")
    for name in merge.keys:
        if nulls := rows[name].null_count:
            raise RowsRefused(f"{nulls} of {rows.num_rows} rows for {sink.name!r} have no {name!r}, which is a key of tx.merge.")


def stage(writer: FileWriter, rows: pa.Table, *, deletes: bool) -> list[Add]:
    """Write rows that nothing names yet. Raises RowsRefused."""
    return writer.write(rows.append_column(DELETE, pa.repeat(deletes, rows.num_rows)))


def staged_schema(sink: Sink, names: Sequence[str]) -> pa.Schema:
    """Of staged rows that have these columns of the sink."""
    return pa.schema([*(sink.schema.field(n) for n in sink.schema.names if n in names), pa.field(DELETE, pa.bool_(), nullable=False)])


def publish(sink: Sink, system: pafs.FileSystem, adds: Sequence[Add], merge: Merge, transactions: Mapping[str, int]) -> None:
    """Merge staged rows into exactly this snapshot of the sink, with transaction ids.

    Raises:
        CommitFailedError, DeltaError, OSError: as delta-rs gives them; the outcome has to be read back.

    Crash: the sink shows all of it, with the ids, or nothing of it.
    """
    parts = [pq.read_table(add.path, filesystem=system) for add in adds]
    rows = pa.concat_tables(parts, promote_options="default")
    before = sink.table.version()
    tables.merge(sink.table, rows, _match(merge.keys), _clauses(rows, merge), transactions)
    if sink.table.version() == before:  # nothing to change, and then delta-rs commits nothing, not even the ids
        tables.commit(sink.table, [], transactions, exact=True)


def _match(keys: Sequence[str]) -> str:
    return " AND ".join(f"t.{_quoted(k)} = s.{_quoted(k)}" for k in keys)


def _clauses(rows: pa.Table, merge: Merge) -> tables.MergeClauses:
    flag = f"s.{_quoted(DELETE)}"
    newer = "true"
    if merge.newer_by is not None:
        t, s = (f"{side}.{_quoted(merge.newer_by)}" for side in "ts")
        newer = f"({t} < {s} OR ({t} IS NULL AND {s} IS NOT NULL))"
    values = {_quoted(n): f"s.{_quoted(n)}" for n in rows.column_names if n != DELETE}
    return tables.MergeClauses(f"{flag} AND {newer}", f"NOT {flag} AND {newer}", f"NOT {flag}", values)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
