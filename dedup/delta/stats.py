"""Column statistics of a data file, as readers use them to skip files.

Promises bounds that never exclude a row: values that have no exact bound in JSON are left out. Called by whoever writes a file.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#per-file-statistics, read 2025-06. Like Spark, no bounds for
booleans and bytes, strings cut to 32 characters, timestamps in UTC milliseconds.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

INDEXED_COLUMNS = 32
"""Leaf columns that get bounds, in schema order, unless the table says otherwise (delta.dataSkippingNumIndexedCols)."""

STRING_PREFIX = 32
_HIGHEST = "\U0010ffff"


def statistics(table: pa.Table, indexed: int = INDEXED_COLUMNS) -> str:
    """The `stats` of an add action for a file that holds exactly these rows (without partition columns).

    Args:
        indexed: how many leaf columns get bounds and null counts; -1 for all.
    """
    budget = iter(range(indexed)) if indexed >= 0 else None
    collected = _Collected({}, {}, {})
    for name in table.column_names:
        _collect(name, table[name], collected, budget)
    return _json({"numRecords": table.num_rows, "minValues": collected.low, "maxValues": collected.high, "nullCount": collected.nulls})


class _Collected:
    """Bounds and null counts of one level of nesting."""

    def __init__(self, low: dict[str, Any], high: dict[str, Any], nulls: dict[str, Any]) -> None:
        self.low, self.high, self.nulls = low, high, nulls


def _collect(name: str, column: pa.ChunkedArray, into: _Collected, budget: Iterator[int] | None) -> None:
    if pa.types.is_struct(column.type):
        inner = _Collected({}, {}, {})
        for field in column.type:
            _collect(field.name, pc.struct_field(column, [field.name]), inner, budget)  # nulls of the parent count as nulls
        for target, values in ((into.low, inner.low), (into.high, inner.high), (into.nulls, inner.nulls)):
            if values:
                target[name] = values
        return
    if budget is not None and next(budget, None) is None:
        return
    into.nulls[name] = column.null_count
    low, high = _bounds(column)
    if low is not None and high is not None:
        into.low[name], into.high[name] = low, high
    elif low is not None:
        into.low[name] = low


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Lower and upper bound as JSON values; None where there is none."""
    kind = column.type
    if column.null_count == len(column):
        return None, None
    if pa.types.is_floating(kind):
        return _float_bounds(column)
    if pa.types.is_timestamp(kind):
        return _timestamp_bounds(column)
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_date(kind) or pa.types.is_string(kind)):
        return None, None
    found = pc.min_max(column)
    low, high = found["min"].as_py(), found["max"].as_py()
    if isinstance(low, dt.date):
        return low.isoformat(), high.isoformat()
    if isinstance(low, str):
        return low[:STRING_PREFIX], _upper(high)
    return low, high


def _float_bounds(column: pa.ChunkedArray) -> tuple[float | None, float | None]:
    # NaN is the largest value to Spark and is no JSON number: any NaN or infinity leaves the column without bounds.
    if not pc.all(pc.is_finite(column)).as_py():
        return None, None
    found = pc.min_max(column.cast(pa.float64()))
    low, high = found["min"].as_py(), found["max"].as_py()
    return (-0.0 if low == 0 else low), (0.0 if high == 0 else high)


def _timestamp_bounds(column: pa.ChunkedArray) -> tuple[str | None, str | None]:
    found = pc.min_max(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()))
    suffix = "Z" if column.type.tz else ""
    try:
        return _millis(found["min"].as_py() // 1000) + suffix, _millis(-(-found["max"].as_py() // 1000)) + suffix
    except OverflowError:
        return None, None


def _millis(value: int) -> str:
    moment = dt.datetime(1970, 1, 1) + dt.timedelta(milliseconds=value)
    return moment.isoformat(timespec="milliseconds")


def _upper(value: str) -> str | None:
    """A string that is not below `value` and has at most 33 characters."""
    if len(value) <= STRING_PREFIX:
        return value
    return None if value[STRING_PREFIX] == _HIGHEST else value[:STRING_PREFIX] + _HIGHEST


def _json(value: Any) -> str:
    """JSON with decimals as exact numbers, which `json.dumps` cannot write.

    Text stays as it is: delta-rs takes the escaped form of characters above U+1FFFF for other characters, and would skip the file.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    return json.dumps(value, ensure_ascii=False)
