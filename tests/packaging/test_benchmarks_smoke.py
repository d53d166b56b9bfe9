"""The guard against regressions of speed: it notices one, and noise is not one. Nothing is timed here."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.report import Measure


pytestmark = pytest.mark.usefixtures("benchmarks")


def measured(part: str, factor: float = 1.0) -> list[Measure]:
    """Measures that are at their bounds, or worse by this factor."""
    from benchmarks.report import Measure
    from benchmarks.smoke import BOUNDS

    lower = part.endswith("_empty")
    return [Measure(n, 1, 1, "", b * factor if lower else b / factor, "lower" if lower else "higher") for n, b in BOUNDS[part].items()]


def test_what_misses_its_bound_each_time_is_told() -> None:
    """A part that is always too slow is measured as often as allowed and named; the others are measured once."""
    from benchmarks.smoke import BOUNDS, guard

    for slow, bounds in BOUNDS.items():
        runs: Counter[str] = Counter()

        def measure(part: str, slow: str = slow, runs: Counter[str] = runs) -> list[Measure]:
            runs[part] += 1
            return measured(part, 1.1 if part == slow else 1.0)

        _, missed = guard(measure, tries=3)
        assert [m.measure for m in missed] == list(bounds)
        assert runs == {part: 3 if part == slow else 1 for part in BOUNDS}


def test_one_slow_run_is_noise() -> None:
    """A bound that is crossed once and kept the next time is kept."""
    from benchmarks.smoke import BOUNDS, guard

    runs: Counter[str] = Counter()

    def measure(part: str) -> list[Measure]:
        runs[part] += 1
        return measured(part, 9.0 if runs[part] == 1 else 1.0)

    told, missed = guard(measure, tries=3)
    assert not missed and len(told) == sum(map(len, BOUNDS.values())) and set(runs.values()) == {2}


def test_bounds_are_of_measures_that_there_are() -> None:
    """Each bound names a part of the benchmarks, and a measure of it that is not measured is an error."""
    from benchmarks.run import PARTS
    from benchmarks.smoke import BOUNDS, misses

    assert set(BOUNDS) <= set(PARTS)
    with pytest.raises(KeyError, match="jdbc_append"):
        misses([], BOUNDS["postgres"])
