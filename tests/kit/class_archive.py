"""Spark's classes in the form that a JVM maps into memory: `make test` makes the archive once, and each start of Spark costs a third less.

A JVM that finds the archive made for another Java, or another Spark, goes on without it, and so do the tests where no archive was written.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress

from kit.cheap import JVM, archive


def warm(folder: str) -> None:
    """Load what most tests load: a Delta table, a stream with a Python handler, and Arrow in a worker."""
    from dedup.spark.session import local_session

    spark = local_session("class archive")
    path = f"{folder}/table"
    spark.range(100).selectExpr("id", "cast(id as string) word").write.format("delta").save(path)
    stream = spark.readStream.format("delta").load(path).writeStream.option("checkpointLocation", f"{folder}/checkpoint")
    query = stream.foreachBatch(lambda frame, number: frame.groupBy("word").count().toArrow()).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.range(5).mapInArrow(lambda batches: batches, "id long").count()
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()  # it ends, and writes the archive
    jvm.wait(300)


def make() -> None:
    """Write the archive. Crash: it is there, whole, or not there: a JVM that maps half of one dies."""
    written = archive().with_suffix(".new")
    written.unlink(missing_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{JVM} -XX:ArchiveClassesAtExit={written}"
    with tempfile.TemporaryDirectory() as scratch, suppress(subprocess.TimeoutExpired):
        warm(scratch)
        written.replace(archive())


if __name__ == "__main__":
    archive().unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        make()
    if not archive().exists():
        print("The JVM wrote no archive: the tests run without one.")
