"""Least privilege on PostgreSQL: the runtime role does all its work and nothing else, dashboards read no bodies, TLS settings hold."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint import PostgresCheckpointStore
from checkpoint.errors import StoreError
from checkpoint.postgres.sql import roles_sql
from deadletter.store import Commit, Free
from dedup import PostgresStore
from fixtures.fix_postgres import run
from kit import pg_server
from kit.orders import assert_proven, batch, consumer, event, orders
from kit.paths import ROOT
from kit.people import failing
from kit.pg_help import chunk, epoch, keys, purge_all
from kit.places import PostgresPlace

LOGINS = {"owner": "he_dba", "run": "he_app", "read": "he_dashboard", "operate": "he_operator"}

OPERATING = {"begin_deletion", "delete_portion"}
"""Functions that only who operates consumers may call."""


@pytest.fixture
def postgres(empty_postgres: str) -> str:
    """A database in which nothing was migrated."""
    return empty_postgres


@pytest.fixture(scope="module")
def logins(postgres_server: str) -> Iterator[None]:
    """Users that log in, one for each of the roles, without any right of their own."""
    run(postgres_server, roles_sql("dedup").split("-- dedup_owner owns")[0])
    for role, user in LOGINS.items():
        run(postgres_server, f"drop role if exists {user}")
        run(postgres_server, f"create role {user} login in role dedup_{role}")
    yield
    run(postgres_server, "drop role " + ", ".join(LOGINS.values()))


class LeastPlace(PostgresPlace):
    """A database in which consumers run as the runtime role; sinks are made by the superuser."""

    def __init__(self, dsn: str) -> None:
        super().__init__(make_conninfo(dsn, user=LOGINS["run"]))
        self.super = dsn

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """One statement, as the superuser."""
        return run(self.super, sql)


@pytest.fixture
def place(postgres: str, logins: None) -> LeastPlace:
    """The script before and after a migration by the owner; sinks can be written by the runtime role."""
    run(postgres, roles_sql("dedup"))
    PostgresStore(make_conninfo(postgres, user=LOGINS["owner"], options="-c role=dedup_owner")).migrate()
    run(postgres, roles_sql("dedup"))
    run(postgres, "alter default privileges in schema public grant select, insert, update, delete on tables to dedup_run")
    made = LeastPlace(postgres)
    made.create_sink()
    return made


def test_the_runtime_role_works_where_no_function_is_granted_by_default(postgres: str, logins: None) -> None:
    """A database whose default privileges give nobody EXECUTE: the script grants every function that our statements call."""
    run(postgres, "alter default privileges revoke execute on functions from public")
    run(postgres, roles_sql("dedup"))
    PostgresStore(postgres).migrate()
    run(postgres, roles_sql("dedup"))
    granted = (
        "select proname from pg_proc where pronamespace = 'dedup'::regnamespace and has_function_privilege('dedup_run', oid, 'execute')"
    )
    called = {name for (name,) in run(postgres, "select proname from pg_proc where pronamespace = 'dedup'::regnamespace")}
    texts = "".join((ROOT / name).read_text() for name in ("sql/postgres/queries.sql", "dedup/postgres/keys.py"))
    ours = {name for name in called if f"}}.{name}(" in texts}
    assert "key_head" in ours and ours - OPERATING == ours & {name for (name,) in run(postgres, granted)}
    assert ours <= {name for (name,) in run(postgres, granted.replace("dedup_run", "dedup_operate"))}
    store = LeastPlace(postgres).store()
    with store.begin("shop", epoch(store)) as tx:
        assert tx.reserve(keys([1])).num_rows == 0


MODULES = (
    "test_letters",
    "test_letter_edits",
    "test_forget",
    "test_join",
    "test_outbox",
    "test_delivery",
    "test_failures",
    "test_guards",
    "test_upkeep",
)


def work() -> list[Any]:
    """The contract's tests that need nothing but a place: stream, letters, reprocess, replay, runners, outbox, people's decisions."""
    modules = {name: importlib.import_module(f"contract.{name}") for name in MODULES}
    found = [(name, f) for name, module in modules.items() for f in vars(module).values() if inspect.isfunction(f)]
    wanted = [(n, f) for n, f in found if f.__name__.startswith("test_") and list(inspect.signature(f).parameters) == ["place"]]
    return [pytest.param(f, id=f"{n}-{f.__name__}") for n, f in wanted]


@pytest.mark.full
@pytest.mark.parametrize("promise", work())
def test_the_runtime_role_keeps_the_promise(place: LeastPlace, promise: Callable[[Any], None]) -> None:
    """Each promise of the contract holds where consumers, reprocess and people's commands run as the runtime role."""
    promise(place)


