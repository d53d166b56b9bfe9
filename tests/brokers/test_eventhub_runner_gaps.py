"""Gaps and holes in a hub's log, as the runner meets them: refused, accepted by a person, read over, and closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from checkpoint import changes
from checkpoint.changes import accept_gap
from checkpoint.errors import ConfigError, PositionGap
from checkpoint.head import Checkpoint, Claim, Holder
from checkpoint.position import Partition
from deadletter.crashes import untried
from dedup.eventhub import Connection, rows, runner
from dedup.eventhub.leases import owners_beside
from dedup.eventhub.namespace import Hub, Span
from dedup.eventhub.runner import Bounds, Gathered, NotClaimed, Runner
from dedup.pipeline.member import Assignment
from kit import runner_child
from kit.hub_orders import Orders, checkpoints, until
from kit.places import Place, PostgresPlace
from kit.running import MARKS, Running, running

pytestmark = [*MARKS]


@pytest.fixture
def place(postgres: str) -> Place:
    """A database with the sink `orders`."""
    made = PostgresPlace(postgres)
    made.create_sink()
    return made


@pytest.mark.full
def test_a_gap_that_retention_left_is_an_error_until_a_person_accepts_it(place: Place, sent: Orders) -> None:
    """Events below the checkpoint's next one are gone: the process stops, naming them; accepted, it goes on, and a new gap is an error."""
    sent.send(100)
    consumer = runner_child.consumer(place.store())
    with running(consumer, sent) as one:
        sent.wait(place, one.alive)
    known = checkpoints(place)[0]
    sent.send(100)
    sent.double.order("expire", hub=sent.hub, partition=0, before=known + 11)
    error = Running(consumer, sent).ends_with()
    assert isinstance(error, PositionGap) and f"{known + 1}-{known + 10}" in str(error) and "accept-gap shop" in str(error)
    place.store().amend("shop", accept_gap, by="test", reason="lost")
    with running(consumer, sent) as one:
        sent.wait(place, one.alive)
    batches = place.store().batches("shop").to_pylist()
    seen = sorted((r["first"], r["last"]) for b in batches if b["partition"] == 0 for r in b["seen"])
    assert not [span for span in seen if span[0] <= known + 10 and span[1] > known]


