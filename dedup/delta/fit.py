"""Make rows fit a sink: columns by name, types without loss, no NULL where the sink forbids it.

Promises to refuse what does not fit before a file is written, with the `ALTER TABLE` that would make it fit. A column that fits keeps every
value, or fails at the value that it cannot keep. Pure. Called by the modules that write to sinks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import RowsMisfit, RowsRefused, SinkMismatch
from dedup.core.near import GUESSED, meant

_PRIMITIVE = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}

_SQL = {v: {"long": "BIGINT", "integer": "INT", "short": "SMALLINT", "byte": "TINYINT"}.get(k, k.upper()) for k, v in _PRIMITIVE.items()}

_FAMILIES = (
    (lambda t: pa.types.is_large_string(t) or pa.types.is_string_view(t), "STRING"),
    (lambda t: pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t) or pa.types.is_binary_view(t), "BINARY"),
    (lambda t: pa.types.is_timestamp(t) and t.tz is not None, "TIMESTAMP"),
    (pa.types.is_timestamp, "TIMESTAMP_NTZ"),
    (pa.types.is_date, "DATE"),
    (pa.types.is_uint8, "SMALLINT"),
    (pa.types.is_uint16, "INT"),
    (pa.types.is_uint32, "BIGINT"),
    (pa.types.is_uint64, "DECIMAL(20,0)"),
    (pa.types.is_null, "STRING"),
)

_SOURCES = {
    pa.string(): (pa.types.is_large_string, pa.types.is_string_view),
    pa.binary(): (pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view),
    pa.date32(): (pa.types.is_date64,),
}


def check_schema(
    rows: pa.Schema, sink: pa.Schema, table: str, computed: Collection[str] = (), *, uri: str, guessed: bool = False
) -> list[str]:
    """Compare by name, without looking at a row; returns the columns to take from the rows, in the sink's order.

    Args:
        table: the sink as the handler names it.
        computed: columns the sink computes itself where the rows lack them.
        uri: of the sink, as Spark knows it.
        guessed: the types of columns that the sink lacks are guessed, from values of Python.

    Raises:
        SinkMismatch: extra columns, missing required ones, types that could lose something, a name that occurs twice.
    """
    repeated = sorted({n for n in rows.names if rows.names.count(n) > 1})
    if repeated:
        raise RowsMisfit(f"The rows for {table!r} have more than one column {', '.join(repeated)}. Rename or drop one of them.")
    if not rows.names:
        raise RowsMisfit(f"The rows for {table!r} have no columns. Select those of the sink.")
    extra = [n for n in rows.names if n not in sink.names]
    if extra:
        columns = ", ".join(f"`{n}` {sql_type(rows.field(n).type)}" for n in extra)
        raise SinkMismatch(  # whoever wrote them: columns are the handler's, and no event's
            f"{table!r} has no column {', '.join(extra)}, which the rows have. {meant(extra, sink.names)}"
            f"Rename it, leave it out of the rows, or ALTER TABLE {sql_name(uri)} ADD COLUMNS ({columns}){GUESSED if guessed else ''}."
        )
    required = {f.name: f.name if not f.nullable else required_part(f) for f in sink if f.name not in computed}
    missing = [path for name, path in required.items() if path and name not in rows.names]
    if missing:
        raise RowsMisfit(
            f"{table!r} requires {', '.join(missing)}, which the rows lack. Add them to the rows, or "
            + "; ".join(f"ALTER TABLE {sql_name(uri)} ALTER COLUMN {_quoted(n)} DROP NOT NULL" for n in missing)
        )
    wrong = [f for f in sink if f.name in rows.names and not fits(rows.field(f.name).type, f.type)]
    if wrong:
        told = "; ".join(f"{f.name} is {sql_type(rows.field(f.name).type)} and the sink has {sql_type(f.type)}" for f in wrong)
        wider = {f.name: new for f in wrong if widens(f.type, new := rows.field(f.name).type)}
        widen = f", or {widening(uri, wider)}" if len(wider) == len(wrong) else ""
        raise RowsMisfit(f"The rows do not fit {table!r} without loss: {told}. Cast them in the handler, or write into a new table{widen}.")
    return [f.name for f in sink if f.name in rows.names]


def widening(uri: str, columns: Mapping[str, pa.DataType]) -> str:
    """What to do so that these columns of a sink take these types, where `widens` says that they can.

    Tried with Delta 4.4 and deltalake 1.6: tests/spark/test_delta_spark.py.
    """
    table = sql_name(uri)
    steps = [f"SET TBLPROPERTIES ('{WIDENING}' = 'true')", *(f"ALTER COLUMN {_quoted(n)} TYPE {sql_type(t)}" for n, t in columns.items())]
    statements = "; ".join(f"ALTER TABLE {table} {step}" for step in steps)
    return f"widen the type in Spark (deltalake cannot read the table after that; Spark and dedup can): {statements}"


WIDENING = "delta.enableTypeWidening"
"""Property under which Delta widens types. The table feature that it brings is not one of deltalake's."""


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


