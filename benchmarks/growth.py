"""`make bench-growth`: what a batch takes with few and with many reservations, ours and by hand, all in one run.

Every size has a database and a ledger of its own, filled without events (the ledger by the store's own transactions); then the same real
batches go to all of them in turns. What is disturbed then is disturbed everywhere. Numbers are put into growth.json, which plot.py draws.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from rich.console import Console

from benchmarks import delta, postgres, report
from benchmarks.events import Facts, Topic, land
from benchmarks.ours import SINK, consumer
from benchmarks.reserved import generate, reserve
from benchmarks.run import database, server
from benchmarks.stream import Seconds, Way, contest, middle
from dedup.postgres import PostgresStore
from dedup.postgres.tending import TABLES
from dedup.spark.session import local_session

HERE = Path(__file__).parent

LARGE = {"shared_buffers": "2GB", "max_wal_size": "8GB"}
"""Settings of the server, where it is not yours."""

BY_HAND_TABLE = "staged_on_conflict"

BY_HAND = """
INSERT INTO staged_on_conflict
SELECT md5(n::text), n %% 1000000, n / 100.0, timestamptz '2026-01-01' + n * interval '1 second', repeat(md5((-n)::text), 2)
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n
"""
"""Orders that no event has; their primary key is made afterwards."""


@dataclass(frozen=True)
class Growth:
    """How much is measured; tests make it tiny.

    Args:
        reservations: of each store, ascending: the measure compares the last one with the first.
        by_hand: up to so many keys the ways by hand are run, too.
        table: reservations of one PostgreSQL table; then they are rotated, and packed. None: a thirtieth of all, as `dedup upkeep` does it.
        more: also measure a process on PostgreSQL that has just started: its filter of known keys is not there yet.
        one_table: also measure reservations that were never rotated.
    """

    reservations: tuple[int, ...] = (1_000_000, 10_000_000, 100_000_000)
    by_hand: int = 10_000_000
    table: int | None = None
    more: bool = False
    one_table: bool = False
    events: int = 50_000
    batches: int = 20
    warm: int = 8

    def rotated(self, count: int) -> int:
        """Reservations of one table where there are so many in all."""
        return self.table or max(1, count // TABLES)


@dataclass(frozen=True)
class Point:
    """A dot of the plot: seconds of a batch, the median."""

    store: str
    way: str
    reservations: int
    seconds: float
    batches: int


def on_postgres(spark: Any, dsn: str, folder: Path, sizes: Growth) -> list[Point]:
    """Batches on PostgreSQL: ours for each size, and staged ON CONFLICT by hand. Verified."""
    topic = _landed(folder, sizes)
    with ExitStack() as stack:
        places = [place for count in sizes.reservations for place in _places(stack, dsn, sizes, count)]
        ways = {(place.way, place.count): _on(stack, place) for place in places}
        taken = _contest(spark, folder, ways, sizes)
        for place in places:
            table = BY_HAND_TABLE if place.layout is None else SINK
            postgres.verify(place.dsn, table, topic.facts + place.there, once=True)
    return _points("postgres", taken, ways)


def on_delta(spark: Any, folder: Path, sizes: Growth) -> list[Point]:
    """Batches on Delta: ours for each size, and MERGE by hand. Verified."""
    ways: dict[tuple[str, int], Way] = {}
    topic = _landed(folder, sizes)
    checks: list[tuple[Path, Facts]] = []
    with ExitStack() as stack:
        for count in sizes.reservations:
            home = folder / str(count)
            paths = delta.create_tables(home, "merge")
            store = stack.enter_context(closing(delta.store(home)))
            reserve(store, count, step=5_000_000)
            ways["dedup", count] = consumer(store)
            checks.append((home / SINK, Facts()))
            if count <= sizes.by_hand:
                checks.append((paths["merge"], delta.make_orders(spark, [paths["merge"]], count)))
                ways["MERGE", count] = delta.merge(paths["merge"])
        taken = _contest(spark, folder, ways, sizes)
    for path, there in checks:
        delta.verify(path, topic.facts + there, once=True)
    return _points("delta", taken, ways)


def run(stores: list[str], sizes: Growth) -> list[Point]:
    """The points of these stores, on a server with the memory that large tables want."""
    spark = local_session("dedup growth")
    points = []
    with tempfile.TemporaryDirectory(prefix="dedup-growth-") as home:
        if "postgres" in stores:
            with server(LARGE) as dsn:
                points += on_postgres(spark, dsn, Path(home, "postgres"), sizes)
        if "delta" in stores:
            points += on_delta(spark, Path(home, "delta"), sizes)
    return points


def save(points: list[Point], path: Path) -> None:
    """growth.json: these points in place of all of their stores. Crash: the old file is there or the new one."""
    old = [Point(**line) for line in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    kept = [p for p in old if p.store not in {new.store for new in points}]
    text = json.dumps([asdict(p) for p in (*kept, *points)], indent=1)
    path.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def measures(points: list[Point], events: int) -> list[report.Measure]:
    """The largest size beside the smallest: throughput on PostgreSQL, seconds on Delta."""
    found = []
    for store, make in (("postgres", _throughput), ("delta", _slowness)):
        ours = sorted((p for p in points if (p.store, p.way) == (store, "dedup")), key=lambda p: p.reservations)
        found += [make(f"{store}/growth", ours[-1], ours[0], events)] if ours else []
    return found


class Layout(NamedTuple):
    """How reservations are kept on PostgreSQL."""

    way: str
    table: int | None
    filtered: bool = True


class Place(NamedTuple):
    """A database, what is in its table of orders before the first batch, and what writes to it."""

    way: str
    count: int
    dsn: str
    there: Facts = Facts()
    layout: Layout | None = None


def _layouts(sizes: Growth, count: int) -> list[Layout]:
    found = [Layout("dedup", sizes.rotated(count))]
    if sizes.more:
        found.append(Layout("dedup, just started", sizes.rotated(count), filtered=False))
    if sizes.one_table and count > sizes.rotated(count):
        found.append(Layout("dedup, never rotated", None))
    return found


def _places(stack: ExitStack, dsn: str, sizes: Growth, count: int) -> Iterator[Place]:
    filled: dict[int | None, str] = {}
    for layout in _layouts(sizes, count):
        own = stack.enter_context(database(dsn, filled.get(layout.table)))
        if layout.table not in filled:
            filled[layout.table] = own
            _fill(own, count, layout.table)
        yield Place(layout.way, count, own, layout=layout)
    if count <= sizes.by_hand:
        own = stack.enter_context(database(dsn))
        yield Place("staged ON CONFLICT", count, own, there=_make_orders(own, count))


def _on(stack: ExitStack, place: Place) -> Way:
    if place.layout is None:
        return postgres.staged(place.dsn)
    return consumer(stack.enter_context(closing(_store(place.dsn, place.count, place.layout))))


def _fill(dsn: str, count: int, table: int | None) -> None:
    postgres.create_sinks(dsn)
    with closing(PostgresStore(dsn)) as store:
        store.migrate()
        generate(dsn, count, table)
        store.pack_reservations()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def _store(dsn: str, count: int, layout: Layout) -> PostgresStore:
    store = PostgresStore(dsn)
    if layout.filtered:  # as a process has it that has looked up a quarter as many keys as there are
        store.known_filter._asked = count
        store.known_filter._read_if_due()
        assert store.known_filter._whole is not None, "the filter was not read"
    return store


def _landed(folder: Path, sizes: Growth) -> Topic:
    topic = Topic()
    land((topic.batch(sizes.events) for _ in range(sizes.batches)), folder / "topic")
    return topic


def _make_orders(dsn: str, count: int) -> Facts:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE staged_on_conflict ({postgres.COLUMNS.format(key='')})".encode())
        for first in range(0, count, 1_000_000):
            connection.execute(BY_HAND.encode(), {"first": first, "last": min(first + 1_000_000, count) - 1})
        connection.execute("ALTER TABLE staged_on_conflict ADD PRIMARY KEY (order_id)")
        connection.execute("VACUUM ANALYZE staged_on_conflict")
    return delta.made_facts(count)


def _contest(spark: Any, folder: Path, ways: dict[tuple[str, int], Way], sizes: Growth) -> Seconds:
    return contest(spark, folder / "topic", {f"{way}, {count}": function for (way, count), function in ways.items()}, sizes.warm)


def _points(store: str, taken: Seconds, ways: dict[tuple[str, int], Way]) -> list[Point]:
    seconds = {(way, count): taken[f"{way}, {count}"] for way, count in ways}
    return [Point(store, way, count, round(middle(values), 4), len(values)) for (way, count), values in seconds.items()]


def _throughput(name: str, many: Point, few: Point, events: int) -> report.Measure:
    return report.throughput(name, [many.seconds], [few.seconds], events)


def _slowness(name: str, many: Point, few: Point, events: int) -> report.Measure:
    return report.slowness(name, [many.seconds], [few.seconds])


def main() -> None:
    """Measure what was asked for; growth.json and latest.json are written where `--keep` says so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("stores", nargs="*", metavar="store", help="postgres, delta; default: both")
    parser.add_argument("--reservations", type=int, nargs="+", default=Growth.reservations, help="sizes (default: %(default)s)")
    parser.add_argument("--table", type=int, help="reservations of one table on PostgreSQL (default: a thirtieth of all)")
    for name in ("by_hand", "batches", "warm"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Growth, name), help="default: %(default)s")
    parser.add_argument("--more", action="store_true", help="also a process that has just started (PostgreSQL)")
    parser.add_argument("--one-table", action="store_true", help="also reservations that were never rotated")
    parser.add_argument("--keep", action="store_true", help="put the numbers into growth.json and latest.json")
    asked = vars(parser.parse_args())
    stores, keep = asked.pop("stores") or ["postgres", "delta"], asked.pop("keep")
    sizes = Growth(**{**asked, "reservations": tuple(sorted(asked["reservations"]))})
    points = run(stores, sizes)
    told = measures(points, sizes.events)
    report.show(told, {f"{p.store}, {p.way}, {p.reservations:,}": [p.seconds] for p in points}, Console())
    if keep:
        save(points, HERE / "growth.json")
        report.merge(told, HERE / "latest.json")


if __name__ == "__main__":
    main()
