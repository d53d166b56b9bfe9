"""A million dead letters on PostgreSQL: what people wait for who list and group them, beside reading the table."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.report import Measure, latency
from benchmarks.stream import Seconds, Sizes
from deadletter.selection import Selection
from dedup.postgres import PostgresStore

FILL = """
INSERT INTO dedup.dead_letter (id, consumer, generation, source, topic, incarnation, partition, sequence_number, part, key, holds_key,
    idempotence_key, body, body_size, kind, reason, fingerprint, attempts, first_failed_at, last_failed_at, status)
SELECT md5(n::text), 'benchmark', 0, 'broker', 'orders', 0, n %% 4, n / 4, 0, md5('key ' || n)::uuid, true,
    'order-' || n, convert_to(repeat(md5(n::text), 6), 'UTF8'), 192, 'REJECTED', 'an order cannot cost less than nothing',
    left(md5((n %% 50)::text), 16), 1, at, at,
    CASE WHEN n %% 3 = 0 THEN 'OPEN' ELSE 'REPROCESSED' END
FROM generate_series(%(first)s::int, %(last)s::int) n, LATERAL (SELECT timestamptz '2026-01-01' + n * interval '1 second' AS at) t
"""

STATEMENT = 100_000
"""Letters that one statement makes."""

PAGES = {
    "first page": Selection(limit=100),
    "open": Selection(consumer="benchmark", statuses=("OPEN", "BLOCKED"), limit=100),
    "range": Selection(topic="orders", partition=3, first=100, limit=100),
    "fingerprint": Selection(fingerprint="c4ca4238a0b92382", status="OPEN", limit=100),  # left(md5('1'), 16)
    "time": Selection(status="OPEN", since=dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=1), limit=100),
}

LISTED = ["id", "topic", "partition", "sequence_number", "kind", "reason", "last_failed_at", "status", "duplicates"]

READ_PAGE = """
SELECT id, topic, partition, sequence_number, kind, reason, last_failed_at, status, duplicates
FROM (SELECT * FROM dedup.dead_letter OFFSET 0) d WHERE consumer = 'benchmark' AND status IN ('OPEN', 'BLOCKED')
ORDER BY consumer, source, topic, incarnation, partition, sequence_number, part, id LIMIT 100
"""

READ_GROUPS = """
SELECT fingerprint, kind, count(*), min(first_failed_at), max(last_failed_at) FROM dedup.dead_letter GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 100
"""


def compare(spark: Any, dsn: str, folder: Path, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Pages of several kinds, of which the slowest counts, and groups. Raises AssertionError where one answers wrongly."""
    with closing(PostgresStore(dsn)) as store, psycopg.connect(dsn, autocommit=True) as connection:
        store.migrate()
        _fill(connection, sizes.letters)
        ways: dict[str, Callable[[], Any]] = {name: _page(store, selection) for name, selection in PAGES.items()}
        ways |= {"groups": lambda: store.groups(Selection(limit=100)).num_rows}
        ways |= {name: _read(connection, text) for name, text in (("page by reading", READ_PAGE), ("groups by reading", READ_GROUPS))}
        _verify(store, connection, sizes.letters)
        taken = _rounds(ways, sizes.batches - sizes.warm)
    slowest = max(PAGES, key=lambda name: sorted(taken[name])[len(taken[name]) // 2])
    measures = [
        latency("postgres/list_1m_letters", taken[slowest], taken["page by reading"]),
        latency("postgres/group_1m_letters", taken["groups"], taken["groups by reading"]),
    ]
    return measures, {f"letters, {name}": seconds for name, seconds in taken.items()}


def _fill(connection: psycopg.Connection[Any], letters: int) -> None:
    for first in range(1, letters + 1, STATEMENT):
        connection.execute(FILL.encode(), {"first": first, "last": min(letters, first + STATEMENT - 1)})
    connection.execute("VACUUM ANALYZE dedup.dead_letter")
    connection.execute("VACUUM ANALYZE dedup.letter_count")


def _page(store: PostgresStore, selection: Selection) -> Callable[[], int]:
    return lambda: store.letters(selection, LISTED).num_rows


def _read(connection: psycopg.Connection[Any], statement: str) -> Callable[[], int]:
    return lambda: len(connection.execute(statement.encode()).fetchall())


def _rounds(ways: dict[str, Callable[[], Any]], rounds: int) -> Seconds:
    taken: Seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - begun)
    return taken


def _verify(store: PostgresStore, connection: psycopg.Connection[Any], letters: int) -> None:
    """A page and the groups are what reading the table says, and every letter is in a group."""
    page = store.letters(PAGES["open"], ["id"])["id"].to_pylist()
    assert page == [row[0] for row in connection.execute(READ_PAGE.encode())], "a page is not what is there"
    groups = [tuple(row.values())[:5] for row in store.groups(Selection(limit=100)).to_pylist()]
    assert sorted(groups) == sorted(connection.execute(READ_GROUPS.encode()).fetchall()), "the groups are not what is there"
    assert sum(row[2] for row in groups) == letters, "letters are missing in the groups"