def _quoted(path: str) -> str:
    return "`" + path.replace(".", "`.`") + "`"


def conform(rows: pa.Table, sink: pa.Schema, table: str, *, uri: str) -> pa.Table:
    """Rows that passed `check_schema`, with the sink's columns, order and types; missing columns are null.

    Args:
        table, uri: as for `check_schema`.

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
                f"or ALTER TABLE {sql_name(uri)} ALTER COLUMN {_quoted(path)} DROP NOT NULL."
            )
        columns.append(_below_null_parents(column) if _requires(field.type) else column)
    return pa.Table.from_arrays(columns, schema=sink)


def _cast(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    if column.type == target:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    for holds, cast in _NESTED:
        if holds(target) and not pa.types.is_null(column.type):
            return pa.chunked_array([cast(chunk, target) for chunk in column.chunks], target)
    return column.cast(target, safe=True)


def _cast_part(values: pa.Array, target: pa.DataType) -> pa.Array:
    cast = _cast(pa.chunked_array([values]), target)
    return cast.combine_chunks() if cast.num_chunks != 1 else cast.chunk(0)


def _cast_struct(chunk: pa.StructArray, target: pa.StructType) -> pa.StructArray:
    """By name: Arrow's own cast goes by position and refuses missing fields."""
    have = {f.name for f in chunk.type}
    parts = []
    for field in target:
        part = pc.struct_field(chunk, [field.name]) if field.name in have else pa.nulls(len(chunk), field.type)
        parts.append(_cast_part(part, field.type))
    return pa.StructArray.from_arrays(parts, fields=list(target), mask=pc.is_null(chunk))


def _cast_list(chunk: pa.Array, target: pa.ListType) -> pa.ListArray:
    items = _cast_part(pc.list_flatten(chunk), target.value_type)
    return pa.ListArray.from_arrays(_offsets(chunk), items, type=target)


def _cast_map(chunk: pa.MapArray, target: pa.MapType) -> pa.MapArray:
    entries = pc.list_flatten(_entries(chunk))
    keys, items = (_cast_part(entries.field(i), kind) for i, kind in enumerate((target.key_type, target.item_type)))
    return pa.MapArray.from_arrays(_offsets(_entries(chunk)), keys, items, type=target)


def _offsets(chunk: pa.Array, *, nullable: bool = True) -> pa.Array:
    """Where each list begins in what `list_flatten` makes of them, null for one that is null; and the end of the last one."""
    sizes = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.array(offsets, mask=np.append(chunk.is_null().to_numpy(zero_copy_only=False), False) if nullable else None)


def _entries(chunk: pa.MapArray) -> pa.ListArray:
    """A map as a list of its pairs: `MapArray.items` has those of rows that a slice leaves out, too."""
    entries = pa.StructArray.from_arrays([chunk.keys, chunk.items], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(chunk.offsets.to_numpy()), entries, mask=chunk.is_null())


_NESTED: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any, Any], pa.Array]], ...] = (
    (pa.types.is_struct, _cast_struct),
    (pa.types.is_list, _cast_list),
    (pa.types.is_map, _cast_map),
)


