"""Handlers of single events in Spark's tasks where one Delta commit decides: the tasks run them and write files, the driver commits."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from checkpoint.errors import BudgetExceeded, ConfigError, SinkMismatch
from deadletter.selection import Selection
from dedup import Retry
from dedup.outbox import Call, Dispatcher, Message
from dedup.pipeline.handlers import Event
from dedup.reprocessing.letters import reprocess
from kit import foreach_driver
from kit.foreach_kit import bare, frame, killed_driver, spread
from kit.orders import assert_proven, event, ids, letters, orders
from kit.places import DeltaPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.delta


@pytest.fixture
def lake(tmp_path: Path) -> DeltaPlace:
    """A folder with the sink `orders`."""
    place = DeltaPlace(tmp_path / "lake")
    place.create_sink()
    return place


@pytest.fixture(autouse=True)
def _travelling() -> Iterator[None]:
    """What handlers here use of this module goes to the tasks with them: it is not on their path."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def row(event: Event) -> dict[str, Any]:
    """What the sink gets of an order."""
    return {"id": event.data["id"], "amount": event.data["amount"]}


def test_each_partition_is_one_task_in_order_and_its_rows_are_the_files_of_the_commit(spark: SparkSession, lake: DeltaPlace) -> None:
    """Shuffled rows come to other processes than the driver's, each partition ascending to one; each wrote one file of one commit."""
    made, last = bare(lake.store(), sequence_key="data.id"), dict[int, int]()

    @made.foreach(into="orders", on="executors")
    def book(event: Event, tx: Any) -> Any:
        if event.sequence_number != last.get(event.partition, -1) + 1:
            raise ValueError(f"{event.sequence_number} after {last.get(event.partition)}")
        last[event.partition] = event.sequence_number
        return {"id": f"p{event.partition}-{event.sequence_number}", "amount": os.getpid()}

    report = made(frame(spark, *spread(range(50)), parts=7), 0)
    assert (report.processed, report.dead_lettered) == (150, 0) and not last
    rows = lake.read()
    assert len(rows) == 150 and os.getpid() not in {r["amount"] for r in rows}
    assert len({(r["id"].split("-")[0], r["amount"]) for r in rows}) == 3
    sink = DeltaTable(lake.path("orders"))
    assert sink.version() == 1 and len(sink.file_uris()) == 3
    assert made(frame(spark, *spread(range(50))), 0).redelivered == 150
    assert_proven(lake.store())


