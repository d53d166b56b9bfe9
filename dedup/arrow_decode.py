"""Decoding without Spark: bodies to the column `data`, with the same verdicts as dedup/spark/decode.py.

JSON goes by columns (dedup/arrow_json.py) as far as that can answer for a whole block of bodies; what is left, and Avro, takes
one Python call per row. Called by dedup/arrow.py.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dedup import arrow_avro, arrow_json, arrow_rows
from dedup.arrow_json import DATE, MAX_DIGITS, OFFSET, TIME
from dedup.arrow_rows import Read, Wrong
from dedup.decode import Decoder

_LONE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair in a name becomes what Java writes for it
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_EPOCH = dt.datetime(1970, 1, 1)
_INTEGERS = {pa.int16(): 2**15, pa.int32(): 2**31, pa.int64(): 2**63}
_DECIMALS = Context(prec=76, rounding=ROUND_HALF_UP, Emin=-999999, Emax=999999)


BLOCK = 16_384
"""Rows decoded at a time: memory of one block serves the next one, and threads take turns. Parsing does not hold Python's lock."""

THREADS = min(4, os.cpu_count() or 1)

_SMALLER = {BLOCK: 1024, 1024: 32, 32: 0}
"""Rows of the blocks that a block is cut into; 0: they are taken one by one."""


def decode(bodies: pa.Array, decoder: Decoder) -> tuple[pa.Array, pa.Array]:
    """`data` for each body, null where there is none, and whether a body is there and does not decode."""
    if decoder.format == "avro":
        return _by_rows(bodies, decoder, *arrow_avro.reader(decoder))
    data, wrong = _in_blocks(bodies.drop_null(), decoder)
    if not bodies.null_count:
        return data, wrong
    at = pc.if_else(bodies.is_valid(), pc.subtract(pc.cumulative_sum(bodies.is_valid().cast(pa.int64())), 1), None)
    return data.take(at), pc.fill_null(wrong.take(at), False)


def _in_blocks(bodies: pa.Array, decoder: Decoder, size: int = BLOCK) -> tuple[pa.Array, pa.Array]:
    """Bodies that are there, in blocks of this size, and those of a block that has to be looked at in smaller ones."""
    blocks = [bodies.slice(at, size) for at in range(0, max(len(bodies), 1), size)]
    read = partial(_block, decoder=decoder, smaller=_SMALLER[size])
    if size < BLOCK or len(blocks) == 1:
        found = list(map(read, blocks))
    else:
        with ThreadPoolExecutor(THREADS, "dedup decode") as threads:
            found = list(threads.map(read, blocks))
    return pa.concat_arrays([data for data, _ in found]), pa.concat_arrays([wrong for _, wrong in found])


def _block(bodies: pa.Array, decoder: Decoder, smaller: int) -> tuple[pa.Array, pa.Array]:
    if (data := arrow_json.decode(bodies, decoder.schema)) is not None:
        return data.cast(decoder.type), pa.array(np.zeros(len(bodies), dtype=bool))
    if smaller and len(bodies) > smaller:
        return _in_blocks(bodies, decoder, smaller)
    return _by_rows(bodies, decoder, *_json_reader(decoder))


