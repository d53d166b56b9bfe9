"""A Spark DataFrame as a batch: evaluated once, into Arrow on the driver or, where that is too much, into files.

Tasks keep the rows in Arrow files if they share a folder with the driver (kept_frames.py). Else Spark writes scratch Parquet: on object
storage, on Spark Connect, and of rows without positions.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType

from checkpoint.errors import ConfigError, StoreUnavailable
from checkpoint.position import Ints, Ranges
from deadletter import outage
from dedup.core.keys import HIDDEN
from dedup.core.rows import fits_in_one_piece
from dedup.core.store import Frames
from dedup.decode.prepare import Prepare, complete, payload_hashes, prepare_keys
from dedup.pipeline.batch import EvaluatedBatch, Tasks, index_columns, numbered, process_run, visible
from dedup.spark import features, keeping
from dedup.spark.frames import SparkFrames, TableOrigin
from dedup.spark.kept_frames import EvaluatedInFiles
from dedup.spark.prepare import answers, plan, prepare_columns, reads_files, stateful_operators, streaming_plan
from dedup.spark.session import AS_GIVEN, OUR_FILES
from dedup.spark.tasks import SparkTasks

log = logging.getLogger("dedup")

ROW = "_dedup_row"
"""Number of a row in scratch files: no column of a user's, who may well have a `_row`."""

RANGES = 16
"""Ranges of such numbers at most by which rows are looked for."""

PAYLOAD_HASH = "_payload_hash"

MANY = 5_000
"""Rows from which on the tasks are quicker than a local relation."""

TOO_LARGE = {
    "maxResultSize": "spark.driver.maxResultSize",
    "TaskResultLost": "what Spark's processes keep of results (spark.driver.memory, spark.executor.memory)",
    **dict.fromkeys(outage.HEAP, "the memory of Spark's processes (spark.driver.memory, spark.executor.memory)"),
}
"""Words in an error of Spark -> what the rows of a batch were too large for."""

TOLD_WITHIN = 60.0
"""Seconds after a write in which Spark says how many rows it wrote."""

LOCAL_BELOW = "spark.sql.execution.arrow.localRelationThreshold"
"""Bytes of Arrow below which Spark makes a local relation."""


class SparkBatch:
    """One batch of a Structured Streaming query, or any DataFrame."""

    def __init__(self, batch: DataFrame, scratch: str | None, *, collect: bool = True) -> None:
        self._batch, self._scratch, self._collect = batch, scratch, collect
        self.query_id = local_property(batch.sparkSession, "sql.streaming.queryId")
        self._run = self._first_run()
        group = local_property(batch.sparkSession, "spark.jobGroup.id") if self.query_id else None  # the run, unless the user sets it
        self.run_key = self._run or group or process_run()
        self.tasks: Tasks | None = SparkTasks(batch, scratch)

    @property
    def names(self) -> Sequence[str]:
        """The columns of the DataFrame."""
        return self._batch.columns

    @property
    def reads_files(self) -> bool:
        """Whether the stream is one of files; False where Spark does not tell."""
        return reads_files(streaming_plan(self._batch, self.query_id))

    @property
    def is_over(self) -> bool:
        """Whether this run of the query was stopped, where Spark tells; another run may have the same id."""
        if self._run is None:
            return False
        try:
            return active_run(self._batch.sparkSession, self.query_id) != self._run
        except Exception:  # noqa: BLE001 - as in `_first_run`: then it goes on
            return False

    def _first_run(self) -> str | None:
        """The run that the batch belongs to; None where Spark does not tell."""
        try:
            return active_run(self._batch.sparkSession, self.query_id)
        except Exception:  # noqa: BLE001 - internals of Spark that another version, or a platform, may hide
            return None

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
    def evaluate(self, prepare: Prepare) -> Iterator[EvaluatedBatch]:
        """Arrow on the driver; files where Spark says that the result is too large, or the user wants it."""
        memory = self._in_memory(prepare) if self._collect else None
        if memory is not None:
            yield memory
            return
        with self._in_files(prepare) as found:
            if found is not None:
                yield found
                return
        with self._in_scratch(prepare) as rows:
            yield rows

    @contextmanager
    def _in_files(self, prepare: Prepare) -> Iterator[EvaluatedInFiles | None]:
        """Rows that tasks keep in files; None where they cannot, or rows have no positions to be found by. Crash: as of `kept`.

        None on Spark Connect, too: it would take such a frame for a few bytes, and send all of it to each task for a join.
        """
        if not prepare.positions or self.tasks is None or not hasattr(self._batch.sparkSession, "_jsparkSession"):
            yield None
            return
        with keeping.kept(self.tasks, prepare) as found:
            frames = SparkFrames(self._batch.sparkSession, lambda: self.is_over, in_tasks=True)
            yield None if found is None else EvaluatedInFiles(frames, found, plan(self._batch, prepare).schema, self.tasks)

    @contextmanager
    def _in_scratch(self, prepare: Prepare) -> Iterator[EvaluatedInScratch]:
        """Rows that Spark writes into scratch Parquet."""
        session, rows = self._batch.sparkSession, prepare_columns(self._batch, prepare)
        with scratch_folder(session, self._scratch) as folder:
            if not prepare.positions:
                rows = rows.withColumn("sequence_number", F.monotonically_increasing_id())
            with plan(self._batch, prepare).evaluating(self._batch), answers(), features.setting(session, AS_GIVEN):
                written = self._write(rows.withColumn(ROW, F.monotonically_increasing_id()), folder)
            whole = session.read.schema(_with_row(rows.schema)).options(**OUR_FILES)
            found = EvaluatedInScratch(SparkFrames(session, lambda: self.is_over, in_tasks=True), whole.parquet(folder))
            require_all(self._scratch, written, found.index.num_rows)
            yield found

    def _write(self, rows: DataFrame, folder: str) -> int | None:
        """The number of rows where it says whether tasks share the folder: object storage is one place for all, and so is this machine.

        Crash: some files are there, which go with the folder.
        """
        if features.is_local(rows.sparkSession) or keeping.path_of(folder) is None:
            rows.write.parquet(folder)
            return None
        return write_counted(rows, folder)

    def _in_memory(self, prepare: Prepare) -> EvaluatedInMemory | None:
        found = plan(self._batch, prepare)
        with found.evaluating(self._batch):
            table = self.collect(found.rows(self._batch))
        if table is None:
            return None
        late = None if found.parts else found.spec
        table = found.finish(table) if late is None else prepare_keys(table, late, beside=table.num_rows >= MANY)
        frames = SparkFrames(self._batch.sparkSession, lambda: self.is_over, in_tasks=False)
        return EvaluatedInMemory(frames, table if prepare.positions else numbered(table), found.schema, late)

    def collect(self, rows: DataFrame) -> pa.Table | None:
        """The rows on the driver; None where they are too large for it, or Spark refuses because they are.

        Nothing is decided yet, so they may be computed again.
        """
        try:
            with answers():
                table = features.to_arrow(rows)
        except Exception as error:  # py4j and Spark Connect wrap the same refusal differently
            told = outage.words(error)
            reason = next((why for words, why in TOO_LARGE.items() if words in told), None)
            if reason is None:
                raise
            log.warning("the batch is larger than %s; using scratch files", reason)
            return None
        if fits_in_one_piece(table):
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