def _forbidden_nulls(column: pa.ChunkedArray, field: pa.Field, path: str, parent_nulls: int | None = None) -> Iterator[tuple[str, int]]:
    """(path, count) of each place where a null is and none may be.

    Args:
        parent_nulls: below an array or a map, where a null parent is no null of its parts; None elsewhere: see `required_part`.
    """
    if not field.nullable and column.null_count > (parent_nulls or 0):
        yield path, column.null_count - (parent_nulls or 0)
    if pa.types.is_struct(field.type):
        nulls = None if parent_nulls is None else column.null_count
        for inner in field.type:
            yield from _forbidden_nulls(pc.struct_field(column, [inner.name]), inner, f"{path}.{inner.name}", nulls)
    elif pa.types.is_list(field.type):
        flat = pa.chunked_array([pc.list_flatten(c) for c in column.chunks], field.type.value_type)
        yield from _forbidden_nulls(flat, field.type.value_field, f"{path}.element", 0)
    elif pa.types.is_map(field.type):
        items = pa.chunked_array([pc.list_flatten(_entries(c)).field(1) for c in column.chunks], field.type.item_type)
        yield from _forbidden_nulls(items, field.type.item_field, f"{path}.value", 0)


def required_part(field: pa.Field) -> str:
    """The path of the first NOT NULL part of a struct's parts; empty where there is none. Of arrays and maps Spark enforces none.

    Such a struct must not be null either: Spark refuses it (DELTA_NOT_NULL_CONSTRAINT_VIOLATED), and it refuses every UPDATE and MERGE
    of a file in which delta-rs wrote one (tried with Delta 4.4).
    """
    if not pa.types.is_struct(field.type):
        return ""
    found = (part.name if not part.nullable else required_part(part) for part in field.type)
    return next((f"{field.name}.{name}" for name in found if name), "")


def _requires(kind: pa.DataType) -> bool:
    """Whether a part of the type, at any depth, must not be null."""
    parts = [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) and not pa.types.is_map(kind) else []
    parts += [kind.item_field] if pa.types.is_map(kind) else []
    return any(not part.nullable or _requires(part.type) for part in parts)


