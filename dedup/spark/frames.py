"""Spark DataFrames as handler frames: implements `dedup.frames.Frames`, on classic Spark and on Spark Connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from dedup.arrow_frames import rows_of
from dedup.rows import for_spark
from dedup.spark.picked import Origin, anti_join
from dedup.store import Rows


class SparkFrames:
    """What `Tx` needs of DataFrames."""

    def __init__(self, session: SparkSession, *, in_tasks: bool) -> None:
        self._session, self._in_tasks = session, in_tasks
        self._origins: tuple[Origin, ...] = ()

    def remember(self, frame: DataFrame, table: pa.Table) -> None:
        """What the handler gets was made of this table: what it only picks from the frame needs no job."""
        self._origins = (Origin(frame, table),)

    def columns(self, rows: DataFrame) -> list[str]:
        """Column names."""
        return rows.columns

    def positions(self, rows: DataFrame, condition: str | Column | None, columns: list[str]) -> pa.Table:
        """These columns of the rows for which the condition is true: one job, which brings only those rows."""
        if condition is not None:
            rows = rows.where(F.expr(condition) if isinstance(condition, str) else condition)
        return rows.select(*columns).toArrow()

    def without(self, rows: DataFrame, positions: pa.Table) -> DataFrame:
        """The rows whose position is not among `positions`."""
        origin = next((o for o in self._origins if o.frame is rows), None)
        left = None if origin is None else anti_join(origin.table, positions)
        rest = rows.where(F.lit(False)) if left is not None and not left.num_rows else self._anti_join(rows, positions)
        if left is not None:
            self._origins = (*self._origins, Origin(rest, left))
        return rest

    def _anti_join(self, rows: DataFrame, positions: pa.Table) -> DataFrame:
        names = {c: f"_parked_{c}" for c in positions.column_names}
        parked = self._session.createDataFrame(for_spark(positions.rename_columns(list(names.values()))))
        same = reduce(lambda a, b: a & b, [rows[c] == parked[p] for c, p in names.items()])
        return rows.join(F.broadcast(parked), on=same, how="left_anti")

    def rows(self, rows: Any) -> Rows:
        """A DataFrame, an Arrow table, a dict or a list of dicts as rows for the store."""
        if type(rows).__name__ == "DataFrame" and type(rows).__module__.startswith("pyspark."):
            return SparkRows(rows, self._in_tasks, self._origins)
        return rows_of(rows)


@dataclass(frozen=True)
class SparkRows:
    """A DataFrame that the handler wrote; evaluated once by whoever calls `arrow` or `files`."""

    frame: DataFrame
    in_tasks: bool
    origins: tuple[Origin, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema, from the plan."""
        return to_arrow_schema(self.frame.schema, timezone="UTC")  # as toArrow does

    def arrow(self) -> pa.Table:
        """The rows, on the driver."""
        picked = next((table for origin in self.origins if (table := origin.pick(self.frame)) is not None), None)
        return self.frame.toArrow() if picked is None else picked.cast(self.schema)

    def plain(self) -> None:
        """They have types."""

    def files(self, write: Callable[[Iterator[pa.RecordBatch]], Iterator[str]], columns: list[str]) -> list[str]:
        """`write` run by the tasks that hold the rows; its results."""

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({"result": pa.array(list(write(batches)), pa.string())})

        found = self.frame.select(*[F.col(f"`{c}`") for c in columns]).mapInArrow(run, "result string").toArrow()
        return [str(r) for r in found["result"].to_pylist()]
