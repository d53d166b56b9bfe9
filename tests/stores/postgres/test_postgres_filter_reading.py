"""How the filter of known keys is read: beside everything else, when it is worth it, and void where a table changed meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint.postgres.sql import quoted
from deadletter.store import Commit
from dedup.core.bloom import Bloom
from dedup.postgres import PostgresStore, key_filter, wire
from dedup.postgres.key_filter import KnownFilter, words_of
from kit.known_filter_kit import chunk, filtering, has_read, read
from kit.pg_help import WAITING, epoch, keys
from kit.pg_run import run


@pytest.fixture
def store(postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    """One that uses its filter for every transaction, and reads it whenever it has none."""
    yield from filtering(postgres, monkeypatch)


def test_a_rotation_while_the_filter_is_read_makes_it_useless(store: PostgresStore, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a table that took new keys meanwhile is not all that is in it now that it is closed."""
    epoch(store)
    chunk(store, 0, 9)
    read(store).surprised()
    of_table = KnownFilter._of_table

    def and_then(*given: object) -> Iterator[wire.Keys]:
        yield from of_table(*given)  # type: ignore[arg-type]
        monkeypatch.setattr(KnownFilter, "_of_table", of_table)
        other = PostgresStore(postgres, filter_memory=0)
        epoch(other, "other")
        chunk(other, 20, 29, "other")
        other.rotate_reservations()

    monkeypatch.setattr(KnownFilter, "_of_table", and_then)
    chunk(store, 10, 12)
    assert not has_read(store)
    assert chunk(store, 15, 34) == 10


