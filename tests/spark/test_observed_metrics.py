"""What Spark's progress can show of a batch: `observedMetrics` of the query's plan, and never what a `foreachBatch` has found out.

docs/how-to/operate.md says so and shows how a listener joins the progress with dedup's report. Should Spark learn to do it, a test fails.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_spark import Topic

from kit.orders import ORDER
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.delta]

SECTION = (ROOT / "docs/how-to/operate.md").read_text(encoding="utf-8").partition("\n## In Spark's own progress\n")[2].partition("\n## ")[0]


@pytest.fixture
def topic(spark: SparkSession, tmp_path: Path) -> Topic:
    """Ten events in one batch."""
    made = Topic(spark, tmp_path)
    made.append(*[(number, f"o{number}", number) for number in range(10)])
    return made


def observed(frame: DataFrame, handle: Any, checkpoint: Path) -> dict[str, int]:
    """Name -> rows, of the one batch of a query."""
    query = frame.writeStream.foreachBatch(handle).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination(120)
    progress = next(one for one in query.recentProgress if one["batchId"] == 0)
    return {name: row["rows"] for name, row in progress.get("observedMetrics", {}).items()}


def counting(frame: DataFrame, name: Any) -> DataFrame:
    """The frame, whose rows Spark counts under this name."""
    from pyspark.sql import functions as F

    return frame.observe(name, F.count(F.lit(1)).alias("rows"))


@pytest.mark.full
def test_what_foreachbatch_observes_is_not_in_the_progress(topic: Topic, tmp_path: Path) -> None:
    """Only observations of the stream before `foreachBatch` are there: those of the batch's frame, or of another frame, are not."""
    from pyspark.sql import Observation

    seen = []

    def handle(batch: DataFrame, number: int) -> None:
        counted = Observation("inside")
        counting(batch, counted).collect()
        seen.append(counted.get["rows"])
        counting(batch.sparkSession.range(3), "outcome").collect()
        counting(batch, "by name").write.format("noop").mode("overwrite").save()

    assert observed(topic.stream(), handle, tmp_path / "none") == {}
    assert observed(counting(topic.stream(), "before"), handle, tmp_path / "one") == {"before": 20}  # it was read twice
    assert seen == [10, 10]


@pytest.mark.full
def test_what_the_stream_observes_counts_how_often_it_was_read(topic: Topic, tmp_path: Path) -> None:
    """So it says nothing of what was handled: a batch that is read in part, or not at all, has fewer."""
    stream = counting(topic.stream(), "before")
    assert observed(stream, lambda batch, number: batch.limit(3).collect(), tmp_path / "part") == {"before": 3}
    assert observed(stream, lambda batch, number: None, tmp_path / "not") == {"before": 0}


def test_a_listener_joins_the_progress_with_the_report(spark: SparkSession, topic: Topic, tmp_path: Path, capsys: Any) -> None:
    """The program of the page runs as it stands: each progress with rows comes with the report of its batch."""
    from dedup import DeltaStore, decode
    from kit.places import DeltaPlace

    place = DeltaPlace(tmp_path)
    place.create_sink()
    topic.append((10, "o10", 1), (11, "o1", 1), (12, "x", -1))
    (program,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    names: dict[str, Any] = {"spark": spark, "store": place.store(), "schema": ORDER, "decode": decode, "DeltaStore": DeltaStore}
    exec(program, names)
    try:
        consumer = names["consumer"]

        @consumer.foreach_batch
        def load(rows: DataFrame, tx: Any) -> None:
            tx.write(tx.reject(rows, "data.amount < 0", "negative").select("data.*"), "orders")

        writer = topic.stream().writeStream.queryName("shop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        consumer.run(writer.trigger(availableNow=True))
        lines: list[str] = []
        until = time.monotonic() + 60
        while len(lines) < 2 and time.monotonic() < until:
            lines += [line for line in capsys.readouterr().out.splitlines() if line.startswith("shop ")]
            time.sleep(0.1)
    finally:
        spark.streams.removeListener(names["listener"])
    assert [line.partition(": ")[2].partition(", redelivered")[0] for line in lines] == ["delivered 10", "delivered 3"]
    assert "duplicates 1" in lines[1] and "dead-lettered 1" in lines[1] and not names["reports"]
