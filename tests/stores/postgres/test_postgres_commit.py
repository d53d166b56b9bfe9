"""Connections that break: before, during and after the commit, and between two chunks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from checkpoint.errors import CommitConflict, CommitUnknown, Fenced, StoreUnavailable
from checkpoint.head import Checkpoint
from deadletter.store import Commit
from dedup.consumer import Consumer
from dedup.core.steps import Advance
from dedup.pipeline.report import Report
from dedup.postgres import PostgresStore, commit
from kit.orders import assert_proven, batch, consumer, orders
from kit.pg_help import ORDERS, WAITING, chunk, epoch, finish, keys, record, rows
from kit.pg_proxy import Proxy, proxied, until
from kit.pg_run import run
from kit.pg_server import Server, running_server

pytestmark = pytest.mark.crash


@pytest.fixture
def proxy(postgres: str) -> Iterator[Proxy]:
    run(postgres, "create table sink (a int)")
    with proxied(int(conninfo_to_dict(postgres)["port"] or 5432)) as made:
        yield made


@pytest.fixture
def store(postgres: str, proxy: Proxy) -> PostgresStore:
    return PostgresStore(make_conninfo(postgres, host="127.0.0.1", port=proxy.port))


def test_a_commit_whose_answer_was_lost_is_read_back_as_committed(store: PostgresStore, proxy: Proxy, postgres: str) -> None:
    """The server committed, the client never heard: the batch record says so, and nothing runs twice."""
    number = epoch(store)
    told: list[str] = []
    store.on_step = told.append
    with store.begin("shop", number) as tx:
        tx.reserve(keys([1]))
        tx.write("sink", rows(a=[1]))
        proxy.armed = True
        finish(tx, 0, 0)
        assert tx.committed
    assert proxy.cut.wait(10) and told[-1] == "committed"
    assert run(postgres, "select a from sink") == [(1,)] and store.head("shop").seq == 1
    assert chunk(store, number, 1, 1, batch_id=1) == 1, "the same key again is known"


def test_a_commit_without_a_record_is_read_back_too(store: PostgresStore, proxy: Proxy) -> None:
    """The decision's own number is enough."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        proxy.armed = True
        tx.execute(Commit())
    assert proxy.cut.wait(10) and store.head("shop").seq == 1


def test_a_commit_that_never_arrived_is_read_back_as_not_committed(store: PostgresStore, proxy: Proxy, postgres: str) -> None:
    """Nothing of it is true, and that is certain when it is said: the session that might still commit has ended."""
    number, proxy.deliver = epoch(store), False
    with pytest.raises(StoreUnavailable, match="Nothing"), store.begin("shop", number) as tx:
        tx.write("sink", rows(a=[1]))
        proxy.armed = True
        finish(tx, 0, 0)
    assert run(postgres, "select count(*) from sink") == [(0,)]
    assert chunk(store, number, 0, 0) == 0


def test_a_session_that_might_still_commit_is_ended_before_it_is_called_not_committed(
    store: PostgresStore, proxy: Proxy, postgres: str
) -> None:
    """The network went dark before COMMIT arrived: the server's session waits with all its locks, and must not commit later."""
    number, proxy.deliver, proxy.hold = epoch(store), False, True
    with pytest.raises(StoreUnavailable, match="Nothing"), store.begin("shop", number) as tx:
        tx.write("sink", rows(a=[1]))
        session = tx._attempt.backend_pid
        proxy.armed = True
        finish(tx, 0, 0)
    assert run(postgres, "select count(*) from pg_stat_activity where pid = %s", [session]) == [(0,)]
    assert chunk(store, number, 0, 0) == 0


def test_a_commit_in_doubt_is_waited_for_by_the_next_chunk(postgres: str) -> None:
    """An earlier transaction of the same epoch that has not ended yet: its outcome is part of the head that is read."""
    store = PostgresStore(postgres)
    number = epoch(store)
    chunk(store, number, 0, 4)
    with ThreadPoolExecutor(1) as pool:
        with store.begin("shop", number) as doubtful:
            doubtful.execute(record(5, 9, batch_id=1))
            doubtful.execute(Advance({ORDERS: Checkpoint(9)}))
            later = pool.submit(chunk, PostgresStore(postgres), number, 10, 14, 2)
            until(lambda: run(postgres, WAITING) == [(1,)] or later.done())
            doubtful.execute(Commit())
        assert later.result() == 0
    assert store.head("shop").seq == 3 and store.head("shop").checkpoints[ORDERS].sequence_number == 14


def test_a_first_commit_in_doubt_makes_the_next_chunk_plan_again(postgres: str) -> None:
    """Before there are checkpoints there is nothing to wait for at the start: then the keys wait, and the checkpoint tells."""
    store = PostgresStore(postgres)
    number = epoch(store)
    with ThreadPoolExecutor(1) as pool:
        with store.begin("shop", number) as doubtful:
            doubtful.reserve(keys(range(5)))
            later = pool.submit(chunk, PostgresStore(postgres), number, 0, 4)
            until(lambda: run(postgres, WAITING) == [(1,)] or later.done())
            finish(doubtful, 0, 4)
        with pytest.raises(CommitConflict):
            later.result()
    assert store.head("shop").seq == 1


