"""Failures of events in tasks that commit by themselves: the same as for a handler of batches. The tasks are a double (local_tasks.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import BudgetExceeded, ConfigError, Fenced, HandlerError, SinkMismatch
from checkpoint.head import Run
from checkpoint.holders import take_epoch
from deadletter.known import SYSTEMIC, TRANSIENT
from deadletter.selection import Selection
from dedup import Retry, replay
from dedup.consumer import Consumer
from dedup.pipeline.handlers import Event
from dedup.spark import tasks
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.local_tasks import TaskEach, Tasks, run_in, run_in_tasks
from kit.orders import assert_proven, batch, event, flatten, ids, letters, orders
from kit.pg_help import purge_all
from kit.places import PostgresPlace

pytestmark = pytest.mark.postgres


class Moody(Exception):
    """Of a service that is asked."""


@pytest.fixture
def base(postgres: str) -> PostgresPlace:
    """A database with the sink `orders`."""
    place = PostgresPlace(postgres)
    place.create_sink()
    return place


def row(event: Event) -> dict[str, Any]:
    """What the sink gets of an order."""
    return {"id": event.data["id"], "amount": event.data["amount"]}


def test_events_wait_behind_a_failed_one_of_their_sequence(base: PostgresPlace) -> None:
    """The failed one is OPEN, what follows it in its sequence BLOCKED, in this batch and in the next one; other sequences go on."""
    made = bare(base.store(), sequence_key="data.amount")

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.data["id"] == "b1":
            raise ValueError("no")
        return row(event)

    said = [("a1", 1), ("b1", 2), ("a2", 1), ("b2", 2)]
    assert run_in_tasks(made, batch(*(event(n, key, amount) for n, (key, amount) in enumerate(said)))).dead_lettered == 2
    assert run_in_tasks(made, batch(event(4, "b3", 2), event(5, "a3", 1)), 1).dead_lettered == 1
    assert [(x["idempotence_key"], x["status"]) for x in letters(base.store())] == [("b1", "OPEN"), ("b2", "BLOCKED"), ("b3", "BLOCKED")]
    assert ids(base.read()) == ["a1", "a2", "a3"]
    assert_proven(base.store())


def test_a_transient_error_is_tried_again_and_parks_nothing(base: PostgresPlace, tmp_path: Path) -> None:
    """Twice an error that its class calls transient, then none: every event is written once, and what the tries wrote is undone."""
    made = bare(base.store(), errors=[(Moody, TRANSIENT)], retry=Retry(attempts=3, first=0.01))

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        tx.write({"id": f"try {event.data['id']}", "amount": 0}, "orders")
        if event.sequence_number == 2 and len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(time.monotonic_ns())).touch()
            raise Moody("later")
        return row(event)

    report = run_in_tasks(made, batch(*orders(range(4))))
    assert (report.processed, report.dead_lettered, len(list(tmp_path.iterdir()))) == (4, 0, 2)
    assert ids(base.read()) == [*(f"p0-{n}" for n in range(4)), *(f"try p0-{n}" for n in range(4))]
    assert letters(base.store()) == []


@pytest.mark.full
def test_a_systemic_error_parks_nothing(base: PostgresPlace) -> None:
    """An error that its class calls everybody's fault ends the try; nothing of its transaction is there, and the batch passes later."""
    made, away = bare(base.store(), errors=[(Moody, SYSTEMIC)], max_events_per_transaction=2), [True]

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if away[0] and event.sequence_number == 3:
            raise Moody("the service is away")
        return row(event)

    with pytest.raises(Exception, match="the service is away"):
        run_in_tasks(made, batch(*orders(range(5))))
    assert ids(base.read()) == ["p0-0", "p0-1"] and letters(base.store()) == []
    away[0] = False
    assert run_in_tasks(made, batch(*orders(range(5)))).processed == 3
    assert_proven(base.store())


def test_what_no_waiting_mends_is_told_before_what_may_pass(base: PostgresPlace) -> None:
    """A service that one partition needs may be away for hours: that there is no such table, which another one needs, ends the query."""
    made = bare(base.store(), errors=[(Moody, SYSTEMIC)])

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.partition == 0:
            raise Moody("the service is away")
        tx.write(row(event), "nowhere")

    with pytest.raises(SinkMismatch, match="nowhere"):
        run_in_tasks(made, batch(*orders([0], partition=0), *orders([0], partition=1)))
    assert (ids(base.read()), letters(base.store())) == ([], [])


