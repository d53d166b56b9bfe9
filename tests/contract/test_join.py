"""Processes that share one epoch: each commits for the partitions that it has claimed, and for no other."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import uuid
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.changes import Amendment, accept_gap, accept_incarnation, accept_restore, reset
from checkpoint.errors import ConfigError, Fenced, PartitionLost, StillHeld
from checkpoint.head import Holder, Spent
from checkpoint.holders import this_process
from checkpoint.position import Partition
from deadletter.letter import Kind
from dedup.core.store import Store
from dedup.pipeline.member import Member
from dedup.pipeline.tx import Handler
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders
from kit.places import Place

PIDS = itertools.count(1)


def at(partition: int) -> Partition:
    """A partition of the topic of these tests."""
    return Partition("broker", "orders", partition)


def member(store: Store, **settings: Any) -> Member:
    """A process of its own, as far as the store can tell, that has joined."""
    made = Member(consumer(store, query=None, **settings).job())
    made.join()
    return made


def elsewhere() -> Holder:
    """A process that nobody here can look into."""
    return Holder("another-host", next(PIDS), this_process().started, uuid.uuid4().hex)


@pytest.mark.fast_on("delta")
def test_what_a_slice_of_spark_was_trying_does_not_stop_a_runner(place: Place) -> None:
    """A query's task was killed, and a runner goes on with its partition: the note is none of a runner's."""
    one = member(place.store())
    assignment = one.claim(at(0))
    one.process(assignment, batch(*orders(range(3))))
    place.store().set_crash_marker("shop", '{"chunk": "c", "deaths": 1, "dead": [], "running": [0, 2]}', assignment.claim.scope)
    again = one.claim(at(0))
    assert again.hold is None
    assert one.process(again, batch(*orders(range(3, 5)))).processed == 2


def test_two_processes_share_an_epoch(place: Place) -> None:
    """The second one joins without raising the epoch, and both commit, each for its own partition."""
    one, two = member(place.store()), member(place.store())
    assert one.epoch == two.epoch == 1
    left, right = one.claim(at(0)), two.claim(at(1))
    for start in (0, 3, 6):
        assert one.process(left, batch(*orders(range(start, start + 3)))).processed == 3
        assert two.process(right, batch(*orders(range(start, start + 3), partition=1))).processed == 3
    points = {p.partition: c.sequence_number for p, c in place.store().head("shop").checkpoints.items()}
    assert points == {0: 8, 1: 8} and len(place.read()) == 18
    assert_proven(place.store())


def test_a_lost_partition_cannot_commit(place: Place) -> None:
    """Once another process has claimed it, the older claim is refused and nothing of its batch is true; its other partition goes on."""
    one, two = member(place.store()), member(place.store())
    old, other = one.claim(at(0)), one.claim(at(1))
    one.process(old, batch(*orders(range(3))))
    new = two.claim(at(0))
    with pytest.raises(PartitionLost, match="another process claimed partition broker/orders/0"):
        one.process(old, batch(*orders(range(3, 6))))
    assert two.process(new, batch(*orders(range(2, 6)))).processed == 3
    assert one.process(other, batch(*orders(range(2), partition=1))).processed == 2
    assert len(place.read()) == 8
    assert_proven(place.store())


def _handles(one: Member, handler: Handler) -> None:
    one.job = replace(one.job, policy=replace(one.job.policy, handler=handler))


def test_a_partition_lost_in_the_middle_of_a_batch_commits_nothing(place: Place) -> None:
    """The claim comes while the handler runs: it waits for the batch (PostgreSQL), or that batch is planned again and refused (Delta)."""
    one, two = member(place.store()), member(place.store())
    assignment, claimed = one.claim(at(0)), []
    thread = threading.Thread(target=lambda: claimed.append(two.claim(at(0))))
    handle = one.job.policy.handler

    def slow(rows: pa.Table, tx: Any) -> None:
        if not thread.ident:
            thread.start()
            thread.join(timeout=1.5)
        handle(rows, tx)

    _handles(one, slow)
    with contextlib.suppress(PartitionLost):
        one.process(assignment, batch(*orders(range(3))))
    thread.join()
    assert two.process(claimed[0], batch(*orders(range(3)))).delivered == 3
    assert sorted(ids(place.read())) == ["p0-0", "p0-1", "p0-2"]
    assert_proven(place.store())


def test_a_key_in_two_partitions_of_two_processes_counts_once(place: Place) -> None:
    """Reservations are the consumer's, not the process's."""
    one, two = member(place.store()), member(place.store())
    one.process(one.claim(at(0)), batch(event(0, "a", 1)))
    assert two.process(two.claim(at(1)), batch(event(0, "a", 1, partition=1))).duplicates == 1
    assert ids(place.read()) == ["a"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_batch_must_be_of_the_claimed_partition(place: Place) -> None:
    """Events of another partition under a claim are refused before anything is written."""
    one = member(place.store())
    with pytest.raises(ConfigError, match="holds events of broker/orders/1"):
        one.process(one.claim(at(0)), batch(*orders(range(2)), *orders(range(2), partition=1)))
    assert place.read() == []


def test_a_query_that_takes_a_newer_epoch_stops_all_of_them(place: Place) -> None:
    """A single instance fences every process that shares the older epoch: batches and claims."""
    one = member(place.store())
    assignment = one.claim(at(0))
    consumer(place.store(), takeover=True)(batch(*orders(range(2))), 0)
    with pytest.raises(Fenced):
        one.process(assignment, batch(*orders(range(2, 4))))
    with pytest.raises(Fenced):
        one.claim(at(1))
    assert len(place.read()) == 2
    assert_proven(place.store())


def test_a_query_waits_for_processes_that_live(place: Place) -> None:
    """A single instance does not take over while one process shows life; when they have left it goes ahead at once."""
    store = place.store()
    store.join("shop", first := elsewhere(), takeover_after=1.0)
    epoch = store.join("shop", second := elsewhere(), takeover_after=1.0).epoch
    query = consumer(place.store(), takeover_after=1.0)
    with store.heartbeat("shop", epoch, 0.05, second.run_id), pytest.raises(StillHeld):
        query(batch(*orders(range(2))), 0)
    for gone in (first, second):
        store.leave("shop", epoch, gone.run_id)
    waited: list[float] = []
    head = place.store().take_epoch("shop", elsewhere(), takeover_after=30.0, on_wait=lambda seconds, _: waited.append(seconds))
    assert head.epoch == epoch + 1 and not waited


def test_processes_wait_for_a_query_that_lives(place: Place) -> None:
    """Runners do not take a living query's epoch; when it is silent for long enough the first one does, and the next ones join."""
    store = place.store()
    epoch = store.take_epoch("shop", elsewhere(), takeover_after=1.0).epoch
    with store.heartbeat("shop", epoch, 0.05), pytest.raises(StillHeld):
        place.store().join("shop", elsewhere(), takeover_after=1.0)
    found = [place.store().join("shop", elsewhere(), takeover_after=1.0).epoch for _ in range(2)]
    assert found == [epoch + 1, epoch + 1]


