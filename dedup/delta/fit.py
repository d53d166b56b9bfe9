"""Rows made to fit a sink: columns by name, types without loss, no NULL where the sink forbids it.

Promises that what does not fit is refused with the `ALTER TABLE` it would take, before a file is written. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import RowsMisfit, RowsRefused, SinkMismatch
from dedup.delta.names import sql_name
from dedup.delta.types import fits, sql_type


def check_schema(rows: pa.Schema, sink: pa.Schema, table: str, computed: Collection[str] = ()) -> list[str]:
    """Compare by name, without looking at a row; returns the columns to take from the rows, in the sink's order.

    Args:
        computed: columns the sink computes itself where the rows lack them.

    Raises:
        SinkMismatch: extra columns, missing required ones, types that could lose something, a name that occurs twice.
    """
    repeated = sorted({n for n in rows.names if rows.names.count(n) > 1})
    if repeated:
        raise RowsMisfit(f"The rows for {table!r} have more than one column {', '.join(repeated)}. Rename or drop one of them.")
    extra = [n for n in rows.names if n not in sink.names]
    if extra:
        columns = ", ".join(f"`{n}` {sql_type(rows.field(n).type)}" for n in extra)
        raise SinkMismatch(  # whoever wrote them: columns are the handler's, and no event's
            f"{table!r} has no column {', '.join(extra)}, which the rows have. "
            f"Leave it out of the rows, or ALTER TABLE {sql_name(table)} ADD COLUMNS ({columns})."
        )
    missing = [f.name for f in sink if f.name not in rows.names and not f.nullable and f.name not in computed]
    if missing:
        raise RowsMisfit(
            f"{table!r} requires {', '.join(missing)}, which the rows lack. Add them to the rows, or "
            + "; ".join(f"ALTER TABLE {sql_name(table)} ALTER COLUMN `{n}` DROP NOT NULL" for n in missing)
        )
    wrong = [f for f in sink if f.name in rows.names and not fits(rows.field(f.name).type, f.type)]
    if wrong:
        told = "; ".join(f"{f.name} is {sql_type(rows.field(f.name).type)} and the sink has {sql_type(f.type)}" for f in wrong)
        alter = "; ".join(f"ALTER TABLE {sql_name(table)} ALTER COLUMN `{f.name}` TYPE {sql_type(rows.field(f.name).type)}" for f in wrong)
        raise RowsMisfit(
            f"The rows do not fit {table!r} without loss: {told}. Cast in the handler, or, where Delta can widen the type, {alter}."
        )
    return [f.name for f in sink if f.name in rows.names]


def conform(rows: pa.Table, sink: pa.Schema, table: str) -> pa.Table:
    """Rows that passed `check_schema`, with the sink's columns, order and types; missing columns are null.

    Raises:
        RowsRefused: a value that does not fit (a timestamp finer than microseconds), or NULL where the sink forbids it.
        SinkMismatch: no value of that type fits.
    """
    columns = []
    for field in sink:
        column = rows[field.name] if field.name in rows.column_names else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        try:
            column = _cast(column, field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            kind = RowsRefused if isinstance(error, pa.ArrowInvalid) else SinkMismatch
            raise kind(f"Column {field.name} does not fit {table!r}: {error}") from error
        for path, count in _forbidden_nulls(column, field, field.name):
            raise RowsRefused(
                f"{table!r} forbids NULL in {path}, and {count} of {rows.num_rows} rows have it. Reject those rows in the handler, "
                f"or ALTER TABLE {sql_name(table)} ALTER COLUMN {path} DROP NOT NULL."
            )
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=sink)


def _cast(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    if column.type == target:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_struct(target) and pa.types.is_struct(column.type):
        return pa.chunked_array([_cast_struct(chunk, target) for chunk in column.chunks], target)
    return column.cast(target, safe=True)


def _cast_struct(chunk: pa.StructArray, target: pa.StructType) -> pa.StructArray:
    """By name: Arrow's own cast goes by position and refuses missing fields."""
    have = {f.name for f in chunk.type}
    parts = []
    for field in target:
        part = pc.struct_field(chunk, [field.name]) if field.name in have else pa.nulls(len(chunk), field.type)
        cast = _cast(pa.chunked_array([part]), field.type)
        parts.append(cast.combine_chunks() if cast.num_chunks != 1 else cast.chunk(0))
    return pa.StructArray.from_arrays(parts, fields=list(target), mask=pc.is_null(chunk))


def _forbidden_nulls(column: pa.ChunkedArray, field: pa.Field, path: str, parent_nulls: int = 0) -> Iterator[tuple[str, int]]:
    """(path, count) of each place where a null is and none may be; a null parent is no null of its children."""
    if not field.nullable and column.null_count > parent_nulls:
        yield path, column.null_count - parent_nulls
    if pa.types.is_struct(field.type):
        for inner in field.type:
            yield from _forbidden_nulls(pc.struct_field(column, [inner.name]), inner, f"{path}.{inner.name}", column.null_count)
    elif pa.types.is_list(field.type):
        flat = pa.chunked_array([pc.list_flatten(c) for c in column.chunks], field.type.value_type)
        yield from _forbidden_nulls(flat, field.type.value_field, f"{path}.element")
    elif pa.types.is_map(field.type):
        items = pa.chunked_array([c.items for c in column.chunks], field.type.item_type)
        yield from _forbidden_nulls(items, field.type.item_field, f"{path}.value")
