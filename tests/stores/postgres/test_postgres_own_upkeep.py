"""A consumer's own upkeep on PostgreSQL, where consumers share the tables: whose retention counts, who does it, and how it ends."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from dedup import Consumer
from dedup.postgres import PostgresStore
from dedup.signals.standing import look
from fixtures.variants import of_which
from kit.aged import ADVISORY, MONTH, age, deliver, now, turned
from kit.clock import showing
from kit.orders import batch, consumer, event, ids, write_orders
from kit.paths import environment
from kit.pg_proxy import until
from kit.pg_run import run
from kit.places import PostgresPlace

OWN = {"retention": MONTH, "upkeep": True}
PURGED = "select count(*) from dedup.reservation_generation where purged_at is not null"
WAITING = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"

CHILD = """
import sys, time
from kit.aged import MONTH, now
from kit.orders import batch, consumer, event
from dedup.postgres import PostgresStore
made = consumer(PostgresStore(sys.argv[1]), retention=MONTH, upkeep=True)
made(batch(event(1, "b", enqueued_time=now())), 1)
print("committed", flush=True)
made._upkeep._thread.join()
print("turned", flush=True)
"""


@pytest.fixture
def aged(postgres: str) -> PostgresPlace:
    """`shop` has decided its first event 90 days ago."""
    place = PostgresPlace(postgres)
    place.create_sink()
    age(place, retention=MONTH)
    return place


def go_on(place: PostgresPlace, number: int = 1) -> Consumer:
    """The next batch of a process that does its upkeep; its turn is over."""
    made = consumer(place.store(), **OWN)
    made(batch(event(number, f"b-{number}", enqueued_time=now())), number)
    turned(made)
    return made


def waiting(place: PostgresPlace) -> int:
    """The session of the portion that waits for a lock of ours, once it does."""
    until(lambda: len(run(place.url, WAITING)) == 1)
    return int(run(place.url, WAITING)[0][0])


def gone(place: PostgresPlace, session: int) -> None:
    """That session has ended."""
    until(lambda: run(place.url, f"select 1 from pg_stat_activity where pid = {session}") == [])


@pytest.mark.full
def test_a_consumer_that_told_no_retention_holds_up_the_purge_of_all(
    aged: PostgresPlace, caplog: pytest.LogCaptureFixture, dedup: Callable[..., tuple[int, str, str]]
) -> None:
    """It may need its keys for ever: the log names it, status warns, and once it told, the longest retention counts."""
    deliver(aged, 0, "x", name="two", query="q2")
    go_on(aged)
    assert run(aged.url, PURGED) == [(0,)] and "two told no retention" in caplog.text
    assert [look(aged.store(), name).holds_up for name in ("shop", "two")] == [False, True]
    code, out, _ = dedup("status", aged)
    assert code == 1 and "two: it told no retention" in out and "shop: it" not in out
    deliver(aged, 1, "y", name="two", query="q2", retention=10 * MONTH)
    go_on(aged, 2)
    assert run(aged.url, PURGED) == [(0,)], "two needs them for 300 days"
    deliver(aged, 2, "z", name="two", query="q2", retention=MONTH)
    go_on(aged, 3)
    assert run(aged.url, PURGED) == [(1,)]
    assert dedup("status", aged)[0] == 0


def test_a_consumer_that_is_deleted_holds_nothing_up(aged: PostgresPlace) -> None:
    """What it told, or not, goes with it."""
    deliver(aged, 0, "x", name="two", query="q2")
    PostgresStore(aged.url).delete_consumer("two", although_running=True, by="ann", reason="gone")
    go_on(aged)
    assert run(aged.url, PURGED) == [(1,)]
    PostgresStore(aged.url).delete_consumer("shop", although_running=True, by="ann", reason="gone")
    assert run(aged.url, "select count(*) from dedup.consumer_retention") == [(0,)]


@pytest.mark.parametrize("style", of_which(1, ["sql_standard", "postgres_verbose", "iso_8601"]))
def test_a_database_may_write_intervals_in_any_style(aged: PostgresPlace, style: str) -> None:
    """How long reservations are kept is told, and purged by, whatever IntervalStyle the database or the role has set."""
    run(aged.url, f"do $$ begin execute format('alter database %I set intervalstyle = {style}', current_database()); end $$")
    go_on(aged)
    assert run(aged.url, PURGED) == [(1,)]


@pytest.mark.full
def test_a_process_that_dies_in_its_upkeep_leaves_nothing_behind(aged: PostgresPlace) -> None:
    """Killed in the middle of a portion: its lock ends with its session, and the next process goes on with the work."""
    with psycopg.connect(aged.url) as holder:
        holder.execute("select pg_advisory_xact_lock(dedup.reservation_lock())")  # the portion waits for it
        child = subprocess.Popen([sys.executable, "-c", CHILD, aged.url], env=environment(), stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "committed\n"
        session = waiting(aged)
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    gone(aged, session)
    go_on(aged, 2)
    assert run(aged.url, PURGED) == [(1,)]
    deliver(aged, 3, "a", retention=MONTH)
    assert ids(aged.read()).count("a") == 2


def test_while_one_process_has_the_turn_no_other_one_begins(aged: PostgresPlace) -> None:
    """Its batches go on; the turn is over at once."""
    with psycopg.connect(aged.url) as holder:
        holder.execute("select pg_advisory_lock(dedup.upkeep_lock())")
        go_on(aged)
        assert run(aged.url, PURGED) == [(0,)]
    go_on(aged, 2)
    assert run(aged.url, PURGED) == [(1,)]


def test_nothing_stays_with_a_session_between_two_portions(aged: PostgresPlace) -> None:
    """A pooler gives the session to others then: neither the lock nor the limit of time is left in it, and others may have a portion."""
    deliver(aged, 1, "b", retention=MONTH)
    turn: Any = aged.store().upkeep_turn("shop", MONTH)
    before = run(aged.url, "show statement_timeout")
    done = list[str]()
    for told in turn.portions():
        done.append(told)
        assert run(aged.url, ADVISORY) == [(0,)], told
        assert turn._connection.execute("show statement_timeout").fetchall() == before, told
    assert any(told.startswith("gave up") for told in done) and len(done) > 2


def by_itself(place: PostgresPlace, retention: dt.timedelta) -> None:
    """A turn of the consumer's own upkeep."""
    turn: Any = place.store().upkeep_turn("shop", retention)
    list(turn.portions())


