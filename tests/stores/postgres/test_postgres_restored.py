"""Tables restored to an older time, all of them or some: what is refused, what `verify` names, and what cannot be told.

Each row of the table in docs/how-to/postgres.md (Restores and moves) has its test here.
"""

from __future__ import annotations

import io
import re
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint import changes
from checkpoint.errors import PublicationStuck, SinkMismatch, StoreRestored
from deadletter import policy
from deadletter.letter import Kind
from deadletter.selection import Selection
from deadletter.store import KEYS, Commit, Free
from dedup import DeadLetters
from dedup.verify import verify
from fixtures.variants import of_which
from kit import pg_server
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.paths import ROOT
from kit.pg_help import Copy, every_table, purge_all
from kit.pg_run import run
from kit.places import PostgresPlace


@pytest.fixture
def place(postgres: str) -> PostgresPlace:
    """With the sink `orders`."""
    made = PostgresPlace(postgres)
    made.create_sink()
    return made


def day(place: PostgresPlace, number: int, *, query: str | None = None) -> None:
    """Two orders that are new, one that fails, by a new process."""
    first = 3 * number
    consumer(place.store(), query=query)(batch(*orders([first, first + 1]), event(first + 2, f"bad-{number}", -1)), number)


def refused(place: PostgresPlace, told: str = "") -> None:
    """Nothing is decided, neither by the stream nor about letters, until a person says so."""
    before = place.read()
    with pytest.raises(StoreRestored, match=f"{told}.*accept-restore shop"):
        day(place, 3)
    with pytest.raises(StoreRestored), place.store().begin_letters("shop"):  # type: ignore[attr-defined]
        pass
    with pytest.raises(StoreRestored):
        DeadLetters(place.store()).export(Selection(), io.BytesIO(), "jsonl")
    DeadLetters(place.store()).groups(Selection())  # what is there can be read
    with pytest.raises(StoreRestored):
        place.store().amend("shop", changes.accept_gap, by="test", reason="a gap is not what is wrong")
    assert any("restored" in said for said in verify(place.store(), "shop").contradictions)
    assert place.read() == before
    place.store().amend("shop", changes.accept_restore, by="test", reason="known")
    (point,) = place.store().head("shop").checkpoints.values()
    for number in range((point.sequence_number + 1) // 3, 5):
        day(place, number)
    assert not any("restored" in said for said in verify(place.store(), "shop").contradictions)


def older(place: PostgresPlace, tables: Callable[[str], list[str]] | str) -> None:
    """Three days, of which these tables know the first."""
    day(place, 0)
    copy = Copy(place.url, [f"dedup.{tables}"] if isinstance(tables, str) else tables(place.url))
    for number in (1, 2):
        day(place, number)
    assert_proven(place.store())
    copy.load()


def test_a_schema_whose_data_was_restored_is_refused(place: PostgresPlace) -> None:
    """The state of yesterday beside the sinks of today: what was decided since would be done again."""
    older(place, every_table)
    refused(place, "progress")


REFUSED = {
    "batch": "batch.*lacks the record of decision 3",
    "reservation_000001": "reservation.*lacks a key",
    "progress": "progress",
}
"""Table that is restored alone, and what tells it."""


@pytest.mark.parametrize("table", of_which(2, REFUSED))
def test_a_table_that_was_restored_alone_is_refused(place: PostgresPlace, table: str) -> None:
    """It contradicts the others."""
    older(place, table)
    refused(place, REFUSED[table])


def test_a_row_of_the_consumer_from_before_a_takeover_is_refused(place: PostgresPlace) -> None:
    """Its epoch fences. However often a process starts, none gets one that was given already, not even once it is accepted."""
    older(place, "consumer")
    for _ in range(4):
        with pytest.raises(StoreRestored, match=r"of epoch 1 .*of epoch 3 "):
            day(place, 3)
    refused(place, "consumer")
    assert place.store().head("shop").epoch == 5


def test_a_list_of_reservations_from_before_a_rotation_is_refused(place: PostgresPlace) -> None:
    """Keys would go to a table that counts as closed, and a purge may drop it."""
    day(place, 0)
    copy = Copy(place.url, ["dedup.reservation_generation"])
    place.store().rotate_reservations()  # type: ignore[attr-defined]
    day(place, 1)
    copy.load()
    with pytest.raises(StoreRestored, match="lacks table 2"):
        day(place, 2)


def publishing(rows: pa.Table, tx: Any) -> None:
    """One message for each batch."""
    tx.publish([{"body": b"hello"}], "told")


def test_messages_whose_numbers_went_back_are_refused(place: PostgresPlace) -> None:
    """A dump of the outbox brings its counter back, too: later messages would get numbers that are given."""
    run_on = consumer(place.store(), query=None)
    run_on._handler = publishing
    for number in range(3):
        run_on(batch(*orders([number])), number)
    Copy(place.url, ["dedup.outbox_page"]).load()
    run(place.url, "select setval('dedup.outbox_page_page_seq', 1)")
    refused(place, "page 3 was numbered")


NAMED = {
    "checkpoint": "were seen above",
    "dead_letter": "batch records tell of 3 dead letters, there are 1",
    "letter_count": "letter_count says",
    "outbox_page": None,
    "letter_history": None,
    "letter_duplicate": None,
    "member": None,
    "partition_claim": None,
    "blocked_sequence": None,
    "heartbeat": None,
    "crash_marker": None,
}
"""Table that is restored alone without being refused, and what `verify` says of it."""


@pytest.mark.parametrize("table", of_which(1, NAMED))
def test_what_the_stream_goes_on_with_is_named_by_verify_or_by_nobody(place: PostgresPlace, table: str) -> None:
    """These decide nothing about an event, so the stream goes on, and no order is lost or doubled."""
    older(place, table)
    contradictions, told = verify(place.store(), "shop").contradictions, NAMED[table]
    assert bool(contradictions) == (told is not None), contradictions
    assert told is None or any(told in said for said in contradictions)
    day(place, 2)
    day(place, 3)
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(12) if n % 3 < 2)