def decided_twice(shop: Consumer, at: int) -> tuple[list[Report], int]:
    """One batch, which another thread is given, too, before statement `at` of this one's call; returns the reports and the statements."""
    this, execute, made, other = threading.get_ident(), psycopg.Cursor.execute, [], []

    def meanwhile(cursor: Any, query: Any, *given: Any, **named: Any) -> Any:
        if threading.get_ident() == this:
            made.append(query)
            if len(made) == at:
                other.append(threads.submit(shop.process, batch(*orders(range(3)))))
                wait(other, 0.2)  # it may have to wait for this one
        return execute(cursor, query, *given, **named)

    with ThreadPoolExecutor(1) as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", meanwhile)
        mine = shop.process(batch(*orders(range(3))))
        return [mine, *(future.result(30) for future in other)], len(made)


def test_the_first_batch_is_decided_once_wherever_another_call_of_it_commits(postgres: str) -> None:
    """Before there is a checkpoint nothing is locked: between any two statements, the same rows may be committed by another thread."""
    run(postgres, "create table orders (id text, amount bigint)")
    at, statements = 0, 1
    while at < statements:
        at += 1
        shop = consumer(PostgresStore(postgres), name=f"shop{at}")
        shop.process(batch())  # takes the epoch
        reports, statements = decided_twice(shop, at)
        assert sorted((r.processed, r.redelivered) for r in reports) == [(0, 3), (3, 0)][-len(reports) :], f"at statement {at}"
        assert_proven(shop.store, shop.name)
    assert at > 15


def test_a_commit_that_cannot_be_read_back_is_unknown(store: PostgresStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that either outcome is safe; afterwards the tables know which it was."""
    monkeypatch.setattr(commit, "READ_BACK_SECONDS", 0.5)
    number = epoch(store)
    with pytest.raises(CommitUnknown, match="run the batch again"), store.begin("shop", number) as tx:
        proxy.armed = proxy.refuse = True
        finish(tx, 0, 0)
    proxy.refuse = False
    assert store.head("shop").seq == 1


def test_a_takeover_during_the_commit_is_fenced(store: PostgresStore, proxy: Proxy, postgres: str) -> None:
    """Lost before it arrived, and another instance is there already: stop, do not run again."""
    number, proxy.deliver = epoch(store), False
    with pytest.raises(Fenced), store.begin("shop", number) as tx:
        tx.execute(record(0, 0))
        epoch(PostgresStore(postgres))
        proxy.armed = True
        tx.execute(Commit())


def test_a_connection_lost_in_mid_chunk_commits_nothing(store: PostgresStore, postgres: str) -> None:
    """The error says that the batch can be run again; so it can, on the same store."""
    number = epoch(store)
    with pytest.raises(StoreUnavailable, match="try again"), store.begin("shop", number) as tx:
        tx.reserve(keys([1]))
        run(postgres, "select pg_terminate_backend(backend_pid) from dedup.heartbeat")
        tx.execute(record(0, 0))
    with pytest.raises(StoreUnavailable), store.begin("shop", number) as tx, tx.attempt():
        run(postgres, "select pg_terminate_backend(backend_pid) from dedup.heartbeat")
        tx.connection.execute("select 1")
    assert chunk(store, number, 0, 0) == 0


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A server that a test may stop."""
    with running_server() as server:
        yield server


@pytest.mark.full
@pytest.mark.postgres
def test_a_server_that_restarts_between_two_chunks_is_not_noticed(own_server: Server) -> None:
    """Idle connections are replaced when they are needed, after a crash of the server, too; committed work is there."""
    store = PostgresStore(own_server.dsn)
    number = epoch(store)
    chunk(store, number, 0, 9)
    own_server.kill()
    own_server.start()
    assert chunk(store, number, 10, 19, batch_id=1) == 0
    assert store.head("shop").seq == 2 and store.reserved("shop") == 20
    own_server.stop()
    with pytest.raises(StoreUnavailable, match="cannot be reached"), store.begin("shop", number):
        pass
    own_server.start()
    assert chunk(store, number, 15, 20, batch_id=2) == 5
    store.close()


def test_only_one_of_two_drivers_errors_leaves_the_package(postgres: str) -> None:
    """Whatever psycopg raises for our own statements arrives as one of our errors, with the cause kept."""
    store = PostgresStore(make_conninfo(postgres, dbname="no_such_database"))
    with pytest.raises(StoreUnavailable) as raised:
        store.head("shop")
    assert isinstance(raised.value.__cause__, psycopg.Error)
