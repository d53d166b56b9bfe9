"""The first action of Spark fails, then the second, then the third ... until a whole run of a query passes without a fault.

After each: the query is started again from its checkpoint and runs to its end; rows, letters and merged rows are compared with a
computation that uses none of the code under test, and `verify` proves the tables.
"""

from __future__ import annotations

import os
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crash import child, lane, log
from dedup import Consumer
from dedup.demo.input import ENVELOPE_DDL
from fixtures import fix_postgres
from kit.orders import consumer
from kit.places import DeltaPlace, Place, PostgresPlace, SparkPlace
from kit.spark_calls import Actions, Way, counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.crash, pytest.mark.spark]

SEED, MARKS = 6, 1000
"""Of the log; values of merged rows."""

PASSED = "passed"


def by_frames(made: Consumer) -> None:
    """A handler whose frames are jobs: a condition in Python, a join, and rows that a Python worker has had in hand."""
    from pyspark.sql import functions as F

    def as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    negative = F.udf(lambda amount: amount < 0, "boolean")

    @made.foreach_batch
    def load(rows: DataFrame, tx: Any) -> None:
        rest = tx.reject(rows, negative("data.amount"), "negative")
        flat = rest.select("data.id", "data.amount").mapInArrow(as_they_are, "id string, amount bigint")
        for name in child.SINKS:
            tx.write(flat, name)
        accounts = rows.sparkSession.range(5).selectExpr("id number", "concat('b', id) account")
        found = flat.join(accounts, F.crc32(F.col("id").cast("binary")) % 5 == F.col("number"))
        mark = F.crc32(F.col("id").cast("binary")) % MARKS
        tx.merge(found.select(F.col("account").alias("id"), mark.alias("amount")), "balances", ["id"], newer_by="amount")


def by_events(made: Consumer) -> None:
    """The same by single events, in the tasks."""
    marks = MARKS

    @made.foreach(into="orders")
    def book(event: Any, tx: Any) -> Any:
        row = {"id": event.data["id"], "amount": event.data["amount"]}
        if row["amount"] < 0:
            raise ValueError("negative")
        tx.write(row, "audit")
        key = zlib.crc32(row["id"].encode())
        tx.merge({"id": f"b{key % 5}", "amount": key % marks}, "balances", ["id"], newer_by="amount")
        return row


def land(folder: Path, batches: int) -> Path:
    """The log, a file for each batch."""
    folder.mkdir()
    for number in range(batches):
        file = folder / f"{number:06}.parquet"
        pq.write_table(log.planned(SEED, number), file)
        os.utime(file, (1_000_000_000 + number,) * 2)
    return folder


@pytest.fixture(autouse=True)
def mark_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row of `balances` holds depends on the key alone; nothing is left in `latest`, into which these handlers do not merge."""
    monkeypatch.setattr(log.Fact, "mark", property(lambda fact: zlib.crc32(fact.key.encode()) % MARKS))
    monkeypatch.setattr(log.Fact, "leaves", True)


@pytest.fixture
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Makes empty places with sinks; databases are dropped afterwards."""
    folders: dict[str, type[DeltaPlace]] = {"delta": DeltaPlace, "delta-spark": SparkPlace}
    databases = ExitStack()

    def new(kind: str) -> Place:
        name = f"spark_{uuid.uuid4().hex}"
        if kind in folders:
            place: Place = folders[kind](tmp_path / name)
        else:
            server, template = map(request.getfixturevalue, ("postgres_server", "migrated"))
            place = PostgresPlace(databases.enter_context(fix_postgres.database(server, template=template)))
        child.create(place)
        return place

    with databases:
        yield new


def run_query(landing: Path, checkpoint: Path, place: Place, handler: Callable[[Consumer], None], actions: Actions, patience: float) -> str:
    """One life of the query: what it ended with. Nothing is remembered of an earlier one but what is in the tables and its checkpoint."""
    from pyspark.errors import StreamingQueryException
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    assert spark is not None
    store: Any = place.store()
    made = consumer(store, budget=None, query=None, max_outage=patience, takeover=True)
    made._handler = None
    handler(made)

    def watched(rows: DataFrame, batch_id: int) -> None:
        with actions.watched():
            made(rows, batch_id)

    stream = spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 1).parquet(str(landing))
    query = stream.writeStream.foreachBatch(watched).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        return _name(str(error))
    finally:
        store.close()
    return PASSED


