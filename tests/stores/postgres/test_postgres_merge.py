"""`Transaction.merge` on PostgreSQL: one row per key, the newest wins, and what the table refuses is told apart from what cannot fit."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from checkpoint.errors import RowsRefused, SinkMismatch
from deadletter.store import Commit
from dedup.core.steps import Merge
from dedup.postgres import PostgresStore
from fixtures.variants import of_which
from kit.pg_help import WAITING, epoch, rows
from kit.pg_proxy import until
from kit.pg_run import run

BY_ID = Merge(("id",), "version")
DELETING = Merge(("id",), "version", "gone")


@pytest.fixture
def store(postgres: str) -> Iterator[PostgresStore]:
    """A store, the consumer `shop` and a sink with one row per id."""
    run(postgres, "create table stock (id int primary key, version bigint, name text not null, amount numeric(10, 2) check (amount >= 0))")
    made = PostgresStore(postgres)
    epoch(made)
    yield made
    made.close()


def merge(store: PostgresStore, how: Merge, table: str = "stock", **columns: Any) -> int:
    """Merge rows in a transaction of their own."""
    with store.begin("shop", store.head("shop").epoch) as tx:
        count = tx.merge(table, rows(**columns), how)
        tx.execute(Commit())
    return count


def stock(dsn: str) -> list[tuple[Any, ...]]:
    return run(dsn, "select id, version, name from stock order by id")


def test_the_newest_row_of_a_key_stays(store: PostgresStore, postgres: str) -> None:
    """Insert, update what is older, leave what is newer or equal: in whatever order the events come."""
    assert merge(store, BY_ID, id=[1, 2], version=[5, 5], name=["a", "b"]) == 2
    assert merge(store, BY_ID, id=[1, 2, 3], version=[4, 6, 1], name=["old", "new", "c"]) == 3
    merge(store, BY_ID, id=[1, 2], version=[5, 6], name=["again", "again"])
    assert stock(postgres) == [(1, 5, "a"), (2, 6, "new"), (3, 1, "c")]


def test_a_row_without_a_version_is_older_than_any(store: PostgresStore, postgres: str) -> None:
    """NULL in the sink gives way to a value; NULL in a row changes nothing that is there."""
    merge(store, BY_ID, id=[1, 2], version=[None, 3], name=["a", "b"])
    merge(store, BY_ID, id=[1, 2], version=[None, None], name=["x", "x"])
    assert stock(postgres) == [(1, None, "a"), (2, 3, "b")]
    merge(store, BY_ID, id=[1], version=[0], name=["y"])
    assert stock(postgres)[0] == (1, 0, "y")


def test_delete_when_deletes_what_is_older(store: PostgresStore, postgres: str) -> None:
    """A deletion needs no more than the key and the version, also where other columns may not be null; an older one deletes nothing."""
    merge(store, BY_ID, id=[1, 2, 3], version=[5, 5, 5], name=["a", "b", "c"])
    merge(store, DELETING, id=[1, 2, 4, 5], version=[6, 4, 1, 1], name=[None, None, "d", None], gone=[True, True, None, True])
    assert stock(postgres) == [(2, 5, "b"), (3, 5, "c"), (4, 1, "d")]


def test_without_a_version_the_last_one_wins(store: PostgresStore, postgres: str) -> None:
    """Each merge replaces what is there; a sink that is all key stays as it is."""
    merge(store, Merge(("id",)), id=[1, 2], version=[5, 5], name=["a", "b"])
    merge(store, Merge(("id",), delete_when="gone"), id=[1, 2], version=[1, 1], name=["z", None], gone=[False, True])
    assert stock(postgres) == [(1, 1, "z")]
    run(postgres, "create table seen (a int, b text, unique (b, a))")
    for _ in range(2):
        merge(store, Merge(("a", "b")), "seen", a=[1, 1], b=["x", "y"])
    assert run(postgres, "select count(*) from seen") == [(2,)]


def test_columns_that_the_rows_lack_stay_as_they_are(store: PostgresStore, postgres: str) -> None:
    """Only the columns of the rows are set; position columns that the sink lacks are left out."""
    merge(store, BY_ID, id=[1], version=[1], name=["a"], amount=[5])
    merge(store, BY_ID, id=[1], version=[2], name=["b"], topic=["t"], partition=[0], sequence_number=[7], part=[0], source=["s"])
    assert run(postgres, "select name, amount from stock") == [("b", 5)]


def test_a_sink_without_the_index_is_told_how_to_make_it(store: PostgresStore, postgres: str) -> None:
    """Partial, deferred, wider and expression indexes do not count; the error is the table's, and its statement works."""
    run(postgres, "create table plain (id int not null, v int)")
    run(
        postgres,
        "create unique index on plain (id) where v > 0; create unique index on plain (id, v); create unique index on plain (abs(id))",
    )
    run(postgres, "alter table plain add constraint late unique (id) deferrable")
    with pytest.raises(SinkMismatch, match="CREATE UNIQUE INDEX") as raised:
        merge(store, Merge(("id",)), "plain", id=[1], v=[1])
    assert not isinstance(raised.value, RowsRefused)
    run(postgres, "alter table plain drop constraint late")
    run(postgres, str(raised.value).split("Run: ")[1])
    assert merge(store, Merge(("id",)), "plain", id=[1], v=[1]) == 1