def by_command(place: PostgresPlace, retention: dt.timedelta) -> None:
    """As `dedup upkeep` does it."""
    PostgresStore(place.url).upkeep(retention)


@pytest.mark.parametrize("act", of_which(1, [by_itself, by_command]))
def test_a_portion_sees_what_was_committed_before_each_step(aged: PostgresPlace, act: Callable[..., None]) -> None:
    """Also where transactions are serializable by default: a packing with an older snapshot would miss keys that were freed meanwhile."""
    deliver(aged, 1, "b", retention=MONTH)
    run(aged.url, "create table seen (level text)")
    run(aged.url, "alter function dedup.pack_reservations(bigint) rename to not_called")
    told = "insert into seen select current_setting('transaction_isolation'); select null::text"
    run(aged.url, f"create function dedup.pack_reservations(portion bigint) returns text language sql as $body$ {told} $body$")
    (name,) = run(aged.url, "select current_database()")[0]
    run(aged.url, f"alter database {name} set default_transaction_isolation = serializable")
    act(aged, MONTH)
    assert run(aged.url, "select level from seen") == [("read committed",)]


@pytest.mark.parametrize("act", of_which(1, [by_itself, by_command]))
def test_the_longer_old_tables_are_kept_the_rarer_new_ones_begin(aged: PostgresPlace, act: Callable[..., None]) -> None:
    """Every batch looks at each table: where a consumer that is behind has kept one for 90 days, one is begun in three days, not in one."""
    counts = list[int]()
    for days in (2, 4):
        run(aged.url, f"update dedup.reservation_generation set created_at = now() - interval '{days} days' where closed_at is null")
        act(aged, MONTH)
        counts += [count for (count,) in run(aged.url, "select count(*) from dedup.reservation_generation where purged_at is null")]
    assert counts == [2, 3]


