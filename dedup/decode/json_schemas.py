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
_STRUCTURE = ("type", "properties", "required", "items", "additionalProperties", "enum", "const")
"""What says of which type a value is, and what must be there."""

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


def _checked(node: Json, word: str, kind: type | tuple[type, ...], what: str, pointer: str) -> Any:
    """What a keyword says; None where it is not there. Raises ConfigError where it is of another type."""
    value = node.get(word)
    if word in node and not isinstance(value, kind):
        raise _refused(_below(pointer, word), f"{_short(value)} is not {what}.")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _type(node: Any, pointer: str, root: Json, refs: tuple[str, ...]) -> tuple[pa.DataType, bool]:
    if not isinstance(node, Mapping):
        raise _refused(pointer, f'{_short(node)} is not a schema; give an object such as {{"type": "string"}}.')
    if "$ref" in node:
        return _referred(node, pointer, root, refs)
    for word in ("anyOf", "oneOf"):
        options = _checked(node, word, list, "an array", pointer)
        if options and len(options) == 2 and {"type": "null"} in options:
            _refuse_beside(word, node, pointer, _STRUCTURE)
            at = int(options[0] == {"type": "null"})
            return _type(options[at], _below(pointer, word, str(at)), root, refs)[0], True
    refused = [word for word in _WITHOUT_COLUMNS if word in node]
    if refused:
        raise _refused(_below(pointer, refused[0]), f"{refused[0]!r} has no counterpart in columns. {_ONE_TYPE}")
    kinds = _kinds(node, pointer)
    names = [kind for kind in kinds if kind != "null"]
    if len(names) != 1:
        said = f"the type is {node.get('type', kinds)!r}; it must be one type" if kinds else "it has no type"
        raise _refused(pointer, f"{said}. {_ONE_TYPE}")
    return _named(names[0], node, pointer, root, refs), "null" in kinds


def _refuse_beside(word: str, node: Json, pointer: str, others: Sequence[str]) -> None:
    """Refuse what stands beside a keyword that says the whole type: it would be dropped."""
    dropped = next((other for other in others if other in node), None)
    if dropped is not None:
        raise _refused(
            _below(pointer, dropped), f"{dropped!r} beside {word!r} would not count. Put it into the schema that {word!r} names."
        )


def _kinds(node: Json, pointer: str) -> list[str]:
    """The names of its types; where it gives none, those of the values that it allows."""
    if "type" in node:
        given = node["type"]
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str) for name in names):
            raise _refused(_below(pointer, "type"), f"{_short(given)} is not a type; give one as text, or null and one in an array.")
        return list(names)
    listed = _checked(node, "enum", list, "an array", pointer)
    allowed: Sequence[Any] = listed if listed is not None else [node["const"]] if "const" in node else []
    unknown = [value for value in allowed if type(value) not in _OF_VALUES]
    if unknown:
        raise _refused(pointer, f"{_short(unknown[0])} is an object or an array. {_ONE_TYPE}")
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
        return _STRINGS.get(_checked(node, "format", str, "text", pointer) or "", pa.string())
    if name not in _SCALARS:
        raise _refused(
            pointer, f"the type {name!r} is not known. The types are {', '.join((*_SCALARS, 'string', 'object', 'array'))}, null."
        )
    return _SCALARS[name]


def _object(node: Json, pointer: str, root: Json, refs: tuple[str, ...]) -> pa.DataType:
    properties, others = _checked(node, "properties", Mapping, "an object", pointer), node.get("additionalProperties")
    required = _required(node, pointer)
    if not properties:
        return _map(others, required, pointer, root, refs)
    if isinstance(others, Mapping) and others:
        raise _refused(_below(pointer, "additionalProperties"), "an object has either properties or, as a map, additionalProperties.")
    unknown = sorted(required - set(properties))
    if unknown:
        raise _refused(_below(pointer, "required"), f"{', '.join(unknown)} is required, and properties does not describe it.")
    made = []
    for name, child in properties.items():
        if not isinstance(name, str):
            raise _refused(_below(pointer, "properties"), f"{name!r} is not the name of a field; give text.")
        kind, nullable = _type(child, _below(pointer, "properties", name), root, refs)
        made.append(pa.field(name, kind, nullable or name not in required))
    return pa.struct(made)


def _required(node: Json, pointer: str) -> set[str]:
    names = node.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refused(_below(pointer, "required"), f"{_short(names)} is not an array of names.")
    return set(names)


def _map(others: Any, required: set[str], pointer: str, root: Json, refs: tuple[str, ...]) -> pa.DataType:
    if not isinstance(others, Mapping):
        raise _refused(pointer, "an object needs properties, or additionalProperties with a type (a map).")
    if required:
        raise _refused(_below(pointer, "required"), "a map has no required names. Describe these fields under properties, or take it out.")
    kind, nullable = _type(others, _below(pointer, "additionalProperties"), root, refs)
    return pa.map_(pa.string(), pa.field("value", kind, nullable))


def _referred(node: Json, pointer: str, root: Json, refs: tuple[str, ...]) -> tuple[pa.DataType, bool]:
    ref = _checked(node, "$ref", str, "text", pointer)
    if ref in refs:
        raise _refused(pointer, f"$ref {ref!r} contains itself; columns cannot be recursive.")
    found: Any = root
    for step in ref.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if not ref.startswith("#/") or found is None:
        raise _refused(pointer, f"$ref {ref!r} does not point into this schema.")
    same_type = isinstance(found, Mapping) and node.get("type") == found.get("type")
    _refuse_beside("$ref", node, pointer, [word for word in (*_STRUCTURE, "anyOf", "oneOf") if word != "type" or not same_type])
    return _type(found, pointer, root, (*refs, ref))
