"""Databases that are not in UTF-8: what people and events bring does not stop the stream, and comes back as it was."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from checkpoint import changes
from deadletter.selection import Selection
from dedup.core.messages import Chosen
from dedup.postgres.charset import charset, unescape
from dedup.reprocessing.dead_letters import DeadLetters
from dedup.reprocessing.letters import reprocess
from kit.orders import assert_proven, batch, consumer, event, flatten, letters
from kit.pg_run import run
from kit.places import PostgresPlace

ENCODINGS = {"LATIN1": "iso8859-1", "WIN1252": "cp1252", "LATIN2": "iso8859-2", "EUC_JP": "ascii", "SQL_ASCII": None}

_LATIN1_AND_OTHERS = [pytest.param(name, marks=[pytest.mark.full] * (name != "LATIN1")) for name in ENCODINGS]

TEXT = "caf\u00e9 \u20ac \u6f22 \U0001f600 \\u20ac \\\\ \\"
"""In Latin 1, not in Latin 1, not in any encoding of one byte, beyond 16 bits, and what looks like an escape."""

HEADERS = [{"key": TEXT, "value": b"\xff"}, {"key": "plain", "value": None}, {"key": "\u00e9", "value": b""}]


@pytest.fixture
def place(postgres_server: str, request: pytest.FixtureRequest) -> Iterator[PostgresPlace]:
    """A database of this encoding with the sink `orders`."""
    name = f"dedup_{uuid.uuid4().hex[:12]}"
    run(postgres_server, f"create database {name} encoding '{request.param}' template template0 lc_collate 'C' lc_ctype 'C'")
    made = PostgresPlace(make_conninfo(postgres_server, dbname=name))
    made.create_sink()
    yield made
    run(postgres_server, f"drop database {name} with (force)")


def handle(rows: pa.Table, tx: Any) -> None:
    """Rejects what is negative, fails for what is zero, publishes and writes the rest."""
    flat = flatten(rows)
    amounts = flat["amount"].to_pylist()
    good = tx.reject(rows, pa.array([amount < 0 for amount in amounts]), f"negative: {TEXT}")
    if 0 in amounts:
        raise ValueError(f"nothing of {TEXT}")
    if good.num_rows:
        told = {"id": f"{TEXT} {flatten(good)['id'][0].as_py()}", "body": TEXT, "headers": HEADERS}
        tx.publish([told], f"to {TEXT}", id="id", headers="headers")
        tx.write(flatten(good), "orders")


def events(first: int) -> list[dict[str, Any]]:
    """One of each kind, with everything that is text."""
    more = {"source": f"broker {TEXT}", "topic": f"orders {TEXT}", "properties": HEADERS, "key": TEXT.encode()}
    made = [
        event(first, f"{TEXT} bad", -1),
        event(first + 1, f"{TEXT} zero", 0),
        event(first + 2, body=TEXT.encode()),
        event(first + 3, "ok"),
    ]
    return [{**one, **more, "offset": f"@{TEXT}"} for one in made]


TOLD = (
    "source",
    "topic",
    "offset",
    "event_key",
    "idempotence_key",
    "sequence_key",
    "body",
    "properties",
    "kind",
    "reason",
    "error_message",
)


@pytest.mark.postgres
@pytest.mark.parametrize("place", _LATIN1_AND_OTHERS, indirect=True)
def test_a_database_of_another_encoding_keeps_what_letters_and_messages_say(place: PostgresPlace) -> None:
    """Names, keys, headers, reasons, errors: none stops the stream, all come back as they were; keys and positions are known again."""
    store, name = place.store(), f"shop {TEXT}"
    shop = consumer(store, name=name, source=f"broker {TEXT}", sequence_key="data.id", query=f"q {TEXT}")
    shop._handler = handle
    assert shop(batch(*events(0)), 0).dead_lettered == 3
    assert shop(batch(*events(0)), 0).redelivered == 4
    assert shop(batch(*events(9)), 1).duplicates == 3, "the keys are known"
    rejected, failed, garbled, again = letters(place.store())
    for row in (rejected, failed, garbled):
        assert (row["source"], row["topic"], row["offset"]) == (f"broker {TEXT}", f"orders {TEXT}", f"@{TEXT}")
        assert (row["event_key"], row["properties"], row["consumer"]) == (TEXT.encode(), HEADERS, name)
    assert (rejected["idempotence_key"], rejected["sequence_key"]) == (f"{TEXT} bad", f"{TEXT} bad")
    assert rejected["reason"] == f"negative: {TEXT}" and failed["error_message"].endswith(f"nothing of {TEXT}")
    assert TEXT in failed["stack"] and garbled["body"] == again["body"] == TEXT.encode() and rejected["duplicates"] == 1
    (message,) = [store.outbox(name).message(e.number) for e in store.outbox(name).entries(Chosen())]
    assert message is not None and (message.topic, message.id) == (f"to {TEXT}", f"{TEXT} ok")
    assert list(message.headers) == [(h["key"], h["value"]) for h in HEADERS]
    assert store.consumers() == [name] and store.head(name).settings == shop.settings
    assert store.head(name).incarnations == {} and {p.topic for p in store.head(name).checkpoints} == {f"orders {TEXT}"}
    assert_proven(store, name)


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.parametrize("place", ["LATIN1", "SQL_ASCII"], indirect=True)
def test_people_find_and_change_letters_in_a_database_of_another_encoding(place: PostgresPlace) -> None:
    """By key, by text, by consumer; discarded, edited and reprocessed for reasons in any letters, which the history keeps."""
    store, name = place.store(), f"shop {TEXT}"
    shop = consumer(store, name=name, source=f"broker {TEXT}", query="q")
    shop._handler = handle
    shop(batch(*events(0)), 0)
    dead = DeadLetters(store)
    for found in (Selection(key=f"{TEXT} bad"), Selection(text="negative: caf\u00e9 \u20ac"), Selection(consumer=name, kind="REJECTED")):
        assert dead.select(found).num_rows == 1, found
    (bad,) = dead.select(Selection(kind="REJECTED"))["id"].to_pylist()
    (zero,) = dead.select(Selection(text="nothing of"))["id"].to_pylist()
    dead.discard(bad, reason=f"why {TEXT}", by=f"ann {TEXT}")
    dead.edit(zero, body=b'{"id": "fine", "amount": 7}', reason=TEXT, by=TEXT)
    (past,) = [row for row in store.history(bad).to_pylist() if row["action"] == "DISCARDED"]
    assert (past["reason"], past["by"]) == (f"why {TEXT}", f"ann {TEXT}")
    assert reprocess(Selection(ids=(zero,)), shop).reprocessed == 1
    assert run(make_conninfo(place.url, client_encoding="UTF8"), "select id from orders order by 1") == [("fine",), ("ok",)]
    store.amend(name, changes.accept_gap, by=TEXT, reason=TEXT)
    assert_proven(store, name)


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.parametrize("place", ["LATIN1"], indirect=True)
def test_a_row_that_the_database_cannot_hold_is_the_fault_of_its_event(place: PostgresPlace) -> None:
    """What a handler writes is never changed: the event is parked with the server's words, and the others go on."""
    run_ = consumer(place.store())
    assert run_(batch(event(0, "\u20ac"), event(1, "\u00e9"), event(2, "a")), 0).dead_lettered == 1
    (letter,) = letters(place.store())
    assert letter["idempotence_key"] == "\u20ac" and "LATIN1" in letter["error_message"]
    assert [row["id"] for row in place.read()] == ["a", "\u00e9"]
    assert place.execute("select idempotence_key from dedup.dead_letter") == [("\\u20ac",)], "which psql shows"
    assert_proven(place.store())


@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\\uU0\u20ac\u00e9\x80")),
    st.sampled_from([e for e in ENCODINGS if ENCODINGS[e]]),
)
def test_an_escape_loses_nothing(text: str, encoding: str) -> None:
    """Whatever the text looks like, it fits the encoding and comes back."""
    held = charset(encoding)
    assert held is not None
    kept = held.escape(text)
    kept.encode(str(ENCODINGS[encoding]))
    assert unescape(kept) == text and held.escaped(pa.array([text, None])).to_pylist() == [kept, None]