def test_a_batch_never_waits_for_the_reader(store: PostgresStore, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may have to wait in the database behind somebody who waits for this very batch: nobody could end that circle."""
    epoch(store)
    chunk(store, 0, 9)
    read(store).surprised()
    of_table = KnownFilter._of_table
    reached, go_on = threading.Event(), threading.Event()

    def and_then(*given: Any) -> Iterator[wire.Keys]:
        yield from of_table(*given)
        reached.set()
        go_on.wait(20)

    monkeypatch.setattr(KnownFilter, "_of_table", and_then)
    with store.begin_letters("shop") as tx, ThreadPoolExecutor(1) as beside:
        tx.ask(keys(range(20, 30))["key"])
        assert reached.wait(20)
        rewriting = beside.submit(run, make_conninfo(postgres, options="-c lock_timeout=20s"), "vacuum full dedup.reservation_generation")
        waits_for_lock(postgres, 1)
        go_on.set()
        waits_for_lock(postgres, 2)
        assert tx.reserve(keys(range(20, 30))).num_rows == 0
        tx.execute(Commit())
        rewriting.result(20)
    assert has_read(store)


def waits_for_lock(dsn: str, sessions: int) -> None:
    """Wait until so many sessions wait for another one."""
    until = time.monotonic() + 20
    while run(dsn, WAITING) != [(sessions,)]:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_forked_child_waits_for_nobody(store: PostgresStore) -> None:
    """In the parent somebody may hold the filter's lock at that moment, who is not there in the child."""
    epoch(store)
    chunk(store, 0, 9)
    with read(store)._lock:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            try:
                os._exit(10 - chunk(store, 5, 14))
            finally:
                os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_a_reading_that_fails_is_not_tried_again_with_each_batch(store: PostgresStore, postgres: str) -> None:
    """A role whose statements may not last is one: each next try comes after twice as many keys."""
    epoch(store)
    tries: list[int] = []

    def failing(*given: object) -> Iterator[wire.Keys]:
        tries.append(1)
        raise psycopg.errors.QueryCanceled

    store.known_filter._keys = failing  # type: ignore[assignment, method-assign]
    for turn in range(16):
        chunk(store, 10 * turn, 10 * turn + 9)
    read(store)
    assert len(tries) == 5


def test_a_runtime_role_reads_the_filter_in_a_schema_of_any_name(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read and write rows is right enough for it, and no character of a name means anything in a statement."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
    schema, role = "{child} D\"é%s %(first)s '$1", f"r_{uuid.uuid4().hex[:8]}"
    PostgresStore(postgres, schema=schema).migrate()
    rights = "grant usage on schema {0} to {1}; grant select, insert, update, delete on all tables in schema {0} to {1}"
    rights += "; grant execute on function {0}.rotate_reservations() to {1}; grant usage on all sequences in schema {0} to {1}"
    run(postgres, f"create role {role} login")
    run(postgres, rights.replace("{0}", quoted(schema)).replace("{1}", role))
    try:
        store = PostgresStore(make_conninfo(postgres, user=role), schema=schema)
        epoch(store)
        chunk(store, 0, 9)
        store.rotate_reservations()
        chunk(store, 10, 19)
        assert has_read(store) and chunk(store, 5, 24) == 15
        store.close()
    finally:
        run(postgres, f"drop owned by {role}; drop role {role}")


def test_a_table_that_was_rewritten_while_it_was_read_was_not_read(
    store: PostgresStore, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VACUUM FULL moves rows to pages that were read before: such a reading counts for nothing."""
    epoch(store)
    monkeypatch.setattr(key_filter, "_PAGES", 1)
    chunk(store, 0, 999)
    read(store).surprised()
    binary = key_filter._binary

    def and_then(*given: object) -> wire.Keys:
        found = binary(*given)  # type: ignore[arg-type]
        if b"reservation_000001" not in given[1]:  # type: ignore[operator]
            return found
        monkeypatch.setattr(key_filter, "_binary", binary)
        run(postgres, "vacuum full dedup.reservation_000001")
        return found

    monkeypatch.setattr(key_filter, "_binary", and_then)
    chunk(store, 2000, 2009)
    assert not has_read(store)
    chunk(store, 2010, 2019)
    assert has_read(store) and chunk(store, 0, 999) == 1000


def test_a_table_that_is_dropped_while_it_is_asked_about_ends_the_reading(store: PostgresStore, postgres: str) -> None:
    """A purge that commits while the reader waits for its lock makes the reading void, like any error of the database."""
    epoch(store)
    chunk(store, 0, 9)
    store.rotate_reservations()
    read(store)
    with psycopg.connect(postgres) as purging, store.fresh() as connection, ThreadPoolExecutor(1) as beside:
        purging.execute("select dedup.purge_reservations('2999-01-01', array['shop']), dedup.drop_purged_reservations()")
        reading = beside.submit(list, store.known_filter._of_table(connection, "dedup.reservation_000001"))
        waits_for_lock(postgres, 1)
        purging.commit()
        with pytest.raises(psycopg.Error):
            reading.result(20)


def test_a_table_of_many_pages_is_read_to_its_end(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read some at a time, and none is left out at the seams."""
    epoch(store)
    monkeypatch.setattr(key_filter, "_PAGES", 2)
    chunk(store, 0, 3009)
    read(store).surprised()
    chunk(store, 4000, 4000)  # reads: what is committed by now, for certain
    assert has_read(store)
    bloom = store.known_filter._whole.bloom if store.known_filter._whole else Bloom(1)
    assert bloom.may_have(*words_of(wire.keys_of(keys(range(3010))["key"]))).all()


def test_a_filter_that_would_be_too_large_is_not_made(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by filter_memory=; without a filter every key is looked up."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    store = PostgresStore(postgres, filter_memory=1024)
    epoch(store)
    chunk(store, 0, 9)
    assert not has_read(store) and chunk(store, 5, 14) == 5
    store.close()


def test_small_batches_read_no_filter(postgres: str) -> None:
    """What few keys cost is less than a filter does."""
    store = PostgresStore(postgres)
    epoch(store)
    chunk(store, 0, key_filter.FEW - 1)
    assert store.known_filter._reader is None


def test_a_filter_waits_until_it_is_worth_reading(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large table is not read for a few batches, and less and less often where other instances write, too."""
    monkeypatch.setattr(key_filter, "_CHEAPER", 1)
    epoch(store)
    chunk(store, 0, 999)
    read(store).surprised()
    chunk(store, 1000, 1009)
    assert not has_read(store)
    for _ in range(6):  # known ones: the table, whose size is looked at meanwhile, does not grow with what was asked
        chunk(store, 0, 999)
    assert has_read(store)


def test_a_store_that_nobody_has_any_more_is_gone_at_once() -> None:
    """Its sessions end without a search for cycles: the filter does not hold on to the store that has it."""
    gc.disable()
    try:
        store = PostgresStore("host=nowhere")
        gone = weakref.ref(store)
        del store
        assert gone() is None
    finally:
        gc.enable()
