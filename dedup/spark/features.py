"""What versions of Spark do differently, all of it: rows as Arrow, Arrow as a frame, types, and which task gets which rows.

A feature is looked for, and no version is compared: a managed platform has parts of newer versions in an older one. Where one is missing,
the way around it uses Spark's public functions only, so that it is open on Spark Connect and on clusters that hide the JVM. What no way
leads around is a ConfigError that names the alternative.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas import types
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from dedup.core.rows import for_spark
from dedup.spark.answering import answering

PIECE = 10_000
"""Rows of an Arrow table that travel to a task as one value, where Spark takes no table, or where its session has no limit."""

LIMIT = "spark.sql.execution.arrow.maxRecordsPerBatch"
"""Rows of a piece in which a table goes to Spark; none or fewer: no limit, which `createDataFrame` of PySpark 4.2 hands to Arrow."""

_APART: dict[str, SparkSession] = {}

LOOKED_AT = 64
"""Numbers a task of which the hashes are looked at, to find one for each task."""


def to_arrow(frame: DataFrame) -> pa.Table:
    """All rows on the driver, in one job; timestamps in UTC. `toArrow` where Spark has it: from 4.0 on, on Databricks from 15.3.

    Raises:
        SparkGone: Spark has ended; rows that break off are an error, too.
    """
    with answering(frame.sparkSession):
        return _to_arrow(frame)


def _to_arrow(frame: DataFrame) -> pa.Table:
    frame = nullable(frame)
    if hasattr(frame, "toArrow"):
        return frame.toArrow()
    schema = arrow_schema(frame.schema)
    tables = [pa.ipc.open_stream(blob[0]).read_all() for blob in map_in_arrow(frame, _packed, "rows binary").collect()]
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])


Task = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
"""What a task makes of its rows. Travels there."""


def map_in_arrow(rows: DataFrame, task: Task, schema: StructType | str) -> DataFrame:
    """`mapInArrow` for columns of any name: Spark's own looks them up by their names, and takes `a.b` for a field."""
    numbered = rows.toDF(*(f"_{number}" for number in range(len(rows.columns))))
    return numbered.mapInArrow(partial(_named, names=rows.columns, task=task), schema)


def _named(batches: Iterable[pa.RecordBatch], names: list[str], task: Task) -> Iterator[pa.RecordBatch]:
    yield from task(batch.rename_columns(names) for batch in batches)


def told(session: SparkSession, name: str, default: str) -> str:
    """A setting of the session; the default where a platform does not show it: serverless compute shows few."""
    try:
        return str(session.conf.get(name, default))
    except PySparkException:
        return default


def is_local(session: SparkSession) -> bool:
    """Whether the tasks run on this machine, as far as Spark tells."""
    return told(session, "spark.master", "").startswith("local")


def apart(session: SparkSession) -> SparkSession:
    """A session with the settings of this one, from which no other write of the application inherits anything. For one caller at a time.

    There is one for each application: sessions leave traces in the JVM. Spark Connect has no `newSession`: there it is this one.
    """
    if not hasattr(session, "newSession"):
        return session
    key = session.sparkContext.applicationId
    if key not in _APART:
        _APART.clear()
        _APART[key] = session.newSession()
    other = _APART[key]
    wanted, known = _settings(session), _settings(other)
    for name in known.keys() - wanted.keys():
        other.conf.unset(name)
    for name, value in wanted.items():
        if known.get(name) != value:
            with contextlib.suppress(PySparkException):  # a static one, which is the same for all sessions
                other.conf.set(name, value)
    other.catalog.setCurrentCatalog(session.catalog.currentCatalog())
    other.catalog.setCurrentDatabase(session.catalog.currentDatabase())
    return other


