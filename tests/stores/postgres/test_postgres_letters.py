"""Dead letters on PostgreSQL: locked, changed, kept in order, counted, found; with people and the stream at work at the same time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError, StoreError, StoreUnavailable
from checkpoint.head import Spent
from deadletter.letter import Kind
from deadletter.policy import Used
from deadletter.selection import Selection
from deadletter.store import Commit, Free, Note
from dedup import DeadLetters, reprocess
from dedup.core.store import Store
from dedup.postgres import PostgresStore, wire
from kit.orders import assert_proven, batch, consumer, event, ids
from kit.people import fixed
from kit.pg_help import FAILED_AT, WAITING, change, changing, chunk, epoch, finish, keys, letter, letters_of, park, record
from kit.pg_proxy import until
from kit.pg_run import run
from kit.places import PostgresPlace

ALL = Selection(limit=None)


@pytest.fixture
def store(postgres: str) -> Iterator[PostgresStore]:
    """A store with the consumer `shop`, and another one of the same tables at the end without contradictions."""
    made = PostgresStore(postgres)
    epoch(made)
    yield made
    made.close()


def duplicates(*numbers: int, count: int = 1) -> Note:
    """Note duplicates of these keys."""
    found = keys(numbers)["key"]
    return Note(pa.table({"key": found, "count": pa.array([count] * len(numbers), pa.int64())}))


class TestLocking:
    def test_two_people_never_get_the_same_letter(self, store: PostgresStore, postgres: str) -> None:
        """What one has locked the other one does not get, and does not wait for; afterwards it is free again."""
        ids = park(store, [letter(n) for n in range(6)])
        with store.begin_letters("shop") as one, PostgresStore(postgres).begin_letters("shop") as other:
            assert one.lock(ids[:4])["sequence_number"].to_pylist() == [0, 1, 2, 3]
            assert other.lock(ids)["sequence_number"].to_pylist() == [4, 5]
        with store.begin_letters("shop") as tx:
            assert tx.lock(ids).num_rows == 6

    @pytest.mark.full
    def test_many_at_once_do_each_letter_once(self, store: PostgresStore, postgres: str) -> None:
        """Four who lock whatever is open: every letter is changed by exactly one of them."""
        ids = park(store, [letter(n) for n in range(200)])

        def work(_: int) -> int:
            mine, done = PostgresStore(postgres), 0
            for start in range(0, 200, 10):
                with mine.begin_letters("shop") as tx:
                    found = tx.lock(ids[start : start + 20])
                    still = [r["id"] for r in found.select(["id", "status"]).to_pylist() if r["status"] == "OPEN"]
                    tx.execute(changing(still, status="REPROCESSED", history=[{"letter_id": i, "action": "REPROCESSED"} for i in still]))
                    tx.execute(Commit())
                    done += len(still)
            return done

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) == 200
        assert run(postgres, "select count(*), count(distinct letter_id) from dedup.letter_history") == [(200, 200)]

    def test_a_person_at_work_does_not_stall_the_stream(self, store: PostgresStore, postgres: str) -> None:
        """Locked letters, an open transaction: batches commit, duplicates of a held key are counted, the epoch can be taken."""
        ids = park(store, [letter(n) for n in range(3)])
        with store.begin_letters("shop") as tx:
            tx.lock(ids)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(stream_with_duplicates, postgres).result(timeout=20) == 3
            tx.execute(changing(ids, status="REPROCESSED", holds_key=False))
            tx.execute(Commit())
        assert store.letters(ALL)["duplicates"].to_pylist() == [4, 4, 4] and store.problems("shop") == []
        assert set(store.letters(ALL, ["status"])["status"].to_pylist()) == {"REPROCESSED"}

    def test_a_stream_at_work_does_not_stall_a_person(self, store: PostgresStore, postgres: str) -> None:
        """An open batch, checkpoints locked: letters are locked, changed and committed meanwhile, and no decision is counted."""
        ids = park(store, [letter(n) for n in range(3)])
        chunk(store, epoch(store), 10, 19)
        with store.begin("shop", store.head("shop").epoch) as batch:
            batch.reserve(keys(range(20, 30)))
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(change, PostgresStore(postgres), ids, status="DISCARDED").result(timeout=20) == 3
            finish(batch, 20, 29, batch_id=1)
        assert store.head("shop").seq == 2 and set(store.letters(ALL)["status"].to_pylist()) == {"DISCARDED"}

    def test_positions_exclude_the_stream(self, store: PostgresStore, postgres: str) -> None:
        """Who decides positions holds the checkpoints: the next batch waits, and reads what was decided."""
        number = epoch(store)
        chunk(store, number, 0, 9)
        with ThreadPoolExecutor(1) as pool:
            with PostgresStore(postgres).begin_letters("shop", positions=True) as tx:
                later = pool.submit(chunk, store, number, 10, 19, 1)
                until(lambda: run(postgres, WAITING) == [(1,)] or later.done())
                assert not later.done()
                tx.execute(Commit())
            assert later.result(timeout=20) == 0

    def test_a_reset_does_not_come_between(self, store: PostgresStore, postgres: str) -> None:
        """A person's decision about the state waits for open letters, and the other way round."""
        ids = park(store, [letter(0)])
        with ThreadPoolExecutor(1) as pool:
            with store.begin_letters("shop") as tx:
                tx.lock(ids)
                reset = pool.submit(PostgresStore(postgres).amend, "shop", lambda head: head, by="me", reason="test")
                until(lambda: run(postgres, WAITING) == [(1,)] or reset.done())
                assert not reset.done()
            assert reset.result(timeout=20).seq == 1

    def test_a_session_that_dies_gives_its_letters_back(self, store: PostgresStore, postgres: str) -> None:
        """Killed in the middle: nothing of it is true, and the next one gets the letters at once."""
        ids = park(store, [letter(n) for n in range(3)])
        with pytest.raises(StoreError, match="try again"), store.begin_letters("shop") as tx:
            tx.lock(ids)
            tx.execute(changing(ids, status="REPROCESSED"))
            ours = "state = 'idle in transaction' and datname = current_database()"
            run(postgres, f"select pg_terminate_backend(pid) from pg_stat_activity where {ours}")
            tx.execute(Commit())
        assert change(PostgresStore(postgres), ids, status="DISCARDED") == 3
        assert set(store.letters(ALL)["status"].to_pylist()) == {"DISCARDED"}

    def test_a_consumer_that_nobody_knows_has_no_letters(self, store: PostgresStore) -> None:
        """A misspelt name is told, not created."""
        with pytest.raises(ConfigError, match="shoop"), store.begin_letters("shoop"):
            pass