def test_a_host_whose_clock_is_wrong_purges_nothing_by_a_command(aged: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a consumer's own upkeep: the key of 90 days ago is known."""
    monkeypatch.setattr("dedup.postgres.upkeep.dt", showing(lambda tz: now() + dt.timedelta(days=3650)))
    deliver(aged, 1, "b", retention=MONTH)
    by_command(aged, 12 * MONTH)
    assert run(aged.url, PURGED) == [(0,)]
    deliver(aged, 2, "a", retention=MONTH)
    assert sorted(ids(aged.read())) == ["a", "b"]


def test_a_host_whose_clock_is_wrong_purges_nothing_too_early(aged: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten years ahead: the retention goes back from the server's time, and the key of 90 days ago is known."""
    monkeypatch.setattr("dedup.postgres.tending.dt", showing(lambda tz: now() + dt.timedelta(days=3650)))
    made = consumer(aged.store(), retention=12 * MONTH, upkeep=True)
    made(batch(event(1, "b", enqueued_time=now())), 1)
    turned(made)
    assert run(aged.url, PURGED) == [(0,)]
    deliver(aged, 2, "a", retention=MONTH)
    assert sorted(ids(aged.read())) == ["a", "b"]


def test_a_stop_cancels_the_portion_that_runs(aged: PostgresPlace, caplog: pytest.LogCaptureFixture) -> None:
    """The portion waits for a lock: stop ends it at once, its connection is gone, and nothing is logged as a failure."""
    made = consumer(aged.store(), **OWN)
    with psycopg.connect(aged.url) as holder:
        holder.execute("select pg_advisory_xact_lock(dedup.reservation_lock())")
        made(batch(event(1, "b", enqueued_time=now())), 1)
        session = waiting(aged)
        began = time.monotonic()
        made._stop_upkeep()
        assert time.monotonic() - began < 4
        gone(aged, session)
    turned(made)
    assert "upkeep" not in caplog.text


def test_no_batch_waits_while_a_portion_waits(aged: PostgresPlace) -> None:
    """A purge that hangs behind another one's lock: batches commit beside it."""
    made = consumer(aged.store(), **OWN)
    with psycopg.connect(aged.url) as holder:
        holder.execute("select pg_advisory_xact_lock(dedup.reservation_lock())")
        for number in (1, 2, 3):
            assert made(batch(event(number, f"c{number}", enqueued_time=now())), number).processed == 1
            waiting(aged)
    turned(made)
    assert run(aged.url, PURGED) == [(1,)]


def test_old_messages_that_take_long_to_find_hold_up_no_purge(aged: PostgresPlace) -> None:
    """They are looked for in all of the outbox, and last: the reservations are given up before that ends."""
    made = consumer(aged.store(), **OWN)
    with psycopg.connect(aged.url) as holder:
        holder.execute("lock table dedup.outbox in access exclusive mode")
        made(batch(event(1, "b", enqueued_time=now())), 1)
        until(lambda: run(aged.url, PURGED) == [(1,)])
        waiting(aged)
    turned(made)


@pytest.mark.full
def test_a_handler_that_is_slow_holds_up_no_purge(aged: PostgresPlace) -> None:
    """While a batch is open, the turn that began before it purges; the batch commits."""
    made, gate = consumer(aged.store(), **OWN), threading.Event()
    made._handler = None

    @made.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        """Wait in the second batch until the purge is done."""
        if gate.is_set():
            until(lambda: run(aged.url, PURGED) == [(1,)])
        write_orders(rows, tx)

    with psycopg.connect(aged.url) as holder:
        holder.execute("select pg_advisory_xact_lock(dedup.reservation_lock())")
        made(batch(event(1, "b", enqueued_time=now())), 1)
        waiting(aged)
        gate.set()
        threading.Timer(0.5, holder.rollback).start()
        assert made(batch(event(2, "c", enqueued_time=now())), 2).processed == 1
    turned(made)


@pytest.mark.full
def test_a_role_that_may_not_purge_is_told_what_to_do(
    aged: PostgresPlace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches go on; after three failures the log says which right is missing and which command to run, and the upkeep rests."""
    caplog.set_level(logging.WARNING, "dedup")
    run(aged.url, "alter function dedup.purge_reservations(timestamptz, text[]) rename to not_granted")
    made = consumer(aged.store(), **OWN)
    assert made._upkeep is not None
    monkeypatch.setattr(made._upkeep, "_pace", type(made._upkeep._pace)(every=0.0, pause=1000.0))
    for number in range(1, 6):
        assert made(batch(event(number, f"c{number}", enqueued_time=now())), number).processed == 1
        turned(made)
    (warned,) = [r.getMessage() for r in caplog.records if "its upkeep failed" in r.getMessage()]
    assert "failed 3 times" in warned and "purge_reservations" in warned and "the longest `--retention` that any consumer" in warned


def test_a_long_retention_is_told_as_it_is(aged: PostgresPlace) -> None:
    """To the microsecond, however long; a consumer that has none any more tells that, too."""
    store = PostgresStore(aged.url)
    for given in (dt.timedelta(days=36_500, microseconds=1), dt.timedelta(0), None):
        store.tell_retention("shop", given, upkeep=False)
        assert run(aged.url, "select retention from dedup.consumer_retention") == [(given,)]
