"""Each file of examples/ is run as it is, twice, against a real broker or the double of Event Hubs: each message has one effect."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from deltalake import DeltaTable

from dedup.delta import DeltaStore
from dedup.postgres import PostgresStore
from dedup.verify import verify
from kit import kafka_server
from kit.eventhubs.control import Double
from kit.hub_orders import until
from kit.kafka_kit import Topic, received
from kit.paths import ROOT, environment
from kit.pg_run import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = ROOT / "examples"
ORDERS = [
    ("m-1", {"order_id": "o-1", "customer": "ann", "amount": 5}),
    ("m-2", {"order_id": "o-2", "customer": "bob", "amount": 7}),
    ("m-2", {"order_id": "o-2", "customer": "bob", "amount": 7}),
    ("m-3", {"order_id": "o-3", "customer": "ann", "amount": -2}),
]
STORED = [("o-1", "ann", 5), ("o-2", "bob", 7)]

Messages = list[tuple[str, dict[str, Any]]]


def send(topic: Topic, messages: Messages) -> None:
    """To one partition, with the id in the header."""
    topic.send_messages(*((number, json.dumps(body)) for number, body in messages))


def put(eventhubs: Double, hub: str, messages: Messages) -> None:
    """The same to an event hub."""
    for number, body in messages:
        eventhubs.put(hub, 0, [json.dumps(body).encode()], {"message-id": number})


def start(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Run the file as a program, again without Spark's checkpoint: what it did is decided already."""
    for key, value in {**settings, "SPARK_CHECKPOINT": str(folder / "spark"), "LAKE": str(folder)}.items():
        monkeypatch.setenv(key, value)
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        shutil.rmtree(folder / "spark")


def of_kafka(kafka: kafka_server.Broker, topic: Topic, dsn: str = "") -> dict[str, str]:
    """The settings of an example that reads this topic."""
    return {"BROKER": kafka.servers, "TOPIC": topic.name, "DEDUP_STORE": dsn}


def test_kafka_to_postgresql(
    spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders are in the table once each, and the refund is a dead letter."""
    run(postgres, "create table orders (order_id text, customer text, amount bigint)")
    send(topic, ORDERS)
    start("kafka_to_postgresql.py", tmp_path, monkeypatch, **of_kafka(kafka, topic, postgres))
    assert sorted(run(postgres, "select * from orders")) == STORED
    report = verify(PostgresStore(postgres), "orders")
    assert report.ok and report.counts["dead_lettered"] == 1


@pytest.mark.full
@pytest.mark.delta
def test_eventhubs_to_delta(spark: SparkSession, eventhubs: Double, new_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of an event hub are in the Delta table once each."""
    hub = new_hub(2, ("again",))
    put(eventhubs, hub, ORDERS)
    start("eventhubs_to_delta.py", tmp_path, monkeypatch, EVENTHUBS=eventhubs.connection_string, HUB=hub)
    assert sorted(tuple(row.values()) for row in DeltaTable(str(tmp_path / "orders")).to_pyarrow_table().to_pylist()) == STORED
    assert verify(DeltaStore(str(tmp_path / "dedup")), "orders").ok


@pytest.mark.full
def test_single_events(
    spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payments are stored once each in cents; a bad one is a dead letter, and the later payment of its account waits behind it."""
    run(postgres, "create table payments (payment_id text, account text, cents bigint)")
    given = [("p-1", "ann", "1.50"), ("p-2", "bob", "none"), ("p-3", "bob", "2"), ("p-4", "eve", "0"), ("p-1", "ann", "1.50")]
    send(topic, [(id_, {"payment_id": id_, "account": account, "euros": euros}) for id_, account, euros in given])
    start("single_events.py", tmp_path, monkeypatch, **of_kafka(kafka, topic, postgres))
    assert run(postgres, "select * from payments") == [("p-1", "ann", 150)]
    assert sorted(run(postgres, "select idempotence_key, status from dedup.dead_letter")) == [("p-2", "OPEN"), ("p-3", "BLOCKED")]


@pytest.mark.full
@pytest.mark.delta
def test_merge(spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the newest state of each customer; an older change that comes late changes nothing."""
    given = [("ann", "Oslo", 1, None), ("ann", "Rome", 3, None), ("ann", "Bern", 2, None), ("bob", "Bonn", 1, None), ("bob", None, 2, True)]
    names = ("customer", "city", "version", "gone")
    send(topic, [(f"m-{n}", dict(zip(names, change, strict=True))) for n, change in enumerate(given)])
    start("merge.py", tmp_path, monkeypatch, **of_kafka(kafka, topic))
    found = DeltaTable(str(tmp_path / "customers")).to_pyarrow_table().to_pylist()
    assert found == [{"customer": "ann", "city": "Rome", "version": 3}]


@pytest.mark.full
def test_outbox(
    spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each stored order one message is at the broker."""
    run(postgres, "create table orders (order_id text, customer text, amount bigint)")
    mails = Topic(kafka.servers, f"{topic.name}-mails")
    mails.create()
    send(topic, ORDERS[:3])
    start("outbox.py", tmp_path, monkeypatch, MAILS=mails.name, **of_kafka(kafka, topic, postgres))
    assert sorted(run(postgres, "select * from orders")) == STORED
    assert sorted(m.value() for m in received(mails, partitions=1)) == [b"We have your order o-1.", b"We have your order o-2."]


def test_plain_runner(eventhubs: Double, new_hub: Any, postgres: str, tmp_path: Path) -> None:
    """Without Spark: orders are in the table once each, and SIGTERM ends the process well."""
    hub = new_hub(2)
    run(postgres, "create table orders (order_id text, customer text, amount bigint)")
    put(eventhubs, hub, ORDERS)
    settings = environment(DEDUP_STORE=postgres, EVENTHUBS=eventhubs.connection_string, HUB=hub)
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen([sys.executable, str(EXAMPLES / "plain_runner.py")], env=settings, stderr=errors)
    try:
        until(lambda: _decided(postgres) == len(ORDERS), lambda: _require_running(process, tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.wait()
    assert sorted(run(postgres, "select * from orders")) == STORED


def _decided(dsn: str) -> int:
    found = run(dsn, "select coalesce(max(sequence_number), -1) + 1 from dedup.checkpoint")
    return int(found[0][0])


def _require_running(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.poll() is None, (folder / "errors").read_text()


def test_each_example_is_one_short_file_with_a_test() -> None:
    """Six files of 30 to 80 lines; each has a test here and a row in the table; each setting that it reads is in its docstring."""
    files = sorted(EXAMPLES.glob("*.py"))
    table, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert len(files) == 6
    for file in files:
        text = file.read_text()
        assert 30 <= text.count("\n") <= 80, file
        assert f"[{file.name}]({file.name})" in table and f'"{file.name}"' in tests
        read = set(re.findall(r"os\.environ(?:\.get\(|\[)[\"'](\w+)", text))
        assert read and not [name for name in read if name not in text.split('"""')[1]], file


def test_the_compose_file_starts_what_the_examples_need() -> None:
    """Kafka and PostgreSQL, at the addresses that the page exports, with the images that tests use where an engine answers."""
    ours, tested = (
        yaml.safe_load((ROOT / place).read_text())["services"] for place in ("examples/docker-compose.yml", "tests/docker-compose.yml")
    )
    assert {name: service["image"] for name, service in ours.items()} == {name: tested[name]["image"] for name in ("kafka", "postgres")}
    assert [service["ports"] for service in ours.values()] == [["127.0.0.1:5432:5432"], ["127.0.0.1:9092:9092"]]