def stream_with_duplicates(dsn: str) -> int:
    """A takeover and a batch of the stream with four duplicates of each of three held keys; returns how many keys were known."""
    stream = PostgresStore(dsn)
    with stream.begin("shop", epoch(stream)) as tx:
        known = tx.reserve(keys(range(4))).num_rows
        tx.execute(duplicates(0, 1, 2, count=4))
        finish(tx, 10, 13, reserved=1)
    # The keys of the letters were reserved outside a batch.
    run(dsn, "update dedup.batch set reserved = 4")
    stream.close()
    return known


class TestChanging:
    def test_only_the_columns_given_change(self, store: PostgresStore) -> None:
        """Any mix of them, nulls and exact bytes included; the event's own columns are refused."""
        ids = park(store, [letter(1), letter(2)])
        before = store.letters(ALL).to_pylist()
        new = {
            "body": b"\0\xff",
            "key": b"k" * 16,
            "attempts": 3,
            "error_message": "a\0b",
            "last_failed_at": FAILED_AT + dt.timedelta(1),
            "stack": None,
        }
        change(store, ids[:1], **new)
        after = store.letters(ALL).to_pylist()
        assert after == [{**before[0], **new, "error_message": "a\u2400b"}, before[1]]
        with pytest.raises(StoreError, match="sequence_number"):
            change(store, ids, sequence_number=5)

    def test_history_is_kept_with_its_bytes(self, store: PostgresStore) -> None:
        """Appended by Park and Change, oldest first; parking a letter again appends nothing."""
        first = {"error_type": "ValueError", "error_message": "no\0", "stack": "line 1"}
        told = [{"letter_id": letter(1)["id"], "at": FAILED_AT + dt.timedelta(seconds=s), **first} for s in (0, 1)]
        (one,) = park(store, [letter(1)], told)
        park(store, [letter(1)], told, reserve=False)
        edited = {"letter_id": one, "at": FAILED_AT + dt.timedelta(hours=1), "action": "EDITED", "by": "me", "reason": "typo"}
        change(store, [one], body=b"new", history=[{**edited, "body": b"\0old", "key": b"o" * 16, "idempotence_key": "order-1"}])
        found = store.history(one).to_pylist()
        assert [row["action"] for row in found] == ["FAILED", "FAILED", "EDITED"]
        assert found[0]["error_message"] == "no\u2400" and found[0]["at"] == FAILED_AT
        assert (found[2]["body"], found[2]["key"], found[2]["by"]) == (b"\0old", b"o" * 16, "me")
        assert store.history("nobody").num_rows == 0

    def test_a_freed_key_is_new_again(self, store: PostgresStore) -> None:
        """Discarded with its key released: the reservation is gone, in whatever table it was, and verify agrees."""
        (one,) = park(store, [letter(1)])
        store.rotate_reservations()
        released = {"letter_id": one, "action": "RELEASED", "reserved": -1}
        parked = {"letter_id": one, "action": "FAILED", "reserved": 1}
        with store.begin_letters("shop") as tx:
            tx.lock([one])
            tx.execute(changing([one], status="DISCARDED", holds_key=False, history=[parked, released]))
            tx.execute(Free(keys([1]).select(["key"])))
            tx.execute(Commit())
        with store.begin("shop", store.head("shop").epoch) as tx:
            assert tx.known(keys([1])).num_rows == 0
        assert store.problems("shop") == [] and store.reserved("shop") == 0

    def test_the_answer_to_a_commit_of_letters_is_read_back(self, store: PostgresStore, postgres: str) -> None:
        """The server's own record says what became of the transaction, though it leaves no number."""
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        from kit.pg_proxy import proxied

        ids = park(store, [letter(1), letter(2)])
        for deliver, status in ((True, "DISCARDED"), (False, "LOST")):
            with proxied(int(conninfo_to_dict(postgres)["port"] or 5432)) as proxy:
                far = PostgresStore(make_conninfo(postgres, host="127.0.0.1", port=proxy.port))
                proxy.deliver = deliver
                expected = nullcontext() if deliver else pytest.raises(StoreUnavailable, match="Nothing")
                with expected, far.begin_letters("shop") as tx:
                    tx.lock(ids)
                    tx.execute(changing(ids, status=status))
                    proxy.armed = True
                    tx.execute(Commit())
            assert set(store.letters(ALL)["status"].to_pylist()) == {"DISCARDED"}


