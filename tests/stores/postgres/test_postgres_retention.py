"""Reservations by generations: rotation and purge beside running batches, and what stays known afterwards."""

from __future__ import annotations

import datetime as dt
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint import changes
from checkpoint.errors import StoreUnavailable
from checkpoint.position import Range, Ranges
from checkpoint.postgres.connection import translating
from deadletter.letter import LETTERS
from deadletter.selection import Selection
from deadletter.store import Note, Park
from dedup.postgres import PostgresStore
from dedup.reprocessing.letters import reprocess
from dedup.verify import verify
from fixtures.variants import of_which
from kit.orders import batch, consumer, event
from kit.pg_help import ORDERS, WAITING, chunk, epoch, finish, holder, keys, purge_all, record
from kit.pg_proxy import until
from kit.pg_run import run

EARLIER = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def store(postgres: str) -> PostgresStore:
    return PostgresStore(postgres)


def letter(key: bytes | None, number: int = 0, **given: object) -> dict[str, object]:
    now = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    needed = {"generation": 0, "incarnation": 0, "part": 0, "attempts": 1, "first_failed_at": now, "last_failed_at": now}
    named = {"id": f"letter-{number}", "consumer": "shop", "kind": "REJECTED", "reason": "no", "fingerprint": "f", "status": "OPEN"}
    where = {"source": ORDERS.source, "topic": ORDERS.topic, "partition": 0, "sequence_number": number}
    return {**needed, **named, **where, "key": key, "holds_key": key is not None, "payload_hash": 7 if key else None, **given}


def letters(*rows: dict[str, object]) -> Park:
    return Park(pa.Table.from_pylist(list(rows), schema=LETTERS))


def by_table(postgres: str) -> dict[str, int]:
    """Child of reservation -> how many it has."""
    return dict(run(postgres, "select right(tableoid::regclass::text, 6), count(*) from dedup.reservation group by 1"))


def closed(postgres: str) -> list[int]:
    """Numbers of the tables that take no reservations any more."""
    return [n for (n,) in run(postgres, "select id from dedup.reservation_generation where closed_at is not null order by id")]


def test_a_rotation_waits_for_no_batch_and_no_batch_waits_for_it(store: PostgresStore, postgres: str) -> None:
    """Whoever began before it writes the old table alone; until that has ended the others write both tables, and then the new one."""
    number, other = epoch(store), epoch(store, "other")
    with store.begin("shop", number) as tx:
        tx.reserve(keys(range(5)))
        assert PostgresStore(postgres).rotate_reservations() == "reservation_000002" and closed(postgres) == []
        assert chunk(PostgresStore(postgres), other, 10, 14, 0, "other") == 0
        assert PostgresStore(postgres).rotate_reservations() == "reservation_000002", "the first one is not over"
        finish(tx, 0, 4)
    assert by_table(postgres) == {"000001": 10, "000002": 5} and closed(postgres) == [], "that batch knew of one table alone"
    assert chunk(store, number, 3, 9, batch_id=1) == 2
    assert by_table(postgres) == {"000001": 15, "000002": 10} and closed(postgres) == [1], "the first batch that knows closes the old one"
    assert chunk(store, number, 8, 12, batch_id=2) == 5, "of both consumers"
    assert store.problems("shop") == [] and store.problems("other") == []


@pytest.mark.parametrize("commits", [True, False])
def test_two_batches_around_a_rotation_cannot_reserve_one_key_twice(store: PostgresStore, postgres: str, commits: bool) -> None:
    """The one that began after it waits in the old table for the one that began before; it has the keys only if that one fails."""
    number, other = epoch(store), epoch(store, "other")
    with ThreadPoolExecutor(1) as pool:
        with store.begin("shop", number) as tx:
            tx.reserve(keys(range(5)))
            store_beside = PostgresStore(postgres)
            store_beside.rotate_reservations()
            second = pool.submit(chunk, store_beside, other, 0, 4, 0, "other")
            until(lambda: run(postgres, WAITING) == [(1,)])
            if commits:
                finish(tx, 0, 4)
        assert second.result() == (5 if commits else 0)
    assert run(postgres, "select count(distinct key) from dedup.reservation") == [(5,)]
    assert store.problems("other") == []


