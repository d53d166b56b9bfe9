"""Tables as people have them on Databricks: dedup adds files to them by itself, and Spark finds what the features promise."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from checkpoint.errors import SinkMismatch
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.delta import DeltaStore
from kit import delta_kit as kit
from kit.sparks import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.delta, pytest.mark.spark]

TABLES = {
    "clustered": "CLUSTER BY (id)",
    "row tracking": "TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
    "row tracking, not enabled": "TBLPROPERTIES ('delta.feature.rowTracking' = 'supported')",
    "in-commit timestamps": "TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')",
    "domain metadata": "TBLPROPERTIES ('delta.feature.domainMetadata' = 'supported')",
    "type widening": "TBLPROPERTIES ('delta.enableTypeWidening' = 'true')",
    "features without a column": "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported', "
    "'delta.feature.identityColumns' = 'supported', 'delta.feature.checkpointProtection' = 'supported', "
    "'delta.feature.vacuumProtocolCheck' = 'supported', 'delta.feature.rowTracking' = 'supported')",
    "all": "CLUSTER BY (id) TBLPROPERTIES ('delta.enableRowTracking' = 'true', 'delta.enableInCommitTimestamps' = 'true', "
    "'delta.enableDeletionVectors' = 'true', 'delta.enableChangeDataFeed' = 'true', 'delta.enableTypeWidening' = 'true', "
    "'delta.feature.allowColumnDefaults' = 'supported', 'delta.feature.identityColumns' = 'supported', "
    "'delta.feature.checkpointProtection' = 'supported', 'delta.feature.vacuumProtocolCheck' = 'supported', "
    "'delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '4')",
}

MANY, MORE = 16, 40
"""Rows that are written in turns."""


def made(spark: SparkSession, folder: Path, rest: str, columns: str = "") -> str:
    """A table of pairs whose second column lies behind those that usually have statistics."""
    require("4.1", "all of these features")
    uri = str(folder / "sink")
    spark.sql(f"CREATE TABLE delta.`{uri}` (amount BIGINT, other STRING, id BIGINT{columns}) USING delta {rest}")
    return uri


def written(store: DeltaStore, uri: str, *numbers: int) -> None:
    """One transaction with these rows."""
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        tx.write(uri, ArrowRows(pa.table({"id": pa.array(numbers, pa.int64()), "amount": pa.array(numbers, pa.int64())})))
        tx.execute(Commit())


def inserted(spark: SparkSession, uri: str, *numbers: int) -> None:
    """The same by Spark."""
    spark.sql(f"INSERT INTO delta.`{uri}` (id, amount) VALUES {', '.join(f'({n}, {n})' for n in numbers)}")


def entries(uri: str) -> list[list[dict[str, Any]]]:
    """The actions of each commit."""
    return [list(map(json.loads, file.read_text().splitlines())) for file in sorted(Path(uri).glob(f"_delta_log/{'[0-9]' * 20}.json"))]


def seen_anew(spark: SparkSession, uri: str, name: str) -> Any:
    """The table in another folder, so that Spark reads what is on the disk and not what it knows."""
    shutil.copytree(uri, f"{uri}-{name}")
    return spark.read.format("delta").load(f"{uri}-{name}")


@pytest.mark.full
@pytest.mark.parametrize("rest", TABLES.values(), ids=TABLES)
def test_files_are_added_without_spark(spark: SparkSession, tmp_path: Path, rest: str) -> None:
    """Between Spark's own commits, over checkpoints: each row once, by us alone, and the tables prove it."""
    uri = made(spark, tmp_path, rest)
    store = DeltaStore(str(tmp_path / "state"))
    written(store, uri, 1, 2)
    inserted(spark, uri, 3)
    written(store, uri, 4)
    written(DeltaStore(store.path), uri, 5, 6, 7)
    spark.sql(f"DELETE FROM delta.`{uri}` WHERE id = 4")
    spark.sql(f"OPTIMIZE delta.`{uri}`")
    written(DeltaStore(store.path), uri, 8)
    inserted(spark, uri, 9)
    found = seen_anew(spark, uri, "again")
    assert sorted(r.id for r in found.collect()) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert found.where("id > 7 and id < 9").count() == 1
    history = spark.sql(f"DESCRIBE HISTORY delta.`{uri}`").collect()
    assert [h.engineInfo for h in history].count("dedup") == 4
    assert DeltaStore(store.path).problems(kit.NAME) == []


