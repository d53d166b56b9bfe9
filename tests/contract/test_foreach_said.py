"""What handlers of single events say by themselves, on every store: in the order in which they said it, and nothing of it lost."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError, HandlerError
from deadletter.selection import Selection
from dedup import Consumer, replay
from dedup.outbox import Call, Dispatcher, Message
from dedup.pipeline.handlers import Event
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.local_tasks import run_here, run_in_tasks
from kit.orders import assert_proven, batch, event, flatten, ids, letters, orders
from kit.places import Place, PostgresPlace


def row(event: Event) -> dict[str, Any]:
    """What the sink gets of an order."""
    return {"id": event.data["id"], "amount": event.data["amount"]}


@pytest.mark.fast_on("postgres")
def test_an_event_that_wrote_by_itself_is_processed_and_replayed(place: Place) -> None:
    """None is "nothing to do" only where nothing was done: else replay would leave out what was merged."""
    place.create_merge_sink("balances")
    made, factor, events = bare(place.store()), 1, batch(*orders(range(4)))

    @made.foreach
    def book(event: Event, tx: Any) -> None:
        if event.data["amount"]:
            tx.merge({"id": event.data["id"], "amount": factor * event.data["amount"]}, "balances", keys="id")

    report = made(events, 0)
    assert (report.processed, report.skipped) == (3, 1)
    factor = 10
    made.register_log_reader(lambda source, topic, partition, first, last: events.slice(first, last - first + 1))
    assert replay(Selection("shop", topic="orders"), made).replayed == 3
    assert [r["amount"] for r in place.read("balances")] == [10, 20, 30]
    assert_proven(place.store())


def test_merges_of_single_events_take_effect_in_their_order(place: Place) -> None:
    """Insert, delete and insert of one row, by merges of two kinds: what the last one says is true."""
    place.create_merge_sink("balances")
    made = bare(place.store())

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        changed = {"id": event.data["id"][0], "amount": event.data["amount"]}
        if event.data["amount"] < 0:
            tx.merge({**changed, "gone": True}, "balances", keys="id", delete_when="gone")
        else:
            tx.merge(changed, "balances", keys="id")

    said = [("a1", 1), ("b1", 5), ("a2", -1), ("c1", 7), ("a3", 2), ("c2", -1)]
    assert made(batch(*(event(n, key, amount) for n, (key, amount) in enumerate(said))), 0).processed == 6
    assert place.read("balances") == [{"id": "a", "amount": 2}, {"id": "b", "amount": 5}]


def test_rows_of_events_are_written_together(place: Place) -> None:
    """A thousand calls of tx.write with the same columns are no thousand files or statements; lists and dicts stay the handler's own."""
    place.create_sink("audit")
    made, given, same = bare(place.store()), [], dict[str, Any]()

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        given.append([same])
        same.update(row(event))
        tx.write(given[-1], "audit")
        return row(event)

    made(batch(*orders(range(1_000))), 0)
    assert place.read("audit") == place.read() and len(place.read()) == 1_000
    assert {len(rows) for rows in given} == {1}
    if hasattr(place, "path"):
        from deltalake import DeltaTable

        assert len(DeltaTable(place.path("audit")).file_uris()) == 1


