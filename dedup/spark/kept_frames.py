"""Frames over rows that tasks keep in files (keeping.py), for handlers of batches whose rows do not come to the driver.

Spark reads the files whenever it evaluates a frame. What a handler only picks from its frame, tasks take from the files by themselves:
these rows do not pass through the JVM. Called by dedup/spark/batch.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, cast

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from checkpoint.position import Ints
from dedup.core.keys import HIDDEN
from dedup.pipeline.batch import Tasks
from dedup.spark import features
from dedup.spark.frames import RESULT, ColumnPath, Origin, SparkFrames, Write, columns_of, left_of, written
from dedup.spark.keeping import EvaluatedInTasks, Share, in_runs

READ = 10_000
"""Rows that a task hands to the JVM at once, as many as Spark hands to a task."""


class EvaluatedInFiles:
    """Rows in files of tasks; only positions, keys and payload hashes come to the driver.

    Args:
        schema: of the prepared rows.
        tasks: those that read the files.
    """

    def __init__(self, frames: SparkFrames, rows: EvaluatedInTasks, schema: StructType, tasks: Tasks) -> None:
        self.frames, self._rows, self._tasks = frames, rows, tasks
        self._schema = StructType([f for f in schema.fields if f.name not in HIDDEN])
        self.payload_hashes, self.content = rows.payload_hashes, rows.content

    @property
    def index(self) -> pa.Table:
        """INDEX_COLUMNS and, with a sequence key, `_sequence` of every row."""
        return self._rows.index

    def frame(self, rows: Ints) -> DataFrame:
        """These rows as a DataFrame: those of one topic partition in the order of their positions."""
        dealt = self._dealt(rows)
        read = partial(_read, dealt=dealt, names=self._schema.names)
        numbers = self.frames.session.range(0, len(dealt), 1, max(len(dealt), 1)).toDF("number")
        frame = features.of_any_size(numbers).mapInArrow(read, self._schema)
        self.frames.remember(KeptOrigin(frame, self, rows))
        return frame

    def expect(self, rows: Ints) -> None:
        """Nothing to make: a frame is lazy."""

    def _dealt(self, rows: Ints) -> list[list[Share]]:
        """Where these rows are, for each task that reads."""
        return in_runs([one for share in self._rows.frame(rows).shares for one in share.split()], max(self._tasks.cores, 1))

    def columns(self, rows: Ints, paths: Mapping[str, ColumnPath]) -> pa.Table:
        """Columns of these rows, on the driver, under these names; in the order of `frame`."""
        tables = [columns_of(table, paths) for table in _tables(self._rows.frame(rows).shares, self._schema.names)]
        return pa.concat_tables(tables or [columns_of(features.arrow_schema(self._schema).empty_table(), paths)])

    def written(self, rows: Ints, paths: Mapping[str, ColumnPath], schema: pa.Schema, write: Write) -> list[str]:
        """`write` run by tasks on columns of these rows; its results. Crash: as of `write`."""
        if not (dealt := self._dealt(rows)):
            return []
        task = partial(_write, dealt=dealt, names=self._schema.names, paths=paths, schema=schema, write=write)
        return [str(result) for result in self._tasks.spread(task, len(dealt), RESULT)["result"].to_pylist()]


@dataclass(frozen=True, eq=False)
class KeptOrigin(Origin):
    """Some rows in files of tasks."""

    batch: EvaluatedInFiles
    rows: Ints

    @property
    def count(self) -> int:
        """Of the rows."""
        return len(self.rows)

    def without(self, positions: pa.Table) -> Self:
        """The rows whose position is not among these. Only the driver's index is asked."""
        index = self.batch.index.select(positions.column_names).take(pa.array(self.rows))
        return replace(self, rows=self.rows[left_of(index, positions).to_numpy()])

    def arrow(self, paths: Mapping[str, ColumnPath]) -> pa.Table:
        """Columns of the rows, under these names."""
        return self.batch.columns(self.rows, paths)

    def files(self, paths: Mapping[str, ColumnPath], schema: pa.Schema, write: Write) -> list[str]:
        """`write` run by the tasks that read the files; its results."""
        return self.batch.written(self.rows, paths, schema, write)


# The tasks' side.


def _tables(shares: Sequence[Share], names: Sequence[str]) -> Iterator[pa.Table]:
    """Raises StoreUnavailable where a file is gone."""
    files: dict[str, pa.Table] = {}
    for share in shares:
        yield share.read(files).select(names)


def _read(batches: Iterable[pa.RecordBatch], dealt: Sequence[Sequence[Share]], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for number in (number for batch in batches for number in cast("list[int]", batch.column(0).to_pylist())):
        for table in _tables(dealt[number], names):
            yield from table.to_batches(max_chunksize=READ)


def _write(
    number: int,
    dealt: Sequence[Sequence[Share]],
    names: Sequence[str],
    paths: Mapping[str, ColumnPath],
    schema: pa.Schema,
    write: Write,
) -> Iterator[pa.RecordBatch]:
    chosen = (columns_of(table, paths).cast(schema) for table in _tables(dealt[number], names))
    yield from written((batch for table in chosen for batch in table.to_batches()), write)
