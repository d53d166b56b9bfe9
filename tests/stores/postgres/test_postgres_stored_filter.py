"""The filters beside packed tables: from the first batch on new keys are not looked up there, and no known key is missed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from deadletter.selection import Selection
from deadletter.store import KEYS, Commit, Free
from dedup.postgres import PostgresStore, key_filter, stored_filter
from dedup.postgres import keys as looking
from dedup.postgres.transaction import PgTransaction
from dedup.reprocessing.dead_letters import DeadLetters
from fixtures.variants import of_which
from kit import pg_help, pg_server
from kit.known_filter_kit import chunk, digests, has_read, read
from kit.pg_help import epoch, keep_copy, keys, letter, park, purge_all
from kit.pg_run import run

TABLES, EACH = 4, 300

LACKS = "the filter of packed table 2 lacks parts: the next `dedup upkeep` makes it anew"


@pytest.fixture
def store(postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    """Packed tables of 300 keys each, with filters, all of them for a process that has just begun and looks for many keys."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    with_packed(PostgresStore(postgres))
    made = PostgresStore(postgres)
    yield made
    made.close()


def with_packed(made: PostgresStore, tables: int = TABLES) -> None:
    """Reserve keys, `EACH` for a table, and pack them."""
    epoch(made)
    for number in range(tables):
        reserve(made, range(EACH * number, EACH * (number + 1)))
        made.rotate_reservations()
    assert made.pack_reservations() == tables
    made.close()


def reserve(store: PostgresStore, names: Any) -> int:
    """Reserve these keys, and commit; returns how many were known."""
    with store.begin_letters("shop") as tx:
        wanted = keys(names)
        tx.ask(wanted["key"])
        known = tx.reserve(wanted).num_rows
        tx.execute(Commit())
    return known


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """What each look-up asks for: packed table -> keys that it is asked for alone; 0 -> keys that the others are asked for."""
    found: list[dict[int, int]] = []
    probe = looking._probe

    def noted(connection: Any, statement: bytes, wanted: Any, apart: Any = ()) -> bytes:
        found.append({0: len(wanted), **{number: len(mine) for number, mine in dict(apart).items()}})
        return probe(connection, statement, wanted, apart) if apart else probe(connection, statement, wanted)

    monkeypatch.setattr(looking, "_probe", noted)
    return found


def test_the_first_batch_asks_packed_tables_for_what_they_may_have(store: PostgresStore, asked: list[dict[int, int]]) -> None:
    """New keys are looked up in the table of rows alone; a known one in its own table, and hardly anywhere else."""
    store.known_filter._reads = False
    assert reserve(store, range(10_000, 12_000)) == 0
    assert asked[0].pop(0) == 2000 and sum(asked[0].values()) < 40
    assert reserve(store, range(100)) == 100
    assert asked[1].pop(0) == 100 and asked[1].pop(1) == 100 and sum(asked[1].values()) < 10


def test_tasks_use_stored_filters_in_a_quarter_of_the_memory(store: PostgresStore, asked: list[dict[int, int]]) -> None:
    """A process of tasks reads no tables of rows; what it loads is bounded, and every known key is found."""
    tasks = store.in_tasks()
    for _ in range(3):
        assert reserve(tasks, range(10_000, 10_500)) in (0, 500)
    assert all(sum(told.values()) - told[0] < 200 for told in asked)
    assert tasks.known_filter._reader is None and tasks.filter_memory == store.filter_memory // 4
    assert reserve(tasks, range(EACH * TABLES)) == EACH * TABLES
    tasks.close()


@pytest.mark.parametrize("memory", of_which(1, [1_000, 10**6, 100, 2_000, 8_000]))
def test_filters_fit_into_the_memory_and_miss_no_key(store: PostgresStore, memory: int) -> None:
    """They are halved until they fit: then more keys are looked up, and all known ones are found."""
    small = PostgresStore(store.dsn, filter_memory=memory)
    assert reserve(small, range(EACH * TABLES)) == EACH * TABLES
    assert small.known_filter._stored.nbytes <= max(memory * 0.75, 64 * TABLES)
    assert reserve(small, range(-500, 100)) == 100
    small.close()