@pytest.mark.parametrize("commits", of_which(1, [True, False]))
def test_a_batch_that_writes_both_tables_meets_those_that_write_the_new_one(store: PostgresStore, postgres: str, commits: bool) -> None:
    """The old table is closed while it is open: in the new one the two meet, and one of them has the keys."""
    number, other, third = epoch(store), epoch(store, "other"), epoch(store, "third")
    beside = PostgresStore(postgres)
    with ThreadPoolExecutor(1) as pool:
        with store.begin("shop", number) as before:
            beside.rotate_reservations()
            with store.begin("other", other) as tx:
                tx.reserve(keys(range(5)))
                finish(before, 90, 90, reserved=0)
                assert run(postgres, "select dedup.close_reservations()") == [(True,)]
                newest = pool.submit(chunk, beside, third, 0, 4, 0, "third")
                until(lambda: run(postgres, WAITING) == [(1,)])
                if commits:
                    finish(tx, 0, 4)
        assert newest.result() == (5 if commits else 0)
    assert run(postgres, "select count(distinct key) from dedup.reservation") == [(5,)]
    assert store.problems("third") == []


def test_a_purge_drops_old_tables_only_and_says_so_in_the_floors(store: PostgresStore, postgres: str) -> None:
    """Keys of a purged table are forgotten; positions are not, and the head tells up to where keys may be missing."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    chunk(store, number, 20, 29, batch_id=1)
    store.rotate_reservations()
    chunk(store, number, 30, 39, batch_id=2)
    assert store.purge_reservations(EARLIER) == 0 and store.head("shop").floors == {}
    assert purge_all(store) == 1, "the table in use is not closed"
    assert store.head("shop").floors == {ORDERS: 29}
    with store.begin("shop", number) as tx:
        assert tx.known(keys(range(30))).num_rows == 0 and tx.known(keys(range(30, 40))).num_rows == 10
        assert tx.seen({ORDERS: (0, 100)}) == {ORDERS: Ranges.of((Range(0, 9), Range(20, 39)))}
    assert store.problems("shop") == []
    assert purge_all(store) == 0


@pytest.mark.full
def test_a_purge_after_an_accepted_restore_says_so_in_the_floors_too(store: PostgresStore) -> None:
    """Records since the last reset count, of whatever generation: else a replay takes the purged keys for another topic's events."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    store.amend("shop", changes.accept_restore, by="ann", reason="restored")
    store.rotate_reservations()
    purge_all(store)
    assert store.head("shop").floors == {ORDERS: 9}
    assert verify(store, "shop").contradictions == []
    store.amend("shop", changes.reset, by="ann", reason="start over")
    chunk(store, number, 0, 3, batch_id=1)
    store.rotate_reservations()
    purge_all(store)
    assert store.head("shop").floors == {ORDERS: 3}, "records from before the reset do not count"


def test_merged_records_keep_the_counts_and_what_was_seen_exactly(store: PostgresStore) -> None:
    """A position that was never delivered is not seen after a purge: its event may still come, and must not pass for a redelivery."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    chunk(store, number, 20, 29, batch_id=1)
    store.rotate_reservations()
    with store.begin("shop", number) as tx:
        tx.execute(record(12, 13, batch_id=2))
        finish(tx, 30, 30, batch_id=2, reserved=0)
    purge_all(store)
    merged, *newer = store.batches("shop").to_pylist()
    assert merged["seen"] == [{"first": 0, "last": 9}, {"first": 20, "last": 29}]
    assert (merged["query_id"], merged["batch_id"], merged["delivered"], merged["reserved"]) == ("", -1, 20, 20)
    assert [r["seen"] for r in newer] == [[{"first": 12, "last": 13}], [{"first": 30, "last": 30}]]
    store.rotate_reservations()
    purge_all(store)
    (merged,) = store.batches("shop").to_pylist()
    assert merged["seen"] == [{"first": f, "last": t} for f, t in ((0, 9), (12, 13), (20, 30))]
    with store.begin("shop", number) as tx:
        assert tx.seen({ORDERS: (8, 21)}) == {ORDERS: Ranges.of((Range(8, 9), Range(12, 13), Range(20, 21)))}


@pytest.mark.full
def test_verify_beside_a_purge_contradicts_nothing(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that were read come once more, merged into a newer one: what that seems to contradict is looked at again."""
    monkeypatch.setattr("dedup.verify.PAGE", 3)
    number = epoch(store)
    for batch_id in range(7):
        chunk(store, number, 2 * batch_id, 2 * batch_id + 1, batch_id=batch_id)
    store.rotate_reservations()
    chunk(store, number, 14, 15, batch_id=7)
    read, purged = store.batches, []

    def batches(*asked: Any) -> pa.Table:
        page = read(*asked)
        purged.append(0 if purged else purge_all(store))  # between the first page and the second one
        return page

    monkeypatch.setattr(store, "batches", batches)
    report = verify(store, "shop")
    assert (purged[0], report.contradictions, report.counts["processed"]) == (1, [], 16)


