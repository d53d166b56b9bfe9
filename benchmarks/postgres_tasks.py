"""PostgreSQL: handlers of events in Spark's tasks beside a JDBC append, and beside a bare `mapInArrow` that calls the same function."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.delta_tasks import ARROW, FOREACH, called, handling
from benchmarks.events import Topic, land
from benchmarks.postgres import COLUMNS, jdbc, verify
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup.postgres import PostgresStore

JDBC, FLOOR = "jdbc_append", "floor"

HANDLERS = (ARROW, FOREACH)


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Arrow tables beside an append, and single events beside their floor, all beginning empty. Verified."""
    topic = Topic(duplicates=sizes.duplicates)
    land((topic.batch(sizes.events) for _ in range(sizes.batches)), folder / "topic")
    _create(dsn)
    with ExitStack() as stack:
        ways: dict[str, Way] = {JDBC: jdbc(dsn, JDBC), FLOOR: jdbc(dsn, FLOOR, called)}
        for name in HANDLERS:
            ways[name] = handling(stack.enter_context(closing(PostgresStore(dsn, schema=f"dedup_{name}"))), name, name)
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
