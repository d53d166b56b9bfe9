"""Consumers of one schema kept apart: a login writes only rows of consumers that are assigned to it (`dedup migrate --separate`)."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint.errors import HandlerError, StoreError
from checkpoint.postgres.sql import roles_sql, separate_sql
from dedup import DeadLetters, PostgresStore, Selection
from dedup.reprocessing.letters import reprocess
from fixtures.variants import of_which
from kit.least import LeastPlace, logging_in
from kit.orders import assert_proven, batch, consumer, event, letters, orders
from kit.outgoing import Receiver, dispatcher, publisher, states
from kit.people import ALL, ANN, failing, fixed
from kit.pg_run import run

pytestmark = pytest.mark.xdist_group("roles")  # which all databases of a server share

NOT_APART = {
    "reservation",
    "partition_owner",
    "processor_checkpoint",
    "publish_destination",
    "publisher",
    "publisher_lane",
    "publisher_event",
    "published_id",
}
"""Tables that a runtime role writes and that say of no row whose consumer it is. The manual names them: keep both alike."""


@pytest.fixture
def postgres(empty_postgres: str) -> str:
    """A database in which nothing was migrated."""
    return empty_postgres


@pytest.fixture(scope="module")
def logins(postgres_server: str) -> Iterator[None]:
    """Users that log in, and one more that runs another consumer: by a role of its team."""
    with logging_in(postgres_server):
        run(postgres_server, "drop role if exists he_other, he_team")
        run(postgres_server, "create role he_team; create role he_other login in role dedup_run, he_team")
        yield
        run(postgres_server, "drop role he_other, he_team")


class ApartPlace(LeastPlace):
    """A place whose login runs "shop"; that of `other` runs "other"."""

    @property
    def other(self) -> str:
        """The DSN of the login that runs the consumer "other"."""
        return make_conninfo(self.super, user="he_other")

    def assign(self, role: str, consumer: str) -> None:
        """Let a role write rows of a consumer."""
        run(self.super, "insert into dedup.consumer_writer (role, consumer) values (%s, %s)", (role, consumer))


@pytest.fixture
def place(postgres: str, logins: None) -> ApartPlace:
    """Both scripts were run, and again; two consumers are assigned."""
    made = ApartPlace.made(postgres)
    for script in (separate_sql, roles_sql, separate_sql):
        run(postgres, script("dedup"))
    made.assign("he_app", "shop")
    made.assign("he_team", "other")
    return made


def test_each_login_runs_its_own_consumer(place: ApartPlace) -> None:
    """Batches, letters, edits, reprocess, messages and decisions of two consumers go on beside each other, each under its login."""
    for url, name in ((place.url, "shop"), (place.other, "other")):
        store = PostgresStore(url)
        failing(store, name=name)
        found = DeadLetters(store)
        _, second, third = (row["id"] for row in letters(store, consumer=name))
        found.discard(third, **ANN)
        found.edit(second, body=b'{"id": "c", "amount": 2}', **ANN)
        assert reprocess(Selection(consumer=name), fixed(store, name=name)).failed == 0
        store.amend(name, lambda head: head, by="ann", reason="a test")
        assert_proven(store, name)


def test_messages_leave_under_the_login_of_their_consumer(place: ApartPlace) -> None:
    """A dispatcher marks, unpacks and deletes rows of its own consumer."""
    publisher(place.store())(batch(*orders(range(12))), 0)
    receiver = Receiver()
    assert dispatcher(place, receiver, limit=5).once().sent == 12
    assert states(place) == {"SENT": 12}


def test_who_operates_consumers_works_on_all_of_them(place: ApartPlace) -> None:
    """Upkeep, decisions and deletions need no assignment; a migration and a superuser need none either."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    consumer(PostgresStore(place.other), name="other")(batch(*orders(range(3))), 0)
    operator = PostgresStore(place.of("operate"))
    operator.rotate_reservations()
    operator.upkeep(dt.timedelta(days=0), although_behind=["shop", "other"])
    for name in ("shop", "other"):
        assert_proven(operator, name)
        operator.delete_consumer(name, by="ann", reason="a test", although_running=True)
    assert operator.consumers() == []
    assert PostgresStore(make_conninfo(place.of("owner"), options="-c role=dedup_owner")).migrate() == []


LIBRARY: dict[str, Callable[[PostgresStore], object]] = {
    "a batch": lambda store: consumer(store)(batch(event(9, "i")), 1),
    "a decision": lambda store: store.amend("shop", lambda head: head, by="ann", reason="a test"),
    "a discard": lambda store: DeadLetters(store).discard(ALL, **ANN),
    "reprocess": lambda store: reprocess(ALL, fixed(store)),
    "a message": lambda store: publisher(store)(batch(event(9, "i")), 1),
}