@pytest.mark.full
def test_records_with_very_many_holes_become_several(store: PostgresStore, postgres: str) -> None:
    """A year of Kafka's markers is no value of a gigabyte: full records are written once, and what they saw stays exact."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    for batch_id in range(1, 7):
        chunk(store, number, 10**6 * batch_id, 10**6 * batch_id, batch_id=batch_id)
    holes = "select range_agg(int8range(first_seen + 2 * n, first_seen + 2 * n + 1)) from generate_series(0, 49999) n"
    run(postgres, f"update dedup.batch set seen = ({holes}), last_seen = first_seen + 99998 where batch_id > 0")
    store.rotate_reservations()
    purge_all(store)
    merged = run(postgres, "select id, batch_id, processed, pg_column_size(seen) from dedup.batch order by id")
    assert len(merged) > 2 and {row[1] for row in merged} == {-1} and sum(row[2] for row in merged) == 16
    assert max(row[3] for row in merged) < 2_000_000
    full = {row[0] for row in merged if row[3] >= 500_000}
    chunk(store, number, 10**7, 10**7, batch_id=7)
    store.rotate_reservations()
    purge_all(store)
    assert full and full <= {row[0] for row in run(postgres, "select id from dedup.batch")}
    with store.begin("shop", number) as tx:
        seen = tx.seen({ORDERS: (0, 10**8)})[ORDERS]
    assert len(seen) == 10 + 6 * 50_000 + 1 and len(seen.firsts) == 1 + 6 * 50_000 + 1


def test_a_purge_never_frees_a_key_that_a_letter_holds(store: PostgresStore, postgres: str) -> None:
    """OPEN, BLOCKED and DISCARDED letters go on holding; reprocessed ones and letters without a key do not."""
    number = epoch(store)
    held = keys(range(5))["key"].to_pylist()
    states = ["OPEN", "BLOCKED", "DISCARDED", "REPROCESSED", "OPEN"]
    with store.begin("shop", number) as tx:
        tx.reserve(keys(range(5)))
        rows = [letter(k, n, status=s, holds_key=n < 4) for n, (k, s) in enumerate(zip(held, states, strict=True))]
        rows[0] |= {"sequence": b"s" * 16}
        rows[1] |= {"sequence": b"s" * 16, "blocked_by": rows[0]["id"]}
        tx.execute(letters(*rows))
        finish(tx, 0, 4)
    store.rotate_reservations()
    purge_all(store)
    with store.begin("shop", number) as tx:
        known = tx.reserve(keys(range(5)))
        assert sorted(known["key"].to_pylist()) == sorted(held[:3]) and set(known["payload_hash"].to_pylist()) == {7}
    assert store.problems("shop") == []


@pytest.mark.full
def test_a_letter_reprocessed_after_a_purge_keeps_its_key_decided(store: PostgresStore, postgres: str) -> None:
    """The letter held the key when its reservation was dropped; afterwards only a reservation can say that it is decided."""
    run(postgres, "create table orders (id text, amount bigint)")
    bad = consumer(store)
    bad._handler = lambda rows, tx: tx.dead_letter(rows, "no")
    bad(batch(event(0, "a")), 0)
    store.rotate_reservations()
    assert purge_all(store) == 1
    good = consumer(PostgresStore(postgres))
    assert reprocess(Selection(), good).reprocessed == 1
    assert good(batch(event(1, "a")), 1).duplicates == 1
    assert run(postgres, "select count(*) from orders") == [(1,)]
    assert verify(store, "shop").ok


def test_a_purge_waits_for_no_batch_and_drops_no_table_that_one_may_ask(
    store: PostgresStore, postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch that began before it, and so knows nothing of the floors, still finds the keys; one that begins after it does not ask."""
    number, other, third = epoch(store), epoch(store, "other"), epoch(store, "third")
    chunk(store, number, 0, 4)
    store.rotate_reservations()
    beside = PostgresStore(postgres)
    with store.begin("other", other) as tx:
        assert purge_all(beside, patience=0.0) == 1 and "the next purge drops them" in caplog.text
        assert tx.reserve(keys(range(3, 8))).num_rows == 2
        assert chunk(beside, third, 3, 3, 0, "third") == 0, "for this one the key is forgotten"
        finish(tx, 5, 9, reserved=3)
    assert "reservation_000001" in str(run(postgres, "select inhrelid::regclass::text from pg_inherits"))
    with store.begin("shop", number) as tx:
        assert tx.head.floors == {ORDERS: 4} and tx.known(keys(range(3, 8))).num_rows == 4
        assert purge_all(beside, patience=0.0) == 0, "nobody is left who may ask it"
    assert "reservation_000001" not in str(run(postgres, "select inhrelid::regclass::text from pg_inherits"))
    assert store.problems("shop") == []