def test_an_accepted_gap_ends_where_the_log_begins(place: Place, sent: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the border of the retention and did not come yet is no part of what a person accepted."""
    consumer = runner_child.consumer(place.store())
    place.store().take_epoch("shop", Holder("host", 1, "", "run"), takeover_after=1.0)
    place.store().amend("shop", accept_gap, by="test", reason="lost")
    connection = Connection.of(sent.double.connection_string, sent.hub)
    runner = Runner(consumer.job(), connection, owners_beside(consumer.store, "shop"), Bounds(10, 10, 1.0), "earliest", 10, {})
    monkeypatch.setattr(runner._namespace, "span", lambda _: Span(10, 30, None))
    part = Gathered(Assignment(Claim(Partition("s", sent.hub, 0), 1, "run"), untried()), Bounds(10, 10, 1.0), 5)
    asyncio.run(runner._judge("0", part, 5, 19))
    assert part.order is not None and part.order.next == 10
    monkeypatch.setattr(runner._namespace, "span", lambda _: Span(30, 40, None))
    asyncio.run(runner._judge("0", part, 10, 19))
    assert part.order.next == 20


@pytest.mark.full
def test_an_accepted_gap_is_closed_once_no_partition_has_one(place: Place, sent: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person accepted counts for the gaps that there are, not for those to come."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.2)
    sent.send(50)
    consumer = runner_child.consumer(place.store())
    with running(consumer, sent) as one:
        sent.wait(place, one.alive)
        place.store().amend("shop", accept_gap, by="test", reason="lost")
        until(lambda: not place.store().head("shop").gap_accepted, one.alive)


def _looking(place: Place, spans: dict[int, Span], points: dict[Partition, int], monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner of the hub "hub" on the source "ns", whose state has these checkpoints and an accepted gap."""
    store, consumer = place.store(), runner_child.consumer(place.store(), source="ns")
    wanted = {partition: Checkpoint(number) for partition, number in points.items()}
    changes.move(store, "shop", changes.plan(store, store.head("shop"), wanted), by="test", reason="set up")
    store.amend("shop", accept_gap, by="test", reason="lost")
    connection = Connection.of("Endpoint=sb://h/;SharedAccessKeyName=k;SharedAccessKey=a;EntityPath=hub")
    made = Runner(consumer.job(), connection, owners_beside(store, "shop"), Bounds(10, 10, 1.0), "earliest", 10, {})
    monkeypatch.setattr(made._namespace, "look", lambda: Hub("", spans))
    return made


def test_a_gap_of_an_empty_partition_is_passed_and_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not wait for an event: meanwhile it would accept what retention takes of other partitions weeks later."""
    spans = {0: Span(100, 100, None), 1: Span(10, 60, None)}
    looking = _looking(place, spans, {Partition("ns", "hub", 0): 5, Partition("ns", "hub", 1): 50}, monkeypatch)
    looking._forget_gap()
    assert not place.store().head("shop").gap_accepted and checkpoints(place) == {0: 99, 1: 50}


def test_a_gap_that_is_still_to_be_read_over_stays_accepted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partition has events: the batch that begins behind the gap moves its checkpoint."""
    spans = {0: Span(100, 110, None), 1: Span(60, 60, None)}
    looking = _looking(place, spans, {Partition("ns", "hub", 0): 5, Partition("ns", "hub", 1): 50}, monkeypatch)
    looking._forget_gap()
    assert place.store().head("shop").gap_accepted and checkpoints(place) == {0: 5, 1: 50}


def test_a_gap_in_another_hub_is_not_closed_by_this_ones_runner(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner knows its own hub alone: what a person accepted may be for another one of the same consumer."""
    points = {Partition("ns", "hub", 0): 5, Partition("ns", "other", 0): 5}
    _looking(place, {0: Span(0, 6, None)}, points, monkeypatch)._forget_gap()
    assert place.store().head("shop").gap_accepted


def test_another_spelling_of_a_hub_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event Hubs takes any case for the same hub: read under another name its events would be new, and their effects doubled."""
    points = {Partition("ns", "Hub", 0): 5, Partition("another", "HUB", 0): 5}
    made = _looking(place, {}, points, monkeypatch)
    monkeypatch.setattr(made._namespace, "created", lambda: "")
    monkeypatch.setattr(made._namespace, "span", lambda _: Span(0, 10, None))
    made._member.join()
    with pytest.raises(ConfigError, match=r"'hub'.*'Hub'"):
        made._claim(0)
    store = place.store()
    changes.move(
        store, "shop", changes.plan(store, store.head("shop"), {Partition("ns", "hub", 1): Checkpoint(1)}), by="test", reason="before"
    )
    assert made._claim(0).first is None, "a state of before this was refused has both"


def test_holes_that_are_seen_together_cost_one_reading(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a compacted log there may be thousands: all that are in sight are read again at once, and then all of them are left out."""
    made = _looking(place, {}, {}, monkeypatch)
    monkeypatch.setattr(made._namespace, "span", lambda _: Span(0, 20, None))
    come = [0, 1, 5, 6, 9, 12]
    with pytest.raises(NotClaimed):
        asyncio.run(made._judge("0", _holding(come, frozenset()), 2, 4))
    assert made._doubted["0"] == {(2, 4), (7, 8), (10, 11)}
    again = _holding([*come, 15], frozenset(made._doubted["0"]))
    asyncio.run(made._judge("0", again, 2, 4))
    assert again.order is not None and again.order.next == 13, "the next hole is a new one"


def _holding(come: list[int], doubted: frozenset[tuple[int, int]]) -> Gathered:
    """What these positions, received long ago, leave in hand."""
    part = Gathered(Assignment(Claim(Partition("ns", "hub", 0), 1, "run"), untried()), Bounds(10, 10, 1.0), 0, doubted=doubted)
    columns: dict[str, Any] = {name: [None] * len(come) for name in rows.SCHEMA.names}
    (came,) = pa.table({**columns, "sequence_number": come}, rows.SCHEMA).to_batches()
    assert part.order is not None
    part._keep(part.order.add(came, -100.0), 0.0)
    return part
