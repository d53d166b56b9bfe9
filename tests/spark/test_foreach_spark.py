"""Handlers of single events through Spark, in its tasks, with one promise: on PostgreSQL they commit there, on Delta they write files."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import BudgetExceeded, ConfigError, PositionGap
from dedup import Consumer, DeadLetters, Encrypt, Selection, reprocess
from dedup.core.store import Store
from dedup.pipeline.handlers import Event
from dedup.postgres import PostgresStore
from fixtures.variants import of_which
from kit import foreach_driver
from kit.foreach_kit import bare, frame, killed_driver, spread
from kit.orders import assert_proven, event, ids, letters, orders
from kit.pg_proxy import until
from kit.places import Place, PostgresPlace
from kit.redacting import OLD, Vault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVERS = 3
"""Connections of the driver's own."""


@pytest.fixture
def base(postgres: str) -> PostgresPlace:
    """A database with the sink `orders`."""
    place = PostgresPlace(postgres)
    place.create_sink()
    return place


def each(store: Store, *bad: str, on: Any = None, connections: int | None = None, **settings: Any) -> Consumer:
    """Writes each order; skips amount 0; raises for bad ids."""
    made = bare(store, **settings)

    @made.foreach(into="orders", on=on, connections=connections)
    def book(event: Event, tx: Any) -> Any:
        if event.data["id"] in bad:
            raise ValueError(f"cannot book {event.data['id']}")
        return {"id": event.data["id"], "amount": event.data["amount"]} if event.data["amount"] else None

    return made


@pytest.mark.full
def test_each_partition_commits_by_itself_and_all_of_it_adds_up(spark: SparkSession, place: Place) -> None:
    """New, skipped, failing and repeated events of three partitions: one effect each, proven from the tables, also when delivered again."""
    events = spread(range(40))
    made = each(place.store(), "p0-3", "p2-7")
    report = made(frame(spark, *events), 0)
    assert (report.processed, report.skipped, report.dead_lettered) == (115, 3, 2)
    again = made(frame(spark, *events), 0)
    assert (again.redelivered, again.processed) == (120, 0)
    assert sorted(ids(place.read())) == sorted(f"p{p}-{n}" for p in range(3) for n in range(1, 40) if (p, n) not in ((0, 3), (2, 7)))
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-3", "p2-7"]
    assert_proven(place.store())


@pytest.mark.full
def test_letters_of_real_tasks_are_sealed(spark: SparkSession, place: Place) -> None:
    """The function that has the keys travels to the tasks, not the keys; each letter opens on the driver, and is run."""
    made = each(place.store(), "p0-3", "p2-7", redact=Encrypt(lambda: OLD))
    assert made(frame(spark, *spread(range(10))), 0).dead_lettered == 2
    for row in letters(place.store()):
        shown = DeadLetters(place.store(), Encrypt(OLD)).show(row["id"])
        assert b"amount" not in row["body"] and shown.json["id"] == row["idempotence_key"]
        assert f"cannot book {row['idempotence_key']}" in shown.row["error_message"] and "cannot book" not in str(row)
    assert reprocess(Selection(limit=None), each(place.store(), redact=Encrypt(OLD))).reprocessed == 2
    assert_proven(place.store())


@pytest.mark.postgres
def test_what_hides_letters_has_to_travel(spark: SparkSession, base: PostgresPlace) -> None:
    """A lock in it cannot be sent to tasks: the error says so before anything is handled."""
    vault = Vault()
    vault.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be sent to Spark's tasks: TypeError: cannot pickle"):
        each(base.store(), redact=vault)(frame(spark, *spread(range(3))), 0)
    assert (base.read(), letters(base.store())) == ([], [])


@pytest.mark.postgres
@pytest.mark.parametrize("scratch", of_which(1, ["abfss://nowhere", None]), ids=["shuffled", "kept"])
def test_a_partition_is_one_task_in_order_however_it_came(spark: SparkSession, base: PostgresPlace, scratch: str | None) -> None:
    """Seven shuffled Spark partitions: every partition's events come to one process that is not the driver, ascending, chunk by chunk.

    Their rows are kept in files, or come by a shuffle where no folder is shared.
    """
    made, last = bare(base.store(), max_events_per_transaction=16, scratch=scratch), dict[int, int]()

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        before = last.get(event.partition, -1)
        last[event.partition] = event.sequence_number
        if event.sequence_number != before + 1:
            raise ValueError(f"{event.sequence_number} after {before}")
        return {"id": str(event.partition), "amount": os.getpid()}

    report = made(frame(spark, *spread(range(50)), parts=7), 0)
    assert (report.processed, report.dead_lettered) == (150, 0) and not last
    workers = {(r["id"], r["amount"]) for r in base.read()}
    assert len(workers) == 3 and os.getpid() not in {pid for _, pid in workers} and len({pid for _, pid in workers}) == 2
    records = base.store().batches("shop").to_pylist()
    for partition in range(3):
        chunks = [(r["chunk"], r["seen"][0]["first"], r["seen"][-1]["last"]) for r in records if r["partition"] == partition]
        assert chunks == [(0, 0, 15), (1, 16, 31), (2, 32, 47), (3, 48, 49)]
    assert_proven(base.store())


