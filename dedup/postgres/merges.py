"""Write rows into a table of the user's: append them, or merge them into one row per key (insert, update what is older, delete).

Promises that after a merge the sink is as if all rows of a key had come in the order of `newer_by`, whichever transaction commits first.
Rows are staged by COPY and merged by one statement. Called by the transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.pq import TransactionStatus

from checkpoint.errors import RowsRefused, SinkMismatch
from checkpoint.postgres.connection import Connection, ends_transaction
from checkpoint.postgres.sql import Statements, fill, quoted
from dedup.core import merges
from dedup.core.envelope import POSITION
from dedup.core.rows import ArrowRows, PlainRows, Rows, given_rows
from dedup.core.steps import Merge
from dedup.postgres import sinks
from dedup.postgres.fit import TEXTS, CastPlan, Column, is_text
from dedup.postgres.sinks import NOBODY, Sink, SinkColumns, Writer

_STAGED = "pg_temp.dedup_merge"


def append(connection: Connection, sql: Statements, table: str, rows: Rows, writer: Writer = NOBODY) -> int:
    """Append rows; returns their number. Raises SinkMismatch before any row is sent, or with nothing of the COPY kept; RowsRefused where
    it depends on the values of the rows; ValuesRefused where these are of Python, and the rows at fault are known.

    Crash: undone with the transaction.
    """
    sink = sinks.describe(connection, sql, table, writer)
    plain = rows.plain()
    given = given_rows(SinkColumns(sink), rows)  # first of all: what a handler must not write is its own error, not the table's
    plans = sinks.plans_for(sink, given.schema, converted=plain is not None)
    sending = sinks.fitted(sink, plans, given)
    if not sending.num_rows:
        return 0
    with sinks.unaltered(connection, sql, sink):
        return sinks.send(connection, sink, plans, sending, plain)


def merge(connection: Connection, sql: Statements, table: str, rows: Rows, how: Merge, writer: Writer = NOBODY) -> int:
    """Merge rows, of each key the last one; returns the number of keys.

    Raises:
        SinkMismatch: they cannot fit, or the table has no unique index on these keys.
        PublicationStuck: it is another table than the one from before.
        RowsRefused: some of them break a rule of the table, or have no key. Nothing of them is kept then.
        ValuesRefused: the sink's columns cannot hold values of Python.
        StoreUnavailable: the table was altered meanwhile.

    Crash: undone with the transaction.
    """
    sink, plain = sinks.describe(connection, sql, table, writer), rows.plain()
    whole = ArrowRows(rows.arrow(), rows.ordered) if plain is None else plain
    merges.refuse_unknown(how, whole, [column.name for column in sink.columns], sink.name)
    with sinks.unaltered(connection, sql, sink):
        return _merge(connection, sql, table, sink, whole, how)


def _merge(connection: Connection, sql: Statements, table: str, sink: Sink, whole: ArrowRows | PlainRows, how: Merge) -> int:
    count = whole.table.num_rows if isinstance(whole, ArrowRows) else len(whole.rows)
    converted = isinstance(whole, PlainRows)

    def given(some: Rows) -> pa.Table:
        return given_rows(SinkColumns(sink), some, how)

    def read(some: Rows) -> pa.Table:
        _read(connection, sql, sink, table := given(some), some.plain())
        return table

    try:
        found = merges.merges(whole, how, given, partial(_ranks, connection, sql, sink, how, converted))
        turns = [_without_places(sink, turn) for turn in found]
        _check_keys(connection, sql, sink, table, turns, how)
        if sum(turn.num_rows for turn in turns) < count:
            merges.each(whole, read)  # a row that another one replaces must have been right all the same
        with connection.transaction():
            for turn in turns:
                upserts, deletes = _split(turn, how, sink)
                own = sink if upserts.num_rows or not deletes.num_rows else sinks.without_not_null(sink)
                _upsert(connection, sql, own, upserts, how, converted=converted)
                _delete(connection, sql, sink, deletes, how, converted=converted)
    except psycopg.Error as error:
        if not ends_transaction(error) and connection.info.transaction_status == TransactionStatus.INTRANS:
            merges.each(whole, read)
        raise sinks.refused(sink.name, error) from error
    return sum(turn.num_rows for turn in turns)


def _read(connection: Connection, sql: Statements, sink: Sink, rows: pa.Table, plain: PlainRows | None) -> None:
    """Let the server read all texts of types that only it knows. Raises RowsRefused for those that it cannot read.

    Crash: nothing of it is kept.
    """
    part = _texts_for_the_server(sink, rows)
    if not part.columns:
        return
    texts = rows.select([column.name for column in part.columns])
    plans = sinks.plans_for(part, texts.schema, converted=plain is not None)
    with connection.transaction(force_rollback=True):
        _run(connection, sql, "merge_stage", sink, columns=_listed(texts.column_names))
        try:
            with connection.transaction():
                staged = replace(part, name=_STAGED)
                sinks.copy(connection, part, plans, sending := sinks.fitted(part, plans, texts), into=_STAGED)
        except psycopg.Error as error:
            found = sinks.unread(connection, staged, plans, sending, error, plain)
            raise sinks.refused_rows(sink, error, found, plain) from error


def _texts_for_the_server(sink: Sink, rows: pa.Table) -> Sink:
    """The sink as it is for those columns of the rows that are texts, or lists of them, for a type that is none."""
    kinds = {name: kind.value_type if pa.types.is_list(kind := rows[name].type) else kind for name in rows.column_names}
    read = {c.name for c in sink.columns if is_text(kinds.get(c.name, pa.null())) and (c.element or c.base) not in _READ_AS_THEY_ARE}
    return sinks.without_not_null(sink, read)


_READ_AS_THEY_ARE = TEXTS - {"xml"} | {"numeric", "name", "char"}
"""Types that take any text that dedup sends to them."""


def _ranks(connection: Connection, sql: Statements, sink: Sink, how: Merge, converted: bool, rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Of texts that the merge goes by: how the server compares their values. Raises SinkMismatch, RowsRefused, psycopg.Error."""
    by_name = {column.name: column for column in sink.columns if column.base not in _NEVER_TEXT and column.element is None}
    keys = [name for name in how.keys if name in by_name and is_text(rows[name].type) and by_name[name].base not in _COMPARED_AS_BYTES]
    newer = how.newer_by
    _fit(sink, rows.select([name for name in dict.fromkeys([*keys, newer]) if name in by_name and is_text(rows[name].type)]), converted)
    found = {name: _ranked(connection, sql, sink, by_name[name], rows[name]) for name in keys}
    if newer in by_name and newer not in found and newer not in how.keys and is_text(rows[newer].type):
        compared = pa.table({name: found.get(name, rows[name]) for name in how.keys})
        if compared.group_by(list(how.keys)).aggregate([]).num_rows < rows.num_rows:
            found[newer] = _ranked(connection, sql, sink, by_name[newer], rows[newer])
    return found


