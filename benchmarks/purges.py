"""`python -m benchmarks.purges`: a batch beside a running upkeep, which forgets old keys, and without one, in turns.

Each round is what a scheduler finds day after day: the oldest keys are due. On PostgreSQL that is a table of packed reservations, and one
more table of rows is to be packed with its filter; on Delta it is a day of the ledger, whose files are to be compacted. Batches run alone,
then for as long as the upkeep runs in a process of its own, then alone again. Sinks and keys are verified.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from rich.console import Console

from benchmarks import delta, postgres, report
from benchmarks.growth import LARGE
from benchmarks.objectstore import with_tests
from benchmarks.ours import SINK, arrow_consumer
from benchmarks.reserved import NAME, generate, keys, reserve
from benchmarks.run import database, server
from benchmarks.scale_events import Orders
from benchmarks.stream import Seconds
from dedup.delta import DeltaStore
from dedup.postgres import PostgresStore

DAYS = 30
"""The retention of a round; what is due is older."""

PARTITIONS = 4

_SAMPLE = 1000
"""Keys of each portion that are asked for at the end."""

DUE = """
UPDATE dedup.reservation_generation g SET created_at = g.created_at - interval '31 days', closed_at = g.closed_at - interval '31 days'
WHERE g.id = (SELECT min(id) FROM dedup.reservation_generation WHERE closed_at IS NOT NULL AND purged_at IS NULL)
"""

EARLIER = "UPDATE dedup.batch SET committed_at = committed_at - interval '32 days'"

WAITS, DONE = "ready", "go"


class Purges(NamedTuple):
    """How much is measured; tests make it tiny.

    Args:
        reservations: known before the first round.
        portion: keys of one table, or of one day: each round forgets as many.
        batches: without an upkeep, in each round.
    """

    reservations: int = 100_000_000
    portion: int = 10_000_000
    events: int = 50_000
    rounds: int = 3
    batches: int = 12

    @property
    def portions(self) -> int:
        """Tables or days."""
        return self.reservations // self.portion


class Stream:
    """A consumer and its events."""

    def __init__(self, store: Any, events: int) -> None:
        self._consumer, self.orders, self._events, self._number = arrow_consumer(store), Orders(PARTITIONS), events, 0

    def batch(self) -> float:
        """Seconds of the next one."""
        rows = self.orders.batch(self._events)
        began = time.perf_counter()
        self._consumer(rows, self._number)
        self._number += 1
        return time.perf_counter() - began


def on_postgres(dsn: str, sizes: Purges) -> tuple[list[report.Measure], Seconds]:
    """One table is forgotten, and one is packed, in each round. Verified."""
    with database(dsn) as own, closing(PostgresStore(own)) as store:
        postgres.create_sinks(own)
        store.migrate()
        for portion in range(sizes.portions):
            _add_table(own, store, sizes, portion)
        assert store.pack_reservations() == sizes.portions, "not all tables were packed"
        stream = Stream(store, sizes.events)
        stream.batch()

        def due(turn: int) -> int:
            """One more table of rows, and the oldest table is older than the retention, with the records of that time."""
            _add_table(own, store, sizes, sizes.portions + turn)
            _run(own, EARLIER, DUE, "VACUUM ANALYZE", "CHECKPOINT")
            return DAYS

        seconds = _rounds(stream, sizes, _url(own), due, {"tables of reservations": 1, "packed tables": 1})
        postgres.verify(own, SINK, stream.orders.facts, once=True)
        _verify(store, sizes, sizes.portions + sizes.rounds)
    return _measures("postgres", seconds), seconds


def on_delta(folder: Path, sizes: Purges) -> tuple[list[report.Measure], Seconds]:
    """One day is forgotten in each round. Verified."""
    delta.create_tables(folder)
    first = dt.datetime.now(dt.UTC) - dt.timedelta(days=sizes.portions + DAYS)
    with closing(delta.store(folder)) as store:
        for portion in range(sizes.portions):
            _add_day(store, sizes, portion, first + dt.timedelta(days=portion))
    with closing(delta.store(folder)) as store:
        stream = Stream(store, sizes.events)
        stream.batch()
        expected = {"reservations": sizes.portion + _SAMPLE}

        def due(turn: int) -> int:
            """The retention that forgets one day more. A consumer is always a little behind, and that is a day where whole days count."""
            return (dt.datetime.now(dt.UTC).date() - first.date()).days - turn - 2

        seconds = _rounds(stream, sizes, store.path, due, expected)
        delta.verify(folder / SINK, stream.orders.facts, once=True)
        _verify(store, sizes, sizes.portions)
    return _measures("delta", seconds), seconds


def _measures(store: str, seconds: Seconds) -> list[report.Measure]:
    return [report.slowness(f"{store}/purge_beside", seconds[f"{store}, beside"], seconds[f"{store}, alone"])]


def _rounds(stream: Stream, sizes: Purges, url: str, due: Callable[[int], int], expected: dict[str, int]) -> Seconds:
    store = "delta" if url.startswith("/") else "postgres"
    alone, beside, upkeeps = list[float](), list[float](), list[float]()
    for turn in range(sizes.rounds):
        days = due(turn)
        stream.batch()
        alone += [stream.batch() for _ in range(sizes.batches // 2)]
        with _upkeep(url, days) as upkeep:
            began = time.perf_counter()
            beside += list(_beside(stream, upkeep))
            upkeeps.append(time.perf_counter() - began)
            told = json.loads(upkeep.communicate()[0])
        counts = {line["what"]: line["count"] for line in told if line["count"]}
        assert counts == expected and not any(line["failed"] for line in told), f"the upkeep has done {told}"
        alone += [stream.batch() for _ in range(sizes.batches - sizes.batches // 2)]
    return {f"{store}, alone": alone, f"{store}, beside": beside, f"{store}, the upkeep itself": upkeeps}


@contextmanager
def _upkeep(url: str, days: int) -> Iterator[subprocess.Popen[str]]:
    """A process that runs an upkeep as soon as it is told to, and then tells what was done."""
    line = [sys.executable, "-m", "benchmarks.purges", "--upkeep", url, str(days)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline().strip() == WAITS, "the upkeep did not start"
            child.stdin.write(DONE + "\n")
            child.stdin.flush()
            yield child
        finally:
            child.kill()


def _beside(stream: Stream, upkeep: subprocess.Popen[str]) -> Iterator[float]:
    """Seconds of the batches that began while it ran, at least of one."""
    yield stream.batch()
    while upkeep.poll() is None:
        yield stream.batch()


def _add_table(dsn: str, store: PostgresStore, sizes: Purges, portion: int) -> None:
    """One table of reservations more, which takes no new ones."""
    generate(dsn, sizes.portion)
    some = [(bytes(key), value) for key, value in zip(*keys(_SAMPLE, portion).to_pydict().values(), strict=True)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        ((number,),) = connection.execute("SELECT max(id) FROM dedup.reservation_generation").fetchall()
        statement = f"INSERT INTO dedup.reservation_{number:06d} (key, payload_hash) SELECT encode(%s, 'hex')::uuid, %s"
        connection.cursor().executemany(statement.encode(), some)
    store.rotate_reservations()


def _add_day(store: DeltaStore, sizes: Purges, portion: int, then: dt.datetime) -> None:
    """Reservations of that day."""
    with_tests()
    from kit.clock import showing

    with patch("dedup.delta.transaction.dt", showing(lambda tz: then)):
        reserve(store, sizes.portion, seed=10**9 + portion * sizes.portion)
        reserve(store, _SAMPLE, seed=portion)


def _verify(store: Any, sizes: Purges, portions: int) -> None:
    """The keys of the oldest portions are forgotten, one of each round, and all others are known."""
    with store.begin_letters(NAME) as transaction:
        known = [transaction.known(keys(_SAMPLE, portion).sort_by("key")).num_rows for portion in range(portions)]
    assert known == [0] * sizes.rounds + [_SAMPLE] * (portions - sizes.rounds), f"{known} of {_SAMPLE} keys of each portion are known"


def _url(dsn: str) -> str:
    """As one text without a blank, which `_rounds` and the process tell from a folder."""
    return make_conninfo(**conninfo_to_dict(dsn))


def _run(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def upkeep(url: str, days: int) -> None:
    """Wait for the word, run one upkeep as `dedup upkeep` does, and print what was done."""
    with closing(DeltaStore(url) if url.startswith("/") else PostgresStore(url)) as store:
        print(WAITS, flush=True)
        sys.stdin.readline()
        print(json.dumps([vars(line) for line in store.upkeep(dt.timedelta(days=days))]))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.purges", description=__doc__)
    parser.add_argument("stores", nargs="*", metavar="store", help="postgres, delta; default: both")
    for name, default in Purges._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--upkeep", nargs=2, metavar=("URL", "DAYS"), help="run an upkeep there, once a line comes")
    parser.add_argument("--keep", action="store_true", help="put the numbers into latest.json")
    asked = vars(parser.parse_args())
    if place := asked.pop("upkeep"):
        return upkeep(place[0], int(place[1]))
    stores, keep = asked.pop("stores") or ["postgres", "delta"], asked.pop("keep")
    told, spread = run(stores, Purges(**asked))
    report.show(told, spread, Console())
    if keep:
        report.merge(told, Path(__file__).parent / "latest.json")


def run(stores: list[str], sizes: Purges) -> tuple[list[report.Measure], Seconds]:
    """The measures of these stores."""
    told, spread = list[report.Measure](), Seconds()
    if "postgres" in stores:
        with server(LARGE) as dsn:
            told, spread = on_postgres(dsn, sizes)
    if "delta" in stores:
        with tempfile.TemporaryDirectory(prefix="dedup-purges-") as home:
            more, seconds = on_delta(Path(home), sizes)
            told, spread = [*told, *more], spread | seconds
    return told, spread


if __name__ == "__main__":
    main()
