"""The first call fails, then the second, then the third ... until a batch passes without a fault; after each, everything is counted.

The batch has all kinds of outcome: rows of two sinks, a merge, letters of each kind, duplicates in it and of earlier ones, redeliveries.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

import psycopg
import pytest
from crash import child, lane, log
from orders import consumer
from pg_calls import Calls, Way, counted
from places import PostgresPlace
from psycopg.conninfo import conninfo_to_dict, make_conninfo

pytestmark = pytest.mark.crash

SEED, BATCHES = 6, 3
"""Of the log; the batch that fails is the last one."""


def run_batches(place: PostgresPlace, numbers: range, *, patience: float = 0.0) -> None:
    """In one process, in which nothing is remembered of earlier ones."""
    store = place.store()
    run = consumer(store, max_outage=patience, budget=None)
    run._handler = lambda rows, tx: child.handle(rows, tx, 0.0)
    try:
        for number in numbers:
            run(log.planned(SEED, number), number)
    finally:
        store.close()  # type: ignore[attr-defined]


@pytest.fixture
def copies(postgres: str) -> Iterator[Callable[[], str]]:
    """Makes databases in which all batches but the last one are done; they are dropped afterwards."""
    made = []
    first = PostgresPlace(postgres)
    child.create(first)
    run_batches(first, range(BATCHES - 1))

    def copy() -> str:
        made.append(f"copy_{uuid.uuid4().hex}")
        with admin(postgres) as connection:
            connection.execute(f"create database {made[-1]} template {name_of(postgres)}")
        return make_conninfo(postgres, dbname=made[-1])

    yield copy
    with admin(postgres) as connection:
        for name in made:
            connection.execute(f"drop database {name} with (force)")


def name_of(dsn: str) -> str:
    """Of its database."""
    return str(conninfo_to_dict(dsn)["dbname"])


@contextmanager
def admin(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection to another database of that server."""
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as connection:
        yield connection


def fails_once(calls: Calls, dsn: str, *, patience: float) -> str:
    """What the batch ended with, through the proxy."""
    away = make_conninfo(dsn, host="127.0.0.1", port=calls.port, sslmode="disable", gssencmode="disable")
    try:
        run_batches(PostgresPlace(away), range(BATCHES - 1, BATCHES), patience=patience)
    except Exception as error:  # noqa: BLE001 - whatever it is: it is counted by its name
        return type(error).__name__
    return "passed"


HERE = [("lost", 0.0), ("error", 30.0)]
"""In CI; the other pairs are slow."""

PAIRS = [
    pytest.param(
        way, patience, id=f"{way}, {'the same' if patience else 'a new'} process", marks=() if (way, patience) in HERE else pytest.mark.slow
    )
    for way in get_args(Way)
    for patience in (0.0, 30.0)
]


@pytest.mark.postgres
@pytest.mark.parametrize(("way", "patience"), PAIRS)
def test_each_call_to_postgres_may_fail(postgres: str, copies: Callable[[], str], way: Way, patience: float) -> None:
    """Cut off before the call, its answer lost, or refused by the server: then all of the batch is true, or none, and it is run again."""
    ended: Counter[str] = Counter()
    with counted(int(conninfo_to_dict(postgres)["port"] or 5432)) as calls:
        for number in range(1, 1_000):
            dsn = copies()
            calls.arm(number, way)
            ended[how := fails_once(calls, dsn, patience=patience)] += 1
            if not calls.failed:
                break
            if patience:
                assert how == "passed", f"call {number} ({calls.failed!r}) ended with {how}"
            place = PostgresPlace(dsn)
            run_batches(place, range(BATCHES - 1, BATCHES))
            wrong = lane.wrong(place, SEED, BATCHES)
            assert wrong == ([], [], []), f"call {number} ({calls.failed!r}), {way}, ended with {how}: {wrong}"
    print(way, patience, number - 1, "calls", dict(ended))
    assert number > 20, "the batch has fewer calls than it has statements"
    assert set(ended) <= {"passed", "StoreUnavailable", "CommitUnknown", "DiskFull"}, ended