def test_the_runtime_role_rotates_purges_and_keeps_checkpoints_of_processors(place: LeastPlace) -> None:
    """Retention and the checkpoint store of event processors need no more than the runtime role."""
    store = place.store()
    consumer(store)(batch(*orders(range(5))), 0)
    store.rotate_reservations()
    assert purge_all(store) == 1
    assert_proven(store)
    processors = PostgresCheckpointStore(place.url)
    where = {"fully_qualified_namespace": "ns", "eventhub_name": "hub", "consumer_group": "g", "partition_id": "0"}
    (won,) = processors.claim_ownership([{**where, "owner_id": "me", "last_modified_time": 0.0, "etag": ""}])
    processors.update_checkpoint({**where, "offset": "1", "sequence_number": 1})
    assert won["owner_id"] == "me" and next(iter(processors.list_checkpoints("ns", "hub", "g")))["sequence_number"] == 1


def test_the_runtime_role_packs_and_frees(place: LeastPlace) -> None:
    """It finds and frees packed keys, and writes no page by itself, also where the script was run again since; dashboards see none."""
    store = place.store()
    number = epoch(store)
    chunk(store, number, 0, 99)
    store.rotate_reservations()
    assert store.pack_reservations() == 1 and run(place.super, "select count(*) from dedup.reservation_filter") == [(1,)]
    run(place.super, roles_sql("dedup"))
    with store.begin_letters("shop") as tx:
        tx.execute(Free(keys(range(10)).select(["key"])))
        tx.execute(Commit())
    assert chunk(store, number, 0, 99, batch_id=1) == 90
    for user, statement in (
        ("run", "update dedup.reservation_page_000001 set page = 0"),
        ("run", "insert into dedup.reservation_page_000001 values (0, '', '')"),
        ("run", "select dedup.take_out(1, 31, '{}')"),
        ("run", "delete from dedup.reservation_filter"),
        ("run", "insert into dedup.reservation_filter_part select 1, 9, made, '' from dedup.reservation_filter"),
        ("run", "update dedup.reservation_filter_part set words = ''"),
        ("read", "select dedup.keep_filter(1, '', 1, 1, 1)"),
        ("run", "delete from dedup.reservation_freed"),
        ("read", "select dedup.free_reservations('{}')"),
        ("read", "select * from dedup.reservation_page_000001"),
        ("read", "select * from dedup.reservation_key"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            run(make_conninfo(place.super, user=LOGINS[user]), statement)


def test_only_who_operates_consumers_deletes_one(place: LeastPlace) -> None:
    """The role that runs them is refused by the server, and nothing has changed; who operates them deletes one and can do all else, too."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    place.store().close()
    said = {"by": "ann", "reason": "replaced", "although_running": True}
    with pytest.raises(StoreError, match="permission denied for function begin_deletion"):
        place.store().delete_consumer("shop", **said)
    assert_proven(place.store())
    place.url = make_conninfo(place.super, user=LOGINS["operate"])
    store = place.store()
    consumer(store)(batch(event(3, "p0-1")), 1)
    run(place.super, f"grant pg_signal_backend to {LOGINS['operate']}")
    store.delete_consumer("shop", **said)
    assert place.store().consumers() == []


FORBIDDEN = [
    "drop table dedup.batch",
    "drop schema dedup cascade",
    "alter table dedup.checkpoint add column x int",
    "alter table dedup.checkpoint disable trigger all",
    "create table dedup.mine (x int)",
    "create schema mine",
    "truncate dedup.reservation",
    "delete from dedup.reservation",
    "delete from dedup.batch",
    "delete from dedup.dead_letter",
    "delete from dedup.consumer",
    "select dedup.delete_portion(1, 10)",
    "select dedup.delete_letters('shop', 10)",
    "update dedup.consumer_deletion set epoch = 0",
    "insert into dedup.consumer_deletion values (9, 'shop', 1, 1, 0, '', '')",
    "update dedup.schema_version set version = 99",
    "insert into dedup.letter_count select * from dedup.letter_count",
    "update dedup.open_letter set reason = ''",
    "update dedup.reservation_generation set closed_at = now()",
    "create or replace function dedup.rotate_reservations() returns text language sql as 'select 1'",
    "select * from secret.salaries",
    "set role dedup_owner",
    "set role postgres",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_the_runtime_role_can_do_nothing_else(place: LeastPlace, statement: str) -> None:
    """It cannot drop, alter or create anything, cannot take back what was recorded, and sees no other schema."""
    run(place.super, "create schema secret; create table secret.salaries (x int)")
    consumer(place.store())(batch(*orders(range(2)), event(2, "bad", -1)), 0)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run(place.url, statement)
    assert_proven(place.store())


DASHBOARD = [
    "consumer",
    "progress",
    "checkpoint",
    "batch",
    "open_letter",
    "letter_group",
    "letter_age",
    "blocked_by_letter",
    "consumer_action",
]
HIDDEN = ["dead_letter", "letter_history", "reservation", "outbox", "crash_marker"]


def test_the_role_of_dashboards_reads_no_bodies_and_writes_nothing(place: LeastPlace) -> None:
    """State and groups of letters can be read; bodies, headers, messages and edits cannot, and nothing can be changed."""
    failing(place.store())
    reader = make_conninfo(place.super, user=LOGINS["read"])
    for table in DASHBOARD:
        run(reader, f"select * from dedup.{table}")
    assert run(reader, "select count(*) from dedup.open_letter") == [(3,)]
    for table in HIDDEN:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            run(reader, f"select * from dedup.{table}")
    for statement in (
        "update dedup.checkpoint set sequence_number = 0",
        "delete from dedup.open_letter",
        "select dedup.rotate_reservations()",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            run(reader, statement)
    columns = {name for (name,) in run(reader, "select column_name from information_schema.columns where table_name = 'open_letter'")}
    assert "reason" in columns and not columns & {"body", "property_names", "property_values", "stack"}


def test_the_script_is_what_the_command_prints_and_fits_any_schema(postgres: str, logins: None, dedup: Any, monkeypatch: Any) -> None:
    """`dedup migrate --roles` needs no store; another schema's name is quoted everywhere; running it again changes nothing."""
    code, out, _ = dedup("migrate --roles")
    assert (code, out.strip()) == (0, roles_sql("dedup").strip())
    name = 'S\'"; drop schema "x'
    for _ in range(2):
        run(postgres, roles_sql(name))
    PostgresStore(make_conninfo(postgres, options="-c role=dedup_owner"), schema=name).migrate()
    run(postgres, roles_sql(name))
    store = PostgresStore(make_conninfo(postgres, user=LOGINS["run"]), schema=name)
    assert store.consumers() == []


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, for localhost, and its key."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """DSN of a server that takes TLS only, and its certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "server")
    with pg_server.running_server() as server:
        server.stop()
        for made in (certificate, key):
            target = server.data / made.name
            shutil.copy(made, target)
            shutil.chown(target, *(lambda s: (s.st_uid, s.st_gid))(server.data.stat()))
            target.chmod(0o600)
        with (server.data / "postgresql.conf").open("a") as file:
            file.write("ssl = on\nssl_cert_file = 'server.crt'\nssl_key_file = 'server.key'\n")
        (server.data / "pg_hba.conf").write_text("local all all trust\nhostssl all all all trust\n")
        server.start()
        yield server.dsn.replace("127.0.0.1", "localhost"), certificate


def test_the_snippet_of_the_manual_verifies_the_server(tls_server: tuple[str, Path], tmp_path: Path) -> None:
    """sslmode=verify-full in the DSN holds for every connection of ours, and a server with another certificate is refused in words."""
    dsn, certificate = tls_server
    run(make_conninfo(dsn, sslmode="require"), "create table if not exists orders (id text, amount bigint)")
    store = PostgresStore(make_conninfo(dsn, sslmode="verify-full", sslrootcert=str(certificate)))
    made = consumer(store)
    seen: list[Any] = []
    inner = made._handler

    def looks(rows: Any, tx: Any) -> None:
        ours = "pg_stat_ssl join pg_stat_activity using (pid) where application_name = 'dedup'"
        sql = f"select count(*), count(*) filter (where ssl) from {ours}"
        seen.append(tx.connection.execute(sql).fetchone())
        inner(rows, tx)

    made._handler = looks
    made(batch(*orders(range(3))), 0)
    assert seen[0][0] == seen[0][1] >= 1
    assert_proven(store)
    store.close()
    other, _ = make_certificate(tmp_path, "other")
    for wrong in ({"sslmode": "verify-full", "sslrootcert": str(other)}, {"sslmode": "disable"}):
        with pytest.raises(StoreError, match=r"certificate verify failed|pg_hba\.conf|no encryption"):
            PostgresStore(make_conninfo(dsn, **wrong)).consumers()


def test_row_level_security_refuses_what_a_batch_is_written_with(postgres: str) -> None:
    """Why consumers are kept apart by schemas: COPY into a table with row level security is refused to whom its policies hold for."""
    run(postgres, "drop role if exists he_tenant")
    run(postgres, "create role he_tenant login")
    run(postgres, "create table kept (key int); grant all on kept to he_tenant; alter table kept enable row level security")
    with psycopg.connect(make_conninfo(postgres, user="he_tenant")) as connection, pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute("copy kept from stdin")
    run(postgres, "drop table kept")
    run(postgres, "drop role he_tenant")
