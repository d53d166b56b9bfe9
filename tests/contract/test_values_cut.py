"""What becomes of a Python value does not depend on its neighbours, on where a batch is cut, or on who runs the handler."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.errors import SinkMismatch
from dedup import Consumer
from dedup.core.store import Store
from dedup.pipeline.handlers import Event
from kit.foreach_kit import bare
from kit.local_tasks import Tasks, run_in
from kit.orders import batch, event, letters, orders
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.value_sinks import create, read

EAST = dt.timezone(dt.timedelta(hours=2))
DELTA = {
    "n": pa.int64(),
    "run": pa.string(),
    "d": pa.float64(),
    "i": pa.int16(),
    "p": pa.decimal128(10, 2),
    "t": pa.timestamp("us", tz="UTC"),
}
DELTA |= {"b": pa.binary(), "s": pa.string(), "l": pa.list_(pa.int32())}
POSTGRES = {"n": "bigint", "run": "text", "d": "double precision", "i": "smallint", "p": "numeric(10,2)", "t": "timestamptz"}
POSTGRES |= {"b": "bytea", "s": "text", "l": "integer[]"}
FITTING = {"d": 1, "i": 1, "p": 1, "t": dt.date(2024, 1, 1), "b": b"x", "s": "x", "l": [1]}
MIXED: list[Any] = [1, 2.5, 2.0, 40_000, True, None, Decimal("1.50"), Decimal("1.005"), "x", b"x", [1], (2, None), [2.5], {"a": 1}]
MIXED += [dt.date(2024, 5, 6), dt.datetime(2024, 5, 6, 7, 8), dt.datetime(2024, 5, 6, 7, 8, tzinfo=EAST), float("inf")]
NUMBERS = count()


def sink(place: Place, name: str = "late") -> list[str]:
    """A sink with a column of each of these types; their names."""
    create(place, name, POSTGRES if isinstance(place, PostgresPlace) else DELTA)
    return list(DELTA)


def writing(made: Consumer, given: list[dict[str, Any]], into: str = "late") -> Consumer:
    """The consumer, which returns for the nth event the nth of these rows."""

    @made.foreach(into=into)
    def book(event: Event, tx: Any) -> dict[str, Any]:
        return {"n": event.sequence_number, **given[event.sequence_number]}

    return made


def run(store: Store, given: list[dict[str, Any]], cuts: list[int], name: str) -> None:
    """The rows by handlers of single events, in batches that end at these numbers."""
    made = writing(bare(store, name=name, budget=None), [{"run": name, **row} for row in given])
    for number, (first, last) in enumerate(pairwise([0, *cuts, len(given)])):
        if first < last:
            made(batch(*orders(range(first, last))), number)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(sorted(FITTING)), st.sampled_from(MIXED)), min_size=2, max_size=12), st.data())
def fates_by_cut(place: Place, given: list[tuple[str, Any]], data: st.DataObject) -> None:
    """One example."""
    rows = [dict(FITTING), *({column: value} for column, value in given)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1))))
    names = [f"whole {next(NUMBERS)}", f"cut {next(NUMBERS)}"]
    for name, ends in zip(names, ([], cuts), strict=True):
        run(place.store(), rows, ends, name)
    found: dict[str, Any] = {name: [] for name in names}
    for row in read(place, "late", list(DELTA)):
        if row[1] in found:
            found[row[1]].append(repr((row[0], *row[2:])))
    told = {name: [(x["sequence_number"], x["error_message"]) for x in letters(place.store(), consumer=name)] for name in names}
    assert sorted(found[names[0]]) == sorted(found[names[1]])
    assert told[names[0]] == told[names[1]]
    assert len(found[names[0]]) + len(told[names[0]]) == len(rows)


@pytest.mark.full
@pytest.mark.fast_on("delta")
def test_where_a_batch_is_cut_changes_nothing(place: Place) -> None:
    """Any rows, cut anywhere: the same rows are stored, and the same events are parked with the same words."""
    sink(place)
    fates_by_cut(place)


def test_a_neighbour_changes_no_value(place: Place) -> None:
    """A date beside a datetime, a naive one beside an aware one, an int beside a float: each is what it is alone."""
    columns = sink(place)
    values = [
        ("t", dt.date(2024, 5, 6)),
        ("t", dt.datetime(2024, 5, 6, 7)),
        ("t", dt.datetime(2024, 5, 6, 7, tzinfo=EAST)),
        ("d", 1),
        ("d", 2.5),
    ]
    made = writing(bare(place.store()), [{"run": "", column: value} for column, value in values])
    assert made(batch(*orders(range(len(values)))), 0).processed == len(values)
    stored = sorted(read(place, "late", ["n", "t", "d"]), key=lambda row: row[0])
    moments = [dt.datetime(2024, 5, 6, hour, tzinfo=dt.UTC) for hour in (0, 7, 5)]
    assert stored == [(0, moments[0], None), (1, moments[1], None), (2, moments[2], None), (3, None, 1.0), (4, None, 2.5)]
    assert len(columns) == len(DELTA)


def test_a_neighbour_of_another_type_is_parked_alone(place: Place) -> None:
    """Text beside bytes in a column of bytes: the text is that event's error, by name, and the bytes are stored."""
    sink(place)
    made = writing(bare(place.store()), [{"b": b"ok"}, {"b": "text"}, {"b": b"too"}])
    report = made(batch(*orders(range(3))), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    (letter,) = letters(place.store())
    assert letter["sequence_number"] == 1
    assert re.search(r"column 'b' is (BINARY|bytea), and 'text' \(str\)", letter["error_message"])


def test_a_column_that_fits_no_row_of_the_first_batch_is_the_sinks_mismatch(place: Place) -> None:
    """Nothing is parked: the error names column, value, type and what to run. Later such a value is its event's fault, in any process."""
    sink(place)
    rows: list[dict[str, Any]] = [{"i": 70_000}, {"i": 80_000}, {"i": 1}, {"i": 90_000}]
    with pytest.raises(SinkMismatch, match=r"(?is)column 'i' is smallint, and 70000 \(int\).*ALTER TABLE"):
        writing(bare(place.store()), rows)(batch(*orders(range(2))), 0)
    assert letters(place.store()) == [] and read(place, "late", ["n"]) == []
    assert writing(bare(place.store()), rows)(batch(*orders([0, 1, 2])), 0).dead_lettered == 2
    assert writing(bare(place.store()), rows)(batch(*orders([3])), 1).dead_lettered == 1, "a stream goes on behind its poison event"


def test_rows_that_all_stop_fitting_are_the_sinks_mismatch_and_no_budget(place: Place) -> None:
    """More misfits than the budget allows: the error is about the column, and nothing of the batch is parked."""
    sink(place)
    rows: list[dict[str, Any]] = [{"i": 1}] * 4
    made = writing(bare(place.store()), rows)
    assert made(batch(*orders(range(4))), 0).processed == 4
    wrong = writing(bare(place.store()), [{"i": 2.5}] * 300)
    with pytest.raises(SinkMismatch, match=r"(?s)column 'i' is .*2.5 \(float\).*no whole number.*ALTER TABLE.*than the budget allows"):
        wrong(batch(*orders(range(4, 254))), 1)
    assert letters(place.store()) == []


def test_a_handler_of_batches_is_searched_for_the_rows_that_do_not_fit(place: Place) -> None:
    """Dicts of many events at once: the values are found by halving, and the other events are written."""
    sink(place)
    made = bare(place.store())

    @made.foreach_batch
    def load(rows: Any, tx: Any) -> None:
        numbers = (
            rows["sequence_number"].to_pylist()
            if isinstance(rows, pa.Table)
            else [row[0] for row in rows.select("sequence_number").collect()]
        )
        tx.write([{"n": n, "run": "", "d": 2**60 + 1 if n == 5 else n} for n in numbers], "late")

    report = made(batch(*orders(range(8))), 0)
    assert (report.processed, report.dead_lettered) == (7, 1)
    assert [letter["sequence_number"] for letter in letters(place.store())] == [5]
    assert str(2**60 + 1) in letters(place.store())[0]["error_message"]


def test_merged_rows_are_compared_as_the_sink_has_them(place: Place) -> None:
    """The newest row of a key is chosen by converted values: a date is its midnight, whatever stands beside it."""
    create(place, "latest", _merged(place))
    made = bare(place.store())
    values = [dt.datetime(2024, 5, 6, 7), dt.date(2024, 5, 6), dt.date(2024, 5, 5)]

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        row = {"id": "a", "at": values[event.sequence_number], "amount": event.sequence_number}
        tx.merge(row, "latest", keys="id", newer_by="at")

    made(batch(*orders(range(3))), 0)
    assert read(place, "latest", ["id", "at", "amount"]) == [("a", dt.datetime(2024, 5, 6, 7, tzinfo=dt.UTC), 0)]


def test_a_merged_row_that_does_not_fit_is_parked(place: Place) -> None:
    """What holds for rows that are appended holds for rows that are merged, and for those that delete."""
    create(place, "latest", _merged(place))
    made = bare(place.store())
    rows = [
        {"id": "a", "amount": 1},
        {"id": "b", "amount": 2.5},
        {"id": 3, "amount": 3},
        {"id": "d", "amount": 4, "gone": 1},
        {"id": "a", "gone": True},
    ]

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        gone = {"gone": False, "amount": 0} | rows[event.sequence_number]
        tx.merge(gone, "latest", keys="id", delete_when="gone")

    report = made(batch(*orders(range(5))), 0)
    assert (report.processed, report.dead_lettered) == (2, 3)
    assert [letter["sequence_number"] for letter in letters(place.store())] == [1, 2, 3]
    assert read(place, "latest", ["id", "amount"]) == []


def _merged(place: Place) -> dict[str, Any]:
    if isinstance(place, PostgresPlace):
        return {"id": "text primary key", "at": "timestamptz", "amount": "integer"}
    return {"id": pa.string(), "at": pa.timestamp("us", tz="UTC"), "amount": pa.int32()}


@pytest.mark.parametrize("tasks", [None, Tasks], ids=["driver", "tasks"])
@pytest.mark.parametrize(
    "store",
    [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("delta", marks=[pytest.mark.delta, pytest.mark.full])],
)
def test_the_same_rows_and_letters_on_the_driver_and_in_tasks(
    store: str, tasks: Callable[[pa.Table], Tasks] | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Returned rows, rows that the handler writes and rows that it merges: what does not fit is known by its event in both."""
    place = PostgresPlace(request.getfixturevalue("postgres")) if store == "postgres" else DeltaPlace(tmp_path)
    sink(place)
    sink(place, "audit")
    create(place, "latest", _merged(place))
    made = bare(place.store())

    @made.foreach(into="late")
    def book(event: Event, tx: Any) -> Any:
        n, what = event.sequence_number, event.data["amount"]
        tx.write({"n": n, "i": 1.5 if what == 1 else 2.0}, "audit")
        tx.merge({"id": f"k{n}", "amount": "many" if what == 2 else n}, "latest", keys="id")
        return [{"n": n, "l": [n]}, {"n": n, "l": [2**40 if what == 3 else n]}]

    events = batch(*(event(n, f"e{n}", n) for n in range(6)))
    report = run_in(None if tasks is None else tasks(events), made, events)
    assert (report.processed, report.dead_lettered) == (3, 3)
    assert [letter["sequence_number"] for letter in letters(place.store())] == [1, 2, 3]
    assert sorted(read(place, "audit", ["n", "i"])) == [(0, 2), (4, 2), (5, 2)]
    assert sorted(read(place, "latest", ["id", "amount"])) == [("k0", 0), ("k4", 4), ("k5", 5)]
    assert sorted(read(place, "late", ["n", "l"])) == [(n, [n]) for n in (0, 0, 4, 4, 5, 5)]
