"""Decide whether an Arrow column fits a PostgreSQL column, and what it must be cast to: first by types, then by values.

Promises that the server gets what the handler gave: a cast that would lose anything is refused, and the error names the ALTER TABLE that
would make room, with Arrow types as PostgreSQL calls them. Pure; called by sinks.py before any row is sent.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from dedup.core.value_rules import Wrong, json_text

_VARLENA_HEADER = 4
"""A type modifier of text and numeric counts from here. Source: PostgreSQL's VARHDRSZ."""

_INTS = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
TEXTS = frozenset({"text", "varchar", "bpchar", "citext", "xml"})
_PGPQ_ELEMENTS = frozenset({"bool", "int2", "int4", "int8", "float4", "float8", "text", "bytea", "date", "timestamp"})
"""Element types for which pgpq writes the type number that PostgreSQL compares."""

_SECOND = 1_000_000

WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("oid", "xid", "cid", "regclass", "regcollation", "regconfig", "regdictionary", "regnamespace"), (0, 2**32 - 1)),
    **dict.fromkeys(("regoper", "regoperator", "regproc", "regprocedure", "regrole", "regtype"), (0, 2**32 - 1)),
    "xid8": (0, 2**64 - 1),
    "money": (-(2**63 // 100), 2**63 // 100),
}
"""Types that take whole numbers from their text: from, to. The server would wrap others, or take them for something else."""

BYTES = {"name": 63, "char": 1}
"""Types of which the server cuts off what is longer. Source: PostgreSQL 16 manual, "Character Types"."""

_FIELDS = ((12, 1), (11, 60 * _SECOND), (10, 3600 * _SECOND))
"""Bit of the last field of an interval (second, minute, hour) -> what it keeps, in microseconds. Source: PostgreSQL's utils/timestamp.h."""


@dataclass(frozen=True)
class Column:
    """One column of a sink, as the catalog has it."""

    name: str
    type: str  # as people write it: character varying(5)
    base: str  # pg_type's name; a domain's base type
    kind: str  # pg_type.typtype: b base, e enum, c composite, ...
    element: str | None  # element type of an array
    modifier: int  # atttypmod; -1 for none
    not_null: bool
    has_default: bool
    generated: bool
    plain_element: bool = True  # the elements of an array are of no domain
    dimensions: int = 1  # of an array, as the table declares them


class Misfit(Exception):
    """A column that does not fit; `wanted` is the PostgreSQL type that would."""

    def __init__(self, why: str, wanted: str | None = None) -> None:
        super().__init__(why)
        self.wanted = wanted


@dataclass(frozen=True)
class CastPlan:
    """How to send one column."""

    cast: Callable[[pa.ChunkedArray], pa.ChunkedArray]
    fast: bool  # pgpq can encode the result


def plan(arrow: pa.DataType, column: Column) -> CastPlan:
    """How values of this type go into the column. Raises Misfit."""
    arrow = plain(arrow)
    for takes, makes in _RULES:
        if takes(column):
            found = makes(arrow, column)
            if found is None:
                raise Misfit(f"{named(arrow)} does not go into {column.type}", type_for(arrow))
            return _decoding(found)
    raise AssertionError("the last rule takes every column")


def as_text() -> CastPlan:
    """For texts that the server reads, whatever the column is."""
    return CastPlan(lambda values: values, fast=False)


def is_numeric_text(arrow: pa.DataType, column: Column) -> bool:
    """Whether these are texts of numbers, or lists of them."""
    return "numeric" in (column.base, column.element) and is_text(arrow.value_type if at.is_list(arrow) else arrow)


def _decoding(inner: CastPlan) -> CastPlan:
    return CastPlan(lambda values: inner.cast(_decoded(values)), inner.fast)


def _decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if isinstance(values.type, pa.BaseExtensionType):
        values = pa.chunked_array([c.storage for c in values.chunks], plain(values.type))
    return values.cast(plain(values.type)) if at.is_dictionary(values.type) else values


def step_of(column: Column) -> int:
    """Microseconds that a value of this type of time is a multiple of; 0 where a duration can only be nothing."""
    if column.modifier < 0 or column.base not in ("timestamp", "timestamptz", "time", "timetz", "interval"):
        return 1
    if column.base != "interval":
        return _digits(column.modifier)
    fields, digits = column.modifier >> 16, column.modifier & 0xFFFF
    step = next((step for bit, step in _FIELDS if fields >> bit & 1), 0)
    return _digits(digits) if step == 1 and digits != 0xFFFF else step


def _digits(of_a_second: int) -> int:
    return int(10 ** (6 - of_a_second))


def _rounded(plan: CastPlan, column: Column) -> CastPlan:
    """The plan, which refuses what the server would round or cut to the column's step."""
    step = step_of(column)

    def cast(values: pa.ChunkedArray) -> pa.ChunkedArray:
        made = plan.cast(values)
        whole = pc.fill_null(made.cast(pa.int64()), 0).to_numpy()
        finer = np.flatnonzero(whole % step if step else whole)
        if len(finer):
            raise Misfit(f"row {finer[0]} is finer than {column.type}, which would round or cut it", type_for(made.type))
        return made

    return plan if step == 1 else CastPlan(cast, plan.fast)


def _to(arrow: pa.DataType, fast: bool = True, wanted: str | None = None) -> CastPlan:
    def cast(values: pa.ChunkedArray) -> pa.ChunkedArray:
        try:
            return values.cast(arrow)
        except pa.ArrowInvalid as error:
            raise Misfit(f"a value does not fit: {error}", wanted or type_for(values.type)) from error

    return CastPlan(cast, fast)


def _bool(arrow: pa.DataType, column: Column) -> CastPlan | None:
    return _to(pa.bool_()) if at.is_boolean(arrow) or at.is_null(arrow) else None


def _int(arrow: pa.DataType, column: Column) -> CastPlan | None:
    return _to(_INTS[column.base]) if at.is_integer(arrow) or at.is_null(arrow) or (at.is_decimal(arrow) and arrow.scale <= 0) else None


def _float(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if at.is_float64(arrow) and column.base == "float4":
        return None
    fits = at.is_floating(arrow) or at.is_integer(arrow) or at.is_null(arrow)
    return _to(pa.float32() if column.base == "float4" else pa.float64()) if fits else None


def _numeric(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if at.is_floating(arrow):  # PostgreSQL reads the shortest decimal form; infinities included
        return CastPlan(lambda values: values if at.is_float64(arrow) else values.cast(pa.string()), fast=False)
    if not (at.is_decimal(arrow) or at.is_integer(arrow) or at.is_null(arrow)):
        return None
    precision, scale = _precision(column, arrow)
    if not 0 <= scale <= precision <= 38 or (at.is_integer(arrow) and scale > 18):
        return CastPlan(partial(_whole, column, scale), fast=False)
    if at.is_integer(arrow):  # Arrow asks for room for any integer before it looks at the values
        wide = _to(pa.decimal128(20 + scale, scale))
        return CastPlan(lambda values: _to(pa.decimal128(precision, scale), wanted=type_for(arrow)).cast(wide.cast(values)), fast=True)
    return _to(pa.decimal128(precision, scale))


def _whole(column: Column, scale: int, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values, which go as text. Raises Misfit for one with digits that the server would round away."""
    if at.is_null(values.type):
        return values
    finer = pc.fill_null(pc.not_equal(pc.round(values, ndigits=scale), values), False)
    if (first := pc.index(finer, True).as_py()) >= 0:
        raise Misfit(f"row {first} is finer than {column.type}, which would round it", type_for(values.type))
    return values


def size_of(column: Column) -> tuple[int | None, int | None]:
    """Precision and scale of a numeric column; None where it has none."""
    if column.modifier < _VARLENA_HEADER:
        return None, None
    packed = column.modifier - _VARLENA_HEADER
    scale = packed & 0x7FF
    return packed >> 16, scale - 0x800 if scale >= 0x400 else scale


def _precision(column: Column, arrow: pa.DataType) -> tuple[int, int]:
    precision, scale = size_of(column)
    if precision is not None and scale is not None:
        return precision, scale
    return (arrow.precision, arrow.scale) if at.is_decimal(arrow) else (20, 0)


def _text(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if not (is_text(arrow) or at.is_null(arrow)):
        return None
    limit = length_of(column)
    return CastPlan(lambda values: _short(_clean(values.cast(pa.string())), limit), fast=True)


def length_of(column: Column) -> int | None:
    """Characters that a text column takes; None where it has no limit."""
    return column.modifier - _VARLENA_HEADER if column.base in ("varchar", "bpchar") and column.modifier >= 0 else None


def _clean(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Refuse what PostgreSQL's text cannot hold."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Misfit(f"text that is not UTF-8: {error}", "bytea") from error
    if not any(map(_has_nul, values.chunks)):
        return values
    nul = pc.index(pc.fill_null(pc.match_substring(values, "\0"), False), True).as_py()
    if nul >= 0:
        raise Misfit(f"row {nul} holds a NUL character, which PostgreSQL's text cannot hold: replace it, or keep bytes", "bytea")
    return values


def _has_nul(chunk: pa.StringArray) -> bool:
    """Whether there may be a NUL: looks at the bytes as they lie, null slots included."""
    offsets = np.frombuffer(chunk.buffers()[1] or b"\0\0\0\0", dtype=np.int32)
    first, last = offsets[chunk.offset], offsets[chunk.offset + len(chunk)] if len(chunk) else offsets[chunk.offset]
    text = np.frombuffer(chunk.buffers()[2] or b"", dtype=np.uint8)[first:last]
    return bool(np.count_nonzero(text) < len(text))


def _short(values: pa.ChunkedArray, limit: int | None) -> pa.ChunkedArray:
    if limit is not None and (longest := pc.max(pc.utf8_length(values)).as_py() or 0) > limit:
        raise Misfit(f"a value has {longest} characters", f"varchar({longest})")
    return values


def _json(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if is_text(arrow) or at.is_null(arrow):
        return CastPlan(lambda values: _clean(values.cast(pa.string())), fast=True)
    if at.is_nested(arrow) and not _has_bytes(arrow):
        return CastPlan(_as_json, fast=True)
    return None


def _has_bytes(arrow: pa.DataType) -> bool:
    """Whether there are bytes somewhere in values of this type: JSON has none."""
    inner = [arrow.field(number).type for number in range(arrow.num_fields)]
    return at.is_binary(arrow) or at.is_large_binary(arrow) or at.is_fixed_size_binary(arrow) or any(map(_has_bytes, inner))


def _as_json(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """As rows that are dicts are written: a map with texts as keys is an object, a time is as in ISO 8601."""
    shaped, made = _shape(values.type), []
    for row, value in enumerate(values):
        try:
            made.append(json_text(shaped(value.as_py())) if value.is_valid else None)
        except (Wrong, OverflowError, ValueError) as error:  # Python has no times outside the years 1 to 9999
            raise Misfit(f"row {row} cannot be JSON: {error}") from error
    return pa.chunked_array([made], pa.string())


def _shape(arrow: pa.DataType) -> Callable[[Any], Any]:
    """What makes objects of the maps in a value of this type, which Python has as lists of pairs."""
    if at.is_map(arrow):
        inner = _shape(arrow.item_type)
        if is_text(arrow.key_type):
            return _if_there(lambda value: _object([(key, inner(item)) for key, item in value]))
        return _if_there(lambda value: [[key, inner(item)] for key, item in value])
    if at.is_struct(arrow):
        parts = {field.name: _shape(field.type) for field in arrow}
        return _if_there(lambda value: {name: part(value[name]) for name, part in parts.items()})
    if at.is_nested(arrow) and arrow.num_fields == 1:
        inner = _shape(arrow.field(0).type)
        return _if_there(lambda value: [inner(item) for item in value])
    return lambda value: value


def _if_there(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else make(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise Wrong("two keys of a map are one text")
    return found


def _bytea(arrow: pa.DataType, column: Column) -> CastPlan | None:
    return _to(pa.binary()) if is_bytes(arrow) or at.is_null(arrow) else None


def _uuid(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if is_text(arrow):
        return CastPlan(_parsed_uuids, fast=True)
    fits = at.is_null(arrow) or (at.is_fixed_size_binary(arrow) and arrow.byte_width == 16) or at.is_binary(arrow)
    return _to(pa.binary(16)) if fits else None


def _parsed_uuids(values: pa.ChunkedArray) -> pa.ChunkedArray:
    digits = pc.replace_substring(values.cast(pa.string()), "-", "")
    wrong = pc.invert(pc.match_substring_regex(digits, "^[0-9a-fA-F]{32}$"))
    at_row = pc.index(pc.fill_null(wrong, False), True).as_py() if len(values) else -1
    if at_row >= 0:
        raise Misfit(f"row {at_row} is not a UUID", "text")
    present = pc.drop_null(digits)
    raw = binascii.unhexlify("".join(present.to_pylist()))
    packed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(present), [None, pa.py_buffer(raw)])
    valid = pc.is_valid(digits)
    place = pc.subtract(pc.cumulative_sum(valid.cast(pa.int64())), 1)
    return pa.chunked_array([packed.take(pc.if_else(valid, place, None).combine_chunks())], pa.binary(16))


def _date(arrow: pa.DataType, column: Column) -> CastPlan | None:
    return _to(pa.date32()) if at.is_date(arrow) or at.is_null(arrow) else None


def _timestamp(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if not (at.is_timestamp(arrow) or at.is_null(arrow)):
        return None
    if column.base == "timestamptz":
        return _rounded(_to(pa.timestamp("us", "UTC")), column)  # without a zone: taken as UTC
    moments = _to(pa.timestamp("us", getattr(arrow, "tz", None) and "UTC"))
    return _rounded(CastPlan(lambda values: moments.cast(values).cast(pa.timestamp("us")), fast=True), column)


def _time(arrow: pa.DataType, column: Column) -> CastPlan | None:
    return _rounded(_to(pa.time64("us")), column) if at.is_time(arrow) or at.is_null(arrow) else None


def _interval(arrow: pa.DataType, column: Column) -> CastPlan | None:
    return _rounded(_to(pa.duration("us")), column) if at.is_duration(arrow) or at.is_null(arrow) else None


def _array(arrow: pa.DataType, column: Column) -> CastPlan | None:
    if not (at.is_list(arrow) or at.is_large_list(arrow) or at.is_fixed_size_list(arrow)):
        return _to(pa.list_(pa.null()), fast=False) if at.is_null(arrow) else None
    element = element_of(column)
    inner = plan(arrow.value_type, element)
    fast = inner.fast and element.base in _PGPQ_ELEMENTS and column.plain_element and column.dimensions == 1

    def cast(values: pa.ChunkedArray) -> pa.ChunkedArray:
        return pa.chunked_array([_inner(c.cast(pa.list_(arrow.value_type)), inner) for c in values.chunks])

    return CastPlan(cast, fast)


def element_of(column: Column) -> Column:
    """The elements of an array column, as a column: arrays again where it has more dimensions."""
    if column.dimensions > 1:
        return replace(column, name="", not_null=False, dimensions=column.dimensions - 1)
    return Column("", column.element or "", column.element or "", "b", None, column.modifier, False, False, False)


def _inner(chunk: pa.ListArray, inner: CastPlan) -> pa.ListArray:
    items = inner.cast(pa.chunked_array([chunk.flatten()]))
    lengths = pc.fill_null(pc.list_value_length(chunk), 0)
    ends = pc.cumulative_sum(lengths.cast(pa.int32())) if len(chunk) else pa.array([], pa.int32())
    starts = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    merged = items.combine_chunks()
    flat = pa.concat_arrays(merged.chunks) if isinstance(merged, pa.ChunkedArray) else merged
    return pa.ListArray.from_arrays(starts, flat, mask=chunk.is_null())


def _anything(arrow: pa.DataType, column: Column) -> CastPlan | None:
    """Other types are read by the server from their text form."""
    if at.is_integer(arrow) and column.base in WHOLE:
        return CastPlan(lambda values: _within(values, *WHOLE[column.base]).cast(pa.string()), fast=False)
    fits = is_text(arrow) or at.is_null(arrow)
    return CastPlan(lambda values: _uncut(_clean(values.cast(pa.string())), column), fast=column.kind == "e") if fits else None


def _within(values: pa.ChunkedArray, first: int, last: int) -> pa.ChunkedArray:
    found = pc.min_max(values).as_py()
    for number in found.values():
        if number is not None and not first <= number <= last:
            raise Misfit(f"{number} is out of range", "numeric(20)")
    return values


def _uncut(values: pa.ChunkedArray, column: Column) -> pa.ChunkedArray:
    limit = BYTES.get(column.base)
    if limit is not None and (longest := pc.max(pc.binary_length(values)).as_py() or 0) > limit:
        raise Misfit(f"a value has {longest} bytes, and the server would cut it to {limit}", "text")
    return values


def type_for(arrow: pa.DataType) -> str:
    """The PostgreSQL type that takes every value of an Arrow type."""
    arrow = plain(arrow)
    if at.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})"
    if at.is_timestamp(arrow):
        return "timestamptz" if arrow.tz else "timestamp"
    if at.is_list(arrow) and not at.is_nested(arrow.value_type):
        return type_for(arrow.value_type) + "[]"
    return next((name for is_it, name in _NAMES if is_it(arrow)), "text")


def plain(arrow: pa.DataType) -> pa.DataType:
    """The type of the values themselves, below dictionaries and extensions."""
    if at.is_dictionary(arrow):
        return plain(arrow.value_type)
    return arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow


def is_bytes(arrow: pa.DataType) -> bool:
    """Any of the binary types."""
    return bool(at.is_binary(arrow) or at.is_large_binary(arrow) or at.is_fixed_size_binary(arrow) or at.is_binary_view(arrow))


_NAMES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (at.is_boolean, "boolean"),
    (at.is_int8, "smallint"),
    (at.is_int16, "smallint"),
    (at.is_uint8, "smallint"),
    (at.is_int32, "integer"),
    (at.is_uint16, "integer"),
    (at.is_uint64, "numeric(20)"),
    (at.is_integer, "bigint"),
    (at.is_float64, "double precision"),
    (at.is_floating, "real"),
    (at.is_date, "date"),
    (at.is_time, "time"),
    (at.is_duration, "interval"),
    (is_bytes, "bytea"),
    (at.is_nested, "jsonb"),
)


def is_text(arrow: pa.DataType) -> bool:
    """Any of the string types."""
    return bool(at.is_string(arrow) or at.is_large_string(arrow) or at.is_string_view(arrow))


def as_json(value: Any) -> str:
    """A value as JSON text; text is JSON already."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def named(arrow: pa.DataType) -> str:
    """Both names of a type."""
    return f"{arrow} ({type_for(arrow)})"


_RULES: tuple[tuple[Callable[[Column], bool], Callable[[pa.DataType, Column], CastPlan | None]], ...] = (
    (lambda c: c.base == "bool", _bool),
    (lambda c: c.base in _INTS, _int),
    (lambda c: c.base in ("float4", "float8"), _float),
    (lambda c: c.base == "numeric", _numeric),
    (lambda c: c.base in TEXTS, _text),
    (lambda c: c.base in ("json", "jsonb"), _json),
    (lambda c: c.base == "bytea", _bytea),
    (lambda c: c.base == "uuid", _uuid),
    (lambda c: c.base == "date", _date),
    (lambda c: c.base in ("timestamp", "timestamptz"), _timestamp),
    (lambda c: c.base == "time", _time),
    (lambda c: c.base == "interval", _interval),
    (lambda c: c.element is not None, _array),
    (lambda c: True, _anything),
)
