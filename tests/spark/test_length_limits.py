"""Sinks with CHAR and VARCHAR: the limits that rows are checked against before the decision are those that Spark's writer has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from checkpoint.errors import RowsRefused
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.core.steps import Merge
from dedup.delta import DeltaStore
from fixtures.variants import of_which
from kit import delta_kit as kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.delta, pytest.mark.spark, pytest.mark.full]

COLUMNS = (
    "id BIGINT, tags ARRAY<VARCHAR(3)>, m MAP<VARCHAR(2), CHAR(4)>, s STRUCT<a: DECIMAL(10,2), b: VARCHAR(5)>, v VARCHAR(3), c CHAR(3)"
)
SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("tags", pa.list_(pa.string())),
        ("m", pa.map_(pa.string(), pa.string())),
        ("s", pa.struct([("a", pa.decimal128(10, 2)), ("b", pa.string())])),
        ("v", pa.string()),
        ("c", pa.string()),
    ]
)
FITS = {"id": 1, "tags": ["abc", None], "m": [("ab", "abcd")], "s": {"b": "abcde"}, "v": "abc", "c": "ab"}
TOO_LONG = [
    {"tags": ["abcd"]},
    {"m": [("abc", "a")]},
    {"m": [("a", "abcde")]},
    {"s": {"b": "abcdef"}},
    {"v": "abc "},
    {"c": "ab  "},
]


def rows(*values: dict[str, Any]) -> ArrowRows:
    """Rows for the sink; what is not given is NULL."""
    return ArrowRows(pa.Table.from_pylist(list(values), schema=SCHEMA))


@pytest.mark.parametrize("how", of_which(1, [None, Merge(("id",))]))
def test_texts_are_measured_as_spark_measures_them(spark: SparkSession, tmp_path: Path, how: Merge | None) -> None:
    """What fits is published, at any depth, and what Spark would refuse is the fault of its row, before anything is decided."""
    sink = str(tmp_path / "sink")
    spark.sql(f"CREATE TABLE delta.`{sink}` ({COLUMNS}) USING delta")
    store = DeltaStore(str(tmp_path / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        for row in TOO_LONG:
            with pytest.raises(RowsRefused, match="1 of 1 rows violate the length limit"), tx.attempt():
                tx.write(sink, rows(FITS | row)) if how is None else tx.merge(sink, rows(FITS | row), how)
        tx.write(sink, rows(FITS, {"id": 2})) if how is None else tx.merge(sink, rows(FITS, {"id": 2}), how)
        tx.execute(Commit())
    assert store.problems(kit.NAME) == []
    found = sorted(map(tuple, spark.read.format("delta").load(sink).select("id", "tags", "s.b", "v", "c").collect()))
    assert found == [(1, ["abc", None], "abcde", "abc", "ab "), (2, None, None, None, None)]
