"""A local Spark Connect server and a session on it, in a process that has no other Spark."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session() -> Iterator[SparkSession]:
    """Started by PySpark itself, with Delta; callbacks of streams run in Python processes of the server, which find the tests, too."""
    from pyspark.sql import SparkSession

    from dedup.spark.session import CONF, DELTA, _jars
    from kit import maven

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("dedup tests on Connect").remote("local[2]")
    for name, value in {**CONF, "spark.jars.packages": DELTA, "spark.jars.ivy": _jars(), "spark.jars": maven.spark_kafka()}.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings of the server cannot be set again by the client
        made = builder.getOrCreate()
    yield made
    made.stop()
