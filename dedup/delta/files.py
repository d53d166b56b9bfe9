"""Data files of a table: written into its folder with their column statistics, invisible until a commit names them.

Promises that a file holds rows that fit the table, that its add action describes exactly that file, and that its bounds never exclude a
row: values that have no exact bound in JSON are left out. `FileWriter` travels to Spark's tasks; the driver calls it, too.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#per-file-statistics, read 2025-06. Like Spark, no bounds for
booleans and bytes, strings cut to 32 characters, timestamps in UTC milliseconds.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.errors import RowsRefused, SinkMismatch
from dedup.delta.fit import conform
from dedup.delta.storage import StorageOptions, put

FILE_BYTES = 256 * 1024 * 1024
"""Arrow bytes collected before a file is written: the memory one task needs, three times over at most."""

INDEXED_COLUMNS = 32
"""Leaf columns that get bounds, in schema order, unless the table says otherwise (delta.dataSkippingNumIndexedCols)."""

STRING_PREFIX = 32
_HIGHEST = "\U0010ffff"


def indexed_columns(settings: Mapping[str, str | None]) -> int:
    """How many leaf columns of a table with these properties get bounds; -1 for all."""
    return int(settings.get("delta.dataSkippingNumIndexedCols") or INDEXED_COLUMNS)


class Add(NamedTuple):
    """One data file, as the transaction log will name it."""

    path: str  # relative to the table
    size: int  # bytes
    partition_values: Mapping[str, str | None]
    modification_time: int  # milliseconds since 1970
    stats: str  # JSON
    rows: int

    def to_json(self) -> str:
        """One line of text that crosses from a task to the driver, and into a header."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Add:
        """The inverse of `to_json`. Raises SinkMismatch or RowsRefused where the task reported that its rows do not fit."""
        value = json.loads(text)
        if "mismatch" in value:
            raise (RowsRefused if value["refused"] else SinkMismatch)(value["mismatch"])
        return cls(**value)


@dataclass(frozen=True)
class FileWriter:
    """Writes record batches as Parquet files of one table; call it with an iterator, it yields one JSON line per file.

    Crash: files of a writer that dies, or whose commit never comes, are invisible; VACUUM takes them.
    """

    uri: str
    options: StorageOptions
    schema: pa.Schema  # of the table, partition columns included
    table: str  # for messages
    partition_by: tuple[str, ...] = ()
    indexed: int = INDEXED_COLUMNS
    prefix: str = ""  # folder below the table
    sink: str = ""  # URI of the table that the files are for, where that is another one
    codec: Mapping[str, Any] = field(default_factory=lambda: {"compression": "snappy"})

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
        """Yield `Add` lines, or one line that says what does not fit: an exception would reach the driver as a task failure."""
        try:
            for table in _gathered(batches):
                yield from (add.to_json() for add in self.write(table))
        except SinkMismatch as error:
            yield json.dumps({"mismatch": str(error), "refused": isinstance(error, RowsRefused)})

    def write(self, rows: pa.Table) -> list[Add]:
        """Write these rows now: one file, or one per partition value; none for no rows. Raises SinkMismatch, RowsRefused."""
        rows = conform(rows, self.schema, self.table, uri=self.sink or self.uri)
        if not rows.num_rows:
            return []
        return [self._write_file(part, values) for values, part in self._partitions(rows)]

    def _partitions(self, rows: pa.Table) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
        if not self.partition_by:
            yield {}, rows
            return
        kept = [n for n in rows.column_names if n not in self.partition_by]
        codes, firsts = _group(rows, self.partition_by)
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(firsts) + 1))
        data = rows.select(kept).take(pa.array(order))
        heads = rows.select(list(self.partition_by)).take(pa.array(firsts))
        for i, head in enumerate(self._partition_values(heads)):
            yield head, data.slice(bounds[i], bounds[i + 1] - bounds[i])

    def _partition_values(self, heads: pa.Table) -> list[dict[str, str | None]]:
        columns = {name: self._plain(name, heads[name]) for name in heads.column_names}
        return [{name: self._partition_value(name, column[i]) for name, column in columns.items()} for i in range(heads.num_rows)]

    def _plain(self, name: str, values: pa.ChunkedArray) -> list[Any]:
        try:
            return list(values.to_pylist())
        except (OverflowError, ValueError) as error:
            raise RowsRefused(f"{self.table!r} is partitioned by {name}, where dedup writes the years 1 to 9999 only: {error}.") from error

    def _partition_value(self, name: str, value: Any) -> str | None:
        text = partition_text(value)
        if text is None and not self.schema.field(name).nullable:
            raise RowsRefused(
                f"{self.table!r} is partitioned by {name}, which forbids NULL, and Delta cannot tell an empty string from NULL there."
            )
        return text

    def _write_file(self, rows: pa.Table, values: dict[str, str | None]) -> Add:
        path = f"{self.prefix}part-{uuid.uuid4()}.parquet"
        size = write_parquet(self.uri, self.options, path, rows, **self.codec)
        return Add(path, size, values, int(time.time() * 1000), statistics(rows, self.indexed), rows.num_rows)


