"""A JSON Schema as the Arrow schema of the decoded `data`.

A required field is not nullable, unless its type names null. What has no counterpart in columns is refused, naming its JSON pointer.
Called by dedup/decode/__init__.py when a consumer is made. Pure: pyarrow only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from checkpoint.errors import ConfigError

Json: TypeAlias = Mapping[str, Any]

_SCALARS = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64()}
_STRINGS = {"date-time": pa.timestamp("us", tz="UTC"), "date": pa.date32()}
_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_WITHOUT_COLUMNS = ("allOf", "oneOf", "anyOf", "not", "if", "patternProperties", "prefixItems", "contentEncoding", "$dynamicRef")
_ONE_TYPE = "Describe one type, or null and one type."


def from_json_schema(schema: Json) -> pa.Schema:
    """The Arrow schema of what a JSON Schema describes. Constraints on values (enum, pattern, minimum ...) are not checked."""
    kind, nullable = _type(schema, "#", schema, ())
    if nullable or not pa.types.is_struct(kind):
        raise ConfigError(f'A JSON Schema must describe an object ("type": "object" with "properties"), not {kind}.')
    return pa.schema(list(kind))


def _refused(pointer: str, what: str) -> ConfigError:
    return ConfigError(f"JSON Schema at {pointer}: {what}")


def _below(pointer: str, *steps: str) -> str:
    return "/".join([pointer, *(step.replace("~", "~0").replace("/", "~1") for step in steps)])


def _type(node: Any, pointer: str, root: Json, refs: tuple[str, ...]) -> tuple[pa.DataType, bool]:
    if not isinstance(node, Mapping):
        raise _refused(pointer, f"{node!r} says nothing about the type; give it one.")
    if "$ref" in node:
        return _referred(node["$ref"], pointer, root, refs)
    for word in ("anyOf", "oneOf"):
        if word in node and len(node[word]) == 2 and {"type": "null"} in node[word]:
            at = int(node[word][0] == {"type": "null"})
            return _type(node[word][at], _below(pointer, word, str(at)), root, refs)[0], True
    refused = [word for word in _WITHOUT_COLUMNS if word in node]
    if refused:
        raise _refused(_below(pointer, refused[0]), f"{refused[0]!r} has no counterpart in columns. {_ONE_TYPE}")
    kinds = _kinds(node, pointer)
    names = [kind for kind in kinds if kind != "null"]
    if len(names) != 1:
        raise _refused(pointer, f"the type is {node.get('type', kinds)!r}; it must be one type. {_ONE_TYPE}")
    return _named(names[0], node, pointer, root, refs), "null" in kinds


def _kinds(node: Json, pointer: str) -> list[str]:
    """The names of its types; where it gives none, those of the values that it allows."""
    given = node.get("type")
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    allowed: Sequence[Any] = node["enum"] if "enum" in node else [node["const"]] if "const" in node else []
    unknown = [value for value in allowed if type(value) not in _OF_VALUES]
    if unknown:
        raise _refused(pointer, f"{unknown[0]!r} is an object or an array. {_ONE_TYPE}")
    return list(dict.fromkeys(_OF_VALUES[type(value)] for value in allowed))


def _named(name: str, node: Json, pointer: str, root: Json, refs: tuple[str, ...]) -> pa.DataType:
    if name == "object":
        return _object(node, pointer, root, refs)
    if name == "array":
        if "items" not in node:
            raise _refused(pointer, "an array needs items.")
        kind, nullable = _type(node["items"], _below(pointer, "items"), root, refs)
        return pa.list_(pa.field("item", kind, nullable))
    if name == "string":
        return _STRINGS.get(node.get("format", ""), pa.string())
    if name not in _SCALARS:
        raise _refused(pointer, f"the type {name!r} is not known.")
    return _SCALARS[name]


def _object(node: Json, pointer: str, root: Json, refs: tuple[str, ...]) -> pa.DataType:
    properties, others = node.get("properties"), node.get("additionalProperties")
    if not properties:
        if not isinstance(others, Mapping):
            raise _refused(pointer, "an object needs properties, or additionalProperties with a type (a map).")
        kind, nullable = _type(others, _below(pointer, "additionalProperties"), root, refs)
        return pa.map_(pa.string(), pa.field("value", kind, nullable))
    if isinstance(others, Mapping) and others:
        raise _refused(_below(pointer, "additionalProperties"), "an object has either properties or, as a map, additionalProperties.")
    required = set(node.get("required", ()))
    unknown = sorted(required - set(properties))
    if unknown:
        raise _refused(_below(pointer, "required"), f"{', '.join(unknown)} is required, and properties does not describe it.")
    made = []
    for name, child in properties.items():
        kind, nullable = _type(child, _below(pointer, "properties", name), root, refs)
        made.append(pa.field(name, kind, nullable or name not in required))
    return pa.struct(made)


def _referred(ref: str, pointer: str, root: Json, refs: tuple[str, ...]) -> tuple[pa.DataType, bool]:
    if ref in refs:
        raise _refused(pointer, f"$ref {ref!r} contains itself; columns cannot be recursive.")
    node: Any = root
    for step in ref.removeprefix("#/").split("/"):
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    if not ref.startswith("#/") or node is None:
        raise _refused(pointer, f"$ref {ref!r} does not point into this schema.")
    return _type(node, pointer, root, (*refs, ref))
