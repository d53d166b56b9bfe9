"""Avro schema and Arrow schema, each as the Arrow schema of the decoded `data`; and back to Avro.

A field that must be there is not nullable. Null and missing are the same. What has no counterpart is refused, naming its path.
Called by dedup/decode/__init__.py when a consumer is made. Pure: pyarrow only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from checkpoint.errors import ConfigError

Json: TypeAlias = Mapping[str, Any]

TIMESTAMP = pa.timestamp("us", tz="UTC")
_AVRO_SCALARS = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_AVRO_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", tz="UTC"),
    ("long", "timestamp-micros"): TIMESTAMP,
    ("string", "uuid"): pa.string(),
}


def loaded(schema: Json | str) -> Json:
    """A schema given as a mapping or as JSON text. Raises ConfigError for text that is not a JSON object."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ConfigError(f"The schema is not valid JSON: {error}.") from error
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"A schema is a StructType of Spark, DDL text, a pyarrow.Schema, or a JSON Schema or Avro schema, not {type(found).__name__}."
        )
    return found


def is_avro(schema: Json) -> bool:
    """Whether a schema object is Avro's rather than a JSON Schema."""
    return schema.get("type") == "record"


def from_avro(schema: Json) -> pa.Schema:
    """The Arrow schema of an Avro record, with timestamps in the unit that is written. Raises ConfigError."""
    return pa.schema(list(_avro_type(qualified(schema), "$", {})))


NAMED = ("record", "error", "enum", "fixed")
"""The types of Avro that have a name."""

_COMPLEX = (*NAMED, "array", "map")
"""What an object of a schema defines, and does not refer to, even where a type has such a name."""


def qualified(schema: Any) -> Any:
    """A schema of Avro (parsed JSON) with full names only, where types are defined and where they are used.

    A name without a dot is in the namespace that its definition gives, or else in that of the definition around it. What is used and not
    found there is looked for without a namespace, as Java's library does.
    """
    return _qualified(schema, "", set())


def _qualified(node: Any, space: str, known: set[str]) -> Any:
    """`known` are the full names that are defined before this node."""
    if isinstance(node, str):
        return next((name for name in (full_name(node, space), node) if name in known), node)
    if isinstance(node, list):
        return [_qualified(one, space, known) for one in node]
    if not isinstance(node, Mapping):
        return node
    named = {}
    if node.get("type") in NAMED and isinstance(node.get("name"), str):
        space = space_of(node, space)
        named = {"name": full_name(node["name"].rpartition(".")[2], space), "namespace": space}
        known.add(named["name"])
    keys = [key for key in ("type", "items", "values") if key in node and not (key == "type" and node[key] in _COMPLEX)]
    return {**node, **named, **{key: _qualified(node[key], space, known) for key in keys}, **_qualified_fields(node, space, known)}


def _qualified_fields(node: Json, space: str, known: set[str]) -> dict[str, Any]:
    """What is no list of fields stays: whoever reads the schema refuses it by its path."""
    found = node.get("fields")
    if not isinstance(found, list):
        return {}
    return {"fields": [{**f, "type": _qualified(f["type"], space, known)} if isinstance(f, Mapping) and "type" in f else f for f in found]}


def full_name(name: str, space: str) -> str:
    """The name with the namespace it stands in, where it has none of its own."""
    return name if "." in name or not space else f"{space}.{name}"


def space_of(node: Json, outer: str) -> str:
    """The namespace of a definition; of one that names none the outer one."""
    name = str(node.get("name", ""))
    return name.rpartition(".")[0] if "." in name else str(node.get("namespace", outer) or "")


def _avro_type(node: Any, path: str, named: dict[str, pa.DataType]) -> pa.DataType:
    """`named` are the types of full names."""
    node = _avro_node(node, path)
    name, logical = node["type"], node.get("logicalType")
    if name in ("record", "enum", "fixed"):
        kind = _avro_named(node, path, named)
        named[str(node.get("name"))] = kind
        return kind
    if name == "array":
        return pa.list_(_avro_field("item", _avro_part(node, "items", path), path + "[]", named))
    if name == "map":
        return pa.map_(pa.string(), _avro_field("value", _avro_part(node, "values", path), path + ".*", named))
    if logical == "decimal":
        return _avro_decimal(node, path)
    if logical and (not isinstance(logical, str) or (name, logical) not in _AVRO_LOGICAL):
        raise ConfigError(f"Avro schema at {path}: the logical type {logical!r} of {name} is not supported.")
    kind = _AVRO_LOGICAL.get((name, logical or "")) or _AVRO_SCALARS.get(name) or named.get(name)
    if kind is None:
        raise ConfigError(f"Avro schema at {path}: the type {name!r} is not known (or the record contains itself).")
    return kind


def _avro_node(node: Any, path: str) -> Json:
    """The object whose type is a name: what a type may be wrapped in is taken off."""
    if isinstance(node, str):
        return {"type": node}
    if isinstance(node, list):
        raise ConfigError(f"Avro schema at {path}: a union of {node!r} has no counterpart in columns; only null and one type has.")
    if not isinstance(node, Mapping):
        raise ConfigError(f'Avro schema at {path}: {node!r} is not a type. Give a name such as "string", or an object with a type.')
    return node if isinstance(node.get("type"), str) else _avro_node(node.get("type"), path)


def _avro_part(node: Json, word: str, path: str) -> Any:
    if word not in node:
        raise ConfigError(f"Avro schema at {path}: it has no {word!r}, which {node['type']} needs.")
    return node[word]


