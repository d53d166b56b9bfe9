"""What a million reservations take on disk, index included, beside the table of processed ids that one writes by hand."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from benchmarks.report import Measure, size
from benchmarks.reserved import reserve
from benchmarks.stream import Seconds, Sizes
from dedup.postgres import PostgresStore

BY_HAND = "CREATE TABLE processed (message_id text PRIMARY KEY, payload_hash bigint NOT NULL)"

BYTES = """
SELECT (SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits WHERE inhparent = 'dedup.reservation'::regclass)::bigint,
    (SELECT count(*) FROM dedup.reservation), pg_total_relation_size('processed'), (SELECT count(*) FROM processed)
"""


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Random keys in batches, as they come; both with a payload hash. The number of rows is verified."""
    begun = time.perf_counter()
    with closing(PostgresStore(dsn)) as store, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(BY_HAND)
        reserve(store, sizes.reservations, step=sizes.events)
        seconds = {"reservations, filling": [time.perf_counter() - begun]}
        for done in range(0, sizes.reservations, sizes.events):
            _copy_ids(connection, min(sizes.events, sizes.reservations - done), done)
        ours, rows, other, by_hand = connection.execute(BYTES.encode()).fetchone() or ()
    assert rows == by_hand == sizes.reservations, f"{rows} and {by_hand} rows of {sizes.reservations}"
    return [size("postgres/bytes_per_reservation", ours / rows, other / by_hand)], seconds


def _copy_ids(connection: psycopg.Connection[Any], count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    data = draw.bytes(16 * count)
    with connection.cursor().copy("COPY processed FROM STDIN") as copy:
        for n in range(count):
            copy.write_row((str(uuid.UUID(bytes=data[16 * n : 16 * n + 16])), n))
