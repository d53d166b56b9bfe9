"""Handlers of batches whose rows stay in files of tasks: what they are given, and what they write, is what the batch has."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from dedup.core.envelope import POSITION
from dedup.decode.prepare import Prepare
from fixtures.variants import of_which
from kit.orders import assert_proven, consumer, ids, letters
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 60

VALUES = {
    "text": "case when id % 7 = 0 then null else 'ä' || id end",
    "raw": "cast('r' || id as binary)",
    "small": "cast(id % 100 as tinyint)",
    "money": "cast(id as decimal(20, 3)) / 8",
    "real": "case id % 3 when 0 then double('NaN') when 1 then -0.0D else id / 7 end",
    "at": "timestampadd(MICROSECOND, id, timestamp'1899-12-31 23:59:59.999999')",
    "wall": "timestampadd(SECOND, id, timestamp_ntz'2026-03-29 02:30:00')",
    "day": "date_add(date'1582-10-10', cast(id as int))",
    "lasts": "make_dt_interval(0, 0, 0, id)",
    "many": "transform(sequence(0, id % 3), n -> named_struct('n', n, 'of', if(n = 1, null, 'x' || id)))",
    "names": "map('a', id, 'b', cast(null as bigint))",
    "deep": "if(id % 5 = 0, null, named_struct('inner', named_struct('n', id), 'a.b', id))",
    "nothing": "cast(null as int)",
}
"""Columns of an ordinary and of a less ordinary source."""


def frame_of(spark: SparkSession, partitions: int = 3) -> DataFrame:
    """Events of two topics of this many partitions with those columns, in four tasks, of which one has all of a topic."""
    columns = [f"{sql} as {name}" for name, sql in VALUES.items()]
    topic = f"if(id < {ROWS // 4}, 'orders', 'returns') topic"
    place = ["'s' source", topic, f"cast(id % {partitions} as int) partition", "id sequence_number", "cast('x' as binary) body"]
    return spark.range(0, ROWS, 1, 4).selectExpr(*place, *columns)


@pytest.fixture
def kept(spark: SparkSession, tmp_path: Path) -> Iterator[Any]:
    """Those events, in files of tasks."""
    from dedup.spark.batch import EvaluatedInFiles, SparkBatch

    with SparkBatch(frame_of(spark), str(tmp_path), collect=False).evaluate(Prepare("shop")) as rows:
        assert isinstance(rows, EvaluatedInFiles)
        yield rows


def by_number(table: pa.Table) -> list[str]:
    """Its rows as texts, ordered by position: NaN equals itself there."""
    return [str(row) for row in table.sort_by("sequence_number").to_pylist()]


def texts(batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
    """What a task tells of the rows that it writes."""
    yield from (json.dumps([str(value) for value in row.values()]) for batch in batches for row in batch.to_pylist())


@pytest.fixture(autouse=True)
def travels() -> Iterator[None]:
    """Tasks do not find this module: what stands in it goes to them by value, as what stands in a user's program does."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_a_handler_is_given_the_values_that_the_batch_has(spark: SparkSession, kept: Any, tmp_path: Path) -> None:
    """Values of many types, nulls and nested ones, are those that a batch on the driver has, in the same types of Spark."""
    from dedup.core.rows import arrow_of
    from dedup.spark.batch import SparkBatch

    everything = np.arange(ROWS)
    with SparkBatch(frame_of(spark), str(tmp_path)).evaluate(Prepare("shop")) as rows:
        expected = rows.frame(everything)
        frame = kept.frame(everything)
        assert frame.schema == expected.schema
        assert by_number(arrow_of(frame)) == by_number(arrow_of(expected))


PICKED = ["orders", "orders.select('text', 'sequence_number')", "orders.select('deep.*', 'sequence_number').withColumnRenamed('a.b', 'ab')"]
COMPUTED = ["orders.where('sequence_number % 2 = 0')", "orders.selectExpr('upper(text) as text', 'sequence_number')"]


