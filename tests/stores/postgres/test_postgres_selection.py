"""Dead letters found again on PostgreSQL: every condition, page by page, grouped; each by an index."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from checkpoint.errors import ConfigError
from deadletter.selection import Selection
from dedup.postgres import PostgresStore, letters
from kit.pg_help import FAILED_AT, change, epoch, letter, park, sequence_of
from kit.pg_run import run

DAY = dt.timedelta(days=1)


@pytest.fixture
def store(postgres: str) -> Iterator[PostgresStore]:
    """A store with the consumers `shop` and `other`."""
    made = PostgresStore(postgres)
    epoch(made)
    epoch(made, "other")
    yield made
    made.close()


def found(store: PostgresStore, **selection: Any) -> list[int]:
    """Positions of the letters that match."""
    return list(store.letters(Selection(**selection), ["sequence_number"])["sequence_number"].to_pylist())


def test_every_condition_selects(store: PostgresStore) -> None:
    """Each field of Selection alone picks what it says, and nothing else."""
    ids = park(
        store,
        [
            letter(1, kind="HANDLER_ERROR", reason="Ünder 50%", error_message="Some_thing", stack="at Line 5", fingerprint="a" * 16),
            letter(2, sequence="s", last_failed_at=FAILED_AT + DAY, status="OPEN"),
            letter(3, topic="refunds", partition=4, source="else", id="abc123", status="DISCARDED"),
            letter(4, generation=2, idempotence_key="k" * 1000),
        ],
    )
    park(store, [letter(9, consumer="other", key=False)])
    for selection, positions in (
        ({"consumer": "other"}, [9]),
        ({"source": "else"}, [3]),
        ({"topic": "refunds"}, [3]),
        ({"partition": 4}, [3]),
        ({"first": 3}, [9, 4, 3]),
        ({"last": 2}, [1, 2]),
        ({"kind": "HANDLER_ERROR"}, [1]),
        ({"status": "DISCARDED"}, [3]),
        ({"statuses": ("DISCARDED", "LOST")}, [3]),
        ({"statuses": ()}, []),
        ({"fingerprint": "a" * 16}, [1]),
        ({"id": "abc"}, [3]),
        ({"id": ids[0]}, [1]),
        ({"ids": tuple(ids[:2])}, [1, 2]),
        ({"since": FAILED_AT + DAY}, [2]),
        ({"until": FAILED_AT + DAY, "consumer": "shop"}, [1, 4, 3]),
        ({"key": "k" * 1000}, [4]),
        ({"key": "k"}, []),
        ({"text": "NDER 50%"}, [1]),
        ({"text": "some_THING"}, [1]),
        ({"text": "LINE 5"}, [1]),
        ({"text": "Some%thing"}, []),
        ({"sequence_key": "s"}, [2]),
        ({"sequences": (sequence_of("s"), sequence_of("t"))}, [2]),
        ({"generation": 2}, [4]),
        ({"limit": 2}, [9, 1]),
        ({"statuses": ("OPEN", "DISCARDED"), "consumer": "shop"}, [1, 2, 4, 3]),
        ({"statuses": ("OPEN", "DISCARDED"), "status": "DISCARDED"}, [3]),
        ({"statuses": ("OPEN", "LOST"), "status": "DISCARDED"}, []),
        ({"topic": "orders"}, [9, 1, 2, 4]),
        ({"topic": "orders", "consumer": "shop", "last": 2}, [1, 2]),
        ({"source": "broker", "limit": 3}, [9, 1, 2]),
    ):
        assert found(store, **selection) == positions, selection


def test_only_the_columns_asked_for_are_read(store: PostgresStore) -> None:
    """In the order asked for, and all of them without asking; no letters have the same schema."""
    park(store, [letter(1, properties=[{"key": "a", "value": b"\0"}, {"key": "a", "value": None}], extras=b"x")])
    some = store.letters(Selection(), ["status", "properties", "last_failed_at", "key", "duplicates"])
    assert some.column_names == ["status", "properties", "last_failed_at", "key", "duplicates"]
    assert some["last_failed_at"].to_pylist() == [FAILED_AT]
    assert store.letters(Selection()).select(some.column_names) == some
    assert store.letters(Selection(id="none")).schema == store.letters(Selection()).schema == letters.LETTERS_KEPT


def test_pages_follow_each_other_without_gap_or_overlap(store: PostgresStore) -> None:
    """Over consumers, partitions and letters of one position, with conditions and without; the end is an empty page."""
    park(store, [letter(n, partition=n % 3, generation=g, id=f"{g}{n:03}", key=False) for n in range(40) for g in (0, 1)])
    park(store, [letter(n, consumer="other", key=False) for n in range(10)])
    park(store, [letter(n, topic="refunds", source="else", key=False, status="DISCARDED") for n in range(10)])
    park(store, [letter(n + 40, incarnation=1, partition=n % 2, key=False, status="LOST") for n in range(10)])
    for selection in (
        Selection(limit=7, topic="orders"),
        Selection(limit=3, topic="orders", partition=1),
        Selection(limit=7, source="broker", consumer="shop"),
        Selection(limit=4, consumer="shop", statuses=("DISCARDED", "OPEN")),
        Selection(limit=7),
        Selection(limit=7, consumer="shop"),
        Selection(limit=3, consumer="shop", topic="orders", partition=1),
    ):
        whole = store.letters(replace(selection, limit=None), ["id"])["id"].to_pylist()
        pages: list[str] = []
        while page := store.letters(replace(selection, after=pages[-1] if pages else None), ["id"])["id"].to_pylist():
            pages += page
        assert pages == whole and len(set(whole)) == len(whole) > 20
    with pytest.raises(ConfigError, match="nothere"):
        store.letters(Selection(after="nothere"))


def test_groups_count_exactly_what_is_there(store: PostgresStore, postgres: str) -> None:
    """By the counts that are kept and by reading the letters alike, after parks, changes, deletes and what a DBA does by hand."""

    def rows(start: int, mark: str, **columns: Any) -> list[dict[str, Any]]:
        return [letter(n, fingerprint=mark * 16, **columns) for n in range(start, start + 5)]

    ids = park(store, rows(0, "a"))
    park(store, rows(10, "a", kind="HANDLER_ERROR", reason="late", last_failed_at=FAILED_AT + DAY))
    park(store, rows(20, "b", consumer="other", first_failed_at=FAILED_AT - DAY))
    park(store, rows(30, "b", consumer="other", first_failed_at=FAILED_AT - 2 * DAY, last_failed_at=FAILED_AT + DAY)[:1])
    change(store, ids[:2], status="DISCARDED")
    change(store, ids[2:3], fingerprint="c" * 16)
    run(postgres, "delete from dedup.dead_letter where id = %s", [ids[3]])
    run(postgres, "update dedup.dead_letter set status = 'LOST' where id = %s", [ids[4]])
    for selection in (
        Selection(),
        Selection(consumer="shop"),
        Selection(status="OPEN"),
        Selection(statuses=("LOST", "DISCARDED")),
        Selection(limit=1),
    ):
        kept = store.groups(selection).to_pylist()
        read = store.groups(replace(selection, first=0)).to_pylist()
        assert [{**row, "example": None} for row in kept] == [{**row, "example": None} for row in read]
        examples = {row["id"]: row for row in store.letters(Selection(limit=None)).to_pylist()}
        assert all(examples[row["example"]]["last_failed_at"] == row["last_failed_at"] for row in kept)
    counts = [(row["fingerprint"][0], row["kind"], row["letters"]) for row in store.groups(Selection()).to_pylist()]
    assert counts == [("b", "REJECTED", 6), ("a", "HANDLER_ERROR", 5), ("a", "REJECTED", 3), ("c", "REJECTED", 1)]
    assert run(postgres, "select sum(letters) from dedup.letter_age where status = 'OPEN'") == [(12,)]
    run(postgres, "truncate dedup.dead_letter")
    assert store.groups(Selection()).num_rows == 0


PARK_ONE = """
    insert into dedup.dead_letter (id, consumer, generation, source, topic, incarnation, partition, sequence_number, part, holds_key, kind,
        reason, fingerprint, attempts, first_failed_at, last_failed_at, status)
    values (%(n)s, 'shop', 0, 's', 't', 0, 0, %(n)s, 0, false, 'REJECTED', 'no', 'f', 1, '2026-03-01', '2026-03-01', 'OPEN')
