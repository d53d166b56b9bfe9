"""A decided merge whose table was changed before its publication: it is published without loss, or stays until a person has looked."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from checkpoint.errors import ConfigError, PublicationStuck
from checkpoint.head import Run
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.core.steps import Merge, Record
from dedup.delta import tables
from dedup.delta.commit import SinkPublisher
from dedup.delta.engine import DeltaRs
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import open_store

pytestmark = pytest.mark.delta

ID, LONG = pa.field("id", pa.int64()), pa.int64()
UTC = pa.timestamp("us", "UTC")
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def sink_at(folder: Path) -> str:
    """Where the sink is."""
    return str(folder / "orders")


def decided(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, value: Any, **options: Any) -> None:
    """The process dies right after it decided to merge one row and to delete another one, id 9, from a sink with `id` and `amount`."""
    schema = pa.schema([ID, pa.field("amount", kind)])
    DeltaTable.create(sink_at(folder), schema, **options)
    store = open_store(folder)
    rows = pa.table({"id": [5, 9], "amount": pa.array([value, None], kind), "gone": [False, True]})
    with monkeypatch.context() as patch, store.begin(kit.NAME, kit.epoch(store)) as tx:
        patch.setattr(SinkPublisher, "publish", lambda self: 0)
        tx.merge("orders", ArrowRows(rows), Merge(("id",), None, "gone"))
        tx.execute(Record(kit.records(tx.head, [], [], 0, 0), Run("q", 0), {}))
        tx.execute(Commit())


def overwrite(folder: Path, *fields: pa.Field) -> None:
    """Somebody loads the table with other columns; it stays the same table."""
    rows = pa.Table.from_pylist([{"id": 9}], schema=pa.schema([ID, *fields]))
    write_deltalake(sink_at(folder), rows, mode="overwrite", schema_mode="overwrite")


def shown(folder: Path) -> list[dict[str, Any]]:
    """The sink's rows."""
    found: list[dict[str, Any]] = DeltaTable(sink_at(folder)).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: str(row["id"]))


@pytest.mark.parametrize(
    ("kind", "value", "now"),
    of_which(
        2,
        [
            (LONG, 1, pa.field("cents", LONG)),
            (pa.float64(), 12.99, pa.field("amount", LONG)),
            (UTC, NOON, pa.field("amount", pa.date32())),
            (LONG, 2_000_000_000_000, pa.field("amount", pa.int32())),
            (pa.struct([("a", LONG), ("b", LONG)]), {"a": 1, "b": 2}, pa.field("amount", pa.struct([("a", LONG)]))),
        ],
    ),
)
def test_a_merge_is_not_published_into_columns_that_would_lose_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, value: Any, now: pa.Field
) -> None:
    """A column that was renamed or narrowed stops the publication before anything is merged; once it is back, no value is lost."""
    decided(tmp_path, monkeypatch, kind, value)
    overwrite(tmp_path, now)
    before = shown(tmp_path)
    with pytest.raises(PublicationStuck, match=r"Decision 2 \(2 rows\) was made when the sink 'orders' had other columns .*sink sync shop"):
        open_store(tmp_path).publish(kit.NAME)
    assert shown(tmp_path) == before
    overwrite(tmp_path, pa.field("amount", kind))
    assert open_store(tmp_path).publish(kit.NAME) == 1
    assert shown(tmp_path) == [{"id": 5, "amount": value}] and open_store(tmp_path).problems(kit.NAME) == []


