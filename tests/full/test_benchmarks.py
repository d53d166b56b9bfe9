"""The benchmarks at tiny sizes: they run, they check what was written, and what they tell has the form that is read elsewhere.

How long anything takes is not looked at.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.usefixtures("benchmarks")

BY_HAND = ("on_conflict", "staged_on_conflict", "jdbc_append", "copy_floor")

NAMES = {
    "postgres/jdbc_append",
    "postgres/on_conflict",
    "postgres/copy_floor",
    "delta/append",
    "delta/append_txn",
    "delta/merge_1m",
    "postgres/empty_batch",
    "delta/empty_batch",
    "postgres/one_bad_in_50k",
    *(f"postgres/all_rejected{which}" for which in ("", "_positions", "_unique", "_floor")),
    "postgres/list_1m_letters",
    "postgres/group_1m_letters",
    "postgres/bytes_per_reservation",
    "eventhubs/source_vs_client",
    "eventhubs/runner_vs_blob",
    "eventhubs/runner_vs_blob_receive",
    "eventhubs/checkpoint_calls",
    "outbox/commit_path",
    "outbox/commit_path_floor",
    "outbox/dispatch_vs_producer",
    "postgres/growth",
    "delta/growth",
    "postgres/bytes_per_packed_key",
    "postgres/packed_first_100m",
    "postgres/packed_known_100m",
    "postgres/packed_lookup_100m",
    "delta/restart_100m_s",
    "delta/restart_100m_mb",
    "postgres/purge_beside",
    "delta/purge_beside",
    "delta/markers_year",
    "objectstore/requests_small_batch",
    "objectstore/append",
    "postgres/commit_path_vs_copy",
    "postgres/staged_on_conflict",
    *(f"postgres/{way}{size}_duplicates_{share}" for way in BY_HAND for size in ("", "_500k") for share in (0, 50)),
    *(f"postgres/{way}_500k" for way in BY_HAND),
    *(f"delta/{way}{size}_duplicates_{share}" for way in ("append", "append_txn") for size in ("", "_500k") for share in (0, 50)),
    "delta/append_500k",
    "delta/append_500k_in_tasks",
    "delta/merge_10m",
    "foreach/scaling",
    *(f"{store}/driver_memory_{events}k" for store in ("postgres", "delta") for events in (10, 50, 100, 500)),
}


@pytest.mark.delta
def test_every_part_on_delta_runs_and_is_verified(spark: SparkSession, tmp_path: Path) -> None:
    """Appends, MERGE and almost empty batches: the ways write what they promise, and each measure is told once, in the right form."""
    from benchmarks.run import PARTS
    from benchmarks.stream import Sizes

    sizes, told = Sizes(events=40, batches=2, warm=1, keys=100, rounds=2, empty=2), []
    for name in ("delta", "merge", "markers", "delta_empty"):
        (tmp_path / name).mkdir()
        measures, seconds = PARTS[name](spark, tmp_path / name, "", sizes)
        told += measures
        assert all(len(taken) == 1 for taken in seconds.values())
    assert {m.measure for m in told} == {f"delta/{name}" for name in ("append", "append_txn", "merge_1m", "markers_year", "empty_batch")}
    for m in told:
        assert m.better == ("lower" if m.measure.endswith(("empty_batch", "markers_year")) else "higher")
        assert m.ratio == pytest.approx(m.ours / m.other, rel=0.1, abs=0.02)


@pytest.mark.objects
def test_requests_to_object_storage_are_counted(tmp_path: Path) -> None:
    """Through the proxy, in processes of their own: a small batch stays within the demanded number, and both ways are verified."""
    from benchmarks import objectstore
    from benchmarks.stream import Sizes

    requests, append = objectstore.compare(None, tmp_path, "", Sizes(events=40, batches=2, warm=1))[0]
    assert (requests.measure, append.measure) == ("objectstore/requests_small_batch", "objectstore/append")
    assert 5 <= requests.ours <= 12 and requests.better == "lower" and append.better == "higher"


def test_postgres_by_hand_and_by_copy_are_verified(
    spark: SparkSession, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, ON CONFLICT in both forms and COPY against a real server. JDBC needs a driver that only `make bench` has."""
    from benchmarks import postgres as ways
    from benchmarks.stream import INSIDE, Sizes

    monkeypatch.setattr(ways, "jdbc", lambda dsn: ways.copied(dsn, "jdbc_append"))
    measures, seconds = ways.compare(spark, postgres, tmp_path, Sizes(events=40, batches=2, warm=1, duplicates=0.5))
    names = {f"postgres/{name}" for name in ("jdbc_append", "on_conflict", "staged_on_conflict", "copy_floor")}
    assert {m.measure for m in measures} == names
    assert {name for name in seconds if INSIDE not in name} == {"postgres/ours", *names}
    with psycopg.connect(postgres) as connection:
        counts = "select (select count(*) from orders), (select count(*) from staged_on_conflict), (select count(*) from copy_floor)"
        assert connection.execute(counts).fetchone() == (40, 40, 80)


