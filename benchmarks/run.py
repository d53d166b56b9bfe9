"""The parts of a run, each with folders and a database of its own that are gone afterwards."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks import (
    checkpoint_stores,
    commit_path,
    delta,
    delta_tasks,
    duplicates,
    empty,
    eventhubs,
    failures,
    foreach,
    letters,
    markers,
    memory,
    objectstore,
    outbox,
    postgres,
    postgres_tasks,
    runner,
    storage,
)
from benchmarks.report import Measure
from benchmarks.stream import Seconds, Sizes
from dedup.postgres import PostgresStore
from dedup.spark.session import JDBC, local_session

Part = Callable[[Any, Path, str, Sizes], tuple[list[Measure], Seconds]]
"""(Spark session, empty folder, DSN of a server, sizes) -> measures, and the seconds of every batch behind them."""

HEAP = {"spark.driver.memory": "4g"}
"""Large batches of several ways go through one JVM here, one after another."""


def run(sizes: Sizes, parts: list[str]) -> tuple[list[Measure], Seconds]:
    """The measures of these parts. Raises AssertionError where a way has not written what it promises."""
    spark = local_session("dedup benchmarks", packages=(JDBC,), **HEAP)
    measures: list[Measure] = []
    seconds: Seconds = {}
    with server() as dsn, tempfile.TemporaryDirectory(prefix="dedup-bench-") as home:
        for name in parts:
            folder = Path(home, name)
            folder.mkdir()
            print(f"{time.strftime('%H:%M')} {name}", file=sys.stderr, flush=True)
            found, taken = PARTS[name](spark, folder, dsn, sizes)
            print("\n".join(f"      {m.measure} {m.ratio:.2f}" for m in found), file=sys.stderr, flush=True)
            measures += found
            seconds |= taken
    return measures, seconds


@contextmanager
def server(settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """DSN of a PostgreSQL server: the one that DEDUP_TEST_POSTGRES names, or one that is started with these settings and removed again."""
    if dsn := os.environ.get("DEDUP_TEST_POSTGRES"):
        yield dsn
        return
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from kit.pg_server import running_server

    with running_server(settings=settings) as started:
        yield started.dsn


@contextmanager
def database(dsn: str, like: str | None = None) -> Iterator[str]:
    """DSN of a new database on that server, dropped afterwards.

    Args:
        like: DSN of one that nobody is connected to; it is copied.
    """
    name = f"dedup_bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        template = "" if like is None else f" TEMPLATE {conninfo_to_dict(like)['dbname']} STRATEGY file_copy"
        connection.execute(f"CREATE DATABASE {name}{template}".encode())
        try:
            yield make_conninfo(dsn, dbname=name)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def _postgres_empty(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    with database(dsn) as own, closing(PostgresStore(own)) as store:
        postgres.create_sinks(own)
        return empty.compare(spark, "postgres", store, folder, sizes)


def _delta_empty(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    delta.create_tables(folder)
    with closing(delta.store(folder)) as store:
        return empty.compare(spark, "delta", store, folder, sizes)


def _on_postgres(part: Callable[[Any, str, Path, Sizes], tuple[list[Measure], Seconds]]) -> Part:
    def run_part(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
        """Run the part in a database of its own."""
        with database(dsn) as own:
            return part(spark, own, folder, sizes)

    return run_part


PARTS: dict[str, Part] = {
    "postgres": _on_postgres(postgres.compare),
    "postgres_tasks": _on_postgres(postgres_tasks.compare),
    "delta": lambda spark, folder, dsn, sizes: delta.compare_appends(spark, folder, sizes),
    "delta_large": lambda spark, folder, dsn, sizes: delta.compare_large(spark, folder, sizes),
    "delta_tasks": lambda spark, folder, dsn, sizes: delta_tasks.compare(spark, folder, sizes),
    "delta_tasks_large": lambda spark, folder, dsn, sizes: delta_tasks.compare_large(spark, folder, sizes),
    "merge": lambda spark, folder, dsn, sizes: delta.compare_merge(spark, folder, sizes),
    "merge_many": lambda spark, folder, dsn, sizes: delta.compare_merge_many(spark, folder, sizes),
    "duplicates": duplicates.compare,
    "duplicates_large": duplicates.compare_large,
    "commit_path": _on_postgres(commit_path.compare),
    "storage": _on_postgres(storage.compare),
    "objectstore": objectstore.compare,
    "markers": lambda spark, folder, dsn, sizes: markers.compare(spark, folder, sizes),
    "memory": lambda spark, folder, dsn, sizes: memory.compare(spark, dsn, folder, sizes),
    "postgres_empty": _postgres_empty,
    "delta_empty": _delta_empty,
    "one_bad": _on_postgres(failures.one_bad),
    "all_rejected": _on_postgres(failures.all_rejected),
    "letters": _on_postgres(letters.compare),
    "eventhubs": lambda spark, folder, dsn, sizes: eventhubs.compare(spark, folder, sizes),
    "checkpoints": _on_postgres(checkpoint_stores.compare),
    "runner": _on_postgres(runner.compare),
    "outbox_commit": _on_postgres(outbox.compare_commits),
    "foreach": _on_postgres(foreach.compare),
    "outbox_dispatch": _on_postgres(outbox.compare_dispatch),
}