@pytest.mark.full
def test_filters_that_are_loaded_make_room_for_others(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each packed table the loaded ones are halved further, and nothing is read twice; a purged one is forgotten."""
    small = PostgresStore(store.dsn, filter_memory=9_000)
    reserve(small, range(50_000, 50_100))
    before = small.known_filter._stored
    first = {made: bloom.nbytes for made, bloom in before._loaded.items()}
    small.rotate_reservations()
    assert small.pack_reservations() == 1
    told: list[Any] = []
    parts = stored_filter.StoredFilters._parts
    monkeypatch.setattr(stored_filter.StoredFilters, "_parts", lambda *given: told.append(given) or parts(*given))
    assert reserve(small, range(50_000, 50_100)) == 100
    assert len(told) == 1 and len(before._loaded) == TABLES + 1 and before.nbytes <= 9_000 * 0.75
    assert all(before._loaded[made].nbytes <= size for made, size in first.items())
    assert reserve(small, range(EACH * TABLES)) == EACH * TABLES
    small.rotate_reservations()
    assert purge_all(small) == TABLES + 2
    assert reserve(small, range(60_000, 60_100)) == 0 and run(store.dsn, "select count(*) from dedup.reservation_filter_part") == [(0,)]
    small.close()


@pytest.mark.full
def test_a_small_transaction_loads_no_filter_until_that_is_worth_it(postgres: str, asked: list[dict[int, int]]) -> None:
    """Few keys are looked up as they are, in one more round trip at first; once they have been many, filters are loaded for them, too."""
    with_packed(PostgresStore(postgres))
    store = PostgresStore(postgres)
    store.known_filter._worth = 25
    for first in range(0, 60, 10):
        assert reserve(store, range(5_000 + first, 5_010 + first)) == 0
    assert [len(told) for told in asked[:2]] == [1, 1] and store.known_filter._stored.nbytes
    assert reserve(store, [3, 4, 9_999]) == 2 and asked[-1][0] == 3 and asked[-1][1] == 2
    store.close()


def test_a_key_in_two_tables_is_known_once(store: PostgresStore, postgres: str) -> None:
    """While two tables take reservations a key is in both; packed, each of them finds it, and it counts once."""
    epoch(store)
    with store.begin_letters("shop") as open_one:
        open_one.reserve(keys(["held"]))
        store.rotate_reservations()
        assert reserve(store, range(20_000, 20_010)) == 0
        open_one.execute(Commit())
    for _ in range(3):
        store.rotate_reservations()
    store.pack_reservations()
    both = "select count(*) from (select key from dedup.reservation_key group by key having count(*) = 2) twice"
    assert run(postgres, both) == [(10,)]
    with store.begin_letters("shop") as tx:
        wanted = keys([*range(19_990, 20_010), "held"])
        tx.ask(wanted["key"])
        known = tx.reserve(wanted)
    assert sorted(known["key"].to_pylist()) == sorted(keys([*range(20_000, 20_010), "held"])["key"].to_pylist())


@pytest.mark.full
def test_keys_that_letters_hold_are_found_after_the_purge(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that takes its key back when its table is packed holds it alone once that is purged: its duplicate is one all the same."""
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
    pg_help.chunk(store, epoch(store), 900, 900)
    (found,) = park(store, [letter(5)])
    letters = DeadLetters(store)
    letters.edit(found, key="z", by="ann", reason="")
    z = keys_of_letter(store, found)
    letters.edit(found, key="y", by="ann", reason="")
    store.rotate_reservations()
    store.pack_reservations()
    chunk(store, 30_000, 30_010)
    assert has_read(store) and store.known_filter._whole is not None and len(store.known_filter._whole.beside) == TABLES + 1
    letters.edit(found, key="z", by="ann", reason="")
    assert has_read(store)
    before = store.known_filter._whole
    assert purge_all(store) == TABLES + 1
    with store.begin_letters("shop") as tx:
        tx.ask(z["key"])
        assert tx._asked.filtered and store.known_filter._whole is before
        assert tx.reserve(z).num_rows == 1


@pytest.mark.parametrize("packed", of_which(1, [False, True]))
def test_a_key_that_a_letter_takes_while_its_table_is_purged_is_found(postgres: str, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """A letter that is edited back finds its key reserved; a purge and a reading come before its commit: the key is known afterwards."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
    store, other = PostgresStore(postgres), PostgresStore(postgres)
    pg_help.chunk(store, epoch(store), 900, 900)
    (found,) = park(store, [letter(5)])
    letters = DeadLetters(other)
    letters.edit(found, key="z", by="ann", reason="")
    z = keys_of_letter(store, found)
    letters.edit(found, key="y", by="ann", reason="")
    store.rotate_reservations()
    assert store.pack_reservations() == 1 if packed else True
    execute = PgTransaction.execute

    def late(self: Any, step: Any) -> None:
        if isinstance(step, Commit) and self._store is other:
            assert purge_all(store, patience=0) == 1
            chunk(store, 100, 110)
            assert has_read(store)
        execute(self, step)

    monkeypatch.setattr(PgTransaction, "execute", late)
    letters.edit(found, key="z", by="ann", reason="")
    with store.begin_letters("shop") as tx:
        tx.ask(z["key"])
        assert tx._asked.filtered and tx.reserve(z).num_rows == 1
    store.close()
    other.close()


def keys_of_letter(store: PostgresStore, found: str) -> Any:
    """The key that a letter holds (KEYS)."""
    return pa.table([store.letters(Selection(ids=(found,)))["key"].combine_chunks(), pa.array([7])], schema=KEYS)


def test_a_table_whose_filter_is_gone_is_asked(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed table whose stored filter somebody deletes is asked from then on, whatever else is known of it."""
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
    epoch(store)
    chunk(store, 30_000, 30_010)
    assert has_read(store)
    run(store.dsn, "delete from dedup.reservation_filter where generation = 2")
    assert reserve(store, range(EACH, EACH + 50)) == 50
    read(store).surprised()
    reserve(store, range(30_000, 30_010))
    whole = read(store)._whole
    assert whole is not None and sorted(whole.beside) == [1, 3, 4]
    assert reserve(store, range(EACH, EACH + 50)) == 50


@pytest.mark.parametrize(
    "damage",
    of_which(
        3,
        [
            "update dedup.reservation_filter set kind = 'of a later version' where generation = 2",
            "delete from dedup.reservation_filter_part where generation = 2",
            "update dedup.reservation_filter set made = gen_random_uuid() where generation = 2",
            "update dedup.reservation_filter_part set words = substring(words for 16) where generation = 2 and part = 1",
            "update dedup.reservation_filter set words = words / 2 where generation = 2",
        ],
    ),
)
def test_a_filter_that_cannot_be_used_is_not(
    store: PostgresStore, damage: str, caplog: pytest.LogCaptureFixture, asked: list[dict[int, int]]
) -> None:
    """Of another kind, gone, cut, or its parts of another copy: its table is asked, a log line says so, and a packing mends it."""
    run(store.dsn, damage)
    assert reserve(store, range(EACH * TABLES)) == EACH * TABLES and 2 not in asked[0] and 3 in asked[0]
    assert reserve(store, range(EACH, EACH + 9)) == 9
    told = [one.message for one in caplog.records if "filters of packed" in one.message]
    assert len(told) == 1 and told[0].startswith("The filters of packed tables [2] cannot be used: the tables are asked.")
    incomplete = "kind" not in damage
    assert [p for p in store.problems("shop") if "filter" in p] == [LACKS] * incomplete
    assert store.pack_reservations() == 0 and [p for p in store.problems("shop") if "filter" in p] == []
    anew = PostgresStore(store.dsn)
    assert reserve(anew, range(EACH * TABLES)) == EACH * TABLES and (2 in asked[-1]) == incomplete
    anew.close()


def test_a_packing_that_died_before_its_filter_makes_it_later(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pages and their filter, and with half of the filter: all of it is stored, or nothing, and the next packing goes on."""
    store = PostgresStore(postgres)
    epoch(store)
    reserve(store, range(100))
    store.rotate_reservations()
    parts, value = itertools.count(), stored_filter.value

    def dies(connection: Any, statement: bytes, **given: Any) -> Any:
        found = value(connection, statement, **given)
        if next(parts) == 0:
            raise ZeroDivisionError
        return found

    monkeypatch.setattr(stored_filter, "value", dies)
    with pytest.raises(ZeroDivisionError):
        store.pack_reservations()
    assert run(postgres, "select count(*) from dedup.reservation_filter") == [(0,)] and reserve(store, range(100)) == 100
    assert store.pack_reservations() == 0
    assert run(postgres, "select generation, keys, parts from dedup.reservation_filter") == [(1, 100, 2)]
    store.close()


@pytest.mark.parametrize("obstacle", of_which(1, ["set statement_timeout = 1", "lock table dedup.reservation_filter_part"]))
def test_a_batch_does_without_filters_that_cannot_be_loaded(store: PostgresStore, monkeypatch: pytest.MonkeyPatch, obstacle: str) -> None:
    """A time-out of the role, or a lock on the table: the batch asks the tables, and later ones try again, less and less often."""
    load, tries = stored_filter.StoredFilters.load, list[int]()

    def hampered(self: Any, connection: Any, made: Any) -> None:
        tries.append(1)
        if obstacle.startswith("set"):
            connection.execute("set local statement_timeout = 1; select pg_sleep(1)")
        load(self, connection, made)

    monkeypatch.setattr(stored_filter.StoredFilters, "load", hampered)
    store.known_filter._reads = False
    with psycopg.connect(store.dsn) as other:
        if obstacle.startswith("lock"):
            other.execute(obstacle)
        assert [reserve(store, range(EACH * TABLES)) for _ in range(6)] == [EACH * TABLES] * 6
        assert len(tries) == 2 and store.known_filter._stored.nbytes == 0
    if obstacle.startswith("lock"):
        assert [reserve(store, range(EACH * TABLES)) for _ in range(9)] and store.known_filter._stored.nbytes


def test_two_packers_make_one_filter_and_none_of_a_purged_table(store: PostgresStore) -> None:
    """Who comes second finds it made; who comes after a purge finds it not wanted; who meets a packer waits."""
    with psycopg.connect(store.dsn, autocommit=True) as one, psycopg.connect(store.dsn, autocommit=True) as other:
        run(store.dsn, "delete from dedup.reservation_filter")
        blooms = {number: stored_filter.make(one, store._sql, number, EACH) for number in (1, 2)}
        with one.transaction():
            one.execute("select pg_advisory_xact_lock(dedup.packing_lock())")
            assert stored_filter.keep(other, store._sql, 1, blooms[1]) == "waiting"
        assert stored_filter.keep(one, store._sql, 1, blooms[1]) == "begun"
        assert stored_filter.keep(other, store._sql, 1, blooms[1]) == "not wanted"
        assert purge_all(store) == TABLES
        assert stored_filter.keep(other, store._sql, 2, blooms[2]) == "not wanted"
        with pytest.raises(psycopg.errors.UndefinedTable):
            stored_filter.make(one, store._sql, 2, EACH)
    assert run(store.dsn, "select count(*) from dedup.reservation_filter_part") == [(0,)]


@pytest.mark.full
def test_an_older_copy_of_the_database_has_filters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from before the packing is packed with keys that were freed here since: the filter of this one is not used for it."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    with pg_server.running_server() as server:
        store = PostgresStore(server.dsn)
        epoch(store)
        reserve(store, range(100))
        store.rotate_reservations()
        fail_over = keep_copy(server)
        with store.begin_letters("shop") as tx:
            tx.execute(Free(keys(range(100)).select(["key"])))
            tx.execute(Commit())
        reserve(store, range(200, 300))
        store.rotate_reservations()
        assert store.pack_reservations() == 2
        assert reserve(store, range(1000, 1100)) == 0 and len(store.known_filter._stored._loaded) == 2
        fail_over()
        assert store.pack_reservations() == 1
        assert reserve(store, range(100)) == 100
        store.close()


@pytest.mark.full
@pytest.mark.parametrize("seed", of_which(1, range(3)))
def test_random_histories_with_filters_are_what_a_set_says(postgres: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Reserve, free, rotate, pack, purge nothing, start anew, in any order and with any memory, in a schema of any name."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
    dice, reserved = random.Random(seed), set[int]()
    store = PostgresStore(postgres, schema='we{apart}{child}rd "%s%(x)s')
    epoch(store)
    for _ in range(60):
        names = {dice.randrange(2_000) for _ in range(dice.randrange(1, 120))}
        what = dice.choice(["reserve"] * 5 + ["free", "rotate", "pack", "anew", "tasks"])
        if what == "reserve":
            assert reserve(store, names) == len(names & reserved)
            reserved |= names
        elif what == "free":
            with store.begin_letters("shop") as tx:
                tx.execute(Free(keys(names).select(["key"])))
                tx.execute(Commit())
            reserved -= names
        elif what == "rotate":
            store.rotate_reservations()
        elif what == "pack":
            store.pack_reservations()
        else:
            store.close()
            store = PostgresStore(postgres, schema=store.schema, filter_memory=dice.choice([500, 5_000, 2**26]))
            store = store.in_tasks() if what == "tasks" else store
        read(store)
    assert reserve(store, range(2_000)) == len(reserved)
    store.close()


def test_verify_finds_a_filter_of_other_keys(store: PostgresStore, postgres: str) -> None:
    """A filter that lacks keys of its table would let their duplicates run: `dedup verify` looks at some of each table's keys."""
    (usual,) = store.problems("shop")  # no batch record tells of these reservations
    run(postgres, "update dedup.reservation_filter_part set words = decode(repeat('00', length(words)), 'hex') where generation = 3")
    assert store.problems("shop") == [
        usual,
        "the filter of packed table 3 lacks keys that are in it, so duplicates may have taken effect: "
        'delete from "dedup".reservation_filter where generation = 3',
    ]


def test_folding_loses_no_key() -> None:
    """Halved so often as one likes a filter has all of its keys; parts that are halved one by one are the whole that is halved."""
    bloom = stored_filter.Bloom(10_000)
    known = digests(10_000)
    bloom.add(*stored_filter.words_of(known))
    for times in range(8):
        half = bloom.folded(times)
        assert half.may_have(*stored_filter.words_of(known)).all() and half.nbytes == bloom.nbytes >> times
        parts = [stored_filter.fold(part, min(times, 5)) for part in np.split(bloom.words[0], 32)]
        assert times > 5 or np.array_equal(np.concatenate(parts), half.words[0])
    assert bloom.folded(2).may_have(*stored_filter.words_of(digests(10_000, "other"))).mean() < 0.5