def write_parquet(uri: str, options: StorageOptions, path: str, rows: pa.Table, **codec: Any) -> int:
    """Write one file below a URI; returns its size in bytes.

    Crash: half a file may stay behind under a name that nobody knows.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, write_statistics=_trusted(rows), **codec)
    buffer = sink.getvalue()
    put(uri, options, path, buffer)
    return int(buffer.size)


def _trusted(rows: pa.Table) -> bool | list[str]:
    """Columns whose bounds a file may carry: Arrow leaves NaN out of them, and Spark, looking for NaN, skips the file (tried)."""
    wrong = {name for name in rows.column_names if _has_nan(rows[name])}
    return [f.name for f in rows.schema if f.name not in wrong and not pa.types.is_nested(f.type)] if wrong else True


def _has_nan(column: pa.ChunkedArray) -> bool:
    if pa.types.is_struct(column.type):
        return any(_has_nan(pc.struct_field(column, [f.name])) for f in column.type)
    return bool(pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py())


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of about FILE_BYTES."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= FILE_BYTES:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _group(rows: pa.Table, columns: Iterable[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each row the number of its combination of values, and each combination's first row."""
    combined = np.zeros(rows.num_rows, dtype=np.int64)
    for name in columns:
        encoded = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        combined = combined * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy(zero_copy_only=False)
        combined = np.unique(combined, return_inverse=True)[1]
    _, firsts, codes = np.unique(combined, return_index=True, return_inverse=True)
    return codes, firsts


def partition_text(value: Any) -> str | None:
    """A partition value as the log spells it.

    Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#partition-value-serialization, read 2025-06.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime):
        moment = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        return moment.isoformat(sep="T" if value.tzinfo else " ", timespec="microseconds") + ("Z" if value.tzinfo else "")
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value)


def statistics(table: pa.Table, indexed: int = INDEXED_COLUMNS) -> str:
    """The `stats` of an add action for a file that holds exactly these rows (without partition columns).

    Args:
        indexed: how many leaf columns get bounds and null counts; -1 for all.
    """
    budget = iter(range(indexed)) if indexed >= 0 else None
    collected = _CollectedBounds({}, {}, {})
    for name in table.column_names:
        _collect(name, table[name], collected, budget)
    return _json({"numRecords": table.num_rows, "minValues": collected.low, "maxValues": collected.high, "nullCount": collected.nulls})


class _CollectedBounds:
    """Bounds and null counts of one level of nesting."""

    def __init__(self, low: dict[str, Any], high: dict[str, Any], nulls: dict[str, Any]) -> None:
        self.low, self.high, self.nulls = low, high, nulls


def _collect(name: str, column: pa.ChunkedArray, into: _CollectedBounds, budget: Iterator[int] | None) -> None:
    if pa.types.is_struct(column.type):
        inner = _CollectedBounds({}, {}, {})
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
    if pa.types.is_date(kind):
        return _date_bounds(found)
    low, high = found["min"].as_py(), found["max"].as_py()
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


def _date_bounds(found: pa.StructScalar) -> tuple[str | None, str | None]:
    try:
        return found["min"].as_py().isoformat(), found["max"].as_py().isoformat()
    except (OverflowError, ValueError):  # Python's dates have the years 1 to 9999
        return None, None


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
