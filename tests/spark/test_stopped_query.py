"""A query that is stopped, or whose job is cancelled, while its handler runs: no event is at fault."""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dedup import Consumer, SparkGone
from dedup.demo.input import ENVELOPE_DDL
from fixtures.fix_places import BOTH, Place, of_stores
from kit.orders import assert_proven, batch, consumer, event, letters, orders
from kit.places import PostgresPlace
from kit.sparks import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SLOW, PATIENCE = 30.0, 240.0
"""Seconds: of a handler that is stopped; for something to happen."""


def count(mark: Path) -> None:
    """Note a run of the handler, beside the mark."""
    with mark.with_name("runs").open("a") as runs:
        runs.write("x")


def by_frames(made: Consumer, mark: Path, seconds: float) -> None:
    """A job in whose Python worker the time passes."""

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mark.touch()
        time.sleep(seconds)
        yield from batches

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        count(mark)
        tx.write(rows.select("data.id", "data.amount").mapInArrow(slowly, "id string, amount bigint"), "orders")


def by_events(made: Consumer, mark: Path, seconds: float) -> None:
    """In the tasks."""

    @made.foreach(into="orders")
    def book(event: Any, tx: Any) -> Any:
        mark.touch()
        time.sleep(seconds)
        return event.data


def started(
    spark: SparkSession, place: Place, folder: Path, handler: Any, seconds: float, ended: list[Exception] | None = None, name: str = "mark"
) -> Any:
    """A query in the middle of its first batch; `ended` gets what the consumer raises.

    Args:
        name: of the mark. A worker of a query that was stopped may come late, and must not make the one of the next query.
    """
    mark, made = folder / name, consumer(place.store(), query=None, max_outage=3600.0)
    mark.unlink(missing_ok=True)
    made._handler = None
    handler(made, mark, seconds)

    def callback(rows: Any, number: int) -> None:
        try:
            made(rows, number)
        except Exception as error:
            (ended if ended is not None else []).append(error)
            raise

    stream = spark.readStream.schema(ENVELOPE_DDL).parquet(str(folder / "landing")).writeStream.foreachBatch(callback)
    query = stream.option("checkpointLocation", str(folder / "query")).start()
    until = time.monotonic() + PATIENCE
    while not mark.exists():
        assert query.isActive and time.monotonic() < until, query.exception()
        time.sleep(0.02)
    return query


def stop(spark: SparkSession, query: Any) -> None:
    """As every deployment does."""
    query.stop()


def cancel(spark: SparkSession, query: Any) -> None:
    """As somebody does who looks at Spark's own pages."""
    spark.sparkContext.cancelAllJobs()
    with pytest.raises(Exception, match=r"cancell?ed"):
        query.awaitTermination(int(PATIENCE))


def wait_for_an_error(ended: list[Exception]) -> None:
    """The callback's thread may go on for a moment after its query has ended."""
    until = time.monotonic() + PATIENCE
    while not ended and time.monotonic() < until:
        time.sleep(0.02)


def is_a_stop_to_spark(ended: list[Exception]) -> bool:
    """Whether the query ends without an error: Spark looks for these words, and overflows a stack where much text follows them."""
    wait_for_an_error(ended)
    (error,) = ended
    _, _, behind = "".join(traceback.format_exception(error)).partition("py4j.protocol.Py4JJavaError: An error occurred while calling")
    return isinstance(error, SparkGone) and "java.lang.InterruptedException" in behind and len(behind) < 100


@pytest.mark.parametrize(
    ("place", "how"),
    [
        *of_stores({"delta": [(by_frames, cancel)], "postgres": [(by_events, stop)]}),
        *of_stores(
            {
                "delta": [(by_frames, stop), (by_events, stop), (by_events, cancel)],
                "postgres": [(by_frames, stop), (by_frames, cancel), (by_events, cancel)],
            },
            full=True,
        ),
    ],
    indirect=["place"],
    ids=lambda value: " ".join(one.__name__ for one in value) if isinstance(value, tuple) else None,
)
def test_who_stops_a_query_parks_nothing(spark: SparkSession, place: Place, tmp_path: Path, how: Any) -> None:
    """However often the handler of the only events is stopped in the middle: it is not run again by then, and none of them is a letter."""
    handler, ends = how
    if how == (by_frames, cancel):
        require("4.0", "word of a cancelled job where its rows come to the driver")
    (tmp_path / "landing").mkdir()
    pq.write_table(batch(*orders([0, 1])), tmp_path / "landing/0.parquet")
    for number in (1, 2):
        ended: list[Exception] = []
        query = started(spark, place, tmp_path, handler, SLOW, ended, f"mark-{number}")
        ends(spark, query)
        assert handler is by_events or (tmp_path / "runs").read_text() == "x" * number, "it ran once each time"
        assert not query.isActive and letters(place.store()) == [] and place.read() == []
        assert ends is cancel or is_a_stop_to_spark(ended)
    if isinstance(place, PostgresPlace) and handler is by_events:
        kept = place.execute("select marker from dedup.crash_marker where marker is not null and scope <> ''")
        assert kept and all('"running": null' in marker and '"deaths": 0' in marker for (marker,) in kept)
    query = started(spark, place, tmp_path, handler, 0.0)
    query.processAllAvailable()
    query.stop()
    assert sorted(row["id"] for row in place.read()) == ["p0-0", "p0-1"]
    assert_proven(place.store())


