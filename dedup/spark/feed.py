"""A Spark DataFrame as a batch: evaluated once, into Arrow on the driver or, where that is too much, into scratch Parquet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType

from checkpoint.errors import ConfigError
from dedup import too_large
from dedup.decode import prepare as arrow
from dedup.decode.prepare import Prepare
from dedup.executors import Tasks
from dedup.feed import Material, index_columns, numbered, process_run, visible
from dedup.frames import Frames
from dedup.index import Ints
from dedup.keys import HIDDEN
from dedup.rows import for_spark
from dedup.spark.frames import SparkFrames
from dedup.spark.prepare import answers, plan, stateful_operators, streaming_plan
from dedup.spark.prepare import prepare as prepare_columns
from dedup.spark.scratch import EVERY_FILE, require_shared, scratch_folder
from dedup.spark.tasks import SparkTasks

log = logging.getLogger("dedup")

ROW = "_row"

PAYLOAD_HASH = "_payload_hash"

MANY = 5_000
"""Rows from which on the tasks are quicker than a local relation."""

TOO_LARGE = {
    "maxResultSize": "spark.driver.maxResultSize",
    "TaskResultLost": "what Spark's processes keep of results (spark.driver.memory, spark.executor.memory)",
    **dict.fromkeys(too_large.HEAP, "the memory of Spark's processes (spark.driver.memory, spark.executor.memory)"),
}
"""Words in an error of Spark -> what the rows of a batch were too large for."""

LARGEST = 2**31 - 1
"""Bytes of a column that pyarrow takes rows from."""

LOCAL_BELOW = "spark.sql.execution.arrow.localRelationThreshold"
"""Bytes of Arrow below which Spark makes a local relation."""


class SparkFeed:
    """One batch of a Structured Streaming query, or any DataFrame."""

    def __init__(self, batch: DataFrame, scratch: str | None, *, collect: bool = True) -> None:
        self._batch, self._scratch, self._collect = batch, scratch, collect
        self.query_id = local_property(batch.sparkSession, "sql.streaming.queryId")
        run = local_property(batch.sparkSession, "spark.jobGroup.id") if self.query_id else None
        self.run_key = run or process_run()
        self.tasks: Tasks | None = SparkTasks(batch)

    @property
    def names(self) -> Sequence[str]:
        """The columns of the DataFrame."""
        return self._batch.columns

    def check(self, prepare: Prepare) -> None:
        """Raise ConfigError for what needs no job to be seen: missing columns, stateful operators upstream, no folder to share."""
        plan(self._batch, prepare)
        if not self._collect:
            require_shared(self._batch.sparkSession, self._scratch)
        found = stateful_operators(streaming_plan(self._batch, self.query_id)) if prepare.positions else []
        if found:
            raise ConfigError(
                f"The stream has stateful operators ({', '.join(sorted(set(found)))}): their rows have no position of their own. "
                f"Put the consumer before them, or use the key-only mode: Consumer(..., positions=None, idempotence_key=...)."
            )

    @contextmanager
    def materialise(self, prepare: Prepare) -> Iterator[Material]:
        """Arrow on the driver; scratch Parquet where Spark says that the result is too large, or the user wants it."""
        session, memory = self._batch.sparkSession, self._in_memory(prepare) if self._collect else None
        if memory is not None:
            yield memory
            return
        rows = prepare_columns(self._batch, prepare)
        with scratch_folder(session, self._scratch) as folder:
            if not prepare.positions:
                rows = rows.withColumn("sequence_number", F.monotonically_increasing_id())
            with answers():
                rows.withColumn(ROW, F.monotonically_increasing_id()).write.parquet(folder)
            whole = session.read.schema(_with_row(rows.schema)).options(**EVERY_FILE)
            yield ScratchMaterial(whole.parquet(folder))

    def _in_memory(self, prepare: Prepare) -> MemoryMaterial | None:
        found = plan(self._batch, prepare)
        table = self.collect(found.rows(self._batch))
        if table is None:
            return None
        late = None if found.parts else found.spec
        table = found.finish(table) if late is None else arrow.prepare_keys(table, late, beside=table.num_rows >= MANY)
        return MemoryMaterial(self._batch.sparkSession, table if prepare.positions else numbered(table), found.schema, late)

    def collect(self, rows: DataFrame) -> pa.Table | None:
        """The rows on the driver; None where they are too large for it, or Spark refuses because they are.

        Nothing is decided yet, so they may be computed again.
        """
        try:
            with answers():
                table = rows.toArrow()
        except Exception as error:  # py4j and Spark Connect wrap the same refusal differently
            told = too_large.words(error)
            reason = next((why for words, why in TOO_LARGE.items() if words in told), None)
            if reason is None:
                raise
            log.warning("the batch is larger than %s; using scratch files", reason)
            return None
        if max((column.nbytes for column in table.columns), default=0) + table.num_rows < LARGEST:
            return table
        log.warning("the batch has a column of more than 2 GB; using scratch files")
        return None


def connect_frame(writer: Any) -> DataFrame:
    """The streaming DataFrame that a DataStreamWriter of Spark Connect was made of: it keeps the plan alone."""
    from pyspark.sql.connect.dataframe import DataFrame as ConnectFrame

    return ConnectFrame(writer._write_stream._child, writer._session)


def local_property(session: SparkSession, name: str) -> str | None:
    """A local property of the thread that runs the callback; None on Spark Connect, where there is none to read."""
    try:
        return session.sparkContext.getLocalProperty(name)
    except (PySparkException, AttributeError):
        return None


def create_frame(session: SparkSession, table: pa.Table, schema: StructType) -> DataFrame:
    """These rows as a DataFrame. Many go to the tasks as Arrow, few stay a local relation, which needs no job."""
    rows = for_spark(table)
    if table.num_rows < MANY or not hasattr(session, "_jsparkSession"):
        return session.createDataFrame(rows, schema=schema)
    before = str(session.conf.get(LOCAL_BELOW))
    session.conf.set(LOCAL_BELOW, "0")  # else the driver alone makes rows of all this, twice as slowly
    try:
        return session.createDataFrame(rows, schema=schema)
    finally:
        session.conf.set(LOCAL_BELOW, before)


class MemoryMaterial:
    """Rows on the driver as Arrow; frames are local relations of them."""

    def __init__(self, session: SparkSession, table: pa.Table, schema: StructType, late: Prepare | None = None) -> None:
        self._session, self._table = session, table
        self._late = late  # how to compute the columns that are not there yet
        if late is not None and PAYLOAD_HASH in table.column_names:
            self._table, self._hashes = table.drop_columns([PAYLOAD_HASH]), np.asarray(table[PAYLOAD_HASH])
        self._schema = StructType([f for f in schema.fields if f.name not in HIDDEN])
        self._frames = SparkFrames(session, in_tasks=False)
        self._expected: tuple[Ints, DataFrame, pa.Table] | None = None

    @property
    def frames(self) -> Frames:
        """How Tx asks the handler's frames."""
        return self._frames

    @property
    def index(self) -> pa.Table:
        """INDEX_COLUMNS and, with a sequence key, `_sequence` of every row."""
        return self._table.select(index_columns(self._table.column_names))

    def payload_hashes(self) -> Ints:
        """The payload hash of every row, computed once."""
        return self._hashes

    @cached_property
    def _hashes(self) -> Ints:
        return np.asarray(self._table["_payload_hash"] if self._late is None else arrow.payload_hashes(self._table, self._late))

    def content(self, rows: Ints) -> pa.Table:
        """These rows, in this order."""
        found = self._table.take(pa.array(rows))
        return found if self._late is None else arrow.complete(found, self._late, pa.array(self._hashes[rows]))

    def frame(self, rows: Ints) -> DataFrame:
        """These rows as a DataFrame, in this order."""
        expected, self._expected = self._expected, None
        frame, chosen = expected[1:] if expected is not None and np.array_equal(expected[0], rows) else self._make(rows)
        self._frames.remember(frame, chosen)
        return frame

    def expect(self, rows: Ints) -> None:
        """Make the frame of these rows now, where that takes long."""
        self._expected = (rows, *self._make(rows)) if len(rows) >= MANY else None

    def _make(self, rows: Ints) -> tuple[DataFrame, pa.Table]:
        table = visible(self._table)
        whole = len(rows) == table.num_rows and bool((np.diff(rows) == 1).all())
        chosen = table if whole else table.take(pa.array(rows))
        return create_frame(self._session, chosen, self._schema), chosen