ROOM = [(2, None, (2, True)), (100, None, (32, False)), (100, 8, (4, False)), (3, 8, (3, True))]
"""Cores, connections, and (tasks at once, whether their processes keep connections)."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("cores", "connections", "expected", "keeps"),
    of_which(
        2,
        [
            (*ROOM[2], False),
            (*ROOM[3], True),
            *((*room, False) for room in ROOM if room != ROOM[2]),
            *((*room, True) for room in ROOM if room != ROOM[3]),
        ],
    ),
)
def test_so_many_tasks_run_at_once(
    base: PostgresPlace, cores: int, connections: int | None, expected: tuple[int, bool], keeps: bool
) -> None:
    """As many as there are cores, 32 at most, or half of `connections=`; processes keep connections where all cores may have theirs."""
    store, asked = base.store(), list[tuple[int, bool]]()
    store.room = lambda consumer: 1000  # type: ignore[method-assign]  # as of a server for a cluster
    made = bare(store)
    made.foreach(into="orders", connections=connections)(lambda event, tx: row(event))

    class Cluster(Tasks):
        def run(self, rows: pa.Table, task: Any, answers: pa.Schema, at_once: int) -> pa.Table:
            asked.append((at_once, task.keywords["keep"]))
            return super().run(rows, task, answers, at_once)

        def spread(self, task: Any, parts: int, answers: pa.Schema) -> pa.Table:
            asked.append((parts, task.keywords["keep"]))
            return super().spread(task, parts, answers)

    events = batch(*(one for partition in range(33) for one in orders([0], partition=partition)))
    cluster = Cluster(events, keeps=keeps)
    cluster.cores = cores
    assert run_in(cluster, made, events).processed == 33 and asked == [expected]


class Rude(Exception):
    """What cannot be unpickled."""

    def __init__(self, *, said: str) -> None:
        super().__init__(said)


@pytest.mark.parametrize("error", of_which(1, [RuntimeError, lambda said: Rude(said=said)]), ids=["its cause tells", "cannot travel"])
def test_an_outage_of_a_service_is_waited_out(base: PostgresPlace, tmp_path: Path, error: Callable[[str], Exception]) -> None:
    """An error whose cause says that nobody answers is everybody's fault in a task, too: the driver tries the batch again."""
    made = bare(base.store(), max_outage=60.0, retry=Retry(attempts=1))

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if len(list(tmp_path.iterdir())) < 2:
            (tmp_path / str(time.monotonic_ns())).touch()
            raise error("no price to be had") from ConnectionRefusedError(111, "Connection refused")
        return row(event)

    assert run_in_tasks(made, batch(*orders(range(3)))).processed == 3
    assert ids(base.read()) == ["p0-0", "p0-1", "p0-2"] and letters(base.store()) == []
    assert_proven(base.store())


@pytest.mark.full
def test_events_of_arrow_tables_are_found_by_halves(base: PostgresPlace) -> None:
    """Two bad events of a slice are parked alone, whichever way the table raises; all others are written once."""
    made = bare(base.store())

    @made.foreach_arrow(into="orders")
    def book(events: pa.Table, tx: Any) -> pa.Table:
        amounts = pc.struct_field(events["data"], "amount")
        if pc.any(pc.is_in(amounts, pa.array([3, 11]))).as_py():
            raise ValueError("three or eleven")
        return flatten(events)

    report = run_in_tasks(made, batch(*orders(range(16)), *orders(range(3), partition=1)))
    assert (report.processed, report.dead_lettered) == (17, 2)
    assert [x["idempotence_key"] for x in letters(base.store())] == ["p0-3", "p0-11"]
    assert len(base.read()) == 17
    assert_proven(base.store())


