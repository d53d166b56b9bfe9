"""What handlers and sinks do, and what must come of it."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError, HandlerError, IncarnationChanged, RowsRefused, SinkMismatch
from deadletter.selection import Selection
from dedup import consumer as consumer_module
from dedup.reprocessing.letters import reprocess
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.places import Place


def test_a_handler_that_raises_leaves_nothing(place: Place) -> None:
    """With bisect=False nothing of the batch is visible; the next attempt succeeds."""
    run = consumer(place.store(), bisect=False)
    good = run._handler

    def broken(rows: pa.Table, tx: Any) -> None:
        assert good is not None
        good(rows, tx)
        raise RuntimeError("boom")

    run._handler = broken
    with pytest.raises(RuntimeError, match="boom"):
        run(batch(*orders(range(3)), event(3, "bad", -1)), 0)
    store = place.store()
    assert place.read() == [] and letters(store) == [] and not store.head("shop").checkpoints
    run._handler = good
    assert run(batch(*orders(range(3)), event(3, "bad", -1)), 0).processed == 3
    assert_proven(place.store())


def test_a_handler_that_answers_differently_has_one_effect(place: Place) -> None:
    """The first committed answer stays, however often the batch is replayed."""
    for _ in range(4):
        run = consumer(place.store())
        run._handler = lambda rows, tx: tx.write(
            flatten(tx.reject(rows, pa.array([random.random() < 0.5 for _ in range(rows.num_rows)]), "coin")), "orders"
        )
        run(batch(*orders(range(40))), 0)
    store = place.store()
    parked = [x["idempotence_key"] for x in letters(store)]
    assert sorted(ids(place.read()) + parked) == sorted(f"p0-{n}" for n in range(40))
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_rejected_events_are_parked_with_everything(place: Place) -> None:
    """The letter has position, bytes, key and reason; a later event with its key is a duplicate noted on it."""
    store = place.store()
    run = consumer(store)
    bad = event(0, "bad", -1, key=b"k", properties=[{"key": "h", "value": b"\x00\xff"}, {"key": "h", "value": None}])
    run(batch(bad, event(1, "a")), 0)
    assert run(batch(event(2, "bad", -1)), 1).duplicates == 1
    (letter,) = letters(store)
    assert {
        k: letter[k] for k in ("kind", "reason", "status", "topic", "partition", "sequence_number", "offset", "event_key", "duplicates")
    } == {
        "kind": "REJECTED",
        "reason": "negative amount",
        "status": "OPEN",
        "topic": "orders",
        "partition": 0,
        "sequence_number": 0,
        "offset": "@0",
        "event_key": b"k",
        "duplicates": 1,
    }
    assert letter["body"] == bad["body"] and letter["properties"] == bad["properties"]
    assert_proven(store)


def test_undecodable_bodies_are_parked_and_the_rest_goes_on(place: Place) -> None:
    """Bytes that are not what the schema says become letters with those very bytes; a null body is no such case."""
    store = place.store()
    bodies = [b"", b"{", b"\xff\xfe\x00", b'{"id": 5, "amount": "x"}']
    consumer(store)(batch(event(9, "a"), *[event(n, body=b) for n, b in enumerate(bodies)]), 0)
    assert [(x["kind"], x["body"]) for x in letters(store)] == [("UNDECODABLE", b) for b in bodies]
    assert ids(place.read()) == ["a"]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_skipped_events_are_recorded_and_not_written(place: Place) -> None:
    """tx.skip: decided, neither written nor parked; another event with the key is a duplicate."""
    store = place.store()
    run = consumer(store)
    run._handler = lambda rows, tx: tx.write(flatten(tx.skip(rows, pa.array([True, False]))), "orders")
    assert run(batch(*orders([0, 1])), 0).skipped == 1
    assert run(batch(event(5, "p0-0", 0)), 1).duplicates == 1
    assert ids(place.read()) == ["p0-1"]
    assert store.batches("shop").to_pylist()[0]["skipped"] == [{"first": 0, "last": 0}]
    assert_proven(store)


def test_dead_letter_parks_what_it_is_given(place: Place) -> None:
    """tx.dead_letter(rows, reason) parks those events."""
    run = consumer(place.store())
    run._handler = lambda rows, tx: tx.dead_letter(rows.slice(0, 1), "not today")
    assert run(batch(*orders([0, 1])), 0).dead_lettered == 1
    assert letters(place.store())[0]["reason"] == "not today"


def test_rejecting_without_positions_is_a_clear_error(place: Place) -> None:
    """tx.reject after the positions were selected away says what to do."""
    run = consumer(place.store())
    run._handler = lambda rows, tx: tx.reject(flatten(rows), pa.array([True]), "x")
    with pytest.raises(HandlerError, match="before selecting"):
        run(batch(*orders([0])), 0)


def test_the_batches_of_a_table_can_be_rejected_from(place: Place) -> None:
    """A handler of Arrow tables may go through their batches: of 150 rows as of two it is given what is left."""
    run = consumer(place.store(), bisect=False)

    def handle(rows: pa.Table, tx: Any) -> None:
        for part in rows.to_batches():
            good = tx.reject(part, pa.array([n % 50 == 0 for n in range(part.num_rows)]), "no")
            tx.write(flatten(tx.skip(good, pa.array([n == 0 for n in range(good.num_rows)]))), "orders")

    run._handler = handle
    report = run(batch(*orders(range(150))), 0)
    assert (report.dead_lettered, report.skipped, report.processed, len(place.read())) == (3, 1, 146, 146)


def test_a_rejected_event_must_not_be_written(place: Place) -> None:
    """Where the written rows carry positions, a parked one among them fails the batch."""
    run = consumer(place.store())

    def both(rows: pa.Table, tx: Any) -> None:
        tx.reject(rows, pa.array([True, False]), "x")
        tx.write(rows.select(["source", "topic", "partition", "sequence_number", "part"]), "positions")

    place.create_position_sink()
    run._handler = both
    with pytest.raises(HandlerError, match="rejected and is still written"):
        run(batch(*orders([0, 1])), 0)
    assert place.read() == [] and letters(place.store()) == []


@pytest.mark.full
def test_rows_of_no_event_may_be_written_beside_a_rejection(place: Place) -> None:
    """Null position columns, as an outer join leaves them, belong to no rejected event."""
    run, names = consumer(place.store()), ["source", "topic", "partition", "sequence_number", "part"]

    def joined(rows: pa.Table, tx: Any) -> None:
        good = tx.reject(rows, pa.array([True, False]), "x").select(names)
        nobody = pa.table({name: pa.nulls(150, good.schema.field(name).type) for name in names})
        tx.write(pa.concat_tables([good, nobody]), "positions")

    place.create_position_sink()
    run._handler = joined
    report = run(batch(*orders([0, 1])), 0)
    assert (report.dead_lettered, report.processed) == (1, 1)


def test_several_sinks_and_several_writes_commit_together(place: Place) -> None:
    """Two tables and two writes to one: all of it, or nothing; a row that a sink refuses parks its event with nothing of it written."""
    place.create_sink("audit")
    run = consumer(place.store())

    def handle(rows: pa.Table, tx: Any) -> None:
        tx.write(flatten(rows), "orders")
        tx.write({"id": "one", "amount": 1}, "audit")
        tx.write([{"id": "two", "amount": None}], "audit")
        if rows.num_rows == 1:
            tx.write([{"id": None, "amount": 1}], "audit")

    run._handler = handle
    run(batch(*orders([0, 1])), 0)
    run(batch(*orders([2])), 1)
    assert [(x["kind"], x["error_type"]) for x in letters(place.store())] == [("HANDLER_ERROR", "dedup.ValuesRefused")]
    assert ids(place.read()) == ["p0-0", "p0-1"] and ids(place.read("audit")) == ["one", "two"]
    assert_proven(place.store())


@pytest.mark.full
def test_a_sink_can_be_added_later(place: Place) -> None:
    """A handler that starts to write to another table needs no ceremony."""
    consumer(place.store())(batch(*orders([0])), 0)
    place.create_sink("late")
    run = consumer(place.store())
    run._handler = lambda rows, tx: tx.write(flatten(rows), "late")
    run(batch(*orders([1])), 1)
    assert ids(place.read()) == ["p0-0"] and ids(place.read("late")) == ["p0-1"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": "a", "amount": "many"}], "amount"),
        ([{"id": "a", "amount": 1, "extra": 1}], "extra"),
        ([{"amount": 1}], "id"),
    ],
    ids=["type", "unknown column", "missing column"],
)
def test_rows_that_do_not_fit_the_sink_are_refused_before_anything_is_sent(place: Place, rows: list[dict[str, Any]], says: str) -> None:
    """The table's fault, not an event's: the error names the column and what it would take; nothing is written, nothing is parked."""
    run = consumer(place.store())
    run._handler = lambda _, tx: tx.write(rows, "orders")
    with pytest.raises(SinkMismatch, match=says) as refused:
        run(batch(*orders([0])), 0)
    assert re.search("ALTER TABLE|Cast the column|Fill|Convert it", str(refused.value)), "says what it would take"
    assert place.read() == [] == letters(place.store()) and not place.store().head("shop").checkpoints


def test_rows_without_columns_are_refused(place: Place) -> None:
    """A selection of no columns still has its rows, and they are not dropped: the stream stops. A table of nothing has none."""
    run = consumer(place.store())
    run._handler = lambda events, tx: tx.write(events.select([]), "orders")
    with pytest.raises(SinkMismatch, match="no columns"):
        run(batch(*orders([0])), 0)
    run._handler = lambda events, tx: tx.write(pa.Table.from_pylist([]), "orders")
    assert run(batch(*orders([0])), 0).processed == 1 and place.read() == [] == letters(place.store())


@pytest.mark.parametrize("shape", of_which(3, ["foreach_batch", "returned", "one of two", "foreach_arrow", "written", "merged"]))
def test_a_column_that_the_sink_lacks_stops_the_stream_whatever_the_handler_is(place: Place, shape: str) -> None:
    """Schema drift is nobody's event: the error names column and ALTER, and nothing is parked or written, also where one event has it."""
    place.create_merge_sink("merged")
    made = bare(place.store(), max_outage=0.0)
    drifted = {"id": "a", "amount": 1, "currency": "EUR"}

    def of_batch(rows: Any, tx: Any) -> Any:
        return tx.write([drifted], "orders") if shape == "foreach_batch" else pa.Table.from_pylist([drifted])

    def of_event(event: Any, tx: Any) -> Any:
        if shape == "written":
            return tx.write(drifted, "orders")
        if shape == "merged":
            return tx.merge(drifted, "merged" if place.kind == "postgres" else "orders", keys="id")
        return drifted if shape == "returned" or event.sequence_number else {"id": "b", "amount": 1}

    if shape == "foreach_batch":
        made.foreach_batch(of_batch)
    elif shape == "foreach_arrow":
        made.foreach_arrow(into="orders")(of_batch)
    else:
        made.foreach(into="orders")(of_event)
    with pytest.raises(SinkMismatch, match="currency") as refused:
        made(batch(*orders(range(2))), 0)
    assert "ALTER TABLE" in str(refused.value) and not isinstance(refused.value, RowsRefused)
    assert place.read() == [] == letters(place.store()) and not place.store().head("shop").checkpoints


