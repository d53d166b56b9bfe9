"""Values of numpy, pandas, Arrow and enums as the values of Python that they stand for. Pure; imports no pandas."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

_PLAIN = frozenset({bool, int, float, str, bytes, Decimal, dt.datetime, dt.date, dt.time, dt.timedelta, UUID, dict, list, tuple})
_LEAVES = _PLAIN - {dict, list, tuple} | {type(None)}
_NANOSECONDS = "it has nanoseconds, and microseconds are the finest that is kept"


class Wrong(Exception):
    """A value does not go into the column; `wanted` is an Arrow type that would take it."""

    def __init__(self, why: str, wanted: pa.DataType | None = None) -> None:
        super().__init__(why)
        self.wanted = wanted


def is_flat(value: Any) -> bool:
    """Whether Arrow may be asked for the value's type: a plain value, or a list or dict of them. What holds itself crashes it."""
    kind = type(value)
    if kind is list or kind is tuple:
        return all(type(item) in _LEAVES for item in value)
    if kind is dict:
        return all(type(name) is str and type(item) in _LEAVES for name, item in value.items())
    return kind in _LEAVES or isinstance(value, np.generic)


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


_MICROSECONDS = {"W": 604_800_000_000, "D": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
_PER_MICROSECOND = {"ns": 10**3, "ps": 10**6, "fs": 10**9, "as": 10**12}


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


def _timestamp(value: Any) -> dt.datetime:
    if value.nanosecond:
        raise Wrong(_NANOSECONDS)
    found: dt.datetime = value.to_pydatetime()
    return found


def _timedelta(value: Any) -> dt.timedelta:
    if value.nanoseconds:
        raise Wrong(_NANOSECONDS)
    found: dt.timedelta = value.to_pytimedelta()
    return found


def _nothing(value: Any) -> None:
    return None


_PANDAS: dict[str, Callable[[Any], Any]] = {
    "NaTType": _nothing,
    "NAType": _nothing,
    "Timestamp": _timestamp,
    "Timedelta": _timedelta,
}
