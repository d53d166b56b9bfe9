"""Rows of Spark that a handler of events gives are rows by the names of their fields, and so are those inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import Row

from dedup import Consumer, Takeover
from dedup.core.envelope import ENVELOPE
from dedup.core.messages import Chosen
from dedup.core.rows import own_rows
from dedup.delta import DeltaStore
from fixtures.variants import of_which

pytestmark = pytest.mark.delta

PLACE = pa.struct([("city", pa.string()), ("zip", pa.int32())])
SINK = pa.schema([("id", pa.int64()), ("place", PLACE), ("places", pa.list_(PLACE)), ("named", pa.map_(pa.string(), PLACE))])
BERN = Row(zip=3000, city="Bern")  # in another order than the sink
GIVEN = Row(named={"a": BERN}, places=[BERN, None], id=1, place=BERN)


def test_fields_are_taken_by_their_names() -> None:
    """At every depth: a Row is a tuple, and is not taken for a list of values."""
    bern = {"zip": 3000, "city": "Bern"}
    assert own_rows([{"r": GIVEN}]) == [{"r": {"named": {"a": bern}, "places": [bern, None], "id": 1, "place": bern}}]
    assert own_rows([{"r": Row("a", "b")}]) == [{"r": ("a", "b")}]  # one without names


@pytest.mark.parametrize("how", of_which(2, ["one", "nested in a dict", "list", "written"]))
def test_a_handler_of_events_gives_rows_of_spark(tmp_path: Path, how: str) -> None:
    """Returned, in a list, by tx.write and tx.publish, or as a value of a dict: the sink has the same row, and the message its parts."""
    DeltaTable.create(str(tmp_path / "orders"), SINK)
    store = DeltaStore(str(tmp_path / "state"), tables={"orders": str(tmp_path / "orders")})
    made = Consumer("shop", store, takeover=Takeover(after=1.0))

    @made.foreach(into="orders")
    def handle(event: Any, tx: Any) -> Any:
        tx.publish(Row(key="k", body="b"), "out", key="key")
        if how == "written":
            tx.write([GIVEN], "orders")
            return None
        return {"one": GIVEN, "list": [GIVEN], "nested in a dict": GIVEN.asDict()}[how]

    position = {"source": "broker", "topic": "orders", "partition": 0, "part": 0, "properties": [], "sequence_number": 0, "offset": "0"}
    assert made(pa.Table.from_pylist([{**position, "body": b"{}"}], ENVELOPE), 0).processed == 1
    bern = {"city": "Bern", "zip": 3000}
    (row,) = DeltaTable(str(tmp_path / "orders")).to_pyarrow_table().to_pylist()
    assert row == {"id": 1, "place": bern, "places": [bern, None], "named": [("a", bern)]}
    (entry,) = store.outbox("shop").entries(Chosen())
    assert entry.key == b"k"
