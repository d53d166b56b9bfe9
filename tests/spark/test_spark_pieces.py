"""Arrow tables on their way into Spark: whatever pieces they are made of, all rows arrive."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dedup.core.rows import arrow_of, for_spark, frame_of
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEDUP = ROOT / "dedup"


def in_pieces(*sizes: int) -> pa.Table:
    """Numbers from 0, in pieces of these sizes."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    column = pa.chunked_array([pa.array(range(end - size, end), pa.int64()) for size, end in zip(sizes, ends, strict=True)], pa.int64())
    return pa.table({"n": column, "at": column.cast(pa.timestamp("us", "UTC"))})


@pytest.mark.delta
@pytest.mark.parametrize("sizes", [(1, 0, 2), (0, 0, 3), (0,), (), (3, 0), (1, 0, 2, 0, 0, 5), (6_000, 0, 7_000), (100, 0, 20_000, 0)])
def test_no_row_is_lost_behind_an_empty_piece(spark: SparkSession, sizes: tuple[int, ...]) -> None:
    """Neither where a local relation is made nor where tasks get the rows."""
    from pyspark.sql.types import LongType, StructType, TimestampType

    from dedup.spark.batch import create_frame

    table, schema = in_pieces(*sizes), StructType().add("n", LongType()).add("at", TimestampType())
    assert for_spark(table).equals(table)
    for frame in (frame_of(spark, for_spark(table)), create_frame(spark, table, schema)):
        assert sorted(arrow_of(frame)["n"].to_pylist()) == list(range(sum(sizes)))


def test_every_table_for_spark_goes_that_way() -> None:
    """No call of createDataFrame in the library is given a table as it is; one is given what Spark has."""
    calls = [(path.name, call) for path in DEDUP.rglob("*.py") for call in re.findall(r"\.createDataFrame\(\s*([^,)]*)", path.read_text())]
    assert set(calls) == {("features.py", name) for name in ("rows", "pieces", "rdd")}, "features.create alone makes frames"
