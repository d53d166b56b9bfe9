"""PostgreSQL: ours beside Spark's JDBC append, INSERT ... ON CONFLICT by hand, row by row and staged, and COPY without any key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pgpq
import psycopg
import pyarrow as pa

from benchmarks.events import Facts, Topic, decoded, land
from benchmarks.ours import SINK, consumer
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes, Way, contest
from dedup.postgres import PostgresStore

COLUMNS = "order_id text{key}, customer bigint, amount double precision, placed_at timestamptz, note text"

KEYED = ("on_conflict", "staged_on_conflict")
"""Tables with a unique key."""

INSERT = "INSERT INTO on_conflict (order_id, customer, amount, placed_at, note) VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"


STAGED = "CREATE TEMP TABLE staged (LIKE {table}) ON COMMIT DROP"

INSERT_STAGED = "INSERT INTO {table} SELECT * FROM staged ON CONFLICT DO NOTHING"


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """The four measures of throughput, verified; and the seconds of every batch."""
    topic = Topic(duplicates=sizes.duplicates)
    land([topic.batch(sizes.events) for _ in range(sizes.batches)], folder / "topic")
    create_sinks(dsn)
    others = {
        "jdbc_append": jdbc(dsn),
        "on_conflict": _on_conflict(dsn),
        "staged_on_conflict": staged(dsn),
        "copy_floor": copied(dsn),
    }
    with closing(PostgresStore(dsn)) as store:
        taken = contest(spark, folder / "topic", {"ours": consumer(store), **others}, sizes.warm)
    for name in (SINK, *others):
        verify(dsn, name, topic.facts, once=name in (SINK, *KEYED))
    measures = [throughput(f"postgres/{name}", taken["ours"], taken[name], sizes.events) for name in others]
    return measures, {f"postgres/{name}": seconds for name, seconds in taken.items()}


def create_sinks(dsn: str) -> None:
    """One table for each way; only ON CONFLICT needs a key on it, in both forms."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in (SINK, "jdbc_append", "copy_floor"):
            connection.execute(f"CREATE TABLE {name} ({COLUMNS.format(key='')})".encode())
        for name in KEYED:
            connection.execute(f"CREATE TABLE {name} ({COLUMNS.format(key=' PRIMARY KEY')})".encode())


def verify(dsn: str, table: str, expected: Facts, *, once: bool) -> None:
    """Raise AssertionError unless the table holds exactly the input, each order once or as often as it was delivered."""
    orders = f"(SELECT order_id, max(customer) AS customer FROM {table} GROUP BY order_id) AS orders"
    with psycopg.connect(dsn) as connection:
        found = connection.execute(f"SELECT (SELECT count(*) FROM {table}), count(*), sum(customer)::bigint FROM {orders}".encode())
        facts = Facts(*(found.fetchone() or ()))
    wanted = Facts(expected.orders if once else expected.rows, expected.orders, expected.customers)
    assert facts == wanted, f"{table}: {facts}, expected {wanted}"


def jdbc(dsn: str, table: str = "jdbc_append", make: Callable[[Any], Any] = decoded) -> Way:
    """Spark's JDBC writer.

    Args:
        make: from a batch to the rows that are appended.
    """
    with psycopg.connect(dsn) as connection:
        info = connection.info
        options = {
            "url": f"jdbc:postgresql://{info.host}:{info.port}/{info.dbname}?reWriteBatchedInserts=true",
            "user": info.user,
            "password": info.password,
            "driver": "org.postgresql.Driver",
            "dbtable": table,
        }

    def append(batch: Any, batch_id: int) -> None:
        """Append the batch by Spark's JDBC writer."""
        make(batch).write.format("jdbc").options(**options).mode("append").save()

    return append


def _on_conflict(dsn: str) -> Way:
    statement = INSERT  # what is nested here travels to the tasks whole, without this module

    def insert(rows: Iterator[Any]) -> None:
        """Insert the rows of one partition by executemany, in one transaction."""
        import psycopg

        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            cursor.executemany(statement, rows)

    return lambda batch, batch_id: decoded(batch).foreachPartition(insert)


def staged(dsn: str, table: str = "staged_on_conflict") -> Way:
    """The quickest way by hand: COPY into a temporary table, then one INSERT ... ON CONFLICT."""
    stage, insert = STAGED.format(table=table).encode(), INSERT_STAGED.format(table=table).encode()

    def way(batch: Any, batch_id: int) -> None:
        """Stage the batch by COPY, then insert what the table does not have."""
        rows = decoded(batch).toArrow()
        with psycopg.connect(dsn) as connection:
            connection.execute(stage)
            copy_rows(connection, "staged", rows)
            connection.execute(insert)

    return way


def copy_rows(connection: psycopg.Connection[Any], table: str, rows: pa.Table) -> None:
    """One COPY of these rows."""
    encoder = pgpq.ArrowToPostgresBinaryEncoder(rows.schema)
    with connection.cursor().copy(f"COPY {table} FROM STDIN (FORMAT binary)".encode()) as out:
        out.write(encoder.write_header())
        for part in rows.to_batches(max_chunksize=16_384):
            out.write(encoder.write_batch(part))
        out.write(encoder.finish())


def copied(dsn: str, table: str = "copy_floor") -> Way:
    """One COPY without a key: at least once."""

    def way(batch: Any, batch_id: int) -> None:
        """COPY the batch into the table."""
        rows = decoded(batch).toArrow()
        with psycopg.connect(dsn) as connection:
            copy_rows(connection, table, rows)

    return way
