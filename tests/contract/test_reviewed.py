"""What a review found broken: rare ways in which letters, replays and resets met."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from checkpoint.changes import reset
from checkpoint.errors import HandlerError, IncarnationChanged, PositionsMissing, ReprocessStopped
from checkpoint.position import Ranges
from deadletter.selection import Selection
from dedup import DeadLetters, ReprocessOptions
from dedup.reprocessing import replay as replaying
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.replay import replay
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.people import ANN, failing, fixed
from kit.places import Place, PostgresPlace


def logged(consumer: Any, *events: dict[str, Any]) -> Any:
    """The consumer with these events as its log."""
    consumer.register_log_reader(lambda *asked: batch(*events))
    return consumer


@pytest.mark.fast_on("postgres")
def test_a_replay_that_reads_other_keys_accounts_for_them(place: Place) -> None:
    """What a changed decode makes of an event is reserved by its replay once that is accepted, and verify is told of it."""
    fixed(place.store())(batch(event(0, "a"), event(1, "b")), 0)
    run = logged(fixed(place.store()), event(0, "a"), event(1, "x"))
    asked = Selection(topic="orders", first=0, last=1)
    with pytest.raises(IncarnationChanged, match="--accept-other-keys"):
        replay(asked, run, accept_double=True)
    assert replay(asked, run, accept_double=True, accept_other_keys=True).replayed == 2
    assert run(batch(event(2, "x")), 1).duplicates == 1
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize(
    ("other", "why"),
    of_which(1, [(event(1, body=b"{"), "the body is not JSON"), (event(1, body=b'{"id": null, "amount": 1}'), "key is null")]),
)
def test_a_replay_gives_no_handler_what_the_stream_would_park(place: Place, other: dict[str, Any], why: str) -> None:
    """Where other keys are accepted, too, an event that does not decode or has no key ends the replay, and nothing changes."""
    fixed(place.store())(batch(event(0, "a"), event(1, "b")), 0)
    run = logged(fixed(place.store()), event(0, "a"), other)
    before = place.read()
    with pytest.raises(ReprocessStopped, match=f"1 of 2 events fail now, the first at .*orders/0 1.*{why}") as stopped:
        replay(Selection(topic="orders", first=0, last=1), run, accept_double=True, accept_other_keys=True)
    assert (stopped.value.report.processed, stopped.value.report.replayed, place.read()) == (2, 0, before)
    assert_proven(place.store())


@pytest.mark.full
@pytest.mark.parametrize(
    ("other", "settings"),
    [
        (event(1, "x"), {}),  # another key
        (event(1, "b", 7), {}),  # the same key, another payload
        (event(1, "x"), {"idempotence_key": None}),  # the key is the position
        (event(1, body=b"{"), {}),  # a body that does not decode
    ],
)
def test_a_replay_refuses_other_events_than_were_processed(place: Place, other: dict[str, Any], settings: dict[str, Any]) -> None:
    """A topic that was created again holds other events at processed positions: refused as the stream does it, and nothing changes."""
    fixed(place.store(), **settings)(batch(event(0, "a"), event(1, "b")), 0)
    run = logged(fixed(place.store(), **settings), event(0, "a"), other)
    with pytest.raises(IncarnationChanged, match=r"other events.*orders/0 1"):
        replay(Selection(topic="orders", first=0, last=1), run, accept_double=True)
    with pytest.raises(IncarnationChanged, match="other events"):
        run(batch(event(0, "a"), other), 0)
    assert ids(place.read()) == ["a", "b"]
    assert run(batch(event(2, "x"), event(3, "c")), 1).processed == 2  # no key of the refused event was reserved
    assert_proven(place.store())


def read_from(*events: dict[str, Any]) -> tuple[Any, list[tuple[int, int]]]:
    """A log that has these events, and which spans of it were read."""
    spans = list[tuple[int, int]]()

    def read(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
        spans.append((first, last))
        return batch(*(one for one in events if first <= one["sequence_number"] <= last))

    return read, spans


@pytest.mark.fast_on("postgres")
def test_a_replay_reads_over_what_it_leaves_out(place: Place) -> None:
    """Each third event is a duplicate: all are read at once, the others alone are repeated; only lost ones of those are missing."""
    events = [event(n, f"k{n if n % 3 else 0}") for n in range(12)]
    run = fixed(place.store())
    run(batch(*events), 0)
    read, spans = read_from(*(one for one in events if one["sequence_number"] not in (3, 4)))
    run.register_log_reader(read)
    asked = Selection(topic="orders", first=0, last=11)
    with pytest.raises(PositionsMissing, match=r"orders/0 \[4\] were"):
        replay(asked, run, accept_double=True)
    done = replay(asked, run, accept_double=True, options=ReprocessOptions(skip_missing=True))
    assert (done.replayed, done.missing, spans) == (8, Ranges.of([(4, 4)]), [(0, 11)] * 2)
    assert sorted(ids(place.read())) == sorted([f"k{n}" for n in (0, 1, 2, 5, 7, 8, 10, 11)] * 2 + ["k4"])
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_absent_positions_that_are_near_each_other_are_read_at_once(place: Place) -> None:
    """Holes in what was delivered are decided in one transaction: what lies between them is left as it is, and compared beside them."""
    run = fixed(place.store())
    run(batch(*(event(n, f"k{n}") for n in range(12) if n % 4)), 0)
    asked, skip = Selection(topic="orders", first=0, last=11), ReprocessOptions(skip_missing=True)
    log = [event(n, f"k{n}") for n in range(12) if n != 8]
    read, spans = read_from(*(event(5, "other") if one["sequence_number"] == 5 else one for one in log))
    run.register_log_reader(read)
    with pytest.raises(IncarnationChanged, match=r"orders/0 5"):
        reprocess(asked, run, from_log=True, options=skip)
    read, spans = read_from(*log)
    run.register_log_reader(read)
    done = reprocess(asked, run, from_log=True, options=skip)
    assert (done.absent, done.filled.delivered, done.filled.processed, done.lost, spans) == (3, 2, 2, 1, [(0, 9)])
    assert sorted(ids(place.read())) == sorted(f"k{n}" for n in range(12) if n != 8)
    assert_proven(place.store())


def test_a_replay_passes_on_nothing_but_what_handlers_use(place: Place) -> None:
    """What a transaction learns to do is refused in a replay until somebody has thought about it."""
    fixed(place.store())(batch(event(0, "a")), 0)
    with place.store().begin_letters("shop", positions=True) as transaction:
        others = {name for name in dir(transaction) if not name.startswith("_")} - replaying.PASSED_ON - {"enqueue"}
        assert {"execute", "reserve", "lock"} <= others
        for guarded in (replaying._Anew(transaction), replaying._NoAppends(transaction)):
            assert not [name for name in others if hasattr(guarded, name)]
            assert guarded.head is transaction.head


@pytest.mark.fast_on("postgres")
def test_a_replay_leaves_out_parts_that_were_duplicates(place: Place) -> None:
    """Of an exploded event one part was processed, one is a duplicate of an earlier event: that one gets no effect by a replay."""
    events = (event(0, "a"), event(1, "b"), {**event(1, "a"), "part": 1})
    fixed(place.store())(batch(*events), 0)
    assert ids(place.read()) == ["a", "b"]
    run = logged(fixed(place.store()), *events)
    assert replay(Selection(topic="orders", first=0, last=1), run, accept_double=True).replayed == 2
    assert ids(place.read()) == ["a", "a", "b", "b"]
    assert_proven(place.store())


@pytest.mark.full
def test_a_letter_from_before_a_reset_can_be_changed(place: Place) -> None:
    """Its key counts no longer: tried again or discarded, it reserves nothing but the key of now, and verify agrees."""
    store = place.store()
    failing(store)
    first, second, *_ = letters(store)
    store.amend("shop", reset, **ANN)
    assert DeadLetters(store).discard([first["id"]], **ANN).changed == 1
    assert_proven(store)
    assert reprocess(Selection(id=second["id"]), consumer(store)).failed == 1
    assert_proven(store)
    assert fixed(store)(batch(event(0, "a"), event(1, "b")), 0).processed == 2
    assert reprocess(Selection(id=second["id"]), fixed(store)).reprocessed == 1
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_letters_from_before_a_reset_ask_for_their_history_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page in one query: a thousand letters do not ask a thousand times while their transaction is open."""
    store, asked, history = place.store(), list[int](), type(place.store()).history
    consumer(store)(batch(*(event(n, f"k{n}", -1) for n in range(5))), 0)
    store.amend("shop", reset, **ANN)
    monkeypatch.setattr(type(store), "history", lambda self, *ids: (asked.append(len(ids)), history(self, *ids))[1])
    assert reprocess(Selection(), fixed(store)).reprocessed == 5
    assert asked == [5]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