def active_run(session: SparkSession, query_id: str | None) -> str | None:
    """The id of the run in which this query is active; None where it is not. Raises what a platform does that hides it.

    Asked of what all sessions share: that of a batch is a copy, which knows no query.
    """
    if not query_id:
        return None
    shared: Any = session._jsparkSession.sharedState()
    jvm: Any = session._jvm
    query = shared.activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))
    return None if query is None or not query.isActive() else str(query.runId().toString())


def create_frame(session: SparkSession, table: pa.Table, schema: StructType) -> DataFrame:
    """These rows as a DataFrame. Many go to the tasks as Arrow, few stay a local relation, which needs no job."""
    if table.num_rows < MANY or not hasattr(session, "_jsparkSession"):
        return features.create(session, table, schema)
    with features.setting(session, {LOCAL_BELOW: "0"}):  # else the driver alone makes rows of all this, twice as slowly
        return features.create(session, table, schema)


class EvaluatedInMemory:
    """Rows on the driver as Arrow; frames are local relations of them."""

    def __init__(self, frames: SparkFrames, table: pa.Table, schema: StructType, late: Prepare | None = None) -> None:
        self._frames, self._session, self._table = frames, frames.session, table
        self._late = late  # how to compute the columns that are not there yet
        if late is not None and PAYLOAD_HASH in table.column_names:
            self._table, self._hashes = table.drop_columns([PAYLOAD_HASH]), np.asarray(table[PAYLOAD_HASH])
        self._schema = StructType([f for f in schema.fields if f.name not in HIDDEN])
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
        return np.asarray(self._table["_payload_hash"] if self._late is None else payload_hashes(self._table, self._late))

    def content(self, rows: Ints) -> pa.Table:
        """These rows, in this order."""
        found = self._table.take(pa.array(rows))
        return found if self._late is None else complete(found, self._late, pa.array(self._hashes[rows]))

    def frame(self, rows: Ints) -> DataFrame:
        """These rows as a DataFrame, in this order."""
        expected, self._expected = self._expected, None
        frame, chosen = expected[1:] if expected is not None and np.array_equal(expected[0], rows) else self._make(rows)
        self._frames.remember(TableOrigin(frame, chosen))
        return frame

    def expect(self, rows: Ints) -> None:
        """Make the frame of these rows now, where that takes long."""
        self._expected = (rows, *self._make(rows)) if len(rows) >= MANY else None

    def _make(self, rows: Ints) -> tuple[DataFrame, pa.Table]:
        table = visible(self._table)
        whole = len(rows) == table.num_rows and bool((np.diff(rows) == 1).all())
        chosen = table if whole else table.take(pa.array(rows))
        return create_frame(self._session, chosen, self._schema), chosen


