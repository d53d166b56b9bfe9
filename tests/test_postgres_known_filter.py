"""The filter of known keys: what it rules out is not looked up, and nothing that was decided is ever done again because of it."""

from __future__ import annotations

import datetime as dt
import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pg_server
import psycopg
import pyarrow as pa
import pytest
from fix_postgres import run
from hypothesis import given
from hypothesis import strategies as st
from pg_help import WAITING, epoch, keep_copy, keys, letter, park
from psycopg.conninfo import make_conninfo

from checkpoint.postgres.sqlfiles import quoted
from deadletter.selection import Selection
from dedup.deadletters import DeadLetters
from dedup.postgres import PostgresStore, arrays, known_filter, reserve
from dedup.postgres.bloom import Bloom
from dedup.postgres.known_filter import KnownFilter
from dedup.steps import Commit, Free
from dedup.store import KEYS

LATER = dt.datetime(2999, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def store(postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    """One that uses its filter for every transaction, and reads it whenever it has none."""
    monkeypatch.setattr(known_filter, "FEW", 0)
    monkeypatch.setattr(known_filter, "_CHEAPER", 10**9)
    made = PostgresStore(postgres)
    yield made
    made.close()


def chunk(store: PostgresStore, first: int, last: int, consumer: str = "shop") -> int:
    """Reserve the keys first..last, and commit; returns how many of them were known. What is being read is read before."""
    read(store)
    with store.begin_letters(consumer) as tx:
        known = tx.reserve(keys(range(first, last + 1))).num_rows
        tx.execute(Commit())
    return known


def read(store: PostgresStore) -> KnownFilter:
    """Wait for the reader; returns the filter."""
    if store.known_filter._reader is not None:
        store.known_filter._reader.join(20)
    return store.known_filter


def has_read(store: PostgresStore) -> bool:
    """Whether there is a filter."""
    return read(store)._whole is not None


def digests(count: int, name: str = "") -> arrays.Keys:
    """Keys as they are."""
    return np.frombuffer(b"".join(hashlib.sha256(f"{name}{i}".encode()).digest()[:16] for i in range(count)), dtype="V16")


def looked_up(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each later transaction asks the database for."""
    counts: list[int] = []
    found = arrays.uuid_array

    def counted(asked: arrays.Keys) -> arrays.UuidArray:
        counts.append(len(asked))
        return found(asked)

    monkeypatch.setattr(arrays, "uuid_array", counted)
    return counts


def test_no_key_that_is_in_seems_not_to_be() -> None:
    """A key that the filter rules out is surely not known, and of the others few are looked up for nothing."""
    bloom = Bloom(100_000)
    known = digests(100_000)
    first, *rest = np.array_split(known, 2)
    bloom.add(first)
    assert bloom.may_have(digests(100_000, "other")).mean() < 0.0005
    for part in rest:
        bloom.add(part)
    assert bloom.may_have(known).all()
    assert bloom.may_have(digests(100_000, "other")).mean() < 0.005
    assert not bloom.crowded
    bloom.add(digests(100_001, "more"))
    assert bloom.crowded and bloom.may_have(known).all()


def test_new_keys_are_not_looked_up_and_known_ones_are_found(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a filter the database is asked about keys that may be known, of the current table and of closed ones."""
    epoch(store)
    chunk(store, 0, 99)
    store.rotate_reservations()
    chunk(store, 500, 699)
    assert has_read(store)
    chunk(store, 100, 199)
    counts = looked_up(store, monkeypatch)
    assert chunk(store, 1000, 1999) == 0
    assert chunk(store, 50, 249) == 150
    assert counts[0] < 50 and 150 <= counts[1] < 170


def test_copies_of_new_keys_read_no_index_of_older_tables(store: PostgresStore, postgres: str) -> None:
    """What may be known is looked for in the current table first, and elsewhere only where that one does not have it."""
    epoch(store)
    for first in (0, 100, 200):
        chunk(store, first, first + 99)
        store.rotate_reservations()
    chunk(store, 300, 399)
    statement = store._sql.of("likely_keys", "dedup.reservation_000004")
    with psycopg.connect(postgres) as connection:
        assert _asked(connection, statement, range(300, 310)) == {"reservation_000004": 10}
        assert _asked(connection, statement, range(5, 10))["reservation_000001"] == 5


def _asked(connection: psycopg.Connection[Any], statement: bytes, wanted: range) -> dict[str, int]:
    """Table -> how often the plan of this statement has really asked it."""
    uuids = [uuid.UUID(bytes=key) for key in keys(wanted)["key"].to_pylist()]
    row = connection.execute(b"explain (analyze, format json) " + statement, {"keys": uuids}).fetchone()
    assert row is not None
    found: dict[str, int] = {}
    waiting = [row[0][0]["Plan"]]
    while waiting:
        node = waiting.pop()
        waiting += node.get("Plans", [])
        if node.get("Relation Name", "").startswith("reservation") and node["Actual Loops"]:
            found[node["Relation Name"]] = found.get(node["Relation Name"], 0) + node["Actual Loops"]
    return found


def test_what_another_copy_reserved_since_is_found_all_the_same(store: PostgresStore, postgres: str) -> None:
    """The unique index is the judge: a key that the filter does not know is not reserved twice, and the filter is given up."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    other = PostgresStore(postgres, filter_memory=0)
    epoch(other, "other")
    chunk(other, 20, 29, "other")
    assert chunk(store, 15, 34) == 10
    assert store.known_filter._whole is None
    assert run(postgres, "select count(*), count(distinct key) from dedup.reservation") == [(30, 30)]


def test_a_rotation_by_another_copy_makes_the_filter_useless(store: PostgresStore, postgres: str) -> None:
    """A closed table has keys that the filter never saw, and no index judges there: it is read anew before it is believed."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    other = PostgresStore(postgres, filter_memory=0)
    epoch(other, "other")
    chunk(other, 20, 29, "other")
    other.rotate_reservations()
    assert chunk(store, 15, 34) == 10
    assert run(postgres, "select count(*), count(distinct key) from dedup.reservation") == [(30, 30)]
    assert has_read(store) and chunk(store, 0, 39) == 30


def test_a_rotation_while_the_filter_is_read_makes_it_useless(store: PostgresStore, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a table that took new keys meanwhile is not all that is in it now that it is closed."""
    epoch(store)
    chunk(store, 0, 9)
    read(store).surprised()
    of_table = KnownFilter._of_table

    def and_then(*given: object) -> Iterator[arrays.Keys]:
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


def test_a_restored_database_is_another_one(store: PostgresStore, postgres: str) -> None:
    """After a restore the same number may name another table: then the filter of the first one is not believed."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    run(postgres, "update dedup.reservation_generation set created_at = created_at + interval '1 microsecond'")
    with store.begin_letters("shop") as tx:
        tx.ask(keys(range(5))["key"])
        assert not tx._asked.filtered


def test_an_older_copy_of_the_database_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in the place of this one it has the same table, but also keys that were freed since: the filter of this one is not believed."""
    monkeypatch.setattr(known_filter, "FEW", 0)
    monkeypatch.setattr(known_filter, "_CHEAPER", 10**9)
    with pg_server.running_server() as server:
        store = PostgresStore(server.dsn)
        epoch(store)
        chunk(store, 0, 9)
        store.rotate_reservations()
        fail_over = keep_copy(server)
        with store.begin_letters("shop") as tx:
            tx.execute(Free(keys(range(10)).select(["key"])))
            tx.execute(Commit())
        chunk(store, 20, 29)
        assert has_read(store)
        fail_over()
        assert chunk(store, 0, 9) == 10
        store.close()


def test_data_that_were_restored_are_other_data(store: PostgresStore, postgres: str) -> None:
    """A dump that is played back into the same tables has the same numbers and times, but was written by another transaction."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    run(
        postgres,
        "with gone as (delete from dedup.reservation_generation returning *) select * into kept from gone;"
        "insert into dedup.reservation_generation select * from kept",
    )
    with store.begin_letters("shop") as tx:
        tx.ask(keys(range(5))["key"])
        assert not tx._asked.filtered


def test_a_key_that_a_letter_gets_back_by_an_edit_is_reserved(store: PostgresStore, postgres: str) -> None:
    """After a purge nothing else holds it, and the filter was read when nobody did: a copy of that event is a duplicate all the same."""
    epoch(store)
    (found,) = park(store, [letter(5)])
    chunk(store, 10, 19)
    letters = DeadLetters(store)
    letters.edit(found, key="z", by="ann", reason="")
    z = store.letters(Selection(ids=(found,)))["key"].combine_chunks()
    letters.edit(found, key="y", by="ann", reason="")
    store.rotate_reservations()
    store.purge_reservations(LATER)
    chunk(store, 20, 29)
    assert has_read(store)
    letters.edit(found, key="z", by="ann", reason="")
    with store.begin_letters("shop") as tx:
        assert tx.reserve(pa.table([z, pa.array([7])], schema=KEYS)).num_rows == 1


def test_a_key_that_was_freed_while_it_was_asked_for_is_reserved(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken when it was to be reserved, free when it was looked up: what counts as new is reserved, or a copy of it would be new again."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    other = PostgresStore(store.dsn, filter_memory=0)
    epoch(other, "other")
    chunk(other, 20, 29, "other")
    take_free = reserve._take_free

    def and_then(*given: Any) -> arrays.Keys:
        monkeypatch.setattr(reserve, "_take_free", take_free)
        raced = take_free(*given)
        with other.begin_letters("other") as tx:
            tx.execute(Free(keys(range(20, 25)).select(["key"])))
            tx.execute(Commit())
        return raced

    monkeypatch.setattr(reserve, "_take_free", and_then)
    assert chunk(store, 15, 34) == 5
    assert run(store.dsn, "select count(*), count(distinct key) from dedup.reservation") == [(30, 30)]


def test_a_batch_never_waits_for_the_reader(store: PostgresStore, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may have to wait in the database behind somebody who waits for this very batch: nobody could end that circle."""
    epoch(store)
    chunk(store, 0, 9)
    read(store).surprised()
    of_table = KnownFilter._of_table
    reached, go_on = threading.Event(), threading.Event()

    def and_then(*given: Any) -> Iterator[arrays.Keys]:
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


def test_keys_that_somebody_put_into_the_parent_are_found(store: PostgresStore, postgres: str) -> None:
    """What is looked up without a filter is found with one: the tables and their parent."""
    epoch(store)
    chunk(store, 0, 9)
    run(postgres, "with gone as (delete from dedup.reservation returning *) insert into dedup.reservation select * from gone")
    read(store).surprised()
    chunk(store, 20, 29)
    assert has_read(store) and chunk(store, 0, 9) == 10


def test_a_reading_that_fails_is_not_tried_again_with_each_batch(store: PostgresStore, postgres: str) -> None:
    """A role whose statements may not last is one: each next try comes after twice as many keys."""
    epoch(store)
    tries: list[int] = []

    def failing(*given: object) -> Iterator[arrays.Keys]:
        tries.append(1)
        raise psycopg.errors.QueryCanceled

    store.known_filter._keys = failing  # type: ignore[assignment, method-assign]
    for turn in range(16):
        chunk(store, 10 * turn, 10 * turn + 9)
    read(store)
    assert len(tries) == 5


def test_a_runtime_role_reads_the_filter_in_a_schema_of_any_name(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read and write rows is right enough for it, and no character of a name means anything in a statement."""
    monkeypatch.setattr(known_filter, "FEW", 0)
    monkeypatch.setattr(known_filter, "_CHEAPER", 10**9)
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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.booleans())
def test_among_is_what_a_set_says(some: list[tuple[int, int]], others: list[tuple[int, int]], high_bits: bool) -> None:
    """Also for keys that share their first half, that come twice, that use the highest bits, and for none."""
    top = 2**64 - 6 if high_bits else 0
    mine, theirs = (
        np.frombuffer(b"".join((top + a).to_bytes(8, "big") + (top + b).to_bytes(8, "big") for a, b in pairs), dtype="V16")
        for pairs in (some, others)
    )
    ordered = mine[arrays.order_of(mine)]
    assert [k.tobytes() for k in ordered] == sorted(k.tobytes() for k in mine)
    there = {k.tobytes() for k in theirs}
    assert arrays.among(ordered, theirs).tolist() == [k.tobytes() in there for k in ordered]


def test_keys_of_letters_are_known_where_their_table_was_purged(store: PostgresStore) -> None:
    """What only a letter holds is in the filter as well: else an event would run whose copy waits to be reprocessed."""
    epoch(store)
    park(store, [letter(5), letter(6)])
    read(store)
    store.rotate_reservations()
    assert store.purge_reservations(LATER) == 1
    chunk(store, 100, 109)
    assert has_read(store)
    assert chunk(store, 0, 9) == 2


def test_a_table_that_was_rewritten_while_it_was_read_was_not_read(
    store: PostgresStore, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VACUUM FULL moves rows to pages that were read before: such a reading counts for nothing."""
    epoch(store)
    monkeypatch.setattr(known_filter, "_PAGES", 1)
    chunk(store, 0, 999)
    read(store).surprised()
    binary = known_filter._binary

    def and_then(*given: object) -> arrays.Keys:
        found = binary(*given)  # type: ignore[arg-type]
        if b"reservation_000001" not in given[1]:  # type: ignore[operator]
            return found
        monkeypatch.setattr(known_filter, "_binary", binary)
        run(postgres, "vacuum full dedup.reservation_000001")
        return found

    monkeypatch.setattr(known_filter, "_binary", and_then)
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
        purging.execute("select dedup.purge_reservations('2999-01-01')")
        reading = beside.submit(list, store.known_filter._of_table(connection, "dedup.reservation_000001"))
        waits_for_lock(postgres, 1)
        purging.commit()
        with pytest.raises(psycopg.Error):
            reading.result(20)


def test_a_table_of_many_pages_is_read_to_its_end(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read some at a time, and none is left out at the seams."""
    epoch(store)
    monkeypatch.setattr(known_filter, "_PAGES", 2)
    chunk(store, 0, 3009)
    read(store).surprised()
    chunk(store, 4000, 4000)  # reads: what is committed by now, for certain
    assert has_read(store)
    _, bloom = store.known_filter._whole or (None, Bloom(1))
    assert bloom.may_have(arrays.keys_of(keys(range(3010))["key"])).all()


def test_a_filter_that_would_be_too_large_is_not_made(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by filter_memory=; without a filter every key is looked up."""
    monkeypatch.setattr(known_filter, "FEW", 0)
    store = PostgresStore(postgres, filter_memory=1024)
    epoch(store)
    chunk(store, 0, 9)
    assert not has_read(store) and chunk(store, 5, 14) == 5
    store.close()


def test_small_batches_read_no_filter(postgres: str) -> None:
    """What few keys cost is less than a filter does."""
    store = PostgresStore(postgres)
    epoch(store)
    chunk(store, 0, known_filter.FEW - 1)
    assert store.known_filter._reader is None


def test_a_filter_waits_until_it_is_worth_reading(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large table is not read for a few batches, and less and less often where other copies write, too."""
    monkeypatch.setattr(known_filter, "_CHEAPER", 1)
    epoch(store)
    chunk(store, 0, 999)
    read(store).surprised()
    chunk(store, 1000, 1009)
    assert not has_read(store)
    for _ in range(6):  # known ones: the table, whose size is looked at meanwhile, does not grow with what was asked
        chunk(store, 0, 999)
    assert has_read(store)


_HAMMER = """
import sys
sys.path[:0] = [".", "tests"]
from pg_help import *
from test_postgres_known_filter import chunk
from dedup.postgres import known_filter
known_filter.FEW, known_filter._CHEAPER = 0, 10**9
store, mine, seed = PostgresStore(sys.argv[1]), sys.argv[2], int(sys.argv[3])
import random
draw, new = random.Random(seed), 0
epoch(store, mine)
for turn in range(60):
    if draw.random() < 0.1:
        store.rotate_reservations()
    first = draw.randrange(0, 400)
    new += 25 - chunk(store, first, first + 24, mine)
print(new)
"""


def test_copies_that_write_the_same_keys_reserve_each_once(postgres: str) -> None:
    """Four processes with filters of their own, rotating at random: every key is new for exactly one of them."""
    PostgresStore(postgres).migrate()
    children = [
        subprocess.Popen([sys.executable, "-c", _HAMMER, postgres, f"shop-{i}", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    new = [int(child.communicate()[0]) for child in children]
    (found,) = run(postgres, "select count(*), count(distinct key) from dedup.reservation")
    assert found == (sum(new), sum(new))


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
