"""The rules by which one Python value becomes a value of a column. Pure; called by values.py.

No rule looks at another value. A value of numpy, pandas, Arrow or an Enum counts as the value of Python that it stands for; no pandas is
imported for that. For columns of type json and jsonb a value of any shape becomes JSON text: text is JSON already and stays as it is;
inside a dict or a list dates, times, decimals and UUIDs become text (ISO 8601, all digits).
"""

from __future__ import annotations

import datetime as dt
import enum
import ipaddress
import json
import math
import re
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation, Overflow
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_EXACT = Context(prec=2_000, traps=[InvalidOperation, Inexact, Overflow], Emax=999_999, Emin=-999_999)
_WIDEST = 38
"""Digits of Arrow's decimal128."""

_NEGATIVE = re.compile(r"\s*-\s*\d+\s*")

_ADDRESSES = (
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
)

_EPOCH, _TICK = dt.datetime(1970, 1, 1), dt.timedelta(microseconds=1)
_FIRST, _LAST = (dt.datetime.min - _EPOCH) // _TICK, (dt.datetime.max - _EPOCH) // _TICK

_TIME = re.compile(r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d(:\d\d(:\d\d)?)?)?", re.ASCII)

_PLAIN = frozenset({bool, int, float, str, bytes, Decimal, dt.datetime, dt.date, dt.time, dt.timedelta, UUID, dict, list, tuple})
_LEAVES = _PLAIN - {dict, list, tuple} | {type(None)}
_NANOSECONDS = "it has nanoseconds, and microseconds are the finest that is kept"

