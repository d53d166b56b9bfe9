"""Floods, on every store: each kind of dead letter has a budget of its own, and what is over it parks nothing until a person admits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import BudgetExceeded
from checkpoint.position import Partition
from deadletter.letter import Kind
from deadletter.policy import lift_budget
from dedup import Budget
from dedup.consumer import Consumer
from dedup.core.store import Store
from dedup.pipeline.member import Member
from kit.foreach_kit import bare
from kit.local_tasks import TaskEach, run_in
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.places import Place, PostgresPlace

EARLY = (Kind.UNDECODABLE, Kind.NO_KEY, Kind.KEY_CONFLICT)
"""Kinds of events that never come to the handler."""

Events = list[dict[str, Any]]


def flood(kind: Kind, numbers: Iterable[int], *, partition: int = 0) -> Events:
    """Events of which each becomes a letter of this kind. A conflict is one with `orders`, of the same number modulo 10."""
    made: dict[Kind, Callable[[int], dict[str, Any]]] = {
        Kind.UNDECODABLE: lambda n: event(n, body=b"\xff%d" % n, partition=partition),
        Kind.NO_KEY: lambda n: event(n, None, n, partition=partition),
        Kind.KEY_CONFLICT: lambda n: event(n, f"p0-{n % 10}", 10_000 + n, partition=partition),
        Kind.REJECTED: lambda n: event(n, f"r{partition}-{n}", -1, partition=partition),
    }
    return [made[kind](n) for n in numbers]


def lift(store: Store, kind: Kind, events: int) -> None:
    """As `dedup budget lift` does."""
    store.amend("shop", lambda head: lift_budget(head, events, kind), by="ann", reason="old app")


@pytest.mark.parametrize("kind", EARLY)
def test_a_flood_of_one_kind_stops_until_it_is_admitted(place: Place, kind: Kind) -> None:
    """The error names kind, share, limit, an example and the command; nothing of the batch is parked or handled; lifted, all of it is."""
    run = consumer(place.store())
    run(batch(*orders(range(10))), 0)
    rows = batch(*flood(kind, range(10, 130)), event(130, "good"))
    with pytest.raises(BudgetExceeded) as found:
        run(rows, 1)
    said = str(found.value)
    assert f"90 of 100 events in a row are {kind} (90%), 50 may be (50%)" in said and "broker/orders/0 10" in said
    assert f"`dedup budget lift shop --kind {kind} --events 1000`" in said
    assert letters(place.store()) == [] and len(place.read()) == 10
    lift(place.store(), Kind.HANDLER_ERROR, 1000)
    with pytest.raises(BudgetExceeded):
        run(rows, 1)
    lift(place.store(), kind, 1000)
    report = run(rows, 1)
    assert (report.processed, report.dead_lettered) == (1, 120)
    assert {x["kind"] for x in letters(place.store())} == {kind.value}
    assert place.store().head("shop").spent[kind].failures == ()
    assert_proven(place.store())


@pytest.mark.full
@pytest.mark.parametrize("shape", ["foreach", "foreach_arrow"])
def test_handlers_of_any_shape_are_spared_a_flood(place: Place, shape: str) -> None:
    """The budget is looked at before the handler is: it is not called for a batch that cannot be parked."""
    run, called = bare(place.store(), max_outage=0.0), []

    @getattr(run, shape)(into="orders")
    def handle(given: Any, tx: Any) -> Any:
        called.append(given)
        return flatten(given) if isinstance(given, pa.Table) else dict(given.data)

    with pytest.raises(BudgetExceeded, match="UNDECODABLE"):
        run(batch(*flood(Kind.UNDECODABLE, range(100)), event(100, "good")), 0)
    assert called == [] and letters(place.store()) == []
    run(batch(*flood(Kind.UNDECODABLE, range(50)), *orders(range(50, 100))), 0)
    assert called and len(letters(place.store())) == 50


def test_a_share_is_judged_over_the_last_events_and_not_over_a_batch(place: Place) -> None:
    """Small batches add up: with a hundred events in a row the first window is full, in whichever batch that is. The others are parked."""
    run = consumer(place.store())
    for number in range(3):
        assert run(batch(*flood(Kind.UNDECODABLE, range(30 * number, 30 * number + 30))), number).dead_lettered == 30
    with pytest.raises(BudgetExceeded, match=r"100 of 100 .* UNDECODABLE"):
        run(batch(*flood(Kind.UNDECODABLE, range(90, 120))), 3)
    assert len(letters(place.store())) == 90


@pytest.mark.full
def test_a_burst_and_a_quiet_topic_go_on(place: Place) -> None:
    """Fifty in a row that do not decode among good ones, and single ones later, are parked one by one and stop nothing."""
    run = consumer(place.store())
    assert run(batch(*orders(range(100)), *flood(Kind.UNDECODABLE, range(100, 150)), *orders(range(150, 1000))), 0).dead_lettered == 50
    for number in range(1, 4):
        assert run(batch(*flood(Kind.UNDECODABLE, [1000 * number]), *orders([1000 * number + 1])), number).dead_lettered == 1
    assert_proven(place.store())


def test_rejections_have_a_budget_where_the_user_sets_one(place: Place) -> None:
    """By default all events may be rejected: that is what a handler is for. With `rejected=` a share of them may."""
    free = consumer(place.store())
    assert free(batch(*flood(Kind.REJECTED, range(120))), 0).dead_lettered == 120
    limited = consumer(place.store(), budget=Budget(rejected=((100, 0.2),)))
    with pytest.raises(BudgetExceeded, match=r"21 of 100 events in a row are REJECTED .* broker/orders/0 120: negative amount"):
        limited(batch(*flood(Kind.REJECTED, range(120, 150)), *orders(range(150, 250))), 1)
    assert len(letters(place.store())) == 120


def test_no_budget_is_none_for_every_kind(place: Place) -> None:
    """`budget=None` counts nothing, whatever the kind; an empty limit switches one kind off."""
    assert consumer(place.store(), budget=None)(batch(*flood(Kind.UNDECODABLE, range(120))), 0).dead_lettered == 120
    run = consumer(place.store(), budget=Budget(undecodable=()))
    assert run(batch(*flood(Kind.UNDECODABLE, range(120, 240))), 1).dead_lettered == 120
    with pytest.raises(BudgetExceeded, match="NO_KEY"):
        run(batch(*flood(Kind.NO_KEY, range(240, 360))), 2)


def test_a_person_who_lifts_the_budget_releases_the_batch_that_waits(place: Place) -> None:
    """Over its budget the batch is tried again inside the callback: what is admitted, or decodes by then, goes on without a restart."""
    run, waits = consumer(place.store(), max_outage=60.0), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            lift(place.store(), Kind.UNDECODABLE, 100)

    run.on_failure = replace(run.on_failure, sleep=wait)
    assert run(batch(*flood(Kind.UNDECODABLE, range(100))), 0).dead_lettered == 100
    assert len(waits) == 2
    assert_proven(place.store())


def test_chunks_of_a_batch_are_judged_one_by_one(place: Place) -> None:
    """What earlier chunks have committed stays; the chunk that fills a window over its limit does not, and goes on once it is admitted."""
    run = consumer(place.store(), max_events_per_transaction=40)
    rows = batch(*flood(Kind.UNDECODABLE, range(120)))
    with pytest.raises(BudgetExceeded):
        run(rows, 0)
    assert len(letters(place.store())) == 80
    lift(place.store(), Kind.UNDECODABLE, 40)
    report = run(rows, 0)
    assert (report.redelivered, report.dead_lettered) == (80, 40)
    assert_proven(place.store())


def test_runners_that_commit_side_by_side_share_one_budget(place: Place) -> None:
    """60 of one process beside 60 of another are 120 in a row: the one that commits second parks none, though it began first."""
    stores = place.store(), place.store()
    one, two = (Member(consumer(store, query=None).job()) for store in stores)
    for each in (one, two):
        each.join()
    left, right = (each.claim(Partition("broker", "orders", n)) for n, each in enumerate((one, two)))
    others = [lambda: two.process(right, batch(*flood(Kind.UNDECODABLE, range(60), partition=1)))]

    def meanwhile(step: str) -> None:
        if step == "park" and others:
            others.pop()()

    stores[0].on_step = meanwhile
    with pytest.raises(BudgetExceeded, match=r"100 events in a row are UNDECODABLE .* broker/orders/0 0: the body does not decode"):
        one.process(left, batch(*flood(Kind.UNDECODABLE, range(60))))
    assert [x["partition"] for x in letters(place.store())] == [1] * 60
    assert_proven(place.store())


@pytest.mark.postgres
def test_slices_share_one_budget_and_none_begins_behind_a_flood(postgres: str) -> None:
    """The first task has the flood: it parks nothing, and the second one, whose events are good, commits nothing either."""
    place = PostgresPlace(postgres)
    place.create_sink()
    made: Consumer = bare(place.store(), max_outage=0.0)
    made.foreach(into="orders")(lambda event, tx: dict(event.data))
    events = batch(*flood(Kind.NO_KEY, range(120)), *orders(range(5), partition=1))
    with pytest.raises(BudgetExceeded, match=r"NO_KEY .* broker/orders/0 0: every part of the idempotence key is null"):
        run_in(TaskEach(events), made, events)
    assert letters(place.store()) == [] and place.read() == []
    lift(place.store(), Kind.NO_KEY, 1000)
    assert run_in(TaskEach(events), made, events).dead_lettered == 120
    assert sorted(ids(place.read())) == [f"p1-{n}" for n in range(5)]
