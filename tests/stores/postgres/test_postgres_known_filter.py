"""The filter of known keys: what it rules out is not looked up, and nothing that was decided is ever done again because of it."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from deadletter.selection import Selection
from deadletter.store import KEYS, Commit, Free
from dedup.postgres import PostgresStore, key_filter, wire
from dedup.postgres.keys import _asking, _take_free
from dedup.reprocessing.dead_letters import DeadLetters
from kit import pg_help, pg_server
from kit.known_filter_kit import chunk, filtering, has_read, read
from kit.pg_help import epoch, keep_copy, keys, letter, park, purge_all
from kit.pg_run import run


@pytest.fixture
def store(postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    """One that uses its filter for every transaction, and reads it whenever it has none."""
    yield from filtering(postgres, monkeypatch)


def looked_up(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each later transaction asks the database for."""
    counts: list[int] = []
    found = wire.uuid_array

    def counted(asked: wire.Keys) -> wire.UuidArray:
        counts.append(len(asked))
        return found(asked)

    monkeypatch.setattr(wire, "uuid_array", counted)
    return counts


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


def test_duplicates_of_new_keys_read_no_index_of_older_tables(store: PostgresStore, postgres: str) -> None:
    """What may be known is looked for in the current table first, and elsewhere only where that one does not have it."""
    epoch(store)
    for first in (0, 100, 200):
        chunk(store, first, first + 99)
        store.rotate_reservations()
    chunk(store, 300, 399)
    with psycopg.connect(postgres) as connection:
        statement = _asking(store._sql, "likely_keys", key_filter.tables_now(connection, store._sql))
        assert _asked(connection, statement, range(300, 310)) == {"reservation_000004": 10}
        assert _asked(connection, statement, range(5, 10))["reservation_000001"] == 5


def _asked(connection: psycopg.Connection[Any], statement: bytes, wanted: range) -> dict[str, int]:
    """Table -> how often the plan of this statement has really asked it."""
    uuids = [uuid.UUID(bytes=key) for key in keys(wanted)["key"].to_pylist()]
    row = connection.execute(b"explain (analyze, format json) " + statement, {"keys": uuids, "heads": []}).fetchone()
    assert row is not None
    found: dict[str, int] = {}
    waiting = [row[0][0]["Plan"]]
    while waiting:
        node = waiting.pop()
        waiting += node.get("Plans", [])
        if node.get("Relation Name", "").startswith("reservation") and node["Actual Loops"]:
            found[node["Relation Name"]] = found.get(node["Relation Name"], 0) + node["Actual Loops"]
    return found


def test_what_another_instance_reserved_since_is_found_all_the_same(store: PostgresStore, postgres: str) -> None:
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


def test_a_rotation_by_another_instance_makes_the_filter_useless(store: PostgresStore, postgres: str) -> None:
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


def test_a_restored_database_is_another_one(store: PostgresStore, postgres: str) -> None:
    """After a restore the same number may name another table: then the filter of the first one is not believed."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    run(postgres, "update dedup.reservation_generation set created_at = created_at + interval '1 microsecond'")
    with store.begin_letters("shop") as tx:
        tx.ask(keys(range(5))["key"])
        assert not tx._asked.filtered


@pytest.mark.full
def test_an_older_copy_of_the_database_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in the place of this one it has the same table, but also keys that were freed since: the filter of this one is not believed."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
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
    """After a purge nothing else holds it, and the filter was read when nobody did: that event is a duplicate all the same."""
    pg_help.chunk(store, epoch(store), 900, 900)
    (found,) = park(store, [letter(5)])
    chunk(store, 10, 19)
    letters = DeadLetters(store)
    letters.edit(found, key="z", by="ann", reason="")
    z = store.letters(Selection(ids=(found,)))["key"].combine_chunks()
    letters.edit(found, key="y", by="ann", reason="")
    store.rotate_reservations()
    purge_all(store)
    chunk(store, 20, 29)
    assert has_read(store)
    letters.edit(found, key="z", by="ann", reason="")
    with store.begin_letters("shop") as tx:
        assert tx.reserve(pa.table([z, pa.array([7])], schema=KEYS)).num_rows == 1


def test_a_key_that_was_freed_while_it_was_asked_for_is_reserved(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken when it was to be reserved, free when it was looked up: what counts as new is reserved, or it would be new again."""
    epoch(store)
    chunk(store, 0, 9)
    assert has_read(store)
    other = PostgresStore(store.dsn, filter_memory=0)
    epoch(other, "other")
    chunk(other, 20, 29, "other")

    def and_then(*given: Any) -> wire.Keys:
        monkeypatch.setattr("dedup.postgres.keys._take_free", _take_free)
        raced = _take_free(*given)
        with other.begin_letters("other") as tx:
            tx.execute(Free(keys(range(20, 25)).select(["key"])))
            tx.execute(Commit())
        return raced

    monkeypatch.setattr("dedup.postgres.keys._take_free", and_then)
    assert chunk(store, 15, 34) == 5
    assert run(store.dsn, "select count(*), count(distinct key) from dedup.reservation") == [(30, 30)]


