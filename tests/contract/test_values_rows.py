"""Rows as handlers make them: what a row lacks, holds or shares with another one is its own, in handlers of events and of batches."""

from __future__ import annotations

from collections import namedtuple
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from checkpoint.errors import RowsRefused, SinkMismatch
from dedup import Consumer
from dedup.core.rows import PlainRows, copied, own_rows
from dedup.pipeline.handlers import Event
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.orders import batch, letters, orders
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.value_sinks import create, read

Point = namedtuple("Point", "x tags")


def sink(place: Place, keys: bool = False) -> None:
    """A sink with a key, a number and a text."""
    delta = isinstance(place, DeltaPlace)
    key: Any = pa.int64() if delta else "bigint primary key" if keys else "bigint"
    create(place, "late", {"n": key, "i": pa.int32() if delta else "integer", "s": pa.string() if delta else "text"})


def written(made: Consumer, rows: list[dict[str, Any]], **merge: Any) -> Consumer:
    """The consumer, whose handler of batches writes or merges these rows."""

    @made.foreach_batch
    def load(_: Any, tx: Any) -> None:
        tx.merge(rows, "late", **merge) if merge else tx.write(rows, "late")

    return made


def test_a_row_of_a_batch_that_lacks_a_column_changes_nothing_there(place: Place) -> None:
    """A merged row without a column leaves the sink's value, whatever columns its neighbours have; the last row of a key counts."""
    sink(place, keys=True)
    written(bare(place.store(), name="a"), [{"n": 1, "i": 1, "s": "kept"}, {"n": 2, "i": 2, "s": "kept"}], keys="n")(batch(*orders([0])), 0)
    rows = [{"n": 1, "i": 10}, {"n": 2, "s": "new"}, {"n": 1, "s": "last"}, {"n": 1, "i": 11}]
    written(bare(place.store(), name="b"), rows, keys="n")(batch(*orders([0])), 0)
    assert sorted(read(place, "late", ["n", "i", "s"])) == [(1, 11, "last"), (2, 2, "new")]


def test_letters_are_grouped_by_what_a_sink_refuses(place: Place) -> None:
    """Rows with one fault in one column are one group, whatever their values are, and those with another fault, or column, are another."""
    delta = isinstance(place, DeltaPlace)
    money: Any = pa.decimal128(10, 2) if delta else "numeric(10,2)"
    create(place, "late", {"price": money, "tax": money, "n": pa.int32() if delta else "integer"})
    amounts: list[dict[str, Any]] = [
        {"price": Decimal("1.234"), "tax": None, "n": None},
        {"price": Decimal("77.77777"), "tax": None, "n": None},
        {"price": None, "tax": Decimal("1.234"), "n": None},
        {"price": None, "tax": None, "n": "x" * 100},
        {"price": None, "tax": None, "n": "y's" * 200},
        {"price": Decimal(1), "tax": Decimal(1), "n": 1},
    ]
    made = bare(place.store())

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> Any:
        return amounts[event.sequence_number]

    assert made(batch(*orders(range(6))), 0).dead_lettered == 5
    groups = [letter["fingerprint"] for letter in sorted(letters(place.store()), key=lambda letter: letter["sequence_number"])]
    assert groups[0] == groups[1] and groups[3] == groups[4] and len(set(groups)) == 3


@pytest.mark.postgres
def test_letters_are_grouped_by_the_constraint_that_refuses(postgres: Any) -> None:
    """The server shows the row in its error: rows that one CHECK refuses are one group all the same, and another CHECK has its own."""
    place = PostgresPlace(postgres)
    place.execute("create table late (n bigint constraint small check (n < 5), s text constraint known check (s <> 'y'), t text)")
    made = bare(place.store())

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> Any:
        return {"n": event.sequence_number, "s": "y" if event.sequence_number == 1 else "x", "t": "abcdefgh"[event.sequence_number]}

    assert made(batch(*orders(range(8))), 0).dead_lettered == 4
    groups = {letter["sequence_number"]: letter["fingerprint"] for letter in letters(place.store())}
    assert groups[5] == groups[6] == groups[7] != groups[1]