@pytest.mark.full
def test_whoever_counts_reservations_delays_a_drop_and_nothing_else(store: PostgresStore, postgres: str) -> None:
    """`verify` reads all tables for as long as it takes: the drop tries again, and batches do not queue behind it."""
    number = epoch(store)
    chunk(store, number, 0, 4)
    store.rotate_reservations()
    with psycopg.connect(postgres) as reading:
        reading.execute("select count(*) from dedup.reservation")
        assert purge_all(PostgresStore(postgres), patience=0.5) == 1
        assert chunk(store, number, 5, 9, batch_id=1) == 0
    assert purge_all(store) == 0
    assert run(postgres, "select count(*) from dedup.reservation_generation where dropped_at is not null") == [(1,)]


@pytest.mark.full
def test_batches_beside_a_large_purge_wait_for_nothing(store: PostgresStore, postgres: str) -> None:
    """Floors have rows of their own, and tables are dropped alone: two consumers go on while records are counted and merged."""
    numbers = [epoch(store, name) for name in ("shop", "other")]
    chunk(store, numbers[0], 0, 4)
    chunk(store, numbers[1], 10, 14, 0, "other")
    columns = ", ".join(name for (name,) in run(postgres, COLUMNS))
    run(postgres, f"insert into dedup.batch ({columns.replace('b.', '')}) select {columns} from dedup.batch b, generate_series(1, 50000)")
    store.rotate_reservations()
    hasty = PostgresStore(make_conninfo(postgres, options="-c lock_timeout=60ms"))
    with ThreadPoolExecutor(1) as pool:
        purge = pool.submit(purge_all, PostgresStore(postgres))
        beside = 0
        for turn in itertools.count(1):
            running = not purge.done()
            chunk(hasty, numbers[0], 100 * turn, 100 * turn + 4, turn)
            chunk(hasty, numbers[1], 100 * turn + 10, 100 * turn + 14, turn, "other")
            beside += running and not purge.done()
            if purge.done():
                break
        assert purge.result() == 1 and beside
    assert store.head("shop").floors == {ORDERS: 4}


