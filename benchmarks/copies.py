"""The contests again with no copies among the events, and with half of them copies; 1 % is what the others measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import delta, postgres
from benchmarks.report import Measure
from benchmarks.stream import Seconds, Sizes

SHARES = (0.0, 0.5)


def compare(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Every measure of both contests for each share, its name with the share in percent. Verified as these are."""
    from benchmarks.run import database

    measures, seconds = [], Seconds()
    for share in SHARES:
        name, own = f"copies_{100 * share:.0f}", replace(sizes, copies=share)
        (folder / name).mkdir()
        with database(dsn) as place:
            parts = [postgres.compare(spark, place, folder / name / "postgres", own)]
        parts.append(delta.compare_appends(spark, folder / name / "delta", own))
        for found, taken in parts:
            measures += [replace(m, measure=f"{m.measure}_{name}") for m in found]
            seconds |= {f"{way}, {name}": values for way, values in taken.items()}
    return measures, seconds
