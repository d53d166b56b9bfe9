"""Time-outs of a handler's own SQL, with a real lock: each event has its own retries, and what hits everybody parks nobody."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from checkpoint.errors import BudgetExceeded
from deadletter.letter import Kind
from deadletter.policy import lift_budget
from dedup import Retry
from dedup.pipeline.attempts import IN_A_ROW, Brownout
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, flatten, ids, letters, orders
from kit.places import PostgresPlace

RUN_SECONDS = 10.0
"""What each run of the handler takes by the clock of these tests: four of them use up the 30 s of `Retry.total`."""

TRIES = 4


class Bank:
    """Orders lock their account for a moment; somebody else holds some of the accounts."""

    def __init__(self, place: PostgresPlace, holder: psycopg.Connection) -> None:
        self.place, self.holder, self.now = place, holder, 0.0
        self.runs: list[list[str]] = []
        place.create_sink()
        place.execute("CREATE TABLE account (id text PRIMARY KEY); INSERT INTO account SELECT 'p0-' || n FROM generate_series(0, 99) n")

    def hold(self, numbers: Collection[int]) -> None:
        """Lock these accounts."""
        self.holder.execute("SELECT FROM account WHERE id = ANY(%s) FOR UPDATE", [[f"p0-{n}" for n in numbers]])

    def consumer(self, free: Callable[[list[list[str]]], bool] = lambda runs: False, **settings: Any) -> Any:
        """Its handler waits 5 ms for each account; the accounts are let go once `free` is true of the runs so far."""

        def handler(rows: pa.Table, tx: Any) -> None:
            asked = flatten(rows)["id"].to_pylist()
            self.runs.append(asked)
            self.now += RUN_SECONDS
            if free(self.runs):
                self.holder.rollback()
            tx.connection.execute("SET LOCAL lock_timeout = '5ms'")
            tx.connection.execute("SELECT FROM account WHERE id = ANY(%s) FOR UPDATE", [asked])
            tx.write(flatten(rows), "orders")

        made = consumer(self.place.store(), retry=Retry(first=0, longest=0), **settings)
        made._handler = handler
        made.on_failure = replace(made.on_failure, clock=lambda: self.now)
        return made

    def alone(self, number: int) -> int:
        """How often this event was tried by itself."""
        return self.runs.count([f"p0-{number}"])


@pytest.fixture
def bank(postgres: str) -> Iterator[Bank]:
    """A bank in a database of its own."""
    with psycopg.connect(postgres) as holder:
        yield Bank(PostgresPlace(postgres), holder)


@pytest.mark.postgres
def test_each_event_has_its_own_retries(bank: Bank) -> None:
    """The tries of the whole chunk, or of the event before, take nothing away: an event that passes with its second try is not parked."""
    bank.hold([2, 6])
    run = bank.consumer(lambda runs: runs.count(["p0-6"]) == 2)
    report = run(batch(*orders(range(8))), 0)
    assert [x["idempotence_key"] for x in letters(bank.place.store())] == ["p0-2"]
    assert (report.processed, bank.alone(2), bank.alone(6)) == (7, TRIES, 2)
    assert_proven(bank.place.store())


@pytest.mark.postgres
def test_a_short_brownout_parks_nobody(bank: Bank) -> None:
    """Several events run out of time, then one passes: it was everybody's, and they are tried once more before one is parked."""
    bank.hold(range(8))
    run = bank.consumer(lambda runs: ["p0-3"] in runs)
    assert run(batch(*orders(range(8))), 0).processed == 8
    assert letters(bank.place.store()) == [] and bank.alone(0) == TRIES + 1
    assert ids(bank.place.read("orders")) == [f"p0-{n}" for n in range(8)]


@pytest.mark.full
@pytest.mark.postgres
def test_slow_events_side_by_side_are_parked_and_the_stream_goes_on(bank: Bank) -> None:
    """What runs out of time again, while others pass, is slow by itself."""
    bank.hold([3, 4])
    assert bank.consumer()(batch(*orders(range(8))), 0).processed == 6
    assert [x["idempotence_key"] for x in letters(bank.place.store())] == ["p0-3", "p0-4"]
    assert (bank.alone(3), bank.alone(4)) == (2 * TRIES, 2 * TRIES)


@pytest.mark.postgres
@pytest.mark.parametrize("size", of_which(1, [20, 2]), ids=["in one chunk", "over several batches"])
def test_a_brownout_that_lasts_is_an_outage(bank: Bank, size: int) -> None:
    """After so many events in a row nothing more is parked and the query stops; once it is over, it goes on."""
    bank.hold(range(20))
    run, batches = bank.consumer(), [batch(*orders(range(n, n + size))) for n in range(0, 20, size)]
    with pytest.raises(BudgetExceeded, match=f"(?s){IN_A_ROW} events in a row run out of time.*budget lift shop"):
        for number, rows in enumerate(batches):
            run(rows, number)
    parked = len(letters(bank.place.store()))
    assert parked == (0 if size == 20 else IN_A_ROW - 1) and len(bank.runs) < 40
    bank.holder.rollback()
    assert run(batches[parked // size], parked // size).processed == size
    assert len(letters(bank.place.store())) == parked


@pytest.mark.full
@pytest.mark.postgres
def test_events_that_are_known_to_be_slow_are_parked_where_a_person_says_so(bank: Bank) -> None:
    """`dedup budget lift` admits them, and so does budget=None."""
    bank.hold(range(8))
    assert bank.consumer(budget=None)(batch(*orders(range(8))), 0).dead_lettered == 8
    again = bank.consumer(name="other")
    with pytest.raises(BudgetExceeded):
        again(batch(*orders(range(8))), 0)
    bank.place.store().amend("other", lambda head: lift_budget(head, 8, Kind.HANDLER_ERROR), by="test", reason="known")
    assert again(batch(*orders(range(8))), 0).dead_lettered == 8


def test_one_event_that_runs_out_of_time_is_not_tried_again() -> None:
    """Others pass beside it: it is slow by itself. Of several, those that were tried again are not tried a third time."""
    fresh, tried = Brownout({}), Brownout({1, 2})
    fresh.add(4)
    assert not fresh.passed()
    for row in (1, 2):
        assert not fresh.add(row) and not tried.add(row)
    assert fresh.passed() and not tried.passed()
