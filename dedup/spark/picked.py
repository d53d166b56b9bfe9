"""Columns that a handler only picked from its frame, as Arrow, without a job: they are in the table that the frame was made of.

The plan is what says so: projections of plain columns and struct fields over that very frame. Anything else is Spark's to evaluate.
Called by dedup/spark/frames.py for what handlers write; `tx.write(orders.select("data.*"), ...)` is the usual case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from dedup.spark.delta_rows import JavaError

Path = tuple[int, ...]
"""Which column of the table, then which field of it, and so on."""

Known = Mapping[int, Path]
"""Columns of a plan by their ids."""


@dataclass(frozen=True)
class Origin:
    """A frame, and the table with the same rows and columns that it was made of."""

    frame: DataFrame
    table: pa.Table

    def pick(self, rows: DataFrame) -> pa.Table | None:
        """The rows as Arrow where they are columns of this frame and nothing else; None where Spark has to evaluate them.

        Never raises: a plan that cannot be read, as on Spark Connect, is none of ours.
        """
        if not hasattr(rows, "_jdf") or not hasattr(self.frame, "_jdf"):
            return None
        try:
            paths = self._paths(rows)
        except JavaError:
            return None
        names = rows.columns
        if paths is None or len(set(names)) < len(names):
            return None
        return pa.table({name: self._column(path) for name, path in zip(names, paths, strict=True)})

    def _paths(self, rows: DataFrame) -> list[Path] | None:
        frame, plan = _plan(self.frame), _plan(rows)
        own: Known = {ident: (number,) for number, ident in enumerate(map(_id, _items(frame.output())))}
        known = _known(plan, own, frame)
        return None if known is None else [known[_id(attribute)] for attribute in _items(plan.output())]

    def _column(self, path: Path) -> pa.ChunkedArray:
        column = self.table.column(path[0])
        for field in path[1:]:
            column = pc.struct_field(column, [field])  # null where the struct is
        return column


def anti_join(table: pa.Table, positions: pa.Table) -> pa.Table:
    """The rows of the table whose position is not among `positions`, in their order."""
    names = positions.column_names
    rows = table.select(names).append_column("_row", pa.array(range(table.num_rows), pa.int64()))
    left = rows.join(positions.cast(table.select(names).schema), keys=names, join_type="left anti")["_row"]
    return table.take(left.take(pc.sort_indices(left)))


def _plan(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _known(plan: Any, own: Known, frame: Any) -> Known | None:
    """Where each column of a plan comes from, by its id; None where one of them is computed, or rows are left out, added or moved."""
    if plan.equals(frame):
        return own
    kind = plan.nodeName()
    if kind not in ("Project", "SubqueryAlias"):
        return None
    below = _known(plan.child(), own, frame)
    if below is None or kind == "SubqueryAlias":
        return below
    found = {_id(e): _path(e, below) for e in _items(plan.projectList())}
    return None if None in found.values() else {ident: path for ident, path in found.items() if path is not None}


def _path(expression: Any, below: Known) -> Path | None:
    kind = expression.getClass().getSimpleName()
    if kind == "AttributeReference":
        return below.get(_id(expression))
    if kind == "Alias":
        return _path(expression.child(), below)
    if kind == "GetStructField":
        inner = _path(expression.child(), below)
        return None if inner is None else (*inner, expression.ordinal())
    return None


def _id(named: Any) -> int:
    return int(named.exprId().id())


def _items(sequence: Any) -> Iterator[Any]:
    item: Callable[[int], Any] = sequence.apply
    return (item(i) for i in range(sequence.length()))
