"""Events that run out of time, on every store: which of them are slow by themselves, which are tried again, and what stops the stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import BudgetExceeded
from deadletter.letter import Kind
from deadletter.policy import lift_budget
from dedup import Retry
from dedup.consumer import Consumer
from dedup.core.store import Store
from kit.orders import assert_proven, batch, consumer, event, flatten, letters, orders
from kit.places import Place

PAIRS = {10 * n + d for n in range(6) for d in (3, 4)}
"""Amounts of slow orders: neighbours, six times."""

TRIES = 2


def slow_for(store: Store, slow: Iterable[int], runs: list[list[int]], bad: Iterable[int] = ()) -> Consumer:
    """Its handler runs out of time for some amounts, and fails in another way for others."""

    def handler(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        runs.append(flat["amount"].to_pylist())
        tx.write(flat, "orders")
        if {*bad} & {*runs[-1]}:
            raise KeyError("bad")
        if {*slow} & {*runs[-1]}:
            raise TimeoutError("slow")

    made = consumer(store, retry=Retry(attempts=TRIES, first=0, longest=0))
    made._handler = handler
    return made


def test_slow_neighbours_are_parked_after_one_more_try_however_many_there_are(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """All pairs of slow events of a chunk are found in one try and parked in the next one, and the log says why there were two."""
    runs: list[list[int]] = []
    report = slow_for(place.store(), PAIRS, runs)(batch(*orders(range(60))), 0)
    assert (report.dead_lettered, report.processed, len(place.read())) == (12, 48, 48)
    assert {runs.count([amount]) for amount in PAIRS} == {2 * TRIES}
    assert "12 events ran out of time" in caplog.text and "another commit" not in caplog.text
    assert_proven(place.store())


def test_slow_events_that_a_person_admits_are_not_tried_once_more(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """After `dedup budget lift` they are parked at once, also more of them in a row than would be an outage."""
    runs: list[list[int]] = []
    slow = [3, 4, *range(6, 13)]
    run = slow_for(place.store(), slow, runs)
    run(batch(event(0, "first", 0)), 0)
    place.store().amend("shop", lambda head: lift_budget(head, 20, Kind.HANDLER_ERROR), by="ann", reason="known")
    assert run(batch(*orders(range(1, 20))), 1).dead_lettered == len(slow)
    assert {runs.count([amount]) for amount in slow} == {TRIES} and "ran out of time" not in caplog.text


@pytest.mark.full
def test_what_fails_in_another_way_is_no_time_out(place: Place) -> None:
    """Four bad events and a slow one behind them are parked; five slow ones are an outage, although a bad one lies between them."""
    bad, slow = [1, 2, 3, 4, 9], [5, 6, 7, 8, 10]
    run = slow_for(place.store(), slow, [], bad)
    for number in range(10):
        assert run(batch(event(number, f"o{number}", number)), number).dead_lettered == (number > 0)
    with pytest.raises(BudgetExceeded, match="5 events in a row run out of time"):
        run(batch(event(10, "o10", 10)), 10)
    assert len(letters(place.store())) == 9