"""


@pytest.mark.full
def test_counts_stay_few_and_right_with_many_writers(store: PostgresStore, postgres: str) -> None:
    """Beside a transaction that stays open, four who park a letter at a time, some rolled back: nobody waits, and rows do not pile up."""

    def work(worker: int) -> None:
        with psycopg.connect(postgres, options="-c lock_timeout=5s") as connection:
            for n in range(100):
                connection.execute(PARK_ONE, {"n": worker * 1000 + n})
                (connection.commit if n % 5 else connection.rollback)()

    with psycopg.connect(postgres) as slow:
        slow.execute(PARK_ONE, {"n": 9999})
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        slow.rollback()
    assert store.groups(Selection()).to_pylist()[0]["letters"] == 320
    assert run(postgres, "select count(*) < 200 from dedup.letter_count") == [(True,)]
    assert [p for p in store.problems("shop") if "letter_count" in p] == []


FILL = """
    insert into dedup.dead_letter (id, consumer, generation, source, topic, incarnation, partition, sequence_number, part, holds_key,
        idempotence_key, kind, reason, fingerprint, attempts, first_failed_at, last_failed_at, status, sequence, sequence_key)
    select md5(n::text), 'shop', 0, 'broker', 'orders', 0, n % 8, n / 8, 0, false, 'order-' || n, 'REJECTED', 'no', md5((n % 20)::text), 1,
        timestamptz '2026-01-01' + n * interval '1 minute', timestamptz '2026-01-01' + n * interval '1 minute',
        case when n % 3 = 0 then 'OPEN' else 'REPROCESSED' end, case when n % 3 = 0 then md5((n % 1000)::text)::uuid end,
        case when n % 3 = 0 then 's' || n % 1000 end
    from generate_series(1, 60000) n