def test_a_merge_is_not_published_without_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key column that was renamed stops the publication, and no row comes twice."""
    decided(tmp_path, monkeypatch, LONG, 1)
    write_deltalake(sink_at(tmp_path), pa.table({"number": [5], "amount": [0]}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(PublicationStuck, match="had other columns"):
        open_store(tmp_path).publish(kit.NAME)


@pytest.mark.parametrize("nullable", [True, False])
def test_null_is_not_merged_where_it_is_forbidden_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nullable: bool) -> None:
    """A decided NULL stops the publication into a column that became NOT NULL; where it may be NULL it is published."""
    decided(tmp_path, monkeypatch, LONG, None)
    rows = pa.table({"id": [9], "amount": [1]}, schema=pa.schema([ID, pa.field("amount", LONG, nullable=nullable)]))
    write_deltalake(sink_at(tmp_path), rows, mode="overwrite", schema_mode="overwrite")
    if nullable:
        assert open_store(tmp_path).publish(kit.NAME) == 1 and shown(tmp_path) == [{"id": 5, "amount": None}]
        return
    with pytest.raises(PublicationStuck, match="forbids NULL in amount"):
        open_store(tmp_path).publish(kit.NAME)
    assert shown(tmp_path) == [{"id": 9, "amount": 1}]


@pytest.mark.parametrize(
    ("kind", "value", "now", "expected"),
    [
        (LONG, 1, [pa.field("amount", LONG), pa.field("more", LONG)], {"amount": 1, "more": None}),
        (LONG, 1, [pa.field("amount", pa.decimal128(22, 2))], {"amount": 1}),
        (
            pa.struct([("a", LONG), ("b", LONG)]),
            {"a": 1, "b": 2},
            [pa.field("amount", pa.struct([("b", LONG), ("c", LONG), ("a", LONG)]))],
            {"amount": {"a": 1, "b": 2, "c": None}},
        ),
    ],
)
def test_a_merge_is_published_into_columns_that_keep_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, value: Any, now: list[pa.Field], expected: dict[str, Any]
) -> None:
    """A column or a part of a struct more, or a wider type, is no obstacle: each value comes to its own name."""
    decided(tmp_path, monkeypatch, kind, value)
    overwrite(tmp_path, *now)
    assert open_store(tmp_path).publish(kit.NAME) == 1
    assert shown(tmp_path) == [{"id": 5, **expected}] and open_store(tmp_path).problems(kit.NAME) == []


def test_a_merge_is_not_published_into_a_table_that_became_append_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried; the error names the property, and the decision is published once it is off."""
    decided(tmp_path, monkeypatch, LONG, 1)
    DeltaTable(sink_at(tmp_path)).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(PublicationStuck, match=r"append-only .*Change it back"):
        open_store(tmp_path).publish(kit.NAME)
    DeltaTable(sink_at(tmp_path)).alter.set_table_properties({"delta.appendOnly": "false"})
    assert open_store(tmp_path).publish(kit.NAME) == 1


class SparkStandIn:
    """Takes merges in place of Spark."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def merge(self, uri: str, files: list[str], how: Merge, app: str, version: int) -> None:
        """Show the transaction id."""
        self.files += files
        tables.commit(DeltaTable(uri), [], {app: version}, exact=True)


@pytest.mark.parametrize("name", ["delta.enableChangeDataFeed", "delta.enableDeletionVectors"])
def test_a_decided_merge_is_left_to_spark_where_the_table_needs_it_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A property that was switched on after the decision: without Spark nothing is merged, with Spark it merges the staged rows."""
    decided(tmp_path, monkeypatch, LONG, 1, configuration={name: "false"})
    DeltaTable(sink_at(tmp_path)).alter.set_table_properties({name: "true"})
    with pytest.raises(ConfigError, match="can only be written by Spark"):
        open_store(tmp_path).publish(kit.NAME)
    assert DeltaTable(sink_at(tmp_path)).version() == 1
    spark = SparkStandIn()
    monkeypatch.setattr(DeltaRs, "side", lambda self: spark)
    open_store(tmp_path).publish(kit.NAME)
    assert len(spark.files) == 2 and "/staged/" in spark.files[0]
    assert open_store(tmp_path).publish(kit.NAME) == 0


@pytest.mark.parametrize(
    "error",
    of_which(
        1,
        [
            Exception("Cast error: Can't cast value 2000000000000 to type Int32"),
            ValueError("invalid argument"),
            DeltaError("Generic DeltaTable error: type_coercion\ncaused by\nError during planning: Failed to coerce"),
        ],
    ),
)
def test_a_merge_that_can_never_be_carried_out_waits_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever kind of error delta-rs makes of it, it is no outage: nobody waits for what does not pass by itself."""
    decided(tmp_path, monkeypatch, LONG, 1)

    tries: list[int] = []

    def fails(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise error

    monkeypatch.setattr(DeltaTable, "merge", fails)
    with pytest.raises(PublicationStuck, match=r"Decision 2 \(2 rows\) cannot be published"):
        open_store(tmp_path).publish(kit.NAME)
    assert len(tries) == 3, "each may read the whole sink"
    monkeypatch.undo()
    assert open_store(tmp_path).publish(kit.NAME) == 1 and shown(tmp_path) == [{"id": 5, "amount": 1}]


def test_a_staged_file_that_is_damaged_waits_for_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the decision and the sink, and nothing is merged."""
    decided(tmp_path, monkeypatch, LONG, 1)
    for file in (tmp_path / "state" / "staged").rglob("*.parquet"):
        file.write_bytes(b"half a file")
    with pytest.raises(PublicationStuck, match=r"Decision 2 \(2 rows\) cannot be published to the sink 'orders'"):
        open_store(tmp_path).publish(kit.NAME)
    assert shown(tmp_path) == []