class TestFloods:
    def test_many_letters_are_kept_as_they_were_given(self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """More than are written at a time, and few of them with values that most have not: each is read back exactly."""
        monkeypatch.setattr(wire, "ROWS_PER_WRITE", 16)
        rich = {"properties": [{"key": "a", "value": b"\0"}, {"key": "a", "value": None}], "offset": "7", "stack": "line 5"}
        given = [letter(n, **(rich if n % 40 == 7 else {}), extras=b"x" if n == 90 else None) for n in range(100)]
        park(store, given)
        found = store.letters(ALL).drop_columns(["duplicates"])
        assert found == letters_of(given).cast(found.schema)


class TestDuplicates:
    def test_duplicates_are_counted_once_each(self, store: PostgresStore, postgres: str) -> None:
        """On free letters in place; on those that somebody is at work on beside them. Both are shown as one number."""
        ids = park(store, [letter(n) for n in range(4)])
        number = store.head("shop").epoch
        with store.begin_letters("shop") as person:
            person.lock(ids[:2])
            with PostgresStore(postgres).begin("shop", number) as tx:
                tx.execute(duplicates(0, 1, 2, count=3))
                finish(tx, 10, 10, reserved=0)
        with store.begin("shop", number) as tx:
            tx.execute(duplicates(0, 3, 77))
            finish(tx, 11, 11, batch_id=1, reserved=0)
        assert store.letters(ALL)["duplicates"].to_pylist() == [4, 3, 3, 1]
        assert run(postgres, "select sum(duplicates) from dedup.letter_duplicate") == [(6,)]


class TestCrashMarker:
    def test_the_marker_outlives_its_process_and_ends_with_the_batch(self, store: PostgresStore, postgres: str) -> None:
        """Written at once, while a batch is open, too; a recorded batch clears it, letters and positions from the log do not."""
        assert store.crash_marker("shop") is None and store.crash_marker("nobody") is None
        number = store.head("shop").epoch
        with store.begin("shop", number) as tx:
            store.set_crash_marker("shop", '{"rows": [0, 9]}')
            assert PostgresStore(postgres).crash_marker("shop") == '{"rows": [0, 9]}'
            tx.connection.execute("select 1")
        assert store.crash_marker("shop") == '{"rows": [0, 9]}', "the batch was not committed"
        park(store, [letter(1)])
        assert store.crash_marker("shop") is not None
        chunk(store, number, 0, 9)
        assert store.crash_marker("shop") is None
        store.set_crash_marker("shop", "x")
        store.set_crash_marker("shop", None)
        assert store.crash_marker("shop") is None
        store.set_crash_marker("nobody", "x")

    def test_writing_it_does_not_wait_for_the_disk(self, store: PostgresStore, postgres: str) -> None:
        """Only this statement is lazy: the session's own setting is as it was, and batches commit durably."""
        store.set_crash_marker("shop", "x")
        with store._pool.borrow() as connection:
            assert connection.execute("show synchronous_commit").fetchone() == ("on",)


class TestBudget:
    def test_the_stream_keeps_the_budget_and_people_lift_it(self, store: PostgresStore) -> None:
        """Written by the stream's record only; `lifted` is a person's, and stays."""
        from dataclasses import replace

        number = store.head("shop").epoch
        with store.begin("shop", number) as tx:
            tx.execute(replace(record(0, 9, reserved=0), used={Kind.NO_KEY: Used(10, (3, 7))}))
            tx.execute(Commit())
        lifted = {Kind.NO_KEY: Spent(10, (3, 7), 2)}
        store.amend("shop", lambda head: replace(head, spent=lifted), by="me", reason="known flood")
        with store.begin_letters("shop", positions=True) as tx:
            tx.execute(replace(record(20, 20, batch_id=7, reserved=0), stream=False, used={Kind.NO_KEY: Used(9)}))
            tx.execute(Commit())
        head = store.head("shop")
        assert (head.spent, head.batch_id, head.seq) == (lifted, 0, 3)
        assert store.batches("shop").num_rows == 2 and store.problems("shop") == []


def test_a_purged_key_without_position_is_a_letter_again(postgres: str) -> None:
    """Its letter was reprocessed and its reservation purged: a message that comes under it and fails is a letter of its own."""
    place = PostgresPlace(postgres)
    place.create_sink()
    shop, instance = place.store(), consumer(place.store(), positions=None)
    instance(batch(event(0, "a", -1)).select(["body"]), 0)
    assert reprocess(Selection(), fixed(shop, positions=None)).reprocessed == 1
    shop.rotate_reservations()
    assert shop.purge_reservations(dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1), although_behind=["shop"], patience=0)
    assert instance(batch(event(0, "a", -9)).select(["body"]), 1).dead_lettered == 1
    held = {(row["status"], row["holds_key"]) for row in shop.letters(ALL).to_pylist()}
    assert held == {("REPROCESSED", False), ("OPEN", True)}
    assert_proven(shop)