@pytest.mark.parametrize("run", of_which(1, [run_here, run_in_tasks]))
def test_what_a_returned_row_lacks_is_not_null_because_its_neighbour_has_it(postgres: str, run: Any) -> None:
    """A column that a row does not bring has the table's default, whichever rows are in the same chunk."""
    base = PostgresPlace(postgres)
    base.create_sink()
    base.execute("ALTER TABLE orders ADD COLUMN status text DEFAULT 'new'")
    made = bare(base.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        return row(event) | ({"status": "told"} if event.data["amount"] % 2 else {})

    assert run(made, batch(*orders(range(4))), 0).processed == 4
    assert base.execute("SELECT id, status FROM orders ORDER BY id") == [(f"p0-{n}", "told" if n % 2 else "new") for n in range(4)]


@pytest.mark.parametrize("kind", of_which(1, [dict, OrderedDict, partial(defaultdict, list)]), ids=["dict", "OrderedDict", "defaultdict"])
def test_rows_are_those_of_the_moment_in_which_they_were_said(place: Place, kind: Any) -> None:
    """One dict, with a list in it, for all events: what it held is written, published and returned, by coroutines as well."""
    place.create_sink("audit")
    row_of, headers = kind(), list[dict[str, Any]]()

    def say(event: Event, tx: Any) -> dict[str, Any]:
        row_of.update(row(event))
        tx.write(row_of, "audit")
        headers[:] = [{"key": "n", "value": event.data["id"].encode()}]
        tx.publish({"body": event.data["id"], "headers": headers}, "out", headers="headers")
        row_of["amount"] += 100
        tx.write([row_of], "audit")
        return row_of

    async def say_soon(event: Event, tx: Any) -> dict[str, Any]:
        return say(event, tx)

    for number, handler in enumerate((say, say_soon)):
        made = bare(place.store())
        made.foreach(into="orders")(handler)
        assert made(batch(*orders(range(3 * number, 3 * number + 3))), number).processed == 3
    assert sorted(r["amount"] for r in place.read()) == [100 + n for n in range(6)]
    assert sorted(r["amount"] for r in place.read("audit")) == [*range(6), *(100 + n for n in range(6))]
    sent: list[Message] = []
    Dispatcher(place.store().outbox("shop"), Call(sent.extend)).once()
    assert [m.headers for m in sent] == [(("n", m.body),) for m in sent] and len(sent) == 6


@pytest.mark.full
def test_what_a_coroutine_awaits_may_be_cancelled(place: Place) -> None:
    """A cancelled task that several events wait for is the failure of those events: none of them vanishes, and the others pass."""
    made = bare(place.store())

    @made.foreach(into="orders", concurrency=3)
    async def book(event: Event, tx: Any) -> dict[str, Any]:
        if event.sequence_number in (3, 4, 11):
            shared = asyncio.ensure_future(asyncio.sleep(10))
            shared.cancel()
            await shared
        return row(event)

    report = made(batch(*orders(range(20))), 0)
    assert (report.processed, report.dead_lettered) == (17, 3)
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-3", "p0-4", "p0-11"]
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(20) if n not in (3, 4, 11))
    assert_proven(place.store())


def test_a_coroutine_that_cancels_its_own_task_stops_the_batch(place: Place) -> None:
    """Nobody could say what became of the events that this worker would have had: nothing is committed."""
    made = bare(place.store())

    @made.foreach(into="orders", concurrency=2)
    async def book(event: Event, tx: Any) -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        if event.sequence_number == 2:
            task.cancel()
        await asyncio.sleep(0)
        return row(event)

    with pytest.raises(HandlerError, match="no answer"):
        made(batch(*orders(range(5))), 0)
    assert place.read() == [] and letters(place.store()) == []


@pytest.mark.full
def test_what_a_coroutine_left_behind_is_refused(place: Place) -> None:
    """A task that writes after its handler has returned gets an error, as it would with any other tx."""
    made, told = bare(place.store()), []

    @made.foreach(into="orders")
    async def book(event: Event, tx: Any) -> dict[str, Any]:
        async def later() -> None:
            await asyncio.sleep(0.01)
            try:
                tx.write(row(event), "orders")
            except HandlerError as error:
                told.append(str(error))

        left = asyncio.ensure_future(later())
        if event.sequence_number == 2:  # stays in hand until the others' tasks have tried
            await asyncio.sleep(0.2)
        del left
        return row(event)

    assert made(batch(*orders(range(3))), 0).processed == 3
    assert len(told) == 2 and "closed" in told[0]
    assert len(place.read()) == 4, "the third one's task was in time"