class ScratchMaterial:
    """Rows in Parquet files; only positions and keys come to the driver."""

    def __init__(self, rows: DataFrame) -> None:
        self._rows, self._session = rows, rows.sparkSession
        self.frames: Frames = SparkFrames(self._session, in_tasks=True)
        table = rows.select(*index_columns(rows.columns), "_payload_hash", ROW).toArrow()
        self._ids: Ints = table[ROW].to_numpy()
        self._hashes: Ints = table["_payload_hash"].to_numpy()
        self._index = table.drop_columns(["_payload_hash", ROW])

    @property
    def index(self) -> pa.Table:
        """INDEX_COLUMNS and, with a sequence key, `_sequence` of every row."""
        return self._index

    def payload_hashes(self) -> Ints:
        """The payload hash of every row."""
        return self._hashes

    def content(self, rows: Ints) -> pa.Table:
        """These rows, in this order."""
        found = self._chosen(rows, "inner").toArrow()
        order = np.argsort(found[ROW].to_numpy())
        back = np.searchsorted(found[ROW].to_numpy()[order], self._ids[rows])
        return found.take(pa.array(order[back])).drop_columns([ROW])

    def frame(self, rows: Ints) -> DataFrame:
        """These rows as a DataFrame; their order is Spark's."""
        left_out = np.setdiff1d(np.arange(len(self._ids)), rows)
        if not len(left_out):
            return self._rows.drop(*HIDDEN, ROW)
        few = len(left_out) < len(rows)  # the shorter list goes to every task
        chosen = self._chosen(left_out, "left_anti") if few else self._chosen(rows, "left_semi")
        return chosen.drop(*HIDDEN, ROW)

    def expect(self, rows: Ints) -> None:
        """Nothing to make: a frame is lazy."""

    def _chosen(self, rows: Ints, how: str) -> DataFrame:
        ids = self._session.createDataFrame(
            for_spark(pa.table({ROW: np.unique(self._ids[rows])})), schema=StructType().add(ROW, LongType())
        )
        return self._rows.join(F.broadcast(ids), on=ROW, how=how)


def _with_row(schema: StructType) -> StructType:
    return StructType([*schema.fields]).add(ROW, LongType())
