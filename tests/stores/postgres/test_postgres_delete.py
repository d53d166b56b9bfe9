"""What a deletion leaves in the tables of PostgreSQL, that it goes in portions, and that it waits for open transactions of the consumer."""

from __future__ import annotations

import datetime as dt
from typing import Any

import psycopg
import pytest

from checkpoint.errors import StillHeld
from dedup import DeadLetters, Selection
from dedup.postgres import deletion
from kit.orders import assert_proven, batch, consumer, event, orders
from kit.outgoing import publisher
from kit.people import ANN
from kit.pg_help import purge_all
from kit.pg_run import run
from kit.places import PostgresPlace

WHO = {"by": "ann", "reason": "replaced"}

SURE: dict[str, Any] = {**WHO, "although_running": True, "although_waiting": True}

NAMING = """
select c.relname::text, a.attname::text from pg_attribute a join pg_class c on c.oid = a.attrelid
where c.relnamespace = 'dedup'::regnamespace and c.relkind = 'r' and a.attname in ('consumer_id', 'consumer') and not a.attisdropped
"""
"""Columns that name a consumer, by its number or its name."""


@pytest.fixture
def place(postgres: str) -> PostgresPlace:
    """An empty place with the sink `orders`."""
    made = PostgresPlace(postgres)
    made.create_sink()
    return made


def used(place: PostgresPlace, name: str = "shop") -> None:
    """Rows, letters with a history, messages that wait, a decision of a person."""
    store: Any = place.store()
    made = publisher(store, name=name, sequence_key="data.id", budget=None)
    for number in range(3):
        made(batch(*orders(range(10 * number, 10 * number + 9)), event(10 * number + 9, f"secret-{number}", -1)), number)
    DeadLetters(store).discard(Selection(consumer=name, limit=1), **ANN)
    store.amend(name, lambda head: head, **WHO)
    store.close()


def rows_of(place: PostgresPlace, name: str) -> dict[str, int]:
    """Table -> how many rows name this consumer; letters' histories by their letters."""
    [(number,)] = place.execute(f"select id from dedup.consumer where name = '{name}'") or [(None,)]
    found = {}
    for table, column in run(place.url, NAMING):
        value = f"'{name}'" if column == "consumer" else str(number or 0)
        found[table] = place.execute(f"select count(*) from dedup.{table} where {column}::text = {value}::text")[0][0]
    return found


def test_no_row_names_a_deleted_consumer(place: PostgresPlace) -> None:
    """Of any table but the one that says who deleted it, in portions of two rows; those of another consumer are all there."""
    used(place)
    used(place, "other")
    [(number,)] = place.execute("select id from dedup.consumer where name = 'shop'")
    before = rows_of(place, "other")
    assert {table for table, count in before.items() if count} >= {"batch", "checkpoint", "dead_letter", "letter_count", "outbox_page"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deletion, "PORTION", 2)
        place.store().delete_consumer("shop", **SURE)  # type: ignore[attr-defined]
    assert rows_of(place, "other") == before
    for table, column in run(place.url, NAMING):
        value = "'shop'" if column == "consumer" else str(number)
        left = place.execute(f"select count(*) from dedup.{table} where {column}::text = {value}::text")
        assert left == [(1 if table == "consumer_deletion" else 0,)], table
    history = "select count(*) from dedup.letter_history h where not exists (select from dedup.dead_letter d where d.id = h.letter_id)"
    assert place.execute(history) == [(0,)]
    told = "select name, by, reason, ended_at >= decided_at from dedup.consumer_deletion"
    assert place.execute(told) == [("shop", "ann", "replaced", True)]
    assert_proven(place.store(), "other")


@pytest.mark.full
def test_reservations_stay_until_they_are_purged(place: PostgresPlace) -> None:
    """They count for nobody, `verify` knows of them, and the deleted consumer holds up no purge."""
    used(place)
    used(place, "other")
    keys = "select count(*) from dedup.reservation_key"
    before = place.execute(keys)
    place.store().delete_consumer("shop", **SURE)  # type: ignore[attr-defined]
    assert place.execute(keys) == before
    assert_proven(place.store(), "other")
    assert place.store().reserved("other") is None
    store: Any = place.store()
    store.rotate_reservations()
    assert [bound.consumer for bound in store.purge_bounds(dt.datetime.now(dt.UTC))] == ["other"]
    assert purge_all(store) == 1
    assert place.execute(keys) == [(0,)]


def test_a_transaction_of_the_consumer_that_is_open_is_waited_for(place: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that somebody has in hand are finished first; where that takes too long nothing is deleted, and the error says why."""
    monkeypatch.setattr(deletion, "PATIENCE", 0.2)
    used(place)
    store: Any = place.store()
    with store.begin_letters("shop"), pytest.raises(StillHeld, match="a transaction of it has been open for more than"):
        place.store().delete_consumer("shop", **WHO, although_waiting=True)  # type: ignore[attr-defined]
    assert place.store().consumers() == ["shop"]
    place.store().delete_consumer("shop", **WHO, although_waiting=True)  # type: ignore[attr-defined]
    assert place.store().consumers() == []


def test_the_steps_do_nothing_without_a_decision(place: PostgresPlace) -> None:
    """A function that deletes rows finds none to delete where nobody has decided that, and nobody decides it twice."""
    consumer(place.store())(batch(*orders(range(3))), 0)
    assert place.execute("select dedup.delete_portion(id, 10) from dedup.consumer") == [(None,)]
    with psycopg.connect(place.url) as connection, pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute("select dedup.begin_deletion(1, 'ann', ''), dedup.begin_deletion(1, 'bob', '')")
    assert_proven(place.store())
