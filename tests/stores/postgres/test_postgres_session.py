"""The database session between batches: what a handler did to it ends with the batch, and what was set for it outside does no harm."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import Rollback
from psycopg.conninfo import make_conninfo
from psycopg.types.string import TextLoader

from checkpoint import PostgresCheckpointStore
from checkpoint.errors import HandlerError, SinkMismatch
from deadletter.selection import Selection
from dedup import DeadLetters, reprocess
from dedup.core.steps import Merge
from dedup.postgres import PostgresStore
from dedup.urls import mask_secrets
from fixtures.variants import of_which
from kit.orders import batch, consumer, event
from kit.pg_help import epoch, finish, rows
from kit.pg_run import run


@pytest.fixture
def store(postgres: str) -> PostgresStore:
    run(postgres, "create table sink (a int)")
    return PostgresStore(postgres)


def session_of(store: PostgresStore, number: int) -> Any:
    """The process number of the session that the next batch gets."""
    with store.begin("shop", number) as tx:
        return tx._attempt.backend_pid


@pytest.mark.parametrize(
    "statement",
    of_which(
        2,
        [
            "set search_path to other",
            "create temp table sink (a int)",
            "set role pg_read_all_data",
            "set statement_timeout = '1min'",
            "set datestyle = 'German'",
        ],
    ),
)
def test_what_a_handler_did_to_the_session_ends_with_its_batch(store: PostgresStore, postgres: str, statement: str) -> None:
    """A search_path, temporary table, role or timeout of one batch can neither redirect rows of later ones nor stop them."""
    number = epoch(store)
    session = session_of(store, number)
    run(postgres, "create schema other; create table other.sink (a int)")
    with store.begin("shop", number) as tx:
        with tx.attempt():
            tx.connection.execute(statement)
        finish(tx, 0, 0, reserved=0)
    with store.begin("shop", number) as tx:
        with tx.attempt():
            tx.write("sink", rows(a=[1]))
        assert tx._connection.execute("select session_user = current_user, current_setting('statement_timeout')").fetchone() == (True, "0")
        finish(tx, 1, 1, reserved=0)
    assert run(postgres, "select a from public.sink") == [(1,)]
    assert session_of(store, number) == session, "an instance that lives keeps its session: that is how others know"
    store.close()


def writing(name: str, *, merging: bool = False) -> Callable[[Any], Any]:
    """A handler that writes one row to the sink of that name."""
    return lambda tx: tx.merge(name, rows(a=[1]), Merge(("a",))) if merging else tx.write(name, rows(a=[1]))


def leave(store: PostgresStore, statement: LiteralString) -> None:
    """What a pooler gives on: another client sends this to the session that the next batch gets."""
    with store._pool.borrow() as connection:
        connection.execute(statement)


@pytest.mark.parametrize("handled", [False, True], ids=["untouched", "used"])
def test_a_search_path_that_another_client_left_redirects_no_rows(store: PostgresStore, postgres: str, handled: bool) -> None:
    """Each transaction finds tables by the path that the session began with, also after a handler has used the connection."""
    number = epoch(store)
    run(postgres, "create schema other; create table other.sink (a int)")
    leave(store, "set search_path = other, public")
    with store.begin("shop", number) as tx:
        with tx.attempt():
            if handled:
                tx.connection.execute("insert into sink values (2)")
            tx.write("sink", rows(a=[1]))
        finish(tx, 0, 0, reserved=0)
    assert run(postgres, "select a from public.sink order by a") == [(1,), (2,)][: 1 + handled]
    assert run(postgres, "select count(*) from other.sink") == [(0,)]
    leave(store, "set search_path = other, public")
    store.accept_sink("shop", "sink", by="me", reason="test")


@pytest.mark.parametrize("by", of_which(1, ["dsn", "role"]))
def test_a_search_path_of_the_users_own_is_kept(store: PostgresStore, postgres: str, by: str) -> None:
    """Whether it is in the connection string, or the role's or the database's: that is what a session begins with."""
    run(postgres, "create schema other; create table other.sink (a int)")
    dsn = make_conninfo(postgres, options="-csearch_path=other") if by == "dsn" else postgres
    if by == "role":
        run(postgres, "do $$ begin execute format('alter database %I set search_path = other', current_database()); end $$")
    own = PostgresStore(dsn)
    with own.begin("shop", epoch(own)) as tx:
        with tx.attempt():
            tx.write("sink", rows(a=[1]))
        finish(tx, 0, 0, reserved=0)
    own.close()
    assert run(postgres, "select (select count(*) from other.sink), (select count(*) from public.sink)") == [(1, 0)]


@pytest.mark.parametrize("merging", [False, True], ids=["write", "merge"])
@pytest.mark.parametrize("handled", [False, True], ids=["untouched", "used"])
def test_a_temporary_table_that_another_client_left_takes_no_rows(
    store: PostgresStore, postgres: str, merging: bool, handled: bool
) -> None:
    """It hides the sink, and its rows would go with the session: refused by that name, and the full name finds the sink."""
    number = epoch(store)
    run(postgres, "create unique index on sink (a)")
    leave(store, "create temporary table sink (a int primary key)")
    for n, (name, refused) in enumerate({"sink": True, "public.sink": False, "pg_temp.sink": False}.items()):
        with (
            pytest.raises(SinkMismatch, match=r"temporary table.*hides.*schema\.table") if refused else nullcontext(),
            store.begin("shop", number) as tx,
        ):
            with tx.attempt():
                if handled:
                    tx.connection.execute("select 1")
                writing(name, merging=merging)(tx)
            finish(tx, n, n, batch_id=n, reserved=0)
        if handled:  # as behind a pooler, where what cleans the session reaches another one
            leave(store, "create temporary table if not exists sink (a int primary key)")
    assert run(postgres, "select a from public.sink") == [(1,)]
    assert run(postgres, "select name from dedup.sink") == [("public.sink",)]


@pytest.mark.parametrize("merging", [False, True], ids=["write", "merge"])
def test_a_temporary_table_of_the_handlers_own_takes_rows(store: PostgresStore, merging: bool) -> None:
    """Made in the same transaction, below however many savepoints, it is the table that the handler means by that name."""
    with store.begin("shop", epoch(store)) as tx:
        with tx.attempt():
            with tx.connection.transaction():
                tx.connection.execute("create temporary table sink (a int primary key)")
            writing("sink", merging=merging)(tx)
            assert tx.connection.execute("select a from pg_temp.sink").fetchall() == [(1,)]
        with tx.attempt():
            writing("public.sink")(tx)
            assert tx.connection.execute("select count(*) from public.sink").fetchone() == (1,)
        finish(tx, 0, 0, reserved=0)


def test_type_adapters_that_a_handler_registered_end_with_its_batch(store: PostgresStore) -> None:
    """They live in the connection, not in the session: our own statements must never read through them."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        with tx.attempt():
            tx.connection.adapters.register_loader("int4", TextLoader)
            assert tx.connection.execute("select 1").fetchone() == ("1",)
        finish(tx, 0, 0, reserved=0)
    with store.begin("shop", number) as tx:
        assert tx._connection.execute("select 1").fetchone() == (1,)


