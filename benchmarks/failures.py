"""What failing events cost on PostgreSQL: batches with one bad event and of nothing but bad ones, each beside the clean batch before it."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.events import PARTITIONS, Facts, Topic, land
from benchmarks.ours import SINK, consumer
from benchmarks.postgres import create_sinks, verify
from benchmarks.report import Measure, slowness
from benchmarks.stream import Seconds, Sizes, run_query
from dedup import FailurePolicy
from dedup.pipeline.tx import Handler
from dedup.postgres import PostgresStore

BAD = "data.amount < 0"


def one_bad(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """The handler raises where it is given a bad event; every second batch has one, somewhere else each time, and bisect finds it."""
    draw = np.random.default_rng(7)
    bad = [draw.integers(sizes.events, size=1) for _ in range(sizes.batches // 2)]
    return _compare(spark, dsn, folder, sizes, "postgres/one_bad_in_50k", _raise, bad)


FEWER = {
    "positions": ("dead_letter_pkey", "dead_letter_key", "dead_letter_waiting"),
    "unique": ("dead_letter_pkey", "dead_letter_key"),
    "floor": (),
}
"""Indexes of letters that are kept, for measures of what each costs: find one by id, judge a key, and give a range of positions."""


def all_rejected(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """The handler rejects bad events: all of every second batch. As it is, and with fewer indexes on the letters, down to none."""
    from benchmarks.run import database

    measures, seconds = _rejected(spark, dsn, folder / "all", sizes, "postgres/all_rejected")
    for name, kept in FEWER.items():
        with database(dsn) as own:
            _keep_indexes(own, kept)
            found, taken = _rejected(spark, own, folder / name, sizes, f"postgres/all_rejected_{name}")
        measures, seconds = measures + found, seconds | taken
    return measures, seconds


def _rejected(spark: Any, dsn: str, folder: Path, sizes: Sizes, name: str) -> tuple[list[Measure], Seconds]:
    return _compare(spark, dsn, folder, sizes, name, _reject, [np.arange(sizes.events)] * (sizes.batches // 2))


def _keep_indexes(dsn: str, kept: tuple[str, ...]) -> None:
    """New tables whose letters have no index but these, and no trigger that counts."""
    with closing(PostgresStore(dsn)) as store:
        store.migrate()
    with psycopg.connect(dsn) as connection:
        constraints = "SELECT conname FROM pg_constraint WHERE conrelid = 'dedup.dead_letter'::regclass AND contype IN ('p', 'u')"
        for (name,) in connection.execute(constraints).fetchall():
            if name not in kept:
                connection.execute(f"ALTER TABLE dedup.dead_letter DROP CONSTRAINT {name} CASCADE".encode())
        for (name,) in connection.execute("SELECT indexname FROM pg_indexes WHERE tablename = 'dead_letter'").fetchall():
            if name not in kept:
                connection.execute(f"DROP INDEX dedup.{name}".encode())
        connection.execute("ALTER TABLE dedup.dead_letter DISABLE TRIGGER USER")


def _raise(orders: Any, tx: Any) -> None:
    if orders.where(BAD).take(1):
        raise ValueError("an order cannot cost less than nothing")
    tx.write(orders.select("data.*"), SINK)


def _reject(orders: Any, tx: Any) -> None:
    good = tx.reject(orders, BAD, "an order cannot cost less than nothing")
    tx.write(good.select("data.*"), SINK)


def _compare(
    spark: Any, dsn: str, folder: Path, sizes: Sizes, name: str, handler: Handler, bad: list[Any]
) -> tuple[list[Measure], Seconds]:
    """One query over clean and bad batches in turn. Raises AssertionError unless each event is in the sink or a letter, once."""
    create_sinks(dsn)
    topic, wrong = Topic(duplicates=0.0), Facts()
    for number, rows in enumerate(bad):
        clean, spoilt = topic.batch(sizes.events), topic.batch(sizes.events)
        wrong = _added(wrong, spoilt, rows)
        land([clean, _spoil(spoilt, rows)], folder / "topic", first=2 * number)
    taken: list[float] = []
    with closing(PostgresStore(dsn)) as store:
        ours = consumer(store, handler, failure=FailurePolicy(budget=None))

        def timed(batch: Any, batch_id: int) -> None:
            """Process the batch, and note its seconds."""
            begun = time.perf_counter()
            ours(batch, batch_id)
            taken.append(time.perf_counter() - begun)

        run_query(spark, folder / "topic", timed, folder / "checkpoint", files=PARTITIONS)
    facts = topic.facts
    verify(dsn, SINK, Facts(facts.rows - wrong.rows, facts.orders - wrong.orders, facts.customers - wrong.customers), once=True)
    verify_letters(dsn, wrong)
    warm = sizes.warm // 2
    counted: Seconds = {"clean": taken[::2][warm:], "bad": taken[1::2][warm:]}
    return [slowness(name, counted["bad"], counted["clean"])], {f"{name}, {kind}": seconds for kind, seconds in counted.items()}


def verify_letters(dsn: str, expected: Facts) -> None:
    """Raise AssertionError unless exactly these orders are open letters, each once."""
    body = "convert_from(body, 'UTF8')::json"
    statement = (
        f"SELECT count(*), count(DISTINCT idempotence_key), sum(({body}->>'customer')::bigint) FROM dedup.dead_letter WHERE status = 'OPEN'"
    )
    with psycopg.connect(dsn) as connection:
        found = Facts(*(int(value or 0) for value in connection.execute(statement.encode()).fetchone() or ()))
    assert found == expected, f"letters: {found}, expected {expected}"


def _spoil(tables: list[pa.Table], rows: Any) -> list[pa.Table]:
    """These rows of the tables, counted through, with amounts below nothing."""
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    return [
        _negative(table, rows[(rows >= start) & (rows < end)] - start)
        for table, start, end in zip(tables, starts, starts[1:], strict=False)
    ]


def _negative(table: pa.Table, rows: Any) -> pa.Table:
    chosen = np.isin(np.arange(table.num_rows), rows)
    values = pc.if_else(pa.array(chosen), pc.replace_substring(table["value"], b'"amount":', b'"amount":-'), table["value"])
    return table.set_column(table.column_names.index("value"), table.schema.field("value"), values)


def _added(wrong: Facts, tables: list[pa.Table], rows: Any) -> Facts:
    bodies = pa.concat_tables(tables)["value"].take(pa.array(rows)).to_pylist()
    customers = sum(json.loads(body)["customer"] for body in bodies)
    return Facts(wrong.rows + len(rows), wrong.orders + len(rows), wrong.customers + customers)
