"""The Spark side of the Delta store: names of the catalog, sinks and stores that only Spark may write, and views of the state.

Promises that rows appended with a transaction id are there once, however often it is tried; whether the first try landed is read back by
the caller, because Spark skips a known id silently. Everything goes through Spark's public API, so that classic Spark and Spark Connect
are one. The views show the state of a store to people who ask in SQL. Called by dedup/delta, where a session is active.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from checkpoint.errors import ConfigError, DedupError, RowsMisfit, RowsRefused, StoreUnavailable
from checkpoint.head import Head
from deadletter.classify import PERMANENT, TRANSIENT, classify
from deadletter.selection import Selection
from dedup.core.steps import Merge
from dedup.core.store import Store
from dedup.spark import features
from dedup.spark.session import AS_GIVEN, AS_STAGED, ERRORS, EVERY_FILE, OUR_FILES

NOTE = "userMetadata"
_TXN_NOTE = "spark.databricks.delta.commitInfo.userMetadata"
_TXN_APP, _TXN_VERSION = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"
_MERGING = threading.Lock()  # a MERGE takes its id from the settings of a session, and there is one session for merges
_PART = re.compile(r"(?:^|(?<!^)\.)(?:`((?:[^`]|``)+)`|([^.`]+))")
_DELETE = "_dedup_delete"  # of staged rows: true deletes the sink's row

_MISSING = ("DELTA_TABLE_ONLY_OPERATION", "DELTA_MISSING_DELTA_TABLE", "DELTA_TABLE_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")
"""Conditions by which Delta says that there is no table, or none of Delta's."""

_LENIENT = tuple(f"spark.sql.files.{name}" for name in EVERY_FILE)
"""Settings under which Spark leaves files out in silence."""

CHECKPOINTS = pa.schema(
    [
        pa.field("consumer", pa.string()),
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("sequence_number", pa.int64()),
        pa.field("offset", pa.string()),
        pa.field("enqueued_time", pa.timestamp("us", tz="UTC")),
        pa.field("query_id", pa.string()),
        pa.field("epoch", pa.int64()),
        pa.field("generation", pa.int32()),
    ]
)


def active() -> SparkSide | None:
    """The Spark side of this process's session; None where there is none. Never starts one."""
    session = SparkSession.getActiveSession()
    return None if session is None else SparkSide(session)


