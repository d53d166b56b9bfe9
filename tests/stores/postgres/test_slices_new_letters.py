"""New letters of slices that tasks commit: the driver tells of them, the task's transaction has their messages. Tasks: local_tasks.py."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import PositionGap, StoreUnavailable
from dedup import Consumer, Encrypt, ParkedGroup, Selection, reprocess
from kit.foreach_kit import bare
from kit.forgetting import places_with
from kit.local_tasks import Tasks, run_in
from kit.orders import batch, event, letters, orders
from kit.outgoing import states
from kit.places import PostgresPlace
from kit.redacting import OLD, SECRET, said

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.full)], ids=["kept", "shuffled"])
def test_letters_of_all_slices_are_told_together(postgres: str, keeps: bool) -> None:
    """Two partitions with one cause are one group; each letter is a message; a batch of which a slice fails has told of the others."""
    place, told = PostgresPlace(postgres), list[ParkedGroup]()
    place.create_sink()
    made = bare(place.store(), on_parked=told.append, letters_to="dead", max_outage=0.0)

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        if "broken" in str(events["data"].to_pylist()):
            raise StoreUnavailable("of everybody")
        tx.reject(events, pa.array([True] * len(events)), "closed")
        return events.slice(0, 0)["data"].combine_chunks().flatten() and pa.table({"id": pa.array([], pa.string())})

    rows = batch(*orders(range(3)), *orders(range(2), partition=1))
    run_in(Tasks(rows, keeps=keeps), made, rows, 0)
    assert [(group.kind, group.letters, group.reason) for group in told] == [("REJECTED", 5, "closed")]
    assert states(place) == {"WAITING": 5} and len(letters(place.store())) == 5
    more = batch(*orders([5]), event(2, "broken", partition=1))
    with pytest.raises(StoreUnavailable):
        run_in(Tasks(more, keeps=keeps), made, more, 1)
    assert [group.letters for group in told] == [5, 1] and states(place) == {"WAITING": 6}


@pytest.mark.full
def test_letters_of_a_batch_with_a_gap_are_told(postgres: str) -> None:
    """A slice commits its letters before the slice of another partition finds a gap, which stops the batch: nobody parks them again."""
    place, told = PostgresPlace(postgres), list[ParkedGroup]()
    place.create_sink()

    def run(made: Consumer, number: int, *events: dict[str, Any]) -> None:
        rows = batch(*events)
        run_in(Tasks(rows, keeps=False), made, rows, number)

    first, later = (bare(place.store(), query=query, on_parked=told.append) for query in ("first", "later"))
    for made in (first, later):
        made.foreach(into="orders")(lambda event, tx: {"id": event.data["id"], "amount": 1 // event.data["amount"]})
    run(first, 0, event(0, "a"), event(0, "b", partition=1))
    run(later, 0, event(1, "c"))
    with pytest.raises(PositionGap):
        run(later, 1, event(2, "bad", 0), event(9, "d", partition=1))
    assert [letter["sequence_number"] for letter in letters(place.store())] == [2]
    assert [(group.kind, group.letters) for group in told] == [("HANDLER_ERROR", 1)]


@pytest.mark.parametrize("keeps", [pytest.param(True, marks=pytest.mark.full), False], ids=["kept", "shuffled"])
def test_letters_of_tasks_are_sealed_in_the_tasks(postgres: str, keeps: bool) -> None:
    """What seals them travels there; no table names the person, and the letters are run on the driver."""
    place = PostgresPlace(postgres)
    place.create_sink()
    for bad in (True, False):
        made = bare(place.store(), redact=Encrypt(OLD), letters_to="dead")

        @made.foreach_arrow(into="orders")
        def load(events: pa.Table, tx: Any, bad: bool = bad) -> pa.Table:
            rows = [row["data"] for row in events.to_pylist()]
            if bad:
                raise ValueError(f"no {SECRET}")
            return pa.Table.from_pylist(rows)

        rows = batch(said(0, "a"), said(0, "b", partition=1))
        run_in(Tasks(rows, keeps=keeps), made, rows, 0)
        assert places_with(place, SECRET) == [] and len(letters(place.store())) == 2
    assert reprocess(Selection(limit=None), made).reprocessed == 2
    assert sorted(row["id"] for row in place.read()) == ["a", "b"]
