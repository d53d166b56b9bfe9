"""Numbers as people and programs read them: one table, latest.json, and the machine they are of."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from benchmarks.stream import INSIDE, Seconds, middle
from dedup.spark.session import DELTA, JDBC

PARTS = ("pyspark", "deltalake", "pyarrow", "psycopg", "pgpq", "datafusion")


@dataclass(frozen=True)
class Measure:
    """One line of latest.json. `ratio` is ours / other: with `better` higher, above 1 means that ours is faster."""

    measure: str
    ours: float
    other: float
    unit: str
    ratio: float
    better: Literal["higher", "lower"]


def throughput(measure: str, ours: list[float], other: list[float], events: int) -> Measure:
    """Events a second, from the medians of seconds a batch."""
    mine, theirs = events / middle(ours), events / middle(other)
    return Measure(measure, round(mine), round(theirs), "events/s", round(mine / theirs, 2), "higher")


def latency(measure: str, ours: list[float], other: list[float]) -> Measure:
    """Milliseconds of a batch, medians."""
    mine, theirs = 1000 * middle(ours), 1000 * middle(other)
    return Measure(measure, round(mine, 1), round(theirs, 1), "ms", round(mine / theirs, 2), "lower")


def slowness(measure: str, ours: list[float], other: list[float]) -> Measure:
    """Seconds of a batch, medians."""
    mine, theirs = middle(ours), middle(other)
    return Measure(measure, round(mine, 3), round(theirs, 3), "s", round(mine / theirs, 2), "lower")


def size(measure: str, ours: float, other: float) -> Measure:
    """Bytes of one row."""
    return Measure(measure, round(ours, 1), round(other, 1), "bytes", round(ours / other, 2), "lower")


def memory(measure: str, ours: list[float], other: list[float]) -> Measure:
    """Megabytes held at most, medians."""
    mine, theirs = middle(ours), max(middle(other), 0.1)
    return Measure(measure, round(mine, 1), round(theirs, 1), "MB", round(mine / theirs, 2), "lower")


def show(measures: Sequence[Measure], spread: Seconds, console: Console) -> None:
    """The table, and the machine below it.

    Args:
        spread: seconds a batch of everything that was run.
    """
    table = Table(caption=machine(), caption_justify="left")
    table.add_column("measure")
    for name in ("ours", "other", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    for m in measures:
        digits = {"s": 2, "ms": 1, "bytes": 1, "MB": 1}.get(m.unit, 0)
        table.add_row(m.measure, f"{m.ours:,.{digits}f}", f"{m.other:,.{digits}f}", f"{m.ratio:.2f}", f"{m.unit}, {m.better} is better")
    console.print(table)
    console.print(_seconds({way: taken for way, taken in spread.items() if INSIDE not in way}))
    for of in dict.fromkeys(way.split(INSIDE)[0] for way in spread if INSIDE in way):
        console.print(_steps(of, {way.split(INSIDE)[1]: taken for way, taken in spread.items() if way.startswith(of + INSIDE)}))


def _seconds(spread: Seconds) -> Table:
    seconds = Table(caption="Seconds a batch: median, quickest and slowest")
    seconds.add_column("way")
    for name in ("median", "min", "max", "batches"):
        seconds.add_column(name, justify="right")
    for way, taken in spread.items():
        seconds.add_row(way, *(f"{x:.3f}" for x in (middle(taken), min(taken), max(taken))), str(len(taken)))
    return seconds


def _steps(of: str, spread: Seconds) -> Table:
    steps = Table(caption="Milliseconds of a batch, medians")
    steps.add_column(of)
    steps.add_column("ms", justify="right")
    for step, taken in spread.items():
        steps.add_row(step, f"{1000 * middle(taken):,.0f}")
    return steps


def save(measures: Sequence[Measure], path: Path) -> None:
    """latest.json. Crash: the old file is there or the new one."""
    text = json.dumps([asdict(m) for m in measures], indent=1)
    path.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def merge(measures: Sequence[Measure], path: Path) -> None:
    """Put these into latest.json, in place of those of their names; the others stay. Crash: as `save`."""
    old = [Measure(**line) for line in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    new = {m.measure: m for m in measures}
    kept = [new.pop(m.measure, m) for m in old]
    save([*kept, *new.values()], path)


def machine() -> str:
    """What the numbers were made on, in one line."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = ", ".join([*(f"{name} {version(name)}" for name in PARTS), DELTA, JDBC])
    busy = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores ({cpu}), {memory:.0f} GB, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{parts}; load average at the end {busy:.1f}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