def _fit(sink: Sink, rows: pa.Table, converted: bool) -> None:
    """Raise RowsRefused for texts that do not go into their columns: a cast, by which the server compares them, cuts what is too long."""
    part = sinks.without_not_null(sink, rows.column_names)
    if part.columns:
        sinks.fitted(part, sinks.plans_for(part, rows.schema, converted=converted), rows)


_NEVER_TEXT = frozenset(
    {"bool", "int2", "int4", "int8", "float4", "float8", "bytea", "date", "timestamp", "timestamptz", "time", "interval"}
)
"""Columns that take no texts: such rows are refused by their types."""

_COMPARED_AS_BYTES = frozenset({"text", "varchar"})
"""Texts that are equal where their bytes are."""


def _ranked(connection: Connection, sql: Statements, sink: Sink, column: Column, values: pa.ChunkedArray) -> pa.ChunkedArray:
    coded = values.cast(pa.string()).combine_chunks().dictionary_encode()
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    named = {"column": quoted(column.name), "type": column.type}
    statement = fill(
        sql["merge_ranks"], sink=sink.name.replace("%", "%%"), **{part: text.replace("%", "%%") for part, text in named.items()}
    )
    try:
        with connection.transaction():
            ranks = [row[0] for row in connection.execute(statement, {"texts": coded.dictionary.to_pylist()})]
    except psycopg.errors.UndefinedFunction as error:
        if not error.diag.statement_position:  # said to a text that names a function, and not to the statement
            raise
        raise SinkMismatch(f"tx.merge cannot go by column {column.name!r} of {sink.name}: {column.type} has no order.") from error
    return pa.chunked_array([pa.array(ranks, pa.int64()).take(coded.indices)])


