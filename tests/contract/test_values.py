"""Python values in rows: each is converted by itself to the sink's own type, with the same result on every store."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from dedup.pipeline.handlers import Event
from kit.foreach_kit import bare
from kit.orders import batch, letters, orders
from kit.paths import ROOT
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.value_sinks import create, read
from kit.value_table import COLUMNS, NULL, markdown, pairs


def there(place: Place) -> dict[str, Any]:
    """The columns that this store has, by name."""
    kind = "postgres" if isinstance(place, PostgresPlace) else "delta"
    return {name: getattr(column, kind) for name, column in COLUMNS.items() if getattr(column, kind) is not None}


def same(one: Any, other: Any, column: str) -> bool:
    """Whether these are one value, of one type; FLOAT keeps 32 bits."""
    if column == "single" and isinstance(one, float) and isinstance(other, float):
        one, other = float(np.float32(one)), float(np.float32(other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], column) for key in one)
    return type(one) is type(other) and (str(one) == str(other) or one == other)


def test_each_type_of_value_in_each_type_of_column(place: Place) -> None:
    """What is stored is what was given, and what would not be is that event's dead letter, which names column, value and type."""
    columns = there(place)
    create(place, "late", {"n": pa.int64() if isinstance(place, DeltaPlace) else "bigint"} | columns)
    given = [(column, *pair) for column in columns for pair in pairs(column)]
    made = bare(place.store(), budget=None)

    @made.foreach(into="late")
    def convert(event: Event, tx: Any) -> dict[str, Any]:
        column, _, value, _ = given[event.sequence_number]
        return {"n": event.sequence_number, column: value}

    made(batch(*orders(range(len(given)))), 0)
    stored = {row[0]: row[1:] for row in read(place, "late", ["n", *columns])}
    wrong = []
    for number, (column, name, _, fits) in enumerate(given):
        if fits != (number in stored):
            wrong.append(f"{column}: {name} is {'parked' if fits else 'stored'}")
        elif fits:
            kept, wanted = stored[number][list(columns).index(column)], (COLUMNS[column].stored | NULL)[name]
            if not same(kept, wanted, column):
                wrong.append(f"{column}: {name} is stored as {kept!r}, not {wanted!r}")
    assert not wrong, "\n".join(wrong)
    parked = letters(place.store())
    assert len(parked) == len(given) - len(stored)
    for letter in parked:
        column = given[letter["sequence_number"]][0]
        assert f"column '{column}" in letter["error_message"] or column == "json"  # text is JSON already, and the server judges it


def test_the_table_of_the_docs_is_what_the_stores_do() -> None:
    """docs/how-to/handlers.md has the table that the test above proves. To renew it: print(value_table.markdown())."""
    assert markdown() in (ROOT / "docs/how-to/handlers.md").read_text()
