"""What docs/how-to/kafka.md shows is what runs, on a real broker."""

from __future__ import annotations

import re
import shlex
import zipfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import TopicPartition
from typer.testing import CliRunner

from checkpoint.start import next_positions
from dedup import Consumer
from dedup.delta import DeltaStore
from dedup.verify import verify
from kit import kafka_server, maven
from kit.kafka_kit import Topic
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (ROOT / "docs/how-to/kafka.md").read_text()
FLIGHT = pa.schema([("flight_id", pa.string()), ("dep_time", pa.int64())])


def blocks(language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.delta
def test_the_first_snippet_and_the_commands_run(spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, tmp_path: Path) -> None:
    """The stream comes up as shown, writes each flight once, begins again behind our checkpoint, and the commands answer."""
    from deltalake import DeltaTable

    from dedup import kafka as dk
    from dedup.cli.app import app

    lake = str(tmp_path)
    snippet = blocks("python")[0].replace("/lake", lake).replace("host:9092", kafka.servers).replace('"flights"', f'"{topic.name}"')
    DeltaTable.create(f"{lake}/departures", FLIGHT)
    first = ("a", '{"flight_id": "a", "dep_time": 5}')
    topic.send_messages(first, ("b", '{"flight_id": "b"}'), first)
    run(snippet, {"spark": spark, "schema": FLIGHT})
    topic.send_messages(("c", '{"flight_id": "c", "dep_time": 7}'))
    topic.send_transaction(['{"flight_id": "no"}'], commit=False)
    run(snippet.replace(f"{lake}/spark", f"{lake}/another"), {"spark": spark, "schema": FLIGHT})
    found = DeltaTable(f"{lake}/departures").to_pyarrow_table().sort_by("flight_id").to_pylist()
    assert [tuple(row.values()) for row in found] == [("a", 5), ("b", None), ("c", 7)]
    store = DeltaStore(f"{lake}/dedup")
    report = verify(store, "departures")
    assert report.ok and report.counts["redelivered"] == 0
    source = next(iter(store.head("departures").checkpoints)).source
    names = {"kafka": dk, "broker": dk.Broker(kafka.servers), "consumer": Consumer("departures", store)}
    exec(blocks("python")[1], names)
    names["mirror"].stop()
    place = (topic.name, 0)
    with closing(Client({"bootstrap.servers": kafka.servers, "group.id": "departures", "log_level": 0})) as client:
        (found,) = client.committed([TopicPartition(*place)], 30)
    assert found.offset == next_positions(store.head("departures"))[place]
    for line in "".join(reversed(blocks("console"))).splitlines():  # what was accepted last has no checkpoint any more
        words = shlex.split(line.replace("SOURCE", source).replace("flights", topic.name).replace("host:9092", kafka.servers))
        result = CliRunner().invoke(app, [*words[1:], "--store", f"{lake}/dedup"])
        assert result.exit_code == 0 and result.output.strip(), (line, result.output, result.exception)


def run(snippet: str, names: dict[str, Any]) -> None:
    """The stream until all is processed."""
    exec(snippet, names)
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()


def test_the_snippets_of_event_hubs_run(
    spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login by connection string reads a real broker; that by Entra ID names classes that Kafka's client has."""
    from dedup import kafka as dk

    monkeypatch.setenv("HUBS", kafka.connection_string)
    monkeypatch.setenv("SECRET", "s3cret")
    topic.send(["x", "y"])
    by_string, by_entra = (block.replace('"flights"', f'"{topic.name}"') for block in blocks("python")[2:])
    names: dict[str, Any] = {"spark": spark, "kafka": dk}
    exec(by_string.replace("readStream", "read"), names)
    assert names["events"].count() == 2
    assert names["broker"].spans([topic.name])[topic.name, 0] == (0, 2)
    exec(by_entra, names)
    options = names["hubs"].options
    assert options["kafka.sasl.mechanism"] == "OAUTHBEARER" and "s3cret" not in repr(options)
    (client,) = (jar for jar in maven.jars("spark-kafka", maven.SPARK_KAFKA, transitive=False) if "kafka-clients" in jar.name)
    known = set(zipfile.ZipFile(client).namelist())
    named = re.findall(r"org\.apache\.kafka[\w.]+", " ".join(options.values()))
    assert len(named) == 2
    assert [name for name in named if f"{name.replace('.', '/')}.class" not in known] == []
