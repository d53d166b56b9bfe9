"""Handlers of single events, on every store: rows, skips and failures of each event, in order."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.errors import HandlerError
from deadletter.selection import Selection
from dedup import Consumer
from dedup.core.store import Store
from dedup.pipeline.handlers import Event
from dedup.reprocessing.letters import reprocess
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


def test_a_handler_that_returns_no_row_is_told_so(place: Place) -> None:
    """A wrong kind of answer stops with a sentence and writes nothing."""
    made = consumer(place.store())
    made._handler = None
    made.foreach(into="orders")(lambda event, tx: 7)  # type: ignore[arg-type,return-value]
    with pytest.raises(HandlerError, match="it returned int"):
        made(batch(*orders([0])), 0)
    assert place.read() == []