_MICROSECONDS = {"W": 604_800_000_000, "D": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
_PER_MICROSECOND = {"ns": 10**3, "ps": 10**6, "fs": 10**9, "as": 10**12}


class ValueLimits(NamedTuple):
    """What an Arrow type does not say."""

    length: int | None = None  # characters
    nul: bool = True  # text may hold a NUL character
    precision: int | None = None  # of a number that Arrow has no type for
    scale: int | None = None
    size: int | None = None  # bytes
    step: int = 1  # microseconds that a time is a multiple of; 0: only no time at all is kept
    whole: tuple[int, int] | None = None  # whole numbers from, to become text


NO_LIMITS = ValueLimits()

One = Callable[[Any, pa.DataType, ValueLimits], Any]
"""(value, type, limits) -> what `build` takes. Raises Wrong."""


def _holds(array: pa.Array, limits: ValueLimits) -> bool:
    return True


def _build(made: list[Any], arrow: pa.DataType) -> pa.Array:
    return pa.array(made, arrow)


def _alike(values: Sequence[Any]) -> bool:
    return True


class Rule(NamedTuple):
    """How a kind of column takes values."""

    safe: frozenset[type]  # Arrow itself converts columns of these to the type without loss, or raises
    one: One
    holds: Callable[[pa.Array, ValueLimits], bool] = _holds  # whether what Arrow has made is right
    build: Callable[[list[Any], pa.DataType], pa.Array] = _build
    alike: Callable[[Sequence[Any]], bool] = _alike  # whether that is so of these values


def _bool(value: Any, arrow: pa.DataType, limits: ValueLimits) -> bool:
    if type(value) is bool:
        return value
    raise Wrong("True or False is needed")


def _int(value: Any, arrow: pa.DataType, limits: ValueLimits) -> int:
    number = _number(value)
    if isinstance(number, int):
        whole = number
    elif not math.isfinite(number) or (isinstance(number, Decimal) and number.adjusted() > _WIDEST) or number != int(number):
        raise Wrong("it is no whole number")
    else:
        whole = int(number)
    if not -(2 ** (arrow.bit_width - 1)) <= whole < 2 ** (arrow.bit_width - 1):
        raise Wrong("it is out of range", _wider(whole))
    return whole


def _wider(whole: int) -> pa.DataType:
    if -(2**31) <= whole < 2**31:
        return pa.int32()
    return pa.int64() if -(2**63) <= whole < 2**63 else pa.decimal128(_WIDEST, 0)


def _number(value: Any) -> int | float | Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Wrong("a number is needed")
    return value


def _double(value: Any, arrow: pa.DataType, limits: ValueLimits) -> float:
    number = _number(value)
    if isinstance(number, float):
        return number
    if isinstance(number, Decimal):
        return _float_of(number)
    return _exact_float(number, float, pa.decimal128(_WIDEST, 0))


def _exact_float(number: int, rounded: Callable[[int], float], wanted: pa.DataType) -> float:
    try:
        found = rounded(number)
        if not math.isinf(found) and int(found) == number:
            return found
    except OverflowError:
        pass
    raise Wrong("it has more digits than this type keeps", wanted)


def _float_of(number: Decimal) -> float:
    """The float whose shortest text is this number."""
    if number.is_snan():
        raise Wrong("a signalling NaN is no number")
    found = float(number)
    if number.is_finite() and (math.isinf(found) or Decimal(repr(found)) != number):
        raise Wrong("it has more digits than this type keeps", _decimal_type(number))
    return found


def _single(value: Any, arrow: pa.DataType, limits: ValueLimits) -> float:
    number = _number(value)
    if isinstance(number, int):
        return _exact_float(number, _rounded, pa.int64() if abs(number) < 2**63 else pa.decimal128(_WIDEST, 0))
    found = number if isinstance(number, float) else _float_of(number)
    if math.isinf(_rounded(found)) and math.isfinite(found):
        raise Wrong("it is out of range", pa.float64())
    return found


def _rounded(number: float) -> float:
    """To the nearest float of 32 bits."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def _no_overflow(array: pa.Array, limits: ValueLimits) -> bool:
    return not pc.any(pc.is_inf(array)).as_py()  # an infinity may be one that was given: value by value


def _decimal(value: Any, arrow: pa.DataType, limits: ValueLimits) -> Decimal:
    number = _as_decimal(value)
    if not number.is_finite():
        raise Wrong("it is no finite number")
    return _scaled(number, arrow.precision, arrow.scale)


def _as_decimal(value: Any) -> Decimal:
    number = _number(value)
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def _scaled(number: Decimal, precision: int, scale: int) -> Decimal:
    """With exactly these digits behind the point. Raises Wrong where digits would be lost."""
    if number and number.adjusted() >= precision - scale:
        raise Wrong(f"it has more than {precision - scale} digits before the point", _decimal_type(number, precision, scale))
    try:
        return number.quantize(Decimal(1).scaleb(-scale), context=_EXACT)
    except DecimalException as error:
        raise Wrong(f"it has more than {scale} digits behind the point", _decimal_type(number, precision, scale)) from error


def _decimal_type(number: Decimal, precision: int = 0, scale: int = 0) -> pa.DataType | None:
    """Room for it and for all that had room before; None where Arrow has none."""
    exponent = number.as_tuple().exponent
    before = max(precision - scale, number.adjusted() + 1, 1)
    behind = max(scale, -exponent if isinstance(exponent, int) else 0, 0)
    return pa.decimal128(before + behind, behind) if before + behind <= _WIDEST else None


def _numeric(value: Any, arrow: pa.DataType, limits: ValueLimits) -> Decimal:
    """A number of any size, or of a size that Arrow has no type for."""
    number = _as_decimal(value)
    if limits.precision is None or limits.scale is None:
        if number.is_snan():
            raise Wrong("a signalling NaN is no number")
        return number
    if not number.is_finite():
        raise Wrong("it is no finite number")
    return _scaled(number, limits.precision, limits.scale)


def _numerics(made: list[Any], arrow: pa.DataType) -> pa.Array:
    """As decimals where all have the same digits behind the point, else as texts: what one row shows is not another one's doing."""
    there = [number for number in made if number is not None]
    exponents = {number.as_tuple().exponent for number in there}
    only = exponents.pop() if len(exponents) == 1 else 1
    scale = -only if isinstance(only, int) else -1
    if 0 <= scale <= _WIDEST and all(number.adjusted() < _WIDEST - scale for number in there):
        return pa.array(made, pa.decimal128(_WIDEST, scale))
    return _numbers_as_text(made, arrow)


def _numbers_as_text(made: list[Any], arrow: pa.DataType) -> pa.Array:
    return pa.array([None if number is None else str(number) for number in made], pa.string())


def _text(value: Any, arrow: pa.DataType, limits: ValueLimits) -> str:
    text = str(value) if isinstance(value, uuid.UUID) else value
    if not isinstance(text, str):
        raise Wrong("a text is needed")
    return _valid(str.__str__(text), limits)


def _valid(text: str, limits: ValueLimits) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Wrong("it holds half of a surrogate pair, which is no character", pa.binary()) from error
    if not limits.nul and "\0" in text:
        raise Wrong("it holds a NUL character, which PostgreSQL's text cannot: replace it, or keep bytes", pa.binary())
    if limits.length is not None and len(text) > limits.length:
        raise Wrong(f"it has {len(text)} characters", pa.string())
    if limits.size is not None and (size := len(text.encode())) > limits.size:
        raise Wrong(f"it has {size} bytes, and the server would cut it to {limits.size}", pa.string())
    return text


def _text_holds(array: pa.Array, limits: ValueLimits) -> bool:
    if limits.length is not None and (pc.max(pc.utf8_length(array)).as_py() or 0) > limits.length:
        return False
    if limits.size is not None and (pc.max(pc.binary_length(array)).as_py() or 0) > limits.size:
        return False
    return limits.nul or not pc.any(pc.match_substring(array, "\0")).as_py()


def _other(value: Any, arrow: pa.DataType, limits: ValueLimits) -> str:
    """The text form of a type that only the server knows."""
    if isinstance(value, int) and not isinstance(value, bool) and limits.whole is not None:
        if not limits.whole[0] <= value <= limits.whole[1]:
            raise Wrong("it is out of range", _wider(value))
        return str(value)
    if isinstance(value, str) and limits.whole is not None and limits.whole[0] == 0 and _NEGATIVE.fullmatch(value):
        raise Wrong("it is out of range")
    if isinstance(value, _ADDRESSES):
        return str(value)
    return _text(value, arrow, limits)


def _bytes(value: Any, arrow: pa.DataType, limits: ValueLimits) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise Wrong("bytes are needed")


def _uuid(value: Any, arrow: pa.DataType, limits: ValueLimits) -> bytes:
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, bytes) and len(value) == 16:
        return value
    digits = value.replace("-", "") if isinstance(value, str) else ""
    if len(digits) == 32 and all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return bytes.fromhex(digits)
    raise Wrong("a UUID, or its text, is needed")


