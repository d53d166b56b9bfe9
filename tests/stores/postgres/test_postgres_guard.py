"""What a handler does to its transaction or its session, by whatever way: nothing of ours is committed by it, or written wrongly."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from checkpoint.errors import HandlerError, SinkMismatch
from deadletter.selection import Selection
from deadletter.store import Park
from dedup.core.steps import Merge
from dedup.postgres import PostgresStore
from fixtures.variants import of_which
from kit.pg_help import FAILED_AT, epoch, finish, history_of, keys, letter, letters_of, rows
from kit.pg_run import run

Use = Callable[[Any], Any]


@pytest.fixture
def store(postgres: str) -> PostgresStore:
    run(postgres, "create table sink (a int)")
    return PostgresStore(postgres)


def left(postgres: str) -> tuple[Any, ...]:
    """What is there of batches: rows of the sink, reservations, decisions, rows of the guard."""
    counted = "(select count(*) from sink), (select count(*) from dedup.reservation), (select sum(seq) from dedup.progress)"
    return tuple(map(int, run(postgres, f"select {counted}, (select count(*) from dedup.open_transaction)")[0]))


def sent(*statements: str) -> Use:
    """A handler that sends these statements by tx.connection.execute."""

    def use(connection: Any) -> None:
        for statement in statements:
            connection.execute(statement)

    return use


def by_savepoint(connection: Any) -> None:
    """A savepoint knows its connection."""
    with connection.transaction() as savepoint:
        savepoint.connection.execute("commit")


def by_copy(connection: Any) -> None:
    """A COPY knows psycopg's own connection."""
    with connection.cursor().copy("copy sink from stdin") as copy:
        copy.write_row([1])
    copy.connection.commit()


def many(connection: Any) -> None:
    """One statement for several sets of parameters."""
    connection.cursor().executemany("commit", [(), ()])


def chained(by: Callable[[Any], Any]) -> Use:
    """A handler that begins another transaction this way, whose errors it swallows, and then goes on and commits."""

    def use(connection: Any) -> None:
        cursor = connection.cursor()
        for one in (by, sent("insert into sink values (1)"), lambda _: cursor.execute("commit")):
            with contextlib.suppress(Exception):
                one(cursor)

    return use


def copied(cursor: Any) -> None:
    """Something else than a COPY where a COPY belongs."""
    with cursor.copy("rollback and chain"):
        pass


ENDING: dict[str, Use] = {
    "commit": sent("commit"),
    "end": sent("insert into sink values (1)", "/* x */ END;"),
    "and chain": sent("commit and chain", "insert into sink values (1)"),
    "rollback": sent("rollback", "insert into sink values (1)"),
    "abort": sent("abort", "begin", "insert into sink values (1)", "commit"),
    "rollback and chain": sent("rollback and chain", "insert into sink values (1)"),
    "prepare": sent("prepare transaction 'x'"),
    "begin": sent("begin"),
    "procedure": sent("create procedure ends() language plpgsql as $$ begin commit; end $$", "call ends()", "commit"),
    "backslash": sent("insert into sink values (1)", r"select name'\'; commit; insert into sink values (2); begin; select 'x'"),
    "dollar": sent("select 1 as a$x$; commit; select 1 as b$x$"),
    "second statement": sent("insert into sink values (1); commit; begin"),
    "hidden rollback": sent(r"select name'\'; rollback; insert into sink values (2); select 'x'"),
    "savepoint": by_savepoint,
    "copy": by_copy,
    "executemany": many,
    "stream": lambda connection: next(connection.cursor().stream("commit")),
    "stream and chain": chained(lambda cursor: list(cursor.stream("rollback and chain"))),
    "copy and chain": chained(copied),
    "execute and chain": chained(sent("rollback and chain")),
    "executemany and chain": chained(lambda cursor: cursor.executemany("rollback and chain", [()])),
    "cursor's connection": lambda connection: connection.cursor().connection.commit(),
    "execute's connection": lambda connection: connection.execute("select 1").connection.rollback(),
    "libpq": lambda connection: connection.info.pgconn.exec_(b"insert into sink values (1); commit; begin"),
}


