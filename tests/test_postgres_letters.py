"""Dead letters on PostgreSQL: locked, changed, kept in order, counted, found; with people and the stream at work at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from fix_postgres import run
from pg_help import WAITING, change, changing, chunk, epoch, finish, keys, letter, park, sequence_of
from pg_proxy import until

from checkpoint.errors import ConfigError, StoreError
from dedup.postgres import PostgresStore
from dedup.steps import Commit, Note
from dedup.store import Selection

ALL = Selection(limit=None)


@pytest.fixture
def store(postgres: str) -> Iterator[PostgresStore]:
    """A store with the consumer `shop`, and another one of the same tables at the end without contradictions."""
    made = PostgresStore(postgres)
    epoch(made)
    yield made
    made.close()


def order(store: PostgresStore, sequence: str = "a") -> list[tuple[int, str, int | None]]:
    """Position, status and the position of the blocker of each waiting letter of a sequence."""
    rows = store.letters(Selection(sequences=(sequence_of(sequence),), statuses=("OPEN", "BLOCKED"), limit=None)).to_pylist()
    where = {row["id"]: row["sequence_number"] for row in rows}
    return [(row["sequence_number"], row["status"], where.get(row["blocked_by"])) for row in rows]


def copies(*numbers: int, count: int = 1) -> Note:
    """Note copies of these keys."""
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
        """Locked letters, an open transaction: batches commit, copies of a held key are counted, the epoch can be taken."""
        ids = park(store, [letter(n) for n in range(3)])
        with store.begin_letters("shop") as tx:
            tx.lock(ids)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(stream_with_copies, postgres).result(timeout=20) == 3
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
        with pytest.raises(StoreError, match="run it again"), store.begin_letters("shop") as tx:
            tx.lock(ids)
            tx.execute(changing(ids, status="REPROCESSED"))
            run(postgres, "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'")
            tx.execute(Commit())
        assert change(PostgresStore(postgres), ids, status="DISCARDED") == 3
        assert set(store.letters(ALL)["status"].to_pylist()) == {"DISCARDED"}

    def test_a_consumer_that_nobody_knows_has_no_letters(self, store: PostgresStore) -> None:
        """A misspelt name is told, not created."""
        with pytest.raises(ConfigError, match="shoop"), store.begin_letters("shoop"):
            pass


def stream_with_copies(dsn: str) -> int:
    """A takeover and a batch of the stream with four copies of each of three held keys; returns how many keys were known."""
    stream = PostgresStore(dsn)
    with stream.begin("shop", epoch(stream)) as tx:
        known = tx.reserve(keys(range(4))).num_rows
        tx.execute(copies(0, 1, 2, count=4))
        finish(tx, 10, 13, reserved=1)
    # The keys of the letters were reserved outside a batch.
    run(dsn, "update dedup.batch set reserved = 4")
    stream.close()
    return known