def test_a_connection_that_was_kept_refuses_once_the_handler_is_done(store: PostgresStore, postgres: str) -> None:
    """Else its statements would run outside any transaction, or inside the next batch's."""
    number = epoch(store)
    kept: list[Any] = []

    def refused() -> None:
        connection, cursor, tx = kept
        for use in (
            lambda: connection.execute("insert into sink values (1)"),
            lambda: connection.cursor().execute("insert into sink values (2)"),
            lambda: connection.transaction().__enter__(),
            lambda: connection.adapters,
            lambda: cursor.execute("insert into sink values (3)"),
            lambda: cursor.executemany("insert into sink values (%s)", [(4,)]),
            lambda: cursor.copy("copy sink from stdin").__enter__(),
            lambda: next(cursor.stream("insert into sink values (5) returning a")),
            lambda: tx.connection,
        ):
            with pytest.raises(HandlerError, match="is over"):
                use()

    with store.begin("shop", number) as tx:
        with tx.attempt():
            kept = [tx.connection, tx.connection.cursor(), tx]
            savepoint = tx.connection.transaction()
        refused()
        with pytest.raises(HandlerError, match="is over"):
            savepoint.__enter__()
        with tx.attempt():
            tx.connection.execute("insert into sink values (6)")
            assert tx.connection.cursor().execute("select 1").fetchone() == (1,)
        finish(tx, 0, 0, reserved=0)
    refused()
    with store.begin("shop", number) as tx:
        refused()
        with pytest.raises(ZeroDivisionError), tx.attempt():
            kept = [tx.connection, tx.connection.cursor(), tx]
            raise ZeroDivisionError
        refused()
    assert run(postgres, "select a from sink") == [(6,)]


