"""Values of columns that are no objects of Python: which event has one, and in which field."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from dedup.pipeline.handlers import UTC, Event, _beyond_python, events_of

TOO_LATE = 253_402_318_799_000_000
"""Microseconds, in the year 10000."""

DAY = 2**31 - 1
"""Days, in the year 5881580."""

AT = pa.struct([("n", pa.int32()), ("at", UTC)])


def made(name: str, kind: pa.DataType, values: list[Any]) -> list[Event]:
    """Events with this column."""
    return list(events_of(pa.table({"sequence_number": pa.array(range(len(values))), name: pa.array(values, kind)})))


def struct(name: str, kind: pa.DataType) -> pa.DataType:
    """Of one field, beside another one."""
    return pa.struct([("id", pa.string()), (name, kind)])


ODD: dict[str, tuple[pa.DataType, Any, Any, str]] = {
    "time": (struct("until", UTC), {"until": TOO_LATE}, {"until": 0}, "event.data.until is a time outside"),
    "time without zone": (struct("until", pa.timestamp("us")), {"until": TOO_LATE}, {"until": 0}, "event.data.until is a time outside"),
    "day": (struct("day", pa.date32()), {"day": DAY}, {"day": 1}, "event.data.day is a time outside"),
    "in a struct": (struct("s", AT), {"s": {"at": TOO_LATE}}, {"s": {"at": 0}}, "event.data.s.at is a time outside"),
    "in a list": (struct("l", pa.list_(AT)), {"l": [{"at": 0}, {"at": TOO_LATE}]}, {"l": []}, "event.data.l[].at is a time outside"),
    "in a map": (struct("m", pa.map_(pa.string(), UTC)), {"m": [("k", TOO_LATE)]}, {"m": []}, "event.data.m.* is a time outside"),
    "another value": (struct("d", pa.duration("s")), {"d": 2**61}, {"d": 1}, "event.data.d is a value of type duration[s]"),
}


@pytest.mark.parametrize(("kind", "odd", "fine", "said"), ODD.values(), ids=ODD)
def test_the_event_and_the_field_are_named(kind: pa.DataType, odd: Any, fine: Any, said: str) -> None:
    """Whoever reads the letter knows which field it is; all other events are objects as always, also those without the field."""
    found = made("data", kind, [fine, odd, None, fine, odd])
    messages = [_beyond_python(one) for one in found]
    assert [one is not None for one in messages] == [False, True, False, False, True]
    assert str(messages[1]) == str(messages[4]) and str(messages[1]).startswith(said)
    assert found[0].data == made("data", kind, [fine])[0].data == found[3].data and found[2].data is None


def test_a_column_of_the_input_is_named_as_the_handler_has_it() -> None:
    """The input's other columns are in `event.others`, and so is what is wrong with them."""
    found = made("expires", UTC, [0, TOO_LATE])
    assert _beyond_python(found[0]) is None and found[0].others == {"expires": dt.datetime.fromtimestamp(0, dt.UTC)}
    assert str(_beyond_python(found[1])).startswith("event.others.expires is a time outside the years 1 to 9999")


def test_the_first_and_the_last_time_of_python_are_no_fault() -> None:
    """The limits themselves are objects."""
    ends = [dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)]
    assert [one.data["at"] for one in made("data", AT, [{"at": end} for end in ends])] == ends
