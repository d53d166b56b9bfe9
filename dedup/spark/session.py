"""A local Spark session with Delta, sized for one small machine: for the demo, the tests and the benchmarks.

The one home of the versions of Spark's jars. Spark's own Ivy resolves them at the first start and caches them.
A cluster brings a session of its own. `dedup dead-letter reprocess` and `dedup consumer replay` make this one where the module they load
has made none.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

try:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    JavaError: type[Exception] = Py4JError
except ImportError:  # Spark Connect's client has no py4j
    JavaError = PySparkException

ERRORS = (PySparkException, JavaError)
"""What Spark raises, classic or Connect."""

EVERY_FILE = {"ignoreCorruptFiles": False, "ignoreMissingFiles": False}
"""Options of a reader, whatever the session's settings: a file that cannot be read is an error, and not fewer rows."""

OUR_FILES: dict[str, bool | str] = {**EVERY_FILE, "datetimeRebaseMode": "CORRECTED", "int96RebaseMode": "CORRECTED"}
"""Options of a reader of files that we have written: dates before 1582 are those of today's calendar. Spark 3.5 would ask."""

AS_GIVEN = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}
"""Settings under which Spark writes rows of ours: those of the user may cut microseconds off, and move or refuse dates before 1582."""

AS_STAGED = {"spark.sql.parquet.inferTimestampNTZ.enabled": "true", "spark.sql.parquet.binaryAsString": "false"}
"""Settings under which Spark finds the types of files of ours: with others, a time without a zone is one of the session's, and moves."""

DELTAS = {
    "3.5": "io.delta:delta-spark_2.12:3.3.3",
    "4.0": "io.delta:delta-spark_4.0_2.13:4.4.0",
    "4.1": "io.delta:delta-spark_4.1_2.13:4.4.0",
    "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
}
"""Version of Spark -> the Delta that belongs to it. For a newer Spark, that of the newest one here is taken."""

DELTA = DELTAS.get(".".join(pyspark.__version__.split(".")[:2]), list(DELTAS.values())[-1])
"""Delta for this Spark."""

JDBC = "org.postgresql:postgresql:42.7.7"
"""PostgreSQL's JDBC driver; only the benchmarks compare with it."""

CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # the defaults, 50 and 200, make a first local commit take 20 seconds
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    # Spark 3.5 refuses dates before 1582 and times before 1900; newer versions write them as they are
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",  # host names of laptops and containers often do not resolve
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def local_session(app: str, *, packages: tuple[str, ...] = (), cores: int = 2, **conf: str) -> SparkSession:
    """The one session of this process, started where there is none yet; later callers get it as it is.

    Args:
        app: name shown in logs.
        packages: Maven coordinates beside Delta's, such as `JDBC`.
        cores: threads that run tasks.
        conf: further settings, `**{"spark.sql.ansi.enabled": "false"}`; they win over `CONF`.

    Raises:
        pyspark.errors.PySparkRuntimeError: Java is missing or the JVM did not start; its log is on standard error.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName(app).master(f"local[{cores}]")
    settings = {"spark.jars.packages": ",".join((DELTA, *packages)), "spark.jars.ivy": _jars(), **CONF, **conf}
    if "spark.sql.warehouse.dir" not in settings and SparkSession.getActiveSession() is None:
        settings["spark.sql.warehouse.dir"] = _scratch()
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _jars() -> str:
    """Where Ivy keeps jars: Spark's own default, except for users whose home folder Java gets wrong or who have none."""
    home = Path("~").expanduser()
    return str(home / ".ivy2.5.2" if os.access(home, os.W_OK) else Path(tempfile.gettempdir()) / f"ivy-{os.getuid()}")


def _scratch() -> str:
    """A folder that goes with this process, so that no warehouse is left in the working directory."""
    folder = tempfile.mkdtemp(prefix="dedup-warehouse-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def active_session() -> SparkSession | None:
    """The session that this process has, if any."""
    return SparkSession.getActiveSession()


if __name__ == "__main__":  # fetches the jars, and shows that Java and Spark work together
    local_session("dedup set-up").stop()
