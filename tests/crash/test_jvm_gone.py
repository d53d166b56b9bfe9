"""Spark's JVM dies while the handler of a single event runs: that event is not the cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from crash import child
from crash.drivers import Driver, Garage
from fixtures.fix_places import BOTH, of_stores
from kit.orders import assert_proven, batch, event, letters
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


def _dies_and_goes_on(garage: Garage, place: Place, folder: Path, *, in_tasks: bool, at: int) -> None:
    child.create_others(place)
    (folder / "landing").mkdir()
    pq.write_table(batch(event(0, "only", body=json.dumps({"id": "only", "amount": 5}).encode())), folder / "landing/0.parquet")
    code, said = _start(garage, place, folder, in_tasks=in_tasks, dies_at=at).wait()
    assert code != 0, said
    assert letters(place.store()) == []
    _start(garage, place, folder, in_tasks=in_tasks, dies_at=None).finish()
    assert [(row["id"], row["amount"]) for row in place.read("orders")] == [("only", 5)]
    assert letters(place.store()) == []
    assert_proven(place.store())


@pytest.mark.parametrize(
    ("place", "at"),
    [*of_stores({"postgres": [5]}), *of_stores({"postgres": CALLS, "delta": CALLS[::4]}, full=True)],
    indirect=["place"],
)
def test_a_jvm_that_dies_parks_no_event_of_a_handler_of_frames(at: int, garage: Garage, place: Place, tmp_path: Path) -> None:
    """Whatever the handler makes of the call that broke off, the only event of a batch is handled after a restart."""
    _dies_and_goes_on(garage, place, tmp_path, in_tasks=False, at=at)


@pytest.mark.full
@pytest.mark.parametrize("place", BOTH, indirect=True)
def test_a_jvm_that_dies_parks_no_event_of_a_handler_in_tasks(garage: Garage, place: Place, tmp_path: Path) -> None:
    """The same where the job that runs the handler breaks off."""
    _dies_and_goes_on(garage, place, tmp_path, in_tasks=True, at=0)
