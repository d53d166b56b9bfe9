"""Handlers of single events, on every store: rows, skips and failures of each event, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import HandlerError
from deadletter.selection import Selection
from dedup import Consumer, decode
from dedup.core.store import Store
from dedup.pipeline.handlers import Event
from dedup.reprocessing.letters import reprocess
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders
from kit.places import Place


def each(store: Store, bad: set[str], seen: list[int] | None = None, **settings: Any) -> Consumer:
    """Writes each order; skips amount 0; raises for bad ids."""
    made = consumer(store, **settings)
    made._handler = None

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if seen is not None:
            seen.append(event.sequence_number)
        if event.data["id"] in bad:
            raise ValueError(f"cannot book {event.data['id']}")
        return {"id": event.data["id"], "amount": event.data["amount"]} if event.data["amount"] else None

    return made


def each_async(store: Store, bad: set[str], seen: list[int] | None = None, **settings: Any) -> Consumer:
    """As `each`, several events at once."""
    made = consumer(store, **settings)
    made._handler = None

    @made.foreach(into="orders")
    async def book(event: Event, tx: Any) -> Any:
        if seen is not None:
            seen.append(event.sequence_number)
        return {"id": event.data["id"], "amount": event.data["amount"]}

    return made


def test_each_event_has_an_outcome_of_its_own(place: Place) -> None:
    """Rows are written, None is skipped, what raises is parked, found in one more run and not by halving; all of it adds up."""
    seen: list[int] = []
    report = each(place.store(), {"p0-3", "p0-17"}, seen)(batch(*orders(range(20))), 0)
    assert (report.processed, report.skipped, report.dead_lettered) == (17, 1, 2)
    assert seen == [*range(20), *(n for n in range(20) if n not in (3, 17))]
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-3", "p0-17"]
    assert len(place.read()) == 17
    assert_proven(place.store())


def test_reprocessed_events_come_one_by_one(place: Place) -> None:
    """The fixed handler gets each letter's event, with its data, and writes it."""
    each(place.store(), {"p0-1", "p0-2"})(batch(*orders(range(1, 5))), 0)
    seen: list[int] = []
    assert reprocess(Selection(), each(place.store(), set(), seen)).reprocessed == 2
    assert seen == [1, 2] and sorted(ids(place.read())) == ["p0-1", "p0-2", "p0-3", "p0-4"]
    assert_proven(place.store())


def test_order_is_kept_for_single_events(place: Place) -> None:
    """What follows a failed event in its sequence waits, although the handler had taken it in the same pass."""
    events = [event(0, "a1", 1), event(1, "b1", 2), event(2, "a2", 1)]
    report = each(place.store(), {"a1"}, sequence_key="data.amount")(batch(*events), 0)
    assert (report.processed, report.dead_lettered) == (1, 2)
    assert [(x["idempotence_key"], x["status"]) for x in letters(place.store())] == [("a1", "OPEN"), ("a2", "BLOCKED")]
    assert ids(place.read()) == ["b1"]


UNTIL = decode.json(pa.schema([("id", pa.string()), ("amount", pa.int64()), ("until", pa.timestamp("us", "UTC"))]))


@pytest.mark.parametrize(("kind", "bisect"), of_which(1, [(each, True), (each_async, False)]), ids=["one by one", "coroutines"])
def test_a_time_that_python_cannot_hold_fails_its_event_alone(place: Place, kind: Callable[..., Consumer], bisect: bool) -> None:
    """An unset or endless time is no fault of its neighbours: the event becomes a letter that names the field, without any search."""
    odd = {3: "0001-01-01T00:00:00+01:00", 17: "9999-12-31T23:59:59-05:00"}
    texts = {n: json.dumps({"id": f"{n}", "amount": 1, "until": odd.get(n, "2026-01-31T14:00:00Z")}) for n in range(20)}
    seen: list[int] = []
    run = kind(place.store(), set(), seen, decode=UNTIL, bisect=bisect)
    report = run(batch(*(event(n, body=text.encode()) for n, text in texts.items())), 0)
    assert (report.processed, report.dead_lettered) == (18, 2)
    assert sorted(seen) == sorted(2 * [n for n in range(20) if n not in odd])
    parked = letters(place.store())
    assert [(x["kind"], x["sequence_number"]) for x in parked] == [("HANDLER_ERROR", 3), ("HANDLER_ERROR", 17)]
    assert {x["error_message"].partition(",")[0] for x in parked} == {"event.data.until is a time outside the years 1 to 9999"}
    assert reprocess(Selection(), kind(place.store(), set(), decode=UNTIL)).failed == 2
    good = consumer(place.store(), decode=UNTIL)
    assert reprocess(Selection(), good).reprocessed == 2 and len(place.read()) == 20
    assert_proven(place.store())


def test_a_handler_that_returns_no_row_is_told_so(place: Place) -> None:
    """A wrong kind of answer stops with a sentence and writes nothing."""
    made = consumer(place.store())
    made._handler = None
    made.foreach(into="orders")(lambda event, tx: 7)  # type: ignore[arg-type,return-value]
    with pytest.raises(HandlerError, match="it returned int"):
        made(batch(*orders([0])), 0)
    assert place.read() == []