class SparkSide:
    """What the Delta store asks of a Spark session."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    def location(self, name: str) -> str:
        """Where a table of the catalog lies; `name` has one to three parts.

        Raises:
            ConfigError: there is no such table, or it is no Delta table. StoreUnavailable: the catalog does not answer.
        """
        try:
            rows = self.session.sql(f"DESCRIBE DETAIL {quoted(name)}").select("format", "location").collect()
        except ERRORS as error:
            said = first_line(error)
            if classify(error) == TRANSIENT:
                raise StoreUnavailable(f"The catalog of this Spark session cannot be asked for the table {name!r}: {said}") from error
            raise ConfigError(
                f"The sink {name!r} is not a path and not in tables=, and the catalog of this Spark session has no table of this name that "
                "can be described. Give a path, a name from tables=, or the name of a table."
                + ("" if "NOT_FOUND" in said else f" Spark says: {said}")
            ) from error
        if rows[0]["format"] != "delta":
            raise ConfigError(f"The table {name!r} is not a Delta table but {rows[0]['format']}.")
        return _plain(str(rows[0]["location"]))

    def append(self, uri: str, files: Sequence[str], app: str, version: int) -> None:
        """Append staged rows to a sink with a transaction id.

        Raises:
            StoreUnavailable: Spark said no, or another publisher has done it and the files are gone; whether it landed has to be read back.

        Crash: the sink shows all rows, with the transaction id, or none.
        """
        try:
            rows = _staged(self.session, files)
            writer = rows.write.format("delta").mode("append").option("txnAppId", app).option("txnVersion", version)
            with features.setting(self.session, AS_STAGED):  # Spark Connect finds types only now
                save(self.session, writer.options(**self.note(app, version)), uri)
        except ERRORS as error:
            raise StoreUnavailable(f"Spark cannot append to {uri}: {first_line(error)}") from error

    def merge(self, uri: str, files: Sequence[str], how: Merge, app: str, version: int) -> None:
        """Merge staged rows into a sink with a transaction id.

        The id is a setting of a session, and each write of that session would carry it: so the session is one that nobody else writes with
        (on Spark Connect it is the caller's).

        Raises:
            StoreUnavailable: as for `append`.

        Crash: the sink shows all of it, with the transaction id, or nothing of it.
        """
        with _MERGING:
            session = features.apart(self.session)
            try:
                rows = _staged(session, files, mergeSchema=True)
            except ERRORS as error:
                raise StoreUnavailable(f"Spark cannot read the rows for the merge into {uri}: {first_line(error)}") from error
            settings = {_TXN_APP: app, _TXN_VERSION: str(version), **self._noted(app, version)}
            before = {name: session.conf.get(name, None) for name in settings}
            try:
                for name, value in settings.items():
                    session.conf.set(name, value)
                with features.setting(session, AS_GIVEN | AS_STAGED):
                    session.sql(_merge_sql(uri, rows.columns, how), rows=rows).collect()
            except ERRORS as error:
                raise StoreUnavailable(f"Spark cannot merge into {uri}: {first_line(error)}") from error
            finally:
                for name, old in before.items():
                    session.conf.unset(name) if old is None else session.conf.set(name, old)

    def violations(
        self,
        files: Sequence[str],
        constraints: Mapping[str, str],
        filled: Mapping[str, str],
        if_there: Mapping[str, str] = MappingProxyType({}),
        emptied: Collection[str] = (),
    ) -> dict[str, int]:
        """How many staged rows violate each constraint; only those that are violated. One job for all of them.

        As in Delta, a condition that is NULL is violated.

        Args:
            filled: columns that the table fills where the rows lack them -> SQL.
            if_there: constraints that count only for rows with this column.
            emptied: columns in which an empty text is NULL.

        Raises:
            RowsRefused: a constraint fails at a row. RowsMisfit: the rows lack a column that it names.
            StoreUnavailable: Spark cannot tell at the moment. ConfigError: a constraint cannot be evaluated, whatever the rows are.
        """
        if not constraints:
            return {}
        try:
            rows = _as_stored(_staged(self.session, files), filled, emptied)
            constraints = {name: sql for name, sql in constraints.items() if name not in if_there or if_there[name] in rows.columns}
            if not constraints:
                return {}
            counts = rows.agg(*(_broken(sql).alias(f"c{i}") for i, sql in enumerate(constraints.values()))).collect()[0]
        except ERRORS as error:
            raise _untested(error, constraints) from error
        return {name: count for name, count in zip(constraints, counts, strict=True) if count}

    def _noted(self, app: str, version: int) -> dict[str, str]:
        note = self.note(app, version)
        return {_TXN_NOTE: note[NOTE]} if note else {}

    def note(self, app: str, version: int) -> dict[str, str]:
        """What a commit with this transaction id says about itself: nothing, where the table can be asked for its ids."""
        return {}


def _staged(session: SparkSession, files: Sequence[str], **options: bool) -> DataFrame:
    """Rows that we have staged, with the types that they were written with, whatever the session takes them for."""
    with features.setting(session, AS_STAGED):
        return session.read.options(**OUR_FILES, **options).parquet(*(spark_uri(f) for f in files))


def _as_stored(rows: DataFrame, filled: Mapping[str, str], emptied: Collection[str]) -> DataFrame:
    """The rows with the values that the table will have."""
    for column, expression in filled.items():
        if column not in rows.columns:
            rows = rows.withColumn(column, F.expr(expression))
    for column in emptied:
        if column in rows.columns:
            rows = rows.withColumn(column, F.when(F.length(tick(column)) > 0, F.col(tick(column))))
    return rows


def _broken(sql: str) -> Column:
    """How many rows violate this condition."""
    return F.sum(F.when(F.coalesce(F.expr(sql), F.lit(False)), 0).otherwise(1))


def _untested(error: Exception, constraints: Iterable[str]) -> DedupError:
    """What it says of the rows that these constraints of their sink could not be tested on them."""
    names, said = ", ".join(constraints), first_line(error)
    if _lacks_a_column(error):
        return RowsMisfit(
            f"The rows lack a column that a constraint of the sink names ({names}), so whether they keep to it "
            f"cannot be told: give that column, too. {said}"
        )
    found = classify(error)
    if found == TRANSIENT:
        return StoreUnavailable(f"Spark cannot test the constraints {names} of the sink: {said}")
    if found == PERMANENT and not isinstance(error, AnalysisException):  # which comes before any row is read
        return RowsRefused(f"A constraint of the sink ({names}) raises an error at a row. Reject such rows in the handler. {said}")
    return ConfigError(f"The constraints {names} cannot be evaluated: {said}")


def _merge_sql(uri: str, columns: Sequence[str], how: Merge) -> str:
    """The statement that merges a frame `rows` with these columns, as a template of Spark's: other braces are doubled."""
    names = [n for n in columns if n != _DELETE]
    match = " AND ".join(f"t.{tick(k)} = s.{tick(k)}" for k in how.keys)
    t, s = (f"{side}.{tick(how.newer_by or '')}" for side in "ts")
    newer = f"({t} < {s} OR ({t} IS NULL AND {s} IS NOT NULL))" if how.newer_by else "true"
    values = ", ".join(f"t.{tick(n)} = s.{tick(n)}" for n in names)
    into, merged = (
        f"MERGE INTO {sql_name(uri)} t USING ",
        f" s ON {match} "
        f"WHEN MATCHED AND s.{_DELETE} AND {newer} THEN DELETE "
        f"WHEN MATCHED AND NOT s.{_DELETE} AND {newer} THEN UPDATE SET {values} "
        f"WHEN NOT MATCHED AND NOT s.{_DELETE} THEN INSERT ({', '.join(map(tick, names))}) "
        f"VALUES ({', '.join(f's.{tick(n)}' for n in names)})",
    )
    return _braced(into) + "{rows}" + _braced(merged)


def _braced(text: str) -> str:
    """Text that stays as it is in a template."""
    return text.replace("{", "{{").replace("}", "}}")


def save(session: SparkSession, writer: Any, uri: str) -> None:
    """Write to a path (anything with a slash) or to a table of the catalog."""
    with features.setting(session, AS_GIVEN):
        if "/" in uri:
            writer.save(spark_uri(uri))
        else:
            writer.saveAsTable(quoted(uri))


def sql_name(uri: str) -> str:
    """A path or a name as SQL takes it."""
    return f"delta.{tick(spark_uri(uri))}" if "/" in uri else quoted(uri)


def tick(name: str) -> str:
    """One name as SQL takes it."""
    return "`" + name.replace("`", "``") + "`"


def quoted(name: str) -> str:
    """A table of the catalog as SQL takes it: parts between dots, each as it is, or in backticks, which are doubled inside.

    Raises ConfigError for anything else.
    """
    found = list(_PART.finditer(name))
    if not found or "".join(part[0] for part in found) != name:
        raise ConfigError(f"{name!r} is not the name of a table. Write parts that have dots or backticks in backticks: `a.b`.`c``d`.")
    return ".".join(tick(part[1].replace("``", "`") if part[1] else part[2]) for part in found)


def spark_uri(uri: str) -> str:
    """A local path said so, because Spark's default file system may be another one."""
    return uri if "://" in uri else f"file://{uri}"


def _plain(uri: str) -> str:
    """Spark says file:/x or file:///x for a local path."""
    return "/" + uri.removeprefix("file:").lstrip("/") if uri.startswith("file:") else uri


def _lacks_a_column(error: Exception) -> bool:
    return "UNRESOLVED_COLUMN" in str(error)


def first_line(error: Any) -> str:
    """What an error says, without the plan and the stack behind it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    by_py4j = len(lines) > 1 and lines[0].startswith("An error occurred while calling")  # all that py4j says itself: Java's words follow
    return lines[1].removeprefix(": ") if by_py4j else lines[0]


class HistoryEntry(NamedTuple):
    """One entry of a table's history."""

    version: int
    timestamp: dt.datetime
    operation: str
    note: str | None


_NO_DELTA = (
    "This Spark session does not know Delta's SQL. Add the package io.delta:delta-spark, and set "
    "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
    "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog before it starts (spark-defaults.conf for commands)."
)


def session_tables() -> SparkTables:
    """Those of this process's session. It is started where there is none, with whatever Spark finds as its settings.

    Raises:
        ConfigError: the session leaves out files that it cannot read.
    """
    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    if lenient := [name for name in _LENIENT if features.told(session, name, "false") == "true"]:
        raise ConfigError(
            f"{', '.join(lenient)} is true in this Spark session: a file of the ledger that cannot be read would be left out silently, and "
            "its keys would count as new. Set it to false where a consumer runs."
        )
    return SparkTables(session)


class SparkTables(SparkSide):
    """Delta tables by path (anything with a slash) or by name in the catalog."""

    def note(self, app: str, version: int) -> dict[str, str]:
        """A commit tells its transaction id in a place that can be read back: Spark has no way to ask a table for its ids."""
        return {NOTE: json.dumps({"dedup": {app: version}})}

    def history(self, uri: str, limit: int | None = None) -> list[HistoryEntry] | None:
        """The newest commits first; None where there is no table. Raises StoreUnavailable; ConfigError for a session without Delta."""
        statement = f"DESCRIBE HISTORY {sql_name(uri)}" + ("" if limit is None else f" LIMIT {limit}")
        try:
            rows = self.session.sql(statement).collect()  # all columns: to choose some would be a second job
        except ERRORS as error:
            if _is_missing(error):
                return None
            if "PARSE_SYNTAX_ERROR" in str(error):
                raise ConfigError(_NO_DELTA) from error
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error
        return [HistoryEntry(r.version, r.timestamp.astimezone(dt.UTC), r.operation, r.userMetadata) for r in rows]

    def detail(self, uri: str) -> dict[str, Any]:
        """What DESCRIBE DETAIL says. Raises StoreUnavailable."""
        try:
            return self.session.sql(f"DESCRIBE DETAIL {sql_name(uri)}").collect()[0].asDict()
        except ERRORS as error:
            raise StoreUnavailable(f"The Delta table {uri} cannot be described: {first_line(error)}") from error

    def schema_json(self, uri: str) -> str:
        """The columns as Spark shows them: without what Delta keeps to itself (generated and identity columns). Raises StoreUnavailable."""
        try:
            return str(self._frame(uri).schema.json())
        except ERRORS as error:
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error

    def create(
        self, uri: str, schema: pa.Schema, types: Sequence[str], comment: str, properties: Mapping[str, str], partition_by: Sequence[str]
    ) -> None:
        """The table, where it is not there yet; `types` are those of its columns, as SQL names them. Raises StoreUnavailable.

        Crash: it is there or not.
        """
        columns = ", ".join(f"{tick(f.name)} {kind}{'' if f.nullable else ' NOT NULL'}" for f, kind in zip(schema, types, strict=True))
        parts = f"PARTITIONED BY ({', '.join(map(tick, partition_by))})" if partition_by else ""
        told = ", ".join(f"{_text(k)} = {_text(v)}" for k, v in properties.items())
        rest = f"USING delta {parts} COMMENT {_text(comment)} TBLPROPERTIES ({told})"
        statement = f"CREATE TABLE IF NOT EXISTS {sql_name(uri)} ({columns}) {rest}"
        self.run(statement, f"The Delta table {uri} cannot be created")

    def append_rows(self, uri: str, rows: pa.Table, app: str, version: int, note: Mapping[str, int]) -> None:
        """Append unless this id, or a later version of it, is there.

        Raises:
            StoreUnavailable: Spark said no; whether it landed has to be read back.

        Crash: the table shows all rows, with the id, or none.
        """
        frame = features.create(self.session, rows).coalesce(1)
        writer = frame.write.format("delta").mode("append").option("txnAppId", app).option("txnVersion", version)
        try:
            save(self.session, writer.option(NOTE, json.dumps({"dedup": dict(note)})), uri)
        except ERRORS as error:
            raise StoreUnavailable(f"Spark cannot append to {uri}: {first_line(error)}") from error

    def read(self, uri: str, version: int, columns: Sequence[str], where: str = "true") -> pa.Table:
        """Rows of one version of a table. Raises StoreUnavailable."""
        try:
            return features.to_arrow(self._frame(uri, version).where(where).select(*map(tick, columns)))
        except ERRORS as error:
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error

    def spans(self, uri: str, version: int, by: Sequence[str], column: str) -> pa.Table:
        """Columns `by`, and low, high and count of `column`. Raises StoreUnavailable."""
        wanted = [F.min(column).alias("low"), F.max(column).alias("high"), F.count(column).alias("count")]
        try:
            return features.to_arrow(self._frame(uri, version).groupBy(*by).agg(*wanted))
        except ERRORS as error:
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error

    def sql_name(self, uri: str) -> str:
        """A path or a name as SQL takes it."""
        return sql_name(uri)

    def vacuum(self, uri: str, how: str) -> list[Row]:
        """One VACUUM of a table of ours: of few files, which Spark lists in 10,000 tasks by default, half a minute on two cores.

        Raises:
            StoreUnavailable: it failed.

        Crash: some files are deleted.
        """
        with features.setting(self.session, {"spark.sql.sources.parallelPartitionDiscovery.parallelism": "32"}):
            return self.run(f"VACUUM {sql_name(uri)} {how}", f"{uri} could not be vacuumed")

    def run(self, statement: str, failed: str) -> list[Row]:
        """One statement; returns its rows. Raises StoreUnavailable, with `failed` first. Crash: all of it, or nothing."""
        try:
            return self.session.sql(statement).collect()
        except ERRORS as error:
            raise StoreUnavailable(f"{failed}: {first_line(error)}") from error

    def _frame(self, uri: str, version: int | None = None) -> DataFrame:
        reader = self.session.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        return reader.load(spark_uri(uri)) if "/" in uri else reader.table(quoted(uri))


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _is_missing(error: Exception) -> bool:
    return features.condition(error) in _MISSING or any(f"[{name}]" in str(error) for name in _MISSING)


def create(store: Store, ledgers: dict[str, str], more: dict[str, pa.Table], spark: SparkSession) -> Iterator[str]:
    """Create the views; yields their names.

    Args:
        more: views that are given as tables.
        ledgers: consumer -> URI of its ledger. Reservations are read from there when the view is queried; the rest is as of now.
    """
    heads = [store.head(name) for name in ledgers]
    rows = [row for head in heads for row in _checkpoints(head)]
    yield _view(_frame(spark, pa.Table.from_pylist(rows, schema=CHECKPOINTS)), "dedup_checkpoints")
    batches = [store.batches(name) for name in ledgers]
    named = [b.add_column(0, "consumer", pa.repeat(name, b.num_rows)) for name, b in zip(ledgers, batches, strict=True)]
    for name, table in more.items():
        yield _view(_frame(spark, table), name)
    if named:
        yield _view(_frame(spark, pa.concat_tables(named)), "dedup_batches")
        yield _view(_frame(spark, store.letters(Selection(limit=None))), "dedup_dead_letters")
        parts = [_reservations(spark, name, uri) for name, uri in ledgers.items()]
        yield _view(reduce(DataFrame.unionAll, parts), "dedup_reservations")


def _view(frame: DataFrame, name: str) -> str:
    frame.createOrReplaceTempView(name)
    return name


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Spark knows no fixed-size bytes."""
    fields = [pa.field(f.name, pa.binary() if pa.types.is_fixed_size_binary(f.type) else f.type) for f in table.schema]
    return features.create(spark, table.cast(pa.schema(fields)))


def _checkpoints(head: Head) -> Iterator[dict[str, object]]:
    for partition, point in head.checkpoints.items():
        told = {"consumer": head.consumer, "epoch": head.epoch, "generation": head.generation}
        yield {**told, **partition._asdict(), **vars(point)}


def _reservations(spark: SparkSession, consumer: str, uri: str) -> DataFrame:
    """Those that no later decision freed."""
    ledger = spark.read.format("delta").load(uri if "://" in uri else f"file://{uri}")
    freed = ledger.where("kind = 'freed'").groupBy("key").agg(F.max("seq").alias("freed_in"))
    kept = ledger.where("kind = 'reservation'").join(F.broadcast(freed), "key", "left").where("freed_in IS NULL OR seq >= freed_in")
    return kept.select(F.lit(consumer).alias("consumer"), "seq", "key", "payload_hash", F.expr("section = 'held'").alias("held"), "day")