def _avro_named(node: Json, path: str, named: dict[str, pa.DataType]) -> pa.DataType:
    if node["type"] == "enum":
        return pa.string()
    if node["type"] == "fixed":
        if node.get("logicalType") not in (None, "decimal"):
            raise ConfigError(f"Avro schema at {path}: the logical type {node['logicalType']!r} of fixed is not supported.")
        return _avro_decimal(node, path) if node.get("logicalType") else pa.binary()
    found = _avro_part(node, "fields", path)
    if not isinstance(found, list):
        raise ConfigError(f"Avro schema at {path}: 'fields' is {found!r}; give an array of fields.")
    for one in found:
        if not isinstance(one, Mapping) or not isinstance(one.get("name"), str) or "type" not in one:
            raise ConfigError(f"Avro schema at {path}: {one!r} is not a field; give an object with a name and a type.")
    return pa.struct([_avro_field(f["name"], f["type"], f"{path}.{f['name']}", named) for f in found])


def _avro_field(name: str, node: Any, path: str, named: dict[str, pa.DataType]) -> pa.Field:
    union = node if isinstance(node, list) else None
    if union is not None and len(union) == 2 and "null" in union:
        return pa.field(name, _avro_type(next((option for option in union if option != "null"), "null"), path, named), True)
    return pa.field(name, _avro_type(node, path, named), False)


def _avro_decimal(node: Json, path: str) -> pa.DataType:
    precision, scale = node.get("precision", 0), node.get("scale", 0)
    if type(precision) is not int or type(scale) is not int:
        raise ConfigError(f"Avro schema at {path}: decimal({precision!r}, {scale!r}) needs whole numbers.")
    if not 1 <= precision <= 38 or not 0 <= scale <= precision:
        raise ConfigError(f"Avro schema at {path}: decimal({precision}, {scale}) does not fit into 38 digits.")
    return pa.decimal128(precision, scale)


def data_type(schema: pa.Schema) -> pa.DataType:
    """The type of the column `data`: the schema, every field of it nullable."""
    return nullable(pa.struct(list(schema)))


def nullable(kind: pa.DataType) -> pa.DataType:
    """The type with every field of it nullable."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, nullable(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("item", nullable(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(pa.string(), pa.field("value", nullable(kind.item_type)))
    return kind


def normal(schema: pa.Schema) -> pa.Schema:
    """The schema in the types that every implementation has: strings are utf8, timestamps microseconds, with zone in UTC."""
    _refuse_twins(list(schema), "$")
    return pa.schema([_normal_field(f, "$") for f in schema])


def _refuse_twins(found: list[pa.Field], path: str) -> None:
    names = [f.name.lower() for f in found]
    twins = sorted({f.name for f in found if names.count(f.name.lower()) > 1})
    if twins:
        raise ConfigError(f"Schema at {path}: the fields {', '.join(twins)} differ only by case, or not at all. Rename or drop one.")


def _normal_field(field: pa.Field, path: str) -> pa.Field:
    return pa.field(field.name, _normal_type(field.type, f"{path}.{field.name}"), field.nullable)


def _normal_type(kind: pa.DataType, path: str) -> pa.DataType:
    types = pa.types
    if types.is_struct(kind):
        _refuse_twins(list(kind), path)
        return pa.struct([_normal_field(f, path) for f in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(pa.field("item", _normal_type(kind.value_type, path + "[]"), kind.value_field.nullable))
    if types.is_map(kind) and types.is_string(kind.key_type):
        return pa.map_(pa.string(), pa.field("value", _normal_type(kind.item_type, path + ".*"), kind.item_field.nullable))
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.string()
    if types.is_binary(kind) or types.is_large_binary(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return TIMESTAMP if kind.tz else pa.timestamp("us")
    same = (types.is_boolean, types.is_signed_integer, types.is_float32, types.is_float64, types.is_date32)
    if any(is_one(kind) for is_one in same) or (types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision):
        return kind
    raise ConfigError(f"Schema at {path}: the Arrow type {kind} is not supported; use one that Spark has too.")


def to_avro(schema: pa.Schema) -> dict[str, Any]:
    """The Avro schema of bodies written from this Arrow schema: nullable fields are unions of null and the type."""
    return _avro_record(list(schema), "body")


def _avro_record(found: list[pa.Field], name: str) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": f.name, "type": _avro_of(f, f"{name}_{f.name}")} for f in found]}


def _avro_of(field: pa.Field, name: str) -> Any:
    kind = _avro_of_type(field.type, name)
    return ["null", kind] if field.nullable else kind


def _avro_of_type(kind: pa.DataType, name: str) -> Any:
    if pa.types.is_struct(kind):
        return _avro_record(list(kind), name)
    if pa.types.is_list(kind):
        return {"type": "array", "items": _avro_of(kind.value_field, name)}
    if pa.types.is_map(kind):
        return {"type": "map", "values": _avro_of(kind.item_field, name)}
    if pa.types.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pa.types.is_timestamp(kind) and kind.tz:
        return {"type": "long", "logicalType": "timestamp-micros"}
    if pa.types.is_date32(kind):
        return {"type": "int", "logicalType": "date"}
    for avro, arrow in _AVRO_SCALARS.items():
        if arrow == kind:
            return avro
    raise ConfigError(f"The field {name} is of type {kind}, which Avro does not have. Give the Avro schema itself.")
