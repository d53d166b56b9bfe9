"""Rows with structs, arrays and maps go into a Delta table as they are, also where a part is NOT NULL and its parent is null."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from deadletter.selection import Selection
from dedup import Consumer, Takeover, decode
from dedup.core.envelope import ENVELOPE
from dedup.delta import DeltaStore
from fixtures.variants import of_which

pytestmark = pytest.mark.delta

PLACE = pa.struct([pa.field("city", pa.string(), nullable=False), pa.field("zip", pa.int32())])
DEEP = pa.struct([pa.field("place", PLACE), pa.field("note", pa.string())])
CUSTOMERS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("home", PLACE, nullable=False),
        pa.field("deep", DEEP),
        pa.field("others", pa.list_(pa.field("element", PLACE))),
        pa.field("named", pa.map_(pa.string(), pa.field("value", PLACE))),
    ]
)
BERN: dict[str, Any] = {"city": "Bern", "zip": 3000}
LONDON: dict[str, Any] = {"city": "London", "zip": None}
PLAIN: dict[str, Any] = {"home": BERN, "deep": {"place": LONDON, "note": "x"}, "others": None, "named": None}
GOOD: list[dict[str, Any]] = [
    PLAIN,
    {**PLAIN, "others": [BERN, None, LONDON], "named": [("a", BERN), ("b", None)]},
    {**PLAIN, "others": [], "named": []},
    {**PLAIN, "others": [None], "named": [("a", None)]},
]
NO_CITY = {"city": None, "zip": 1}
BAD = {
    "home": {"home": None},
    "home.city": {"home": NO_CITY},
    "deep.place.city": {"deep": None},
    "deep.place": {"deep": {"place": None, "note": "x"}},
    "deep.place.city ": {"deep": {"place": NO_CITY, "note": None}},
    "others.element.city": {"others": [BERN, NO_CITY]},
    "named.value.city": {"named": [("a", NO_CITY)]},
}
"""What the reason names -> columns with a null too many."""


def as_python(row: dict[str, Any]) -> dict[str, Any]:
    """A map as a dict, as a handler would give it."""
    return {**row, "named": row["named"] and dict(row["named"])}


def consumer(place: Path, *, typed: bool, merged: bool = False) -> Consumer:
    """Event n becomes the row that its body holds, with `id` n."""
    if not (place / "customers").exists():
        DeltaTable.create(str(place / "customers"), CUSTOMERS)
    store = DeltaStore(str(place / "state"), tables={"customers": str(place / "customers")})
    made = Consumer("shop", store, decode=decode.json(pa.schema([("row", pa.string())])), takeover=Takeover(after=1.0))

    def put(rows: Any, tx: Any) -> None:
        tx.merge(rows, "customers", keys=["id"]) if merged else tx.write(rows, "customers")

    def whole(events: pa.Table, tx: Any) -> None:
        rows = [as_python(json.loads(data["row"])) for data in events["data"].to_pylist()]
        ids = events["sequence_number"].to_pylist()
        put(
            pa.Table.from_pylist(
                [{"id": i, **row, "named": row["named"] and list(row["named"].items())} for i, row in zip(ids, rows, strict=True)],
                _loosely(CUSTOMERS),
            ),
            tx,
        )

    def each(event: Any, tx: Any) -> None:
        put([{"id": event.sequence_number, **as_python(json.loads(event.data["row"]))}], tx)

    if typed:
        made.foreach_batch(whole)
    else:
        made.foreach()(each)
    return made


def _loosely(schema: pa.Schema) -> pa.Schema:
    """What a decoder or a DataFrame gives: no part is NOT NULL, and fields stand in another order."""
    place = pa.struct([("zip", pa.int16()), ("city", pa.string())])
    deep = pa.struct([("note", pa.string()), ("place", place)])
    kinds = [pa.int64(), place, deep, pa.large_list(place), pa.map_(pa.string(), place)]
    return pa.schema(list(zip(schema.names, kinds, strict=True)))


def batch(rows: Sequence[Any]) -> pa.Table:
    """One event for each row, from position 0."""
    position = {"source": "broker", "topic": "orders", "partition": 0, "part": 0, "properties": []}
    bodies = [json.dumps({"row": json.dumps(row)}).encode() for row in rows]
    return pa.Table.from_pylist([{**position, "sequence_number": i, "offset": str(i), "body": b} for i, b in enumerate(bodies)], ENVELOPE)


def shown(place: Path) -> list[dict[str, Any]]:
    """The rows of the sink, in order, without their ids."""
    rows = DeltaTable(str(place / "customers")).to_pyarrow_table().sort_by("id").to_pylist()
    return [{name: value for name, value in row.items() if name != "id"} for row in rows]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("typed", of_which(1, [True, False]))
def test_a_null_item_may_have_parts_that_are_not_null(tmp_path: Path, typed: bool, merged: bool) -> None:
    """A struct in an array or a map may be null although a part of it is NOT NULL, and readers find it so."""
    report = consumer(tmp_path, typed=typed, merged=merged)(batch(GOOD), 0)
    assert report.processed == len(GOOD)
    assert shown(tmp_path) == GOOD


@pytest.mark.parametrize("typed", of_which(1, [False, True]))
def test_a_null_that_delta_forbids_parks_its_event(tmp_path: Path, typed: bool) -> None:
    """It is that event's error, which names the place in the column; a null struct is one in its parts, as Spark takes it."""
    rows = [GOOD[1], *({**PLAIN, **bad} for bad in BAD.values()), GOOD[0]]
    consumer(tmp_path, typed=typed)(batch(rows), 0)
    assert shown(tmp_path) == [GOOD[1], GOOD[0]]
    letters = DeltaStore(str(tmp_path / "state")).letters(Selection()).sort_by("sequence_number")
    assert [path for path, reason in zip(BAD, letters["reason"].to_pylist(), strict=True) if path.strip() not in reason] == []
