"""How rows come to Spark where it makes the commits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from dedup.delta import DeltaStore
from dedup.spark.delta import SparkTables
from kit.sparks import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_rows_behind_an_empty_piece_are_handed_over() -> None:
    """Spark takes an empty piece for the end: freed keys and blocked sequences came behind one and were lost."""
    require("4.0", "createDataFrame of an Arrow table")

    class Seen(Exception):
        pass

    given: list[pa.Table] = []

    def take(rows: pa.Table) -> Any:
        given.append(rows)
        raise Seen

    pieces = [pa.table({"n": pa.array(values, pa.int64())}) for values in ([1], [], [2, 3])]
    with pytest.raises(Seen):
        SparkTables(SimpleNamespace(createDataFrame=take)).append_rows("/t", pa.concat_tables(pieces), "app", 1, {})  # type: ignore[arg-type]
    assert [piece.num_rows for piece in given[0].to_batches()] == [1, 2]


def _active(spark: SparkSession) -> SparkSession:
    return type(spark).getActiveSession() or spark


@pytest.mark.parametrize("name", ["ignoreCorruptFiles", "ignoreMissingFiles"])
@pytest.mark.delta
@pytest.mark.spark
def test_a_session_that_leaves_files_out_is_refused(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Keys in a file of the ledger that is skipped in silence would count as new."""
    setting = f"spark.sql.files.{name}"
    active = _active(spark)  # the store asks the session of its thread, which a stream before this test may have left there
    active.conf.set(setting, "true")
    try:
        with pytest.raises(ConfigError, match=f"{setting} is true"):
            DeltaStore(str(tmp_path), engine="spark").head("shop")
    finally:
        active.conf.unset(setting)
    assert DeltaStore(str(tmp_path), engine="spark").head("shop").seq == 0
