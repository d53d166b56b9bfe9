"""Delta's column types as Arrow types, and which Arrow types fit into which without loss.

Promises that what is called a fit keeps every value, or fails loudly at the value that does not. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa

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


class UnknownType(Exception):
    """A column type that this library does not write itself."""


def arrow_schema(schema_json: str) -> pa.Schema:
    """The Arrow schema of a Delta schema. Raises UnknownType."""
    return pa.schema([_field(f) for f in json.loads(schema_json)["fields"]])


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


_SOURCES = {
    pa.string(): (pa.types.is_large_string, pa.types.is_string_view),
    pa.binary(): (pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view),
    pa.date32(): (pa.types.is_date64,),
}


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