"""


@pytest.fixture(scope="module")
def plans(postgres_server: str) -> Iterator[str]:
    """A database with 60,000 letters."""
    from psycopg.conninfo import make_conninfo

    name = "dedup_letter_plans"
    run(postgres_server, f"create database {name}")
    dsn = make_conninfo(postgres_server, dbname=name)
    PostgresStore(dsn).migrate()
    run(dsn, FILL)
    run(dsn, "analyze dedup.dead_letter")
    run(dsn, "analyze dedup.letter_count")
    yield dsn
    run(postgres_server, f"drop database {name} with (force)")


@pytest.mark.full
@pytest.mark.parametrize(
    "selection",
    [
        {},
        {"consumer": "shop"},
        {"consumer": "shop", "status": "OPEN"},
        {"statuses": ("OPEN", "BLOCKED")},
        {"topic": "orders", "partition": 3, "first": 1000, "last": 1100},
        {"topic": "orders", "partition": 3, "after": "98f13708210194c475687be6106a3b84"},
        {"source": "broker", "after": "98f13708210194c475687be6106a3b84"},
        {"topic": "nothing"},
        {"consumer": "shop", "status": "REPROCESSED"},
        {"fingerprint": "98f13708210194c475687be6106a3b84", "status": "OPEN"},
        {"status": "OPEN", "since": dt.datetime(2026, 2, 11, tzinfo=dt.UTC)},
        {"key": "order-17"},
        {"sequence_key": "s17"},
        {"id": "98f137"},
        {"ids": ("98f13708210194c475687be6106a3b84",)},
        {"sequences": (b"\x98\xf17\x08!\x01\x94\xc4uh{\xe6\x10j;\x84",), "status": "OPEN"},
        {"consumer": "shop", "after": "98f13708210194c475687be6106a3b84"},
        {"after": "98f13708210194c475687be6106a3b84", "statuses": ("OPEN", "BLOCKED")},
    ],
    ids=lambda selection: "-".join(selection) or "all",
)
def test_a_page_is_read_by_an_index(plans: str, selection: dict[str, Any]) -> None:
    """A page looks at few letters, wherever it is: no selection that people make often reads the table."""
    store = PostgresStore(plans)
    read: list[str] = []

    def explained(connection: Any, statement: bytes, parameters: Any) -> list[Any]:
        rows = connection.execute(b"explain (analyze, buffers, costs off, timing off) " + statement, parameters).fetchall()
        read.extend(row[0] for row in rows)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(letters, "_run", explained)
        store.letters(Selection(**selection))
    text = "\n".join(read)
    assert "Seq Scan" not in text and "Index" in text, text
    assert buffers(text) < 1500, text
    store.close()


def buffers(plan: str) -> int:
    """Pages that the whole plan touched: those of its first line."""
    line = next(line for line in plan.splitlines() if "Buffers:" in line)
    return sum(int(part.split("=")[1]) for part in line.split() if part.startswith(("hit=", "read=")))


@pytest.mark.full
@pytest.mark.parametrize(
    "view",
    [
        "open_letter order by last_failed_at limit 20",
        "open_letter where fingerprint = '98f13708210194c475687be6106a3b84'"
        " order by consumer, source, topic, incarnation, partition, sequence_number limit 20",
        "open_letter where consumer = 'shop' order by consumer, source, topic, incarnation, partition, sequence_number limit 20",
        "letter_group where status = 'OPEN'",
        "letter_age where status = 'OPEN'",
    ],
)
def test_the_views_are_read_by_an_index(plans: str, view: str) -> None:
    """What docs/how-to/postgres.md shows a DBA touches few pages."""
    with psycopg.connect(plans, autocommit=True) as connection:
        rows = connection.execute(f"explain (analyze, buffers, costs off, timing off) select * from dedup.{view}".encode()).fetchall()
    text = "\n".join(row[0] for row in rows)
    assert "Seq Scan on dead_letter" not in text, text
    assert buffers(text) < 1500, text