@pytest.mark.parametrize("what", of_which(1, LIBRARY))
def test_another_login_is_refused_with_what_to_run(place: ApartPlace, what: str) -> None:
    """The error names the consumer, the login and the statement that would assign it; the consumer goes on as if nobody had tried."""
    run_shop = failing(place.store())
    before = snapshot(place)
    with pytest.raises(
        StoreError, match=r"consumer shop in table \w+: it is not assigned to role he_other.*consumer_writer.*'he_other', 'shop'"
    ):
        LIBRARY[what](PostgresStore(place.other))
    assert snapshot(place) == before
    run_shop(batch(event(4, "j")), 1)
    assert_proven(place.store())


@pytest.mark.full
def test_a_command_of_another_login_is_refused(place: ApartPlace, dedup: Any) -> None:
    """The exit code and the sentence of a refusal."""
    failing(place.store())
    url, place.url = place.url, place.other
    code, _, err = dedup("consumer reset shop --reason x --by ann --yes", place)
    assert (code, "not assigned to role he_other" in err, "consumer_writer" in err) == (3, True, True)
    place.url = url
    assert_proven(place.store())


@pytest.mark.full
def test_a_handler_cannot_write_for_another_consumer(place: ApartPlace) -> None:
    """Its own SQL is refused, the batch is undone, and no event is blamed for it."""
    failing(place.store())
    made = consumer(PostgresStore(place.other), name="other")
    made._handler = None
    made.foreach_batch(lambda rows, tx: tx.connection.execute("update dedup.checkpoint set sequence_number = 0") and None)
    with pytest.raises((psycopg.errors.InsufficientPrivilege, StoreError, HandlerError), match="not assigned to role he_other"):
        made(batch(*orders(range(2))), 0)
    assert_proven(place.store())
    assert run(place.super, "select count(*) from dedup.dead_letter where consumer = 'other'") == [(0,)]


def snapshot(place: LeastPlace) -> list[list[tuple[Any, ...]]]:
    """The rows of all tables that say whose they are, but signs of life."""
    return [run(place.super, f"select t::text from dedup.{table} t order by 1") for table in columns_of(place) if table != "heartbeat"]


def columns_of(place: LeastPlace) -> dict[str, str]:
    """Table that is kept apart -> the column that says whose a row is."""
    found = "select tgrelid::regclass::text, encode(tgargs, 'escape') from pg_trigger where tgname = 'own_updated' order by 1"
    return {table.removeprefix("dedup."): told.removesuffix("\\000") for table, told in run(place.super, found)}


SHOP = "from dedup.consumer where name = 'shop'"
INSERTS = [
    "insert into dedup.consumer (name) values ('third')",
    f"insert into dedup.checkpoint (consumer_id, topic_id, partition, sequence_number) select id, 1, 99, 5 {SHOP}",
    f"insert into dedup.topic (consumer_id, source, topic) select id, 's', 't' {SHOP}",
    f"insert into dedup.crash_marker (consumer_id, scope, at) select id, 'x', now() {SHOP}",
    f"insert into dedup.sink select id, 'x', 0, 1 {SHOP}",
    f"insert into dedup.outbox (consumer_id, topic, id, lane) select id, 't', 'i', 1 {SHOP}",
    "insert into dedup.outbox (consumer_id, topic, id, lane) values (99, 't', 'i', 1)",
    "insert into dedup.letter_history (letter_id, at, action, reserved) select id, now(), 'EDITED', 0 from dedup.dead_letter",
    "insert into dedup.letter_history (letter_id, at, action, reserved) values ('of nobody', now(), 'EDITED', 0)",
    "insert into dedup.letter_duplicate select id, 1 from dedup.dead_letter",
    "insert into dedup.blocked_sequence values (gen_random_uuid(), 'shop', 'x', 'REJECTED')",
    f"insert into dedup.consumer_action (consumer_id, by, reason, before, after) select id, '', '', '{{}}', '{{}}' {SHOP}",
    "insert into dedup.consumer_writer values ('he_other', 'shop')",
    "update dedup.consumer set name = 'mine' where name = 'shop'",
    "update dedup.consumer set name = 'third' where name = 'other'",
    "update dedup.dead_letter set consumer = 'other'",
    "update dedup.crash_marker set consumer_id = (select id from dedup.consumer where name = 'other'), scope = consumer_id::text",
    "update dedup.checkpoint set consumer_id = (select id from dedup.consumer where name = 'shop'), partition = 77",
    "create or replace function dedup.refuse_other_consumers() returns trigger language plpgsql as 'begin return null; end'",
    "alter table dedup.checkpoint disable trigger own_updated",
    "set session_replication_role = replica",
    "set session authorization he_app",
]