def test_failures_of_tasks_are_letters_with_their_stacks(spark: SparkSession, lake: DeltaPlace) -> None:
    """What an event raised in a task is what its letter says, also where the exception cannot travel; the same handler reprocesses it."""
    made = bare(lake.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        class Local(Exception):
            def __init__(self) -> None:
                super().__init__("not this one")
                self.lock = threading.Lock()

        if event.data["amount"] in (3, 7) and not repaired.exists():
            raise Local
        return row(event)

    repaired = lake.folder / "repaired"
    report = made(frame(spark, *spread(range(20), 2)), 0)
    assert (report.processed, report.dead_lettered) == (36, 4)
    found = letters(lake.store())
    assert [x["idempotence_key"] for x in found] == ["p0-3", "p0-7", "p1-3", "p1-7"]
    assert {(x["error_message"], x["error_type"].rpartition(".")[2]) for x in found} == {("not this one", "Local")}
    assert len({x["fingerprint"] for x in found}) == 1 and all("in book" in x["stack"] for x in found)
    repaired.touch()
    assert reprocess(Selection("shop"), made).reprocessed == 4
    assert sorted(ids(lake.read())) == sorted(f"p{p}-{n}" for p in range(2) for n in range(20))
    assert_proven(lake.store())


def test_everything_that_a_handler_says_in_a_task_is_in_the_commit(spark: SparkSession, lake: DeltaPlace) -> None:
    """Skipped and rejected events, rows of other sinks, merges in the order of positions, and messages with derived ids."""
    lake.create_merge_sink("balances")
    lake.create_sink("audit")
    made = bare(lake.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        number = event.data["amount"]
        if number == 0:
            return None
        tx.write({"id": event.data["id"], "amount": -1}, "audit")
        tx.merge({"id": f"total {event.partition}", "amount": number}, "balances", keys="id")
        tx.publish([{"body": f"{event.data['id']}/{n}", "key": f"{event.partition}"} for n in range(2)], "out", key="key")
        return row(event)

    report = made(frame(spark, *spread(range(6), 2)), 0)
    assert (report.processed, report.skipped) == (10, 2)
    assert len(lake.read()) == 10 and len(lake.read("audit")) == 10
    assert lake.read("balances") == [{"id": "total 0", "amount": 5}, {"id": "total 1", "amount": 5}]
    sent: list[Message] = []
    Dispatcher(lake.store().outbox("shop"), Call(sent.extend)).once()
    for partition in range(2):
        mine = [m for m in sent if m.key == f"{partition}".encode()]
        assert [m.body for m in mine] == [f"p{partition}-{n}/{k}".encode() for n in range(1, 6) for k in range(2)]
        assert all(m.id.endswith(f"-{n % 2}") for n, m in enumerate(mine)) and len({m.id for m in mine}) == 10


@pytest.mark.full
def test_arrow_tables_come_partition_by_partition(spark: SparkSession, lake: DeltaPlace) -> None:
    """foreach_arrow gets one partition at a time; what it rejects is parked, and a failure is searched for by halves."""
    made = bare(lake.store())

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        assert len(set(events["partition"].to_pylist())) == 1
        amounts = pc.struct_field(events["data"], "amount")
        if pc.any(pc.equal(amounts, 7)).as_py():
            raise ValueError("seven")
        good = tx.reject(events, pc.less(amounts, 2), "too little")
        return pa.table({name: pc.struct_field(good["data"], name) for name in ("id", "amount")})

    report = made(frame(spark, *orders(range(10)), *orders(range(5), partition=1)), 0)
    assert (report.processed, report.dead_lettered) == (10, 5)
    assert sorted(x["reason"] for x in letters(lake.store()) if x["kind"] == "REJECTED") == ["too little"] * 4
    assert [x["idempotence_key"] for x in letters(lake.store()) if x["kind"] != "REJECTED"] == ["p0-7"]
    assert_proven(lake.store())


def test_coroutines_in_tasks_keep_their_sequences(spark: SparkSession, lake: DeltaPlace) -> None:
    """Events of one sequence come one after the other, the others together; behind a failed one its sequence waits."""
    made = bare(lake.store(), sequence_key="data.amount")
    busy: dict[int, int] = {}

    @made.foreach(into="orders", concurrency=4)
    async def book(event: Event, tx: Any) -> Any:
        number = event.data["amount"]
        busy[number] = busy.get(number, 0) + 1
        if busy[number] > 1:
            raise AssertionError("two of one sequence at once")
        await asyncio.sleep(0.005)
        busy[number] -= 1
        if event.data["id"] == "b1":
            raise ValueError("no")
        return row(event)

    events = [event(n, f"{'ab'[n % 2]}{n}", n % 2) for n in range(10)]
    report = made(frame(spark, *events), 0)
    assert (report.processed, report.dead_lettered) == (5, 5)
    assert [(x["idempotence_key"], x["status"]) for x in letters(lake.store())] == [
        ("b1", "OPEN"),
        *((f"b{n}", "BLOCKED") for n in (3, 5, 7, 9)),
    ]


@pytest.mark.full
def test_rows_that_do_not_fit_are_their_events_fault(spark: SparkSession, lake: DeltaPlace) -> None:
    """A value of another type, and a null where none may be, park their event; a sink that is not there stops with its statement."""
    made = bare(lake.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        wrong = {3: {"id": 3, "amount": 1}, 5: {"id": None, "amount": 5}}
        return wrong.get(event.data["amount"], row(event))

    report = made(frame(spark, *orders(range(8)), *orders(range(2), partition=1)), 0)
    assert (report.processed, report.dead_lettered) == (8, 2)
    assert [x["idempotence_key"] for x in letters(lake.store())] == ["p0-3", "p0-5"]
    other = bare(lake.store(), name="other")
    other.foreach(into="missing")(lambda event, tx: row(event))
    with pytest.raises(SinkMismatch, match="Create it"):
        other(frame(spark, *orders(range(3))), 0)
    assert_proven(lake.store())


def test_a_sink_that_only_spark_may_write_gets_the_staged_files_of_tasks(spark: SparkSession, lake: DeltaPlace) -> None:
    """A CHECK constraint is judged before the commit: the row that breaks it parks its event, the others are appended by Spark."""
    DeltaTable(lake.path("orders")).alter.add_constraint({"small": "amount < 5"})
    made = bare(lake.store())
    made.foreach(into="orders")(lambda event, tx: row(event))
    report = made(frame(spark, *orders(range(6))), 0)
    assert (report.processed, report.dead_lettered) == (5, 1)
    assert ids(lake.read()) == [f"p0-{n}" for n in range(5)]
    assert_proven(lake.store())


def test_what_cannot_travel_is_told_and_the_driver_takes_it(spark: SparkSession, lake: DeltaPlace) -> None:
    """A handler with a lock is refused before anything is written; with on='driver' it runs in this process."""
    lock, made = threading.Lock(), bare(lake.store())

    def book(event: Event, tx: Any) -> Any:
        with lock:
            return {"id": event.data["id"], "amount": os.getpid()}

    made.foreach(into="orders")(book)
    with pytest.raises(ConfigError, match="on='driver'"):
        made(frame(spark, *orders(range(3))), 0)
    assert lake.store().head("shop").epoch == 0 and lake.read() == []
    made._handler = None
    made.foreach(into="orders", on="driver")(book)
    assert made(frame(spark, *orders(range(3))), 0).processed == 3
    assert {r["amount"] for r in lake.read()} == {os.getpid()}


def test_a_module_that_tasks_do_not_have_is_nobodys_fault(
    spark: SparkSession, lake: DeltaPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is parked where tasks cannot import what the handler uses; the error says what to do."""
    (tmp_path / "only_on_the_driver.py").write_text("def book(event, tx): return event.data")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = bare(lake.store())
    made.foreach(into="orders")(importlib.import_module("only_on_the_driver").book)
    with pytest.raises(ConfigError, match=r"only_on_the_driver.*py-?[fF]iles"):
        made(frame(spark, *spread(range(3))), 0)
    assert letters(lake.store()) == [] and lake.read() == []


def test_a_flood_in_tasks_is_held_back_by_the_budget(spark: SparkSession, lake: DeltaPlace) -> None:
    """A bug that fails every event parks nothing."""
    made = bare(lake.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        raise ValueError("always")

    with pytest.raises(BudgetExceeded, match="ValueError: always"):
        made(frame(spark, *spread(range(100))), 0)
    assert letters(lake.store()) == [] and lake.store().head("shop").checkpoints == {}


@pytest.mark.full
@pytest.mark.crash
def test_an_event_that_kills_its_worker_is_found_by_halves(spark: SparkSession, lake: DeltaPlace) -> None:
    """Its letter says that the worker died; the others are written."""
    made = bare(lake.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.sequence_number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return row(event)

    assert made(frame(spark, *orders(range(3))), 0).processed == 2
    (letter,) = letters(lake.store())
    assert letter["idempotence_key"] == "p0-2" and "Python worker exited unexpectedly" in letter["error_message"]


@pytest.mark.crash
def test_an_event_whose_worker_was_killed_once_is_no_letter(spark: SparkSession, lake: DeltaPlace) -> None:
    """Somebody else may have killed it, out of memory for one: the event is tried again before it is blamed, also where it is alone."""
    made, mark = bare(lake.store()), lake.folder / "killed"

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row(event)

    assert made(frame(spark, *orders(range(1))), 0).processed == 1
    assert letters(lake.store()) == [] and ids(lake.read()) == ["p0-0"]
    assert_proven(lake.store())


@pytest.mark.full
@pytest.mark.crash
def test_a_worker_that_is_killed_leaves_nothing_and_the_batch_comes_again(spark: SparkSession, lake: DeltaPlace) -> None:
    """SIGKILL of the Python process in the middle of a batch: nothing of it is true, and the next delivery is whole."""
    made, mark = bare(lake.store(), bisect=False, retry=Retry(attempts=1)), lake.folder / "killed"

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.partition == 1 and event.sequence_number == 15 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row(event)

    with pytest.raises(Exception, match=r"(?i)worker"):
        made(frame(spark, *spread(range(30))), 0)
    assert lake.read() == [] and lake.store().head("shop").checkpoints == {}
    assert made(frame(spark, *spread(range(30))), 0).processed == 90
    assert len(lake.read()) == 90 and not letters(lake.store())
    assert_proven(lake.store())


@pytest.mark.full
@pytest.mark.crash
def test_tasks_are_tried_again_and_a_driver_that_dies_leaves_nothing_of_its_batch(
    spark: SparkSession, lake: DeltaPlace, tmp_path: Path
) -> None:
    """Of tasks that Spark runs twice one attempt's files are committed; files of a killed driver's tasks are nobody's."""
    killed_driver(lake, tmp_path)
    assert sorted(ids(lake.read())) == sorted(f"p{p}-{n}" for p in range(2) for n in range(20))
    (tmp_path / "resume").touch()
    second = bare(lake.store())
    second.foreach(into="orders")(lambda event, tx: row(event))
    assert second(frame(spark, *foreach_driver.events(1)), 1).processed == 40
    assert sorted(ids(lake.read())) == sorted(f"p{p}-{n}" for p in range(2) for n in range(40))
    assert_proven(lake.store())
