"""Spark reads what dedup has committed to object storage by itself, without delta-rs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow.fs import FileSelector, FileType

from dedup.delta.storage import filesystem
from kit.orders import assert_proven, batch, consumer, flatten, orders
from kit.places import S3Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.delta, pytest.mark.objects]


def copied(uri: str, folder: Path) -> str:
    """The objects below a URI as files: this Spark has no way to object storage."""
    system = filesystem(uri, None)
    for info in system.get_file_info(FileSelector("", recursive=True)):
        if info.type == FileType.File:
            (folder / info.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / info.path).write_bytes(bytes(system.open_input_stream(info.path).read()))
    return str(folder)


@pytest.mark.full
def test_spark_reads_commits_that_were_put(spark: SparkSession, s3_folder: str, tmp_path: Path) -> None:
    """Appends to a partitioned table, names beyond ASCII, a checkpoint among them: the same rows, statistics and history."""
    place = S3Place(s3_folder)
    schema = pa.schema([("id", pa.string()), ("amount", pa.int64()), ("land", pa.string())])
    settings = {"delta.checkpointInterval": "6"}
    DeltaTable.create(place.path("orders"), schema=schema, partition_by=["land"], configuration=settings)

    def handler(rows: pa.Table, tx: object) -> None:
        flat = flatten(rows)
        land = pa.array(["Österreich", None, "日本 𠮷"] * flat.num_rows).slice(0, flat.num_rows)
        tx.write(flat.append_column("land", land), "orders")  # type: ignore[attr-defined]

    made = consumer(place.store())
    made._handler = handler
    for number in range(9):
        made(batch(*orders(range(5 * number, 5 * number + 5))), number)
    assert_proven(place.store())
    path = copied(place.path("orders"), tmp_path / "orders")
    rows = spark.read.format("delta").load(path)
    assert sorted(r.amount for r in rows.collect()) == list(range(45))
    assert rows.where("land = '日本 𠮷' and amount > 40").count() == 1 and rows.where("land is null").count() == 18
    history = spark.sql(f"describe history delta.`{path}`").collect()
    assert len(history) == 10 and {h.operation for h in history} == {"CREATE TABLE", "WRITE"}
    assert {h.engineInfo for h in history} >= {"dedup"}
