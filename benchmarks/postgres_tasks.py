"""PostgreSQL: handlers of events in Spark's tasks beside a JDBC append, and beside a bare `mapInArrow` that calls the same function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from benchmarks.delta_tasks import ARROW, FOREACH, book, load
from benchmarks.events import ORDER, ORDER_DDL, Topic, decoded, land
from benchmarks.ours import bare_consumer
from benchmarks.postgres import COLUMNS, jdbc, verify
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup import Consumer
from dedup.postgres import PostgresStore

JDBC, FLOOR = "jdbc_append", "floor"

HANDLERS = (ARROW, FOREACH)


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Arrow tables beside an append, and single events beside their floor, all beginning empty. Verified."""
    topic = Topic(duplicates=sizes.duplicates)
    land((topic.batch(sizes.events) for _ in range(sizes.batches)), folder / "topic")
    _create(dsn)
    with ExitStack() as stack:
        ways: dict[str, Way] = {JDBC: jdbc(dsn, JDBC), FLOOR: _floor(dsn)}
        ways |= {name: _consumer(stack.enter_context(closing(PostgresStore(dsn, schema=f"dedup_{name}"))), name) for name in HANDLERS}
        taken = contest(spark, folder / "topic", ways, sizes.warm)
    for name in ways:
        verify(dsn, name, topic.facts, once=name in HANDLERS)
    measures = [
        throughput("postgres/foreach_arrow_vs_jdbc", taken[ARROW], taken[JDBC], sizes.events),
        throughput("postgres/foreach_vs_floor", taken[FOREACH], taken[FLOOR], sizes.events),
    ]
    return measures, {f"postgres/foreach, {name}": seconds for name, seconds in taken.items()}


def _create(dsn: str) -> None:
    """One table for each way, without a key."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in (JDBC, FLOOR, *HANDLERS):
            connection.execute(f"CREATE TABLE {name} ({COLUMNS.format(key='')})".encode())


def _consumer(store: PostgresStore, kind: str) -> Consumer:
    made = bare_consumer(store)
    if kind == FOREACH:
        made.foreach(into=FOREACH)(book)
    else:
        made.foreach_arrow(into=ARROW)(load)
    return made


def _floor(dsn: str) -> Way:
    """A function of single events by hand: it is called for each decoded row in tasks, and what it returns is appended by JDBC."""

    def call(row: dict[str, Any]) -> dict[str, Any]:
        """The row of one event, as `book` returns it."""
        return row

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that the function returns, batch by batch."""
        for batch in batches:
            yield pa.RecordBatch.from_pylist([call(row) for row in batch.to_pylist()], ORDER)

    return jdbc(dsn, FLOOR, lambda batch: decoded(batch).mapInArrow(each, ORDER_DDL))