def _json(value: Any, arrow: pa.DataType, limits: ValueLimits) -> str:
    return _valid(json_text(value), limits)


def _date(value: Any, arrow: pa.DataType, limits: ValueLimits) -> dt.date:
    if isinstance(value, dt.datetime):
        moment = _utc(value)
        if moment.time() != dt.time():
            raise Wrong("it has a time of day", pa.timestamp("us", None if value.tzinfo is None else "UTC"))
        return moment.date()
    if isinstance(value, dt.date):
        return value
    raise Wrong("a date is needed")


def _timestamp(value: Any, arrow: pa.DataType, limits: ValueLimits) -> dt.datetime:
    """In UTC: what has no zone is in UTC already, and a date is its midnight there."""
    if isinstance(value, dt.datetime):
        _unrounded(value.microsecond, arrow, limits)
        return _utc(value)
    if isinstance(value, dt.date):
        return dt.datetime(value.year, value.month, value.day)
    raise Wrong("a datetime or a date is needed")


def _unrounded(microseconds: int, arrow: pa.DataType, limits: ValueLimits) -> None:
    if microseconds % limits.step if limits.step else microseconds:
        raise Wrong("the column would round or cut it", arrow)


def _utc(value: dt.datetime) -> dt.datetime:
    try:
        return value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo is not None else value
    except OverflowError as error:
        raise Wrong("it is out of range") from error


def _whole_seconds(values: Sequence[Any]) -> bool:
    """Whether Arrow knows all of these zones: it cuts off the fraction of a second of an offset, and asks classes of anybody."""
    zones = {id(value.tzinfo): value.tzinfo for value in values if value is not None}
    return all(map(_is_known, zones.values()))


def _is_known(zone: dt.tzinfo | None) -> bool:
    if zone is None or type(zone) is ZoneInfo:
        return True
    return type(zone) is dt.timezone and not zone.utcoffset(None).microseconds


