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
_NANOSECONDS = "it has nanoseconds, and microseconds are the finest that is kept"


class Wrong(Exception):
    """A value does not go into the column; `wanted` is an Arrow type that would take it."""

    def __init__(self, why: str, wanted: pa.DataType | None = None) -> None:
        super().__init__(why)
        self.wanted = wanted


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


def _moment(value: np.datetime64 | np.timedelta64) -> Any:
    if np.isnat(value):
        return None
    kind = "datetime64" if isinstance(value, np.datetime64) else "timedelta64"
    unit = np.datetime_data(value.dtype)[0]
    if kind == "datetime64" and unit in ("Y", "M", "W", "D"):
        found: Any = value.astype("datetime64[D]").item()
    else:
        fine = value.astype(f"{kind}[us]")
        if fine != value:
            raise Wrong(_NANOSECONDS)
        found = fine.item()
    if isinstance(found, int):
        raise Wrong("it is out of range")
    return found


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
