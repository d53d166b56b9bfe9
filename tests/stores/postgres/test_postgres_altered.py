"""A table that somebody alters while rows are on their way to it: the rows that it has are those that the handler gave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, flatten, letters, orders
from kit.pg_help import WAITING
from kit.pg_proxy import until
from kit.pg_run import run
from kit.places import PostgresPlace

pytestmark = pytest.mark.postgres


def write(made: Any, how: str) -> None:
    """A handler that appends its rows, or merges them."""

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        if how == "write":
            tx.write(flatten(rows), "orders")
        else:
            tx.merge(flatten(rows), "orders", keys="id")


CHANGES = [("bigint", "double precision"), ("integer", "bigint"), ("bigint", "numeric"), ("integer", "real")]
"""Three of them keep the width of a value, so that the bytes of the old type are those of some value of the new one."""


@pytest.mark.parametrize("how", ["write", "merge"])
@pytest.mark.parametrize(("before", "after"), of_which(2, CHANGES))
def test_rows_beside_a_change_of_type_are_what_they_were_given(postgres: str, before: str, after: str, how: str) -> None:
    """The batch has read the old type and waits for the ALTER TABLE: no byte of the old type is read as a value of the new one."""
    place = PostgresPlace(postgres)
    place.execute(f"create table orders (id text primary key, amount {before})")
    made = consumer(place.store(), max_outage=60.0)
    made._handler = None
    write(made, how)
    made(batch(*orders([1, 2])), 0)
    with psycopg.connect(postgres) as dba, ThreadPoolExecutor(1) as threads:
        dba.execute(f"alter table orders alter column amount type {after}")
        beside = threads.submit(made, batch(*orders([3, 4])), 1)
        until(lambda: run(postgres, WAITING) == [(1,)])
        dba.commit()
        assert beside.result(60).processed == 2
    assert place.execute("select id, amount::bigint from orders order by id") == [(f"p0-{n}", n) for n in range(1, 5)]
    assert letters(place.store()) == []
    assert_proven(place.store())


def test_a_path_of_the_handlers_is_no_change_of_the_table(postgres: str) -> None:
    """A type of the user's is written with its schema or without, by the path that holds: the table is the same."""
    place = PostgresPlace(postgres)
    place.execute("create schema shop; create type shop.mood as enum ('glad'); create table shop.orders (id text, mood shop.mood)")
    made = consumer(place.store())
    made._handler = None

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        tx.connection.execute("set local search_path = shop")
        tx.write([{"id": key, "mood": "glad"} for key in flatten(rows)["id"].to_pylist()], "orders")

    assert made(batch(*orders([1, 2])), 0).processed == 2
    assert place.execute("select count(*) from shop.orders") == [(2,)]