@pytest.mark.fast_on("postgres")
def test_an_event_can_be_parked_by_its_handler(place: Place) -> None:
    """tx.dead_letter takes the event itself, also in coroutines; returning rows of it as well is an error."""
    made = bare(place.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.data["amount"] in (1, 4):
            return tx.dead_letter(event, "not this one")
        return row(event)

    report = made(batch(*orders(range(3))), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    assert [(x["idempotence_key"], x["kind"], x["reason"]) for x in letters(place.store())] == [("p0-1", "REJECTED", "not this one")]
    soon = bare(place.store())

    @soon.foreach(into="orders")
    async def book_soon(event: Event, tx: Any) -> Any:
        tx.dead_letter(event, "nor this one")
        return row(event) if event.data["amount"] == 5 else None

    assert soon(batch(*orders([4])), 1).dead_lettered == 1
    with pytest.raises(HandlerError, match="parked broker/orders/0 5 and returned rows"):
        soon(batch(*orders([5])), 2)
    assert len(place.read()) == 2
    assert_proven(place.store())


def test_an_exception_is_a_reason(place: Place) -> None:
    """A letter says its type and text, without secrets; what is neither a text nor an exception is refused at the call."""
    made = bare(place.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        tx.dead_letter(event, ValueError("no such customer, password=hunter2"))

    assert made(batch(*orders([0])), 0).dead_lettered == 1
    assert [x["reason"] for x in letters(place.store())] == ["ValueError: no such customer, password=***"]
    made._handler = None
    made.foreach(into="orders")(lambda event, tx: tx.dead_letter(event, 7))
    with pytest.raises(HandlerError, match="a text or an exception, not int"):
        made(batch(*orders([1])), 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    of_which(
        2,
        [
            (lambda event, tx: [row(event), 7], "Of broker/orders/0 0 it returned a list whose item 1 is of type int"),
            (lambda event, tx: "done", "Of broker/orders/0 0 it returned str"),
            (lambda event, tx: tx.write(row(event), None), "tx.write takes the name of a table, not None"),
            (lambda event, tx: tx.merge(row(event), "", "id"), "tx.merge takes the name of a table, not ''"),
        ],
    ),
)
def test_a_handler_that_is_wrong_stops_the_stream_and_says_where(place: Place, wrong: Any, says: str) -> None:
    """It would be wrong for every event: none of them is parked."""
    made = bare(place.store())
    made.foreach(into="orders")(wrong)
    with pytest.raises(HandlerError, match=says):
        made(batch(*orders(range(3))), 0)
    assert letters(place.store()) == []


SAYS: dict[str, Any] = {
    "write": lambda event, tx: tx.write(row(event), "orders"),
    "merge": lambda event, tx: tx.merge(row(event), "balances", "id"),
    "publish": lambda event, tx: tx.publish({"body": event.data["id"]}, "out"),
}


@pytest.mark.parametrize("how", SAYS)
@pytest.mark.parametrize("soon", of_which(1, [False, True]), ids=["at once", "coroutine"])
def test_an_event_has_an_effect_or_a_letter(place: Place, how: str, soon: bool) -> None:
    """What was written, merged or published for an event that is parked as well would come twice once it is reprocessed: an error."""
    place.create_merge_sink("balances")
    made = bare(place.store())

    def book(event: Event, tx: Any) -> None:
        SAYS[how](event, tx)
        tx.dead_letter(event, "and not")

    async def book_soon(event: Event, tx: Any) -> None:
        book(event, tx)

    made.foreach()(book_soon if soon else book)
    for run in (made, lambda rows, number: run_in_tasks(made, rows, number)):
        with pytest.raises(HandlerError, match="an effect or a letter, not both"):
            run(batch(*orders(range(2))), 0)
    assert place.read() == place.read("balances") == letters(place.store()) == []
    Dispatcher(place.store().outbox("shop"), Call(lambda messages: pytest.fail(f"{messages}"))).once()


MISFITS: dict[str, Any] = {
    "merge": lambda tx, row, bad: tx.merge(row | {"amount": "many"} if bad else row, "balances", "id"),
    "publish": lambda tx, row, bad: tx.publish({"body": 5 if bad else row["id"]}, "out"),
    "write": lambda tx, row, bad: tx.write(row | {"amount": "many"} if bad else row, "orders"),
    "merge without its key": lambda tx, row, bad: tx.merge({"amount": 1} if bad else row, "balances", "id"),
    "publish without a body": lambda tx, row, bad: tx.publish({} if bad else {"body": row["id"]}, "out"),
}


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("how", of_which(2, MISFITS))
def test_a_row_that_does_not_fit_is_its_events_fault(place: Place, how: str) -> None:
    """However it is said, and wherever the handler runs: the event is parked, the others pass, the stream goes on."""
    place.create_merge_sink("balances")
    for number, run in enumerate((run_here, run_in_tasks)):
        made = bare(place.store())

        @made.foreach()
        def book(event: Event, tx: Any) -> None:
            MISFITS[how](tx, row(event), event.data["amount"] % 4 == 2)

        report = run(made, batch(*orders(range(4 * number, 4 * number + 4))), number)
        assert (report.processed, report.dead_lettered) == (3, 1)
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-2", "p0-6"]
    if not how.startswith("publish"):
        assert sorted(r["amount"] for r in place.read("orders" if how == "write" else "balances")) == [0, 1, 3, 4, 5, 7]
    assert_proven(place.store())


@pytest.mark.full
def test_replayed_coroutines_of_one_sequence_come_one_after_the_other(place: Place) -> None:
    """Replay keeps their order as the stream did: what they read and write elsewhere belongs together."""
    place.create_merge_sink("balances")
    made, in_hand, together, began = bare(place.store(), sequence_key="data.amount"), list[int](), list[int](), list[int]()

    @made.foreach()
    async def book(event: Event, tx: Any) -> None:
        together.extend(n for n in in_hand if n == event.data["amount"])
        in_hand.append(event.data["amount"])
        began.append(event.sequence_number)
        await asyncio.sleep(0.01)
        in_hand.remove(event.data["amount"])
        tx.merge(row(event), "balances", keys="id")

    events = batch(*(event(n, f"k{n}", n % 2) for n in range(6)))
    made(events, 0)
    began.clear()
    made.register_log_reader(lambda source, topic, partition, first, last: events.slice(first, last - first + 1))
    assert replay(Selection("shop", topic="orders"), made).replayed == 6
    assert sorted(began) == list(range(6)) and together == []


async def _coroutine(rows: Any, tx: Any) -> None:
    tx.write(flatten(rows), "orders")


def _generator(rows: Any, tx: Any) -> Any:
    yield tx.write(flatten(rows), "orders")


@pytest.mark.parametrize("handler", [_coroutine, _generator])
def test_a_handler_of_batches_that_nobody_would_run_is_refused(place: Place, handler: Any) -> None:
    """Calling an `async def` or a generator runs nothing: all events would count as processed, and no row be there."""
    with pytest.raises(ConfigError, match=r"async def|generator"):
        bare(place.store()).foreach_batch(handler)
    with pytest.raises(ConfigError, match=r"async def|generator"):
        bare(place.store()).foreach_arrow()(handler)


@pytest.mark.parametrize(
    "answer",
    of_which(
        3,
        [
            _coroutine,
            _generator,
            lambda rows, tx: flatten(rows),
            lambda rows, tx: flatten(rows).to_pylist(),
            lambda rows, tx: flatten(rows).to_pylist()[0],
            lambda rows, tx: (tx.skip(rows, pa.array([False] * 3)), None),
        ],
    ),
)
def test_rows_that_a_handler_of_batches_returns_are_not_dropped(place: Place, answer: Any) -> None:
    """What it returns is written by nobody: it is told so, and nothing is committed."""
    made = bare(place.store())
    made.foreach_batch(lambda rows, tx: answer(rows, tx))
    with pytest.raises(HandlerError, match="returned a"):
        made(batch(*orders(range(3))), 0)
    assert place.read() == [] and letters(place.store()) == []


def test_a_try_that_failed_begins_anew(place: Place) -> None:
    """Guards that look only at the first batch of a query run look again where its try did not get through."""
    made: Consumer = bare(place.store())
    made.foreach_batch(lambda rows, tx: None)
    made(batch(*orders([0])), 0)
    assert made._live is not None and made._live.begun
    made._handler = lambda rows, tx: pa.table({"x": [1]})  # type: ignore[assignment,return-value]
    with pytest.raises(HandlerError):
        made(batch(*orders([1])), 1)
    assert not made._live.begun