def test_a_table_of_reservations_costs_a_batch_two_locks(store: PostgresStore, postgres: str) -> None:
    """What docs/how-to/purge.md says of `max_locks_per_transaction`; a purged table costs none."""

    def locks(batch_id: int) -> int:
        with store.begin("shop", number) as tx:
            tx.reserve(keys([batch_id]))
            pid = tx._connection.info.backend_pid
            (count,) = run(postgres, f"select count(*) from pg_locks where pid = {pid} and relation::regclass::text ~ 'reservation_0'")
            finish(tx, batch_id, batch_id, batch_id=batch_id)
        return int(count[0])

    number = epoch(store)
    assert locks(0) == 3, "the current one is read, written, and its index"
    for _ in range(5):
        store.rotate_reservations()
    assert locks(1) == 3 + 2 * 5
    purge_all(store)
    assert locks(2) == 3


def test_a_server_without_room_for_locks_is_told_by_its_hint(store: PostgresStore, postgres: str) -> None:
    """`out of shared memory` alone does not say which setting is too small."""
    full = "raise 'out of shared memory' using errcode = '53200', hint = 'Increase x.'"
    with pytest.raises(StoreUnavailable, match=r"out of shared memory\. Increase x\. Nothing of it was committed"), translating("A batch"):
        run(postgres, f"do $$ begin {full}; end $$")


COLUMNS = """
select 'b.' || quote_ident(attname) from pg_attribute
where attrelid = 'dedup.batch'::regclass and attnum > 0 and not attisdropped and attidentity = '' order by attnum
"""


def test_letters_come_back_with_their_exact_bytes(store: PostgresStore) -> None:
    """Bodies, keys and headers with any bytes, header names that repeat, no headers, null values; NUL in readable texts is shown."""
    number = epoch(store)
    headers = [{"key": "a", "value": b"\0\xff"}, {"key": "a", "value": None}, {"key": "", "value": b""}]
    rows = [
        letter(b"k" * 16, 1, body=b"\0\xfe", event_key=b"\0", properties=headers, offset="007", body_size=2, idempotence_key="x\0y"),
        letter(None, 2, body=None, properties=[], error_message="line\0", stack="at ..."),
        letter(None, 3, properties=None, sequence_key="s", blocked_by="letter-1", status="BLOCKED"),
    ]
    with store.begin("shop", number) as tx:
        tx.execute(letters(*rows))
        tx.execute(letters(rows[0] | {"reason": "another"}))
        finish(tx, 1, 3, reserved=0)
    kept = store.letters(Selection())
    wanted = letters(*rows).letters.to_pylist()
    wanted[0]["idempotence_key"], wanted[1]["error_message"] = "x\u2400y", "line\u2400"
    assert kept.drop_columns(["duplicates"]).to_pylist() == wanted, "parked again, a letter is left as it is"
    assert kept["duplicates"].to_pylist() == [0, 0, 0]


def test_duplicates_are_counted_on_the_letter_that_holds_the_key(store: PostgresStore) -> None:
    """Keys without a letter are ignored."""
    number = epoch(store)
    names = keys(range(3))["key"].to_pylist()
    with store.begin("shop", number) as tx:
        tx.execute(letters(letter(names[0], 0), letter(names[1], 1, status="REPROCESSED")))
        tx.execute(Note(pa.table({"key": pa.array(names, pa.binary(16)), "count": [2, 3, 4]})))
        finish(tx, 0, 2, reserved=0)
    assert store.letters(Selection())["duplicates"].to_pylist() == [2, 0]


def test_letters_are_selected_by_all_that_is_given(store: PostgresStore) -> None:
    """Every field of a selection narrows; the limit and a prefix of the id work."""
    number = epoch(store)
    with store.begin("shop", number) as tx:
        tx.execute(letters(*(letter(None, n, kind="NO_KEY" if n % 2 else "REJECTED") for n in range(12))))
        finish(tx, 0, 11, reserved=0)

    def found(**given: object) -> list[int]:
        return store.letters(Selection(**given))["sequence_number"].to_pylist()  # type: ignore[arg-type]

    assert found(first=3, last=8, kind="NO_KEY") == [3, 5, 7]
    assert found(limit=2) == [0, 1] and len(found(limit=None)) == 12
    assert found(id="letter-1") == [1, 10, 11] and found(id="letter_1") == []
    assert (
        found(consumer="x")
        == found(topic="x")
        == found(source="x")
        == found(partition=1)
        == found(status="LOST")
        == found(fingerprint="x")
        == []
    )