@pytest.mark.fast_on("delta")
def test_each_partition_remembers_what_its_own_process_died_of(place: Place) -> None:
    """Markers of what is being tried are kept per partition: the commit of another one does not erase them."""
    store = place.store()
    one = member(store)
    left, right = one.claim(at(0)), one.claim(at(1))
    left.span = (0, 4)
    left.marker.begin("chunk")
    left.marker.mark(pa.array([0, 4]).to_numpy())
    one.process(right, batch(*orders(range(3), partition=1)))
    again = member(place.store()).claim(at(0))
    assert again.hold == 4
    again.marker.begin("chunk")
    assert again.marker.deaths == 1


@pytest.mark.fast_on("postgres")
def test_the_batch_that_a_process_died_in_comes_alone(place: Place) -> None:
    """The next process tries the same rows together, whatever else it has received by then: only so deaths can be counted."""
    store = place.store()
    one = member(store)
    assignment = one.claim(at(0))
    assignment.hold = 2
    one.process(assignment, batch(*orders(range(6))))
    seen = [record["seen"] for record in store.batches("shop").to_pylist()]
    assert seen == [[{"first": 0, "last": 2}], [{"first": 3, "last": 5}]]
    assert_proven(store)


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("change", of_which(1, [lambda head: accept_incarnation(head, "broker", "orders"), accept_restore, reset]))
def test_a_life_that_begins_anew_waits_for_no_batch_of_the_one_before(place: Place, change: Amendment) -> None:
    """A process died in a batch, and a person began the state anew: nothing is held until positions that may never come."""
    one = member(place.store())
    scope = one.claim(at(0)).claim.scope
    _dies_in(one, batch(*orders(range(1000, 1003))))
    assert one.claim(at(0)).hold == 1002
    place.store().amend("shop", change, by="test", reason="created again")
    assert one.claim(at(0)).hold is None
    old = {name: told for name, told in json.loads(place.store().crash_marker("shop", scope) or "").items() if name != "life"}
    place.store().set_crash_marker("shop", json.dumps(old), scope)
    assert one.claim(at(0)).hold is None, "as an older version has noted it"


