"""A sink's columns as targets of Python values (dedup/values.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from dedup.delta.fit import check_schema, required_part
from dedup.delta.names import sql_name
from dedup.delta.sink import Sink
from dedup.delta.types import sql_type
from dedup.rows import PlainRows
from dedup.values import Target


@dataclass(frozen=True)
class Columns:
    """The columns of a sink, for rows of Python objects."""

    sink: Sink

    @property
    def shown(self) -> str:
        """Its name in quotes."""
        return repr(self.sink.name)

    def targets(self) -> dict[str, Target]:
        """By column."""
        return {field.name: target_of(field) for field in self.sink.schema}

    def require(self, names: Sequence[str], rows: PlainRows) -> None:
        """Raise RowsMisfit for columns that the sink lacks, or requires and the rows lack."""
        known = {field.name: field for field in self.sink.schema}
        fields = [known.get(name) or rows.schema.field(str(name)) for name in names]
        check_schema(pa.schema(fields), self.sink.schema, self.sink.name, self.sink.computed)

    def alter(self, column: str, wanted: pa.DataType) -> str:
        """The statement that widens the column; empty where Delta has none from its type to that one."""
        schema = self.sink.schema
        if column not in schema.names or not widens(schema.field(column).type, wanted):
            return ""
        return f"widen the type: ALTER TABLE {sql_name(self.sink.name)} ALTER COLUMN `{column}` TYPE {sql_type(wanted)}"


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


def target_of(field: pa.Field, *, in_items: bool = False) -> Target:
    """The target of one column, or of a part of one. Raises AssertionError for a type that no sink has.

    Args:
        in_items: it is below an array or a map, where a null struct is no null of its parts (see fit.required_part).
    """
    kind = next(name for is_it, name in _KINDS if is_it(field.type))
    parts = {name: target_of(part, in_items=in_items or kind != "struct") for name, part in _parts(field.type)} or None
    target = Target(kind, field.type, sql_type(field.type), field.nullable, parts=parts)
    if field.nullable and not in_items and (part := required_part(field)):
        return replace(target, nullable=False, no_null=f"{part} is NOT NULL, and Spark refuses a null struct there, too")
    return target


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