def test_contradictions_are_found(store: PostgresStore, postgres: str) -> None:
    """A reservation too many or too few, a key in two tables, a record from nowhere, a letter without its reservation."""
    number = epoch(store)
    chunk(store, number, 0, 9)
    assert store.problems("shop") == []
    twice = "insert into dedup.reservation_000003 select * from only dedup.reservation_000001 limit 1"
    twice = f"select dedup.rotate_reservations(); select dedup.close_reservations(); select dedup.rotate_reservations(); {twice}"
    broken = {
        "insert into dedup.reservation_000001 values (gen_random_uuid(), 1)": "11 reservations are kept, the batch records of all",
        "update dedup.progress set seq = 0": "batch record with seq 1, but the last decision is 0",
        "update dedup.consumer set epoch = 0": "batch record with epoch 1, but the newest epoch is 0",
        twice: "more than one table",
    }
    for statement, told in broken.items():
        run(postgres, statement)
        assert any(told in problem for problem in store.problems("shop")), (told, store.problems("shop"))


def test_a_decision_without_its_record_is_found(store: PostgresStore, postgres: str) -> None:
    """Every decision left a record or is a person's: a batch record that somebody deleted shows, unless a purge has merged records."""
    number = epoch(store)
    for n in range(3):
        chunk(store, number, n, n, batch_id=n)
    store.amend("shop", changes.accept_gap, by="ann", reason="gap")
    assert store.problems("shop") == []
    run(postgres, "update dedup.progress set seq = 5")
    assert "5 decisions were made, 4 are on record" in store.problems("shop")
    run(postgres, "update dedup.progress set seq = 4; delete from dedup.batch where seq = 2")
    assert "4 decisions were made, 3 are on record" in store.problems("shop")


def test_a_store_that_is_away_is_an_outage(postgres: str) -> None:
    """Rotation and purge are translated like everything else."""
    store = PostgresStore("host=127.0.0.1 port=1 connect_timeout=2 user=x dbname=x")
    for call in (
        store.rotate_reservations,
        lambda: purge_all(store),
        lambda: store.take_epoch("a", holder(), takeover_after=1),
    ):
        with pytest.raises(StoreUnavailable):
            call()


def test_the_slowest_consumer_of_a_schema_bounds_a_purge(store: PostgresStore, postgres: str) -> None:
    """Tables have the keys of all: one that is behind keeps them for all, unless it is named; an idle partition keeps nothing."""
    now = dt.datetime.now(dt.UTC)
    old, soon = now - dt.timedelta(days=9), now + dt.timedelta(seconds=60)
    run(postgres, "create table orders (id text, amount bigint)")
    one, two = consumer(store), consumer(store, name="two")
    one(batch(event(0, "a", enqueued_time=old), event(0, "b", partition=1, enqueued_time=now)), 0)
    two(batch(event(0, "c", enqueued_time=now)), 0)
    store.rotate_reservations()
    run(postgres, "update dedup.batch set committed_at = committed_at + interval '20 seconds' where last_seen is not null")
    run(postgres, "update dedup.checkpoint set enqueued_time = %s where enqueued_time > %s", (soon - dt.timedelta(seconds=45), old))
    assert [(b.consumer, b.read_to == old) for b in store.purge_bounds(soon)] == [("shop", True), ("two", False)]
    assert store.purge_reservations(soon, although_behind=["two"]) == 0
    run(postgres, "update dedup.batch set committed_at = committed_at - interval '61 minutes' where partition = 0 and consumer_id = 1")
    assert store.purge_bounds(soon)[0].read_to > now, "partition 0 had no event for an hour"
    run(postgres, "update dedup.progress set batch_ended = false where consumer_id = 1")
    assert store.purge_bounds(soon)[0].read_to == old, "its events may come at the end of this batch"
    run(postgres, "update dedup.progress set batch_ended = true where consumer_id = 1")
    run(postgres, "update dedup.consumer set joint = true where id = 1")
    assert old < store.purge_bounds(soon)[0].read_to < now, "of a runner it was read up to the decision before that hour"
    run(postgres, "update dedup.consumer set joint = false where id = 1")
    assert store.purge_reservations(soon) == 1
