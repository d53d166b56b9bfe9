"""Spark's JVM dies while the handler of a single event runs: that event is not the cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crash import child
from crash.drivers import Driver, Garage
from fixtures.fix_places import BOTH, of_stores
from kit.orders import assert_proven, batch, consumer, event, letters
from kit.places import Place

pytestmark = [pytest.mark.crash, pytest.mark.spark]

CALLS = (1, -5, 20, -20, 40, -40, 90, -90, 200, 400, -400, 700)
"""Of py4j, from the first one of the handler. A negative one is under way."""

LINGERS = 1.5
"""Seconds that a process goes on whose main thread knows already that the query has failed: the handler's thread may still decide."""


@pytest.fixture
def garage(tmp_path: Path) -> Iterator[Garage]:
    """Drivers that end with the test."""
    with closing(Garage(tmp_path)) as made:
        yield made


def _start(garage: Garage, place: Place, folder: Path, *, in_tasks: bool, dies_at: int | None) -> Driver:
    task = {"kind": place.kind, "place": place.where, "patience": 0.0, "started": str(folder / "mark"), "takeover": False}
    where = {"query": str(folder / "query"), "landing": str(folder / "landing")}
    return garage.start({**task, **where, "in_tasks": in_tasks, "jvm_dies_at": dies_at, "lingers": LINGERS, "tells_nothing": True})


def _dies(garage: Garage, place: Place, folder: Path, *, in_tasks: bool, at: int) -> pa.Table:
    """The rows that its batch has, none of which is a letter."""
    child.create_others(place)
    (folder / "landing").mkdir()
    rows = batch(event(0, "only", body=json.dumps({"id": "only", "amount": 5}).encode()))
    pq.write_table(rows, folder / "landing/0.parquet")
    code, said = _start(garage, place, folder, in_tasks=in_tasks, dies_at=at).wait()
    assert code != 0, said
    assert letters(place.store()) == []
    return rows


def _is_written_once(place: Place) -> None:
    assert [(row["id"], row["amount"]) for row in place.read("orders")] == [("only", 5)]
    assert letters(place.store()) == []
    assert_proven(place.store())


@pytest.mark.parametrize("place", BOTH[:1], indirect=True)
def test_a_jvm_that_dies_while_frames_are_handled_parks_no_event(garage: Garage, place: Place, tmp_path: Path) -> None:
    """The only event of a batch is not the cause: a process without Spark handles it, and that once."""
    rows = _dies(garage, place, tmp_path, in_tasks=False, at=5)
    run = consumer(place.store(), budget=None)
    run._handler = child.handle_all
    assert run(rows, 0).processed == 1
    _is_written_once(place)


@pytest.mark.full
@pytest.mark.parametrize(("place", "at"), of_stores({"postgres": CALLS, "delta": CALLS[::4]}), indirect=["place"])
def test_a_jvm_that_dies_parks_no_event_of_a_handler_of_frames(at: int, garage: Garage, place: Place, tmp_path: Path) -> None:
    """Whatever the handler makes of the call that broke off, the only event of a batch is handled after a restart."""
    _dies(garage, place, tmp_path, in_tasks=False, at=at)
    _start(garage, place, tmp_path, in_tasks=False, dies_at=None).finish()
    _is_written_once(place)


@pytest.mark.full
@pytest.mark.parametrize("place", BOTH, indirect=True)
def test_a_jvm_that_dies_parks_no_event_of_a_handler_in_tasks(garage: Garage, place: Place, tmp_path: Path) -> None:
    """The same where the job that runs the handler breaks off."""
    _dies(garage, place, tmp_path, in_tasks=True, at=0)
    _start(garage, place, tmp_path, in_tasks=True, dies_at=None).finish()
    _is_written_once(place)
