"""A sink's columns as targets of Python values (dedup/values.py), and rows with its types."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from dedup.delta.fit import check_schema
from dedup.delta.names import sql_name
from dedup.delta.sink import Sink
from dedup.delta.types import sql_type
from dedup.envelope import POSITION
from dedup.rows import PlainRows
from dedup.steps import Merge
from dedup.store import Rows
from dedup.typed import typed, with_merge
from dedup.values import Target


def given_rows(sink: Sink, rows: Rows, how: Merge | None = None) -> pa.Table:
    """The rows as a table: Python objects with the types of the sink, others as they are.

    Args:
        how: they are to be merged, and may have columns of the merge that the sink lacks.

    Raises:
        RowsMisfit: they have other columns than the sink.
        ValuesRefused: values do not fit their columns.
    """
    plain = rows.plain()
    if plain is None:
        return rows.arrow()
    targets = {field.name: target_of(field) for field in sink.schema}
    if how is not None:
        targets = with_merge(targets, how)
    _check_names(sink, plain, how)
    return typed(plain, targets, repr(sink.name), lambda column, wanted: _alter(sink, column, wanted))


def _check_names(sink: Sink, rows: PlainRows, how: Merge | None) -> None:
    """Raise RowsMisfit for columns that the sink lacks, or requires and the rows lack."""
    known = {field.name: field for field in sink.schema}
    own = {*POSITION, how.delete_when} if how is not None else set()
    fields = [known.get(name) or rows.schema.field(str(name)) for name in rows.names if name in known or name not in own]
    check_schema(pa.schema(fields), sink.schema, sink.name, sink.computed)


def _alter(sink: Sink, column: str, wanted: pa.DataType) -> str:
    """The statement that widens the column; empty where Delta has none from its type to that one."""
    if column not in sink.schema.names or not widens(sink.schema.field(column).type, wanted):
        return ""
    return f"widen the type: ALTER TABLE {sql_name(sink.name)} ALTER COLUMN `{column}` TYPE {sql_type(wanted)}"


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether Delta can change a column of one type to the other without rewriting its files.

    Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#type-widening, read 2026-11.
    """
    if pa.types.is_integer(old) and pa.types.is_decimal(new):
        return bool(new.precision - new.scale >= _DIGITS[old.bit_width])
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale and new != old)
    if pa.types.is_integer(old) and pa.types.is_integer(new):
        return bool(new.bit_width > old.bit_width)
    if pa.types.is_float64(new):
        return bool(pa.types.is_float32(old) or (pa.types.is_integer(old) and old.bit_width < 64))
    return bool(pa.types.is_date(old) and pa.types.is_timestamp(new) and new.tz is None)


_DIGITS = {8: 10, 16: 10, 32: 10, 64: 20}
"""Bits of a whole number -> digits before the point that a DECIMAL needs to take its place."""


def target_of(field: pa.Field) -> Target:
    """The target of one column, or of a part of one. Raises AssertionError for a type that no sink has."""
    kind = next(name for is_it, name in _KINDS if is_it(field.type))
    parts = {name: target_of(part) for name, part in _parts(field.type)} or None
    return Target(kind, field.type, sql_type(field.type), field.nullable, parts=parts)


def _parts(kind: pa.DataType) -> list[tuple[str, pa.Field]]:
    if pa.types.is_struct(kind):
        return [(part.name, part) for part in kind]
    if pa.types.is_map(kind):
        return [("key", pa.field("key", kind.key_type, nullable=False)), ("value", kind.item_field)]
    return [("element", kind.value_field)] if pa.types.is_list(kind) else []


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_string, "text"),
    (pa.types.is_integer, "int"),
    (pa.types.is_float64, "double"),
    (pa.types.is_float32, "float"),
    (pa.types.is_boolean, "bool"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_date, "date"),
    (pa.types.is_timestamp, "timestamp"),
    (pa.types.is_decimal, "decimal"),
    (pa.types.is_struct, "struct"),
    (pa.types.is_map, "map"),
    (pa.types.is_list, "list"),
)
"""By Arrow type of the sink the kind of dedup/values.py."""