class EvaluatedInScratch:
    """Rows in Parquet files; only positions and keys come to the driver."""

    def __init__(self, frames: SparkFrames, rows: DataFrame) -> None:
        self.frames: Frames = frames
        self._rows, self._session = rows, rows.sparkSession
        table = features.to_arrow(rows.select(*index_columns(rows.columns), "_payload_hash", ROW))
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
        found = features.to_arrow(self._chosen(rows, "inner"))
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
        ids = np.unique(self._ids[rows])
        whole = self._rows if how == "left_anti" else self._rows.where(near(ids))
        frame = features.create(self._session, pa.table({ROW: ids}), StructType().add(ROW, LongType()))
        return whole.join(F.broadcast(frame), on=ROW, how=how)


def near(ids: Ints) -> Column:
    """True for rows with these numbers, which ascend, and for few others: what statistics of Parquet files exclude is not read."""
    found = Ranges.of_numbers(ids).at_most(RANGES).items
    return reduce(lambda a, b: a | b, (F.col(ROW).between(*one) for one in found), F.lit(False))


def _with_row(schema: StructType) -> StructType:
    return StructType([*schema.fields]).add(ROW, LongType())


@contextmanager
def scratch_folder(session: SparkSession, scratch: str | None) -> Iterator[str]:
    """A folder of one attempt, removed afterwards. Raises ConfigError where none can be shared.

    Crash: of a process that dies the folder stays.
    """
    require_shared(session, scratch)
    if scratch is None:
        with tempfile.TemporaryDirectory(prefix="dedup-") as folder:
            yield f"{folder}/rows"
        return
    mine = f"{spark_folder(scratch).rstrip('/')}/dedup-{uuid.uuid4().hex}"
    _make(session, scratch, mine)
    try:
        yield f"{mine}/rows"
    finally:
        _remove(session, mine)


def spark_folder(scratch: str) -> str:
    """A path with its scheme, because Spark's default file system may be another one."""
    path = keeping.path_of(scratch)
    return scratch if path is None else f"file://{os.path.abspath(path)}"


def _make(session: SparkSession, scratch: str, folder: str) -> None:
    """The folder, where it is one of this machine. Raises ConfigError where it cannot be made. Crash: it is there or not."""
    path = keeping.path_of(folder)
    if path is None or not hasattr(session, "_jsparkSession"):  # Spark Connect's folders are its server's
        return
    try:
        os.makedirs(path)
    except OSError as error:
        raise ConfigError(
            f"Limits(scratch={scratch!r}): nothing can be written there ({error}). Give a folder that driver and executors may write to."
        ) from error


def write_counted(rows: DataFrame, folder: str) -> int:
    """Write the rows as Parquet files; returns how many Spark has written. Raises StoreUnavailable where it does not say.

    Crash: some files are there.
    """
    seen, told = Observation(), list[int]()
    rows.observe(seen, F.count(F.lit(1)).alias("rows")).write.parquet(folder)
    asking = threading.Thread(target=lambda: told.append(seen.get["rows"]), daemon=True)
    asking.start()  # it waits for an event, which Spark drops when it has too many of them
    asking.join(TOLD_WITHIN)
    if not told:
        raise StoreUnavailable(f"Spark does not say how many rows it wrote into {folder}, so whether all are there cannot be told.")
    return told[0]


def require_all(scratch: str | None, written: int | None, found: int) -> None:
    """Raise ConfigError where rows are missing, because each machine has a folder of its own by that name.

    Asked of each batch: an executor on another machine may join at any time.
    """
    if written is not None and found != written:
        raise ConfigError(
            f"Limits(scratch={scratch!r}) is not one folder for driver and executors: of {written} rows that tasks wrote there, {found} "
            "are found. Give a folder that all of them share, such as a mounted volume or object storage."
        )


def require_shared(session: SparkSession, scratch: str | None) -> None:
    """Raise ConfigError where executors are elsewhere and no folder is named."""
    if scratch is None and not features.is_local(session):
        raise ConfigError(
            "The batch is too large for the driver, or collect=False. Give Limits(scratch=...) a folder that driver and executors share."
        )


def _remove(session: SparkSession, folder: str) -> None:
    """As a folder of this machine where it is one, else by Spark's own access to the storage, of which Spark Connect has none to offer."""
    try:
        here = Path(folder.removeprefix("file:"))
        if here.is_dir():
            return shutil.rmtree(here)
        path = session._jvm.org.apache.hadoop.fs.Path(folder)  # type: ignore[union-attr]
        path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).delete(path, True)
    except Exception as error:  # noqa: BLE001 - whatever the storage or py4j raises: the batch has nothing to do with it
        log.warning("%s was not removed: %s", folder, type(error).__name__)
