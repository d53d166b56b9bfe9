"""Avro bodies, one record at a time, by fastavro: as they were written, or resolved to another schema.

fastavro resolves, this guards what it would get wrong: it takes no notice of units (milliseconds would be read as microseconds), rounds
decimals to the precision of the writer's schema, and gives defaults as they stand in the JSON. What it gets wrong of the bytes:
dedup/decode/avro_guards.py.
"""

from __future__ import annotations

import functools
import io
import json
import logging
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

from checkpoint.errors import ConfigError
from checkpoint.install import needs
from dedup.decode import avro_guards, schemas
from dedup.decode.values import FAILURES, WHOLE, Read, Unreadable

log = logging.getLogger("dedup")

_UNUSABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a schema may raise that is JSON, but no schema."""


_DECIMAL = "dedup-decimal"
"""Our logical type in place of Avro's `decimal`: fastavro would round its values."""

_EXACT, _MOST_BITS = Context(prec=100), 256
"""More digits than a column has, and bits that they all fit in."""


def own_reader(writer: str) -> tuple[Read, pa.DataType]:
    """What reads a body as the record that this schema (JSON text) describes, and the type of its answers. Raises ConfigError."""
    written = schemas.loaded(writer)
    return _read_by(written, None), _record_type(written)


def _written(schema: Any, named: dict[str, Any] | None = None) -> Any:
    """The schema of a writer as fastavro takes it. `named` gets the definitions of its types, by their full names."""
    return avro_guards.without_negatives(library().parse_schema(_plain(schema), {} if named is None else named))


def _read_by(written: Any, wanted: Any) -> Read:
    """What reads bytes that hold one record and nothing behind it.

    Args:
        written: the schema the bytes were written with.
        wanted: the schema to resolve it to, as fastavro parsed it; None: its own.
    """
    fastavro, named = library(), dict[str, Any]()
    writer, mismatch = _written(written, named), fastavro.read.SchemaResolutionError
    guard = avro_guards.depth_guard(writer, named) if avro_guards.contains_itself(writer) else None
    union, per_byte = isinstance(writer, list), avro_guards.levels_per_byte(named)
    may_end = wanted is not None and (guard is not None or avro_guards.skips_the_end(_nodes(writer), named))
    unsure = avro_guards.WholeBytes if may_end else io.BytesIO

    def whole(body: bytes) -> Any:
        deep = guard if (len(body) + 1) * per_byte > avro_guards.MOST_LEVELS else None  # a shorter one does not nest as deep
        if deep is not None:
            deep(body)
        if union and avro_guards.begins_below_zero(body):
            raise IndexError("a number below zero")
        stream = unsure(body) if deep is None else io.BytesIO(body)
        try:
            row = fastavro.schemaless_reader(stream, writer, wanted)
        except mismatch as error:
            raise _MismatchError(WHOLE, f"cannot be read as the schema says: {error}") from error
        if (behind := len(body) - stream.tell()) > 0:
            raise Unreadable(WHOLE, f"has {behind} bytes behind the record")
        return row

    return whole


def _record_type(schema: schemas.Json) -> pa.DataType:
    """The type of the rows that are read by this schema, each field nullable. Raises ConfigError."""
    return schemas.nullable(pa.struct(list(schemas.from_avro(schema))))


class _MismatchError(Unreadable):
    """The schema of the writer and ours do not go together in what this record has."""


def reason(body: bytes, error: BaseException, written: str, wanted: str | None = None) -> Unreadable:
    """Why a body does not decode that a reader raised this for.

    Args:
        body: the bytes of the record.
        written: JSON text of the schema that they were written with.
        wanted: JSON text of the schema that they are read as, where it is another one.
    """
    if isinstance(error, _MismatchError) and wanted is not None and _beginnings(written):
        writer = _written(json.loads(written))
        mismatch = (_failed(name, body, writer, ours) for name, ours in _beginnings(wanted))
    elif isinstance(error, Unreadable):
        return error
    elif _is_json(body):
        return Unreadable(WHOLE, "is JSON, not Avro")
    else:
        mismatch = (_failed(name, body, ours, None) for name, ours in _beginnings(written))
    return next((found for found in mismatch if found is not None), Unreadable(WHOLE, f"is not read: {error}"))


def _is_json(body: bytes) -> bool:
    try:
        return body[:1] == b"{" and isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


