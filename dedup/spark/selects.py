"""A chain of selects that is worked out on one frame and then applied to every later frame of the same schema.

A micro-batch every second should not pay for making and analysing a hundred column expressions each time.
Called by dedup/spark/prepare.py and dedup/spark/envelope.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from checkpoint.errors import ConfigError

Columns = tuple[Column, ...]
Kept = TypeVar("Kept")


_KEPT = 16
"""Schemas of which what was worked out is kept."""


def kept(results: dict[Hashable, Kept], ident: Hashable, work_out: Callable[[], Kept]) -> Kept:
    """What was worked out for this identity before, or is now; of few identities, since a stream has one schema."""
    if ident not in results:
        if len(results) >= _KEPT:
            results.clear()
        results[ident] = work_out()
    return results[ident]


def named(name: str) -> Column:
    """The column of exactly this name, whatever characters it has."""
    return F.col("`" + name.replace("`", "``") + "`")


class Selects:
    """The frame so far, and the selects that led to it. Lazy: no job runs."""

    def __init__(self, df: DataFrame) -> None:
        self.df = df
        self.steps: list[Columns] = []
        self.types: dict[str, T.DataType] = {f.name: f.dataType for f in df.schema}
        self._input = list(self.types)

    def select(self, *columns: Column) -> None:
        """Go on with these columns."""
        self.df = self.df.select(*columns)
        self.steps.append(columns)
        self.types = {f.name: f.dataType for f in self.df.schema}

    def add(self, *columns: Column) -> None:
        """Go on with these columns behind the ones there are."""
        self.select(F.col("*"), *columns)

    def ask(self, columns: Callable[[], Sequence[Column]], what: str) -> list[T.DataType]:
        """The types that these columns of the frame would have.

        Raises:
            ConfigError: a name or an expression does not resolve; names `what` asked for it.
        """
        try:
            return [f.dataType for f in self.df.select(*[c.alias(f"{i}") for i, c in enumerate(columns())]).schema]
        except AnalysisException as error:
            if "AVRO_NOT_LOADED" in (error.getCondition() or ""):
                raise ConfigError(
                    "decode.avro needs Spark's Avro package: add org.apache.spark:spark-avro_2.13 to spark.jars.packages, in the version "
                    f"of your Spark ({self.df.sparkSession.version}) or the next older one that there is."
                ) from error
            raise ConfigError(
                f"{what} does not resolve; the input has the columns {', '.join(self._input)}. Spark says: {error}"
            ) from error
