"""PostgreSQL's commit path alone: prepared Arrow rows in, everything committed, beside plain COPY of the same rows under a unique key.

Neither side decodes or knows of Spark. Ours writes reservations, sink, batch record and checkpoint; COPY can take no row twice, so there
are no duplicates among these events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from benchmarks import postgres
from benchmarks.events import Topic
from benchmarks.ours import SINK, arrow_consumer
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes
from checkpoint.head import Run
from checkpoint.holders import take_epoch
from dedup import Consumer
from dedup.decode.prepare import prepare_events
from dedup.pipeline.batch import EvaluatedArrow
from dedup.pipeline.commit import Chunk, commit_chunk, index_of, reached
from dedup.postgres import PostgresStore

KEYED = "copy_with_key"

Rows = tuple[EvaluatedArrow, pa.Table]
"""A batch as the consumer prepares it, and the rows of it that a sink gets."""


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Batches go to both in turns. Verified; and the seconds of every batch."""
    postgres.create_sinks(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection, closing(PostgresStore(dsn)) as store:
        connection.execute(f"CREATE TABLE {KEYED} ({postgres.COLUMNS.format(key=' PRIMARY KEY')})".encode())
        topic, made = Topic(duplicates=0.0), arrow_consumer(store)
        ways = {"ours": _ours(made, store), "copy": _copy(connection)}
        seconds: Seconds = {name: [] for name in ways}
        for number in range(sizes.batches):
            rows = _prepared(made, store, pa.concat_tables(topic.batch(sizes.events)))
            for name in sorted(ways, reverse=bool(number % 2)):
                begun = time.perf_counter()
                ways[name](rows)
                seconds[name].append(time.perf_counter() - begun)
    for table in (SINK, KEYED):
        postgres.verify(dsn, table, topic.facts, once=True)
    counted = {name: taken[sizes.warm :] for name, taken in seconds.items()}
    measure = throughput("postgres/commit_path_vs_copy", counted["ours"], counted["copy"], sizes.events)
    return [measure], {f"commit path, {name}": taken for name, taken in counted.items()}


def _prepared(made: Consumer, store: PostgresStore, events: pa.Table) -> Rows:
    batch = EvaluatedArrow(prepare_events(events, made.job().prepare(store.head(made.name))))
    return batch, pa.Table.from_struct_array(batch.table["data"]).combine_chunks()


def _ours(made: Consumer, store: PostgresStore) -> Callable[[Rows], None]:
    heads = [take_epoch(store, made.name, "commit path", 1.0, force=True)]

    def commit(rows: Rows) -> None:
        """Commit one chunk by our commit path, from the head of the chunk before."""
        head, (batch, _) = heads[-1], rows
        run = Run("commit path", len(heads), durable=True)
        chunk = Chunk(batch, index_of(batch), run, head)
        heads.append(reached(chunk, commit_chunk(chunk, made.job())))

    return commit


def _copy(connection: psycopg.Connection[Any]) -> Callable[[Rows], None]:
    def copy(rows: Rows) -> None:
        """COPY the rows alone, in one transaction."""
        with connection.transaction():
            postgres.copy_rows(connection, KEYED, rows[1])

    return copy
