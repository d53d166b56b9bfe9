"""Real input with known figures: Online Retail through a real stream, key = the whole row, on both stores, on one of them killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pytest

from deadletter.selection import Selection
from dedup.core.store import Store
from dedup.demo import supervise
from dedup.demo.input import difference
from dedup.verify import verify
from kit import retail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELIVERED, WRITTEN, DUPLICATES = 541_909, 534_710, 5_268
REJECTED = {"no description": 1_454, "negative quantity": 474, "no order": 3}


@pytest.fixture(scope="module")
def days(online_retail: Path) -> list[pa.Table]:
    return retail.read(online_retail)


@pytest.fixture(scope="module")
def landing(days: list[pa.Table], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retail") / "landing"
    retail.deliver(days, folder)
    return folder


def check(days: list[pa.Table], store: Store, rows: pa.Table) -> None:
    """The known figures, the sink row by row, and the bookkeeping."""
    lost, doubled = difference(retail.expected(days), rows)
    assert (lost.num_rows, doubled.num_rows, rows.num_rows) == (0, 0, WRITTEN)
    letters = store.letters(Selection(consumer=retail.CONSUMER, limit=None))
    assert set(letters["kind"].to_pylist()) == {"REJECTED"}
    assert {row["values"]: row["counts"] for row in pc.value_counts(letters["reason"]).to_pylist()} == REJECTED
    report = verify(store, retail.CONSUMER)
    assert report.contradictions == []
    counts = report.counts
    assert (counts["processed"], counts["duplicate"], counts["dead_lettered"]) == (WRITTEN, DUPLICATES, sum(REJECTED.values()))
    assert counts["delivered"] - counts["redelivered"] == DELIVERED


@pytest.mark.postgres
def test_online_retail_into_postgres(days: list[pa.Table], landing: Path, tmp_path: Path, postgres: str, spark: SparkSession) -> None:
    """541,909 delivered = 534,710 written + 5,268 duplicates + 1,931 rejected, each for the first reason that applies."""
    import psycopg

    from dedup import PostgresStore

    with psycopg.connect(postgres) as connection:
        columns = ", ".join(f'"{name}" text' for name in retail.COLUMNS)
        connection.execute(f"CREATE TABLE {retail.SINK} ({columns})")
    store = PostgresStore(postgres)
    retail.stream(spark, landing, tmp_path / "checkpoint", store)
    with psycopg.connect(postgres) as connection, connection.cursor().copy(f"COPY {retail.SINK} TO STDOUT (FORMAT csv, HEADER)") as copy:
        text = pa.py_buffer(b"".join(copy))
    options = csv.ConvertOptions(column_types=retail.ROW, strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""])
    check(days, store, csv.read_csv(text, convert_options=options))


@pytest.mark.delta
@pytest.mark.crash
@pytest.mark.spark
def test_online_retail_into_delta_and_through_a_kill(days: list[pa.Table], landing: Path, tmp_path: Path) -> None:
    """The same figures on Delta, although Python and JVM get a SIGKILL in mid-run."""
    from deltalake import DeltaTable

    from dedup import DeltaStore

    sink = tmp_path / retail.SINK
    DeltaTable.create(str(sink), retail.ROW)
    store = DeltaStore(str(tmp_path / "dedup"), tables={retail.SINK: str(sink)})

    def decided() -> int:
        return sum(point.sequence_number + 1 for point in store.head(retail.CONSUMER).checkpoints.values())

    command = [sys.executable, "-m", "kit.retail", str(landing), str(tmp_path)]
    outcome = supervise.run(command, tmp_path / "log", [supervise.Kill(DELIVERED // 3, 0.7)], decided)
    assert outcome.kills == 1
    check(days, store, DeltaTable(str(sink)).to_pyarrow_table())