def test_a_failed_statement_of_one_event_is_that_events_alone(base: PostgresPlace) -> None:
    """After an error PostgreSQL refuses everything until the savepoint: the event is found, and what the others' statements did stays."""
    made = bare(base.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        tx.connection.execute("insert into orders values (%s, 1 / %s)", [f"own {event.data['id']}", event.data["amount"]])
        return row(event)

    report = run_in_tasks(made, batch(*(event(n, f"k{n}", (n - 2) ** 2) for n in range(4))))
    assert (report.processed, report.dead_lettered) == (3, 1)
    assert [(x["idempotence_key"], x["error_type"]) for x in letters(base.store())] == [("k2", "psycopg.errors.DivisionByZero")]
    assert ids(base.read()) == ["k0", "k1", "k3", "own k0", "own k1", "own k3"]
    assert_proven(base.store())


def test_after_a_slice_over_the_budget_no_slice_of_another_task_begins(base: PostgresPlace) -> None:
    """The first task is over the budget; the second one, which has good events alone, commits nothing. The next try decides anew."""
    made, outage = bare(base.store()), [True]

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        if event.partition == 0 and outage[0]:
            raise ValueError("an outage")
        return row(event)

    events = batch(*orders(range(120)), *orders(range(120, 125), partition=1))
    with pytest.raises(BudgetExceeded, match="None of this batch was parked"):
        run_in(TaskEach(events), made, events)
    assert letters(base.store()) == [] and base.read() == []
    outage[0] = False
    assert run_in(TaskEach(events), made, events).processed == 125
    assert_proven(base.store())


def test_a_driver_that_was_taken_over_does_not_end_the_batch_for_the_other_one(base: PostgresPlace) -> None:
    """Its slices are through when a newer instance with another query takes the epoch: it is fenced, and says nothing in its name."""
    made: Consumer = bare(base.store(), query="one")
    made.foreach(into="orders")(lambda event, tx: row(event))
    run_in_tasks(made, batch(*orders(range(2))))
    mine = made.store.head("shop")
    other = base.store()
    newer = take_epoch(other, "shop", "two", 1.0, force=True)
    alive = base.execute("select backend_pid from dedup.heartbeat")
    with pytest.raises(Fenced):
        tasks.close(made.job(), mine, Run("one", 1, durable=True))
    assert base.execute("select backend_pid from dedup.heartbeat") == alive
    now = other.head("shop")
    assert (now.epoch, now.query_id, now.batch_id) == (newer.epoch, mine.query_id, mine.batch_id)


@pytest.mark.full
def test_replay_does_not_repeat_statements_of_the_handler(base: PostgresPlace) -> None:
    """Nobody can tell what tx.connection would do a second time: refused, nothing changes; doubled where a person asks for it."""
    made = bare(base.store())

    @made.foreach()
    def book(event: Event, tx: Any) -> None:
        tx.connection.execute("insert into orders values (%s, 1)", [event.data["id"]])

    events = batch(*orders(range(3)))
    run_in_tasks(made, events)
    made.register_log_reader(lambda source, topic, partition, first, last: events.slice(first, last - first + 1))
    asked = Selection("shop", topic="orders")
    with pytest.raises(HandlerError, match="accept-double"):
        replay(asked, made)
    assert len(base.read()) == 3
    assert replay(asked, made, accept_double=True).replayed == 3
    assert len(base.read()) == 6


def test_replay_tells_where_a_purge_has_forgotten_what_were_duplicates(base: PostgresPlace) -> None:
    """Outcomes go with the reservations that are purged: a duplicate would overwrite what the first event did. Refused until accepted."""
    base.create_merge_sink("balances")
    made = bare(base.store())
    made.foreach()(lambda event, tx: tx.merge(row(event), "balances", "id"))
    events = batch(event(0, "a", 1), event(1, "b", 2), event(2, "a", 1))
    run_in_tasks(made, events)
    base.store().rotate_reservations()
    assert purge_all(base.store()) == 1
    made.register_log_reader(lambda source, topic, partition, first, last: events.slice(first, last - first + 1))
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match="Select positions from 3 on"):
            replay(Selection("shop", topic="orders"), made, dry_run=dry_run)
    assert [r["amount"] for r in base.read("balances")] == [1, 2]


RUNNERS = json.dumps({"span": [0, 3], "marker": None})


@pytest.mark.full
def test_what_a_runner_was_trying_does_not_stop_slices(base: PostgresPlace) -> None:
    """A runner was killed, and a query goes on with its partitions: its note is none of ours."""
    made = bare(base.store())
    made.foreach(into="orders")(lambda event, tx: row(event))
    run_in_tasks(made, batch(*orders(range(2))))
    made.store.set_crash_marker("shop", RUNNERS, "broker/orders/0")
    again = bare(base.store())
    again.foreach(into="orders")(lambda event, tx: row(event))
    assert run_in_tasks(again, batch(*orders(range(2, 5))), 1).processed == 3