def _below_null_parents(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values, with something in each part that must not be null and whose parent is null.

    Arrow's writer refuses a null there, which no reader would see; and a file in which that part may be null it cannot read back (tried).
    """
    return pa.chunked_array([_filled(chunk, nullable=True) for chunk in column.chunks], column.type)


def _filled(array: pa.Array, *, nullable: bool) -> pa.Array:
    """`nullable` False: without a null of its own, of which `_forbidden_nulls` has said that its parent is null."""
    kind = array.type
    if pa.types.is_struct(kind):
        parts = [_filled(array.field(i), nullable=part.nullable) for i, part in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=array.is_null() if nullable else None)
    if pa.types.is_list(kind):
        items = _filled(pc.list_flatten(array), nullable=kind.value_field.nullable)
        return pa.ListArray.from_arrays(_offsets(array, nullable=nullable), items, type=kind)
    if pa.types.is_map(kind):
        entries = pc.list_flatten(_entries(array))
        items = _filled(entries.field(1), nullable=kind.item_field.nullable)
        return pa.MapArray.from_arrays(_offsets(_entries(array), nullable=nullable), entries.field(0), items, type=kind)
    if nullable or not array.null_count:
        return array
    return pa.Array.from_buffers(kind, len(array), [None, *array.buffers()[1:]], 0, array.offset)


class UnknownType(Exception):
    """A column type that this library does not write itself."""


def writable(schema_json: str) -> tuple[pa.Schema, dict[str, str]]:
    """(the columns that we write, column -> type of those that we cannot, which rows leave out, and Delta then reads as NULL).

    Raises UnknownType for a column that can be neither written nor left out.
    """
    known, unknown = [], {}
    for field in json.loads(schema_json)["fields"]:
        try:
            known.append(_field(field))
        except UnknownType as error:
            if not field.get("nullable", True):
                raise
            unknown[field["name"]] = str(error)
    return pa.schema(known), unknown


def refuse_unwritable(names: Collection[str], unwritable: Mapping[str, str], table: str) -> None:
    """Raise SinkMismatch for columns of the rows whose type in the sink is one that we do not write."""
    if brought := {name: kind for name, kind in unwritable.items() if name in names}:
        told = ", ".join(f"{name} ({kind})" for name, kind in brought.items())
        raise SinkMismatch(
            f"The rows for {table!r} have the column {told}, of a type that dedup cannot write. Leave it out of the rows: it is NULL then. "
            "Or write the value as text into a column of type STRING, and let a job of Spark parse it."
        )


def _field(field: dict[str, Any]) -> pa.Field:
    return pa.field(field["name"], _type(field["type"]), nullable=field.get("nullable", True))


def _type(kind: Any) -> pa.DataType:
    if isinstance(kind, str):
        if kind in _PRIMITIVE:
            return _PRIMITIVE[kind]
        if match := re.fullmatch(r"decimal\((\d+),\s*(\d+)\)", kind):
            return pa.decimal128(int(match[1]), int(match[2]))
        raise UnknownType(kind)
    if kind["type"] == "struct":
        return pa.struct([_field(f) for f in kind["fields"]])
    if kind["type"] == "array":
        return pa.list_(pa.field("element", _type(kind["elementType"]), nullable=kind["containsNull"]))
    if kind["type"] == "map":
        return pa.map_(_type(kind["keyType"]), pa.field("value", _type(kind["valueType"]), nullable=kind["valueContainsNull"]))
    raise UnknownType(str(kind["type"]))


def sql_type(kind: pa.DataType) -> str:
    """The type as a Delta `CREATE TABLE` or `ADD COLUMNS` would name it; best effort for types that Delta does not have."""
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        return "STRUCT<" + ", ".join(f"{f.name}: {sql_type(f.type)}" for f in kind) + ">"
    if pa.types.is_map(kind):
        return f"MAP<{sql_type(kind.key_type)}, {sql_type(kind.item_type)}>"
    if _is_list(kind):
        return f"ARRAY<{sql_type(kind.value_type)}>"
    if pa.types.is_dictionary(kind):
        return sql_type(kind.value_type)
    return _SQL.get(kind) or next((name for test, name in _FAMILIES if test(kind)), str(kind).upper())


def fits(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether every value of `source` has exactly one value in `target`, or is refused at the value (finer timestamps)."""
    if pa.types.is_dictionary(source):
        return fits(source.value_type, target)
    if source == target or pa.types.is_null(source):
        return True
    if pa.types.is_struct(target):
        return bool(pa.types.is_struct(source)) and _struct_fits(source, target)
    if pa.types.is_map(target):
        return pa.types.is_map(source) and fits(source.key_type, target.key_type) and fits(source.item_type, target.item_type)
    if _is_list(target):
        return _is_list(source) and fits(source.value_type, target.value_type)
    if pa.types.is_timestamp(target):
        return pa.types.is_timestamp(source) and (source.tz is None) == (target.tz is None)
    return any(test(source) for test in _SOURCES.get(target, ())) or _number_fits(source, target)


def _struct_fits(source: pa.StructType, target: pa.StructType) -> bool:
    return all(_child_fits(source, f) for f in target) and {f.name for f in source} <= {f.name for f in target}


def _child_fits(source: pa.StructType, field: pa.Field) -> bool:
    at = source.get_field_index(field.name)
    return fits(source.field(at).type, field.type) if at >= 0 else field.nullable


def _number_fits(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_decimal(target):
        whole = _whole_digits(source)
        return whole is not None and whole[0] <= target.precision - target.scale and whole[1] <= target.scale
    if pa.types.is_floating(target):
        mantissa = 53 if pa.types.is_float64(target) else 24
        narrower = pa.types.is_floating(source) and source.bit_width <= target.bit_width
        return _bits(source) <= mantissa if pa.types.is_integer(source) else bool(narrower)
    return bool(pa.types.is_signed_integer(target) and pa.types.is_integer(source) and _bits(source) < target.bit_width)


def _bits(kind: pa.DataType) -> int:
    """Bits of the magnitude of an integer type."""
    return int(kind.bit_width) - int(pa.types.is_signed_integer(kind))


def _whole_digits(kind: pa.DataType) -> tuple[int, int] | None:
    """Digits before and after the point that the type may need."""
    if pa.types.is_decimal(kind):
        return kind.precision - kind.scale, kind.scale
    return (len(str(2 ** _bits(kind))), 0) if pa.types.is_integer(kind) else None


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def sql_name(uri: str) -> str:
    """A sink as Spark's SQL takes it: by its path, or by its name in the catalog. A key of the store's `tables=` means nothing there."""
    return f"delta.`{uri}`" if "/" in uri else uri