@pytest.mark.parametrize("days", [pytest.param(1, marks=pytest.mark.full), 0], ids=["older", "lost"])
def test_what_an_older_checkpoint_does_not_know_is_a_redelivery(place: PostgresPlace, days: int) -> None:
    """Batch records know more than a table of checkpoints that was restored alone: what comes again was seen, whatever its key is."""
    place.store().migrate()  # type: ignore[attr-defined]
    for number in range(days):
        day(place, number)
    copy = Copy(place.url, ["dedup.checkpoint"])
    for number in range(days, 3):
        day(place, number)
    copy.load()
    consumer(place.store(), query=None)(batch(*orders([6, 7]), event(8, "bad-2", -1), *orders([9, 10])), 3)
    told = place.store().batches("shop").to_pylist()[-1]
    assert (told["redelivered"], told["duplicates"], told["processed"]) == (3, [], 2)
    assert_proven(place.store())


def test_a_letter_that_is_open_again_is_named(place: PostgresPlace) -> None:
    """Its history says that it was discarded: somebody restored the letters, and reprocessing it would do it again."""
    day(place, 0)
    copy = Copy(place.url, ["dedup.dead_letter", "dedup.letter_count"])
    (parked,) = letters(place.store())
    DeadLetters(place.store()).discard([parked["id"]], by="test", reason="no")
    assert_proven(place.store())
    copy.load()
    assert f"letter {parked['id']} is OPEN, but it is on record as DISCARDED" in verify(place.store(), "shop").contradictions


def test_a_list_of_topics_from_before_a_new_incarnation_is_refused(place: PostgresPlace) -> None:
    """Positions of the new life would be compared with those of the old one, and pass for decided."""
    day(place, 0)
    copy = Copy(place.url, ["dedup.topic"])
    place.store().amend("shop", lambda h: changes.accept_incarnation(h, "broker", "orders"), by="test", reason="created again")
    day(place, 0)
    copy.load()
    with pytest.raises(StoreRestored, match="`topic` has incarnation 0 of orders, a batch record is of incarnation 1"):
        day(place, 1)


@pytest.mark.full
def test_a_closed_table_of_reservations_is_counted_by_verify_only(place: PostgresPlace) -> None:
    """The stream looks for a key of the table that was written to last: an older one that lost keys is not told."""
    day(place, 0)
    copy = Copy(place.url, ["dedup.reservation_000001"])
    day(place, 1)
    place.store().rotate_reservations()  # type: ignore[attr-defined]
    day(place, 2)
    copy.load()
    day(place, 3)
    assert any("reservations are kept" in said for said in verify(place.store(), "shop").contradictions)


@pytest.mark.full
def test_messages_that_were_taken_back_without_their_numbers_are_not_told(place: PostgresPlace) -> None:
    """Nobody knows whether a page is gone because it was sent and purged, or because it was taken back."""
    place.store().migrate()  # type: ignore[attr-defined]
    copy = Copy(place.url, ["dedup.outbox_page"])
    run_on = consumer(place.store(), query=None)
    run_on._handler = publishing
    run_on(batch(*orders([0])), 0)
    copy.load()
    run_on(batch(*orders([1])), 1)
    assert run(place.url, "select count(*) from dedup.outbox_message") == [(1,)]
    assert_proven(place.store())