@contextlib.contextmanager
def setting(session: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """The session with these settings, for the length of the block. What a platform does not let anybody change stays as it is."""
    before = dict[str, str | None]()
    with contextlib.suppress(PySparkException):
        for name in (name for name, value in wanted.items() if session.conf.get(name) != value):
            own = session.conf.get(name, None)
            session.conf.set(name, wanted[name])
            before[name] = own
    try:
        yield
    finally:
        for name, value in before.items():
            session.conf.unset(name) if value is None else session.conf.set(name, value)


@contextlib.contextmanager
def active(session: SparkSession) -> Iterator[None]:
    """With the session as the active one of this thread, whose settings classic Spark parses by, whosever frame it is about."""
    if not hasattr(session, "_jsparkSession"):
        yield
        return
    sessions: Any = session._jvm.org.apache.spark.sql.SparkSession  # type: ignore[union-attr]
    before = sessions.getActiveSession()
    sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        sessions.setActiveSession(before.get()) if before.isDefined() else sessions.clearActiveSession()


def _settings(session: SparkSession) -> dict[str, str]:
    """Those of the session, secrets as well. `conf.getAll` where Spark has it: from 4.0 on; SQL shows no secrets."""
    if hasattr(session.conf, "getAll"):
        return dict(session.conf.getAll)
    return {row[0]: session.conf.get(row[0]) or "" for row in session.sql("SET").collect()}


def nullable(frame: DataFrame) -> DataFrame:
    """The same rows; the fields of a struct that may be null may be null, too: Arrow casts no null struct with others, and Spark casts all.

    Source: `toArrow` of pyspark 4.2 (pyspark.sql.pandas.conversion) raises ArrowInvalid, "nulls in input cannot be viewed as non-nullable".
    """
    kinds = [_nullable(field.dataType, field.nullable) for field in frame.schema]
    if all(kind == field.dataType for kind, field in zip(kinds, frame.schema, strict=True)):
        return frame
    numbered = frame.toDF(*(f"_{number}" for number in range(len(kinds))))  # two columns may have one name
    given = zip(frame.schema, kinds, strict=True)
    columns = [F.col(f"_{number}").cast(kind).alias(field.name) for number, (field, kind) in enumerate(given)]
    return numbered.select(*columns)


def _nullable(kind: DataType, may_be_null: bool) -> DataType:
    if isinstance(kind, StructType):
        fields = ((f, f.nullable or may_be_null) for f in kind)
        return StructType([StructField(f.name, _nullable(f.dataType, null), null, f.metadata) for f, null in fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType, kind.containsNull), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _nullable(kind.valueType, kind.valueContainsNull), kind.valueContainsNull)
    return kind


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": pa.array([_ipc(pa.Table.from_batches([batch]))], pa.binary())})


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def create(session: SparkSession, table: pa.Table, schema: StructType | None = None) -> DataFrame:
    """These rows as a frame, in this order. `createDataFrame` where it takes Arrow: from 4.0 on.

    Args:
        schema: its types; by default those that Spark has for the table's.
    """
    rows = for_spark(table)
    if takes_arrow():
        with _limited(session):
            return session.createDataFrame(rows, schema=schema) if schema is not None else session.createDataFrame(rows)
    pieces = [(bytearray(_ipc(rows.slice(start, PIECE))),) for start in range(0, rows.num_rows, PIECE)]
    packed = session.createDataFrame(pieces, "rows binary")
    return packed.mapInArrow(_unpacked, schema or spark_schema(rows.schema))


def _limited(session: SparkSession) -> AbstractContextManager[None]:
    """Classic Spark's session with a limit to the rows of a piece, where it has none: Arrow raises ValueError for pieces of no row."""
    unlimited = hasattr(session, "_jsparkSession") and int(told(session, LIMIT, str(PIECE))) <= 0
    return setting(session, {LIMIT: str(PIECE)}) if unlimited else contextlib.nullcontext()


def of_any_size(frame: DataFrame) -> DataFrame:
    """The same rows on classic Spark, which does not know how large they are: it sends what is small to each task for a join.

    So a frame that a task makes out of a number is not taken for a few bytes.
    """
    rows, session = frame._jdf, frame.sparkSession
    rdd = rows.toJavaRDD()
    unsized: DataFrame = type(frame)(session._jsparkSession.createDataFrame(rdd, rows.schema()), session)
    return unsized


def _unpacked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for blob in batch.column(0):
            yield from pa.ipc.open_stream(blob.as_buffer()).read_all().to_batches()


@lru_cache
def takes_arrow() -> bool:
    """Whether `createDataFrame` takes a table of Arrow."""
    return "pa.Table" in str(inspect.signature(SparkSession.createDataFrame))


def arrow_schema(schema: StructType) -> pa.Schema:
    """The types in which Spark hands these columns over; timestamps in UTC. Raises PySparkTypeError for a type that Arrow does not have."""
    utc: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(types.to_arrow_schema).parameters else {}
    return types.to_arrow_schema(schema, **utc)


def spark_schema(schema: pa.Schema) -> StructType:
    """The types in Spark of these columns; timestamps without a zone are TIMESTAMP_NTZ."""
    return types.from_arrow_schema(schema, prefer_timestamp_ntz=True)


def spark_type(kind: pa.DataType) -> DataType:
    """The type in Spark of this one."""
    return types.from_arrow_type(kind, prefer_timestamp_ntz=True)


def place(rows: DataFrame, tasks: int, number: Column) -> DataFrame:
    """Bring each row to the task of its number, from 0 to below `tasks`. `repartitionById` where Spark has it: from 4.1 on."""
    if hasattr(rows, "repartitionById"):
        return rows.repartitionById(tasks, number)
    numbers = F.array(*map(F.lit, _stand_ins(rows.sparkSession, tasks)))
    return rows.repartition(tasks, F.element_at(numbers, number + F.lit(1)))


stand_ins: WeakKeyDictionary[SparkSession, dict[int, list[int]]] = WeakKeyDictionary()
"""Session -> how many tasks -> what stands in for the number of each."""


def _stand_ins(session: SparkSession, tasks: int) -> list[int]:
    """A number for each task that Spark's own hash sends there: one small job, once for each number of tasks."""
    known: dict[int, list[int]] = stand_ins.setdefault(session, {})
    if tasks not in known:
        asked = session.range(LOOKED_AT * tasks).select(F.col("id").cast("int").alias("n"))
        hashed: list[Any] = asked.groupBy(F.pmod(F.hash("n"), F.lit(tasks)).alias("task")).agg(F.min("n").alias("n")).collect()
        known[tasks] = [row["n"] for row in sorted(hashed, key=lambda row: int(row["task"]))]
        assert len(known[tasks]) == tasks, "a hash of Spark's left a task out"
    return known[tasks]


def printed(plan: Any) -> str:
    """A logical plan as Spark prints it; streaming nodes begin with `~`. Spark 3.5 marks none, so they are named once more below."""
    text = str(plan.toString()).rstrip()
    return text if "~" in text or not plan.isStreaming() else "\n".join([text, *_marked(plan, 0)])


def _marked(plan: Any, depth: int) -> Iterator[str]:
    mark, children = "~" if plan.isStreaming() else "", plan.children()
    yield f"{'   ' * (depth - 1) + '+- ' if depth else ''}{mark}{plan.nodeName()}"
    for number in range(children.size()):
        yield from _marked(children.apply(number), depth + 1)


def condition(error: Exception) -> str | None:
    """The name of the error's condition; None where Spark has none for it. Up to 3.5 it is called a class."""
    if not isinstance(error, PySparkException):
        return None
    return error.getCondition() if hasattr(error, "getCondition") else error.getErrorClass()
