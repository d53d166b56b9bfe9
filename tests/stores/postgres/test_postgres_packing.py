"""Reservations at rest: closed tables become pages of sorted keys, beside batches and letters, whatever dies in between."""

from __future__ import annotations

import datetime as dt
import random
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from deadletter.store import KEYS, Commit, Free
from dedup.postgres import PostgresStore, stored_filter
from fixtures.variants import of_which
from kit.known_filter_kit import chunk as taken
from kit.known_filter_kit import filtering, has_read
from kit.pg_help import WAITING, chunk, epoch, finish, keys, park, purge_all
from kit.pg_help import letter as letter_of
from kit.pg_proxy import until
from kit.pg_run import run

SIZES = """
select pg_total_relation_size(c.oid)::float / (select count(*) from dedup.reservation_key where generation = 1)
from pg_class c where c.oid in (to_regclass('dedup.reservation_000001'), to_regclass('dedup.reservation_page_000001'))
"""


@pytest.fixture
def store(postgres: str) -> Iterator[PostgresStore]:
    made = PostgresStore(postgres)
    epoch(made)
    yield made
    made.close()


def step(postgres: str, portion: int = 4) -> str | None:
    """One step of packing."""
    ((done,),) = run(postgres, f"select dedup.pack_reservations({portion})")
    return done  # type: ignore[no-any-return]


def known(store: PostgresStore, names: Iterable[object]) -> list[tuple[bytes, int]]:
    """Which of these keys a transaction finds, with their payload hashes."""
    with store.begin_letters("shop") as tx:
        found = tx.known(keys(names))
        return sorted(zip(found["key"].to_pylist(), found["payload_hash"].to_pylist(), strict=True))


def expected(names: Iterable[object], payload: int = 7) -> list[tuple[bytes, int]]:
    """What `known` finds if all of them are reserved."""
    return [(key, payload) for key in keys(names)["key"].to_pylist()]


def free(store: PostgresStore, names: Iterable[object]) -> None:
    """In a transaction of its own."""
    with store.begin_letters("shop") as tx:
        tx.execute(Free(keys(names).select(["key"])))
        tx.execute(Commit())


def free_keys(store: PostgresStore, gone: list[bytes]) -> None:
    """The same, of keys."""
    with store.begin_letters("shop") as tx:
        tx.execute(Free(pa.table({"key": pa.array(gone, pa.binary(16))})))
        tx.execute(Commit())


def given(store: PostgresStore, count: int) -> int:
    """An epoch that reserved so many keys, in a table that is closed."""
    number = epoch(store)
    chunk(store, number, 0, count - 1)
    store.rotate_reservations()
    return number


