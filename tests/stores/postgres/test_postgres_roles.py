"""Least privilege on PostgreSQL: the runtime role does all its work and nothing else, dashboards read no bodies, TLS settings hold."""

from __future__ import annotations

import datetime as dt
import importlib
import inspect
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint import PostgresCheckpointStore
from checkpoint.errors import StoreError
from checkpoint.postgres.sql import roles_sql
from deadletter.store import Commit, Free
from dedup import DeadLetters, PostgresStore
from fixtures.variants import of_which
from kit import pg_server
from kit.aged import MONTH, months_later, now, turned
from kit.least import LOGINS, LeastPlace, logging_in
from kit.orders import assert_proven, batch, consumer, event, letters, orders
from kit.paths import ROOT
from kit.people import failing
from kit.pg_help import chunk, epoch, keys, purge_all
from kit.pg_run import run
from kit.places import PostgresPlace

pytestmark = pytest.mark.xdist_group("roles")  # which all databases of a server share

OPERATING = {
    "rotate_reservations",
    "purge_reservations",
    "drop_purged_reservations",
    "merge_batches",
    "pack_reservations",
    "keep_filter",
    "keep_filter_part",
    "free_reservations",
    "begin_deletion",
    "delete_portion",
}
"""Functions that only who operates consumers may call."""

FORGETS = re.compile("release_key|upkeep|rotate_reservations|purge|skip_missing|delete_consumer")
"""What a test calls that frees keys, or works on tables of reservations: who runs consumers may not."""


@pytest.fixture
def postgres(empty_postgres: str) -> str:
    """A database in which nothing was migrated."""
    return empty_postgres


@pytest.fixture(scope="module")
def logins(postgres_server: str) -> Iterator[None]:
    """Users that log in, one for each of the roles, without any right of their own."""
    with logging_in(postgres_server):
        yield


@pytest.fixture
def place(postgres: str, logins: None) -> LeastPlace:
    """The script before and after a migration by the owner; sinks can be written by the runtime role."""
    return LeastPlace.made(postgres)


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
    """Each promise of the contract holds where all runs as the runtime role, or as the role that operates where keys are forgotten."""
    if FORGETS.search(promise.__module__ + inspect.getsource(promise)):
        place.url = place.of("operate")
    promise(place)


UPKEEP: dict[str, Callable[[PostgresStore], object]] = {
    "rotate": lambda store: store.rotate_reservations(),
    "pack": lambda store: store.pack_reservations(),
    "purge": purge_all,
    "upkeep": lambda store: store.upkeep(dt.timedelta(days=30)),
}


@pytest.mark.parametrize("what", of_which(1, UPKEEP))
def test_only_who_operates_consumers_works_on_tables_of_reservations(place: LeastPlace, what: str) -> None:
    """Who runs consumers is refused, with the name of the role that is missing, and nothing has changed; who operates them may."""
    consumer(place.store())(batch(*orders(range(5))), 0)
    run(place.super, "select dedup.rotate_reservations()")
    tables = "select id, closed_at, purged_at, packing from dedup.reservation_generation order by id"
    before = run(place.super, tables)
    with pytest.raises(
        StoreError, match=r"permission denied for function \w+\. This is for a login with the role dedup_operate: .*postgres\.md"
    ):
        UPKEEP[what](place.store())
    assert run(place.super, tables) == before
    assert_proven(place.store())
    UPKEEP[what](PostgresStore(place.of("operate")))
    assert_proven(place.store())


@pytest.mark.full
def test_the_command_of_the_upkeep_names_the_role_that_it_needs(place: LeastPlace, dedup: Any) -> None:
    """Who runs consumers may ask what would be done; the upkeep itself is refused, and done for who operates them."""
    consumer(place.store())(batch(*orders(range(5))), 0)
    assert dedup("upkeep --retention 30d", place)[0] == 0
    code, _, err = dedup("upkeep --retention 30d --yes", place)
    assert (code, "the role dedup_operate" in err) == (3, True)
    place.url = place.of("operate")
    assert dedup("upkeep --retention 30d --yes", place)[0] == 0


@pytest.mark.full
def test_only_who_operates_consumers_frees_the_key_of_a_letter(place: LeastPlace, dedup: Any) -> None:
    """A letter is discarded by who runs consumers; its key stays reserved until who operates them releases it."""
    failing(place.store())
    letter = letters(place.store())[0]["id"]
    line = f"dead-letter discard {letter} --reason x --by ann --yes"
    code, _, err = dedup(f"{line} --release-key", place)
    assert (code, "free_reservations" in err, "the role dedup_operate" in err) == (3, True, True)
    assert letters(place.store())[0]["status"] == "OPEN"
    assert dedup(line, place)[0] == 0
    assert run(place.super, "select count(*) from dedup.reservation_key") == [(3,)]
    place.url = place.of("operate")
    assert dedup(f"{line} --release-key", place)[0] == 0
    assert run(place.super, "select count(*) from dedup.reservation_key") == [(2,)]
    assert_proven(place.store())