@functools.lru_cache(maxsize=16)
def _beginnings(text: str) -> list[tuple[str, Any]]:
    """For each field of a record its name, and the schema of a record that ends with it. Nothing for a schema of another type."""
    schema = json.loads(text)
    fields = schema.get("fields", []) if isinstance(schema, dict) else []
    return [(f["name"], _written({**schema, "fields": fields[: at + 1]})) for at, f in enumerate(fields)]


def _failed(name: str, body: bytes, writer: Any, wanted: Any) -> Unreadable | None:
    """What is wrong with the last field of a record that is read so; None where it can be read."""
    fastavro, stream, path = library(), avro_guards.WholeBytes(body), f"$.{name}"
    try:
        fastavro.schemaless_reader(stream, writer, wanted)
    except fastavro.read.SchemaResolutionError as error:
        return Unreadable(path, f"was written as another type: {error}")
    except UnicodeDecodeError as error:
        return Unreadable(path, f"is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}")
    except FAILURES as error:
        if isinstance(error, EOFError) or stream.tell() == len(body):
            return Unreadable(path, f"does not end within the {len(body)} bytes of the record")
        number = isinstance(error, IndexError)
        return Unreadable(path, "has a number that its enum or union does not have" if number else f"is not read: {error}")
    return None


def library() -> Any:
    """fastavro, which knows our decimals. Raises ConfigError where it is missing."""
    try:
        import fastavro
    except ImportError as error:
        raise ConfigError(needs("Decoding Avro", "fastavro", "avro")) from error
    fastavro.read.LOGICAL_READERS.update({f"bytes-{_DECIMAL}": _exactly, f"fixed-{_DECIMAL}": _exactly})
    return fastavro


def _exactly(raw: bytes, schema: dict[Any, Any] | None, _: dict[Any, Any] | None = None) -> Decimal:
    """A decimal as it was written, digits beyond the precision of its schema included."""
    unscaled = int.from_bytes(raw, "big", signed=True)
    if unscaled.bit_length() > _MOST_BITS:
        raise Unreadable(WHOLE, "has a decimal of more digits than any column holds")
    return Decimal(unscaled).scaleb(-(schema or {}).get("scale", 0), _EXACT)


def refuse_endless(schema: Any) -> None:
    """Raise ValueError where a schema (parsed JSON) has an array of what takes no bytes, naming its items.

    A body of twelve bytes may say that 2^60 nulls follow, and reading it would never end; any other array ends with its bytes.
    """
    nodes = list(_nodes(schemas.qualified(schema)))
    named = {str(node["name"]): node for node in nodes if "name" in node}
    for node in nodes:
        if node.get("type") == "array" and _takes_nothing(items := node["items"], named, frozenset()):
            shown = items if isinstance(items, str) else items.get("name", items["type"])
            raise ValueError(f"an array of {shown}, which takes no bytes: a short body could claim any number of them")


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every definition in a schema."""
    if isinstance(node, list):
        for one in node:
            yield from _nodes(one)
    elif isinstance(node, dict):
        yield node
        inside = [node[key] for key in ("type", "items", "values") if key in node]
        yield from _nodes(inside + [field["type"] for field in node.get("fields", ())])


def _takes_nothing(node: Any, named: Mapping[str, Any], inside: frozenset[str]) -> bool:
    """Whether a value takes no bytes; a union has at least its number, a record that holds itself never ends anyway."""
    if isinstance(node, str):
        return node == "null" or (node in named and node not in inside and _takes_nothing(named[node], named, inside | {node}))
    if not isinstance(node, dict):
        return False
    if node["type"] in ("record", "error"):
        return all(_takes_nothing(field["type"], named, inside | {str(node.get("name"))}) for field in node["fields"])
    if node["type"] == "fixed":
        return bool(node["size"] == 0)
    return node["type"] not in ("array", "map", "enum") and _takes_nothing(node["type"], named, inside)


def _plain(node: Any) -> Any:
    """The schema without logical types of times and dates: their numbers fit Arrow as they are, and Python's types are narrower."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, dict):
        return node
    keep = {key: _plain(value) for key, value in node.items() if key != "logicalType"}
    return keep | ({"logicalType": _DECIMAL} if node.get("logicalType") in ("decimal", _DECIMAL) else {})


