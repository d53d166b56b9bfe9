"""Bodies that name their schema in a registry, on Spark: decoded by the driver, by the tasks, and the same either way."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from checkpoint.errors import RegistryUnavailable
from dedup import Columns, decode
from dedup.core.keys import KeySettings
from dedup.core.rows import arrow_of, frame_of
from dedup.decode.prepare import Prepare, prepare_events
from dedup.decode.registry import Azure, Confluent
from fixtures.variants import of_which
from kit.registry_kit import avro, confluent, content_type, events, record
from kit.registry_server import RegistryServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
LINE = record(("sku", "string"), ("raw", ["null", "bytes"], None), name="Line")
ORDER = record(
    ("id", "string"), ("at", MILLIS), ("paid", MONEY, "\u0001"), ("lines", {"type": "array", "items": LINE}, []), ("n", "long", 0)
)
OLD = record(("id", "string"), ("at", "long"), ("n", "int"), ("gone", "string"))


def no_login() -> Any:
    """Makes a credential of a registry that asks for none; goes to the tasks as it stands here."""

    def make() -> Any:
        return SimpleNamespace(get_token=lambda *_: SimpleNamespace(token="t"))

    return make


def bodies(first: int, second: int) -> list[bytes | None]:
    """Both schemas, nulls, and what does not decode."""
    plain = record(("id", "string"), ("at", "long"), ("paid", "bytes"), ("lines", {"type": "array", "items": LINE}), ("n", "long"))
    row = {
        "id": "a",
        "at": 1_700_000_000_123,
        "paid": b"\x04\xd2",
        "lines": [{"sku": "s", "raw": b"\xff"}, {"sku": "t", "raw": None}],
        "n": 2**40,
    }
    old = {"id": "b", "at": 5, "n": 3, "gone": "x"}
    good = [confluent(first, plain, row), confluent(second, OLD, old), None]
    return [*good, b"", b"junk", confluent(99, OLD, old), *good * 20]


def test_tasks_decode_as_the_driver_does(spark: SparkSession, registry: RegistryServer) -> None:
    """Values, nulls and verdicts are the same in Spark's tasks, in a session of another zone, and keys are made of them."""
    from dedup.spark.prepare import prepare_columns

    first, second = registry.register("s", ORDER), registry.register("s", OLD)
    table = events(bodies(first, second))
    spec = Prepare("c", KeySettings(("data.id",)), decoder=decode.confluent_avro(registry.url, schema=ORDER))
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        found = arrow_of(prepare_columns(frame_of(spark, table).coalesce(2), spec)).sort_by("sequence_number")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    expected = prepare_events(table, spec)
    names = ["sequence_number", "data", "_undecodable", "_key", "_payload_hash"]
    assert found.select(names).cast(expected.select(names).schema) == expected.select(names)
    assert expected["_undecodable"].to_pylist()[:7] == [False, False, False, True, True, True, False]


@pytest.mark.full
def test_tasks_see_the_content_type(spark: SparkSession, registry: RegistryServer) -> None:
    """Properties reach the tasks, as a map too: there is the schema's id in Azure's framing."""
    from dedup.spark.prepare import prepare_columns

    ident, plain = registry.register_azure("g/s", OLD), {"id": "b", "at": 5, "n": 3, "gone": "x"}
    table = events([avro(OLD, plain), b"\0\0\0\0" + ident.encode() + avro(OLD, plain), avro(OLD, plain)], [content_type(ident), None, []])
    spec = Prepare("c", decoder=decode.azure_avro(Azure(registry.url, no_login()), schema=OLD))
    frame = frame_of(spark, table)
    for properties in ("properties", "map_from_entries(properties) properties"):
        found = prepare_columns(frame.selectExpr("source", "topic", "partition", "sequence_number", "body", properties), spec)
        rows = arrow_of(found).sort_by("sequence_number")
        assert rows["_undecodable"].to_pylist() == [False, False, True]
        assert rows["data"].to_pylist() == [plain, plain, None]


@pytest.mark.full
@pytest.mark.parametrize("path", of_which(1, ["expression", "driver", "files", "scratch"]))
def test_every_way_to_materialise_a_batch(
    spark: SparkSession, registry: RegistryServer, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the driver, in tasks for what needs Spark, and in tasks into files: the same rows, and an absent registry is told as such."""
    from dedup.spark import batch

    first, second = registry.register("s", ORDER), registry.register("s", OLD)
    table = events(bodies(first, second))
    decoder = decode.confluent_avro(registry.url, schema=ORDER)
    spec = Prepare("c", KeySettings(("data.id",)), decoder=decoder)
    kinds = {"files": batch.EvaluatedInFiles, "scratch": batch.EvaluatedInScratch}
    if path in kinds:
        monkeypatch.setattr(batch.SparkBatch, "_in_memory", lambda *_: None)
    if path == "scratch":
        monkeypatch.setattr(batch.SparkTasks, "folder", lambda _: None)
    names = ["source", "topic", "partition", "body", "sequence_number"]
    frame = frame_of(spark, table.select(names))
    if path == "expression":
        frame = frame.withColumnsRenamed({"source": "src", "topic": "t", "partition": "p", "sequence_number": "s", "body": "b"})
        spec = Prepare("c", KeySettings(("upper(data.id)",)), columns=Columns("t", "p", "s + 0L", source="src", body="b"), decoder=decoder)
    with batch.SparkBatch(frame, str(tmp_path)).evaluate(spec) as evaluated:
        assert isinstance(evaluated, kinds.get(path, batch.EvaluatedInMemory))
        assert (getattr(evaluated, "_late", None) is not None) == (path == "driver")
        numbers = evaluated.index["sequence_number"].to_numpy()
        data = evaluated.content(np.argsort(numbers))["data"].to_pylist()
    assert data == prepare_events(table, Prepare("c", decoder=decoder))["data"].to_pylist()
    registry.stop()
    asked = Prepare("c", spec.keys, columns=spec.columns, decoder=decode.confluent_avro(registry.url + "/", schema=ORDER))
    with pytest.raises(RegistryUnavailable, match="cannot be reached"), batch.SparkBatch(frame, str(tmp_path)).evaluate(asked):
        pass


def test_plans_and_errors_of_tasks_do_not_show_the_password(spark: SparkSession, registry: RegistryServer) -> None:
    """It travels to the tasks inside the function, and is in no form of the plan and in nothing that tasks raise."""
    from dedup.spark.prepare import prepare_columns

    decoder = decode.confluent_avro(Confluent(registry.url, user="shop", password="hunter2"), schema=OLD)
    found = prepare_columns(frame_of(spark, events([b"\0\0\0\0\7x"])), Prepare("c", decoder=decoder))
    registry.login = "another"
    with pytest.raises(Exception, match="RegistryUnavailable") as told:
        arrow_of(found)
    plans = found._jdf.queryExecution().toString()  # type: ignore[operator]
    shown = f"{plans} {told.value} {told.value!r}"
    assert "hunter2" not in shown and base64.b64encode(b"shop:hunter2").decode() not in shown