def test_only_who_operates_consumers_forgets_ids_of_publishers(place: LeastPlace, dedup: Any) -> None:
    """An id that is forgotten could be published twice."""
    place.store().consumers()
    code, _, err = dedup("publisher purge --older-than 1d --yes", place)
    assert (code, "published_id" in err, "the role dedup_operate" in err) == (3, True, True)
    place.url = place.of("operate")
    assert dedup("publisher purge --older-than 1d --yes", place)[0] == 0


def test_the_runtime_role_keeps_checkpoints_of_processors(place: LeastPlace) -> None:
    """The checkpoint store of event processors needs no more than the runtime role."""
    place.store().consumers()
    processors = PostgresCheckpointStore(place.url)
    where = {"fully_qualified_namespace": "ns", "eventhub_name": "hub", "consumer_group": "g", "partition_id": "0"}
    (won,) = processors.claim_ownership([{**where, "owner_id": "me", "last_modified_time": 0.0, "etag": ""}])
    processors.update_checkpoint({**where, "offset": "1", "sequence_number": 1})
    assert won["owner_id"] == "me" and next(iter(processors.list_checkpoints("ns", "hub", "g")))["sequence_number"] == 1


def test_who_runs_tells_the_retention_and_who_operates_does_the_upkeep(place: LeastPlace, caplog: pytest.LogCaptureFixture) -> None:
    """Who runs cannot purge, and hears which role can; who operates purges, packs and makes filters, and nothing fails."""
    consumer(place.store(), retention=MONTH)(batch(event(0, "a")), 0)
    assert place.execute("select retention, upkeep from dedup.consumer_retention") == [(MONTH, False)]
    PostgresStore(place.super).rotate_reservations()
    months_later(PostgresPlace(place.super))
    with pytest.raises(StoreError, match="the role dedup_operate"):
        list(place.store().upkeep_turn("shop", MONTH).portions())
    consumer(place.store())(batch(event(1, "b", enqueued_time=now())), 1)
    assert place.execute("select retention, upkeep from dedup.consumer_retention") == [(None, False)]
    place.url = place.of("operate")
    made = consumer(place.store(), retention=MONTH, upkeep=True)
    made(batch(event(2, "c", enqueued_time=now())), 2)
    turned(made)
    assert place.execute("select retention, upkeep from dedup.consumer_retention") == [(MONTH, True)]
    assert place.execute("select count(*) from dedup.reservation_generation where dropped_at is not null") == [(1,)]
    assert "upkeep" not in caplog.text


