"""Arrow tables as handler frames: for the plain runner, the kill tests and everything else without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError
from dedup.locate import FEW
from dedup.rows import ArrowRows, picked
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
        return ArrowRows(to_table(rows))


def _tuples(rows: pa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in names), strict=True)


def to_table(rows: Any) -> pa.Table:
    """An Arrow table from a table, a record batch, a dict or a list of dicts. Raises ConfigError for anything else."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, dict):
        return pa.Table.from_pylist([rows])
    if isinstance(rows, list) and all(isinstance(r, dict) for r in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))  # pyarrow would take those of the first row only
        return pa.Table.from_pydict({name: [row.get(name) for row in rows] for name in names})
    raise ConfigError(f"tx.write takes a DataFrame, an Arrow table, a dict or a list of dicts, not {type(rows).__name__}.")
