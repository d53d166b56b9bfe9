"""What docs/how-to/delta-engine-spark.md shows is what runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dedup import decode
from kit import delta_kit as kit
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (ROOT / "docs/how-to/delta-engine-spark.md").read_text()
FLIGHT = pa.schema([("flight_id", pa.string()), ("dep_time", pa.int64())])


@pytest.mark.full
@pytest.mark.delta
def test_the_snippet_and_the_command_run(spark: SparkSession, dedup: Any, tmp_path: Path) -> None:
    """A stream's consumer over a store as shown writes each flight once, and `verify` reads it with Spark."""
    kit.create(str(tmp_path / "departures"), FLIGHT)
    names: dict[str, Any] = {"decode": decode, "schema": FLIGHT}
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(snippet.replace("/lake", str(tmp_path)), names)
    consumer = names["consumer"]
    consumer.query = "q"
    consumer.foreach_batch(lambda rows, tx: tx.write(rows.select("data.*"), "departures"))
    rows = spark.sql(
        """SELECT 'b' source, 't' topic, 0 partition, id sequence_number, concat('m', id % 2) message_id,
                  cast(concat('{"flight_id": "', id % 2, '", "dep_time": 5}') AS BINARY) body FROM range(3)"""
    )
    consumer(rows, 0)
    found = DeltaTable(str(tmp_path / "departures")).to_pyarrow_table()["flight_id"].to_pylist()
    assert sorted(found) == ["0", "1"]
    line, *_ = re.findall(r"```console\n(.*?)\n```", TEXT, re.DOTALL)
    code, out, err = dedup(shlex.join(shlex.split(line.replace("/lake", str(tmp_path)))[1:]))
    assert code == 0 and "2" in out, (out, err)


def test_the_snippet_for_spark_connect_makes_a_consumer_that_travels(tmp_path: Path) -> None:
    """docs/how-to/spark-connect.md: the consumer is pickled into the server's process, and brings its name for the query."""
    import pickle

    names: dict[str, Any] = {"decode": decode, "schema": FLIGHT}
    text = (ROOT / "docs/how-to/spark-connect.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec("from dedup import Consumer, DeltaStore\n" + snippet.replace("/lake", str(tmp_path)), names)
    there = pickle.loads(pickle.dumps(names["consumer"]))
    assert (there.name, there.query) == ("departures", "departures to lake")