def _moments(array: pa.Array, limits: ValueLimits) -> bool:
    """Whether all of them are of the years 1 to 9999: a zone may have moved one out. And none is finer than the column."""
    found = pc.min_max(array.cast(pa.int64())).as_py()
    return found["min"] is None or (found["min"] >= _FIRST and found["max"] <= _LAST and _multiples(array, limits))


def _multiples(array: pa.Array, limits: ValueLimits) -> bool:
    if limits.step == 1:
        return True
    whole = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return not (whole % limits.step if limits.step else whole).any()


def _time(value: Any, arrow: pa.DataType, limits: ValueLimits) -> dt.time:
    if not isinstance(value, dt.time):
        raise Wrong("a time is needed")
    if value.tzinfo is not None:
        raise Wrong("it has a zone")
    _unrounded(value.microsecond, arrow, limits)
    return value


def _timetz(value: Any, arrow: pa.DataType, limits: ValueLimits) -> str:
    """With its zone; what has none is in UTC."""
    found = _parsed(value) if isinstance(value, str) else value
    if not isinstance(found, dt.time):
        raise Wrong("a time, or its text, is needed")
    _unrounded(found.microsecond, pa.time64("us"), limits)
    if found.tzinfo is None:
        return found.replace(tzinfo=dt.UTC).isoformat()
    offset = found.utcoffset()
    if offset is None or offset.microseconds or abs(offset) >= dt.timedelta(hours=16):
        raise Wrong("its zone is no offset from UTC below 16 hours")
    return found.isoformat()


def _parsed(text: str) -> dt.time:
    try:
        if _TIME.fullmatch(text):
            return dt.time.fromisoformat(text)
    except ValueError:
        pass
    raise Wrong("it is no time as ISO 8601 writes it: 12:30:00.5+02:00")


