"""`make bench-smoke`: a few small batches of the contests, with bounds so loose that only a real regression crosses them.

A bound is at most half of what the contests show, and what crosses it is measured again: every run has to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from rich.console import Console

from benchmarks import report
from benchmarks.report import Measure
from benchmarks.run import run
from benchmarks.stream import Sizes

SIZES = Sizes(events=20_000, batches=7, warm=4, rounds=2, empty=5)

BOUNDS = {
    "commit_path": {"postgres/commit_path_vs_copy": 0.3},
    "postgres": {"postgres/jdbc_append": 0.3, "postgres/on_conflict": 0.8, "postgres/staged_on_conflict": 0.5},
    "delta": {"delta/append_txn": 0.8, "delta/append": 0.4},
    "postgres_empty": {"postgres/empty_batch": 5.0},
    "delta_empty": {"delta/empty_batch": 6.0},
}
"""Part -> measure -> the least ratio, or the largest where smaller is better."""

TRIES = 3


def misses(measures: list[Measure], bounds: Mapping[str, float]) -> list[Measure]:
    """Those that miss their bound. Raises KeyError for a bound of no measure."""
    by_name = {m.measure: m for m in measures}
    found = [(by_name[name], bound) for name, bound in bounds.items()]
    return [m for m, bound in found if (m.ratio < bound if m.better == "higher" else m.ratio > bound)]


def guard(measured: Callable[[str], list[Measure]], tries: int = TRIES) -> tuple[list[Measure], list[Measure]]:
    """What was measured last, and of that what missed its bound each time.

    Args:
        measured: a part -> its measures.
    """
    told: list[Measure] = []
    missed: list[Measure] = []
    for part, bounds in BOUNDS.items():
        for left in reversed(range(tries)):
            measures = measured(part)
            if not (again := misses(measures, bounds)) or not left:
                break
        told += measures
        missed += again
    return told, missed


def measured(part: str) -> list[Measure]:
    """The measures of a part; what they are is told at once, so that somebody who waits sees that it goes on."""
    measures = run(SIZES, [part])[0]
    print("\n".join(f"{m.measure} {m.ratio:.2f}" for m in measures), file=sys.stderr, flush=True)
    return measures


def main() -> None:
    """Print the table; ends with 1 where a bound was missed."""
    measures, missed = guard(measured)
    report.show(measures, {}, Console())
    for m in missed:
        bound = next(bounds[m.measure] for bounds in BOUNDS.values() if m.measure in bounds)
        print(f"{m.measure}: {m.ratio:.2f} in each of {TRIES} runs, {m.better} than {bound} is expected", file=sys.stderr)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
