"""`python -m benchmarks.packed`: reservations at rest on PostgreSQL as pages, beside rows: bytes of a key, and how fast it is found.

One database is filled, copied, and the copy is packed. Then both get the same keys in turns, without the filter of known keys: each key is
looked up in every table. First batches of new keys, which are reserved; then keys that are there. The answers are verified.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

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
SELECT coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)::float FROM pg_inherits i
WHERE i.inhparent IN ('dedup.reservation'::regclass, 'dedup.reservation_page'::regclass)
"""


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
    """Bytes of a key at rest, seconds of a batch of new keys, and of keys that are known: packed beside rows. Verified."""
    with ExitStack() as stack:
        rows = stack.enter_context(database(dsn))
        _fill(rows, sizes)
        pages = stack.enter_context(database(dsn, rows))
        with closing(PostgresStore(pages)) as store:
            assert store.pack_reservations() == -(-sizes.reservations // sizes.table), "not all tables were packed"
        sides = {name: _side(stack, own) for name, own in (("pages", pages), ("rows", rows))}
        known = _some(rows, sizes.events)
        size = {name: _size(own) / sizes.reservations for name, own in (("pages", pages), ("rows", rows))}
        seconds = {f"{what}, {name}": [] for what in ("new", "known") for name in sides}
        for turn in range(sizes.batches):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                seconds[f"new, {name}"].append(_reserve(sides[name], keys(sizes.events, 10**6 + turn)))
                seconds[f"known, {name}"].append(_look_up(sides[name], known))
    millions = sizes.reservations // 1_000_000
    measures = [report.size("postgres/bytes_per_packed_key", size["pages"], size["rows"])]
    for what, name in (("new", f"postgres/packed_batch_{millions}m"), ("known", f"postgres/packed_lookup_{millions}m")):
        measures.append(report.slowness(name, seconds[f"{what}, pages"][2:], seconds[f"{what}, rows"][2:]))
    return measures, seconds


def _fill(dsn: str, sizes: Packed) -> None:
    with closing(PostgresStore(dsn)) as store:
        store.migrate()
        generate(dsn, sizes.reservations, sizes.table)
        store.rotate_reservations()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def _side(stack: ExitStack, dsn: str) -> Side:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    store = stack.enter_context(closing(PostgresStore(dsn, filter_memory=0)))
    return Side(store, take_epoch(store, NAME, "packed", 1.0, force=True).epoch)


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


def _reserve(side: Side, wanted: pa.Table) -> float:
    began = time.perf_counter()
    with side.store.begin(NAME, side.epoch) as transaction:
        transaction.ask(wanted["key"])
        known = transaction.reserve(wanted)
        transaction.execute(Commit())
    taken = time.perf_counter() - began
    assert not known.num_rows, f"{known.num_rows} new keys are known"
    return taken


def _look_up(side: Side, wanted: pa.Table) -> float:
    began = time.perf_counter()
    with side.store.begin(NAME, side.epoch) as transaction:
        known = transaction.known(wanted)
    taken = time.perf_counter() - began
    assert known.sort_by("key") == wanted.sort_by("key"), "keys are missing"
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
