"""Many reservations without their events: keys as random as real ones, by the store's own transaction, or made in PostgreSQL.

Called by the measures that begin with a large table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from checkpoint.holders import take_epoch
from deadletter.store import KEYS, Commit

NAME = "benchmark"
"""The consumer that has them."""

MADE = """
INSERT INTO dedup.reservation_{:06d} (key, payload_hash)
SELECT gen_random_uuid(), hashint8extended(n, 0) FROM generate_series(1, %(count)s) n
"""

STEP = 1_000_000
"""Keys of one transaction."""


def keys(count: int, seed: int) -> pa.Table:
    """KEYS that no event has."""
    draw = np.random.default_rng(seed)
    found = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(draw.bytes(16 * count))])
    return pa.table([found, pa.array(draw.integers(-(2**63), 2**63, count))], schema=KEYS)


def reserve(store: Any, count: int, *, step: int = STEP, rotate_every: int | None = None, seed: int = 1) -> None:
    """Reserve so many keys, in transactions of `step`.

    Args:
        rotate_every: begin a new table of reservations after as many keys (PostgreSQL).
    """
    epoch, table = take_epoch(store, NAME, "filling", 1.0, force=True).epoch, rotate_every or count
    for begun in range(0, count, table):
        if begun:
            store.rotate_reservations()
        until = min(begun + table, count)
        for done in range(begun, until, step):
            _reserve(store, epoch, keys(min(step, until - done), seed + done))


def generate(dsn: str, count: int, rotate_every: int | None = None) -> None:
    """Make so many reservations inside a migrated database, a million at a time, each with its entry in the unique index, in no order.

    Args:
        rotate_every: begin a new table of reservations after as many keys.
    """
    table = rotate_every or count
    with psycopg.connect(dsn, autocommit=True) as connection:
        for begun in range(0, count, table):
            if begun:
                connection.execute("SELECT dedup.rotate_reservations()")
            _fill_newest(connection, min(table, count - begun))
        connection.execute("SELECT dedup.close_reservations()")  # as the next batch would: from then on another table is current alone


def _fill_newest(connection: psycopg.Connection[Any], count: int) -> None:
    row = connection.execute("SELECT max(id) FROM dedup.reservation_generation").fetchone()
    assert row is not None
    for done in range(0, count, STEP):
        connection.execute(MADE.format(row[0]).encode(), {"count": min(STEP, count - done)})


def _reserve(store: Any, epoch: int, wanted: pa.Table) -> None:
    with store.begin(NAME, epoch) as transaction:
        transaction.ask(wanted["key"])
        known = transaction.reserve(wanted)
        assert not known.num_rows, f"{known.num_rows} keys are known already"
        transaction.execute(Commit())