def test_a_replay_leaves_out_parts_whose_key_a_letter_holds(place: Place) -> None:
    """An exploded event repeats what is a dead letter: the letter alone has the key, and its effect comes once, by reprocess."""
    events = (event(0, "a", -1), event(1, "b"), {**event(1, "a", -1), "part": 1})
    consumer(place.store())(batch(*events), 0)
    run = logged(fixed(place.store()), *events)
    assert replay(Selection(topic="orders", first=0, last=1), run, accept_double=True).replayed == 1
    assert ids(place.read()) == ["b", "b"]
    assert reprocess(Selection(), run).reprocessed == 1
    assert ids(place.read()) == ["a", "b", "b"]
    assert_proven(place.store())


@pytest.mark.postgres
@pytest.mark.parametrize("writes", of_which(1, [True, False]))
def test_an_error_that_the_handler_swallows_is_of_its_event(postgres: str, writes: bool) -> None:
    """PostgreSQL: after an error nothing can be written any more: the event that caused it is parked and told why, the others go on."""
    place = PostgresPlace(postgres)
    place.create_sink()

    def handler(rows: pa.Table, tx: Any) -> None:
        for name in flatten(rows)["id"].to_pylist():
            with contextlib.suppress(psycopg.Error):
                tx.connection.execute("SELECT 1 / %s", (int(name != "p0-2"),))
        if writes:
            tx.write(flatten(rows), "orders")

    run = consumer(place.store())
    run._handler = handler
    assert run(batch(*orders(range(5))), 0).dead_lettered == 1
    (letter,) = letters(place.store())
    assert (letter["idempotence_key"] == "p0-2" and "abort" in letter["error_message"]) or "savepoint" in letter["error_message"]
    assert len(place.read()) == (4 if writes else 0)
    assert_proven(place.store())