def _by_rows(bodies: pa.Array, decoder: Decoder, read: Read, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    data = arrow_rows.column(bodies.to_pylist(), read, kind, decoder.type)
    return data, pc.and_(bodies.is_valid(), data.is_null())


def _json_reader(decoder: Decoder) -> tuple[Read, pa.DataType]:
    read = _struct(list(decoder.schema))
    loads = json.JSONDecoder(object_pairs_hook=_Pairs, parse_int=_integer, parse_float=_fraction, parse_constant=_refuse).decode

    def whole(body: bytes) -> Any:
        return read(loads(body.decode()))

    return whole, decoder.type


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it was written, repeated names included."""


class _Float(str):
    """A JSON number with a fraction or an exponent, as it was written."""

    __slots__ = ()


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Wrong
    return int(text)


def _fraction(text: str) -> _Float:
    if len(text) > MAX_DIGITS:
        raise Wrong
    return _Float(text)


def _refuse(word: str) -> Any:
    raise Wrong(word)


def _reader(kind: pa.DataType) -> Read:
    if pa.types.is_struct(kind):
        return _struct(list(kind))
    if pa.types.is_list(kind):
        return _list(kind.value_field)
    if pa.types.is_map(kind):
        return _map(kind.item_field)
    if pa.types.is_decimal(kind):
        return lambda value: _decimal(value, kind)
    if pa.types.is_timestamp(kind):
        shape = re.compile(TIME + (OFFSET if kind.tz else ""))
        return lambda value: _timestamp(value, shape)
    if kind in _INTEGERS:
        return lambda value: _whole(value, _INTEGERS[kind])
    return {pa.bool_(): _boolean, pa.string(): _string, pa.date32(): _date, pa.float32(): _single}.get(kind, _number)


def _field(field: pa.Field) -> Read:
    read, nullable = _reader(field.type), field.nullable

    def value(found: Any) -> Any:
        if found is not None:
            return read(found)
        if not nullable:
            raise Wrong
        return None

    return value


def _struct(found: list[pa.Field]) -> Read:
    readers = {f.name: _reader(f.type) for f in found}
    needed = {f.name for f in found if not f.nullable}
    texts = {f.name for f in found if is_text(f.type)}

    def value(pairs: Any) -> dict[str, Any]:
        if type(pairs) is not _Pairs:
            raise Wrong
        # Of a name that is repeated the last value counts. Spark judges the replaced ones too, unless they should be text.
        row = {name: item if item is None or name in texts else readers[name](item) for name, item in pairs if name in readers}
        row |= {name: readers[name](row[name]) for name in texts if row.get(name) is not None}
        if any(row.get(name) is None for name in needed):
            raise Wrong
        return row

    return value


def _list(item: pa.Field) -> Read:
    read = _field(item)

    def value(found: Any) -> list[Any]:
        if type(found) is not list:
            raise Wrong
        return [read(one) for one in found]

    return value


def _map(item: pa.Field) -> Read:
    read = _field(item)

    def value(pairs: Any) -> list[tuple[str, Any]]:
        if type(pairs) is not _Pairs or len({name for name, _ in pairs}) < len(pairs):
            raise Wrong
        return [(_LONE.sub("?", name), read(one)) for name, one in pairs]

    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise Wrong
    return value is True


def _string(value: Any) -> str:
    if type(value) is not str:
        raise Wrong
    value.encode()  # half of a surrogate pair is no character
    return value


def is_text(kind: pa.DataType) -> bool:
    """Whether a value of this type is a JSON string."""
    return bool(pa.types.is_string(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _whole(value: Any, limit: int) -> int:
    if type(value) is not int or not -limit <= value < limit:
        raise Wrong
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, _Float):
        raise Wrong
    number = float(value)  # raises OverflowError for an int beyond its range
    if math.isinf(number):
        raise Wrong
    return number


def _single(value: Any) -> float:
    number = _number(value)
    struct.pack("<f", number)  # raises OverflowError beyond its range
    return number


def _decimal(value: Any, kind: pa.DataType) -> Decimal:
    text = str(value).replace(",", "") if type(value) is str else str(value)
    if type(value) not in (int, _Float, str) or not _NUMBER.fullmatch(text):
        raise Wrong
    try:
        number = Decimal(text).quantize(Decimal(1).scaleb(-kind.scale), context=_DECIMALS)
    except InvalidOperation as error:
        raise Wrong from error
    if number.adjusted() >= kind.precision - kind.scale and number:
        raise Wrong
    return number


def _date(value: Any) -> int:
    if type(value) is not str or not re.fullmatch(DATE, value):
        raise Wrong
    return dt.date.fromisoformat(value).toordinal() - _EPOCH.toordinal()


def _timestamp(value: Any, shape: re.Pattern[str]) -> int:
    if type(value) is not str or not shape.fullmatch(value):
        raise Wrong
    fraction = re.sub("[^0-9].*", "", value[20:]) if value[19:20] == "." else ""
    seconds = (dt.datetime.fromisoformat(value[:19]) - _EPOCH) // dt.timedelta(seconds=1)
    return (seconds - _seconds_east(value)) * 1_000_000 + int(fraction.ljust(6, "0")[:6])


def _seconds_east(value: str) -> int:
    zone = re.search(r"[+-]([0-9]{2}):([0-9]{2})$", value[19:])
    if zone is None:
        return 0
    seconds = int(zone[1]) * 3600 + int(zone[2]) * 60
    return -seconds if zone[0][0] == "-" else seconds
