"""Purges of reserved keys: every process forgets the same keys, and no key that was reserved later."""

from __future__ import annotations

import datetime as dt
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from checkpoint.holders import take_epoch
from dedup.delta import epoch, keys, transaction
from dedup.delta.key_files import HELD, KeyFolder
from dedup.delta.keys import KeyIndex
from dedup.delta.ledger import Ledger
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.clock import showing
from kit.delta_kit import open_store
from kit.key_kit import column, decide, filled, known, list_of, tomorrow, wrong

pytestmark = pytest.mark.delta


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys make files, and files are joined."""
    for name, value in (("FLUSH_ROWS", 4), ("RUN_ROWS", 24), ("SLICE_ROWS", 5), ("MOST_SMALL", 3)):
        monkeypatch.setattr(keys, name, value)


@pytest.mark.parametrize("second", [129, HELD])
@pytest.mark.parametrize("flush_rows", [1, 100])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_key_that_is_reserved_again_outlives_its_purged_day(tmp_path: Path, second: int, flush_rows: int, at_once: bool) -> None:
    """Rows that a purge has not dropped yet stand beside newer ones of the same key: the next purge takes the old ones alone."""
    index = KeyIndex(KeyFolder(tmp_path), flush_rows=flush_rows, run_rows=24)
    index.forget_before(100)
    for numbers, days in [([1, 2, 1], [50, 50, second])] if at_once else [([1, 2], [50, 50]), ([1], [second])]:
        index.add(column(numbers), np.array(numbers), np.array(days))
    assert len(index) == 2
    index.forget_before(101)
    known, _, held = index.probe(column([1, 2]))
    assert known.tolist() == [True, False] and held[0] == (second == HELD) and len(index) == 1


@pytest.mark.parametrize("before", of_which(1, ["9999-12-31", "tomorrow"]))
def test_a_running_process_forgets_what_was_purged(folder: Path, before: str) -> None:
    """Also in files and while it runs; a key that a letter holds stays known."""
    store = filled(folder, 3)
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    kit.process(store, number, kit.events([1, 2], 100), 1, reject=lambda one: one == 2)
    day = tomorrow() if before == "tomorrow" else dt.date.fromisoformat(before)
    store.purge(kit.NAME, day, by="ann", reason="", although_behind=True)
    for some in (store, open_store(folder)):
        assert known(some) == [] and some.reserved(kit.NAME) == 1
        with some._states.caught_up(kit.NAME) as state:
            assert state.held(pa.array([kit.key_bytes(2)], pa.binary(16))).all()
    decide(store, number, range(50, 53))
    assert known(store) == known(open_store(folder)) == [50, 51, 52] and wrong(store) == []


def test_a_key_that_comes_again_after_a_purge_that_died_is_no_contradiction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The purge is decided and its rows are still there: the key counts as new, and `verify` does not call it reserved twice."""
    store = filled(folder, 2)
    monkeypatch.setattr(Ledger, "drop_reservations", lambda ledger, before: None)
    store.purge(kit.NAME, dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1), by="ann", reason="", although_behind=True)
    number = take_epoch(store, kit.NAME, "again", 1.0, force=True).epoch
    assert known(store) == []
    decide(store, number, range(3))
    assert known(store) == [0, 1, 2] and wrong(store) == []


@pytest.mark.parametrize("files", of_which(1, [False, True]))
def test_all_processes_forget_the_same_keys_in_a_purge_that_is_not_done(folder: Path, monkeypatch: pytest.MonkeyPatch, files: bool) -> None:
    """The purge is decided and its rows are still there: who starts then knows what a running process knows, and so does a second one
    that sees the purge and later reservations at once. Those of its own day that came later count.
    """
    one = filled(folder, 2)
    two = open_store(folder)
    assert known(two) == list(range(10))
    number = take_epoch(one, kit.NAME, "again", 1.0, force=True).epoch
    decide(one, number, range(20, 25))
    monkeypatch.setattr(Ledger, "drop_reservations", lambda ledger, before: None)
    one.purge(kit.NAME, tomorrow(), by="ann", reason="", although_behind=True)
    decide(one, number, [*range(3), *range(30, 35)])
    if not files:
        shutil.rmtree(list_of(folder).parent)
    for some in (one, two, open_store(folder)):
        assert known(some) == [*range(3), *range(30, 35)] and some.reserved(kit.NAME) == 8 and wrong(some) == []
    one.purge(kit.NAME, tomorrow() + dt.timedelta(days=1), by="ann", reason="", although_behind=True)
    assert known(one) == known(two) == known(open_store(folder)) == []


@pytest.mark.parametrize("behind", [False, True])
def test_a_purge_drops_nothing_that_was_reserved_after_it(folder: Path, monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    """A batch is decided between the purge and the dropping of its rows, on a day that is purged: a start knows its keys.

    The day is today, where a person purges up to tomorrow; or two days ago, by the clock of a host that is behind.
    """
    one, two, drop = filled(folder, 2), open_store(folder), Ledger.drop_reservations
    number = take_epoch(one, kit.NAME, "again", 1.0, force=True).epoch

    def later(ledger: Ledger, before: dt.date) -> None:
        decide(two, number, range(20, 25))
        drop(ledger, before)

    monkeypatch.setattr(Ledger, "drop_reservations", later)
    monkeypatch.setattr(epoch, "STREAM_WAIT", 0.1)  # the batch is decided in the thread whose turn it would wait for
    if behind:
        monkeypatch.setattr(transaction, "dt", showing(lambda zone: dt.datetime.now(zone) - dt.timedelta(days=2)))
    one.purge(kit.NAME, tomorrow() - dt.timedelta(days=behind), by="ann", reason="", although_behind=True)
    shutil.rmtree(list_of(folder).parent)
    old = list(range(10)) if behind else []
    assert known(one) == known(open_store(folder)) == [*old, *range(20, 25)]