@pytest.mark.postgres
def test_keys_that_only_the_server_takes_for_one_are_merged_one_after_the_other(postgres: str) -> None:
    """PostgreSQL: 'a' and 'a ' are one key of a char column: no statement takes both, so they are tried apart, and the last one counts."""
    place = PostgresPlace(postgres)
    place.execute("CREATE TABLE balances (id char(4) PRIMARY KEY, amount bigint)")
    run = consumer(place.store(), idempotence_key="sequence_number")
    run._handler = lambda rows, tx: tx.merge(flatten(rows), "balances", "id")
    assert run(batch(event(0, "a", 1), event(1, "a ", 2), event(2, "b", 3)), 0).processed == 3
    assert sorted((i.strip(), n) for i, n in place.execute("SELECT id, amount FROM balances")) == [("a", 2), ("b", 3)]


def test_no_ids_are_no_letters(place: Place) -> None:
    """A selection of an empty list of ids, as a query may give it, is empty, and changes nothing."""
    store = place.store()
    failing(store)
    assert store.letters(Selection(ids=())).num_rows == 0
    assert DeadLetters(store).discard(Selection(ids=()), **ANN).selected == 0


@pytest.mark.fast_on("postgres")
def test_a_replay_that_newer_by_would_make_void_is_refused(place: Place) -> None:
    """Rows of the same age stay as they are: a replay that says it repaired them would mislead."""
    place.create_merge_sink("balances")
    run = consumer(place.store())
    run._handler = lambda rows, tx: tx.merge(flatten(rows), "balances", "id", newer_by="amount")
    events = orders(range(3))
    run(batch(*events), 0)
    run.register_log_reader(lambda *position: batch(*events))
    with pytest.raises(HandlerError, match="repair nothing"):
        replay(Selection(topic="orders", first=0, last=2), run)
    assert replay(Selection(topic="orders", first=0, last=2), run, accept_double=True).replayed == 3


def test_delete_when_may_be_a_column_of_the_sink(place: Place) -> None:
    """Then its value is kept: it is taken out only where the sink does not have it."""
    place.create_text_sink("order_lines", ["line", "gone"])
    run = consumer(place.store())

    def handler(rows: pa.Table, tx: Any) -> None:
        tx.merge(
            pa.table({"line": flatten(rows)["id"], "gone": pa.repeat("false", rows.num_rows)}), "order_lines", "line", delete_when="gone"
        )

    run._handler = handler
    run(batch(*orders(range(2))), 0)
    assert sorted(row["gone"] for row in place.read_text("order_lines", ["line", "gone"]).to_pylist()) == ["false", "false"]


@pytest.mark.full
def test_one_row_of_another_type_does_not_stop_the_others(place: Place) -> None:
    """A handler of single events returns text for one of five numbers: that event is parked."""
    run = consumer(place.store())
    run._handler = None
    odd = {"p0-2": {"id": "p0-2", "amount": "text"}}

    @run.foreach(into="orders")
    def book(event: Any, tx: Any) -> Any:
        return odd.get(event.data["id"], {"id": event.data["id"], "amount": 1})

    report = run(batch(*orders(range(5))), 0)
    assert (report.processed, report.dead_lettered) == (4, 1)
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-2"]
    assert_proven(place.store())