def test_no_sql_of_another_login_changes_a_row(place: ApartPlace) -> None:
    """Every table that says whose its rows are refuses inserts, updates and deletes of another consumer's rows, under any role."""
    failing(place.store())
    consumer(PostgresStore(place.other), name="other")(batch(*orders(range(2))), 0)
    before = snapshot(place)
    changes = [f"update dedup.{table} set {column} = {column}" for table, column in columns_of(place).items() if table != "consumer"]
    deletes = [f"delete from dedup.{table}" for table in columns_of(place)]
    filled = {table for table in columns_of(place) if run(place.super, f"select 1 from dedup.{table} limit 1")}
    assert {"progress", "heartbeat", "topic", "checkpoint", "batch", "dead_letter", "sink"} <= filled
    for statement in [s for s in (*changes, *deletes) if any(f"dedup.{table}" in s for table in filled)] + INSERTS:
        for role in ("", "set role dedup_run;"):
            with pytest.raises(psycopg.Error) as refused:
                run(place.other, role + statement)
            assert isinstance(refused.value, psycopg.errors.InsufficientPrivilege), (statement, refused.value)
    assert snapshot(place) == before


def copy_in(dsn: str, consumer: str) -> None:
    """Copy a row of this consumer."""
    with psycopg.connect(dsn) as connection, connection.cursor().copy("copy dedup.blocked_sequence from stdin") as copy:
        copy.write_row((str(uuid.uuid4()), consumer, "x", "REJECTED"))


def test_rows_that_are_copied_are_looked_at(place: ApartPlace) -> None:
    """COPY, with which letters and messages are written, is refused as any INSERT is."""
    failing(place.store())
    copy_in(place.other, "other")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="consumer shop in table blocked_sequence"):
        copy_in(place.other, "shop")
    assert run(place.super, "select consumer from dedup.blocked_sequence") == [("other",)]


def test_each_table_is_kept_apart_or_named_as_not(place: ApartPlace) -> None:
    """A table of a later migration that a runtime role can write is kept apart, or the manual says that it is not."""
    writable = run(
        place.super,
        "select c.relname from pg_class c where c.relnamespace = 'dedup'::regnamespace and c.relkind in ('r', 'p') "
        "and c.relname !~ '_[0-9]{6}$' and has_table_privilege('dedup_run', c.oid, 'insert, update, delete')",
    )
    assert {name for (name,) in writable} - NOT_APART <= columns_of(place).keys()
    assert not NOT_APART & columns_of(place).keys()


def test_a_replay_may_leave_its_row_and_nobody_may_change_it(place: ApartPlace) -> None:
    """The history of a replay is of no letter, and names no consumer: any login appends such a row."""
    place.store().consumers()
    run(place.other, "insert into dedup.letter_history (letter_id, at, action, reserved) values ('replay a 1-2', now(), 'REPLAYED', 0)")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="a row of no consumer"):
        run(place.other, "update dedup.letter_history set reserved = 9")


@pytest.mark.full
def test_reservations_are_not_kept_apart(place: ApartPlace) -> None:
    """What the manual says is not separated: any login that runs consumers can reserve any key."""
    consumer(place.store())(batch(*orders(range(2))), 0)
    run(place.other, "insert into dedup.reservation_000001 values (gen_random_uuid(), 1)")


def test_the_script_fits_any_schema_and_can_be_taken_back(postgres: str, logins: None, dedup: Any, monkeypatch: Any) -> None:
    """`dedup migrate --separate` needs no store; another schema's name is quoted everywhere; what it says of taking it back is true."""
    code, out, _ = dedup("migrate --separate")
    assert (code, out.strip()) == (0, separate_sql("dedup").strip())
    name = 'S\'"; drop schema "x'
    monkeypatch.setenv("DEDUP_SCHEMA", name)
    assert dedup("migrate --separate")[1].strip() == separate_sql(name).strip()
    run(postgres, roles_sql(name))
    PostgresStore(make_conninfo(postgres), schema=name).migrate()
    run(postgres, roles_sql(name))
    run(postgres, separate_sql(name))
    run(postgres, "create table orders (id text, amount bigint); grant all on orders to dedup_run")
    store = PostgresStore(make_conninfo(postgres, user="he_app"), schema=name)
    with pytest.raises(StoreError, match="Let the owner run: insert into") as refused:
        consumer(store)(batch(*orders(range(2))), 0)
    told = str(refused.value)
    run(postgres, told[told.index("insert into") : told.index(";", told.index("values")) + 1])
    consumer(store)(batch(*orders(range(2))), 0)
    undo = next(line for line in separate_sql(name).splitlines() if line.startswith("--     drop function"))
    run(postgres, undo.removeprefix("--"))
    assert run(postgres, "select count(*) from pg_trigger where tgname like 'own_%'") == [(0,)]