def test_failing_batches_are_verified(spark: SparkSession, postgres: str, tmp_path: Path) -> None:
    """One bad event and nothing but bad ones: each is a letter, the others are in the sink, and a missing letter is seen."""
    from benchmarks import failures
    from benchmarks.events import Facts
    from benchmarks.run import database
    from benchmarks.stream import Sizes

    sizes, bad = Sizes(events=20, batches=4, warm=2), {"one_bad": 2, "all_rejected": 40}
    for part in (failures.one_bad, failures.all_rejected):
        with database(postgres) as dsn:
            measures, seconds = part(spark, dsn, tmp_path / part.__name__, sizes)
            assert len(measures) == (4 if part is failures.all_rejected else 1)
            assert all((m.unit, m.better) == ("s", "lower") and m.measure.startswith(f"postgres/{part.__name__}") for m in measures)
            assert all(len(taken) == 1 for taken in seconds.values()) and len(seconds) == 2 * len(measures)
            with pytest.raises(AssertionError, match=rf"rows={bad[part.__name__]}, .* expected"):
                failures.verify_letters(dsn, Facts())


def test_handlers_of_events_in_one_and_two_partitions_are_verified(spark: SparkSession, postgres: str, tmp_path: Path) -> None:
    """Both ways write every order once, and the CPU that they took is told."""
    from benchmarks import foreach
    from benchmarks.stream import Sizes

    (measure,), seconds = foreach.compare(spark, postgres, tmp_path, Sizes(events=40, batches=2, warm=1))
    assert (measure.measure, measure.better) == ("foreach/scaling", "higher")
    assert [len(taken) for taken in seconds.values()] == [1] * 4 and all(taken[0] > 0 for taken in seconds.values())