def test_keys_that_somebody_put_into_the_parent_are_found(store: PostgresStore, postgres: str) -> None:
    """What is looked up without a filter is found with one: the tables and their parent."""
    epoch(store)
    chunk(store, 0, 9)
    run(postgres, "with gone as (delete from dedup.reservation returning *) insert into dedup.reservation select * from gone")
    read(store).surprised()
    chunk(store, 20, 29)
    assert has_read(store) and chunk(store, 0, 9) == 10


def test_keys_of_letters_are_known_where_their_table_was_purged(store: PostgresStore) -> None:
    """What only a letter holds is in the filter as well: else an event would run whose duplicate waits to be reprocessed."""
    epoch(store)
    park(store, [letter(5), letter(6)])
    read(store)
    store.rotate_reservations()
    assert purge_all(store) == 1
    chunk(store, 100, 109)
    assert has_read(store)
    assert chunk(store, 0, 9) == 2


def test_keys_that_edits_replaced_are_known_where_their_table_was_purged(store: PostgresStore) -> None:
    """They are in the filter like the keys that letters have now."""
    pg_help.chunk(store, epoch(store), 900, 900)
    (edited,) = park(store, [letter(5)])
    DeadLetters(store).edit(edited, key="z", by="ann", reason="")
    read(store)
    store.rotate_reservations()
    assert purge_all(store) == 1
    chunk(store, 100, 109)
    assert has_read(store)
    assert chunk(store, 0, 9) == 1


_HAMMER = """
import sys
from kit.pg_help import *
from kit.known_filter_kit import chunk
from dedup.postgres import PostgresStore, key_filter
key_filter.FEW, key_filter._CHEAPER = 0, 10**9
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


@pytest.mark.full
def test_instances_that_write_the_same_keys_reserve_each_once(postgres: str) -> None:
    """Four processes with filters of their own, rotating at random: every key is new for exactly one of them."""
    PostgresStore(postgres).migrate()
    children = [
        subprocess.Popen([sys.executable, "-c", _HAMMER, postgres, f"shop-{i}", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    new = [int(child.communicate()[0]) for child in children]
    assert run(postgres, "select count(distinct key) from dedup.reservation") == [(sum(new),)]
    assert "more than one table" not in str(PostgresStore(postgres).problems("shop-0"))


def test_a_transaction_asks_what_a_purge_gave_up_after_it_began(store: PostgresStore, postgres: str) -> None:
    """A filter that was read after the purge lacks those keys: for a transaction that began before they are known all the same."""
    epoch(store)
    chunk(store, 0, 99)
    read(store)
    store.rotate_reservations()
    with store.begin_letters("shop") as tx:
        other = PostgresStore(postgres, filter_memory=0)
        assert purge_all(other, patience=0) == 1
        chunk(store, 200, 209)
        assert has_read(store)
        tx.ask(keys(range(10))["key"])
        assert tx.reserve(keys(range(10))).num_rows == 10
    assert chunk(store, 0, 9) == 0


def test_who_loses_a_key_between_two_rotations_leaves_none_behind(store: PostgresStore, postgres: str) -> None:
    """It writes the table that was closing when it began, and finds the key taken in the next one: it keeps neither."""
    epoch(store)
    other, third = PostgresStore(postgres, filter_memory=0), PostgresStore(postgres, filter_memory=0)
    with store.begin_letters("shop"):
        store.rotate_reservations()
        slow = other.begin_letters("shop")
        tx = slow.__enter__()
        tx.ask(keys(range(10))["key"])
    assert store.rotate_reservations() == "reservation_000003"
    with third.begin_letters("shop") as quick:
        assert quick.reserve(keys(range(5))).num_rows == 0
        quick.execute(Commit())
    assert tx.reserve(keys(range(10))).num_rows == 5
    tx.execute(Commit())
    slow.__exit__(None, None, None)
    count = "select count(*), count(distinct key) from dedup.reservation where tableoid = 'dedup.reservation_00000{}'::regclass"
    assert [run(postgres, count.format(number)) for number in (1, 2, 3)] == [[(5, 5)], [(10, 10)], [(5, 5)]]
    assert "more than one table" not in str(store.problems("shop"))