def test_a_packing_rests_after_each_step(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many times as long as the step took, if that is asked for: batches beside it have the server meanwhile."""
    given(store, 1_000)
    rests, begun = list[float](), time.monotonic()
    monkeypatch.setattr("dedup.postgres.upkeep.time.sleep", rests.append)
    assert store.pack_reservations(portion=100, rest=1000.0) == 1
    assert sum(rests) > 100 * (time.monotonic() - begun) and len(rests) > 10


def test_packed_keys_stay_known_and_new_ones_new(store: PostgresStore, postgres: str) -> None:
    """With their payload hashes, in the table's pages alone; a second packing finds nothing, and the proof is what it was."""
    number = given(store, 1_000)
    assert store.pack_reservations(portion=100) == 1
    assert store.pack_reservations() == 0
    assert run(postgres, "select to_regclass('dedup.reservation_000001') is null") == [(True,)]
    assert known(store, range(900, 1_100)) == expected(range(900, 1_000))
    assert chunk(store, number, 500, 1_499, batch_id=1) == 500
    assert store.problems("shop") == []
    assert store.reserved("shop") == 1_500


def test_an_upkeep_packs_what_it_does_not_purge(store: PostgresStore, postgres: str) -> None:
    """A dry run says how many tables, and leaves them; then they are packed, the one that it has closed among them, once."""
    number, month = given(store, 10), dt.timedelta(days=30)

    def packed(**options: bool) -> list[int]:
        return [line.count for line in store.upkeep(month, **options) if line.what == "packed tables"]

    assert packed(dry_run=True) == packed(dry_run=True) == [1]
    chunk(store, number, 10, 19, batch_id=1)
    run(postgres, "update dedup.reservation_generation set created_at = created_at - interval '2 days' where closed_at is null")
    assert [packed(), packed()] == [[2], [0]]
    assert known(store, range(30)) == expected(range(20))


def test_a_key_at_rest_takes_a_quarter(store: PostgresStore, postgres: str) -> None:
    """35 bytes at most, its part of the index included; a row takes more than 80."""
    given(store, 20_000)
    ((rows,),) = run(postgres, SIZES)
    store.pack_reservations()
    ((pages,),) = run(postgres, SIZES)
    assert rows > 80 and pages <= 35


@pytest.mark.parametrize("seed", of_which(1, [4, 0, 1, 2, 3, 5]))
def test_between_any_two_steps_known_is_what_was_reserved_and_not_freed(store: PostgresStore, postgres: str, seed: int) -> None:
    """Keys are freed and reserved at every step of packing several tables; each answer is that of a set."""
    chance, reserved = random.Random(seed), set[int]()
    for turn in range(400):
        wanted = set(range(first := chance.randrange(300), first + chance.randrange(1, 60)))
        assert taken(store, min(wanted), max(wanted)) == len(wanted & reserved)
        reserved |= wanted
        gone = set(chance.sample(range(400), 8))
        free(store, gone)
        reserved -= gone
        assert known(store, range(400)) == expected(reserved)
        if chance.random() < 0.15 and turn < 40:
            store.rotate_reservations()
        if step(postgres, chance.choice([4, 1_000])) is None and turn > 40:
            break
    assert known(store, range(400)) == expected(reserved)
    assert sorted(key for (key,) in run(postgres, "select key from dedup.reservation_key")) == sorted(
        uuid.UUID(bytes=key) for key, _ in expected(reserved)
    )


STEPS = ("begun", *["range written"] * 16, "written", "settled", "packed", "dropped")
BEGAN = [began if began in (0, 1, 19, 20) else pytest.param(began, marks=pytest.mark.full) for began in range(len(STEPS))]
"""Steps that were done before: none, some pages are not written, they are not counted, rows are there. The full run: each number."""


@pytest.mark.parametrize("commits", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("began", BEGAN)
def test_who_frees_a_key_while_its_table_is_packed_is_waited_for(store: PostgresStore, postgres: str, began: int, commits: bool) -> None:
    """A transaction that is open for any step: its key is free afterwards if it commits, and known if it does not."""
    given(store, 100)
    assert tuple(step(postgres) for _ in range(began)) == STEPS[:began]
    with store.begin_letters("shop") as tx:
        tx.execute(Free(keys([3, 77]).select(["key"])))
        while step(postgres) not in ("waiting", None):
            pass
        if commits:
            tx.execute(Commit())
    while (done := step(postgres)) is not None:
        assert done not in ("waiting", "begins again")
    assert known(store, range(100)) == expected(set(range(100)) - ({3, 77} if commits else set()))


def test_a_batch_that_began_before_goes_on_asking_rows(store: PostgresStore, postgres: str) -> None:
    """Rows are dropped only when nobody is left who may ask them; that one finds each key until its end."""
    number = given(store, 50)
    while step(postgres) != "settled":
        pass
    with PostgresStore(postgres).begin("shop", number) as tx:
        assert [step(postgres), step(postgres)] == ["packed", "waiting"]
        assert tx.known(keys(range(60))).num_rows == 50
    assert [step(postgres), step(postgres)] == ["dropped", None]


def test_packing_goes_on_after_each_kill(store: PostgresStore, postgres: str) -> None:
    """A step that is undone leaves what was there before it; the next call does it again."""
    given(store, 300)
    for done in STEPS:
        with psycopg.connect(postgres) as broken:
            assert broken.execute("select dedup.pack_reservations(4)").fetchone() == (done,)
            broken.rollback()
        assert known(store, range(310)) == expected(range(300))
        assert step(postgres) == done
    assert known(store, range(310)) == expected(range(300))
    assert store.problems("shop") == []


@pytest.mark.full
def test_two_that_pack_do_not_disturb_each_other(store: PostgresStore, postgres: str) -> None:
    """One of them works, the other one waits or finds nothing."""
    number = epoch(store)
    for batch_id in range(4):
        chunk(store, number, 100 * batch_id, 100 * batch_id + 99, batch_id=batch_id)
        store.rotate_reservations()
    with ThreadPoolExecutor(2) as pool:
        packed = [pool.submit(PostgresStore(postgres).pack_reservations, portion=10) for _ in range(2)]
        assert sum(one.result() for one in packed) == 4
    assert known(store, range(410)) == expected(range(400))


def test_rows_that_were_written_by_hand_are_not_lost(store: PostgresStore, postgres: str) -> None:
    """Pages that lack a row are not asked: packing begins again, and has it."""
    given(store, 40)
    while step(postgres) != "settled":
        pass
    run(postgres, "insert into dedup.reservation_000001 (key, payload_hash) values ('00000000-0000-0000-0000-000000000001', 5)")
    assert step(postgres) == "begins again"
    assert store.pack_reservations() == 1
    found = run(postgres, "select payload_hash from dedup.reservation_key where key = '00000000-0000-0000-0000-000000000001'")
    assert found == [(5,)]


def test_a_purge_drops_pages_at_any_step(store: PostgresStore, postgres: str) -> None:
    """A packed table, and one that is being packed, are given up like any other one: their keys are new again."""
    number = given(store, 100)
    store.pack_reservations()
    chunk(store, number, 100, 199, batch_id=1)
    store.rotate_reservations()
    assert [step(postgres), step(postgres)] == ["begun", "range written"]
    assert purge_all(store) == 2
    assert run(postgres, "select c.relname from pg_class c where c.relname ~ '^reservation_(page_)?0' and c.relkind = 'r'") == [
        ("reservation_000003",)
    ]
    assert step(postgres) is None
    assert known(store, range(200)) == []


def straddling(at: int) -> bytes:
    """Keys whose bytes lie across two others: the second half of 0 and the first half of 1 are 2."""
    return [b"\1" * 8 + b"\x09" * 8, b"\5" * 16, b"\x09" * 8 + b"\5" * 8][at]


@pytest.mark.parametrize("reserved", [(0, 1), pytest.param((0, 1, 2), marks=pytest.mark.full)])
def test_bytes_across_two_keys_are_no_key(store: PostgresStore, postgres: str, reserved: tuple[int, ...]) -> None:
    """A page is searched for bytes: what is found there counts only where a key begins."""

    def table(which: Iterable[int]) -> pa.Table:
        found = [straddling(at) for at in which]
        return pa.table([pa.array(found, pa.binary(16)), pa.array([at + 10 for at in which], pa.int64())], schema=KEYS)

    with store.begin_letters("shop") as tx:
        tx.reserve(table(reserved))
        tx.execute(Commit())
    store.rotate_reservations()
    store.pack_reservations()
    with store.begin_letters("shop") as tx:
        assert tx.known(table(range(3))).sort_by("key") == table(reserved).sort_by("key")
    with store.begin_letters("shop") as tx:
        tx.execute(Free(table([2]).select(["key"])))
        tx.execute(Commit())
    with store.begin_letters("shop") as tx:
        assert tx.known(table(range(3))).sort_by("key") == table([0, 1]).sort_by("key")


def test_a_page_without_keys_is_no_obstacle(store: PostgresStore, postgres: str) -> None:
    """All keys of a table are freed while it is packed, or afterwards: none is known, and they can be reserved again."""
    number = given(store, 30)
    assert [step(postgres, 100), step(postgres, 100)] == ["begun", "range written"]
    free(store, range(15))
    store.pack_reservations()
    free(store, range(15, 30))
    assert known(store, range(30)) == []
    assert chunk(store, number, 0, 29, batch_id=1) == 0


@pytest.mark.full
def test_the_filter_of_known_keys_reads_pages(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page by page, some of which were written anew since: it rules out none of their keys."""
    monkeypatch.setattr(stored_filter, "_PAGES", 2)
    making = filtering(postgres, monkeypatch)
    store = next(making)
    epoch(store)
    taken(store, 0, 1_999)
    assert has_read(store)
    store.rotate_reservations()
    store.pack_reservations(portion=300)
    run(postgres, "delete from dedup.reservation_filter")
    free(store, range(0, 2_000, 50))
    taken(store, 5_000, 5_001)
    assert has_read(store)
    assert taken(store, 0, 1_999) == 1_960


def test_a_letter_whose_key_is_packed_contradicts_nothing(store: PostgresStore, postgres: str) -> None:
    """`verify` looks for the key of each letter in rows and in pages, and finds one that is missing."""
    park(store, [letter_of(number) for number in range(3)])
    store.rotate_reservations()
    store.pack_reservations()
    assert not [found for found in store.problems("shop") if "holds a key" in found]
    free(store, [1])
    assert len([found for found in store.problems("shop") if "holds a key" in found]) == 1


def test_reprocessed_letters_keep_their_packed_keys(store: PostgresStore, postgres: str) -> None:
    """A key that is in a page is not reserved twice."""
    ids = park(store, [letter_of(number) for number in range(3)])
    store.rotate_reservations()
    store.pack_reservations()
    from kit.pg_help import changing

    with store.begin_letters("shop", positions=True) as tx:
        tx.lock(ids)
        tx.execute(changing(ids, status="REPROCESSED", holds_key=False))
        tx.execute(Commit())
    assert run(postgres, "select count(*) from dedup.reservation_key") == [(3,)]
    assert known(store, range(3)) == expected(range(3))


@pytest.mark.full
def test_batches_and_letters_go_on_beside_packing(postgres: str) -> None:
    """One packs all the time, one rotates, one reserves, one frees: afterwards each key is known that was not freed, once."""
    made: list[Any] = [PostgresStore(postgres) for _ in range(3)]
    number = epoch(made[0])
    with ThreadPoolExecutor(2) as pool:
        ends = [False]

        def pack() -> None:
            while not ends[0]:
                made[1].rotate_reservations()
                made[1].pack_reservations(portion=20, patience=0.5)

        def free_some() -> list[int]:
            gone = list(range(0, 2_000, 7))
            for some in gone:
                free(made[2], [some])
            return gone

        packing, freeing = pool.submit(pack), pool.submit(free_some)
        # Keys that nobody frees are asked for all the time.
        for batch_id in range(40):
            assert chunk(made[0], number, 10_000 + 50 * batch_id, 10_049 + 50 * batch_id, batch_id=batch_id) == 0
            assert chunk(made[0], number, 10_000, 10_049 + 50 * batch_id, batch_id=100 + batch_id) == 50 * (batch_id + 1)
        freeing.result()
        ends[0] = True
        packing.result()
    assert known(made[0], range(10_000, 12_010)) == expected(range(10_000, 12_000))
    assert not [found for found in made[0].problems("shop") if "more than one table" in found]


def test_two_that_free_keys_of_one_page_both_do(store: PostgresStore, postgres: str) -> None:
    """The second one waits for the first one, and finds its key where that has put it."""
    given(store, 100)
    store.pack_reservations()
    ((page,),) = run(postgres, "select keys from dedup.reservation_page order by length(keys) desc limit 1")
    first, second = page[16:32], page[32:48]
    with PostgresStore(postgres).begin_letters("shop") as tx, ThreadPoolExecutor(1) as pool:
        tx.execute(Free(pa.table({"key": pa.array([first], pa.binary(16))})))
        other = pool.submit(free_keys, PostgresStore(postgres), [second])
        until(lambda: run(postgres, WAITING) == [(1,)])
        tx.execute(Commit())
        other.result()
    found = {key for key, _ in known(store, range(100))}
    assert len(found) == 98 and not found & {first, second}


def test_a_table_that_is_dropped_while_it_is_looked_at_contradicts_nothing(store: PostgresStore, postgres: str) -> None:
    """`verify`, and a start that looks for restored tables, meet the end of packing: all keys are there, before it and after it."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.reserve(keys(range(100)))
        finish(tx, 0, 99, reserved=100)
    store.rotate_reservations()
    while step(postgres) != "settled":
        pass
    with psycopg.connect(postgres) as packing, ThreadPoolExecutor(2) as pool:
        packing.execute("lock table dedup.reservation_000001 in access exclusive mode")
        looking = [pool.submit(PostgresStore(postgres).problems, "shop"), pool.submit(epoch, PostgresStore(postgres))]
        until(lambda: run(postgres, WAITING) == [(2,)])
        assert [packing.execute("select dedup.pack_reservations()").fetchone() for _ in range(2)] == [("packed",), ("dropped",)]
        packing.commit()
        assert looking[0].result() == []
        assert looking[1].result() == number + 1


@pytest.mark.full
def test_what_was_freed_meanwhile_is_taken_out_in_portions(store: PostgresStore, postgres: str) -> None:
    """Who frees another key of these pages waits for one portion, not for all of them."""
    given(store, 1_200)
    while step(postgres, 1_000) != "range written":
        pass
    free(store, range(1_100))
    while (done := step(postgres, 1_000)) == "range written":
        pass
    assert [done, step(postgres), step(postgres), step(postgres)] == ["written", "partly settled", "settled", "packed"]
    assert known(store, range(1_200)) == expected(range(1_100, 1_200))


def test_who_frees_a_key_does_not_miss_pages_that_are_dropped(store: PostgresStore, postgres: str) -> None:
    """A purge drops them while a transaction is on its way to them: it has nothing to take out there, and goes on."""
    given(store, 40)
    store.pack_reservations()
    with psycopg.connect(postgres) as dropping, ThreadPoolExecutor(1) as pool:
        dropping.execute("lock table dedup.reservation_page_000001 in access exclusive mode")
        other = pool.submit(run, postgres, "select dedup.free_reservations(array[gen_random_uuid()])")
        until(lambda: run(postgres, WAITING) == [(1,)])
        dropping.execute("drop table dedup.reservation_page_000001")
        dropping.commit()
        assert other.result() == [("",)]


@pytest.mark.parametrize(
    "keys_there",
    [
        pytest.param([], id="none"),
        pytest.param([b"\xff" * 16], id="one", marks=pytest.mark.full),
        pytest.param([b"\0" * 16, b"\x7f" + b"\xff" * 15, b"\x80" + b"\0" * 15, b"\xff" * 16], id="the ends of the range"),
        pytest.param(
            [b"\xc0" * 8 + number.to_bytes(8, "big") for number in range(3_000)], id="a page larger than a block", marks=pytest.mark.full
        ),
    ],
)
def test_any_keys_can_be_packed(store: PostgresStore, postgres: str, keys_there: list[bytes]) -> None:
    """Whatever their first bits are: each is known, each second one can be freed, and no other key is there."""
    there = pa.table([pa.array(keys_there, pa.binary(16)), pa.array(range(len(keys_there)), pa.int64())], schema=KEYS)
    with store.begin_letters("shop") as tx:
        tx.reserve(there)
        tx.execute(Commit())
    store.rotate_reservations()
    assert store.pack_reservations(portion=1) == 1
    with store.begin_letters("shop") as tx:
        assert tx.known(there).sort_by("key") == there
        assert tx.known(keys(range(100))).num_rows == 0
    free_keys(store, keys_there[::2])
    with store.begin_letters("shop") as tx:
        left = tx.known(there).sort_by("key")
        assert left["key"].to_pylist() == keys_there[1::2]
        assert left["payload_hash"].to_pylist() == [*range(len(keys_there))][1::2]


def test_pages_that_are_lost_count_as_restored(store: PostgresStore, postgres: str) -> None:
    """A packed table that is gone, or lacks the key that the last decision reserved, contradicts the state as rows do."""
    with store.begin("shop", epoch(store)) as tx:
        tx.reserve(keys(range(100)))
        finish(tx, 0, 99, reserved=100)
    store.rotate_reservations()
    assert store.pack_reservations() == 1
    lacking = [("`reservation` lacks a key that was reserved",)]
    assert run(postgres, "select what from dedup.restored") == []
    run(postgres, "update dedup.reservation_page set keys = '', hashes = ''")
    assert run(postgres, "select what from dedup.restored") == lacking
    run(postgres, "drop table dedup.reservation_page_000001")
    assert run(postgres, "select what from dedup.restored") == lacking
