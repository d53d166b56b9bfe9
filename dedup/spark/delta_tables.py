"""Delta tables through Spark's public API alone: for stores where only Spark gets to the storage.

Nothing here reaches into the JVM, so that classic Spark and Spark Connect are one. Promises that rows appended with a transaction id are
there once, however often it is tried. Called by dedup/delta/spark_engine.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from checkpoint.errors import ConfigError, StoreUnavailable
from dedup.delta.types import sql_type
from dedup.rows import for_spark
from dedup.spark.delta_rows import NOTE, SparkSide, first_line, quoted, save, spark_uri, sql_name, tick
from dedup.spark.session import ERRORS, EVERY_FILE

_MISSING = ("DELTA_TABLE_ONLY_OPERATION", "DELTA_MISSING_DELTA_TABLE", "DELTA_TABLE_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")
"""Conditions by which Delta says that there is no table, or none of Delta's."""


_LENIENT = tuple(f"spark.sql.files.{name}" for name in EVERY_FILE)
"""Settings under which Spark leaves files out in silence."""


class Commit(NamedTuple):
    """One entry of a table's history."""

    version: int
    timestamp: Any
    operation: str
    note: str | None


def session_tables() -> SparkTables:
    """Those of this process's session. It is started where there is none, with whatever Spark finds as its settings.

    Raises:
        ConfigError: the session leaves out files that it cannot read.
    """
    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    if lenient := [name for name in _LENIENT if session.conf.get(name, "false") == "true"]:
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

    def history(self, uri: str, limit: int | None = None) -> list[Commit] | None:
        """The newest commits first; None where there is no table. Raises StoreUnavailable."""
        statement = f"DESCRIBE HISTORY {sql_name(uri)}" + ("" if limit is None else f" LIMIT {limit}")
        try:
            rows = self.session.sql(statement).select("version", "timestamp", "operation", "userMetadata").toArrow()
        except ERRORS as error:
            if _is_missing(error):
                return None
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error
        return [Commit(*row.values()) for row in rows.to_pylist()]

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

    def create(self, uri: str, schema: pa.Schema, comment: str, properties: Mapping[str, str], partition_by: Sequence[str]) -> None:
        """The table, where it is not there yet. Raises StoreUnavailable. Crash: it is there or not."""
        columns = ", ".join(f"{tick(f.name)} {sql_type(f.type)}{'' if f.nullable else ' NOT NULL'}" for f in schema)
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
        frame = self.session.createDataFrame(for_spark(rows)).coalesce(1)
        writer = frame.write.format("delta").mode("append").option("txnAppId", app).option("txnVersion", version)
        try:
            save(writer.option(NOTE, json.dumps({"dedup": dict(note)})), uri)
        except ERRORS as error:
            raise StoreUnavailable(f"Spark cannot append to {uri}: {first_line(error)}") from error

    def read(self, uri: str, version: int, columns: Sequence[str], where: str = "true") -> pa.Table:
        """Rows of one version of a table. Raises StoreUnavailable."""
        try:
            return self._frame(uri, version).where(where).select(*map(tick, columns)).toArrow()
        except ERRORS as error:
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error

    def spans(self, uri: str, version: int, by: Sequence[str], column: str) -> pa.Table:
        """Columns `by`, and low, high and count of `column`. Raises StoreUnavailable."""
        wanted = [F.min(column).alias("low"), F.max(column).alias("high"), F.count(column).alias("count")]
        try:
            return self._frame(uri, version).groupBy(*by).agg(*wanted).toArrow()
        except ERRORS as error:
            raise StoreUnavailable(f"The Delta table {uri} cannot be read: {first_line(error)}") from error

    def sql_name(self, uri: str) -> str:
        """A path or a name as SQL takes it."""
        return sql_name(uri)

    def run(self, statement: str, failed: str) -> None:
        """One statement. Raises StoreUnavailable, beginning with `failed`. Crash: as Delta says: all of it, or nothing."""
        try:
            self.session.sql(statement).collect()
        except ERRORS as error:
            raise StoreUnavailable(f"{failed}: {first_line(error)}") from error

    def _frame(self, uri: str, version: int | None = None) -> DataFrame:
        reader = self.session.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        return reader.load(spark_uri(uri)) if "/" in uri else reader.table(quoted(uri))


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _is_missing(error: Exception) -> bool:
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    return condition in _MISSING or any(f"[{name}]" in str(error) for name in _MISSING)