@pytest.mark.timeout(1200)
def test_a_job_on_one_worker_and_on_two_is_verified(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of handlers, both stores, a cluster of two workers: each way writes every order once, and each measure is told once."""
    from benchmarks import cluster

    monkeypatch.setenv("DEDUP_TEST_POSTGRES", postgres)
    measures, seconds = cluster.compare(["delta", "postgres"], cluster.Scaling(events=40, batches=2, warm=1, rounds=1))
    names = [f"cluster/scaling_{store}{kind}" for store in ("delta", "postgres") for kind in ("", "_arrow")]
    assert [(m.measure, m.better) for m in measures] == [(name, "higher") for name in names]
    assert [len(taken) for taken in seconds.values()] == [1] * 8


def test_letters_are_listed_and_grouped_as_they_are(postgres: str, tmp_path: Path) -> None:
    """What is timed answers rightly; a group that lacks letters does not pass."""
    from benchmarks import letters
    from benchmarks.stream import Sizes

    measures, _ = letters.compare(None, postgres, tmp_path, Sizes(letters=400, batches=3, warm=1))
    assert {m.measure for m in measures} == {"postgres/list_1m_letters", "postgres/group_1m_letters"}
    with psycopg.connect(postgres, autocommit=True) as connection, letters.closing(letters.PostgresStore(postgres)) as store:
        connection.execute("DELETE FROM dedup.letter_count")
        with pytest.raises(AssertionError, match="groups"):
            letters._verify(store, connection, 400)


@pytest.mark.azurite
@pytest.mark.eventhubs
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_runner_and_the_loop_it_is_compared_with_write_everything(postgres: str, tmp_path: Path) -> None:
    """Both bring every event of the hub to the table; a way that loses rows does not pass."""
    from benchmarks import runner as ways
    from benchmarks.stream import Sizes

    measures, seconds = ways.compare(None, postgres, tmp_path, Sizes(events=200, rounds=2))
    assert [m.measure for m in measures] == ["eventhubs/runner_vs_blob", "eventhubs/runner_vs_blob_receive"]
    assert all(len(taken) == 1 for taken in seconds.values())
    ways.create_sink(postgres)
    assert ways.count(postgres) == 0


@pytest.mark.azurite
def test_checkpoint_stores_are_verified(postgres: str, tmp_path: Path) -> None:
    """Both stores keep what a processor wrote; a store that loses a checkpoint does not pass."""
    from benchmarks import checkpoint_stores as ways
    from benchmarks.stream import Sizes
    from checkpoint import PostgresCheckpointStore

    (measure,), seconds = ways.compare(None, postgres, tmp_path, Sizes(batches=2, warm=1))
    assert (measure.measure, measure.unit, measure.better) == ("eventhubs/checkpoint_calls", "calls/s", "higher")
    assert [len(taken) for taken in seconds.values()] == [1, 1]
    with PostgresCheckpointStore(postgres, schema="other") as store, pytest.raises(AssertionError, match="a checkpoint was lost"):
        ways._processor(store)(5)
        ways._processor(store)(4)


def test_the_source_of_event_hubs_is_verified(
    spark: SparkSession, eventhubs: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source and bare client count the same events, and what the double could serve is told with whether the ratio counts."""
    from benchmarks import eventhubs as ways
    from benchmarks.stream import Sizes

    (measure,), seconds = ways.compare(spark, tmp_path, Sizes(events=40, batches=1, warm=1))
    assert (measure.measure, measure.unit, measure.better) == ("eventhubs/source_vs_client", "events/s", "higher")
    assert [len(taken) for taken in seconds.values()] == [2, 2]
    out = capsys.readouterr().out
    assert "the double's ceiling is" in out and "so many partitions: 1:" in out


def test_a_lost_or_doubled_order_is_seen(tmp_path: Path) -> None:
    """A table that lacks an order, or has one twice, does not pass."""
    from benchmarks import delta
    from benchmarks.events import ORDER, Facts

    rows = pa.Table.from_pylist([{"order_id": "a", "customer": 1}, {"order_id": "b", "customer": 2}], schema=ORDER)
    write_deltalake(str(tmp_path), rows)
    delta.verify(tmp_path, Facts(rows=3, orders=2, customers=3), once=True)
    for wrong in (Facts(3, 3, 3), Facts(3, 2, 4)):
        with pytest.raises(AssertionError, match="expected"):
            delta.verify(tmp_path, wrong, once=True)
    write_deltalake(str(tmp_path), rows.slice(0, 1), mode="append")
    delta.verify(tmp_path, Facts(rows=3, orders=2, customers=3), once=False)
    with pytest.raises(AssertionError, match="expected"):
        delta.verify(tmp_path, Facts(rows=3, orders=2, customers=3), once=True)
    assert DeltaTable(str(tmp_path)).version() == 1


def test_the_input_is_what_is_said_of_it() -> None:
    """50,000 events of 200 bytes, one in a hundred a duplicate, in offset order, and the facts about them are right."""
    from benchmarks.events import PARTITIONS, Topic

    topic = Topic()
    batches = [topic.batch(50_000) for _ in range(2)]
    events = pa.concat_tables([table for batch in batches for table in batch])
    orders = [json.loads(body) for body in events["value"].to_pylist()]
    customers = {order["order_id"]: order["customer"] for order in orders}
    assert {len(body) for body in events["value"].to_pylist()} == {200}
    assert (topic.facts.rows, topic.facts.orders) == (len(orders), len(customers)) == (100_000, 99_000)
    assert topic.facts.customers == sum(customers.values())
    for partition in range(PARTITIONS):
        assert events.filter(pc.equal(events["partition"], partition))["offset"].to_pylist() == list(range(25_000))


def test_latest_json_has_every_measure_and_its_form(tmp_path: Path) -> None:
    """The keys that are read elsewhere, in the file of the last run and in the next one."""
    from benchmarks import report

    lines = json.loads((ROOT / "benchmarks" / "latest.json").read_text())
    assert {line["measure"] for line in lines} == NAMES
    assert {tuple(line) for line in lines} == {("measure", "ours", "other", "unit", "ratio", "better")}
    measures = [report.throughput("m", [1.0, 2.0, 9.0], [4.0], 100), report.latency("n", [0.002], [0.001])]
    report.save(measures, tmp_path / "latest.json")
    assert json.loads((tmp_path / "latest.json").read_text()) == [dataclasses.asdict(m) for m in measures]
    assert [(m.ours, m.other, m.ratio) for m in measures] == [(50, 25, 2.0), (2.0, 1.0, 2.0)]


def test_the_committed_numbers_are_those_of_the_table() -> None:
    """benchmarks/README.md shows the ratios of latest.json."""
    text = (ROOT / "benchmarks" / "README.md").read_text().split("## The last run")[1]
    for m in json.loads((ROOT / "benchmarks" / "latest.json").read_text()):
        name = re.sub(r"(_500k)?(_duplicates_\d+|_500k$)", "", m["measure"].split("/")[1])  # those have columns of one table
        assert name in text and f"{m['ratio']:.2f}" in text, m


@pytest.mark.kafka
def test_the_outbox_and_what_it_is_compared_with_send_everything(spark: SparkSession, postgres: str, tmp_path: Path) -> None:
    """Batches with and without messages write the same rows and as many messages as orders; dispatcher and producer send all of them."""
    from benchmarks import outbox as ways
    from benchmarks.run import database
    from benchmarks.stream import Sizes

    sizes = Sizes(events=200, batches=2, warm=1, rounds=2)
    with database(postgres) as dsn:
        measures, seconds = ways.compare_commits(spark, dsn, tmp_path, sizes)
    more, others = ways.compare_dispatch(spark, postgres, tmp_path, sizes)
    assert [m.measure for m in (*measures, *more)] == [
        "outbox/commit_path",
        "outbox/commit_path_floor",
        "outbox/dispatch_vs_producer",
    ]
    assert [len(taken) for taken in (*seconds.values(), *others.values())] == [2] * 3 + [1] * 2