@pytest.mark.parametrize("soon", [False, pytest.param(True, marks=pytest.mark.full)], ids=["at once", "coroutine"])
def test_the_driver_hands_out_events_of_scratch_files_in_order(
    spark: SparkSession, place: Place, tmp_path_factory: pytest.TempPathFactory, soon: bool
) -> None:
    """Seven shuffled Spark partitions in files, of which Spark keeps no order: each partition's events still come ascending."""
    scratch = str(tmp_path_factory.mktemp("scratch"))
    made, seen = bare(place.store(), collect=False, scratch=scratch, sequence_key="data.amount"), list[tuple[int, int]]()

    def book(event: Event, tx: Any) -> Any:
        seen.append((event.partition, event.sequence_number))
        return {"id": event.data["id"], "amount": 1}

    async def book_soon(event: Event, tx: Any) -> Any:
        return book(event, tx)

    made.foreach(into="orders", on="driver")(book_soon if soon else book)
    same = [e | {"body": e["body"].replace(b'"amount": ', b'"amount": 7, "n": ')} for e in spread(range(40))]
    assert made(frame(spark, *same, parts=7), 0).processed == 120
    for partition in range(3):
        assert [n for p, n in seen if p == partition] == list(range(40))


@pytest.mark.postgres
def test_arrow_tables_and_connections_in_tasks(spark: SparkSession, base: PostgresPlace) -> None:
    """foreach_arrow gets one partition at a time; tx.connection is its transaction's, and a failing handler undoes it with all else."""
    made = bare(base.store(), bisect=False)

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        partition = events["partition"][0].as_py()
        tx.connection.execute("insert into orders values (%s, -1)", [f"seen {partition}"])
        if set(events["partition"].to_pylist()) != {partition} or partition == 2:
            raise KeyError("not this one")
        rest = tx.skip(events, pc.equal(pc.struct_field(events["data"], "amount"), 0))
        return pa.table({name: pc.struct_field(rest["data"], name) for name in ("id", "amount")})

    with pytest.raises(KeyError, match="not this one"):
        made(frame(spark, *spread(range(5))), 0)
    assert sorted(ids(base.read())) == ["p0-1", "p0-2", "p0-3", "p0-4", "p1-1", "p1-2", "p1-3", "p1-4", "seen 0", "seen 1"]


READ = "select coalesce(idx_scan, 0) + coalesce(seq_scan, 0) from pg_stat_user_tables where relname = 'reservation_filter_part'"
"""How often parts of stored filters were read."""


@pytest.mark.full
@pytest.mark.postgres
def test_tasks_load_the_filters_of_packed_tables(spark: SparkSession, base: PostgresPlace) -> None:
    """Each process of tasks loads the filters that are stored there; of many keys each known one is found, and no new one is lost."""
    made = bare(base.store())

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        return pa.table({name: pc.struct_field(events["data"], name) for name in ("id", "amount")})

    made(frame(spark, *orders(range(1, 5_001))), 0)
    store = PostgresStore(base.url)
    store.rotate_reservations()
    assert store.pack_reservations() == 1
    late = [event(n, f"p0-{n - 100}", n - 100) for n in range(5_001, 10_101)]
    again = made(frame(spark, *late), 1)
    assert (again.duplicates, again.processed) == (100, 5_000)
    until(lambda: int(base.execute(READ)[0][0]) > 0)
    assert len(set(ids(base.read()))) == len(base.read()) == 10_000
    assert_proven(base.store())


