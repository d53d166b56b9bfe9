"""Decoding JSON by columns: many bodies in one pass of pyarrow's reader, for bodies that it surely reads as `arrow_decode` does.

It answers for all of these bodies or for none. What it may read otherwise (numbers with more digits than Jackson takes, a name that
occurs twice, a value of another type ...) it leaves to the row-by-row decoder, whose verdict is the one that counts.
Called by dedup/arrow_decode.py.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json

MAX_DIGITS = 1000
"""Of a JSON number, as Jackson has it."""

MAX_DEPTH = 500
"""Brackets in a body. Jackson and Python end at a depth of about a thousand."""

MAX_SIZE = 50_000
"""Bytes of a body. Jackson takes no longer names than that."""

DATE = r"(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
"""A date as in RFC 3339."""

TIME = DATE + r"[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?"
"""A date and time as in RFC 3339 without its offset; digits behind the microseconds are cut off."""

OFFSET = r"(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9]|[+-]18:00)"

_DAY = r"^([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-[0-9]{2}-[0-9]{2}"
_MOMENT = _DAY + r"[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?"
"""The same for RE2, which looks neither ahead nor back; times of more than six digits are left to the row-by-row decoder."""

_NOT_NUMBERS = re.compile(rb"[:,[][ \t\r\n]*-?(?:NaN|Inf)")
"""The reader takes these for numbers, JSON does not."""

_PORTION = 1 << 18
"""Bytes that are counted at a time."""

_PLAIN = (pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float64(), pa.string())


def decode(bodies: pa.Array, schema: pa.Schema) -> pa.StructArray | None:
    """The value of each body, none of which may be null; or None, where one of them has to be looked at by itself.

    Returns:
        a struct with the schema's fields, every field nullable.
    """
    if not _reads(pa.struct(list(schema))) or not _plain(bodies):
        return None
    lines = _lines(bodies)
    if _null_between(lines, bodies):
        return None
    try:
        found = _read(lines, pa.schema([pa.field(f.name, _wire(f.type)) for f in schema]))
        return _struct(found.combine_chunks(), schema) if found.num_rows == len(bodies) else None
    except (pa.ArrowInvalid, _OtherwiseRead):
        return None


def _lines(bodies: pa.Array) -> pa.Buffer:
    """The bodies with a line break between each two. Not through a scalar, which would be a copy of all of them."""
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(bodies)], pa.int32()), bodies), b"\n")
    ends = joined.buffers()[1]
    start, end = np.frombuffer(ends, np.int32 if joined.type == pa.binary() else np.int64, 2, joined.offset).tolist()
    return joined.buffers()[2].slice(start, end - start)


def _null_between(lines: pa.Buffer, bodies: pa.Array) -> bool:
    """Whether a null may stand behind an object: there pyarrow's reader reads memory not its own (26.0; apache/arrow#47409)."""
    flat = _closing(np.frombuffer(lines, np.uint8)) == len(bodies)
    return not flat and bool(pc.any(pc.match_substring_regex(bodies, r"\}[ \t\r\n]*n")).as_py())


def _read(lines: pa.Buffer, wire: pa.Schema) -> pa.Table:
    whole = json.ReadOptions(use_threads=False, block_size=lines.size + 1)
    try:
        return json.read_json(pa.BufferReader(lines), whole, json.ParseOptions(wire, unexpected_field_behavior="error"))
    except pa.ArrowInvalid:
        # NaN in a field that is read shows; only in one that is left out it does not.
        if _NOT_NUMBERS.search(lines):
            raise
    return json.read_json(pa.BufferReader(lines), whole, json.ParseOptions(wire, unexpected_field_behavior="ignore"))


def _closing(data: npt.NDArray[np.uint8]) -> int:
    """How many braces close, counted in portions that a cache holds."""
    return sum(int(np.count_nonzero(data[at : at + _PORTION] == ord("}"))) for at in range(0, len(data), _PORTION))


class _OtherwiseRead(Exception):
    """A value may mean something else to the row-by-row decoder."""


def _reads(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_reads(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_list(kind):
        return _reads(kind.value_type)
    return kind in _PLAIN or pa.types.is_timestamp(kind) or pa.types.is_date32(kind)


def _plain(bodies: pa.Array) -> bool:
    # Where every body begins and ends like an object, as many objects as bodies are found only if each body is one object:
    # none can end in the next body, since `}` with `{` behind it is nowhere inside of an object.
    try:
        text = bodies.cast(pa.string())
    except pa.ArrowInvalid:  # some body is not UTF-8
        return False
    if not (len(text) and pc.all(pc.and_(pc.starts_with(text, "{"), pc.ends_with(text, "}"))).as_py()):
        return False
    size = pc.binary_length(text)
    longest = pc.max(size).as_py()
    if longest <= MAX_DIGITS:
        return True
    return longest <= MAX_SIZE and not _beyond(text.filter(pc.greater(size, MAX_DIGITS)))


def _beyond(text: pa.Array) -> bool:
    depth = pc.add(pc.count_substring(text, "{"), pc.count_substring(text, "["))
    digits = pc.match_substring_regex(text, "[-+0-9.eE]{" + str(MAX_DIGITS) + "}")
    return bool(pc.max(depth).as_py() > MAX_DEPTH or pc.any(digits).as_py())


def _wire(kind: pa.DataType) -> pa.DataType:
    """What the reader is asked for: it would take more forms of times and dates than RFC 3339 has."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(kind.field(i).name, _wire(kind.field(i).type)) for i in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(_wire(kind.value_type))
    return kind if kind in _PLAIN else pa.string()


def _struct(found: pa.Table | pa.StructArray, fields: pa.Schema | pa.StructType) -> pa.StructArray:
    rows = isinstance(found, pa.Table)
    columns = [found[f.name].chunk(0) for f in fields] if rows else found.flatten()
    missing = None if rows else found.is_null()
    values = [_value(column, f, missing) for column, f in zip(columns, fields, strict=True)]
    return pa.StructArray.from_arrays(values, fields=[pa.field(f.name, v.type) for f, v in zip(fields, values, strict=True)], mask=missing)


def _value(column: pa.Array, field: pa.Field, missing: pa.Array | None) -> pa.Array:
    """One field in its final type.

    Args:
        missing: where the struct that the field belongs to is null.
    """
    if not field.nullable and column.null_count:
        absent = column.is_null() if missing is None else pc.and_not(column.is_null(), missing)
        if pc.any(absent).as_py():
            raise _OtherwiseRead
    kind = field.type
    if pa.types.is_struct(kind):
        return _struct(column, kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(column.offsets, _value(column.values, kind.value_field, None), mask=column.is_null())
    if kind == pa.float64() and (pc.all(pc.is_finite(column)).as_py() is False or _minus_zero(column)):
        raise _OtherwiseRead
    return column if kind in _PLAIN else _time(column, kind)


def _minus_zero(column: pa.Array) -> bool:
    """Whether one is -0.0: written as -0 it is an integer, and 0.0."""
    return bool(pc.any(pc.equal(column.view(pa.int64()), -(2**63))).as_py())


def _time(column: pa.Array, kind: pa.DataType) -> pa.Array:
    shape = _DAY if pa.types.is_date32(kind) else _MOMENT + (OFFSET if kind.tz else "")
    if pc.all(pc.match_substring_regex(column, shape + "$")).as_py() is False:
        raise _OtherwiseRead
    return column.cast(kind)