REFUSED = ("begin", "cursor's connection", "execute's connection")
"""Refused before it can do anything: whoever swallows that error has a good transaction."""


@pytest.mark.parametrize("doing", of_which(2, ["let through", "swallowed", "blamed"]))
def test_whatever_a_handler_ends_its_transaction_with_nothing_of_the_batch_is_true(store: PostgresStore, postgres: str, doing: str) -> None:
    """However COMMIT or ROLLBACK gets to the server, and whatever the handler does with the error: no reservation, row or decision."""
    number = epoch(store)
    for name in ENDING.keys() - (() if doing == "let through" else REFUSED):
        with pytest.raises((HandlerError, psycopg.Error, ValueError)) as raised, store.begin("shop", number) as tx:
            tx.reserve(keys([1, 2]))
            with tx.attempt():
                try:
                    ENDING[name](tx.connection)
                except Exception:
                    if doing == "let through":
                        raise
                    if doing == "blamed":
                        raise ValueError("a bad order") from None
            finish(tx, 0, 0, reserved=2)
        assert raised.type is HandlerError or name not in ("commit", "rollback", "savepoint"), "no event is blamed"
        assert left(postgres) == (0, 0, 0, 0), name
    with store.begin("shop", number) as tx:
        assert tx.reserve(keys([1, 2])).num_rows == 0, "the same batch can run again"
        finish(tx, 0, 0, reserved=2)
    assert left(postgres) == (0, 2, 1, 0)


def test_a_handler_may_ask_for_its_deferred_constraints_and_still_cannot_commit(store: PostgresStore, postgres: str) -> None:
    """SET CONSTRAINTS ALL IMMEDIATE asks the guard, too: it lets that pass, as often as one likes, and is there at the next COMMIT."""
    run(postgres, "create table parent (a int primary key); create table child (a int references parent deferrable initially deferred)")
    number = epoch(store)
    with store.begin("shop", number) as tx:
        with pytest.raises(psycopg.errors.ForeignKeyViolation), tx.attempt():
            tx.connection.execute("insert into child values (1)")
            tx.connection.execute("set constraints all immediate")
        for last in ("set constraints all deferred", "set constraints all immediate"):
            with tx.attempt():
                tx.reserve(keys([last]))
                with tx.connection.transaction():
                    tx.connection.execute("set constraints all immediate")
                tx.connection.execute("set constraints all immediate")
                tx.connection.execute(last)
        with pytest.raises(HandlerError), tx.attempt():
            tx.connection.execute("commit")
    assert left(postgres) == (0, 0, 0, 0)
    with store.begin("shop", number) as tx:
        with tx.attempt():
            tx.connection.execute("set constraints all immediate")
        finish(tx, 0, 0, reserved=0)
    assert left(postgres) == (0, 0, 1, 0)


SETTINGS = {
    "client_encoding": "LATIN1",
    "datestyle": "German, YMD",
    "intervalstyle": "sql_standard",
    "timezone": "Asia/Kolkata",
    "search_path": "elsewhere",
    "standard_conforming_strings": "off",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "array_nulls": "off",
    "xmloption": "document",
    "transform_null_equals": "on",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "statement_timeout": "1h",
    "lock_timeout": "1h",
    "idle_in_transaction_session_timeout": "1h",
    "session_replication_role": "replica",
    "row_security": "off",
    "synchronous_commit": "off",
    "check_function_bodies": "off",
    "role": "pg_monitor",
    "session_authorization": "pg_monitor",
    "dedup.commit": "mine",
}
"""What a handler may set, to a value that would show in what is written after it."""

VALUES = {
    "t": "caf\u00e9 \u20ac\\",
    "at": dt.datetime(2026, 2, 3, 23, 30, tzinfo=dt.UTC),
    "on_": dt.date(2026, 2, 3),
    "took": dt.timedelta(days=-1, microseconds=5),
    "x": 0.1 + 0.2,
    "raw": b"\\x00\xff",
    "many": ["a", None, "\u20ac"],
    "j": {"a": "\\u20ac"},
    "fixed": "\u00e9  ",
    "n": decimal.Decimal("1.50"),
}


def shown(tx: Any) -> Any:
    """The settings as our own statements find them."""
    return tx._connection.execute("select " + ", ".join(f"nullif(current_setting('{name}', true), '')" for name in SETTINGS)).fetchone()


