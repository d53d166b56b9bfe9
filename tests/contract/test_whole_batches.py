"""A handler that means something else on a part of a batch, as one that aggregates, gets the whole of it, or an error, on every store."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import BatchTooLarge
from checkpoint.position import Partition
from dedup import Consumer
from dedup.core.store import Store
from dedup.pipeline.member import Member
from kit.foreach_kit import bare
from kit.local_tasks import TaskEach, run_in
from kit.orders import assert_proven, batch, consumer, ids, orders
from kit.places import Place, PostgresPlace


def counting(store: Store, most: int, **settings: Any) -> Consumer:
    """Writes one row for each call: how many events it was given."""
    made = bare(store, bisect=False, max_events_per_transaction=most, **settings)

    @made.foreach_batch
    def count(rows: pa.Table, tx: Any) -> None:
        tx.write({"id": f"up to {max(rows['sequence_number'].to_pylist())}", "amount": rows.num_rows}, "orders")

    return made


TOO_LARGE = r"bisect=False .* whole batch .* has 100 events, and max_events_per_transaction is 40. .* 100 or more .*maxOffsetsPerTrigger"


def test_a_batch_that_would_be_cut_is_an_error_before_anything_is_written(place: Place) -> None:
    """The error names the setting, the batch's size and what to do; with room for it the handler gets all of it, once."""
    with pytest.raises(BatchTooLarge, match=TOO_LARGE):
        counting(place.store(), 40)(batch(*orders(range(100))), 0)
    assert place.read() == [] and not place.store().head("shop").checkpoints
    roomy = counting(place.store(), 100)
    assert roomy(batch(*orders(range(100))), 0).processed == 100
    assert roomy(batch(*orders(range(100))), 0).redelivered == 100
    assert place.read() == [{"id": "up to 99", "amount": 100}]
    assert_proven(place.store())


def test_a_handler_that_takes_parts_gets_a_large_batch_in_chunks(place: Place) -> None:
    """With bisect=True, as by default, a batch above the limit is cut, as it always was."""
    run, sizes = consumer(place.store(), max_events_per_transaction=40), []
    run._handler = lambda rows, tx: sizes.append(rows.num_rows)
    assert run(batch(*orders(range(100))), 0).processed == 100
    assert sizes == [40, 40, 20]


def test_a_runner_refuses_a_batch_that_would_be_cut(place: Place) -> None:
    """A process that shares the epoch commits nothing of it either."""
    one = Member(counting(place.store(), 40, query=None).job())
    one.join()
    assignment = one.claim(Partition("broker", "orders", 0))
    with pytest.raises(BatchTooLarge, match=TOO_LARGE):
        one.process(assignment, batch(*orders(range(100))))
    assert place.read() == []
    assert one.process(assignment, batch(*orders(range(40)))).processed == 40
    assert place.read() == [{"id": "up to 39", "amount": 40}]


@pytest.mark.postgres
def test_a_slice_that_would_be_cut_is_an_error_before_any_of_it_is_written(postgres: str) -> None:
    """In tasks the slice of a partition is what a handler gets: one that is too large commits nothing, the others are whole."""
    place = PostgresPlace(postgres)
    place.create_sink()
    events = batch(*orders(range(100)), *orders(range(30), partition=1))
    for most in (40, 100):
        made = bare(place.store(), bisect=False, max_events_per_transaction=most)
        made.foreach_arrow(into="orders")(
            lambda rows, tx: pa.table({"id": [f"p{rows['partition'][0]}"], "amount": pa.array([rows.num_rows], pa.int64())})
        )
        if most == 40:
            with pytest.raises(BatchTooLarge, match=r"whole slice .* has 100 events"):
                run_in(TaskEach(events), made, events)
            assert ids(place.read()) == ["p1"]
        else:
            assert run_in(TaskEach(events), made, events).processed == 100
    assert {x["id"]: x["amount"] for x in place.read()} == {"p0": 100, "p1": 30}
    assert_proven(place.store())