@functools.lru_cache(maxsize=1024)
def reader(ident: str, written: str, wanted: str) -> Read:
    """What reads a record written with one schema as the other says. Where they do not fit, nothing reads, and a warning says why.

    Args:
        ident: of the schema of the bytes, for the log.
        written: its JSON text.
        wanted: JSON text of the schema of the answers.
    """
    fastavro, ours = library(), json.loads(wanted)
    resolved_to = _parsed(ours)
    try:
        theirs = json.loads(written)
        if theirs is None:
            raise ValueError("it is not Avro's")
        found = _read_by(theirs, resolved_to)
        refuse_endless(theirs)
        _refuse_other_units(theirs, ours)
    except (*_UNUSABLE, fastavro.schema.SchemaParseException) as error:
        log.warning("events written with schema %s do not decode: it cannot be read as %r: %s", ident, ours.get("name"), error)
        return refusing(f"names schema {ident}, which cannot be read as {ours.get('name')!r}: {error}")
    return found


def kind(wanted: str) -> pa.DataType:
    """The type of what readers of this schema answer. Raises ConfigError."""
    return _record_type(json.loads(wanted))


def check(schema: str, *, writer: bool = False) -> None:
    """Raise ConfigError where nothing can be read as this schema (JSON text), or fastavro is missing.

    Args:
        writer: bodies were written with it: its defaults do not count.
    """
    fastavro = library()
    try:
        fastavro.parse_schema(_plain(json.loads(schema))) if writer else _parsed(json.loads(schema))
    except (*_UNUSABLE, fastavro.schema.SchemaParseException) as error:
        raise ConfigError(f"The schema is not valid Avro: {error}.") from error


def refusing(what: str) -> Read:
    """What reads nothing, and says what is wrong with each body. Raises Unreadable."""

    def refuse(_: Any) -> Any:
        raise Unreadable(WHOLE, what)

    return refuse


def _parsed(schema: Any) -> Any:
    """As fastavro takes it, with defaults as values."""
    named: dict[str, Any] = {}
    parsed = library().parse_schema(_plain(schema), named)
    fields = [f for node in named.values() for f in node.get("fields", ()) if "default" in f]
    values = [_value(f["default"], f["type"], named) for f in fields]
    for one, value in zip(fields, values, strict=True):
        one["default"] = value
    return parsed


def _value(default: Any, node: Any, named: Mapping[str, Any]) -> Any:
    """A default from the JSON of a schema as fastavro would read it from bytes."""
    if isinstance(node, str):
        return _value(default, named[node], named) if node in named else _scalar(default, {"type": node})
    if isinstance(node, list):
        branches = [one for one in node if (one == "null") == (default is None)]
        return _value(default, branches[0], named) if branches else default
    inner = node["type"]
    if inner == "record":
        return {f["name"]: _value(default.get(f["name"], f.get("default")), f["type"], named) for f in node["fields"]}
    if inner == "array":
        return [_value(one, node["items"], named) for one in default]
    if inner == "map":
        return {key: _value(one, node["values"], named) for key, one in default.items()}
    return _scalar(default, node)


def _scalar(default: Any, node: Mapping[str, Any]) -> Any:
    if node["type"] not in ("bytes", "fixed") or not isinstance(default, str):
        return default
    raw = default.encode("latin-1")
    return _exactly(raw, dict(node)) if node.get("logicalType") == _DECIMAL else raw


def _refuse_other_units(written: Any, wanted: Any) -> None:
    theirs, ours = (dict(_units(schemas.qualified(one), "", {})) for one in (written, wanted))
    for path in theirs.keys() & ours.keys():
        if theirs[path] != ours[path]:
            raise ValueError(f"{path.lstrip('.')} is written as {theirs[path]} and wanted as {ours[path]}")


def _units(node: Any, path: str, named: dict[str, Any], inside: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Where a schema of full names has logical types: path, and which one. What contains itself is gone through once."""
    if isinstance(node, str):
        if node in named and node not in inside:
            yield from _units(named[node], path, named, inside)
        return
    if isinstance(node, list):
        for one in node:
            yield from _units(one, path, named, inside)
        return
    if "name" in node:
        named[str(node["name"])] = node
        inside |= {str(node["name"])}
    if node.get("logicalType") not in (None, "decimal"):
        yield path, node["logicalType"]
    for step, child in _children(node):
        yield from _units(child, path + step, named, inside)


def _children(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in node.get("fields", ()):
        for name in (field["name"], *field.get("aliases", ())):
            yield f".{name}", field["type"]
    for key in ("items", "values"):
        if key in node:
            yield "[]", node[key]
    yield "", node["type"]