def _without_places(sink: Sink, rows: pa.Table) -> pa.Table:
    """The rows without those of their position columns that the sink lacks."""
    there = {column.name for column in sink.columns}
    return rows.select([name for name in rows.column_names if name in there or name not in POSITION])


def _check_keys(connection: Connection, sql: Statements, sink: Sink, table: str, turns: Sequence[pa.Table], how: Merge) -> None:
    known = [set(row[0]) for row in connection.execute(sql["sink_keys"], {"oid": sink.oid})]
    if set(how.keys) not in known:
        raise SinkMismatch(
            f"tx.merge into {table!r} needs a unique index on exactly its keys. "
            f"Run: CREATE UNIQUE INDEX ON {sink.name} ({_listed(how.keys)});"
        )
    for name in how.keys:
        if nulls := sum(turn[name].null_count for turn in turns):
            raise RowsRefused(f"{nulls} rows for {sink.name} have no {name!r}, which is a key of tx.merge. Nothing was sent.")


def _split(rows: pa.Table, how: Merge, sink: Sink) -> tuple[pa.Table, pa.Table]:
    """Rows to insert or update, and those to delete: of these only the key and `newer_by` count."""
    if how.delete_when is None:
        return rows, rows.slice(0, 0)
    gone = pc.fill_null(rows[how.delete_when].cast(pa.bool_()), False)
    own = how.delete_when in {column.name for column in sink.columns}
    kept = rows if own else rows.drop_columns([how.delete_when])
    needed = dict.fromkeys([*how.keys, *([how.newer_by] if how.newer_by else [])])
    return kept.filter(pc.invert(gone)), kept.filter(gone).select(list(needed))


def _upsert(connection: Connection, sql: Statements, sink: Sink, rows: pa.Table, how: Merge, *, converted: bool) -> None:
    plans = sinks.plans_for(sink, rows.schema, converted=converted)
    sending = sinks.fitted(sink, plans, rows)
    if not rows.num_rows:
        return
    _stage(connection, sql, sink, sending, plans)
    others = [quoted(name) for name in sending.column_names if name not in how.keys]
    update = f"update set {', '.join(f'{name} = excluded.{name}' for name in others)} where {_newer(how)}" if others else "nothing"
    _run(connection, sql, "merge_rows", sink, columns=_listed(sending.column_names), keys=_listed(how.keys), update=update)
    _run(connection, sql, "merge_end", sink)


def _delete(connection: Connection, sql: Statements, sink: Sink, rows: pa.Table, how: Merge, *, converted: bool) -> None:
    if not rows.num_rows:
        return
    part = replace(sink, columns=tuple(column for column in sink.columns if column.name in rows.column_names))
    plans = sinks.plans_for(part, rows.schema, converted=converted)
    _stage(connection, sql, part, sinks.fitted(part, plans, rows), plans)
    same = " and ".join(f"t.{quoted(name)} = excluded.{quoted(name)}" for name in how.keys)
    _run(connection, sql, "merge_delete", sink, same=same, newer=_newer(how))
    _run(connection, sql, "merge_end", sink)


def _stage(connection: Connection, sql: Statements, sink: Sink, rows: pa.Table, plans: dict[str, CastPlan]) -> None:
    _run(connection, sql, "merge_stage", sink, columns=_listed(rows.column_names))
    sinks.copy(connection, sink, plans, rows, into=_STAGED)


def _newer(how: Merge) -> str:
    if how.newer_by is None:
        return "true"
    name = quoted(how.newer_by)
    return f"(t.{name} < excluded.{name} or t.{name} is null and excluded.{name} is not null)"


def _run(connection: Connection, sql: Statements, statement: str, sink: Sink, **parts: str) -> None:
    connection.execute(fill(sql[statement], staged=_STAGED, sink=sink.name, **parts))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))
