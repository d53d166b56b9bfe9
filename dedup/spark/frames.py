"""DataFrames as what handlers are given and write: how `Tx` asks them, and what of them needs no job of Spark's.

Columns that a handler only picked from its frame are where the frame was made of: in an Arrow table, or in files of tasks (kept_frames.py).
`tx.write(orders.select("data.*"), ...)` is the usual case. Called by dedup/spark/batch.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from checkpoint.errors import HandlerError
from dedup.core.rows import OF_AN_EVENT, Rows, rows_of
from dedup.spark import features, keeping
from dedup.spark.answering import answering
from dedup.spark.ordering import keeps_order
from dedup.spark.prepare import named
from dedup.spark.session import JavaError

Write = Callable[[Iterator[pa.RecordBatch]], Iterator[str]]
"""What a task makes of rows that it writes into a sink's files. Travels to it."""


def _is_frame(rows: object) -> bool:
    """Whether it is a DataFrame, of classic Spark or of Spark Connect."""
    return type(rows).__name__ == "DataFrame" and type(rows).__module__.startswith("pyspark.")


class SparkFrames:
    """What `Tx` needs of DataFrames, on classic Spark and on Spark Connect."""

    def __init__(self, session: SparkSession, is_over: Callable[[], bool], *, in_tasks: bool) -> None:
        self.session, self._is_over, self._in_tasks = session, is_over, in_tasks
        self._origins: tuple[Origin, ...] = ()
        self._in_order: tuple[DataFrame, ...] = ()  # frames in the order of the batch

    def remember(self, origin: Origin) -> None:
        """What the frame that the handler gets was made of: what it only picks from the frame needs no evaluation of it."""
        self._origins, self._in_order = (origin,), (origin.frame,)

    def columns(self, rows: DataFrame) -> list[str]:
        """Column names. Raises HandlerError for anything else than a DataFrame."""
        if not _is_frame(rows):
            raise HandlerError(f"tx.reject, tx.skip and tx.dead_letter take a DataFrame here, not {type(rows).__name__}.{OF_AN_EVENT}")
        return rows.columns

    def positions(self, rows: DataFrame, condition: str | Column | None, columns: list[str]) -> pa.Table:
        """These columns of the rows for which the condition is true: one job, which brings only those rows."""
        if condition is not None:
            rows = rows.where(F.expr(condition) if isinstance(condition, str) else condition)
        return features.to_arrow(rows.select(*columns))

    def without(self, rows: DataFrame, positions: pa.Table) -> DataFrame:
        """The rows whose position is not among `positions`."""
        origin = next((o for o in self._origins if o.frame is rows), None)
        left = None if origin is None else origin.without(positions)
        rest = rows.where(F.lit(False)) if left is not None and not left.count else self._anti_join(rows, positions)
        if left is not None:
            self._origins = (*self._origins, replace(left, frame=rest))
        if keeps_order(rows, self._in_order):  # a join that a small table is sent to each task for moves no row
            self._in_order = (*self._in_order, rest)
        return rest

    def _anti_join(self, rows: DataFrame, positions: pa.Table) -> DataFrame:
        names = {c: f"_parked_{c}" for c in positions.column_names}
        parked = features.create(self.session, positions.rename_columns(list(names.values())))
        same = reduce(lambda a, b: a & b, [rows[c] == parked[p] for c, p in names.items()])
        return rows.join(F.broadcast(parked), on=same, how="left_anti")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Spark and the query have to be there after an error, or it says nothing; and so have files of kept rows, or the batch runs again.

        Raises:
            StoreUnavailable: a task did not find such a file. From now on rows are not kept where it was.
        """
        with answering(self.session, self._is_over), keeping.giving_up():
            yield

    def rows(self, rows: Any) -> Rows:
        """A DataFrame, an Arrow table, a dict or a list of dicts as rows for the store."""
        if _is_frame(rows):
            return SparkRows(rows, self._in_tasks, self._origins, self._in_order)
        return rows_of(rows)


@dataclass(frozen=True)
class SparkRows:
    """A DataFrame that the handler wrote; evaluated once by whoever calls `arrow` or `files`."""

    frame: DataFrame
    in_tasks: bool
    origins: tuple[Origin, ...] = ()
    in_order: tuple[DataFrame, ...] = ()  # frames in the order of the batch

    @property
    def ordered(self) -> bool:
        """Whether the rows come in an order that the handler knows."""
        return keeps_order(self.frame, self.in_order)

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema, from the plan."""
        return features.arrow_schema(self.frame.schema)

    def arrow(self) -> pa.Table:
        """The rows, on the driver."""
        for origin in self.origins:
            if (paths := picked(origin.frame, self.frame)) is not None:
                return origin.arrow(paths).cast(self.schema)
        return features.to_arrow(self.frame)

    def plain(self) -> None:
        """They have types."""

    def files(self, write: Write, columns: list[str]) -> list[str]:
        """`write` run by the tasks that hold the rows; its results."""
        for origin in self.origins:
            if (paths := picked(origin.frame, self.frame)) is not None:
                schema = pa.schema(map(self.schema.field, columns))
                if (results := origin.files({name: paths[name] for name in columns}, schema, write)) is not None:
                    return results
        found = features.to_arrow(
            features.map_in_arrow(self.frame.select(*map(named, columns)), partial(written, write=write), features.spark_schema(RESULT))
        )
        return [str(r) for r in found["result"].to_pylist()]