@pytest.mark.postgres
def test_what_cannot_travel_is_told_before_anything_is_written(spark: SparkSession, base: PostgresPlace) -> None:
    """A handler that holds a lock is refused with the way out, which works; so is on='executors' where there are no positions."""
    lock, made = threading.Lock(), bare(base.store())

    def book(event: Event, tx: Any) -> Any:
        with lock:
            return {"id": event.data["id"], "amount": 1}

    made.foreach(into="orders")(book)
    with pytest.raises(ConfigError, match="on='driver'"):
        made(frame(spark, *orders(range(3))), 0)
    assert base.store().head("shop").epoch == 0 and base.read() == []
    made._handler = None
    made.foreach(into="orders", on="driver")(book)
    assert made(frame(spark, *orders(range(3))), 0).processed == 3
    with pytest.raises(ConfigError, match="positions=None"):
        each(base.store(), on="executors", positions=None)(frame(spark, *orders(range(3))), 1)


@pytest.mark.full
@pytest.mark.postgres
def test_connections_have_a_cap_and_a_database_with_fewer_is_refused(spark: SparkSession, base: PostgresPlace, tmp_path: Path) -> None:
    """With connections=2 one task runs at a time, with two sessions, which go with it; a database without room for two tasks is told."""
    made = bare(base.store())

    @made.foreach(into="orders", connections=2)
    def book(event: Event, tx: Any) -> Any:
        row = tx.connection.execute("select count(*) from pg_stat_activity where datname = current_database()").fetchone()
        mine = tmp_path / str(event.partition)
        if event.sequence_number == 0:
            mine.touch()
            time.sleep(1)  # time for a second task, if there were one
        at_once = len(list(tmp_path.iterdir()))
        if event.sequence_number == 3:
            mine.unlink()
        return {"id": f"{at_once} at once, {'few' if row[0] <= 2 + DRIVERS else row[0]} sessions", "amount": event.sequence_number}

    assert made(frame(spark, *spread(range(4))), 0).processed == 12
    assert {r["id"] for r in base.read()} == {"1 at once, few sessions"}
    made.store.close()
    others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    until(lambda: base.execute(others) == [(0,)])  # a server is not done with a session when its client is
    # Five: base.execute keeps one session, the driver has another.
    base.execute("do $$ begin execute format('alter database %I connection limit 5', current_database()); end $$")
    other = each(base.store(), name="other")
    with pytest.raises(ConfigError, match="use 4 connections at once, and PostgreSQL has 3"):
        other(frame(spark, *orders([100])), 1)
    assert "other" not in other.store.consumers()
    other.store.close()
    assert each(base.store(), connections=2)(frame(spark, *orders([100])), 1).processed == 1


