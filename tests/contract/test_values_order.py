"""Which merged row of a key is the newest, and what is one key: as the sink orders and compares its own values."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dedup.pipeline.handlers import Event
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.orders import batch, orders
from kit.places import DeltaPlace, PostgresPlace
from kit.value_sinks import create, read

NEWER: dict[str, tuple[str, Any, Any]] = {
    "numeric": ("numeric", 9, Decimal("10.5")),
    "text of a collation": ('text collate "und-x-icu"', "a", "B"),
    "numeric(50,2)": ("numeric(50,2)", 9, Decimal("10.5")),
    "oid": ("oid", 9, 10),
    "timetz": ("timetz", "12:00:00+05", "09:00:00+00"),
}
"""Column -> its type, an older value, a newer one that sorts before it as text."""


@pytest.mark.postgres
@pytest.mark.parametrize("name", of_which(2, NEWER))
def test_the_newest_row_is_the_servers(name: str, postgres: Any) -> None:
    """Values that travel as text are not compared as text: the row that stays is the one that the server calls greater."""
    kind, old, new = NEWER[name]
    place = PostgresPlace(postgres)
    create(place, "latest", {"id": "int primary key", "what": "text", "v": kind})
    made = bare(place.store())
    rows = [{"id": 1, "what": "new", "v": new}, {"id": 1, "what": "old", "v": old}, {"id": 2, "what": "none", "v": None}]

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        tx.merge(rows[event.sequence_number], "latest", keys="id", newer_by="v")

    assert made(batch(*orders(range(3))), 0).processed == 3
    assert sorted(read(place, "latest", ["id", "what"])) == [(1, "new"), (2, "none")]


@pytest.mark.postgres
def test_texts_of_one_number_are_one_key(postgres: Any) -> None:
    """1 and 1.0 are one key of a numeric column: the last row counts."""
    place = PostgresPlace(postgres)
    create(place, "latest", {"id": "numeric primary key", "what": "text"})
    made = bare(place.store())
    keys = [Decimal("1.0"), 1, Decimal("2.50")]

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        tx.merge({"id": keys[event.sequence_number], "what": str(event.sequence_number)}, "latest", keys="id")

    assert made(batch(*orders(range(3))), 0).processed == 3
    assert sorted(read(place, "latest", ["what"])) == [("1",), ("2",)]


def test_negative_zero_is_zero_as_a_key(place: Any) -> None:
    """0.0 and -0.0 name one row of the sink, in one batch and in two."""
    delta = isinstance(place, DeltaPlace)
    create(place, "latest", {"id": pa.float64(), "n": pa.int64()} if delta else {"id": "double precision primary key", "n": "bigint"})
    made = bare(place.store())

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        tx.merge({"id": -0.0 if event.sequence_number % 2 else 0.0, "n": event.sequence_number}, "latest", keys="id")

    made(batch(*orders([0, 1])), 0)
    assert read(place, "latest", ["id", "n"]) == [(0.0, 1)]
    made(batch(*orders([2, 3])), 1)
    assert read(place, "latest", ["id", "n"]) == [(0.0, 3)]