def test_copies_and_streams_run_inside_the_transaction(store: PostgresStore, postgres: str) -> None:
    """Psycopg's COPY and row streaming are the handler's to use."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        with tx.attempt():
            with tx.connection.cursor() as cursor:
                with cursor.copy("copy sink (a) from stdin") as copy:
                    copy.write_row([1])
                assert list(cursor.stream("select a from sink")) == [(1,)]
                assert cursor.connection.execute("select 1").fetchone() == (1,)
            with tx.connection.transaction():
                tx.connection.execute("insert into sink values (2)")
                raise Rollback
        assert run(postgres, "select a from sink") == []
        finish(tx, 0, 0, reserved=0)
    assert run(postgres, "select a from sink") == [(1,)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", of_which(1, [3, 200_000]))
def test_a_stream_that_a_handler_has_left_ends_with_its_attempt(store: PostgresStore, postgres: str, size: int) -> None:
    """Its query keeps the connection to itself: what a failed handler has written is undone all the same, and the batch goes on."""
    number, kept = epoch(store), list[Any]()
    # A small result has come by then, and the query of a large one is cancelled.
    cancelled = pytest.raises(psycopg.errors.InFailedSqlTransaction, match="read it to its end")
    forgotten: AbstractContextManager[Any] = nullcontext() if size == 3 else cancelled

    def begin(tx: Any, value: int) -> None:
        tx.connection.execute("insert into sink values (%s)", [value])
        kept.append(tx.connection.cursor().stream("select generate_series(1, %s)", [size]))
        assert next(kept[-1]) == (1,)

    with store.begin("shop", number) as tx:
        with pytest.raises(ZeroDivisionError), tx.attempt():
            begin(tx, 1)
            raise ZeroDivisionError
        with forgotten, tx.attempt():
            begin(tx, 2)
        with tx.attempt():
            tx.connection.execute("insert into sink values (3)")
        finish(tx, 0, 0, reserved=0)
    assert run(postgres, "select a from sink order by a") == [*[(2,)] * (size == 3), (3,)]


def test_an_event_whose_handler_fails_in_a_stream_is_parked(store: PostgresStore, postgres: str) -> None:
    """The error's stack keeps the rows that it was reading: the letter has to be written on the same connection."""
    run_it = consumer(store)
    run_it._handler = None

    @run_it.foreach
    def book(one: Any, tx: Any) -> None:
        tx.connection.execute("insert into sink values (%s)", [one.sequence_number])
        known = tx.connection.cursor().stream("select generate_series(1, 3)")
        for _ in known:
            if one.sequence_number == 1:
                raise ValueError("a bad order")

    report = run_it(batch(event(0, "a"), event(1, "bad"), event(2, "c")), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    assert run(postgres, "select a from sink order by a") == [(0,), (2,)]


def test_no_message_shows_what_libpq_hides() -> None:
    """Each option of a connection that libpq marks as a password is ***, wherever a connection string is shown."""
    hidden = [o.keyword.decode() for o in psycopg.pq.Conninfo.get_defaults() if o.dispchar == b"*"]
    assert "password" in hidden
    for name in hidden:
        shown = repr(PostgresStore(f"host=x {name}=tr0ub4dor"))
        assert f"{name}=***" in shown and "tr0ub4dor" not in shown + mask_secrets(f"host=x {name}=tr0ub4dor")


def test_a_checkpoint_store_takes_a_url_in_capitals() -> None:
    """Its scheme may be written in any case, as for the other stores; no error of the driver's shows the password."""
    shown = repr(PostgresCheckpointStore("POSTGRESQL://ann:tr0ub4dor@h/db"))
    assert "host=h" in shown and "tr0ub4dor" not in shown


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_a_slow_handler_outlives_the_timeouts_that_a_dba_has_set(postgres: str, setting: str) -> None:
    """Spark computes while the transaction waits: that is no forgotten session, and ending it would end every later attempt, too."""
    known = run(postgres, "select count(*) from pg_settings where name = %s", [setting]) == [(1,)]
    if not known:
        pytest.skip(f"this server has no {setting}")
    run(
        postgres,
        f"create table sink (a int); do $$ begin execute format('alter database %I set {setting} = 200', current_database()); end $$",
    )
    store = PostgresStore(postgres)
    number = epoch(store)
    with store.begin("shop", number) as tx:
        with tx.attempt():
            for _ in range(6):
                run(postgres, "select pg_sleep(0.1)")
            tx.write("sink", rows(a=[1]))
        assert tx._connection.execute(f"show {setting}").fetchone() == ("0",)
        finish(tx, 0, 0, reserved=0)
    assert run(postgres, "select a from sink") == [(1,)]
    with store.begin("shop", number) as tx:
        tx._connection.execute("rollback")
        assert tx._connection.execute(f"show {setting}").fetchone() == ("200ms",), "outside our transactions it is as it was"


def test_a_database_with_dates_of_its_own_style_is_read_all_the_same(store: PostgresStore, postgres: str) -> None:
    """DateStyle is the database's or the role's business, and comes back when a session is cleaned."""
    run(postgres, "do $$ begin execute format('alter database %I set datestyle = German', current_database()); end $$")
    number = epoch(store)
    for n in range(2):
        with store.begin("shop", number) as tx:
            with tx.attempt():
                assert tx.connection.execute("show datestyle").fetchone() == ("ISO, DMY",)
            finish(tx, n, n, reserved=0)
    assert store.batches("shop").num_rows == 2 and store.letters(Selection()).num_rows == 0


@pytest.mark.full
def test_a_database_with_texts_of_the_older_style_keeps_bytes_as_they_are(store: PostgresStore, postgres: str) -> None:
    """With standard_conforming_strings off in the database, a sink, a handler's own statement and an edited letter hold the exact bytes."""
    run(postgres, "do $$ begin execute format('alter database %I set standard_conforming_strings = off', current_database()); end $$")
    run(postgres, "create table raws (raw bytea, many bytea[], took interval)")
    raw, body = b"\\x00\x01'\\", json.dumps({"id": "b", "amount": 2}).encode()
    made = consumer(store, idempotence_key=None)
    made._handler = None

    @made.foreach(into="raws")
    def load(event: Any, tx: Any) -> Any:
        if event.data["amount"] < 0:
            raise ValueError("negative")
        tx.connection.execute("insert into raws values (%s, %s, null)", [raw, [raw]])
        return {"raw": raw, "many": [raw], "took": dt.timedelta(seconds=1)}

    made(batch(event(0, "a"), event(1, "b", -1)), 0)
    (letter,) = store.letters(Selection())["id"].to_pylist()
    DeadLetters(store).edit(letter, body=body, by="test", reason="sign")
    assert store.letters(Selection())["body"].to_pylist() == [body]
    assert reprocess(Selection(), made).reprocessed == 1
    assert run(postgres, "select raw, many, took from raws") == [
        (raw, [raw], took) for _ in range(2) for took in (None, dt.timedelta(seconds=1))
    ]
