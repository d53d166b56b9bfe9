"""JSON bodies to the column `data`: by columns as far as pyarrow's reader can answer for a whole block of bodies, else one by one.

The verdict of the row-by-row decoder is the one that counts. What pyarrow's reader may read otherwise (numbers with more than a thousand
digits, a name that occurs twice, a value of another type ...) is left to it.
"""

from __future__ import annotations

import codecs
import datetime as dt
import json
import math
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.json import ParseOptions, ReadOptions, read_json

from dedup.decode import schemas, values
from dedup.decode.values import WHOLE, Read, Unreadable

_LONE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair in a name becomes a question mark
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_EPOCH = dt.datetime(1970, 1, 1)
_INTEGERS = {pa.int8(): 2**7, pa.int16(): 2**15, pa.int32(): 2**31, pa.int64(): 2**63}
_EXACT = Context(prec=76, Emin=-999999, Emax=999999, traps=[InvalidOperation, Inexact])

_NO_NUMBER = "must be a number"
_WITH_OFFSET, _WITHOUT_OFFSET = "with its offset, as 2026-01-31T14:00:00Z", "without an offset, as 2026-01-31T14:00:00"


BLOCK = 16_384
"""Rows decoded at a time: memory of one block serves the next one, and threads take turns. Parsing does not hold Python's lock."""

THREADS = min(4, os.cpu_count() or 1)

_SMALLER = {BLOCK: 1024, 1024: 32, 32: 0}
"""Rows of the blocks that a block is cut into; 0: they are taken one by one."""


def decode(bodies: pa.Array, schema: pa.Schema) -> pa.Array:
    """`data` for each body; null where there is none, and where it does not decode."""
    data = _in_blocks(bodies.drop_null(), schema)
    if not bodies.null_count:
        return data
    return data.take(pc.if_else(bodies.is_valid(), pc.subtract(pc.cumulative_sum(bodies.is_valid().cast(pa.int64())), 1), None))


def _in_blocks(bodies: pa.Array, schema: pa.Schema, size: int = BLOCK) -> pa.Array:
    """Bodies that are there, in blocks of this size, and those of a block that has to be looked at in smaller ones."""
    blocks = [bodies.slice(at, size) for at in range(0, max(len(bodies), 1), size)]
    read = partial(_block, schema=schema, smaller=_SMALLER[size])
    if size < BLOCK or len(blocks) == 1:
        return pa.concat_arrays(list(map(read, blocks)))
    with ThreadPoolExecutor(THREADS, "dedup decode") as threads:
        return pa.concat_arrays(list(threads.map(read, blocks)))


def _block(bodies: pa.Array, schema: pa.Schema, smaller: int) -> pa.Array:
    if (data := together(bodies, schema)) is not None:
        return data.cast(schemas.data_type(schema))
    if smaller and len(bodies) > smaller:
        return _in_blocks(bodies, schema, smaller)
    return values.column(bodies.to_pylist(), reader(schema), schemas.data_type(schema), schemas.data_type(schema))


def reader(schema: pa.Schema) -> Read:
    """What reads one body. Raises Unreadable and other FAILURES for one that does not decode."""
    read = _struct("$", list(schema))
    loads = _decoder().decode

    def whole(body: bytes) -> Any:
        return read(loads(body.decode()))

    return whole


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_Pairs, parse_int=_integer, parse_float=_fraction, parse_constant=_refuse)


def fault(body: bytes) -> Unreadable | None:
    """What keeps a body from being JSON, whatever its schema; None where it is JSON."""
    if not body:
        return Unreadable(WHOLE, "is not JSON: it is empty")
    try:
        _decoder().decode(body.decode())
    except values.FAILURES as error:
        return reason(body, error)
    return None