@pytest.mark.parametrize("fast", [pytest.param(True, marks=pytest.mark.full), False], ids=["binary", "text"])
def test_no_setting_of_a_handler_changes_what_is_written_after_it(store: PostgresStore, postgres: str, fast: bool) -> None:
    """Each by itself, for the transaction and the session, and all of them together: same rows and letters, in this batch and the next."""
    columns = "t text, at timestamptz, on_ date, took interval, x float8, raw bytea, many text[], j jsonb, fixed char(3), n numeric"
    for schema in ("public", "elsewhere"):
        run(postgres, f"create schema if not exists {schema}; create table {schema}.kept ({columns}, area box)")
        run(postgres, f"grant usage on schema {schema} to pg_monitor; grant insert on {schema}.kept to pg_monitor")
    row = VALUES if fast else {**VALUES, "area": "(3,4),(1,2)"}  # whose type has no way but by its text
    number = epoch(store)
    ways = [[name] for name in SETTINGS] + [list(SETTINGS)]
    for n, (names, local) in enumerate((names, local) for names in ways for local in (True, False)):
        with store.begin("shop", number) as tx:
            here = shown(tx)
            with tx.attempt():
                set_all = ", ".join(f"set_config('{name}', %({name})s, {local})" for name in names)
                tx.connection.execute(f"select {set_all}", SETTINGS)
                tx.write("kept", rows(**{name: [value] for name, value in row.items()}))
            tx.execute(Park(letters_of([letter(n, reason="\u20ac\\n", idempotence_key="caf\u00e9 \u20ac")]), history_of([])))
            assert shown(tx) == here
            finish(tx, n, n, batch_id=n, reserved=0)
        assert store.head("shop").seq == n + 1, names
    expected = [*VALUES.values(), None if fast else "(3,4),(1,2)"]
    names, both = ", ".join([*VALUES, "area::text"]), "table public.kept union all table elsewhere.kept"
    found = run(
        postgres,
        f"select {names}, count(*) from ({both}) k group by {', '.join(map(str, range(1, len(VALUES) + 2)))}",
    )
    assert found == [(*expected, 2 * len(ways))]
    assert run(postgres, "select count(*) from elsewhere.kept") == [(4,)], "as the handler's own statements find the table"
    kept = store.letters(Selection(limit=None))
    assert set(zip(*kept.select(["reason", "idempotence_key", "last_failed_at"]).to_pydict().values(), strict=True)) == {
        ("\u20ac\\n", "caf\u00e9 \u20ac", FAILED_AT)
    }
    assert run(postgres, "select sum(letters) from dedup.letter_count") == [(2 * len(ways),)], "triggers ran"


@pytest.mark.parametrize("scope", of_which(1, ["local", "session"]))
def test_rows_are_written_as_by_the_handlers_own_statements(store: PostgresStore, postgres: str, scope: str) -> None:
    """The path, the role and settings that a default reads hold for tx.write and tx.merge, and not for our own tables."""
    run(postgres, "create schema tenant; grant usage on schema tenant to pg_monitor")
    who = "current_user || ' ' || current_setting('app.usr', true)"
    for schema in ("public", "tenant"):
        run(postgres, f"create table {schema}.kept (a int primary key, who text default {who})")
        run(postgres, f"grant all on {schema}.kept to pg_monitor")
    with store.begin("shop", epoch(store)) as tx:
        with tx.attempt():
            for setting in ("search_path = tenant, public", "app.usr = 'alice'", "role = pg_monitor"):
                tx.connection.execute(f"set {scope} {setting}")
            tx.write("kept", rows(a=[1]))
            tx.write("kept", rows(a=[2]))
            tx.merge("kept", rows(a=[3]), Merge(("a",)))
            with pytest.raises(SinkMismatch, match="no table 'sink2'"):
                tx.write("sink2", rows(a=[1]))
        finish(tx, 0, 0, reserved=0)
    assert run(postgres, "select * from tenant.kept order by a") == [(a, "pg_monitor alice") for a in (1, 2, 3)]
    assert run(postgres, "select count(*) from public.kept") == [(0,)]
