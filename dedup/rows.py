"""Rows without Spark: an Arrow table, or dicts, behind the `Rows` interface of store.py."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(frozen=True)
class ArrowRows:
    """Rows that are already here."""

    table: pa.Table
    in_tasks: ClassVar[bool] = False

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return self.table.schema

    def arrow(self) -> pa.Table:
        """The rows themselves."""
        return self.table

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """`write` run once over all rows, in this process."""
        return list(write(iter(self.table.select(columns).to_batches())))


def table_of(rows: Sequence[Mapping[str, Any]], fields: pa.StructType) -> pa.Table:
    """A table of these rows; what a row does not name is null. `Table.from_pylist` takes several times as long for few rows."""
    return pa.Table.from_struct_array(pa.array(rows, fields))


def picked(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """These rows, in this order. Rows that stand one after another are not copied."""
    first = int(rows[0]) if len(rows) else 0
    if (rows == np.arange(first, first + len(rows))).all():
        return table.slice(first, len(rows))
    return table.take(pa.array(rows))


def for_spark(table: pa.Table) -> pa.Table:
    """The same rows without empty pieces: `createDataFrame` of Spark 4.2 takes one for the end and drops what comes behind it (tried)."""
    pieces = [piece for piece in table.to_batches() if piece.num_rows]
    return pa.Table.from_batches(pieces or [pa.RecordBatch.from_pylist([], table.schema)])


def copied(value: Any) -> Any:
    """The value as it is now: a handler may use one dict, list or array for all of its events. Mappings become dicts."""
    if isinstance(value, Mapping):
        return {name: inner if type(inner) in _PLAIN else copied(inner) for name, inner in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return (tuple if type(value) is tuple else list)(inner if type(inner) in _PLAIN else copied(inner) for inner in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return bytes(value) if isinstance(value, bytearray) else value


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, Decimal, dt.datetime, dt.date})
"""What cannot change, and is most of what rows hold."""
