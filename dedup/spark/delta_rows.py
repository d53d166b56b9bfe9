"""The Spark side of the Delta store: names of the catalog, and sinks that only Spark may write (the row path).

Promises that rows are appended with a transaction id, so that a second append of the same decision changes nothing; whether the first
one landed is read back by the caller, because Spark skips a known id silently. Called by dedup/delta, where a session is active.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from checkpoint.errors import ConfigError, RowsMisfit, StoreUnavailable
from dedup.spark.session import ERRORS, EVERY_FILE
from dedup.steps import Merge

NOTE = "userMetadata"
_TXN_NOTE = "spark.databricks.delta.commitInfo.userMetadata"
_TXN_APP, _TXN_VERSION = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"
_MERGING = threading.Lock()  # a MERGE takes its id from the session's settings, which consumers in other threads may share
_PART = re.compile(r"(?:^|(?<!^)\.)(?:`((?:[^`]|``)+)`|([^.`]+))")
_DELETE = "_dedup_delete"  # of staged rows: true deletes the sink's row


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
            ConfigError: there is no such table, or it is no Delta table.
        """
        try:
            rows = self.session.sql(f"DESCRIBE DETAIL {quoted(name)}").select("format", "location").collect()
        except ERRORS as error:
            raise ConfigError(
                f"The catalog of this Spark session has no table {name!r} that can be described: {first_line(error)}"
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
            rows = self._read(files)
            writer = rows.write.format("delta").mode("append").option("txnAppId", app).option("txnVersion", version)
            save(writer.options(**self.note(app, version)), uri)
        except ERRORS as error:
            raise StoreUnavailable(f"Spark cannot append to {uri}: {first_line(error)}") from error

    def merge(self, uri: str, files: Sequence[str], how: Merge, app: str, version: int) -> None:
        """Merge staged rows into a sink with a transaction id.

        Raises:
            StoreUnavailable: as for `append`.

        Crash: the sink shows all of it, with the transaction id, or nothing of it.
        """
        try:
            rows = self._read(files, mergeSchema=True)
        except ERRORS as error:
            raise StoreUnavailable(f"Spark cannot read what is to be merged into {uri}: {first_line(error)}") from error
        names = [n for n in rows.columns if n != _DELETE]
        match = " AND ".join(f"t.{tick(k)} = s.{tick(k)}" for k in how.keys)
        t, s = (f"{side}.{tick(how.newer_by or '')}" for side in "ts")
        newer = f"({t} < {s} OR ({t} IS NULL AND {s} IS NOT NULL))" if how.newer_by else "true"
        values = ", ".join(f"t.{tick(n)} = s.{tick(n)}" for n in names)
        statement = (
            f"MERGE INTO {sql_name(uri)} t USING {{rows}} s ON {match} "
            f"WHEN MATCHED AND s.{_DELETE} AND {newer} THEN DELETE "
            f"WHEN MATCHED AND NOT s.{_DELETE} AND {newer} THEN UPDATE SET {values} "
            f"WHEN NOT MATCHED AND NOT s.{_DELETE} THEN INSERT ({', '.join(map(tick, names))}) "
            f"VALUES ({', '.join(f's.{tick(n)}' for n in names)})"
        )
        session = rows.sparkSession
        settings = {_TXN_APP: app, _TXN_VERSION: str(version), **self._noted(app, version)}
        with _MERGING:
            before = {name: session.conf.get(name, None) for name in settings}
            try:
                for name, value in settings.items():
                    session.conf.set(name, value)
                session.sql(statement, rows=rows).collect()
            except ERRORS as error:
                raise StoreUnavailable(f"Spark cannot merge into {uri}: {first_line(error)}") from error
            finally:
                for name, old in before.items():
                    session.conf.unset(name) if old is None else session.conf.set(name, old)

    def violations(self, files: Sequence[str], constraints: Mapping[str, str], generated: Mapping[str, str]) -> dict[str, int]:
        """How many staged rows violate each constraint; only those that are violated. One job for all of them.

        As in Delta, a condition that is NULL is violated.

        Raises:
            ConfigError: a constraint cannot be evaluated. RowsMisfit: not on these rows, which lack a column that it names.
        """
        if not constraints:
            return {}
        tests = [
            F.sum(F.when(F.coalesce(F.expr(sql), F.lit(False)), 0).otherwise(1)).alias(f"c{i}")
            for i, sql in enumerate(constraints.values())
        ]
        try:
            rows = self._read(files)
            for column, expression in generated.items():
                if column not in rows.columns:
                    rows = rows.withColumn(column, F.expr(expression))
            counts = rows.agg(*tests).collect()[0]
        except ERRORS as error:
            if _lacks_a_column(error):
                raise RowsMisfit(
                    f"The rows lack a column that a constraint of the sink names ({', '.join(constraints)}), so whether they keep to it "
                    f"cannot be told: give that column, too. {first_line(error)}"
                ) from error
            raise ConfigError(f"The constraints {', '.join(constraints)} cannot be evaluated: {first_line(error)}") from error
        return {name: count for name, count in zip(constraints, counts, strict=True) if count}

    def _noted(self, app: str, version: int) -> dict[str, str]:
        note = self.note(app, version)
        return {_TXN_NOTE: note[NOTE]} if note else {}

    def note(self, app: str, version: int) -> dict[str, str]:
        """What a commit with this transaction id says about itself: nothing, where the table can be asked for its ids."""
        return {}

    def _read(self, files: Sequence[str], **options: bool) -> DataFrame:
        """Rows that we have staged."""
        return self.session.read.options(**EVERY_FILE, **options).parquet(*(spark_uri(f) for f in files))


def save(writer: Any, uri: str) -> None:
    """Write to a path (anything with a slash) or to a table of the catalog."""
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
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
