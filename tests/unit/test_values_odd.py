"""Values that nobody expects: each is refused for its own row, with its column and types, or is kept as it is; none ends the process."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from checkpoint.errors import ValuesRefused
from dedup.core.rows import PlainRows, given_rows
from dedup.core.value_rules import Wrong, plainly
from dedup.core.values import convert, shown
from dedup.delta.sinks import target_of
from dedup.postgres import fit
from dedup.postgres.sinks import Sink, SinkColumns
from dedup.postgres.sinks import target_of as postgres_target


class _Raises(dt.tzinfo):
    def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta:
        raise RuntimeError("no such zone")


def _column(base: str, element: str | None = None) -> fit.Column:
    return fit.Column("c", base if element is None else f"{element}[]", base, "b", element, -1, False, False, False)


TARGETS = {
    "float": target_of(pa.field("c", pa.float32())),
    "int": target_of(pa.field("c", pa.int32())),
    "date": target_of(pa.field("c", pa.date32())),
    "ts": target_of(pa.field("c", pa.timestamp("us", "UTC"))),
    "decimal": target_of(pa.field("c", pa.decimal128(10, 2))),
    "numeric": postgres_target(_column("numeric")),
    "numeric[]": postgres_target(_column("_numeric", "numeric")),
    "interval": postgres_target(_column("interval")),
    "jsonb": postgres_target(_column("jsonb")),
    "list": target_of(pa.field("c", pa.list_(pa.int32()))),
    "struct": target_of(pa.field("c", pa.struct([("a", pa.int32())]))),
}

REFUSED: list[tuple[str, Any]] = [
    ("float", Decimal("sNaN")),
    ("float", 10**400),
    ("float", 10**5000),
    ("int", 10**5000),
    ("int", np.ma.masked),
    ("decimal", 10**5000),
    ("numeric", Decimal("sNaN")),
    ("interval", np.timedelta64(5, "Y")),
    ("interval", np.timedelta64(2**62, "W")),
    ("ts", np.timedelta64(5, "s")),
    ("date", pa.scalar(2**60, pa.timestamp("s"))),
    ("ts", pa.scalar(2**60, pa.timestamp("s"))),
    ("ts", dt.datetime(2024, 1, 1, tzinfo=_Raises())),
    ("list", 1),
    ("struct", {1: 5}),
]


@pytest.mark.parametrize(("kind", "value"), REFUSED, ids=[f"{kind} {number}" for number, (kind, _) in enumerate(REFUSED)])
def test_an_odd_value_is_its_rows_fault(kind: str, value: Any) -> None:
    """Whatever the conversion runs into: the row's message names the column, the value's type and the column's, and others are kept."""
    target = TARGETS[kind]
    array, faults = convert([None, value], target, "price")
    assert list(faults) == [1] and array.null_count == 2
    assert "'price'" in str(faults[1]) and type(value).__name__ in str(faults[1]) and target.shown in str(faults[1])


@pytest.mark.parametrize("unit", ["Y", "M", "W", "D", "h", "m", "s", "ms"])
@pytest.mark.parametrize("number", [2**62, 2**58 + 5, -(2**61)])
def test_a_moment_of_numpy_does_not_wrap(unit: str, number: int) -> None:
    """Years that Python has not are refused, and no other moment is made of them."""
    with pytest.raises(Wrong, match="out of range"):
        plainly(np.datetime64(number, unit))  # type: ignore[call-overload]


def test_moments_of_numpy_are_those_of_python() -> None:
    """Each unit stands for the date, the moment or the time that numpy shows."""
    assert plainly(np.datetime64("1969-07")) == dt.date(1969, 7, 1)
    assert plainly(np.datetime64("2024")) == dt.date(2024, 1, 1)
    assert plainly(np.datetime64("2024-05-06")) == dt.date(2024, 5, 6)
    assert plainly(np.datetime64("2024-05-06T07")) == dt.datetime(2024, 5, 6, 7)
    assert plainly(np.datetime64("1960-05-06T07:08:09.123456000")) == dt.datetime(1960, 5, 6, 7, 8, 9, 123456)
    assert plainly(np.timedelta64(-3, "h")) == dt.timedelta(hours=-3)
    assert plainly(np.datetime64("NaT")) is None and plainly(np.timedelta64("NaT")) is None


def _holding_itself() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": [found]}
    return found


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("value", [_holding_itself(), {"a": _holding_itself()}, _deep(100_000)], ids=["itself", "inside", "deep"])
def test_what_holds_itself_is_refused(kind: str, value: Any) -> None:
    """No column takes it, and no message about it ends the process."""
    _, faults = convert([value], TARGETS[kind], "price")
    assert list(faults) == [0] and "'price" in str(faults[0])


@pytest.mark.parametrize("zone", [dt.timezone(dt.timedelta(seconds=1, microseconds=500_000)), ZoneInfo("Europe/Berlin"), dt.UTC, None])
def test_an_offset_does_not_depend_on_the_neighbour(zone: dt.tzinfo | None) -> None:
    """A moment is the same alone and beside a date, also where its zone is off by a fraction of a second."""
    moment = dt.datetime(2024, 7, 1, 12, tzinfo=zone)
    wanted = moment if zone else moment.replace(tzinfo=dt.UTC)
    for values in ([moment], [moment, dt.date(2024, 1, 1)]):
        assert convert(values, TARGETS["ts"], "c")[0][0].as_py() == wanted


@pytest.mark.parametrize("lists", [[[1]], [[Decimal("1.50")], [Decimal("2.50"), None]], [[1], [Decimal("2.5")], None]])
def test_numbers_in_a_list_have_one_type(lists: list[Any]) -> None:
    """A list of numbers is stored whatever digits its numbers have."""
    array, faults = convert(lists, TARGETS["numeric[]"], "c")
    assert faults == {} and array.type == pa.list_(pa.field("element", pa.string()))


@pytest.mark.parametrize(("base", "advised"), [("jsonb", False), ("int2", True)])
def test_no_remedy_is_the_type_that_the_column_has(base: str, advised: bool) -> None:
    """A message advises no ALTER TABLE that would change nothing."""
    column = _column(base)
    with pytest.raises(ValuesRefused) as refused:
        given_rows(SinkColumns(Sink('"late"', (column,))), PlainRows([{"c": {"a": b"x"} if base == "jsonb" else 70_000}]))
    assert ("ALTER TABLE" in str(refused.value)) is advised


@pytest.mark.parametrize("value", [("password", "hunter2"), [("user", "bob"), ("api_key", b"hunter2")], {"password": ["hunter2"]}])
def test_a_message_about_a_value_shows_no_secret(value: Any) -> None:
    """Pairs, lists of pairs and dicts: what is named as a secret is hidden in the message about its row."""
    _, faults = convert([value], TARGETS["int"], "price")
    assert "hunter2" not in str(faults[0]) and "hunter2" not in shown(value) and "***" in shown(value)
