"""`make bench-growth` and its plot at tiny sizes. How long anything takes is not looked at."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.delta
def test_growth_is_of_real_batches_beside_as_many_reservations_as_asked(spark: SparkSession, postgres: str, tmp_path: Path) -> None:
    """Every size and layout gets the same batches, sinks are verified, by hand only up to its limit; a lost order does not pass."""
    from benchmarks import growth
    from benchmarks import postgres as ways
    from benchmarks.run import server

    sizes = growth.Growth((300, 1200), by_hand=300, table=500, more=True, one_table=True, events=40, batches=2, warm=1)
    with server() as dsn:
        points = growth.on_postgres(spark, dsn, tmp_path / "postgres", sizes)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="expected"):
            patch.setattr(ways, "INSERT_STAGED", ways.INSERT_STAGED.replace("ON CONFLICT", "LIMIT 39 ON CONFLICT"))
            growth.on_postgres(spark, dsn, tmp_path / "again", sizes)
    points += growth.on_delta(spark, tmp_path / "delta", sizes)
    assert {(p.store, p.way, p.reservations) for p in points} == {
        ("postgres", "dedup", 300),
        ("postgres", "dedup, just started", 300),
        ("postgres", "staged ON CONFLICT", 300),
        ("postgres", "dedup", 1200),
        ("postgres", "dedup, never rotated", 1200),
        ("postgres", "dedup, just started", 1200),
        ("delta", "dedup", 300),
        ("delta", "MERGE", 300),
        ("delta", "dedup", 1200),
    }
    assert [(m.measure, m.unit, m.better) for m in growth.measures(points, 40)] == [
        ("postgres/growth", "events/s", "higher"),
        ("delta/growth", "s", "lower"),
    ]


def test_growth_compares_the_largest_size_with_the_smallest() -> None:
    """Twice the seconds are half the throughput on PostgreSQL and twice the time on Delta; other ways do not count."""
    from benchmarks.growth import Point, measures

    points = [Point(s, "dedup", n, seconds, 1) for s in ("postgres", "delta") for n, seconds in ((9, 2.0), (1, 1.0), (5, 7.0))]
    assert [m.ratio for m in measures([*points, Point("delta", "MERGE", 99, 50.0, 1)], 50_000)] == [0.5, 2.0]


def test_points_of_one_store_stay_when_the_other_is_measured(tmp_path: Path) -> None:
    """A run of one store replaces that store's points, and only those."""
    from benchmarks.growth import Point, save

    file, old = tmp_path / "growth.json", [Point("postgres", "dedup", 1, 1.0, 1), Point("delta", "dedup", 1, 1.0, 1)]
    save(old, file)
    save([Point("delta", "dedup", 7, 2.0, 1)], file)
    assert json.loads(file.read_text()) == [asdict(old[0]), asdict(Point("delta", "dedup", 7, 2.0, 1))]


def test_the_plot_shows_every_way_that_was_measured(tmp_path: Path) -> None:
    """One panel a store and one of memory, drawn the same each time."""
    pytest.importorskip("matplotlib")
    from benchmarks.growth import Point
    from benchmarks.plot import draw

    growth = [asdict(Point("postgres", way, n, 0.5, 1)) for way in ("dedup", "by hand") for n in (10, 100)]
    latest = [{"measure": f"{store}/driver_memory_{n}k", "ours": 9.0, "other": 3.0} for store in ("postgres", "delta") for n in (10, 50)]
    for name in ("one.svg", "two.svg"):
        draw(growth, latest, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    drawn = (tmp_path / "one.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    assert all(label in drawn for label in ("PostgreSQL", "by hand", "toArrow alone", "dedup, Delta"))


def test_packed_keys_are_measured_beside_rows(postgres: str) -> None:
    """`benchmarks.packed` at a tiny size: pages answer as rows do, and are smaller."""
    from benchmarks import packed

    told, _ = packed.compare(postgres, packed.Packed(20_000, 5_000, 500, 3))
    assert [one.measure for one in told] == [
        "postgres/bytes_per_packed_key",
        "postgres/packed_lookup_0m",
        "postgres/packed_first_0m",
        "postgres/packed_known_0m",
    ]
    assert told[0].ours < told[0].other / 2


@pytest.mark.delta
def test_batches_beside_an_upkeep_are_verified(postgres: str, tmp_path: Path) -> None:
    """`benchmarks.purges` at a tiny size: each round forgets one portion of keys, batches run beside it, and a key too few is seen."""
    from benchmarks import purges

    sizes = purges.Purges(3000, 1000, events=40, rounds=2, batches=2)
    for measures, seconds in (purges.on_postgres(postgres, sizes), purges.on_delta(tmp_path, sizes)):
        (measure,) = measures
        store, name = measure.measure.split("/")
        assert (name, measure.unit, measure.better) == ("purge_beside", "s", "lower")
        assert len(seconds[f"{store}, alone"]) == 4 and len(seconds[f"{store}, beside"]) >= 2 == len(seconds[f"{store}, the upkeep itself"])
    with purges.closing(purges.delta.store(tmp_path)) as store, pytest.raises(AssertionError, match="keys of each portion"):
        purges._verify(store, sizes._replace(rounds=1), 3)


def test_a_measured_start_knows_all_keys(benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks.restart` at a tiny size: the starts answer right with files and without, and the value stands in `ratio`."""
    from benchmarks import restart

    monkeypatch.setattr("dedup.delta.keys.FLUSH_ROWS", 60_000)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (seconds, megabytes), _ = restart.measured(tmp_path, 200_000, step=50_000, starts=1)
    assert (seconds.measure, seconds.unit, seconds.ratio) == ("delta/restart_0m_s", "s", seconds.ours)
    assert (megabytes.measure, megabytes.unit) == ("delta/restart_0m_mb", "MB")
    assert not (tmp_path / "keys").exists()
