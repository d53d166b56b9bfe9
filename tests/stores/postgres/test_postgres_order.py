"""The order of sequences on PostgreSQL: nobody overtakes, nobody waits for ever, whoever parks, releases or restores at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from deadletter.letter import LETTERS
from deadletter.selection import Selection
from deadletter.store import Commit, Park
from dedup.postgres import PostgresStore
from fixtures.variants import of_which
from kit.pg_help import WAITING, chain, change, changing, epoch, finish, letter, park, sequence_of
from kit.pg_proxy import until
from kit.pg_run import run


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


def disorder(store: PostgresStore) -> list[str]:
    """What verify finds, but for the number of reservations: `park` makes them without a batch."""
    return [problem for problem in store.problems("shop") if "batch records of all consumers" not in problem]


def test_parked_letters_block_their_sequences(store: PostgresStore) -> None:
    """Whoever asks learns the last letter of each sequence; another sequence, and letters without one, block nothing."""
    ids = park(store, [*chain([1, 3], "a"), *chain([2], "b"), letter(4), letter(5, sequence="c", status="DISCARDED")])
    with store.begin("shop", store.head("shop").epoch) as tx:
        found = tx.blocked(pa.array(sorted(map(sequence_of, "abc")), pa.binary(16))).to_pylist()
    assert sorted((row["letter"], row["kind"]) for row in found) == sorted([(ids[1], "REJECTED"), (ids[2], "REJECTED")])
    assert order(store) == [(1, "OPEN", None), (3, "BLOCKED", 1)] and disorder(store) == []


@pytest.mark.parametrize("status", of_which(1, ["REPROCESSED", "DISCARDED", "DUPLICATE", "LOST"]))
def test_the_next_one_is_released(store: PostgresStore, postgres: str, status: str) -> None:
    """First, middle or last: the others close up, and with the last one the sequence is free."""
    ids = park(store, chain([1, 2, 3, 4], "a"))
    change(store, [ids[1]], status=status)
    assert order(store) == [(1, "OPEN", None), (3, "BLOCKED", 1), (4, "BLOCKED", 3)]
    change(store, [ids[0]], status=status)
    assert order(store) == [(3, "OPEN", None), (4, "BLOCKED", 3)]
    change(store, [ids[3]], status=status)
    assert order(store) == [(3, "OPEN", None)] and disorder(store) == []
    change(store, [ids[2]], status=status)
    assert run(postgres, "select count(*) from dedup.blocked_sequence") == [(0,)] and disorder(store) == []


def test_several_change_at_once(store: PostgresStore) -> None:
    """Whichever of a sequence are taken out or put back in one step, what is left is in order."""
    ids = park(store, [*chain(range(10), "a"), *chain(range(10, 14), "b")])
    change(store, [ids[n] for n in (0, 1, 4, 5, 9, 10)], status="DISCARDED")
    assert order(store) == [(2, "OPEN", None), (3, "BLOCKED", 2), (6, "BLOCKED", 3), (7, "BLOCKED", 6), (8, "BLOCKED", 7)]
    assert order(store, "b") == [(11, "OPEN", None), (12, "BLOCKED", 11), (13, "BLOCKED", 12)]
    change(store, [ids[n] for n in (0, 5, 9)], status="OPEN")
    assert [n for n, _, _ in order(store)] == [0, 2, 3, 5, 6, 7, 8, 9] and disorder(store) == []


def test_a_late_event_finds_its_place(store: PostgresStore) -> None:
    """Parked behind the last one by who planned it, but earlier by position: the order is that of positions."""
    ids = park(store, chain([5, 9], "a"))
    late = letter(7, sequence="a", status="BLOCKED", blocked_by=ids[1])
    first = letter(2, sequence="a", status="BLOCKED", blocked_by=ids[1])
    park(store, [first, late])
    assert order(store) == [(2, "OPEN", None), (5, "BLOCKED", 2), (7, "BLOCKED", 5), (9, "BLOCKED", 7)]
    assert disorder(store) == []


def test_who_parks_behind_a_letter_waits_for_its_release(store: PostgresStore, postgres: str) -> None:
    """A release under way: the stream waits for it, and then goes on as if nothing had ever blocked."""
    (blocker,) = park(store, chain([1], "a"))
    asked = pa.array([sequence_of("a")], pa.binary(16))

    def behind() -> int:
        with PostgresStore(postgres).begin("shop", number) as tx:
            return int(tx.blocked(asked).num_rows)

    number = store.head("shop").epoch
    with ThreadPoolExecutor(1) as pool:
        with PostgresStore(postgres).begin_letters("shop") as tx:
            tx.lock([blocker])
            tx.execute(changing([blocker], status="REPROCESSED"))
            later = pool.submit(behind)
            until(lambda: run(postgres, WAITING) == [(1,)] or later.done())
            tx.execute(Commit())
        assert later.result(timeout=20) == 0


def test_a_release_waits_for_who_parks_behind(store: PostgresStore, postgres: str) -> None:
    """The stream has seen the block and parks: the release comes after it, and wakes what was parked."""
    (blocker,) = park(store, chain([1], "a"))
    with ThreadPoolExecutor(1) as pool:
        with store.begin("shop", store.head("shop").epoch) as tx:
            assert tx.blocked(pa.array([sequence_of("a")], pa.binary(16)))["letter"].to_pylist() == [blocker]
            release = pool.submit(change, PostgresStore(postgres), [blocker], status="REPROCESSED")
            until(lambda: run(postgres, WAITING) == [(1,)] or release.done())
            tx.execute(Park(pa.Table.from_pylist([letter(2, sequence="a", status="BLOCKED", blocked_by=blocker)], schema=LETTERS)))
            finish(tx, 2, 2, reserved=0)
        assert release.result(timeout=20) == 1
    assert order(store) == [(2, "OPEN", None)]


def test_two_restores_at_once_agree(store: PostgresStore, postgres: str) -> None:
    """A free sequence has no row to lock: the first one makes it, the second one waits, and one letter is open."""
    ids = park(store, [letter(n, sequence="a", status="DISCARDED") for n in (1, 2)])
    with ThreadPoolExecutor(1) as pool:
        with store.begin_letters("shop") as tx:
            tx.lock(ids[1:])
            tx.execute(changing(ids[1:], status="OPEN"))
            other = pool.submit(change, PostgresStore(postgres), ids[:1], status="OPEN")
            until(lambda: run(postgres, WAITING) == [(1,)] or other.done())
            tx.execute(Commit())
        other.result(timeout=20)
    assert order(store) == [(1, "OPEN", None), (2, "BLOCKED", 1)] and disorder(store) == []


def test_verify_sees_a_broken_order(store: PostgresStore, postgres: str) -> None:
    """Two open letters, a wrong blocker, a sequence noted wrongly or not at all, a count that is off."""
    ids = park(store, [*chain([1, 2], "a"), *chain([3, 4], "b")])
    letters, noted = "update dedup.dead_letter set", "update dedup.blocked_sequence set letter ="
    for broken, mend in (
        (f"{letters} status = 'OPEN' where id = '{ids[1]}'", f"{letters} status = 'BLOCKED' where id = '{ids[1]}'"),
        (f"{letters} blocked_by = 'x' where id = '{ids[3]}'", f"{letters} blocked_by = '{ids[2]}' where id = '{ids[3]}'"),
        (f"{noted} '{ids[0]}' where letter = '{ids[1]}'", f"{noted} '{ids[1]}' where letter = '{ids[0]}'"),
        ("update dedup.letter_count set letters = letters + 1", "update dedup.letter_count set letters = letters - 1"),
    ):
        assert disorder(store) == []
        run(postgres, broken)
        assert disorder(store) != [], broken
        run(postgres, mend)
    run(postgres, "delete from dedup.blocked_sequence")
    assert len(disorder(store)) == 2
