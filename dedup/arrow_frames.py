"""Arrow tables as handler frames: for the plain runner, the kill tests and everything else without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError
from dedup.locate import FEW
from dedup.rows import ArrowRows, PlainRows, picked
from dedup.store import Rows


class ArrowFrames:
    """Implements `dedup.frames.Frames` for pa.Table."""

    def columns(self, rows: pa.Table) -> list[str]:
        """Column names."""
        return list(rows.column_names)

    def positions(self, rows: pa.Table, condition: Any | None, columns: list[str]) -> pa.Table:
        """These columns where the condition (boolean array or expression) is true."""
        if condition is not None:
            rows = (
                rows.filter(condition, null_selection_behavior="drop")
                if not isinstance(condition, pc.Expression)
                else rows.filter(condition)
            )
        return rows.select(columns)

    def without(self, rows: pa.Table, positions: pa.Table) -> pa.Table:
        """Rows whose position is not among `positions`, in their order."""
        keys = positions.column_names
        if rows.num_rows <= FEW:  # a join starts threads
            gone = {at for at in _tuples(positions, keys) if None not in at}
            return picked(rows, np.array([row for row, at in enumerate(_tuples(rows, keys)) if at not in gone], dtype=np.int64))
        numbered = rows.select(keys).append_column("", pa.array(range(rows.num_rows), pa.int64()))
        kept = numbered.join(positions.group_by(keys).aggregate([]), keys=keys, join_type="left anti")
        return rows.take(kept[""].sort())

    def rows(self, rows: Any) -> Rows:
        """A table, a dict or a list of dicts as rows for the store."""
        return rows_of(rows)


def _tuples(rows: pa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in names), strict=True)


def rows_of(rows: Any) -> Rows:
    """A table or a record batch as it is; a dict or a list of dicts as Python objects. Raises ConfigError for anything else."""
    if isinstance(rows, pa.Table):
        return ArrowRows(rows)
    if isinstance(rows, pa.RecordBatch):
        return ArrowRows(pa.Table.from_batches([rows]))
    if isinstance(rows, Mapping):
        return PlainRows([rows])
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        return PlainRows(rows)
    raise ConfigError(f"tx.write takes a DataFrame, an Arrow table, a dict or a list of dicts, not {type(rows).__name__}.")