@pytest.mark.full
@pytest.mark.postgres
def test_connections_stay_with_their_process_from_batch_to_batch(spark: SparkSession, base: PostgresPlace) -> None:
    """Where every core may have its connections, a Python worker opens them once, and a restart takes them for room of its own tasks."""
    made = bare(base.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        return {"id": str(os.getpid()), "amount": tx.connection.execute("select pg_backend_pid()").fetchone()[0]}

    for number in range(3):
        made(frame(spark, *spread(range(4 * number, 4 * number + 4))), number)
    pairs = [(r["id"], r["amount"]) for r in base.read()]
    assert len(pairs) == 36 and len(set(pairs)) == len({process for process, _ in pairs}) <= 4
    made.store.close()
    # Ten: base.execute keeps one session, the driver of the restart has another, and four tasks have two each.
    base.execute("do $$ begin execute format('alter database %I connection limit 10', current_database()); end $$")
    assert each(base.store())(frame(spark, *spread(range(12, 16))), 3).processed == 12


@pytest.mark.full
@pytest.mark.postgres
def test_a_gap_is_refused_before_anything_is_written(spark: SparkSession, base: PostgresPlace) -> None:
    """Another query that begins behind one partition's checkpoint commits nothing of the others; one that comes later is told, too."""
    each(base.store())(frame(spark, *spread(range(3))), 0)
    later = each(base.store(), query="later")
    with pytest.raises(PositionGap, match=r"orders/2 .*3-8"):
        later(frame(spark, *orders(range(3, 5)), *orders(range(9, 11), partition=2)), 0)
    assert max(base.store().head("shop").checkpoints.values(), key=lambda c: c.sequence_number).sequence_number == 2
    assert later(frame(spark, *orders(range(3, 5))), 0).processed == 2
    with pytest.raises(PositionGap, match=r"orders/2 .*3-8"):
        later(frame(spark, *orders(range(9, 11), partition=2)), 1)
    assert_proven(base.store())


@pytest.mark.postgres
def test_slices_count_against_one_budget(spark: SparkSession, base: PostgresPlace, tmp_path: Path) -> None:
    """Two slices of 60 failing events at the same time: each alone is within the budget, both are not, and one of them commits nothing."""
    made = bare(base.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        (tmp_path / str(event.partition)).touch()
        while len(list(tmp_path.iterdir())) < 2:
            pass  # until the other one is in its transaction
        raise ValueError("an outage")

    with pytest.raises(BudgetExceeded, match="with those of other partitions"):
        made(frame(spark, *spread(range(60), 2)), 0)
    assert len(letters(base.store())) == 60
    assert_proven(base.store())


@pytest.mark.postgres
def test_after_a_slice_over_the_budget_no_other_one_begins(spark: SparkSession, base: PostgresPlace) -> None:
    """One task has both slices: where the first is over the budget, the second one commits nothing although all its events are good."""
    made = bare(base.store())

    @made.foreach(into="orders", connections=2)
    def book(event: Event, tx: Any) -> Any:
        if event.partition == 0:
            raise ValueError("an outage")
        return {"id": event.data["id"], "amount": 1}

    with pytest.raises(BudgetExceeded, match="None of this batch was parked"):
        made(frame(spark, *orders(range(120)), *orders(range(5), partition=1)), 0)
    assert letters(base.store()) == [] and base.read() == []


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.crash
def test_a_worker_that_is_killed_leaves_nothing_and_the_batch_comes_again(spark: SparkSession, base: PostgresPlace, tmp_path: Path) -> None:
    """SIGKILL of the Python process in the second chunk of a slice: the first chunk stands, the rest comes with the next delivery."""
    made, mark = bare(base.store(), max_events_per_transaction=10), tmp_path / "killed"

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.sequence_number == 15 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": event.data["id"], "amount": 1}

    events = orders(range(30))
    with pytest.raises(Exception, match=r"(?i)worker"):
        made(frame(spark, *events), 0)
    assert len(base.read()) == 10 and not base.store().head("shop").batch_ended
    report = made(frame(spark, *events), 0)
    assert (report.redelivered, report.processed) == (10, 20) and base.store().head("shop").batch_ended
    assert sorted(ids(base.read())) == sorted(f"p0-{n}" for n in range(30))
    assert_proven(base.store())


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.crash
def test_who_is_ended_beside_a_killer_is_not_taken_for_one(spark: SparkSession, base: PostgresPlace, tmp_path: Path) -> None:
    """Spark ends the other tasks of a job with the one that dies: from the second time on slices run alone, and one event is parked."""
    made, beside, tries = bare(base.store(), query="q"), tmp_path / "beside", 0

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.data["id"] == "p0-1":
            until = time.monotonic() + 3
            while not beside.exists() and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if event.partition == 1:
            beside.touch()
            time.sleep(6)
        return {"id": event.data["id"], "amount": 1}

    report = None
    while report is None and tries < 9:
        beside.unlink(missing_ok=True)
        tries += 1
        with contextlib.suppress(Exception):  # the workers that died
            report = made(frame(spark, *orders(range(3)), *orders([0], partition=1), parts=2), 0)
    assert tries > 3 and report is not None and report.dead_lettered == 1
    assert [(x["idempotence_key"], x["kind"]) for x in letters(base.store())] == [("p0-1", "CRASHED")]
    assert sorted(ids(base.read())) == ["p0-0", "p0-2", "p1-0"]
    assert_proven(base.store())


@pytest.mark.full
@pytest.mark.postgres
def test_a_batch_without_events_is_a_batch(spark: SparkSession, base: PostgresPlace) -> None:
    """Empty batches are recorded: the state does not look restored to the batch after them."""
    made = each(base.store())
    made(frame(spark, *orders(range(3))), 0)
    for number in (1, 2):
        made(frame(spark), number)
    assert base.store().head("shop").batch_id == 2
    assert made(frame(spark, *orders(range(3, 5))), 3).processed == 2
    assert_proven(base.store())


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.crash
def test_tasks_that_die_after_a_commit_and_a_driver_that_dies_in_a_batch(spark: SparkSession, base: PostgresPlace, tmp_path: Path) -> None:
    """Spark tries tasks again that were killed after their commit; a second driver does the batch in which the first one was killed."""
    killed_driver(base, tmp_path)
    assert (tmp_path / "tried").read_text() == "24 16", "what the first attempts committed was dropped by the second ones"
    first = len(base.read())
    second = each(base.store())
    report = second(frame(spark, *foreach_driver.events(1)), 1)
    (tmp_path / "resume").touch()
    assert report.processed + report.redelivered == 40
    assert report.redelivered >= first - 40, "its tasks outlive a killed driver for a moment, and may commit once more"
    assert sorted(ids(base.read())) == sorted(f"p{p}-{n}" for p in range(2) for n in range(40))
    assert_proven(base.store())
