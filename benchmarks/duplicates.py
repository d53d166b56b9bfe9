"""The contests again with other shares of duplicates than 1 %, and with ten times as many events a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import delta, postgres
from benchmarks.report import Measure
from benchmarks.stream import Seconds, Sizes

SHARES = (0.0, 0.5)

LARGE = "_500k"
"""Ends the names of measures with large batches; `delta_large` has those of Delta with the usual share."""


def compare(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """The measures of both contests without duplicates and with half of them, its name with the share in percent. Verified as these are."""
    measures, seconds = [], Seconds()
    for share in SHARES:
        found, taken = _contests(spark, folder, dsn, replace(sizes, duplicates=share), _of(share))
        measures += found
        seconds |= taken
    return measures, seconds


def compare_large(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """The same with large batches, a fifth of them, PostgreSQL with the usual share, too. Verified as these are."""
    large = replace(sizes, events=sizes.large, batches=max(sizes.batches // 5, 2), warm=max(sizes.warm // 5, 1))
    measures, seconds = _contests(spark, folder, dsn, large, LARGE, on_delta=False)
    for share in SHARES:
        found, taken = _contests(spark, folder, dsn, replace(large, duplicates=share), LARGE + _of(share))
        measures += found
        seconds |= taken
    return measures, seconds


def _of(share: float) -> str:
    return f"_duplicates_{100 * share:.0f}"


def _contests(spark: Any, folder: Path, dsn: str, sizes: Sizes, ending: str, *, on_delta: bool = True) -> tuple[list[Measure], Seconds]:
    from benchmarks.run import database

    own = folder / ending.strip("_")
    own.mkdir()
    with database(dsn) as place:
        parts = [postgres.compare(spark, place, own / "postgres", sizes)]
    if on_delta:
        parts.append(delta.compare_appends(spark, own / "delta", sizes))
    measures = [replace(m, measure=m.measure + ending) for found, _ in parts for m in found]
    return measures, {f"{ending.strip('_')}, {way}": values for _, taken in parts for way, values in taken.items()}