def _name(text: str) -> str:
    """Of the error in Python that ended a query."""
    lines = [line for line in text.splitlines() if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    return lines[-1].split(":")[0].rpartition(".")[2] if lines else text[:200]


@dataclass(frozen=True)
class Case:
    """Where it runs, and how."""

    kind: str
    handler: Callable[[Consumer], None]
    batches: int  # in the log; with the first one the tables are made
    actions: int  # a run has at least so many
    ways: int = 1  # of the test of some actions, for each of them
    stride: int = 1  # of the same: only every so many

    def __str__(self) -> str:
        return f"{self.kind}, {self.handler.__name__.removeprefix('by_')}"


CASES = [
    Case("delta", by_frames, 2, 10, stride=3),
    Case("postgres", by_frames, 2, 10, stride=3),
    Case("delta", by_events, 2, 6, ways=2),
    Case("postgres", by_events, 2, 2, ways=3),
    Case("delta-spark", by_frames, 1, 80, stride=40),
]

EACH_CASE = pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=getattr(pytest.mark, case.kind.partition("-")[0])) for case in CASES]
)


@dataclass
class Runs:
    """Queries over the log, each in an empty place, in which one action fails."""

    case: Case
    landing: Path
    folder: Path
    new_place: Callable[[str], Place]
    actions: Actions
    ended: Counter[str] = field(default_factory=Counter)

    def fails(self, number: int, way: Way, patience: float = 0.0) -> bool:
        """Whether the run has so many actions. If so, it was started again where it ended, and everything is there once.

        With `patience` the consumer must have tried again by itself.
        """
        place, checkpoint = self.new_place(self.case.kind), self.folder / f"{way} {number}"
        self.actions.arm(number, way)
        how = run_query(self.landing, checkpoint, place, self.case.handler, self.actions, patience)
        failed, seen = self.actions.failed, self.actions.seen
        self.actions.arm(0, way)
        what = f"action {number} of {seen} ({failed}), {way}, ended with {how}"
        print(self.case, what)
        assert how == PASSED or not patience, what
        if how != PASSED:
            assert run_query(self.landing, checkpoint, place, self.case.handler, self.actions, 0.0) == PASSED, what
        wrong = lane.wrong(place, SEED, self.case.batches)
        assert wrong == ([], [], []), f"{what}: {wrong}"
        self.ended[how if failed else "no fault"] += 1
        return bool(failed)

    def check(self, number: int) -> None:
        """After the run that passed, which has fewer than `number` actions."""
        print(self.case, number - 1, "actions", dict(self.ended))
        assert number > self.case.actions, "fewer actions than there are jobs"
        assert self.actions.stray == 0, "Spark was asked for something that was not counted"
        assert set(self.ended) <= {PASSED, "no fault", *ERRORS}, self.ended


ERRORS = ("Py4JJavaError", "Py4JNetworkError", "StoreUnavailable", "CommitUnknown")
"""What a query may end with."""


@pytest.fixture
def runs(spark: SparkSession, tmp_path: Path, new_place: Callable[[str], Place]) -> Iterator[Callable[[Case], Runs]]:
    """Makes them for a case."""
    with counted(spark) as actions:
        yield lambda case: Runs(case, land(tmp_path / "landing", case.batches), tmp_path, new_place, actions)


@EACH_CASE
@pytest.mark.full
def test_actions_of_spark_may_fail(case: Case, runs: Callable[[Case], Runs]) -> None:
    """Job, read or commit of Spark: it fails, or its answer is lost; the query is started again, and every row is there once."""
    made, turns, number = runs(case), cycle(get_args(Way)), case.stride
    while all(made.fails(number, way) for way in islice(turns, case.ways)):
        number += case.stride
    made.check(number)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@EACH_CASE
@pytest.mark.parametrize(
    ("way", "patience"),
    [*((way, 0.0) for way in get_args(Way)), ("executor lost", 30.0)],  # no waiting helps with a job that fails, or a JVM that has ended
    ids=[*get_args(Way), "executor lost, tried again"],
)
def test_each_action_of_spark_may_fail(case: Case, way: Way, patience: float, runs: Callable[[Case], Runs]) -> None:
    """The first one, the second one, the third one ... in every way; the consumer tries again by itself, or the query is started again."""
    made, number = runs(case), 1
    while made.fails(number, way, patience):
        number += 1
    made.check(number)