@pytest.mark.parametrize("shape", of_which(2, ["nulls", "few columns", "arrow", "alone", "arrow alone"]))
def test_a_row_that_deletes_needs_its_key_alone(place: Place, shape: str) -> None:
    """As events of a change stream do: columns that are NOT NULL are null or missing there, beside rows that are written, and alone."""
    delta = isinstance(place, DeltaPlace)
    text = pa.field("s", pa.string(), nullable=False) if delta else "text not null"
    create(place, "late", {"n": pa.int64() if delta else "bigint primary key", "i": pa.int64() if delta else "bigint", "s": text})
    how: dict[str, Any] = {"keys": "n", "delete_when": "gone"}
    written(bare(place.store(), name="a"), [{"n": n, "i": n, "s": "x", "gone": False} for n in (1, 2, 3)], **how)(batch(*orders([0])), 0)
    gone = {"n": 1, "gone": True} if "few" in shape or "alone" in shape else {"n": 1, "i": None, "s": None, "gone": True}
    others = [] if "alone" in shape else [{"n": 2, "i": 20, "s": "y", "gone": False}, {"n": 4, "i": 4, "s": "z", "gone": None}]
    rows: Any = [others[0], gone, others[1]] if others else [gone]
    table = pa.Table.from_pylist([row | dict.fromkeys({"i", "s"} - row.keys()) for row in rows]) if others else pa.Table.from_pylist(rows)
    made = written(bare(place.store(), name="b"), table if "arrow" in shape else rows, **how)
    assert made(batch(*orders([0])), 0).processed == 1
    changed = [(2, 20, "y"), (3, 3, "x"), (4, 4, "z")] if others else [(2, 2, "x"), (3, 3, "x")]
    assert sorted(read(place, "late", ["n", "i", "s"])) == changed


def test_a_row_that_does_not_delete_needs_every_column(place: Place) -> None:
    """Of single events the one without a text is refused, not the one that deletes; and what no row has beside a deletion is named."""
    delta = isinstance(place, DeltaPlace)
    text = pa.field("s", pa.string(), nullable=False) if delta else "text not null"
    create(place, "late", {"n": pa.int64() if delta else "bigint primary key", "s": text})
    made = bare(place.store())

    @made.foreach
    def load(event: Event, tx: Any) -> None:
        tx.merge({"n": event.sequence_number, "s": None, "gone": event.sequence_number == 1}, "late", keys="n", delete_when="gone")

    report = made(batch(*orders(range(2))), 0)
    assert (report.processed, report.dead_lettered) == (1, 1) and read(place, "late", ["n"]) == []
    with pytest.raises(SinkMismatch, match="extra"):
        written(bare(place.store(), name="b"), [{"n": 1, "gone": True, "extra": 1}], keys="n", delete_when="gone")(batch(*orders([0])), 0)


@pytest.mark.postgres
def test_a_row_of_a_batch_that_lacks_a_column_has_its_default(postgres: Any) -> None:
    """A written row without a column gets the default of the table, as if it stood alone."""
    place = PostgresPlace(postgres)
    sink(place)
    place.execute("alter table late alter s set default 'default'")
    written(bare(place.store()), [{"n": 1, "s": "x"}, {"n": 2}])(batch(*orders([0])), 0)
    assert sorted(read(place, "late", ["n", "s"])) == [(1, "x"), (2, "default")]


def test_rows_of_a_batch_are_those_of_the_call(place: Place) -> None:
    """A handler of batches may use its list and its dicts again: what it has written stays as it was."""
    sink(place)
    made = bare(place.store())

    @made.foreach_batch
    def load(_: Any, tx: Any) -> None:
        row: dict[str, Any] = {"n": 1, "s": "first"}
        buffer = [row]
        tx.write(buffer, "late")
        row["s"] = "second"
        tx.write(row, "late")
        row.clear()
        buffer.clear()

    made(batch(*orders([0])), 0)
    assert sorted(read(place, "late", ["s"])) == [("first",), ("second",)]