@pytest.mark.full
@pytest.mark.parametrize("checkpoints", ["v2", "classic"])
def test_row_ids_are_given_once(spark: SparkSession, tmp_path: Path, checkpoints: str) -> None:
    """Ours and Spark's, in turns, through checkpoints that each of them writes: no id twice, and the commits as they were."""
    rest = (
        f"TBLPROPERTIES ('delta.enableRowTracking' = 'true', 'delta.checkpointPolicy' = '{checkpoints}', 'delta.checkpointInterval' = '3')"
    )
    uri = made(spark, tmp_path, rest)
    store = DeltaStore(str(tmp_path / "state"))
    for n in range(0, MORE, 4):
        written(store if n % 8 else DeltaStore(store.path), uri, n, n + 1, n + 2)
        inserted(spark, uri, n + 3)
    assert sum(1 for _ in Path(uri).glob("_delta_log/*.checkpoint*")) >= 4
    rows = seen_anew(spark, uri, "again").selectExpr("id", "_metadata.row_id AS row", "_metadata.row_commit_version AS version").collect()
    assert sorted(r.row for r in rows) == list(range(MORE))
    assert {r.id: r.version for r in rows} == {n: 1 + n // 4 * 2 + (n % 4 == 3) for n in range(MORE)}


@pytest.mark.full
@pytest.mark.parametrize("many", [MANY, pytest.param(MORE, marks=pytest.mark.full)])
def test_row_ids_and_times_hold_while_spark_writes_as_well(spark: SparkSession, tmp_path: Path, many: int) -> None:
    """At the same time: whoever comes second goes on from the first, each row has an id of its own, and time never goes back."""
    uri = made(spark, tmp_path, TABLES["all"])
    state = DeltaStore(str(tmp_path / "state")).path

    def ours() -> None:
        store = DeltaStore(state)
        for n in range(0, many, 2):
            written(store, uri, n)

    def sparks() -> None:
        for n in range(1, many, 4):
            inserted(spark, uri, n, n + 2)

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(ours), pool.submit(sparks)]:
            one.result()
    rows = seen_anew(spark, uri, "again").selectExpr("id", "_metadata.row_id AS row").collect()
    assert sorted(r.id for r in rows) == sorted(r.row for r in rows) == list(range(many))
    times = [entry[0]["commitInfo"]["inCommitTimestamp"] for entry in entries(uri)]
    assert times == sorted(set(times))
    assert DeltaStore(state).problems(kit.NAME) == []


