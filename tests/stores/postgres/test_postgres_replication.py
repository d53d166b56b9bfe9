"""Logical replication of the state: for a replica, change data capture, or an upgrade with a second server."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint import changes
from deadletter.selection import Selection
from dedup import DeadLetters
from dedup.postgres import PostgresStore
from dedup.reprocessing.letters import reprocess
from kit import pg_server
from kit.orders import batch, consumer, event, orders
from kit.pg_help import chunk, epoch, purge_all
from kit.pg_proxy import until
from kit.pg_run import run
from kit.places import PostgresPlace

TABLES = "select relname from pg_class where relnamespace = 'dedup'::regnamespace and relkind = 'r' and relpersistence = 'p' order by 1"
CAUGHT_UP = "select count(*) from pg_replication_slots where slot_name = 'other' and confirmed_flush_lsn >= %s::pg_lsn"


@pytest.fixture
def server() -> Iterator[str]:
    """A server that keeps in its log what a subscription needs."""
    with pg_server.running_server(settings={**pg_server.UNSAFE, "wal_level": "logical"}) as made:
        yield made.dsn


def test_batches_run_where_all_tables_are_published(postgres: str) -> None:
    """Rows that nothing identifies cannot be updated or deleted once a DBA publishes all tables: each of ours is identified."""
    store = PostgresStore(postgres)
    store.migrate()
    run(postgres, "create publication everything for all tables")
    number = epoch(store)
    for turn in range(3):
        chunk(store, number, 10 * turn, 10 * turn + 4, turn)
        assert store.rotate_reservations() == f"reservation_{turn + 2:06d}"
    assert purge_all(store) == 3
    without = """
        select c.relname from pg_class c where c.relnamespace = 'dedup'::regnamespace and c.relkind = 'r' and c.relpersistence = 'p'
        and c.relreplident = 'd' and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
    """
    assert run(postgres, without) == []


@pytest.mark.full
def test_a_subscriber_has_the_same_rows(server: str) -> None:
    """Batches, letters, people's decisions and messages arrive at a second database as they are here."""
    other = make_conninfo(server, dbname="other")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("create database other")
    place = PostgresPlace(server)
    place.create_sink()
    PostgresPlace(other).create_sink()
    store = PostgresStore(server)
    for each in (store, PostgresStore(other)):
        each.migrate()
    run(server, "create publication everything for all tables; alter table orders replica identity full")
    run(server, "select pg_create_logical_replication_slot('other', 'pgoutput')")
    with psycopg.connect(other, autocommit=True) as connection:
        options = "create_slot = false, slot_name = 'other', copy_data = false"
        connection.execute(f"create subscription other connection '{server}' publication everything with ({options})")
    _work(store)
    (now,) = run(server, "select pg_current_wal_lsn()::text")
    with psycopg.connect(server, autocommit=True) as connection:
        until(lambda: connection.execute(CAUGHT_UP, [now[0]]).fetchone() == (1,))
    names = [name for (name,) in run(server, TABLES)]
    assert "batch" in names and "open_transaction" not in names
    own = {"schema_version", "reservation_generation"}  # written by the migration, on both sides
    for table in [f"dedup.{name}" for name in names if name not in own] + ["orders"]:
        rows = f"select t::text from {table} t order by 1"
        assert run(other, rows) == run(server, rows), table
    store.close()


def _work(store: PostgresStore) -> None:
    """All kinds of writes."""
    job = consumer(store)

    def half(rows: pa.Table, tx: object) -> None:
        tx.dead_letter(rows.slice(0, 2), "no")  # type: ignore[attr-defined]
        tx.write(pa.table({"id": ["a"], "amount": pa.array([1], pa.int64())}), "orders")  # type: ignore[attr-defined]
        tx.publish(pa.table({"body": [b"hello"], "part": [b"k"]}), "topic", key="part")  # type: ignore[attr-defined]

    job._handler = half
    for number in range(3):
        job(batch(*orders(range(3 * number, 3 * number + 3))), number)
    job(batch(event(9, "x"), event(10, "x")), 3)
    letters = DeadLetters(store)
    found = store.letters(Selection())["id"].to_pylist()
    letters.discard(found[:1], by="ann", reason="no", release_key=True)
    job._handler = lambda rows, tx: None
    assert reprocess(Selection(ids=tuple(found[1:3])), job).reprocessed == 2
    store.amend("shop", changes.accept_gap, by="ann", reason="gap")
