"""A session of Spark as managed platforms give it: a double of what they forbid, on classic Spark in local mode.

On Databricks with standard access mode, on serverless compute and on Spark Connect nobody reaches the JVM: `_jvm`, `_jsparkSession`,
`sparkContext`, `rdd` and `_jdf` are attributes that do not exist, and all but a few settings can neither be read nor changed
(https://docs.databricks.com/aws/en/spark/conf#configure-spark-properties-for-serverless-notebooks-and-jobs). Here they raise the same
errors where the product asks; PySpark itself, and the tests, may.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pyspark.errors import AnalysisException, PySparkAttributeError

PRODUCT = ("checkpoint", "deadletter", "dedup")
"""Packages that meet the limits."""

HIDDEN = frozenset({"_jvm", "_jsparkSession", "_sc", "sparkContext", "newSession", "rdd", "_jdf", "_jseq", "sql_ctx"})
"""Attributes of sessions and frames."""

SETTINGS = frozenset(
    {
        "spark.sql.ansi.enabled",
        "spark.sql.files.maxPartitionBytes",
        "spark.sql.legacy.timeParserPolicy",
        "spark.sql.session.timeZone",
        "spark.sql.shuffle.partitions",
    }
)
"""What may be read and changed."""


def _asks(depth: int) -> bool:
    """Whether the product's own code does, so many frames above this one's caller."""
    module = str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
    return module.partition(".")[0] in PRODUCT


def _hiding(found: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def get(self: Any, name: str) -> Any:
        if name in HIDDEN and _asks(1):
            raise PySparkAttributeError(errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": name})
        return found(self, name)

    return get


def _refusing(do: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, key: str, *more: Any) -> Any:
        if key not in SETTINGS and _asks(1):
            raise AnalysisException(f"[CONFIG_NOT_AVAILABLE] Configuration {key} is not available. SQLSTATE: 42K0I")
        return do(self, key, *more)

    return call


def limit() -> None:
    """From now on, in this process."""
    from pyspark.sql.classic.dataframe import DataFrame
    from pyspark.sql.conf import RuntimeConfig
    from pyspark.sql.session import SparkSession

    for limited in (SparkSession, DataFrame):
        limited.__getattribute__ = _hiding(limited.__getattribute__)  # type: ignore[method-assign]
    for name in ("get", "set", "unset"):
        setattr(RuntimeConfig, name, _refusing(getattr(RuntimeConfig, name)))
