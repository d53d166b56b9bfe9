"""What becomes of the Python values of a message does not depend on the messages beside it, and is the same on both stores."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from checkpoint.errors import RowsRefused
from dedup.core.envelope import POSITION
from dedup.core.messages import Chosen
from dedup.core.rows import PlainRows
from dedup.outbox.recording import Names, arrow_of, of_event, rows_of
from kit.orders import batch, consumer, event, letters
from kit.places import Place

DAY, MOMENT = dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 5)
REFUSED = object()


def headers(key: Any, value: Any, **other: Any) -> list[dict[str, Any]]:
    """One header."""
    return [{"key": key, "value": value, **other}]


VALUES: dict[str, list[tuple[Any, Any]]] = {
    "id": [
        *(("a", "a"), (1, "1"), (-1, "-1"), (2**63, str(2**63)), (UUID(int=1), str(UUID(int=1)))),
        *((odd, REFUSED) for odd in (True, 2.5, b"x", Decimal(1), DAY, MOMENT)),
    ],
    "body": [
        ("a", b"a"),
        (b"\xff", b"\xff"),
        (bytearray(b"q"), b"q"),
        (None, None),
        *((odd, REFUSED) for odd in (1, 1.5, DAY, MOMENT, {})),
    ],
    "key": [("a", b"a"), (b"\xff", b"\xff"), (None, None), (1, REFUSED), (1.5, REFUSED), (DAY, REFUSED)],
    "headers": [
        *((None, None), ([], []), (headers("a", b"x"), headers("a", b"x")), (headers("a", "x"), headers("a", b"x"))),
        *((headers("a", None), headers("a", None)), ([{"key": "a"}], headers("a", None)), (headers(b"a", b"x"), headers("a", b"x"))),
        *((headers("a", odd), REFUSED) for odd in (1, 1.5, DAY, MOMENT)),
        *((odd, REFUSED) for odd in (headers(None, b"x"), [{"value": b"x"}], headers("a", b"x", more=1), {"a": b"x"}, [("a", b"x")], "a")),
    ],
}
"""Part of a message -> values that a handler may give for it, and what is sent."""

NAMES = Names("key", "id", "body", "headers", None)
PLAIN = {"key": b"k", "id": "i", "body": b"b", "headers": None}


def made(values: list[Any], part: str, *, by_event: bool) -> list[Any]:
    """The part of messages with these values, all in one run. Raises RowsRefused."""
    rows = [{**PLAIN, part: value} for value in values]
    if not by_event:
        found = arrow_of(PlainRows(rows), NAMES)[part]
    else:
        position = dict.fromkeys(POSITION, 0)
        found = rows_of([one for row in rows for one in of_event(row, NAMES, position, 0)])[f"_{part}"]
    return [value.as_py() for value in found]


@pytest.mark.parametrize("by_event", [True, False])
@pytest.mark.parametrize("part", VALUES)
def test_no_message_changes_the_one_beside_it(part: str, by_event: bool) -> None:
    """Each value is converted by itself: to the same beside every other one, or refused with its column whatever stands beside it."""
    for (one, first), (other, second) in itertools.permutations(VALUES[part], 2):
        if first is REFUSED or second is REFUSED:
            with pytest.raises(RowsRefused, match=f"column '{part}'"):
                made([one, other], part, by_event=by_event)
        else:
            assert made([one, other], part, by_event=by_event) == [first, second]


@pytest.mark.parametrize("each", [True, False])
def test_odd_values_of_messages_park_their_own_events(place: Place, each: bool) -> None:
    """The store has the messages of the others as they were given, and the letter names the column."""
    given = [{"body": "text", "id": 1}, {"body": b"\xff", "id": "one"}, {"body": MOMENT, "id": "two"}, {"body": b"", "id": UUID(int=1)}]
    run = consumer(place.store())
    run._handler = None
    if each:
        run.foreach()(lambda event, tx: tx.publish(given[event.sequence_number], "out", id="id"))
    else:
        run.foreach_batch(lambda rows, tx: tx.publish([given[n] for n in rows["sequence_number"].to_pylist()], "out", id="id"))
    report = run(batch(*(event(n, f"{n}") for n in range(4))), 0)
    outbox = place.store().outbox("shop")
    found = [outbox.message(entry.number) for entry in outbox.entries(Chosen())]
    assert [(m.id, m.body) for m in found if m] == [("1", b"text"), ("one", b"\xff"), (str(UUID(int=1)), b"")]
    assert report.dead_lettered == 1
    (letter,) = letters(place.store())
    assert letter["sequence_number"] == 2 and "column 'body'" in letter["reason"]


def test_columns_of_no_message_are_not_read() -> None:
    """What a message does not name may have any values."""
    rows = PlainRows([{**PLAIN, "note": DAY}, {**PLAIN, "note": b"x"}])
    assert arrow_of(rows, NAMES)["note"].type == pa.null()
