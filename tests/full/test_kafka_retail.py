"""End to end: real events, retries that duplicate, a real broker and Spark, all of it killed on the way; then counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pytest

from deadletter.selection import Selection
from dedup.demo import supervise
from dedup.demo.input import difference
from dedup.verify import verify
from kit import kafka_retail, kafka_server
from kit.kafka_kit import Topic
from kit.kafka_proxy import proxied
from kit.kafka_retail import CONSUMER, PARTITIONS, SINK, Input
from kit.real_input import ONLINE_RETAIL, REAL_INPUT

EVENTS = [200_000]

pytestmark = pytest.mark.timeout(1_800)  # Spark starts three times, and waits for a broker that was killed

NAME = "retail" if ONLINE_RETAIL.exists() else "flights"


@pytest.fixture(scope="module", params=EVENTS)
def rows(request: pytest.FixtureRequest) -> pa.Table:
    """The input: so many events."""
    return Input.named(NAME).rows(REAL_INPUT, request.param)


@pytest.fixture(scope="module")
def filled(kafka: kafka_server.Broker, rows: pa.Table) -> Topic:
    """The topic with all of it, and with what retries wrote twice."""
    made = Topic(kafka.servers, f"lines-{rows.num_rows}")
    made.create(partitions=PARTITIONS)
    with proxied(kafka) as proxy:
        kafka_retail.produce(rows, made, proxy)
        assert proxy.lost == kafka_retail.LOST
    return made


def run(kafka: kafka_server.Broker, topic: Topic, events: int, folder: Path, url: str) -> None:
    """The stream to its end: its process group gets a SIGKILL twice, the broker once."""
    store, killed = kafka_retail.opened(url), []

    def decided() -> int:
        return sum(point.sequence_number + 1 for point in store.head(CONSUMER).checkpoints.values())

    def tell(_kills: int, done: int) -> None:
        if done > 7 * events // 20 and not killed:
            kafka.kill()
            kafka.start()
            killed.append(done)

    per_batch = str(events // kafka_retail.BATCHES)
    command = [sys.executable, "-m", "kit.kafka_retail", NAME, kafka.servers, topic.name, str(folder), url, per_batch]
    kills = [supervise.Kill(events // 5, 0.5), supervise.Kill(3 * events // 5, 0.2)]
    assert supervise.run(command, folder / "log", kills, decided, tell).kills == 2
    assert killed


def check(topic: Topic, rows: pa.Table, url: str, found: pa.Table) -> None:
    """Row by row against what plain pyarrow says, and the bookkeeping."""
    source, store = Input.named(NAME), kafka_retail.opened(url)
    expected = source.expected(rows)
    lost, doubled = difference(expected, found)
    assert (lost.num_rows, doubled.num_rows, found.num_rows) == (0, 0, expected.num_rows)
    written = sum(topic.ends(partition)[1] for partition in range(PARTITIONS))
    assert written > rows.num_rows
    report, letters = verify(store, CONSUMER), store.letters(Selection(consumer=CONSUMER, limit=None), ["kind"]).num_rows
    assert report.contradictions == []
    assert letters == kafka_retail.distinct(rows).num_rows - expected.num_rows
    counts = report.counts
    assert counts["delivered"] - counts["redelivered"] == written
    assert (counts["processed"], counts["duplicate"]) == (expected.num_rows, written - expected.num_rows - letters)


@pytest.mark.crash
@pytest.mark.spark
@pytest.mark.postgres
def test_kafka_to_postgres_through_kills(kafka: kafka_server.Broker, filled: Topic, rows: pa.Table, postgres: str, tmp_path: Path) -> None:
    """0 lost, 0 doubled in PostgreSQL."""
    import psycopg

    names = Input.named(NAME).schema.names
    with psycopg.connect(postgres) as connection:
        connection.execute(f"CREATE TABLE {SINK} (" + ", ".join(f'"{name}" text' for name in names) + ")")
    run(kafka, filled, rows.num_rows, tmp_path, postgres)
    with psycopg.connect(postgres) as connection, connection.cursor().copy(f"COPY {SINK} TO STDOUT (FORMAT csv, HEADER)") as copy:
        text = pa.py_buffer(b"".join(copy))
    types = Input.named(NAME).schema
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""])
    check(filled, rows, postgres, csv.read_csv(text, convert_options=options))


@pytest.mark.crash
@pytest.mark.spark
@pytest.mark.delta
def test_kafka_to_delta_through_kills(kafka: kafka_server.Broker, filled: Topic, rows: pa.Table, tmp_path: Path) -> None:
    """0 lost, 0 doubled in Delta."""
    from deltalake import DeltaTable

    DeltaTable.create(f"{tmp_path}/{SINK}", Input.named(NAME).schema)
    run(kafka, filled, rows.num_rows, tmp_path, str(tmp_path))
    check(filled, rows, str(tmp_path), DeltaTable(f"{tmp_path}/{SINK}").to_pyarrow_table())