def test_a_missing_sink_is_a_clear_error(place: Place) -> None:
    """The table's name and what to do, and nothing is decided."""
    run = consumer(place.store())
    run._handler = lambda rows, tx: tx.write(flatten(rows), "missing")
    with pytest.raises((SinkMismatch, ConfigError), match="missing"):
        run(batch(*orders([0])), 0)
    assert not place.store().head("shop").checkpoints


def test_a_consumer_travels_without_its_connections(place: Place) -> None:
    """Pickling takes the settings along, not the epoch: what is unpickled starts as a new consumer would."""
    original = consumer(place.store())
    original(batch(*orders([0])), 0)
    epoch = place.store().head("shop").epoch
    copy = pickle.loads(pickle.dumps(original))
    assert place.store().head("shop").epoch == epoch, "unpickling takes no epoch"
    copy(batch(*orders([1])), 1)
    assert place.store().head("shop").epoch == epoch + 1


def test_nothing_secret_is_shown(place: Place) -> None:
    """The store's repr has no password."""
    from dedup.postgres import PostgresStore

    assert "hunter2" not in repr(PostgresStore("postgresql://u:hunter2@h/d")) + repr(place.store())


def test_dicts_with_different_keys_lose_no_value(place: Place) -> None:
    """tx.write of a list of dicts takes the columns of all of them, not those of the first."""
    run = consumer(place.store())
    run._handler = lambda _, tx: tx.write([{"id": "x"}, {"id": "y", "amount": 5}], "orders")
    run(batch(*orders([0])), 0)
    assert place.read() == [{"id": "x", "amount": None}, {"id": "y", "amount": 5}]