def reason(body: bytes, error: BaseException) -> Unreadable:
    """Why a body does not decode that `reader` raised this for."""
    if isinstance(error, Unreadable):
        return error
    if body.startswith(codecs.BOM_UTF8):
        return Unreadable(WHOLE, "begins with a byte order mark, which JSON does not have")
    if body.startswith(b"\0"):
        return Unreadable(WHOLE, "is not JSON: it begins with a zero byte, as Avro of a schema registry does")
    if isinstance(error, json.JSONDecodeError):
        return Unreadable(WHOLE, f"is not JSON: {error.msg}, at character {error.pos} of {len(error.doc)}")
    if isinstance(error, UnicodeDecodeError):
        return Unreadable(WHOLE, f"is not UTF-8: byte 0x{body[error.start]:02x} at position {error.start}")
    return Unreadable(WHOLE, "is nested too deeply" if isinstance(error, RecursionError) else f"is not read: {error}")


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it was written, repeated names included."""


class _Float(str):
    """A JSON number with a fraction or an exponent, as it was written."""

    __slots__ = ()


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Unreadable(WHOLE, f"has a number of more than {MAX_DIGITS:,} digits")
    return int(text)


def _fraction(text: str) -> _Float:
    if len(text) > MAX_DIGITS:
        raise Unreadable(WHOLE, f"has a number of more than {MAX_DIGITS:,} digits")
    return _Float(text)


def _refuse(word: str) -> Any:
    raise Unreadable(WHOLE, f"is not JSON: it has {word}, which is no number of JSON")


def _wrong(path: str, value: Any, what: str) -> Unreadable:
    """What stands at a path, and what it must be instead."""
    return Unreadable(path if path != "$" else WHOLE, what, _shown(value))


def _shown(value: Any) -> str:
    if isinstance(value, _Pairs):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, _Float):
        return values.shown(value)
    return values.shown(json.dumps(value, ensure_ascii=False))


def _absent(path: str, how: str) -> Unreadable:
    return Unreadable(path, f"is {how}; the schema requires it")


def _reader(path: str, kind: pa.DataType) -> Read:
    """What reads a value of this type, or says what is wrong with the one at this path."""
    if pa.types.is_struct(kind):
        return _struct(path, list(kind))
    if pa.types.is_list(kind):
        return _list(path, kind.value_field)
    if pa.types.is_map(kind):
        return _map(path, kind.item_field)
    if pa.types.is_decimal(kind):
        return partial(_decimal, path, kind)
    if pa.types.is_timestamp(kind):
        return partial(_timestamp, path, re.compile(TIME + (OFFSET if kind.tz else "")))
    if kind in _INTEGERS:
        return partial(_whole, path, _INTEGERS[kind])
    return partial({pa.bool_(): _boolean, pa.string(): _string, pa.date32(): _date, pa.float32(): _single}.get(kind, _number), path)


def _field(path: str, field: pa.Field) -> Read:
    read, nullable = _reader(path, field.type), field.nullable

    def value(found: Any) -> Any:
        if found is not None:
            return read(found)
        if not nullable:
            raise _absent(path, "null")
        return None

    return value


def _struct(path: str, found: list[pa.Field]) -> Read:
    readers = {f.name: _reader(f"{path}.{f.name}", f.type) for f in found}
    needed = [f.name for f in found if not f.nullable]
    texts = {f.name for f in found if _is_text(f.type)}

    def value(pairs: Any) -> dict[str, Any]:
        if type(pairs) is not _Pairs:
            raise _wrong(path, pairs, "must be an object")
        # Of a name that is repeated the last value counts. The replaced ones are judged too, unless they should be text.
        row = {name: item if item is None or name in texts else readers[name](item) for name, item in pairs if name in readers}
        row |= {name: readers[name](row[name]) for name in texts if row.get(name) is not None}
        for name in needed:
            if row.get(name) is None:
                raise _absent(f"{path}.{name}", "null" if name in row else "missing")
        return row

    return value


def _list(path: str, item: pa.Field) -> Read:
    read = _field(path + "[]", item)

    def value(found: Any) -> list[Any]:
        if type(found) is not list:
            raise _wrong(path, found, "must be an array")
        return [read(one) for one in found]

    return value


def _map(path: str, item: pa.Field) -> Read:
    read = _field(path + ".*", item)

    def value(pairs: Any) -> list[tuple[str, Any]]:
        if type(pairs) is not _Pairs:
            raise _wrong(path, pairs, "must be an object")
        if len({name for name, _ in pairs}) < len(pairs):
            raise Unreadable(path, "has a name twice")
        return [(_LONE.sub("?", name), read(one)) for name, one in pairs]

    return value


def _boolean(path: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(path, value, "must be true or false")
    return value is True


def _string(path: str, value: Any) -> str:
    if type(value) is not str:
        raise _wrong(path, value, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unreadable(path, "has half of a surrogate pair, which is no character") from error
    return value


def _is_text(kind: pa.DataType) -> bool:
    """Whether a value of this type is a JSON string."""
    return bool(pa.types.is_string(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _whole(path: str, limit: int, value: Any) -> int:
    if type(value) is _Float:  # of a writer that has made it a float, which may have lost digits
        raise _wrong(path, value, "must be a whole number without a decimal point or an exponent")
    if type(value) is not int or not -limit <= value < limit:
        raise _wrong(path, value, f"must be a whole number from {-limit} to {limit - 1}")
    return value


def _number(path: str, value: Any, kind: str = "DOUBLE") -> float:
    if type(value) not in (int, _Float):
        raise _wrong(path, value, _NO_NUMBER)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise _wrong(path, value, f"must be a number that {kind} can hold")
    return number


def _single(path: str, value: Any) -> float:
    number = _number(path, value, "FLOAT")
    try:
        struct.pack("<f", number)
    except OverflowError as error:
        raise _wrong(path, value, "must be a number that FLOAT can hold") from error
    return number


def _decimal(path: str, kind: pa.DataType, value: Any) -> Decimal:
    """The exact value: a digit that the column has no room for makes the body undecodable, since amounts of money are never rounded."""
    if type(value) not in (int, _Float, str) or not _NUMBER.fullmatch(text := str(value)):
        raise _wrong(path, value, _NO_NUMBER)
    try:
        number = Decimal(text).quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except Inexact as error:
        raise _wrong(path, value, f"must have at most {kind.scale} digits behind the decimal point") from error
    except InvalidOperation:
        number = None
    if number is None or (number and number.adjusted() >= kind.precision - kind.scale):
        raise _wrong(path, value, f"must have at most {kind.precision - kind.scale} digits before the decimal point")
    return number


def _date(path: str, value: Any) -> int:
    try:
        if type(value) is str and re.fullmatch(DATE, value):
            return dt.date.fromisoformat(value).toordinal() - _EPOCH.toordinal()
    except ValueError:
        pass  # a day that its month does not have
    raise _wrong(path, value, "must be a date, as 2026-01-31")


def _timestamp(path: str, shape: re.Pattern[str], value: Any) -> int:
    try:
        if type(value) is str and shape.fullmatch(value):
            return _microseconds(value)
    except ValueError:
        pass  # a day that its month does not have, an hour that no day has
    with_offset = shape.pattern.endswith(OFFSET)
    raise _wrong(path, value, f"must be a time {_WITH_OFFSET if with_offset else _WITHOUT_OFFSET}")


def _microseconds(value: str) -> int:
    fraction = re.sub("[^0-9].*", "", value[20:]) if value[19:20] == "." else ""
    seconds = (dt.datetime.fromisoformat(value[:19]) - _EPOCH) // dt.timedelta(seconds=1)
    return (seconds - _seconds_east(value)) * 1_000_000 + int(fraction.ljust(6, "0")[:6])


def _seconds_east(value: str) -> int:
    zone = re.search(r"[+-]([0-9]{2}):([0-9]{2})$", value[19:])
    if zone is None:
        return 0
    seconds = int(zone[1]) * 3600 + int(zone[2]) * 60
    return -seconds if zone[0][0] == "-" else seconds


# By columns: many bodies in one pass of pyarrow's reader.

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

_PLAIN = (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float64(), pa.string())


def together(bodies: pa.Array, schema: pa.Schema) -> pa.StructArray | None:
    """The value of each body, none of which may be null; or None, where one of them has to be looked at by itself.

    Returns:
        a struct with the schema's fields, every field nullable.
    """
    if not _reads(pa.struct(list(schema))) or not _ordinary(bodies):
        return None
    lines = _lines(bodies)
    if _null_between(lines, bodies):
        return None
    try:
        found = _read(lines, pa.schema([pa.field(f.name, _wire(f.type)) for f in schema]))
        return _columns(found.combine_chunks(), schema) if found.num_rows == len(bodies) else None
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
    whole = ReadOptions(use_threads=False, block_size=lines.size + 1)
    try:
        return read_json(pa.BufferReader(lines), whole, ParseOptions(wire, unexpected_field_behavior="error"))
    except pa.ArrowInvalid:
        # NaN in a field that is read shows; only in one that is left out it does not.
        if _NOT_NUMBERS.search(lines):
            raise
    return read_json(pa.BufferReader(lines), whole, ParseOptions(wire, unexpected_field_behavior="ignore"))


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


def _ordinary(bodies: pa.Array) -> bool:
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


def _columns(found: pa.Table | pa.StructArray, fields: pa.Schema | pa.StructType) -> pa.StructArray:
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
        return _columns(column, kind)
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