def in_an_outage(made: Consumer, mark: Path, seconds: float) -> None:
    """Nobody can handle anything."""

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        mark.touch()
        raise OSError(errno.ENOSPC, "made up")


@pytest.mark.full
@pytest.mark.parametrize("place", BOTH, indirect=True)
def test_a_stopped_query_tries_its_batch_no_longer(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """In an outage the callback goes on in a thread of Python's, of which Spark knows nothing once the query is stopped: it ends soon."""
    (tmp_path / "landing").mkdir()
    pq.write_table(batch(*orders([0])), tmp_path / "landing/0.parquet")
    ended: list[Exception] = []
    query, mark, until = started(spark, place, tmp_path, in_an_outage, 0.0, ended), tmp_path / "mark", time.monotonic() + PATIENCE
    for _ in range(3):  # while it runs, it goes on trying
        mark.unlink()
        while not mark.exists() and time.monotonic() < until:
            time.sleep(0.02)
    assert mark.exists() and ended == [] and query.isActive
    query.stop()
    wait_for_an_error(ended)
    assert [type(error) for error in ended] == [SparkGone] and letters(place.store()) == []


def failing_once_it_is_stopped(made: Consumer, mark: Path, seconds: float) -> None:
    """What it was doing broke off, whatever it was."""

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        mark.touch()
        until = time.monotonic() + PATIENCE
        while not (mark.parent / "stopped").exists() and time.monotonic() < until:
            time.sleep(0.02)
        raise ValueError("broken off")


@pytest.mark.parametrize("place", BOTH, indirect=True)
def test_what_a_handler_raises_after_its_query_was_stopped_says_nothing(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """The only event is not at fault, whatever the handler says once nobody waits for it."""
    (tmp_path / "landing").mkdir()
    pq.write_table(batch(*orders([0])), tmp_path / "landing/0.parquet")
    ended: list[Exception] = []
    query, until = started(spark, place, tmp_path, failing_once_it_is_stopped, 0.0, ended), time.monotonic() + PATIENCE
    stopping = threading.Thread(target=query.stop)  # it waits for the handler
    stopping.start()
    while query.isActive and time.monotonic() < until:
        time.sleep(0.02)
    (tmp_path / "stopped").touch()
    stopping.join(PATIENCE)
    wait_for_an_error(ended)
    assert [type(error) for error in ended] == [SparkGone] and "query was stopped" in str(ended[0]) and letters(place.store()) == []


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_a_job_group_of_the_user_changes_nothing(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """Where the callback and its handler name groups of their own, one bad event is parked, and the query keeps its one epoch."""
    (tmp_path / "landing").mkdir()
    for number, events in enumerate(([event(0, "bad", -1), event(1, "p0-1", 1)], orders([2]))):
        pq.write_table(batch(*events), tmp_path / f"landing/{number}.parquet")
        os.utime(tmp_path / f"landing/{number}.parquet", (number, number))
    made, epochs = consumer(place.store(), query=None, max_outage=3600.0), list[int]()
    made._handler = None

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        spark.sparkContext.setJobGroup("handler", "made up")
        if rows.where("data.amount < 0").count():
            raise ValueError("negative")
        tx.write(rows.select("data.*"), "orders")

    def callback(rows: Any, number: int) -> None:
        spark.sparkContext.setJobGroup(f"orders-{number}", "made up")
        made(rows, number)
        epochs.append(made.store.head(made.name).epoch)

    stream = spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "landing"))
    writer = stream.writeStream.foreachBatch(callback).option("checkpointLocation", str(tmp_path / "query"))
    assert writer.trigger(availableNow=True).start().awaitTermination(int(PATIENCE)), "it still runs"
    assert sorted(row["id"] for row in place.read()) == ["p0-1", "p0-2"]
    assert [letter["sequence_number"] for letter in letters(place.store())] == [0]
    assert len(epochs) == 2 and len(set(epochs)) == 1
    assert_proven(place.store())