def test_writing_nothing_is_nothing(place: Place) -> None:
    """An empty list is no row, not a row that does not fit."""
    run = consumer(place.store())
    run._handler = lambda _, tx: tx.write([], "orders")
    assert run(batch(*orders([0])), 0).processed == 1
    assert_proven(place.store())


def test_a_tx_kept_after_the_handler_is_closed(place: Place) -> None:
    """What is recorded after the handler returned would belong to no transaction: refused."""
    kept: list[Any] = []
    run = consumer(place.store())
    run._handler = lambda rows, tx: kept.append(tx)
    run(batch(*orders([0])), 0)
    for late in (lambda: kept[0].write({"id": "a", "amount": 1}, "orders"), lambda: kept[0].connection):
        with pytest.raises(HandlerError, match="closed"):
            late()


def test_undecodable_events_are_told_apart_by_their_bodies(place: Place) -> None:
    """Also where payload= names columns that such an event does not have."""
    events = [event(0, "a"), event(1, body=b"junk")]
    consumer(place.store(), payload="data.amount")(batch(*events), 0)
    assert consumer(place.store(), payload="data.amount")(batch(*events), 0).redelivered == 2
    with pytest.raises(IncarnationChanged):
        consumer(place.store(), payload="data.amount", query="q2")(batch(event(1, body=b"other")), 0)


