"""`python -m benchmarks.packed`: reservations at rest on PostgreSQL as pages with filters, beside rows: bytes of a key, seconds of a batch.

One database is filled, copied, and the copy is packed. Then both get the same keys in turns: the first batch of a process, batches of later
ones, in which one key in a hundred is known, and batches of known keys alone. The process beside rows has read its filter of them by
then, except for its first batch. The answers are verified.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
from rich.console import Console

from benchmarks import report
from benchmarks.growth import LARGE
from benchmarks.reserved import NAME, generate, keys
from benchmarks.run import database, server
from benchmarks.stream import Seconds
from checkpoint.holders import take_epoch
from deadletter.store import KEYS, Commit
from dedup.postgres import PostgresStore

SIZE = """
SELECT coalesce(sum(pg_total_relation_size(t.oid)), 0)::float FROM (
    SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent IN ('dedup.reservation'::regclass, 'dedup.reservation_page'::regclass)
    UNION ALL SELECT 'dedup.reservation_filter_part'::regclass
) t (oid)
"""

KNOWN = 100
"""One key in so many of a batch is known."""


_FIRST = 3
"""Processes that are started."""


class Packed(NamedTuple):
    """How much is measured; tests make it tiny.

    Args:
        table: reservations of one table; then they are rotated.
    """

    reservations: int = 100_000_000
    table: int = 10_000_000
    events: int = 50_000
    batches: int = 12


class Side(NamedTuple):
    """A database and its consumer."""

    store: PostgresStore
    epoch: int


def compare(dsn: str, sizes: Packed) -> tuple[list[report.Measure], Seconds]:
    """Bytes of a key at rest, seconds of a first batch, of a later one, and of one of known keys: packed beside rows. Verified."""
    with ExitStack() as stack:
        rows = stack.enter_context(database(dsn))
        _fill(rows, sizes)
        pages = stack.enter_context(database(dsn, rows))
        with closing(PostgresStore(pages)) as store:
            assert store.pack_reservations() == -(-sizes.reservations // sizes.table), "not all tables were packed"
        dsns = {"pages": pages, "rows": rows}
        size = {name: _size(own) / sizes.reservations for name, own in dsns.items()}
        known = _some(rows, sizes.events)
        seconds = {f"first, {name}": [_first(own, sizes, turn) for turn in range(_FIRST)] for name, own in dsns.items()}
        sides = {name: _side(stack, own, sizes) for name, own in dsns.items()}
        for turn in range(sizes.batches):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                _note(seconds, f"lookup, {name}", _reserve(sides[name], *_mixed(sizes.events, known, turn)))
                _note(seconds, f"known, {name}", _reserve(sides[name], known, known))
    millions = sizes.reservations // 1_000_000
    measures = [report.size("postgres/bytes_per_packed_key", size["pages"], size["rows"])]
    for what, skipped in (("lookup", 2), ("first", 0), ("known", 2)):
        pair = (seconds[f"{what}, pages"][skipped:], seconds[f"{what}, rows"][skipped:])
        measures.append(report.slowness(f"postgres/packed_{what}_{millions}m", *pair))
    return measures, seconds


def _note(seconds: Seconds, name: str, taken: float) -> None:
    seconds.setdefault(name, []).append(taken)


def _mixed(count: int, known: pa.Table, turn: int) -> tuple[pa.Table, pa.Table]:
    """KEYS of a batch, and those of them that are known, other ones in each turn."""
    some = known.take(np.arange(turn, known.num_rows, KNOWN))
    return pa.concat_tables([keys(count - some.num_rows, 10**6 + turn), some]).sort_by("key"), some


def _fill(dsn: str, sizes: Packed) -> None:
    with closing(PostgresStore(dsn)) as store:
        store.migrate()
        generate(dsn, sizes.reservations, sizes.table)
        store.rotate_reservations()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def _side(stack: ExitStack, dsn: str, sizes: Packed) -> Side:
    """A process that has looked up a quarter as many keys as there are in tables of rows: then it reads its filter of them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    store = stack.enter_context(closing(PostgresStore(dsn)))
    store.known_filter._asked = sizes.reservations
    store.known_filter._read_if_due()
    assert store.known_filter._whole is not None, "the filter was not read"
    return Side(store, take_epoch(store, NAME, "packed", 1.0, force=True).epoch)


def _first(dsn: str, sizes: Packed, turn: int) -> float:
    """Seconds of the first batch of a process, whose connection is there."""
    with closing(PostgresStore(dsn)) as store:
        side = Side(store, take_epoch(store, NAME, "packed", 1.0, force=True).epoch)
        new = keys(sizes.events, 2 * 10**6 + turn)
        return _reserve(side, new, new.slice(0, 0))


def _size(dsn: str) -> float:
    with psycopg.connect(dsn) as connection:
        ((size,),) = connection.execute(SIZE).fetchall()
    return float(size)


def _some(dsn: str, count: int) -> pa.Table:
    """KEYS that are reserved: some of each table."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'dedup.reservation'::regclass")
        found: list[tuple[bytes, int]] = []
        for (table,) in tables.fetchall():
            wanted = f"SELECT uuid_send(key), payload_hash FROM {table} TABLESAMPLE bernoulli (5) LIMIT {count // 5}"
            found += connection.execute(wanted.encode()).fetchall()
    some = sorted(found)[:: max(1, len(found) // count)]
    return pa.table([pa.array([key for key, _ in some], pa.binary(16)), pa.array([told for _, told in some])], schema=KEYS)


def _reserve(side: Side, wanted: pa.Table, known: pa.Table) -> float:
    """Seconds of a batch that reserves what it wants and finds what is known."""
    began = time.perf_counter()
    with side.store.begin(NAME, side.epoch) as transaction:
        transaction.ask(wanted["key"])
        found = transaction.reserve(wanted)
        transaction.execute(Commit())
    taken = time.perf_counter() - began
    assert found.sort_by("key") == known.sort_by("key"), f"{found.num_rows} keys were found, {known.num_rows} are known"
    return taken


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed", description=__doc__)
    for name, default in Packed._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="put the numbers into latest.json")
    asked = vars(parser.parse_args())
    keep = asked.pop("keep")
    with server(LARGE) as dsn:
        told, spread = compare(dsn, Packed(**asked))
    report.show(told, spread, Console())
    if keep:
        report.merge(told, Path(__file__).parent / "latest.json")


if __name__ == "__main__":
    main()