RESULT = pa.schema([pa.field("result", pa.string())])
"""What tasks answer that write rows: one row for each of them."""


def written(batches: Iterable[pa.RecordBatch], write: Write) -> Iterator[pa.RecordBatch]:
    """RESULT, in a task."""
    yield pa.RecordBatch.from_pydict({"result": pa.array(list(write(iter(batches))), pa.string())})


ColumnPath = tuple[int, ...]
"""Which column of the rows, then which field of it, and so on."""

Known = Mapping[int, ColumnPath]
"""Columns of a plan by their ids."""


@dataclass(frozen=True, eq=False)
class Origin(ABC):
    """What a frame was made of: the same rows and columns."""

    frame: DataFrame

    @property
    @abstractmethod
    def count(self) -> int:
        """Of the rows."""

    @abstractmethod
    def without(self, positions: pa.Table) -> Self:
        """The rows whose position is not among these, compared by its columns; the frame stays."""

    @abstractmethod
    def arrow(self, paths: Mapping[str, ColumnPath]) -> pa.Table:
        """Columns of the rows, under these names."""

    def files(self, paths: Mapping[str, ColumnPath], schema: pa.Schema, write: Write) -> list[str] | None:
        """`write` run by tasks that take these columns from files, in these types; its results. None where no files have the rows."""
        return None


@dataclass(frozen=True, eq=False)
class TableOrigin(Origin):
    """An Arrow table."""

    table: pa.Table

    @property
    def count(self) -> int:
        """Of the rows."""
        return int(self.table.num_rows)

    def without(self, positions: pa.Table) -> Self:
        """The rows whose position is not among these."""
        return replace(self, table=self.table.take(left_of(self.table, positions)))

    def arrow(self, paths: Mapping[str, ColumnPath]) -> pa.Table:
        """Columns of the rows, under these names."""
        return columns_of(self.table, paths)


def left_of(table: pa.Table, positions: pa.Table) -> pa.Array:
    """The numbers of the rows whose position is not among `positions`, in their order."""
    fields = map(table.schema.field, positions.column_names)
    # without dictionaries: Arrow joins no columns whose chunks have some of their own
    schema = pa.schema([f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in fields])
    rows = table.select(schema.names).cast(schema).append_column("_row", pa.array(range(table.num_rows), pa.int64()))
    left = rows.join(positions.cast(schema), keys=schema.names, join_type="left anti")["_row"]
    return left.take(pc.sort_indices(left)).combine_chunks()


def columns_of(table: pa.Table, paths: Mapping[str, ColumnPath]) -> pa.Table:
    """These columns and fields of a table, under these names."""
    return pa.table({name: _column(table, path) for name, path in paths.items()})


def _column(table: pa.Table, path: ColumnPath) -> pa.ChunkedArray:
    column = table.column(path[0])
    for field in path[1:]:
        column = pc.struct_field(column, [field])  # null where the struct is
    return column


def picked(frame: DataFrame, rows: DataFrame) -> dict[str, ColumnPath] | None:
    """Which columns of the frame the rows are; None where Spark has to evaluate them.

    The plan says so: projections of plain columns and struct fields over that very frame. Anything else is Spark's. Never raises: a plan
    that cannot be read, as on Spark Connect, is none of ours.
    """
    if not hasattr(rows, "_jdf") or not hasattr(frame, "_jdf"):
        return None
    try:
        paths = _paths(frame, rows)
    except JavaError:
        return None
    names = rows.columns
    return None if paths is None or len(set(names)) < len(names) else dict(zip(names, paths, strict=True))


def _paths(frame: DataFrame, rows: DataFrame) -> list[ColumnPath] | None:
    below, plan = _plan(frame), _plan(rows)
    own: Known = {ident: (number,) for number, ident in enumerate(map(_id, _items(below.output())))}
    known = _known(plan, own, below)
    return None if known is None else [known[_id(attribute)] for attribute in _items(plan.output())]


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


def _path(expression: Any, below: Known) -> ColumnPath | None:
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