def sequenced(store: Store, bad: Callable[[str], bool]) -> Any:
    """A consumer that keeps the order of amounts."""
    made = consumer(store, sequence_key="data.amount")
    made._handler = None

    @made.foreach(into="orders")
    def book(one: Any, tx: Any) -> Any:
        if bad(one.data["id"]):
            raise ValueError("a bad order")
        return one.data

    return made


@pytest.mark.full
@pytest.mark.timeout(60)
def test_a_letter_that_cannot_be_run_yet_keeps_nobody_waiting(postgres: str) -> None:
    """It is selected, and waits behind another one: while the handler runs for others, that one can be given up, and the stream goes on."""
    place = PostgresPlace(postgres)
    place.create_sink()
    sequenced(place.store(), lambda i: i in ("a0", "x"))(batch(event(0, "a0", 1), event(1, "a1", 1), event(2, "x", 2)), 0)
    first, behind, other = (row["id"] for row in place.store().letters(ALL).to_pylist())

    def others() -> None:
        assert DeadLetters(place.store()).discard(Selection(ids=(first,)), by="ann", reason="not wanted").changed == 1
        assert sequenced(place.store(), lambda _: False)(batch(event(3, "a2", 1)), 1).dead_lettered == 1

    def meanwhile(name: str) -> bool:
        if name == "x":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(others).result(timeout=20)
        return False

    report = reprocess(Selection(ids=(behind, other)), sequenced(place.store(), meanwhile))
    assert (report.reprocessed, report.waiting) == (1, 1)
    assert reprocess(Selection(), sequenced(place.store(), lambda _: False)).reprocessed == 2
    assert sorted(ids(place.read())) == ["a1", "a2", "x"]
    assert_proven(place.store())
