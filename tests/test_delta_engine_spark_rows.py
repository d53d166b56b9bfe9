"""How rows come to Spark where it makes the commits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dedup.spark.delta_tables import SparkTables


def test_rows_behind_an_empty_piece_are_handed_over() -> None:
    """Spark takes an empty piece for the end: freed keys and blocked sequences came behind one and were lost."""

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
