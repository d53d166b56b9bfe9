"""growth.svg: seconds of a batch against reservations (growth.json), and memory of the driver against batch size (latest.json).

`python -m benchmarks.plot`; needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.stream import Sizes

HERE = Path(__file__).parent

TITLES = {"postgres": "PostgreSQL", "delta": "Delta"}

MERGED = {"delta/merge_1m": 1_000_000, "delta/merge_10m": 10_000_000}

Lines = dict[str, list[tuple[float, float]]]
"""Label -> points."""


def told_by(growth: list[dict[str, Any]], latest: list[dict[str, Any]]) -> str:
    """What the picture says of itself: which numbers it was drawn from."""
    drawn = json.dumps([by_store(growth, latest), memory(latest)], sort_keys=True)
    return f"drawn from numbers {hashlib.sha256(drawn.encode()).hexdigest()[:16]}"


def draw(growth: list[dict[str, Any]], latest: list[dict[str, Any]], path: Path) -> None:
    """One panel for each store, and one for memory. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "dedup"  # the same picture for the same numbers
    panels = [(TITLES[store], "reservations", "seconds a batch of 50,000", lines) for store, lines in by_store(growth, latest).items()]
    if held := memory(latest):
        panels.append(("Memory of the driver's Python", "events a batch", "MB above what it held", held))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False, layout="constrained")
    for axis, (title, x, y, lines) in zip(axes[0], panels, strict=True):
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None, "Description": told_by(growth, latest)})
    pyplot.close(figure)


def by_store(growth: list[dict[str, Any]], latest: list[dict[str, Any]]) -> dict[str, Lines]:
    """The points of growth.json, for each store and way; and MERGE beside the keys of `merge_1m` and `merge_10m`, of their own runs."""
    found: dict[str, Lines] = defaultdict(lambda: defaultdict(list))
    for point in growth:
        found[point["store"]][point["way"]].append((point["reservations"], point["seconds"]))
    for line in latest:
        if keys := MERGED.get(line["measure"]):
            found["delta"]["MERGE, other runs"].append((keys, Sizes.events / line["other"]))
    return found


def memory(latest: list[dict[str, Any]]) -> Lines:
    """The measures of memory in latest.json; what bringing the rows takes is the same for both stores."""
    found: Lines = defaultdict(list)
    for line in latest:
        store, _, name = line["measure"].partition("/")
        if name.startswith("driver_memory_"):
            events = int(name.removeprefix("driver_memory_").replace("k", "000"))
            found[f"dedup, {TITLES[store]}"].append((events, line["ours"]))
            if store == "delta":
                found["toArrow alone"].append((events, line["other"]))
    return found


def main() -> None:
    """Draw what is there."""
    read = (json.loads((HERE / name).read_text(encoding="utf-8")) for name in ("growth.json", "latest.json"))
    draw(*read, HERE / "growth.svg")


if __name__ == "__main__":
    main()
