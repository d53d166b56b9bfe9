"""Letters that are due by `Retry(later=...)`: run again at their times, and then left to a person."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from dedup import Consumer, ReprocessOptions, Retry, Selection
from dedup.pipeline import attempts
from dedup.reprocessing import letters as reprocessing
from dedup.reprocessing.letters import due_now, reprocess
from kit.clock import showing
from kit.orders import assert_proven, batch, consumer, event, letters
from kit.places import Place

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
LATER = (60, dt.timedelta(minutes=10), 3600)


def at(*minutes: float | None) -> pa.Array:
    """Moments, in minutes from the beginning."""
    return pa.array([None if m is None else START + dt.timedelta(minutes=m) for m in minutes], pa.timestamp("us", tz="UTC"))


def test_a_letter_is_due_once_at_each_time() -> None:
    """A minute after its failure, ten minutes after that, an hour after that; times that passed without a run count as one."""
    lasts = (0, 0, 1, 1, 1.5, 11, 11, 72, 0)
    nows = (0.9, 1, 1, 10.9, 11, 11, 71, 10**6, 10**6)
    expected = [False, True, False, False, True, False, True, False, True]
    found = []
    for last, now in zip(lasts, nows, strict=True):
        row = {"kind": ["HANDLER_ERROR"], "status": ["OPEN"], "first_failed_at": at(0), "last_failed_at": at(last)}
        found += due_now(pa.table(row), LATER, START + dt.timedelta(minutes=now)).to_pylist()
    assert found == expected
    other = {"kind": ["REJECTED", "HANDLER_ERROR"], "status": ["OPEN", "BLOCKED"], "first_failed_at": at(0, 0), "last_failed_at": at(0, 0)}
    assert due_now(pa.table(other), LATER, START + dt.timedelta(days=1)).to_pylist() == [False, False]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[dt.timedelta]:
    """How far the clock of letters is ahead: its only item."""
    ahead = [dt.timedelta(0)]
    for module in (reprocessing, attempts):  # what looks at the clock, and what says when an attempt failed
        monkeypatch.setattr(module, "dt", showing(lambda tz: dt.datetime.now(tz) + ahead[0]))
    return ahead


def job(place: Place, later: Any = LATER, **settings: Any) -> tuple[Consumer, set[str]]:
    """A consumer whose handler raises for some ids."""
    bad = {"b", "c", "d"}

    def handle(rows: Any, tx: Any) -> None:
        flat = [row["data"] for row in rows.to_pylist()]
        if failing := bad & {row["id"] for row in flat}:
            raise ValueError(f"no {sorted(failing)}")
        tx.write(pa.Table.from_pylist(flat, schema=pa.schema([("id", pa.string()), ("amount", pa.int64())])), "orders")

    run = consumer(place.store(), budget=None, retry=Retry(later=later), sequence_key="partition", **settings)
    run._handler = handle
    return run, bad


@pytest.mark.fast_on("postgres")
def test_what_is_due_is_run_again_and_what_fails_waits_for_the_next_time(place: Place, clock: list[dt.timedelta]) -> None:
    """Nothing before its time; a letter that fails waits for the next one; behind the last one a person is needed."""
    run, bad = job(place)
    run(batch(event(0, "a"), event(1, "b", partition=1)), 0)

    def again() -> tuple[int, int]:
        done = reprocess(Selection(), run, due=True)
        return done.reprocessed, done.failed

    assert again() == (0, 0)
    clock[0] = dt.timedelta(seconds=61)
    assert reprocess(Selection(), run, due=True, dry_run=True).selected == 1
    assert [again(), again()] == [(0, 1), (0, 0)]
    clock[0] = dt.timedelta(minutes=12)
    assert [again(), again()] == [(0, 1), (0, 0)]
    clock[0] = dt.timedelta(minutes=80)
    bad.clear()
    assert [again(), again()] == [(1, 0), (0, 0)]
    assert [letter["status"] for letter in letters(place.store())] == ["REPROCESSED"]
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_letters_behind_one_that_is_due_are_run_in_order(place: Place, clock: list[dt.timedelta]) -> None:
    """The letter behind it is BLOCKED and never due; it runs when the one before it has passed."""
    run, bad = job(place)
    run(batch(event(0, "b"), event(1, "x"), event(2, "y")), 0)
    assert [x["status"] for x in letters(place.store())] == ["OPEN", "BLOCKED", "BLOCKED"]
    clock[0] = dt.timedelta(minutes=2)
    bad.clear()
    look = reprocess(Selection(), run, due=True, dry_run=True)
    assert (look.selected, look.behind) == (1, 2)
    assert reprocess(Selection(), run, due=True).reprocessed == 3
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_letters_that_are_too_old_keep_no_others_from_running(place: Place, clock: list[dt.timedelta]) -> None:
    """They stay due for ever and stand first: they are no part of what a limit allows, nor of what is selected, and counted once."""
    run, bad = job(place, reprocess_within=dt.timedelta(days=1))
    run(batch(event(0, "b"), event(1, "c", partition=1)), 0)
    clock[0] = dt.timedelta(days=2)
    run(batch(event(2, "d", partition=2)), 1)
    clock[0] += dt.timedelta(seconds=61)
    bad.clear()
    for dry_run, reprocessed in ((True, 0), (False, 1)):
        done = reprocess(Selection(), run, due=True, dry_run=dry_run, options=ReprocessOptions(limit=2))
        assert (done.selected, done.expired, done.reprocessed, done.tried) == (1, 2, reprocessed, reprocessed)
    assert [letter["status"] for letter in letters(place.store())] == ["OPEN", "OPEN", "REPROCESSED"]
    assert_proven(place.store())


def test_a_time_at_which_an_event_may_still_be_tried_is_refused() -> None:
    """A letter that is parked after all its times would never be due, and nobody would be told."""
    for wrong in ({"attempts": 10, "total": 300, "later": [60]}, {"later": [dt.timedelta(seconds=30)]}):
        with pytest.raises(ConfigError, match=r"longer than total="):
            Retry(**wrong)
    for right in ({"total": 300, "later": [301, 60]}, {"attempts": 1, "total": 300, "later": [60]}, {"total": 300}):
        Retry(**right)


def test_nothing_is_due_without_times(place: Place) -> None:
    """The error says how to give them; kinds that are never due are refused."""
    run, _ = job(place, ())
    with pytest.raises(ConfigError, match=r"Retry\(later=\[60, 600, 3600\]\)"):
        reprocess(Selection(), run, due=True)
    run, _ = job(place)
    with pytest.raises(ConfigError, match="HANDLER_ERROR are ever due"):
        reprocess(Selection(kind="REJECTED"), run, due=True)
    for wrong in (60, [0], ["1m"], [-1], [float("nan")]):
        with pytest.raises(ConfigError, match="later"):
            Retry(later=wrong)  # type: ignore[arg-type]
