"""Constants of the PostgreSQL store for docs/explanation/scale.md: calls, rows and bytes of the state, bytes of the write-ahead log.

A proxy between the consumer and the server counts calls: statements, and the first rows and the end of each COPY. How long anything takes
does not matter here.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from contextlib import closing
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks import postgres
from benchmarks.objectstore import with_tests
from benchmarks.ours import SINK, arrow_consumer
from benchmarks.reserved import NAME, generate
from benchmarks.restart import most_memory
from benchmarks.run import database
from benchmarks.scale_delta import Amounts, Values, full_filter
from benchmarks.scale_events import Orders
from dedup.postgres import PostgresStore

SIZES = """
SELECT (SELECT count(*) FROM dedup.batch), pg_total_relation_size('dedup.batch'), (SELECT count(*) FROM dedup.checkpoint)
"""

INDEX = """
SELECT pg_relation_size('dedup.reservation_000001_key_key') / 8192, (SELECT count(*) FROM dedup.reservation)
"""

SINK_BYTES = "SELECT pg_total_relation_size('orders')::float / count(*) FROM orders"


HALVED = 4
"""Times that a stored filter is halved at most."""


class _Calls(NamedTuple):
    """Calls of each batch, and of the first one of a process."""

    usual: list[int]
    first: int


def filtered(amounts: Amounts) -> Values:
    """The share of unknown keys that a stored filter lets through, whole and halved: for each of them its table is asked."""
    bloom, known, others = full_filter(1 << max(amounts.reserved // 6, 1000).bit_length())
    halved = [bloom.folded(times) for times in range(HALVED + 1)]
    assert all(one.may_have(*known).all() for one in halved), "a known key is not known"
    shares = [round(float(one.may_have(*others).mean()), 6) for one in halved]
    return {f"postgres/filter_lets_through_{times}": (share, "of unknown keys") for times, share in enumerate(shares)}


def calls(dsn: str, amounts: Amounts) -> Values:
    """Of a batch, of a restart, and the rows that a batch leaves in the state. Verified."""
    found = Values()
    for partitions in amounts.partitions:
        with database(dsn) as own:
            postgres.create_sinks(own)
            calls = _counted(own, partitions, amounts)
            rows, size, checkpoints = _one(own, SIZES)
        assert checkpoints == partitions, f"{checkpoints} checkpoints"
        found |= {
            f"postgres/calls_{partitions}p": (statistics.median(calls.usual), "calls"),
            f"postgres/restart_calls_{partitions}p": (calls.first - statistics.median(calls.usual), "calls"),
            f"postgres/record_rows_{partitions}p": (round(rows / (amounts.batches + 2), 1), "rows of a batch"),
            f"postgres/record_bytes_{partitions}p": (round(size / rows), "bytes of a row"),
        }
    return found


def _counted(dsn: str, partitions: int, amounts: Amounts) -> _Calls:
    with_tests()
    from kit.pg_calls import counted

    orders, events = Orders(partitions), amounts.small * partitions
    with counted(int(str(conninfo_to_dict(dsn)["port"]))) as calls:
        through = make_conninfo(dsn, host="127.0.0.1", port=calls.port, sslmode="disable", gssencmode="disable")
        number, told = 0, list[list[int]]()
        for count in (amounts.batches + 1, 1):
            with closing(PostgresStore(through)) as store:
                made, taken = arrow_consumer(store), list[int]()
                for _ in range(count):
                    calls.arm(0, "cut")  # counts anew
                    made(orders.batch(events), number)
                    number += 1
                    taken.append(calls.seen)
            told.append(taken)
    postgres.verify(dsn, SINK, orders.facts, once=True)
    return _Calls(told[0][1:], told[1][0])


def log(dsn: str, amounts: Amounts) -> Values:
    """Bytes of the write-ahead log: of an event, and of an index page that is changed for the first time after a checkpoint. Verified.

    The first batch after a checkpoint changes nearly all pages of an index as small as this one; the next batch finds them changed.
    """
    (first, second), index, sink = _logged(dsn, amounts.reserved // 6, amounts)
    return {
        "postgres/wal_bytes": (round(second / amounts.events, 1), "bytes of an event"),
        "postgres/wal_page_bytes": (round((first - second) / index.pages), "bytes of a page"),
        "postgres/keys_of_index_page": (round(index.keys / index.pages, 1), "keys"),
        "postgres/sink_bytes": (round(sink, 1), "bytes of an event"),
    }


def log_of_large_index(dsn: str, amounts: Amounts) -> Values:
    """The log of the first batch after a checkpoint, where it changes a part of the pages: to compare the model with. Verified."""
    (first, _), index, _ = _logged(dsn, amounts.large_index, amounts)
    return {
        "postgres/large_index_wal_bytes": (first, "bytes of a batch"),
        "postgres/large_index_keys": (index.keys, "keys"),
    }


class _Index(NamedTuple):
    """The unique index of the only table of reservations."""

    pages: int
    keys: int


def _logged(dsn: str, there: int, amounts: Amounts) -> tuple[list[int], _Index, float]:
    """Bytes of the log of two batches after a checkpoint beside so many keys, the index then, and bytes of a row of the sink."""
    orders, taken = Orders(amounts.partitions[0]), list[int]()
    with database(dsn) as own, psycopg.connect(own, autocommit=True) as connection, closing(PostgresStore(own)) as store:
        postgres.create_sinks(own)
        store.migrate()
        generate(own, there)
        made = arrow_consumer(store)
        for number in range(4):
            if number == 2:
                connection.execute("CHECKPOINT")
            before = _written(connection)
            made(orders.batch(amounts.events), number)
            taken.append(_written(connection) - before)
        index, sink = _Index(*_one(own, INDEX)), float(_one(own, SINK_BYTES)[0])
        postgres.verify(own, SINK, orders.facts, once=True)
    return taken[2:], index, sink


def process(dsn: str, amounts: Amounts) -> Values:
    """What a process has in memory that has read its state, and has no filter of known keys."""
    with database(dsn) as own:
        with closing(PostgresStore(own)) as store:
            store.migrate()
        line = [sys.executable, "-m", "benchmarks.scale_postgres", own]
        told = [float(subprocess.run(line, check=True, capture_output=True, text=True).stdout) for _ in range(amounts.starts)]
    return {"postgres/process_mb": (round(statistics.median(told), 1), "MiB")}


def _written(connection: psycopg.Connection[Any]) -> int:
    ((position,),) = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchall()
    return int(position)


def _one(dsn: str, statement: str) -> tuple[Any, ...]:
    with psycopg.connect(dsn) as connection:
        (row,) = connection.execute(statement.encode()).fetchall()
    return row


def main(dsn: str) -> None:
    """Read the state, and tell the memory that it took."""
    with closing(PostgresStore(dsn)) as store:
        arrow_consumer(store)
        store.head(NAME)
    print(most_memory())


if __name__ == "__main__":
    main(sys.argv[1])