def in_a_thread(call: Callable[[], Any]) -> None:
    """The handler starts a thread of its own and waits for it."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


CALLING: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "itself": lambda call: call(),
    "a task": lambda call: asyncio.run(asyncio.to_thread(call)),
}


@pytest.mark.parametrize("by", of_which(1, CALLING))
@pytest.mark.timeout(60)
def test_a_consumer_inside_its_own_handler_is_a_clear_error_at_once(place: Place, by: str) -> None:
    """It would wait for the batch in hand, which waits for the handler; nothing is committed, and the batch passes without it."""
    run = consumer(place.store())
    good, doing = run._handler, [lambda: run(batch(*orders([9])), 0)]
    doing += [lambda: consumer(place.store())(batch(*orders([9])), 0), lambda: reprocess(Selection(), run), lambda: run.run(None)]
    for call in doing:

        def nested(rows: pa.Table, tx: Any, call: Callable[[], Any] = call) -> None:
            good(rows, tx)
            CALLING[by](call)

        run._handler = nested
        with pytest.raises(HandlerError, match="inside its own handler"):
            run(batch(*orders(range(3))), 0)
    assert place.read() == [] and not place.store().head("shop").checkpoints
    run._handler = good
    assert run(batch(*orders(range(3))), 0).processed == 3
    assert_proven(place.store())


@pytest.mark.timeout(120)
def test_a_redelivery_from_a_new_thread_waits_for_the_handler_that_still_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark, or whoever gave up waiting, gives the batch again while the first call is in the handler: it is no call of the handler's."""
    run, inside, again, go_on = consumer(place.store()), threading.Event(), threading.Event(), threading.Event()
    good, opened = run._handler, consumer_module.open_batch

    def slow(rows: pa.Table, tx: Any) -> None:
        inside.set()
        go_on.wait(60)
        good(rows, tx)

    def noted(*given: Any, **named: Any) -> Any:
        if inside.is_set():
            again.set()
        return opened(*given, **named)

    run._handler = slow
    monkeypatch.setattr(consumer_module, "open_batch", noted)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run, batch(*orders(range(3))), 0)
        inside.wait(60)
        second = threads.submit(run, batch(*orders(range(3))), 0)
        second.add_done_callback(lambda _: again.set())
        again.wait(60)
        go_on.set()
        assert sorted((r.processed, r.redelivered) for r in (first.result(60), second.result(60))) == [(0, 3), (3, 0)]
    assert_proven(place.store())


@pytest.mark.full
@pytest.mark.timeout(60)
def test_another_consumer_inside_a_handler_works_and_is_a_decision_of_its_own(place: Place) -> None:
    """It waits for nothing of the outer batch; what it decided stays where the outer one fails, and is redelivered when that runs again."""
    run, inner, reports = consumer(place.store()), consumer(place.store(), name="inner"), []
    good = run._handler

    def nested(rows: pa.Table, tx: Any) -> None:
        good(rows, tx)
        reports.append(inner(batch(*orders(range(3), partition=1)), 0))
        if len(reports) == 1:
            raise ConnectionResetError

    run._handler = nested
    assert run(batch(*orders(range(3))), 0).processed == 3
    assert [(r.processed, r.redelivered) for r in reports] == [(3, 0), (0, 3)]
    assert len(place.read()) == 6
    for name in ("shop", "inner"):
        assert_proven(place.store(), name)


@pytest.mark.full
def test_two_threads_may_call_one_consumer_one_after_the_other(place: Place) -> None:
    """A thread that came later is refused only while a handler runs."""
    run = consumer(place.store())
    for number in range(2):
        in_a_thread(lambda number=number: run(batch(*orders([number])), number))
    assert len(place.read()) == 2