def _interval(value: Any, arrow: pa.DataType, limits: ValueLimits) -> dt.timedelta:
    if not isinstance(value, dt.timedelta):
        raise Wrong("a timedelta is needed")
    if abs(value // _TICK) >= 2**63:
        raise Wrong("it is out of range")
    _unrounded(value // _TICK, arrow, limits)
    return value


def _types(*types: type) -> frozenset[type]:
    return frozenset(types)


class Wrong(Exception):
    """A value does not go into the column; `wanted` is an Arrow type that would take it."""

    def __init__(self, why: str, wanted: pa.DataType | None = None) -> None:
        super().__init__(why)
        self.wanted = wanted


def json_text(value: Any) -> str:
    """The value as JSON text. Raises Wrong for what JSON cannot hold: NaN, infinities, bytes, sets, keys that are no text, NUL."""
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return json.dumps(_shaped(value), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise Wrong("it is nested too deeply, or holds itself") from error


def _shaped(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is int or kind is bool:
        return value
    if kind is str:
        return _without_nul(value)
    if kind is float:
        return _finite(value)
    if kind is dict:
        return _object(value)
    if kind is list or kind is tuple:
        return [_shaped(inner) for inner in value]
    return _shaped_other(value)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise Wrong("JSON in PostgreSQL cannot hold a NUL character")
    return text


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise Wrong(f"JSON has no {number}")
    return number


def _object(value: dict[Any, Any]) -> dict[str, Any]:
    found = {name if type(name) is str and "\0" not in name else _key(name): _shaped(inner) for name, inner in value.items()}
    if len(found) < len(value):
        raise Wrong("two keys are one text")
    return found


def _key(name: Any) -> str:
    plain = plainly(name)
    if not isinstance(plain, str):
        raise Wrong(f"a key of JSON is a text, not {type(name).__name__}")
    return _without_nul(str(plain))


def plainly(value: Any) -> Any:
    """The value as one of Python's own; None for pandas' NaT and NA. What is not known comes back as it is.

    Raises:
        Wrong: it has nanoseconds.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return plainly(value.value)
    if isinstance(value, pa.Scalar):
        return plainly(value.as_py())
    if isinstance(value, np.ndarray):
        return _items(value)
    if isinstance(value, np.datetime64 | np.timedelta64):
        return _moment(value)
    if isinstance(value, np.generic):
        item = value.item()
        return value if isinstance(item, np.generic) else item  # a long double is nothing of Python's
    return _of_pandas(value)


def _items(array: np.ndarray[Any, Any]) -> Any:
    if array.ndim == 0:
        return plainly(array[()])
    return list(array) if array.dtype.kind in "mMO" or array.ndim > 1 else array.tolist()


def _moment(value: np.datetime64 | np.timedelta64) -> dt.date | dt.datetime | dt.timedelta | None:
    """By whole numbers of Python: those of numpy wrap."""
    if np.isnat(value):
        return None
    unit, each = np.datetime_data(value.dtype)
    number = int(value.astype(np.int64)) * each
    try:
        if isinstance(value, np.timedelta64):
            return dt.timedelta(microseconds=_microseconds(number, unit))
        if unit in ("Y", "M"):
            months = number * (12 if unit == "Y" else 1)
            return dt.date(1970 + months // 12, 1 + months % 12, 1)
        moment = dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=_microseconds(number, unit))
    except (OverflowError, ValueError) as error:
        raise Wrong("it is out of range") from error
    return moment.date() if unit in ("W", "D") else moment


def _microseconds(number: int, unit: str) -> int:
    if unit in _MICROSECONDS:
        return number * _MICROSECONDS[unit]
    if unit not in _PER_MICROSECOND:
        raise Wrong("its unit has no fixed length")
    if number % _PER_MICROSECOND[unit]:
        raise Wrong(_NANOSECONDS)
    return number // _PER_MICROSECOND[unit]


def _of_pandas(value: Any) -> Any:
    if not str(type(value).__module__).startswith("pandas."):
        return value
    name = type(value).__name__
    return _PANDAS[name](value) if name in _PANDAS else value


def _nothing(value: Any) -> None:
    return None


def _plain_timestamp(value: Any) -> dt.datetime:
    if value.nanosecond:
        raise Wrong(_NANOSECONDS)
    found: dt.datetime = value.to_pydatetime()
    return found


def _timedelta(value: Any) -> dt.timedelta:
    if value.nanoseconds:
        raise Wrong(_NANOSECONDS)
    found: dt.timedelta = value.to_pytimedelta()
    return found


_PANDAS: dict[str, Callable[[Any], Any]] = {
    "NaTType": _nothing,
    "NAType": _nothing,
    "Timestamp": _plain_timestamp,
    "Timedelta": _timedelta,
}


def _shaped_other(value: Any) -> Any:
    """What is of another class: by what it stands for."""
    plain = plainly(value)
    if plain is not value:
        return _shaped(plain)
    if isinstance(value, Mapping):
        return _shaped(dict(value))
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal | uuid.UUID):
        return str(value)
    kinds: tuple[type[Any], ...] = (str, int, float, list, tuple)
    for known in kinds:
        if isinstance(value, known):
            return _shaped(known(value))
    raise Wrong(f"JSON has no {type(value).__name__}")


RULES: dict[str, Rule] = {
    "bool": Rule(_types(bool), _bool),
    "int": Rule(_types(int), _int),
    "double": Rule(_types(float), _double),
    "float": Rule(_types(float), _single, _no_overflow),
    "decimal": Rule(_types(Decimal), _decimal),
    "numeric": Rule(_types(), _numeric, build=_numerics),
    "numeric in a list": Rule(_types(), _numeric, build=_numbers_as_text),  # the type of a list is known before its values are
    "text": Rule(_types(str), _text, _text_holds),
    "other": Rule(_types(str), _other, _text_holds),
    "bytes": Rule(_types(bytes), _bytes),
    "uuid": Rule(_types(), _uuid),
    "json": Rule(_types(str), _json, _text_holds),
    "date": Rule(_types(dt.date), _date),
    "timestamp": Rule(_types(dt.datetime), _timestamp, _moments, alike=_whole_seconds),
    "time": Rule(_types(), _time),
    "timetz": Rule(_types(), _timetz),
    "interval": Rule(_types(dt.timedelta), _interval, _multiples),
}
"""By kind of column."""


def is_flat(value: Any) -> bool:
    """Whether Arrow may be asked for the value's type: a plain value, or a list or dict of them. What holds itself crashes it."""
    kind = type(value)
    if kind is list or kind is tuple:
        return all(type(item) in _LEAVES for item in value)
    if kind is dict:
        return all(type(name) is str and type(item) in _LEAVES for name, item in value.items())
    return kind in _LEAVES or isinstance(value, np.generic)