@pytest.mark.parametrize("written", of_which(2, [PICKED[-1], COMPUTED[0], *PICKED[:-1], *COMPUTED[1:]]))
def test_tasks_write_what_spark_would_answer(kept: Any, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows, of some, and of none. What a handler only picked is taken from the files: Spark evaluates no frame for it."""
    from dedup.core.rows import arrow_of
    from dedup.spark import features

    for chosen in (np.arange(ROWS), np.arange(3, ROWS, 4)[::-1], np.arange(0)):
        rows = eval(written, {"orders": kept.frame(chosen)})
        expected = arrow_of(rows)
        with monkeypatch.context() as patched:
            if written in PICKED:
                patched.setattr(features, "map_in_arrow", None)
            names = rows.columns[::-1]
            told = kept.frames.rows(rows).files(texts, names)
            on_driver = kept.frames.rows(rows).arrow()
        assert sorted(told) == sorted(texts(iter(expected.select(names).to_batches())))
        assert by_number(on_driver) == by_number(expected) and on_driver.schema.names == expected.schema.names


def test_what_is_left_after_a_rejection_can_still_be_picked(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, by columns of the handler's frame; then tasks write the rest from the files."""
    from dedup.spark import features

    orders = kept.frame(np.arange(ROWS))
    found = kept.frames.positions(orders, "sequence_number % 2 = 0", [*POSITION])
    left = kept.frames.without(orders, found)
    left = kept.frames.without(left, kept.frames.positions(left, orders.sequence_number < 30, [*POSITION]))
    expected = [n for n in range(ROWS) if n % 2 and n >= 30]
    assert sorted(row[0] for row in left.where(orders.sequence_number > 0).select(orders.sequence_number).collect()) == expected
    rows = left.select("sequence_number")
    monkeypatch.setattr(features, "map_in_arrow", None)
    assert sorted(int(json.loads(told)[0]) for told in kept.frames.rows(rows).files(texts, ["sequence_number"])) == expected


def test_a_join_sends_the_small_table_to_the_tasks(spark: SparkSession, kept: Any) -> None:
    """Kept rows may be more than a driver holds: Spark must not take them for few, and collect them on it to send them to every task."""
    customers = spark.range(1000).selectExpr("id sequence_number", "'c' || id customer")
    joined = kept.frame(np.arange(ROWS)).join(customers, "sequence_number")
    assert re.findall("Build(?:Left|Right)", joined._jdf.queryExecution().executedPlan().toString()) == ["BuildRight"]
    assert sorted(row.customer for row in joined.collect()) == sorted(f"c{n}" for n in range(ROWS))


def test_rows_of_a_topic_partition_come_in_the_order_of_their_positions(kept: Any) -> None:
    """Messages of one key are sent in the order of the rows: however the rows are dealt to tasks, and whoever reads the files."""
    from dedup.core.rows import arrow_of

    frame = kept.frame(np.arange(ROWS))
    for table in (arrow_of(frame), kept.frames.rows(frame).arrow()):
        numbers = defaultdict(list)
        for row in table.select([*POSITION]).to_pylist():
            numbers[row["topic"], row["partition"]].append(row["sequence_number"])
        assert sum(map(len, numbers.values())) == ROWS and all(found == sorted(found) for found in numbers.values())


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("written", ["data.*", "upper(data.id) id, data.amount"])
def test_a_file_that_is_gone_parks_no_event(
    written: str, spark: SparkSession, place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deletes the files before the handler writes: nothing is decided, and the batch runs again without them, each effect once."""
    from dedup.spark import keeping

    monkeypatch.setattr(keeping, "_not_shared", set())  # another test may have had a folder of this name
    scratch, times = tmp_path / "scratch", list[int]()
    made = consumer(place.store(), query="q", budget=None, collect=False, scratch=str(scratch), max_outage=60.0)

    def load(orders: Any, tx: Any) -> None:
        files = list(scratch.glob("dedup-kept-*/*.arrow"))
        times.append(len(files))
        for file in files:
            file.unlink()
        tx.write(orders.selectExpr(*re.split(r", ?", written)), "orders")

    made._handler = load
    body = """cast(to_json(struct('k' || id as id, id as amount)) as binary) body"""
    made(spark.range(0, 40, 1, 2).selectExpr("'s' source", "'t' topic", "0 partition", "id sequence_number", body), 0)
    assert times[0] > 0 and times[-1] == 0 and "Kept rows of the batch are gone" in caplog.text
    assert sorted(name.lower() for name in ids(place.read())) == sorted(f"k{n}" for n in range(40)) and letters(place.store()) == []
    assert_proven(place.store())