@pytest.mark.full
def test_files_of_a_clustered_table_have_bounds_of_the_columns_that_cluster_it(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever the table says about statistics; Spark clusters our files with its own, and knows by which columns."""
    uri = made(spark, tmp_path, TABLES["clustered"])
    spark.sql(f"ALTER TABLE delta.`{uri}` SET TBLPROPERTIES ('delta.dataSkippingNumIndexedCols' = '1')")
    store = DeltaStore(str(tmp_path / "state"))
    for n in range(3):
        written(store, uri, n)
    (last,) = [json.loads(a["add"]["stats"]) for a in entries(uri)[-1] if "add" in a]
    assert (last["minValues"]["id"], last["maxValues"]["id"], last["nullCount"]["id"]) == (2, 2, 0)
    spark.sql(f"OPTIMIZE delta.`{uri}` FULL")
    detail = spark.sql(f"DESCRIBE DETAIL delta.`{uri}`").collect()[0]
    assert (detail.numFiles, list(detail.clusteringColumns)) == (1, ["id"])


@pytest.mark.full
def test_times_go_on_where_the_clock_is_behind(spark: SparkSession, tmp_path: Path) -> None:
    """The commit before was made by a machine whose clock is ahead: ours is later all the same, and Spark travels to it."""
    uri = made(spark, tmp_path, TABLES["in-commit timestamps"])
    inserted(spark, uri, 1)
    newest = sorted(Path(uri).glob("_delta_log/*.json"))[-1]
    first, *others = newest.read_text().splitlines()
    info = json.loads(first)
    info["commitInfo"]["inCommitTimestamp"] += 3_600_000
    newest.write_text("\n".join([json.dumps(info, separators=(",", ":")), *others]))
    for checksum in Path(uri).glob("_delta_log/*.crc"):
        checksum.unlink()
    written(DeltaStore(str(tmp_path / "state")), uri, 2)
    assert entries(uri)[-1][0]["commitInfo"]["inCommitTimestamp"] == info["commitInfo"]["inCommitTimestamp"] + 1
    assert seen_anew(spark, uri, "again").count() == 2


@pytest.mark.full
def test_a_column_of_a_type_that_dedup_cannot_write_is_left_out(spark: SparkSession, tmp_path: Path) -> None:
    """One VARIANT column hinders nobody who does not write it: it is NULL. Rows that bring it are refused with what to do."""
    uri = made(spark, tmp_path, "", ", v VARIANT, inner STRUCT<a: INT, v: VARIANT>")
    store = DeltaStore(str(tmp_path / "state"))
    written(store, uri, 1)
    spark.sql(f"INSERT INTO delta.`{uri}` (id, v) VALUES (2, parse_json('{{\"a\": 1}}'))")
    written(store, uri, 3)
    rows = seen_anew(spark, uri, "again").selectExpr("id", "v:a::int AS v", "inner IS NULL AS gone").orderBy("id").collect()
    assert [tuple(r) for r in rows] == [(1, None, True), (2, 1, True), (3, None, True)]
    for name in ("v", "inner"):
        brought = ArrowRows(pa.table({"id": [4], name: ["{}"]}))
        with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(SinkMismatch, match=rf"{name} \(variant\).*Leave it out"):
            tx.write(uri, brought)
    assert DeltaStore(store.path).problems(kit.NAME) == []


def test_a_column_of_such_a_type_that_is_not_null_refuses_the_sink(spark: SparkSession, tmp_path: Path) -> None:
    """It can be neither written nor left out: the message says how to change the table."""
    uri = made(spark, tmp_path, "", ", v VARIANT NOT NULL")
    store = DeltaStore(str(tmp_path / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx, pytest.raises(SinkMismatch, match=r"variant that is NOT NULL.*DROP NOT NULL"):
        tx.write(uri, ArrowRows(pa.table({"id": [4]})))


@pytest.mark.full
def test_a_widened_column_takes_files_without_spark(spark: SparkSession, tmp_path: Path) -> None:
    """Old files have the narrow type and new ones the wide one: Spark reads both."""
    uri = made(spark, tmp_path, TABLES["type widening"], ", small INT")
    inserted(spark, uri, 1)
    spark.sql(f"UPDATE delta.`{uri}` SET small = 7")
    spark.sql(f"ALTER TABLE delta.`{uri}` ALTER COLUMN small TYPE BIGINT")
    store = DeltaStore(str(tmp_path / "state"))
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        tx.write(uri, ArrowRows(pa.table({"id": [2], "small": [3_000_000_000]})))
        tx.execute(Commit())
    assert sorted(r.small for r in seen_anew(spark, uri, "again").collect()) == [7, 3_000_000_000]
    assert entries(uri)[-1][0]["commitInfo"]["engineInfo"] == "dedup"
    assert DeltaStore(store.path).problems(kit.NAME) == []