@pytest.mark.parametrize(
    "columns",
    of_which(
        3,
        [
            {"id": [None, 1], "name": ["a", "b"], "version": [1, 1]},
            {"id": [1], "name": [None], "version": [1]},
            {"id": [1], "name": ["a"], "version": [1], "amount": [-1]},
            {"id": [2**40], "name": ["a"], "version": [1]},
            {"id": [1], "name": ["a\0"], "version": [1]},
        ],
    ),
)
def test_rows_that_break_a_rule_are_the_events_fault(store: PostgresStore, postgres: str, columns: dict[str, Any]) -> None:
    """NULL in a key or where none may be, CHECK, range, NUL: RowsRefused, nothing stays, and the transaction goes on."""
    with store.begin("shop", store.head("shop").epoch) as tx:
        with pytest.raises(RowsRefused), tx.attempt():
            tx.merge("stock", rows(**columns), BY_ID)
        with tx.attempt():
            tx.merge("stock", rows(id=[9], name=["good"], version=[1]), BY_ID)
        tx.execute(Commit())
    assert stock(postgres) == [(9, 1, "good")]


@pytest.mark.parametrize("newer", of_which(1, [None, "version"]))
def test_a_key_that_is_too_long_is_no_other_key(store: PostgresStore, postgres: str, newer: str | None) -> None:
    """A cast to char(2) makes US of USA: that row is refused, and not taken for an older one of the same key."""
    run(postgres, "create table sold (country char(2) primary key, version char(1), n int)")
    odd = [("country", "USA"), ("version", "10")] if newer else [("country", "USA")]
    for name, value in odd:
        given = {"country": ["US", "US"], "version": ["1", "2"], "n": [1, 2]}
        right = {column: values[1:] for column, values in given.items()}
        with store.begin("shop", store.head("shop").epoch) as tx:
            with pytest.raises(RowsRefused, match=f"'{name}'.*{len(value)} characters"), tx.attempt():
                tx.merge("sold", rows(**given | {name: [value, *right[name]]}), Merge(("country",), newer))
            tx.merge("sold", rows(**right), Merge(("country",), newer))
            tx.execute(Commit())
    assert run(postgres, "select country, version, n from sold") == [("US", "2", 2)]


@pytest.mark.parametrize("columns", [{"id": [1], "version": [1]}, {"id": ["x"], "name": ["a"], "version": [1]}])
def test_rows_that_cannot_fit_are_the_tables_fault(store: PostgresStore, columns: dict[str, Any]) -> None:
    """A missing column and a type that does not fit are SinkMismatch, not RowsRefused: no event is parked for them."""
    with pytest.raises(SinkMismatch, match="ALTER TABLE") as raised:
        merge(store, BY_ID, **columns)
    assert not isinstance(raised.value, RowsRefused)


def test_two_transactions_with_one_key_leave_the_newer_row(store: PostgresStore, postgres: str) -> None:
    """The second one waits for the first one's commit, and compares with what it wrote."""
    with ThreadPoolExecutor(1) as pool:
        with store.begin("shop", store.head("shop").epoch) as tx:
            tx.merge("stock", rows(id=[1], version=[5], name=["newer"]), BY_ID)

            def older() -> None:
                with PostgresStore(postgres).begin_letters("shop") as other:
                    other.merge("stock", rows(id=[1], version=[3], name=["older"]), BY_ID)
                    other.execute(Commit())

            later = pool.submit(older)
            until(lambda: run(postgres, WAITING) == [(1,)] or later.done())
            tx.execute(Commit())
        later.result(timeout=20)
    assert stock(postgres) == [(1, 5, "newer")]


def test_names_that_look_like_sql_are_names(store: PostgresStore, postgres: str) -> None:
    """Quotes, percent signs and placeholders in names of tables and columns are names."""
    run(postgres, """create table "we%%ird {sink}" ("i""d" int unique, "{staged} %%s" text, "At" timestamptz)""".replace("%%", "%"))
    when = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for value in ("a", "b"):
        columns = {'i"d': [1], "{staged} %s": [value], "At": [when]}
        merge(store, Merge(('i"d',)), '"we%ird {sink}"', **columns)
    assert run(postgres, 'select "{staged} %s" from "we%ird {sink}"') == [("b",)]


@pytest.mark.full
def test_deleting_a_few_rows_does_not_read_the_sink(store: PostgresStore, postgres: str) -> None:
    """The sink is probed by its index."""
    run(postgres, "insert into stock select n, 1, 'x' from generate_series(1, 200000) n; analyze stock")
    before = run(postgres, "select seq_tup_read from pg_stat_user_tables where relname = 'stock'")
    merge(store, DELETING, id=[5, 6], version=[2, 2], name=[None, None], gone=[True, True])
    assert run(postgres, "select count(*) from stock where id in (5, 6)") == [(0,)]
    store.close()
    run(postgres, "select pg_stat_clear_snapshot()")
    assert run(postgres, "select seq_tup_read from pg_stat_user_tables where relname = 'stock'") == before