def test_the_manual_says_what_becomes_of_every_table(place: PostgresPlace) -> None:
    """Each table of the state is in the list of restores; those of publishers and event processors by their page."""
    place.store().migrate()  # type: ignore[attr-defined]
    text = (ROOT / "docs/how-to/postgres.md").read_text()
    listed = set(re.findall(r"`(\w+)`", text.split("<!-- restored -->")[1].split("\n\n")[0]))
    others = {"schema_version", "sink", "publish_destination", "published_id", "partition_owner", "processor_checkpoint"}
    tables = {name.removeprefix("dedup.") for name in every_table(place.url)}
    assert {t for t in tables if not t.startswith(("publisher", "reservation_0"))} - others <= listed


def dumped(place: PostgresPlace, tmp_path: Path, *options: str) -> Path:
    """What pg_dump writes."""
    file = tmp_path / "dump.sql"
    with file.open("wb") as out:
        subprocess.run([_program("pg_dump"), "-d", place.url, *options], stdout=out, check=True)
    return file


def _program(name: str) -> str:
    found = pg_server.binaries()
    if found is None or not (found / name).exists():
        pytest.skip(f"no {name} here")
    return str(found / name)


def load(dsn: str, file: Path) -> None:
    """What psql makes of it."""
    subprocess.run([_program("psql"), "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", str(file)], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.full
def test_a_schema_that_was_dropped_and_loaded_from_a_dump_is_refused(place: PostgresPlace, tmp_path: Path) -> None:
    """The usual restore: pg_dump of the schema, yesterday."""
    day(place, 0)
    dump = dumped(place, tmp_path, "-n", "dedup")
    day(place, 1)
    run(place.url, "drop schema dedup cascade")
    load(place.url, dump)
    refused(place, "progress")


@pytest.mark.full
def test_a_database_that_was_moved_by_a_dump_goes_on_once_that_is_accepted(
    place: PostgresPlace, postgres_server: str, tmp_path: Path
) -> None:
    """State and sinks of one moment: nothing tells the move from a restore, so a person does; then the same query goes on."""
    for number in (0, 1):
        day(place, number, query="q")
    name = f"moved_{uuid.uuid4().hex[:12]}"
    run(postgres_server, f"create database {name}")
    try:
        moved = PostgresPlace(make_conninfo(place.url, dbname=name))
        load(moved.url, dumped(place, tmp_path))
        with pytest.raises(StoreRestored, match="accept-restore shop"):
            day(moved, 2, query="q")
        for decision in (changes.accept_restore, changes.accept_gap):
            moved.store().amend("shop", decision, by="test", reason="moved")
        for number in (2, 3):
            day(moved, number, query="q")
        assert sorted(ids(moved.read())) == sorted(f"p0-{n}" for n in range(12) if n % 3 < 2)
        assert_proven(moved.store())
    finally:
        run(postgres_server, f"drop database {name} with (force)")


HARMLESS = [
    "vacuum full {0}",
    "vacuum freeze {0}",
    "cluster {0} using {1}",
    "alter table {0} set (fillfactor = 50)",
    "alter table {0} add column of_a_dba int default 7",
    "reindex table {0}",
    "analyze {0}",
    "lock table {0}",
    "select * from {0} for update",
]


def test_upkeep_is_no_restore(place: PostgresPlace) -> None:
    """Whatever a DBA does to the tables without changing a row, the stream goes on."""
    day(place, 0)
    for statement in HARMLESS:
        for table, index in (("progress", "progress_consumer_id"), ("consumer", "consumer_pkey"), ("checkpoint", "checkpoint_pkey")):
            with psycopg.connect(place.url, autocommit=not statement.startswith(("lock", "select"))) as connection:
                connection.execute(statement.format(f"dedup.{table}", f"{index}").encode())
    run(place.url, "vacuum full dedup.batch")
    run(place.url, "vacuum full dedup.reservation_000001")
    day(place, 1)
    assert_proven(place.store())


@pytest.mark.full
def test_what_people_and_the_clock_do_is_no_restore(place: PostgresPlace) -> None:
    """Rotation, a purge of everything, a quiet time after it, decisions of people, a letter whose key is free again."""
    day(place, 0)
    store = place.store()
    for _ in range(2):
        store.rotate_reservations()  # type: ignore[attr-defined]
    assert purge_all(store) == 2
    day(place, 1)
    for decision in (changes.accept_gap, changes.close_gap, lambda head: policy.lift_budget(head, 10, Kind.HANDLER_ERROR)):
        store.amend("shop", decision, by="test", reason="upkeep")
    day(place, 2)
    parked = letters(store)[-1]
    DeadLetters(store).discard([parked["id"]], by="test", reason="no", release_key=True)
    day(place, 3)
    store.amend("shop", changes.reset, by="test", reason="start over")
    day(place, 4)
    assert verify(store, "shop").contradictions == []


def test_a_key_that_is_free_again_is_looked_for_no_more(place: PostgresPlace) -> None:
    """A position that was processed can be replayed, fail, and become a letter whose key a person frees."""
    consumer(place.store(), query=None)(batch(*orders([0])), 0)
    [(key,)] = run(place.url, "select reserved from dedup.progress")
    assert key is not None
    with place.store().begin_letters("shop") as tx:  # type: ignore[attr-defined]
        tx.execute(Free(pa.table([pa.array([key.bytes], pa.binary(16)), pa.array([0], pa.int64())], schema=KEYS)))
        tx.execute(Commit())
    consumer(place.store(), query=None)(batch(*orders([1])), 1)


@pytest.mark.full
def test_a_migrated_row_is_told_from_its_first_decision_on(place: PostgresPlace) -> None:
    """Tables that an older version of the library has written carry no marks, and are taken as they are."""
    day(place, 0)
    run(
        place.url,
        "update dedup.progress set written_by = null, epoch = 0, recorded = null, reserved = null, reserved_in = null, page = null",
    )
    older_rows = Copy(place.url, every_table(place.url))
    older_rows.load()
    for number in (1, 2):
        day(place, number)
    Copy(place.url, ["dedup.progress"]).load()
    refused(place, "progress")


def test_a_sink_that_was_loaded_from_a_dump_is_refused_and_accepted(place: PostgresPlace, tmp_path: Path) -> None:
    """It is another table, and lacks the rows of today: nothing is written into it until a person says so."""
    day(place, 0)
    dump = dumped(place, tmp_path, "-t", "orders")
    day(place, 1)
    run(place.url, "drop table orders")
    load(place.url, dump)
    with pytest.raises(PublicationStuck, match=r"""sink accept shop '"public"\."orders"'"""):
        day(place, 2)
    place.accept_sink()
    day(place, 2)
    assert ids(place.read()) == ["p0-0", "p0-1", "p0-6", "p0-7"]  # those of day 1 a person has to bring back
    assert_proven(place.store())


@pytest.mark.full
def test_a_sink_whose_rows_were_taken_back_is_not_told(place: PostgresPlace) -> None:
    """The same table with the rows of yesterday: neither the stream nor `verify` reads sinks."""
    day(place, 0)
    copy = Copy(place.url, ["orders"])
    day(place, 1)
    copy.load()
    day(place, 2)
    assert ids(place.read()) == ["p0-0", "p0-1", "p0-6", "p0-7"]
    assert_proven(place.store())


def test_temporary_tables_and_those_of_the_handler_itself_are_no_other_sinks(place: PostgresPlace) -> None:
    """A handler may stage rows in a table of its own that it makes anew in each batch."""

    def staging(rows: pa.Table, tx: Any) -> None:
        tx.connection.execute("create temporary table staged (id text, amount bigint) on commit drop")
        tx.write(flatten(rows), "orders")

    run_on = consumer(place.store(), query=None)
    run_on._handler = staging
    for number in range(2):
        run_on(batch(*orders([number])), number)
    assert run(place.url, "select name from dedup.sink") == [("public.orders",)]


FLEETING = {
    "create unlogged table orders (id text not null, amount bigint)": "UNLOGGED.*SET LOGGED",
    "create table orders (id text not null, amount bigint) partition by list (id); create foreign data wrapper nowhere; "
    "create server far foreign data wrapper nowhere; "
    "create foreign table far partition of orders default server far": "far is a foreign table",
    "create table orders (id text not null, amount bigint) partition by list (id); "
    "create unlogged table orders_1 partition of orders default": "orders_1 is UNLOGGED",
    "create foreign data wrapper nowhere; create server far foreign data wrapper nowhere; "
    "create foreign table orders (id text, amount bigint) server far": "is a foreign table",
}


@pytest.mark.parametrize("made", of_which(2, FLEETING))
def test_a_sink_that_does_not_last_or_commit_with_the_decision_is_refused(place: PostgresPlace, made: str) -> None:
    """A crash empties an unlogged table, another server commits a foreign one by itself: both would break the promise in silence."""
    place.drop_sink()
    run(place.url, made)
    with pytest.raises(SinkMismatch, match=FLEETING[made]):
        day(place, 0)
    assert letters(place.store()) == []
