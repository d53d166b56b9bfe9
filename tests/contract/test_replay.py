"""What is merged keeps the newest row of each key, and what was processed can be replayed: through a merge, never by a second append."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import (
    HandlerError,
    ReprocessStopped,
)
from deadletter.selection import Selection
from dedup.core.envelope import POSITION
from dedup.core.store import Store
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.replay import replay
from kit.orders import BadOrder, assert_proven, batch, consumer, event, flatten, orders, raising, recorded
from kit.places import Place


def merging(store: Store, amount: Callable[[pa.Array], pa.Array] = lambda a: a, **settings: Any) -> Any:
    """A consumer that keeps one row per id, `newer_by` nothing."""
    run = consumer(store, **settings)

    def handler(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        kept = rows.select(list(POSITION)).append_column("id", flat["id"]).append_column("amount", amount(flat["amount"]))
        tx.merge(kept, "balances", "id")

    run._handler = handler
    return run


def test_merge_keeps_the_last_row_of_each_key(place: Place) -> None:
    """By position within a batch and over batches; a replay of the batch changes nothing."""
    place.create_merge_sink("balances")
    events = [event(n, "a" if n % 2 else "b", n) for n in range(6)]
    run = merging(place.store(), idempotence_key="sequence_number")
    run(batch(*events), 0)
    assert place.read("balances") == [{"id": "a", "amount": 5}, {"id": "b", "amount": 4}]
    run(batch(event(6, "a", 60)), 1)
    assert merging(place.store(), idempotence_key="sequence_number")(batch(event(6, "a", 60)), 1).redelivered == 1
    assert place.read("balances") == [{"id": "a", "amount": 60}, {"id": "b", "amount": 4}]
    assert_proven(place.store())


def test_a_late_event_does_not_overwrite_a_newer_one(place: Place) -> None:
    """With newer_by, what was reprocessed late changes nothing; an equal one neither; delete_when deletes."""
    place.create_merge_sink("balances")
    broken = {"on": True}

    def handler(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        if broken["on"] and 1 in flat["amount"].to_pylist():
            raise BadOrder("one")
        gone = pc.equal(flat["amount"], 99)
        tx.merge(flat.append_column("gone", gone), "balances", ["id"], newer_by="amount", delete_when="gone")

    run = consumer(place.store(), idempotence_key="sequence_number")
    run._handler = handler
    run(batch(event(0, "a", 1), event(1, "a", 2), event(2, "b", 7)), 0)
    assert place.read("balances") == [{"id": "a", "amount": 2}, {"id": "b", "amount": 7}]
    broken["on"] = False
    assert reprocess(Selection(), run).reprocessed == 1
    assert place.read("balances") == [{"id": "a", "amount": 2}, {"id": "b", "amount": 7}]
    run(batch(event(3, "b", 99)), 1)
    assert place.read("balances") == [{"id": "a", "amount": 2}]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_replay_repeats_processed_positions_through_merge(place: Place) -> None:
    """A bug in processed rows is repaired: the range is repeated, dead letters and positions outside are left alone."""
    place.create_merge_sink("balances")
    events = [event(n, f"k{n}", n) for n in range(6)]
    wrong = merging(place.store(), lambda a: pc.multiply(a, 100))
    wrong(batch(*events), 0)
    right = merging(place.store())
    right.register_log_reader(recorded(*events))
    asked = Selection(topic="orders", partition=0, first=1, last=4)
    assert (replay(asked, right, dry_run=True).processed, place.read("balances")[1]["amount"]) == (4, 100)
    assert replay(asked, right).replayed == 4
    assert [row["amount"] for row in place.read("balances")] == [0, 1, 2, 3, 4, 500]
    assert right(batch(event(6, "k1", 1)), 1).duplicates == 1
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_replay_refuses_to_append_twice(place: Place) -> None:
    """A handler that appends needs compensate or accept_double; refused, nothing changes."""
    run = consumer(place.store())
    run(batch(*orders(range(3))), 0)
    run.register_log_reader(recorded(*orders(range(3))))
    asked = Selection(topic="orders", first=0, last=2)
    with pytest.raises(HandlerError, match="accept-double"):
        replay(asked, run)
    assert len(place.read()) == 3
    assert replay(asked, run, accept_double=True).replayed == 3
    assert len(place.read()) == 6


@pytest.mark.fast_on("postgres")
def test_replay_takes_the_old_effect_back_first(place: Place) -> None:
    """With compensate the new effect replaces the old one, in one transaction; a replay that fails changes nothing."""
    place.create_merge_sink("balances")
    events = [event(n, f"k{n}", n) for n in range(4)]

    def handler(rows: pa.Table, tx: Any) -> None:
        tx.write(flatten(rows), "balances")

    run = consumer(place.store())
    run._handler = handler
    run(batch(*events), 0)

    @run.compensate
    def take_back(gone: pa.Table, tx: Any) -> None:
        rows = pa.table({"id": gone["idempotence_key"], "amount": pa.nulls(gone.num_rows, pa.int64())})
        tx.merge(rows.append_column("gone", pa.repeat(True, gone.num_rows)), "balances", "id", delete_when="gone")

    run.register_log_reader(recorded(*events))
    run._handler = raising(lambda i: i == "k2")
    with pytest.raises(ReprocessStopped, match="2"):
        replay(Selection(topic="orders", first=0, last=3), run)
    assert [row["amount"] for row in place.read("balances")] == [0, 1, 2, 3]
    run._handler = lambda rows, tx: tx.write(flatten(rows).set_column(1, "amount", pc.add(flatten(rows)["amount"], 10)), "balances")
    assert replay(Selection(topic="orders", first=0, last=3), run).replayed == 4
    assert [row["amount"] for row in place.read("balances")] == [10, 11, 12, 13]
    assert_proven(place.store())
