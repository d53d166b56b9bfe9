"""Behind PgBouncer: what is promised without it holds, and nobody ends a session that is somebody else's by now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from checkpoint.errors import SinkMismatch
from checkpoint.postgres import sql
from dedup.postgres import PostgresStore, epoch
from dedup.postgres.connection import connect
from kit import pg_bouncer
from kit.orders import assert_proven, batch, consumer, event, orders
from kit.pg_help import chunk, holder
from kit.pg_run import run

BEHIND = """
with others as materialized (select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid())
select count(pg_terminate_backend(pid)) from others
"""
"""End all sessions of the database: what a pooler does by itself when they are old or idle."""


@pytest.fixture(params=["session", "transaction"])
def pooled(request: pytest.FixtureRequest, postgres: str) -> Iterator[str]:
    """The database behind a pooler that gives out sessions, or a session for each transaction."""
    if pg_bouncer.program() is None:
        pytest.skip("PgBouncer is not installed (Debian: pgbouncer), and DEDUP_TEST_PGBOUNCER names none")
    with pg_bouncer.pooled(postgres, request.param) as dsn:
        yield dsn


def test_each_event_has_its_effect_once_behind_a_pooler(pooled: str, postgres: str) -> None:
    """Batches, a restart, a redelivery, a letter; sessions change in between."""
    run(postgres, "create table orders (id text, amount bigint)")
    for number in range(3):
        shop = consumer(PostgresStore(pooled))
        shop(batch(*orders(range(4)), event(4, "bad", -1)), 0)
        shop(batch(*orders(range(5, 9)), event(9, "p0-0", 0)), 1)
        run(postgres, BEHIND)
        assert run(postgres, "select count(*), count(distinct id) from orders") == [(8, 8)], number
    assert_proven(PostgresStore(pooled))


def test_what_another_client_of_the_pooler_left_takes_no_rows(pooled: str, postgres: str) -> None:
    """A path or a temporary table of a session that the pooler gives on: rows are in the sink, or the batch says what hides it."""
    run(postgres, "create table orders (id text, amount bigint); create schema staging; create table staging.orders (like orders)")
    left = ["set search_path = staging", "create temporary table if not exists orders (id text, amount bigint)"]
    done = 0
    for number in range(6):
        with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as other:
            other.execute(left[number // 3])
        with suppress(SinkMismatch):
            consumer(PostgresStore(pooled))(batch(*orders([2 * done, 2 * done + 1])), done)
            done += 1
    ((kept, elsewhere),) = run(postgres, "select count(*), (select count(*) from staging.orders) from public.orders")
    assert elsewhere == 0 and kept == PostgresStore(postgres).reserved("shop") == 2 * done >= 6


def test_an_instance_behind_a_pooler_is_not_gone_with_its_session(pooled: str, postgres: str) -> None:
    """It may live on another host, with a session that the pooler gives it at its next transaction: its silence alone counts."""
    held, waited = PostgresStore(pooled), []
    chunk(held, held.take_epoch("shop", holder("there"), takeover_after=1.0).epoch, 0, 4)
    run(postgres, BEHIND)
    other = PostgresStore(pooled)
    taken = other.take_epoch("shop", holder("elsewhere"), takeover_after=1.0, on_wait=lambda *told: waited.append(told))
    assert taken.epoch == 2 and waited
    assert [one.alive for one in other.present("shop")] == [None]


def test_processes_of_tasks_leave_no_record_behind(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a pooler no session tells that one has ended: the next one forgets it all the same, since its row identifies nobody."""
    monkeypatch.setattr(epoch, "session_of", lambda _connection: {"session": -1})  # as a pooler tells it
    number = PostgresStore(postgres).take_epoch("shop", holder(), takeover_after=1.0).epoch
    for _ in range(3):
        with connect(postgres) as connection:
            epoch.enter_slice(connection, sql.Statements("dedup"), "shop", number, holder())
    assert run(postgres, "select count(*), max(backend_pid) from dedup.member") == [(1, 0)]


def test_a_transaction_is_ended_only_while_it_is_open(postgres: str) -> None:
    """Whoever looks for a lost commit ends the session that may still commit; the same session in another transaction goes on."""
    statements = sql.Statements("dedup")
    facts = (
        "select pg_backend_pid() pid, (select backend_start from pg_stat_activity where pid = pg_backend_pid()), pg_current_xact_id()::text"
    )
    with psycopg.connect(postgres) as session, psycopg.connect(postgres, autocommit=True) as looking:
        pid, start, xid = session.execute(facts).fetchone()  # type: ignore[misc]
        session.commit()
        session.execute("select pg_current_xact_id()")
        assert looking.execute(statements["end_transaction"], {"pid": pid, "start": start, "xid": xid}).fetchall() == []
        pid, start, xid = session.execute(facts).fetchone()  # type: ignore[misc]
        assert looking.execute(statements["end_transaction"], {"pid": pid, "start": start, "xid": xid}).fetchall() == [(True,)]
        with pytest.raises(psycopg.OperationalError):
            session.execute("select 1")
