"""Other kinds of per-event handlers, on every store: coroutines, and Arrow tables."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import ConfigError, HandlerError
from dedup import Consumer
from dedup.core.store import Store
from dedup.outbox import Call, Dispatcher, Message
from dedup.pipeline.handlers import Event
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.places import Place


def bare(store: Store, **settings: Any) -> Consumer:
    """A consumer without a handler."""
    made = consumer(store, **settings)
    made._handler = None
    return made


def row(event: Event) -> dict[str, Any]:
    """What the sink gets of an order."""
    return {"id": event.data["id"], "amount": event.data["amount"]}


def test_coroutines_are_in_hand_together_and_their_rows_in_order(place: Place) -> None:
    """As many events as allowed wait at once, never more; those that end later are still written in the order of their positions."""
    made, busy, most, written = bare(place.store()), 0, 0, []

    @made.foreach(concurrency=4)
    async def book(event: Event, tx: Any) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.02 if event.sequence_number % 2 else 0.001)
        busy -= 1
        written.append(event.sequence_number)
        tx.publish({"body": event.data["id"], "key": "one"}, "out", key="key")

    report = made(batch(*orders(range(12))), 0)
    assert (report.processed, report.skipped, most) == (12, 0, 4) and written != sorted(written)
    sent: list[Message] = []
    Dispatcher(place.store().outbox("shop"), Call(sent.extend)).once()
    assert [(m.body or b"").decode() for m in sent] == [f"p0-{n}" for n in range(12)]


@pytest.mark.fast_on("postgres")
def test_coroutines_of_one_sequence_come_one_after_the_other(place: Place) -> None:
    """No event begins before the one before it in its sequence has ended; behind a failed one none begins, and it waits as a letter."""
    made, begun = bare(place.store(), sequence_key="data.amount"), []
    in_hand: set[int] = set()
    overlaps: list[int] = []

    @made.foreach(into="orders")
    async def book(event: Event, tx: Any) -> dict[str, Any]:
        begun.append(event.data["id"])
        overlaps.extend(in_hand & {event.data["amount"]})
        in_hand.add(event.data["amount"])
        await asyncio.sleep(0.01 - event.sequence_number / 1000)
        in_hand.discard(event.data["amount"])
        if event.data["id"] == "b1":
            raise ValueError("no")
        return row(event)

    events = [event(0, "a1", 1), event(1, "b1", 2), event(2, "a2", 1), event(3, "b2", 2), event(4, "a3", 1)]
    report = made(batch(*events), 0)
    assert not overlaps and "b2" not in begun
    assert (report.processed, report.dead_lettered) == (3, 2)
    assert [(x["idempotence_key"], x["status"]) for x in letters(place.store())] == [("b1", "OPEN"), ("b2", "BLOCKED")]
    assert_proven(place.store())


def test_failures_of_coroutines_are_parked_alone(place: Place) -> None:
    """An exception, a row that is none, and a sys.exit each concern their own event, or stop with a sentence."""
    made = bare(place.store())

    @made.foreach(into="orders")
    async def book(event: Event, tx: Any) -> Any:
        if event.data["id"] == "p0-3":
            raise ValueError("no")
        if event.data["id"] == "p0-5":
            sys.exit(3)
        return row(event)

    report = made(batch(*orders(range(1, 9))), 0)
    assert (report.processed, report.dead_lettered) == (6, 2)
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-3", "p0-5"]


@pytest.mark.full
@pytest.mark.parametrize("awaited", [True, False])
def test_sys_exit_in_a_task_that_a_coroutine_has_started_stops_nobody(place: Place, awaited: bool) -> None:
    """It ends the loop for a moment. Where the handler awaits the task it is that event's failure; the other events pass."""
    made = bare(place.store())

    async def leave() -> None:
        sys.exit(3)

    @made.foreach(into="orders", concurrency=2)
    async def book(event: Event, tx: Any) -> Any:
        if event.data["id"] == "p0-3":
            child = asyncio.create_task(leave())
            if awaited:
                await asyncio.gather(child)
            left.append(child)
        await asyncio.sleep(0.01)
        return row(event)

    left: list[asyncio.Task[None]] = []
    report = made(batch(*orders(range(1, 9))), 0)
    assert (report.processed, report.dead_lettered) == ((7, 1) if awaited else (8, 0))
    assert all(isinstance(child.exception(), SystemExit) for child in left)
    assert made(batch(*orders(range(9, 12))), 1).processed == 3


def test_a_coroutine_is_told_what_it_cannot_have(place: Place) -> None:
    """tx.connection of one transaction cannot serve several events at once; concurrency= is for coroutines only."""
    made = bare(place.store())

    @made.foreach(into="orders")
    async def book(event: Event, tx: Any) -> Any:
        tx.connection.execute("select 1")

    with pytest.raises(HandlerError, match="several events are in hand"):
        made(batch(*orders([1])), 0)
    with pytest.raises(ConfigError, match="async def"):
        bare(place.store()).foreach(into="orders", concurrency=3)(lambda event, tx: None)


def test_a_handler_of_arrow_tables_writes_what_it_returns(place: Place) -> None:
    """Rejections by a mask, rows by a returned table, failures found by halving, as for any batch."""
    made = bare(place.store())

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        amounts = pc.struct_field(events["data"], "amount")
        if pc.any(pc.equal(amounts, 7)).as_py():
            raise ValueError("seven")
        return flatten(tx.reject(events, pc.less(amounts, 2), "too little"))

    report = made(batch(*orders(range(10))), 0)
    assert (report.processed, report.dead_lettered) == (7, 3)
    assert ids(place.read()) == [f"p0-{n}" for n in (2, 3, 4, 5, 6, 8, 9)]
    assert_proven(place.store())
