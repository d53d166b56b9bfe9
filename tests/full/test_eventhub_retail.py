"""End to end: 200,000 real events in an event hub, batches that the producer repeated, Spark killed twice; then counted row by row."""

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
from kit import hub_retail, retail
from kit.eventhubs.control import Double
from kit.retail import CONSUMER, SINK

EVENTS = 200_000

pytestmark = [pytest.mark.crash, pytest.mark.spark]


def run(double: Double, folder: Path, url: str) -> None:
    """The stream to its end; its process group gets a SIGKILL twice."""
    store = hub_retail.opened(url)
    command = [sys.executable, "-m", "kit.hub_retail", double.connection_string, str(folder), url]
    kills = [supervise.Kill(EVENTS // 5, 0.5), supervise.Kill(3 * EVENTS // 5, 0.2)]

    def decided() -> int:
        return sum(point.sequence_number + 1 for point in store.head(CONSUMER).checkpoints.values())

    assert supervise.run(command, folder / "log", kills, decided).kills == 2


def check(rows: pa.Table, repeated: int, url: str, found: pa.Table) -> None:
    """Row by row against what plain pyarrow says, and the bookkeeping."""
    store, expected = hub_retail.opened(url), retail.expected([rows])
    lost, doubled = difference(expected, found)
    assert (lost.num_rows, doubled.num_rows, found.num_rows) == (0, 0, expected.num_rows)
    distinct = rows.group_by(rows.column_names).aggregate([]).num_rows
    report, letters = verify(store, CONSUMER), store.letters(Selection(consumer=CONSUMER, limit=None), ["kind"]).num_rows
    assert (report.contradictions, letters) == ([], distinct - expected.num_rows)
    counts = report.counts
    assert counts["delivered"] - counts["redelivered"] == EVENTS + repeated
    assert (counts["processed"], counts["duplicate"]) == (expected.num_rows, EVENTS + repeated - distinct)


@pytest.fixture(scope="module")
def rows(online_retail: Path) -> pa.Table:
    """The input."""
    return pa.concat_tables(retail.read(online_retail)).slice(0, EVENTS)


@pytest.mark.postgres
def test_an_event_hub_to_postgres_through_kills(eventhubs: Double, rows: pa.Table, postgres: str, tmp_path: Path) -> None:
    """0 lost, 0 doubled in PostgreSQL."""
    import psycopg

    repeated = hub_retail.produce(eventhubs, rows)
    with psycopg.connect(postgres) as connection:
        connection.execute(f"CREATE TABLE {SINK} (" + ", ".join(f'"{name}" text' for name in retail.COLUMNS) + ")")
    run(eventhubs, tmp_path, postgres)
    with psycopg.connect(postgres) as connection, connection.cursor().copy(f"COPY {SINK} TO STDOUT (FORMAT csv, HEADER)") as copy:
        text = pa.py_buffer(b"".join(copy))
    options = csv.ConvertOptions(column_types=retail.ROW, strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""])
    check(rows, repeated, postgres, csv.read_csv(text, convert_options=options))


@pytest.mark.delta
def test_an_event_hub_to_delta_through_kills(eventhubs: Double, rows: pa.Table, tmp_path: Path) -> None:
    """0 lost, 0 doubled in Delta."""
    from deltalake import DeltaTable

    repeated = hub_retail.produce(eventhubs, rows)
    DeltaTable.create(f"{tmp_path}/{SINK}", retail.ROW)
    run(eventhubs, tmp_path, str(tmp_path))
    check(rows, repeated, str(tmp_path), DeltaTable(f"{tmp_path}/{SINK}").to_pyarrow_table())