@pytest.mark.fast_on("postgres")
def test_a_note_of_an_older_version_holds_in_the_first_life(place: Place) -> None:
    """It says of no life; where the state has had but one, it is of that one."""
    one = member(place.store())
    place.store().set_crash_marker("shop", '{"span": [0, 4], "marker": null}', one.claim(at(0)).claim.scope)
    assert one.claim(at(0)).hold == 4


def _dies_in(one: Member, events: pa.Table) -> None:
    """The end of a process in its handler."""

    def die(rows: pa.Table, tx: Any) -> None:
        raise KeyboardInterrupt

    _handles(one, die)
    with pytest.raises(KeyboardInterrupt):
        one.process(one.claim(at(0)), events)


@pytest.mark.fast_on("delta")
def test_failures_of_two_processes_count_together(place: Place) -> None:
    """The budget's clock and failures are the consumer's: two processes that commit side by side add to them."""

    def failing(one: Member) -> None:
        handle = one.job.policy.handler

        def bad(rows: pa.Table, tx: Any) -> None:
            if "bad" in {d["id"] for d in rows["data"].to_pylist()}:
                raise ValueError
            handle(rows, tx)

        _handles(one, bad)

    one, two = member(place.store()), member(place.store())
    for each in (one, two):
        failing(each)
    left, right = one.claim(at(0)), two.claim(at(1))
    one.process(left, batch(*orders(range(3)), event(3, "bad")))
    two.process(right, batch(event(0, "bad", 2, partition=1), *orders(range(1, 3), partition=1)))
    head = place.store().head("shop")
    assert head.spent[Kind.HANDLER_ERROR] == Spent(6, (4,)) and head.spent[Kind.KEY_CONFLICT] == Spent(7, (5,))
    assert [x["kind"] for x in letters(place.store())] == ["HANDLER_ERROR", "KEY_CONFLICT"]


@pytest.mark.fast_on("postgres")
def test_an_accepted_gap_is_not_used_up_by_another_partition(place: Place) -> None:
    """A process speaks for its own partition: what a person accepted stays accepted until it is asked for."""
    one, two = member(place.store()), member(place.store())
    assignment = one.claim(at(0))
    one.process(assignment, batch(*orders(range(3))))
    two.process(two.claim(at(1)), batch(*orders(range(3), partition=1)))
    place.store().amend("shop", accept_gap, by="test", reason="lost")
    one.process(assignment, batch(*orders(range(3, 6))))
    head = place.store().head("shop")
    assert head.gap_accepted and head.checkpoints[at(1)].query_id == two.run_id


@pytest.mark.fast_on("postgres")
def test_a_reset_is_not_passed_over_by_a_process_that_reads_on(place: Place) -> None:
    """After a reset the events before are to come again: a batch from the middle is refused, and the partition has to be claimed again."""
    one = member(place.store())
    assignment = one.claim(at(0))
    one.process(assignment, batch(*orders(range(3))))
    place.store().amend("shop", reset, by="test", reason="again")
    with pytest.raises(PartitionLost, match="began anew"):
        one.process(assignment, batch(*orders(range(3, 6))))
    assert one.process(one.claim(at(0)), batch(*orders(range(6)))).processed == 6