@pytest.mark.parametrize("row", of_which(2, [{}, {1: 5, "n": 1}, [{}]]), ids=["empty", "name", "in a list"])
def test_a_row_without_columns_is_its_events_error(place: Place, row: Any) -> None:
    """A row without columns, or with a name that is no text, is never lost: its event is parked, and so is that of a batch."""
    sink(place)
    made = bare(place.store(), name="events", budget=None)

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> Any:
        return row if event.sequence_number == 1 else {"n": event.sequence_number}

    report = made(batch(*orders(range(3))), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    assert "olumn" in letters(place.store(), consumer="events")[0]["error_message"]
    whole = written(bare(place.store(), name="batches", budget=None), row if isinstance(row, list) else [row])
    assert whole(batch(*orders([0])), 0).dead_lettered == 1


def test_the_only_value_of_a_first_batch_may_be_bad(place: Place) -> None:
    """One bad value in a column that is NULL in all other rows is its event's fault; a batch of one event says that the column is wrong."""
    sink(place)
    made = bare(place.store())

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> Any:
        return {"n": event.sequence_number, "i": 2.5 if event.sequence_number == 1 else None}

    report = made(batch(*orders(range(3))), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    with pytest.raises(SinkMismatch, match="No row of the first batch"):
        written(bare(place.store(), name="other"), [{"n": 1, "i": 2.5}])(batch(*orders([0])), 0)


def test_misfits_of_some_rows_of_a_batch_are_not_the_columns(place: Place) -> None:
    """A column fits where rows with other columns have values in it: the batch is searched for its bad rows."""
    sink(place)
    rows = [{"n": 1, "i": 2.5}, {"n": 2, "i": 3.5}, {"n": 3, "i": 3, "s": "fits"}]
    assert written(bare(place.store(), budget=None), rows)(batch(*orders([0])), 0).dead_lettered == 1


def _holding_itself() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize("value", [_holding_itself(), {"a": (_holding_itself(),)}, Point(1, _holding_itself())])
def test_what_holds_itself_is_refused_with_its_column(value: Any) -> None:
    """Copying it ends with an error that names the column."""
    with pytest.raises(RowsRefused, match=r"'tags'.*holds itself"):
        own_rows([{"n": 1, "tags": value}])


def test_a_copy_reaches_all_that_can_change() -> None:
    """Tuples with names and arrays of objects are entered; a namedtuple stays one."""
    tags, array = ["a"], np.array([["a"], None], dtype=object)
    made = copied({"point": Point(1, tags), "array": array})
    tags.append("b")
    array[0].append("b")
    assert made["point"] == Point(1, ["a"]) and type(made["point"]) is Point
    assert made["array"][0] == ["a"]


def test_the_schema_of_rows_for_a_message_asks_no_container() -> None:
    """What holds itself has a type in a message, and the process goes on."""
    assert PlainRows([{"x": _holding_itself(), "n": 1}]).schema == pa.schema([("x", pa.string()), ("n", pa.int64())])


def test_a_row_that_comes_after_its_deletion_has_nothing_of_the_old_one(place: Place) -> None:
    """Within a batch as in two: the columns that it lacks are NULL."""
    sink(place, keys=True)
    written(bare(place.store(), name="a"), [{"n": n, "i": 1, "s": "old"} for n in (1, 2, 3)], keys="n")(batch(*orders([0])), 0)
    rows = [{"n": n, "i": i, "gone": gone} for n, i, gone in [(1, 2, True), (2, 2, False), (1, 3, False), (3, 3, True)]]
    written(bare(place.store(), name="b"), rows, keys="n", delete_when="gone")(batch(*orders([0])), 0)
    assert sorted(read(place, "late", ["n", "i", "s"])) == [(1, 3, None), (2, 2, "old")]