def test_who_operates_packs_and_frees_and_who_runs_finds(place: LeastPlace) -> None:
    """Both find packed keys, one frees them, neither writes a page, also where the script was run again; dashboards see none."""
    place.url = place.of("operate")
    store = place.store()
    number = epoch(store)
    chunk(store, number, 0, 99)
    store.rotate_reservations()
    assert store.pack_reservations() == 1 and run(place.super, "select count(*) from dedup.reservation_filter") == [(1,)]
    run(place.super, roles_sql("dedup"))
    with store.begin_letters("shop") as tx:
        tx.execute(Free(keys(range(10)).select(["key"])))
        tx.execute(Commit())
    assert chunk(PostgresStore(place.of("run")), number, 0, 99, batch_id=1) == 90
    for user, statement in (
        ("operate", "update dedup.reservation_page_000001 set page = 0"),
        ("operate", "select dedup.take_out(1, 31, '{}')"),
        ("operate", "delete from dedup.reservation"),
        ("run", "select dedup.free_reservations('{}')"),
        ("run", "select dedup.keep_filter(1, '', 1, 1, 1)"),
        ("run", "select dedup.keep_filter_part(1, 1, '')"),
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


@pytest.mark.full
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
    "update dedup.reservation set payload_hash = 0",
    "update dedup.reservation_000001 set payload_hash = 0",
    "delete from dedup.reservation_000001",
    "insert into dedup.reservation_floor select 1, 0, 1, 0, 0, 9",
    "update dedup.reservation_floor set floor = 9",
    "select dedup.rotate_reservations()",
    "select dedup.purge_reservations(now())",
    "select dedup.drop_purged_reservations()",
    "select dedup.merge_batches('shop')",
    "select dedup.pack_reservations()",
    "select dedup.free_reservations(array(select key from dedup.reservation))",
    "delete from dedup.published_id",
    "delete from dedup.publisher_lane",
    "update dedup.batch set seen = '{}'",
    "update dedup.consumer_action set reason = ''",
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


def may(dsn: str, statement: str) -> bool:
    """Whether this login is allowed to run it."""
    try:
        run(dsn, statement)
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def test_the_runtime_role_can_do_nothing_else(place: LeastPlace) -> None:
    """It cannot drop, alter or create anything, cannot take back what was recorded, and sees no other schema."""
    run(place.super, "create schema secret; create table secret.salaries (x int)")
    consumer(place.store())(batch(*orders(range(2)), event(2, "bad", -1)), 0)
    assert [statement for statement in FORBIDDEN if may(place.url, statement)] == []
    assert_proven(place.store())


def may_read(dsn: str) -> dict[str, list[str]]:
    """Table or view of the schema -> its columns that this login can select."""
    rows = run(
        dsn,
        "select c.oid::regclass::text, array_agg(a.attname::text) from pg_class c "
        "join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped "
        "where c.relnamespace = 'dedup'::regnamespace and c.relkind in ('r', 'v') and has_column_privilege(c.oid, a.attnum, 'select') "
        "group by 1",
    )
    return dict(rows)


def shown(dsn: str) -> str:
    """All that this login can read in the schema, as one text."""
    return "".join(str(run(dsn, f"select {', '.join(columns)} from {table}")) for table, columns in may_read(dsn).items())


def people_at_work(place: LeastPlace) -> None:
    """A consumer with letters, a message, an edit and decisions: each text that a person or an event brought has a word of its own."""
    made = consumer(place.store())
    made._handler = None

    @made.foreach_batch
    def handler(rows: Any, tx: Any) -> None:
        tx.publish({"key": b"KEY-OUT", "body": b"BODY-OUT"}, "out", key="key")
        tx.reject(rows, pa.array([True] * rows.num_rows), "REASON-REJECTED")

    body = b'{"id": "KEY-EVENT", "amount": 5}'
    made(batch(event(0, body=body, properties=[{"key": "h", "value": b"HEADER"}])), 0)
    found = DeadLetters(place.store())
    letter = letters(place.store())[0]["id"]
    found.edit(letter, body=b'{"id": "KEY-AFTER", "amount": 6}', by="ann", reason="REASON-EDIT")
    run(
        place.super,
        "update dedup.dead_letter set error_message = 'ERROR-TEXT', stack = 'STACK', sequence_key = 'KEY-SEQUENCE', sequence = key",
    )
    run(place.super, "insert into dedup.blocked_sequence select sequence, consumer, id, kind from dedup.dead_letter")
    acted = "insert into dedup.consumer_action (consumer_id, by, reason, before, after)"
    run(place.super, f"{acted} select id, 'ann', 'REASON-ACTION', '{{}}', '{{}}' from dedup.consumer")


def test_the_role_of_dashboards_reads_no_text_of_an_event_or_a_person(place: LeastPlace) -> None:
    """Whatever it can select, in all tables and views, holds no key, hash of a key, reason, error text, body, header or message."""
    people_at_work(place)
    reader = place.of("read")
    told = shown(reader)
    hashes = [
        key for (key,) in run(place.super, "select key::text from dedup.reservation_key union select key::text from dedup.dead_letter")
    ]
    assert hashes and "shop" in told
    for hidden in ("KEY-", "REASON-", "ERROR-TEXT", "STACK", "BODY-OUT", "HEADER", *hashes):
        assert hidden not in told, hidden
    seen = may_read(reader)
    assert "status" in seen["dedup.open_letter"] and "reason" not in seen["dedup.open_letter"]
    assert run(reader, "select count(*) from dedup.open_letter") == [(1,)]
    assert run(reader, "select consumer, kind, letters from dedup.letter_group") == [("shop", "REJECTED", 1)]
    for statement in (
        "select * from dedup.open_letter",
        "select reason from dedup.letter_group",
        "select reserved from dedup.progress",
        "select dedup.is_reserved(1, gen_random_uuid())",
        "update dedup.checkpoint set sequence_number = 0",
        "delete from dedup.open_letter",
        "select dedup.rotate_reservations()",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            run(reader, statement)


def test_who_only_reads_calls_nothing_that_acts_with_the_rights_of_the_owner(place: LeastPlace) -> None:
    """Such a function changes tables that the role itself may not; asking whether a key is reserved is all that is granted of them."""
    owned = (
        "select proname from pg_proc where pronamespace = 'dedup'::regnamespace and prosecdef and has_function_privilege(oid, 'execute')"
    )
    assert {role: {name for (name,) in run(place.of(role), owned)} for role in ("read", "inspect")} == {
        "read": set(),
        "inspect": {"is_reserved"},
    }
    run(place.of("operate"), "select dedup.rotate_reservations()")
    assert not may(place.of("read"), "select dedup.close_reservations()")
    assert may(place.url, "select dedup.close_reservations()")


def test_the_role_that_inspects_reads_keys_and_texts_and_no_bodies(place: LeastPlace, dedup: Any) -> None:
    """It sees keys, reasons and error texts, and runs `dedup status` and `dedup metrics`; it sees no bodies, and changes nothing."""
    people_at_work(place)
    place.url = reader = place.of("inspect")
    told = shown(reader)
    for visible in ("KEY-EVENT", "KEY-SEQUENCE", "REASON-REJECTED", "REASON-EDIT", "REASON-ACTION", "ERROR-TEXT", "STACK"):
        assert visible in told, visible
    for hidden in ("BODY-OUT", "KEY-OUT", "HEADER", "amount"):
        assert hidden not in told, hidden
    assert dedup("status", place)[0] == 0 and dedup("metrics", place)[0] == 0
    for statement in ("select body from dedup.dead_letter", "select * from dedup.outbox_page", "update dedup.dead_letter set reason = ''"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            run(reader, statement)


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


@pytest.mark.full
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
